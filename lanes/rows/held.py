"""What a cache holds of a row, seen alike in a slot of a lane and in a solo cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from lanes.rows.runs import Ring, Runs
from store.checkpoint import Range


class Held(NamedTuple):
    """Arrays for one row, where they lie, and their names, as store.checkpoint.TensorSpec has them.

    Arrays of columns are [slots, heads, columns, dim], in which the row has one slot, and runs tells which tokens they
    are of, in the order of these; ring is the window, None where every token is kept. They are those of one cache, or
    of several that hold the same tokens in the same columns. Arrays of state are [1, ...], those that there are in one
    cache, and runs is None.
    """

    names: tuple[str, ...]
    arrays: tuple[mx.array, ...]
    runs: Runs | None = None
    ring: Ring | None = None
    slot: int = 0


class Piece(NamedTuple):
    """Of each array [slots, heads, columns, dim] so many columns of one slot, the first of which is `column`."""

    arrays: tuple[mx.array, ...]
    slot: int
    column: int
    num_columns: int

    def view(self, index: int) -> mx.array:
        """[1, heads, num_columns, dim]."""
        return self.arrays[index][self.slot : self.slot + 1, :, self.column : self.column + self.num_columns]


def columns(sources: Sequence[Held], ranges: Iterable[Range]) -> list[mx.array]:
    """Of each array the columns of these tokens; see pieces(). Views, where they lie side by side."""
    return joined_views(pieces(sources, ranges))


def copied_columns(sources: Sequence[Held], ranges: Iterable[Range]) -> list[mx.array]:
    """As columns(), in memory of their own."""
    return [joined_copy(views, axis=2) for views in _views(pieces(sources, ranges))]


def joined_views(pieces: Sequence[Piece]) -> list[mx.array]:
    """Of each array the columns of all pieces, in order; no copy where there is one."""
    return [views[0] if len(views) == 1 else mx.concatenate(views, axis=2) for views in _views(pieces)]


def _views(pieces: Sequence[Piece]) -> list[list[mx.array]]:
    return [[piece.view(index) for piece in pieces] for index in range(len(pieces[0].arrays))]


def joined_copy(arrays: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Arrays joined, or one alone, in memory of its own, lazy."""
    # What is joined is copied, be it with nothing. mx.contiguous may share memory that is at most 16 KiB larger: that
    # would be pinned, and the next step's write into it, which is in place otherwise, would copy all of it.
    nothing = arrays[0][(*(slice(None),) * axis, slice(0))]
    return mx.concatenate([*arrays, nothing], axis=axis)


def pieces(sources: Sequence[Held], ranges: Iterable[Range]) -> list[Piece]:
    """The columns of these tokens, in order, each from a source that has it; one has to, and what two have is the same
    in both."""
    found: list[Piece] = []
    for first, last in ranges:
        while first < last:
            source, run = next((s, r) for s in sources for r in s.runs or () if r.first <= first < r.last)
            stop = min(last, run.last)
            found.append(Piece(source.arrays, source.slot, run.column + first - run.first, stop - first))
            first = stop
    return found


def named(members: Iterable[tuple[int, Iterable[Held]]]) -> list[Held]:
    """What the caches of a model, or the members of one, hold, each told by its number there."""
    return [held._replace(names=names_in(number, held.names)) for number, each in members for held in each]


@cache
def names_in(number: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that a member's arrays have among those of all."""
    return tuple(f"{number}.{name}" for name in names)


@cache
def numbers(count: int) -> tuple[str, ...]:
    """The names of a cache's arrays."""
    return tuple(map(str, range(count)))
