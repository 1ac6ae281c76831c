"""Decode steps of 8 rows with low-rank adapters: none while some are loaded, the same for all, four different ones.

The first and the last stand beside the same engine without adapters, so their ratio is what adapters cost; one for all
stands beside mlx-lm's BatchGenerator with the model adapted by mlx-lm, which knows no other case. Adapters are
of rank 8 in all linear layers of the last 16 blocks, mlx-lm's defaults.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.drive import BLAS, Peer, engine_for

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from lanes.engine import MlxEngine
from lanes.lane import Chunk, RowSpec, Sampling, Step
from lanes.tuning import backend
from scheduler.adapter_files import CONFIG, WEIGHTS, read_adapter
from tests.bench.harness import bench, interleave
from tests.bench.models import default_model

ROWS = 8
PROMPT_TOKENS = 16
PARAMETERS = {"rank": 8, "scale": 20.0, "dropout": 0.0}
NUM_LAYERS = 16


def write_adapters(folder: Path, model: Any, number: int) -> list[Path]:
    """With small random weights. The model becomes one with an adapter, whose weights are to be loaded."""
    model.freeze()
    linear_to_lora_layers(model, NUM_LAYERS, PARAMETERS)
    shapes = {name: array.shape for name, array in tree_flatten(model.trainable_parameters())}
    folders = [folder / str(index) for index in range(number)]
    for each in folders:
        each.mkdir()
        mx.save_safetensors(
            str(each / WEIGHTS), {name: 0.01 * mx.random.normal(shape) for name, shape in shapes.items()}
        )
        (each / CONFIG).write_text(json.dumps({"num_layers": NUM_LAYERS, "lora_parameters": PARAMETERS}))
    return folders


def tokens_per_s(engine: MlxEngine, adapters: list[str | None], steps: int, warm_up: int) -> float:
    """Of rows that have these, one after another, again and again."""
    prompt = tuple(range(100, 100 + PROMPT_TOKENS))
    specs = [RowSpec(row, prompt, Sampling(), adapter=adapters[row % len(adapters)]) for row in range(ROWS)]
    for spec in specs:
        engine.step(Step(admit=(spec,), chunk=Chunk(spec.row_id, 0, PROMPT_TOKENS - 1)))
    rows = tuple(range(ROWS))
    engine.step(Step(merge=rows))
    rate = _rate(lambda: engine.step(Step()), steps, warm_up)
    engine.step(Step(leave=rows))
    engine.step(Step())
    return rate


def peer_tokens_per_s(model: Any, steps: int, warm_up: int) -> float:
    peer = Peer(model, ROWS)
    generator: Any = peer.generator
    generator.insert([list(range(100, 100 + PROMPT_TOKENS))] * ROWS, [1 << 20] * ROWS)
    while len(generator._generation_batch) < ROWS:
        generator.next()
    return _rate(generator.next, steps, warm_up)


def _rate(step: Callable[[], object], steps: int, warm_up: int) -> float:
    for _ in range(warm_up):
        step()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return ROWS * steps / (time.perf_counter() - began)


def main() -> None:
    with bench("adapters", __doc__ or "") as run, tempfile.TemporaryDirectory() as folder:
        run.blas = BLAS.sentence
        on_gpu = backend() != "cpu"
        rounds, steps, warm_up = (5, 100, 20) if on_gpu else (3, 8, 2) if run.quick else (5, 20, 3)
        name, peer = default_model()
        folders = write_adapters(Path(folder), peer, 4)
        peer.load_weights(str(folders[0] / WEIGHTS), strict=False)
        peer.eval()
        bare, ours = (engine_for(default_model()[1], ROWS) for _ in range(2))
        digests = [ours.load_adapter(read_adapter(each)).digest for each in folders]

        def beside(other: Callable[[], float], adapters: list[str | None]) -> list[list[float]]:
            own = partial(tokens_per_s, ours, adapters, steps, warm_up)
            return interleave(rounds, "adapters", own, other)

        plain = partial(tokens_per_s, bare, [None], steps, warm_up)
        theirs = partial(peer_tokens_per_s, peer, steps, warm_up)
        case = f"{name}, {ROWS} rows of {PROMPT_TOKENS}"
        run.add(case, "4 loaded, none used, beside none loaded", "tokens/s", *beside(plain, [None]))
        run.add(case, "one for all, beside none loaded", "tokens/s", *beside(plain, [digests[0]]))
        run.add(case, "one for all, beside mlx-lm", "tokens/s", *beside(theirs, [digests[0]]))
        run.add(case, "one for every other row, beside none loaded", "tokens/s", *beside(plain, [digests[0], None]))
        run.add(case, "4 different, beside none loaded", "tokens/s", *beside(plain, [*digests]))


if __name__ == "__main__":
    main()
