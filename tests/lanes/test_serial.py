"""The serial lane answers as the batch lane does, one row after another, whatever caches the model has."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import mamba
from mlx_lm.models.cache import RotatingKVCache

from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import eager
from lanes.lane import RowSpec, Sampling
from lanes.serial import SoloCaches
from lanes.solo import RowMaker
from tests.lanes.driver import INFO, Driver, engine_for
from tests.lanes.tiny import VOCABULARY, alone, prompt_of, tiny_llama

MODEL = tiny_llama()


def serial_engine(model: Any) -> MlxEngine:
    caches = SoloCaches()
    return MlxEngine(RowMaker(model), INFO, Decoder(caches, partial(eager, model, caches)))


def one_after_another(engine: MlxEngine, specs: list[RowSpec], tokens: int) -> dict[int, list[int]]:
    """Each row comes when the one before has left, as the scheduler does it with max_rows 1."""
    driver = Driver(engine, chunk_tokens=16)
    for spec in specs:
        driver.run([(0, spec, tokens)])
        assert len(engine.decoder) == 0
        assert engine.gauges().cache_bytes == 0
    return driver.answers


def test_the_serial_lane_answers_as_the_batch_lane() -> None:
    samplings = [Sampling(), Sampling(temperature=1.2, seed=5), Sampling(temperature=0.7, top_k=9, seed=6)]
    specs = [RowSpec(i, prompt_of(n, i), samplings[i % 3]) for i, n in enumerate([1, 2, 40, 257, 9])]
    batched = Driver(engine_for(MODEL)).run([(i, spec, 9) for i, spec in enumerate(specs)])
    assert one_after_another(serial_engine(MODEL), specs, 9) == batched


def windowed() -> Any:
    model = tiny_llama()
    model.make_cache = lambda: [RotatingKVCache(max_size=8, keep=2) for _ in model.layers]
    return model


def recurrent() -> Any:
    mx.random.seed(8)
    model = mamba.Model(
        mamba.ModelArgs(
            model_type="mamba",
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            state_size=4,
            num_hidden_layers=2,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=2,
        )
    )
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("make_model", [windowed, recurrent])
def test_rows_of_other_kinds_answer_as_alone(make_model: Any) -> None:
    model = make_model()
    specs = [RowSpec(i, prompt_of(n, i), Sampling()) for i, n in enumerate([1, 3, 17, 12])]
    answers = one_after_another(serial_engine(model), specs, 12)
    for spec in specs:
        assert answers[spec.row_id] == alone(model, spec.prompt, 12)[0]


def test_the_next_row_comes_in_the_turn_in_which_the_last_one_leaves() -> None:
    """Its prompt is processed meanwhile; the token under way when its predecessor leaves is still read."""
    engine = serial_engine(MODEL)
    first, second = RowSpec(1, prompt_of(5, 1), Sampling()), RowSpec(2, prompt_of(1, 2), Sampling())
    # The second row arrives in the very turn in which the first has had its four steps.
    answers = Driver(engine).run([(0, first, 4), (5, second, 4)])
    assert answers == {row.row_id: alone(MODEL, row.prompt, 4)[0] for row in (first, second)}


def test_a_second_row_is_refused() -> None:
    caches = SoloCaches()
    caches.merge(1, [], 0)
    with pytest.raises(AssertionError, match="all 1 slots"):
        caches.merge(2, [], 0)
    assert caches.take(1) == []
    with pytest.raises(AssertionError, match="not in the lane"):
        caches.take(2)
    caches.clear()
    caches.check()
    caches.merge(2, [], 0)
