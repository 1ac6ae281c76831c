"""Prompts that share a forward pass go on as if each had been processed alone."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache

from lanes.lane import Chunk, RowSpec, Sampling, Step
from lanes.sharing import LONGEST_TOKENS, shared_prompt_tokens
from lanes.solo import RowMaker
from tests.lanes.driver import engine_for
from tests.lanes.tiny import alone, prompt_of, tiny_llama

WINDOW = 64
STEPS = 8


def with_rings() -> Any:
    """Every other layer keeps a window."""
    args = tiny_llama().args
    args.layer_types = ["full_attention", "sliding_attention"] * 2
    args.sliding_window = WINDOW
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


PLAIN, RINGS = tiny_llama(), with_rings()


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(2, WINDOW + 1), min_size=2, max_size=5), rings=st.booleans())
def test_sharing_changes_nothing(lengths: list[int], rings: bool) -> None:
    model = RINGS if rings else PLAIN
    engine = engine_for(model)
    specs = [RowSpec(i, prompt_of(n, i), Sampling()) for i, n in enumerate(lengths)]
    rows = tuple(spec.row_id for spec in specs)
    result = engine.step(Step(admit=tuple(specs), chunk=Chunk(0, 0, lengths[0] - 1), sharing=rows[1:]))
    assert result.chunk_tokens == sum(lengths) - len(lengths)
    answers: dict[int, list[int]] = {row: [] for row in rows}
    for turn in range(STEPS + 1):
        result = engine.step(Step(merge=rows if turn == 0 else ()))
        engine.check()
        for row, token in result.tokens:
            answers[row].append(token)
    for spec in specs:
        assert answers[spec.row_id] == alone(model, spec.prompt, STEPS)[0]


def test_how_long_a_prompt_may_be() -> None:
    assert 0 <= shared_prompt_tokens(RowMaker(PLAIN)) <= LONGEST_TOKENS
    assert 0 <= shared_prompt_tokens(RowMaker(RINGS)) <= WINDOW


def test_recurrent_state_is_not_shared() -> None:
    model = tiny_llama()
    model.make_cache = lambda: [ArraysCache(2) for _ in model.layers]
    assert shared_prompt_tokens(RowMaker(model)) == 0


def test_a_failing_pass_ends_the_prompts_in_it() -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(PLAIN, name)

        def __call__(self, tokens: Any, cache: Any) -> Any:
            if tokens.shape[0] > 1:
                raise RuntimeError("out of memory")
            return PLAIN(tokens, cache=cache)

    engine = engine_for(Failing())
    specs = [RowSpec(i, prompt_of(5, i), Sampling()) for i in range(3)]
    result = engine.step(Step(admit=tuple(specs), chunk=Chunk(0, 0, 4), sharing=(1,)))
    assert [row for row, _ in result.failures] == [0, 1]
    engine.step(Step(chunk=Chunk(2, 0, 4)))
    assert not engine.step(Step(merge=(2,))).failures


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_rows_share_too(bits: int) -> None:
    args = tiny_llama().args
    args.hidden_size = 128
    model = llama.Model(args)
    assert shared_prompt_tokens(RowMaker(model, bits, 32)) >= 0
