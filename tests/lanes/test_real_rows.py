"""Real models go on from what was frozen of them as if they had never stopped: to the last bit."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable

import mlx.core as mx
import pytest

from lanes.load import LoadedModel, load
from lanes.solo import RowMaker
from tests.lanes.gemma_model import gemma
from tests.lanes.keeper import Rows
from tests.lanes.test_thaw import assert_equal

pytestmark = pytest.mark.usefixtures("mlx_lms_attention")

TEXT = inspect.getsource(textwrap)
STEPS = 4


def demo() -> LoadedModel:
    return load("demo")


def hybrid() -> LoadedModel:
    return load("hybrid")


@pytest.mark.parametrize(
    ("get", "stops"),
    [
        (hybrid, (40, 200, 260, 299)),
        pytest.param(demo, (9, 17, 26, 31), marks=pytest.mark.slow),
        # Its rings hold 512 tokens.
        pytest.param(gemma, (200, 500, 520, 540), marks=pytest.mark.slow),
    ],
)
def test_a_conversation_goes_on(get: Callable[[], LoadedModel], stops: tuple[int, ...]) -> None:
    """A prompt is frozen in two parts on its way, its answer in a third; another engine goes on from each end."""
    loaded = get()
    make_row = RowMaker(loaded.model)
    prompt = tuple(loaded.tokenizer.encode(TEXT))[: stops[-1] + 1]
    rows = Rows(make_row)
    rows.admit(0, prompt)
    rows.process(0, 0, stops[:2], stops)
    parts = [rows.freeze(0, 0, stops[1])]
    rows.process(0, stops[1], stops[2:], stops)
    parts.append(rows.freeze(0, stops[1], stops[3]))
    rows.decode(0, STEPS)
    held = stops[3] + STEPS
    parts.append(rows.freeze(0, stops[3], held))
    for _ in range(STEPS):
        rows.turn()
    logits = rows.recording.logits[0]
    for known in (stops[1], stops[2], stops[3], held):
        other = Rows(make_row)
        other.admit(0, rows.tokens[0][: max(known, stops[3]) + 1], parts, known)
        other.process(0, known, stops)
        first = max(known, stops[3]) - stops[3]
        assert_equal(other.decode(0, STEPS), logits[first : first + STEPS])
    mx.clear_cache()
