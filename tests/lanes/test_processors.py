"""The vectorised processors are mlx-lm's, row by row."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.history import NOTHING
from lanes.lane import Sampling
from lanes.processors import Processors
from tests.lanes.mlx_lms_processors import mlx_lms_processors

VOCABULARY = 23
MOST = 2**31 - 1

sizes = st.one_of(st.integers(1, 12), st.just(MOST))
penalties = st.sampled_from([-2.0, -0.3, 0.0, 0.7, 2.0])
samplings = st.builds(
    Sampling,
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.5, 0.25, 100.0])).map(
        lambda bias: tuple(bias.items())
    ),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    repetition_context_size=sizes,
    presence_penalty=penalties,
    presence_context_size=sizes,
    frequency_penalty=penalties,
    frequency_context_size=sizes,
)
# A row has been fed one token at least.
histories = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=16)
rows = st.lists(st.tuples(samplings, histories), min_size=1, max_size=5)


def logits_of(num_rows: int, seed: int) -> mx.array:
    return 3 * mx.random.normal((num_rows, VOCABULARY), key=mx.random.key(seed))


def windows(histories_of_rows: list[list[int]], width: int) -> mx.array | None:
    padded = [([NOTHING] * width + history)[-width:] for history in histories_of_rows]
    return mx.array(padded, dtype=mx.int32) if width else None


def by_mlx_lm(logits: mx.array, sampling: Sampling, history: list[int]) -> mx.array:
    """One row's [1, vocabulary] logits."""
    logits = mx.array(logits)
    for processor in mlx_lms_processors(sampling):
        logits = processor(mx.array(history), logits)
    return logits


@settings(max_examples=150, deadline=None)
@given(rows_told=rows, seed=st.integers(0, 2**31))
def test_each_row_is_processed_as_by_mlx_lm(rows_told: list[tuple[Sampling, list[int]]], seed: int) -> None:
    # A window wider than any history stands for all of it.
    rows_told = [
        (Sampling(**{name: min(value, 16) if name.endswith("_size") else value for name, value in fields(s)}), history)
        for s, history in rows_told
    ]
    logits = logits_of(len(rows_told), seed)
    processors = Processors([sampling for sampling, _ in rows_told])
    recent = windows([history for _, history in rows_told], processors.window)
    processed = processors(logits, [0] * len(rows_told), recent)
    for row, (sampling, history) in enumerate(rows_told):
        expected = by_mlx_lm(logits[row : row + 1], sampling, history)[0]
        # A frequency is subtracted as often as the token occurred, in an order that the device chooses.
        assert mx.allclose(processed[row], expected, rtol=1e-5, atol=1e-5), f"row {row}: {sampling}, {history}"


def fields(sampling: Sampling) -> list[tuple[str, Any]]:
    return [(name, getattr(sampling, name)) for name in Sampling.__dataclass_fields__]


def test_plain_rows_are_left_as_they_are_and_cost_nothing() -> None:
    """Not even the type of the logits changes; and a neighbour's penalties change no bit of a plain row."""
    logits = logits_of(3, 1).astype(mx.bfloat16)
    assert Processors([Sampling(temperature=t) for t in (0, 1, 2)])(logits, [0, 0, 0], None) is logits
    penalized = Sampling(repetition_penalty=1.7, presence_penalty=1.0, frequency_penalty=-1.0, logit_bias=((2, 5.0),))
    processors = Processors([Sampling(), penalized, Sampling()])
    processed = processors(logits, [0, 0, 0], windows([[1, 2], [0, 0, 3], [4]], processors.window))
    assert mx.array_equal(processed[0], logits[0].astype(mx.float32))
    assert mx.array_equal(processed[2], logits[2].astype(mx.float32))
    assert not mx.array_equal(processed[1], logits[1].astype(mx.float32))


@pytest.mark.parametrize(("widest", "window"), [(1, 1), (2, 2), (3, 4), (20, 32), (32, 32), (33, 64)])
def test_windows_have_few_widths(widest: int, window: int) -> None:
    settings_of_rows = [Sampling(), Sampling(presence_penalty=1, presence_context_size=widest)]
    assert Processors(settings_of_rows).window == window
    unused = Sampling(repetition_context_size=500, presence_penalty=1, presence_context_size=widest)
    assert Processors([unused]).window == window


def test_no_end_comes_before_its_time() -> None:
    logits = logits_of(3, 2)
    told = [
        Sampling(earliest_end=7, end_token_ids=(0, 5)),
        Sampling(earliest_end=6, end_token_ids=(5,)),
        Sampling(end_token_ids=(1,)),
    ]
    processors = Processors(told)
    at_6 = processors(logits, [6, 6, 6], None)
    impossible = [[token for token in range(VOCABULARY) if at_6[row, token].item() == -mx.inf] for row in range(3)]
    assert impossible == [[0, 5], [], []]
    assert mx.array_equal(at_6[1:], logits[1:])
    assert processors(logits, [7, 7, 7], None) is logits


@pytest.mark.parametrize("vocabulary", [23, 32, 33, 64, 100])
def test_masks_are_read_bit_by_bit(vocabulary: int) -> None:
    logits = 3 * mx.random.normal((2, vocabulary), key=mx.random.key(3))
    wanted = np.random.default_rng(0).random((2, vocabulary)) < 0.5
    padded = np.zeros((2, -(-vocabulary // 32) * 32), dtype=bool)
    padded[:, :vocabulary] = wanted
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    processed = Processors([Sampling(), Sampling()])(logits, [0, 0], None, mx.array(words))
    assert mx.array_equal(processed, mx.where(mx.array(wanted), logits, -mx.inf))
