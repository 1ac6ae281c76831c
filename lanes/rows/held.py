"""What a cache holds of a row, seen alike in a slot of a lane and in a solo cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from lanes.rows.runs import Ring, Runs
from store.checkpoint import Range


@dataclass(frozen=True, slots=True)
class Held:
    """The arrays of one cache, or of one member of a CacheList, for one row, where they lie.

    Arrays of columns are [slots, heads, columns, dim], in which the row has one slot, and runs tells which tokens they
    are of, in the order of these; ring is the window, None where every token is kept. Arrays of state are [1, ...], or
    None where the model keeps none in that place, and runs is None. place: of the cache among the model's, and of the
    member in it.
    """

    arrays: tuple[mx.array | None, ...]
    runs: Runs | None = None
    ring: Ring | None = None
    place: tuple[int, ...] = ()
    slot: int = 0


class Piece(NamedTuple):
    """Of an array [slots, heads, columns, dim] so many columns of one slot, the first of which is `column`."""

    array: mx.array
    slot: int
    column: int
    num_columns: int

    def view(self) -> mx.array:
        """[1, heads, num_columns, dim]."""
        return self.array[self.slot : self.slot + 1, :, self.column : self.column + self.num_columns]


def columns(sources: Sequence[Held], ranges: Iterable[Range]) -> list[mx.array]:
    """Of each array the columns of these tokens; see pieces(). Views, where they lie side by side."""
    return [joined_view(each) for each in pieces(sources, ranges)]


def copied_columns(sources: Sequence[Held], ranges: Iterable[Range]) -> list[mx.array]:
    """As columns(), in memory of their own."""
    return [joined_copy([piece.view() for piece in each], axis=2) for each in pieces(sources, ranges)]


def joined_view(pieces: Sequence[Piece]) -> mx.array:
    """The columns of all pieces, in order; no copy where there is one."""
    views = [piece.view() for piece in pieces]
    return views[0] if len(views) == 1 else mx.concatenate(views, axis=2)


def joined_copy(arrays: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Arrays joined, or one alone, in memory of its own, lazy."""
    # What is joined is copied, be it with nothing. mx.contiguous may share memory that is at most 16 KiB larger: that
    # would be pinned, and the next step's write into it, which is in place otherwise, would copy all of it.
    nothing = arrays[0][(*(slice(None),) * axis, slice(0))]
    return mx.concatenate([*arrays, nothing], axis=axis)


def pieces(sources: Sequence[Held], ranges: Iterable[Range]) -> list[list[Piece]]:
    """Of each array the columns of these tokens, in order, each from a source that has it; one has to, and what two
    have is the same in both."""
    found: list[list[Piece]] = [[] for _ in sources[0].arrays]
    for first, last in ranges:
        while first < last:
            source, run = next((s, r) for s in sources for r in s.runs or () if r.first <= first < r.last)
            stop, column = min(last, run.last), run.column + first - run.first
            for each, array in zip(found, source.arrays, strict=True):
                assert array is not None, "every array has columns"
                each.append(Piece(array, source.slot, column, stop - first))
            first = stop
    return found


def in_place(members: Iterable[Iterable[Held]]) -> list[Held]:
    """What the caches of a model, or the members of one, hold, each told by its place."""
    return [
        Held(held.arrays, held.runs, held.ring, (index, *held.place), held.slot)
        for index, each in enumerate(members)
        for held in each
    ]
