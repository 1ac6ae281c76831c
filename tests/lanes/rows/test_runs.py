"""Runs say where a row's tokens are; ranges are sets of tokens."""

from itertools import pairwise

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.rows.held import Held, columns, copied_columns
from lanes.rows.positions import Positions
from lanes.rows.runs import Ring, Run, cut, in_order, joined, linear, ranges_of, side_by_side, without

sizes = st.integers(2, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))
ranges = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair))), max_size=5
)


def tokens_of(found: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> set[int]:
    return {token for first, last in found for token in range(first, last)}


def column_by_token(runs: tuple[Run, ...]) -> dict[int, int]:
    return {token: run.column + token - run.first for run in runs for token in range(run.first, run.last)}


@given(ring=sizes, length=st.integers(0, 60))
def test_a_rings_runs_are_where_steps_write(ring: tuple[int, int], length: int) -> None:
    """A token is where the step that came with it has put it, and a later one has not."""
    size, keep = ring
    expected: dict[int, int] = {}
    for token in range(length):
        column = int(Positions.of([token]).ring(size, keep).array.item())
        expected = {**{other: at for other, at in expected.items() if at != column}, token: column}
    runs = Ring(size, keep).runs(length)
    assert column_by_token(runs) == expected
    assert list(runs) == sorted(runs, key=lambda run: run.first)
    assert all(run.first < run.last for run in runs)


@given(tokens=st.integers(0, 30), columns=st.integers(1, 40), keep=st.integers(0, 5))
def test_what_is_in_order_is_the_first_and_the_last(tokens: int, columns: int, keep: int) -> None:
    keep = min(keep, columns - 1)
    found = column_by_token(in_order(tokens, columns, keep))
    held = min(tokens, columns)
    assert list(found.values()) == list(range(held))
    assert list(found) == [*range(min(keep, held)), *range(tokens - held + min(keep, held), tokens)]


@given(some=ranges, others=ranges, start=st.integers(0, 20), stop=st.integers(0, 20))
def test_ranges_are_sets(some: list[tuple[int, int]], others: list[tuple[int, int]], start: int, stop: int) -> None:
    found = joined(some)
    assert tokens_of(found) == tokens_of(some)
    assert all(last < first for (_, last), (first, _) in pairwise(found))
    assert tokens_of(cut(found, start, stop)) == tokens_of(some) & set(range(start, stop))
    assert tokens_of(without(found, others)) == tokens_of(some) - tokens_of(others)
    assert ranges_of(side_by_side(found)) == found
    assert list(column_by_token(side_by_side(found)).values()) == list(range(len(tokens_of(some))))


def test_columns_come_from_whoever_has_them() -> None:
    def source(runs: tuple[Run, ...], content: list[int]) -> Held:
        return Held(("0",), (mx.array(content)[None, None, :, None],), runs)

    recent, old = source((Run(4, 6, 1), Run(6, 8, 0)), [6, 4, 5]), source(linear(5), [0, 1, 2, 3, 4, 99])
    for found in (columns, copied_columns):
        (array,) = found([recent, old], [(1, 2), (3, 7)])
        assert array.flatten().tolist() == [1, 3, 4, 5, 6]
        (array,) = found([old], [(1, 3)])
        assert array.flatten().tolist() == [1, 2]
    with pytest.raises(StopIteration):
        columns([old], [(4, 6)])
