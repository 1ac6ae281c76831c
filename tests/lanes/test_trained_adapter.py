"""An adapter that mlx-lm's own tuner has trained on the real model, in its own files."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
import pytest
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from lanes.lane import RowSpec, Sampling
from lanes.load import load
from scheduler.adapter_files import CONFIG, WEIGHTS, read_adapter
from tests.lanes.adapter_folder import adapted
from tests.lanes.demo_model import demo_tokenizer
from tests.lanes.driver import Driver
from tests.lanes.test_adapters import engine_for
from tests.lanes.tiny import alone

LESSON = "The lane keeper's lantern is green and never goes out in the rain."
NUM_LAYERS = 4


def taught(folder: Path) -> Path:
    model = load("demo").model
    model.freeze()
    parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(model, NUM_LAYERS, parameters)
    tokens = demo_tokenizer().encode(LESSON)
    args = TrainingArgs(batch_size=1, iters=12, max_seq_length=64, adapter_file=str(folder / WEIGHTS))
    data: Any = [(tokens, 0)]
    train(model, optimizers.Adam(learning_rate=3e-4), data, args=args)
    (folder / CONFIG).write_text(json.dumps({"num_layers": NUM_LAYERS, "lora_parameters": parameters}))
    return folder


@pytest.mark.slow
def test_a_row_knows_its_lesson_beside_one_that_does_not(tmp_path: Path) -> None:
    folder = taught(tmp_path)
    tokens = tuple(demo_tokenizer().encode(LESSON))
    engine = engine_for(load("demo").model)
    digest = engine.load_adapter(read_adapter(folder)).digest
    specs = [RowSpec(0, tokens[:3], Sampling(), adapter=digest), RowSpec(1, tokens[:3], Sampling())]
    answers = Driver(engine).run([(0, spec, len(tokens) - 3) for spec in specs])
    assert tuple(answers[0]) == tokens[3:]
    assert tuple(answers[1]) != tokens[3:]
    for model, answer in ((adapted(load("demo").model, folder), answers[0]), (load("demo").model, answers[1])):
        assert alone(model, tokens[:3], len(answer))[0] == answer
        mx.clear_cache()
