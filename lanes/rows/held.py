"""What a cache holds of a row, seen alike in a slot of a lane and in a solo cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from lanes.rows.runs import Ring, Runs
from store.checkpoint import Range


@dataclass(frozen=True, slots=True)
class Held:
    """The arrays of one cache, or of one member of a CacheList, for one row, where they lie.

    Arrays of columns are [1, heads, columns, dim], and runs tells which tokens they are of, in the order of these; ring
    is the window, None where every token is kept. Arrays of state are [1, ...], or None where the model keeps none in
    that place, and runs is None. place: of the cache among the model's, and of the member in it.
    """

    arrays: tuple[mx.array | None, ...]
    runs: Runs | None = None
    ring: Ring | None = None
    place: tuple[int, ...] = ()


def columns(sources: Sequence[Held], ranges: Iterable[Range]) -> list[mx.array]:
    """Of each array the columns of these tokens, in order, each from a source that has it; one has to, and what two
    have is the same in both. Views, where they lie side by side."""
    views = _views(sources, tuple(ranges))
    return [view[0] if len(view) == 1 else mx.concatenate(view, axis=2) for view in views]


def copied_columns(sources: Sequence[Held], ranges: Iterable[Range]) -> list[mx.array]:
    """As columns(), in memory of their own."""
    return [joined_copy(view, axis=2) for view in _views(sources, tuple(ranges))]


def joined_copy(arrays: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Arrays joined, or one alone, in memory of its own, lazy."""
    # What is joined is copied, be it with nothing. mx.contiguous may share memory that is at most 16 KiB larger: that
    # would be pinned, and the next step's write into it, which is in place otherwise, would copy all of it.
    nothing = arrays[0][(*(slice(None),) * axis, slice(0))]
    return mx.concatenate([*arrays, nothing], axis=axis)


def _views(sources: Sequence[Held], ranges: Sequence[Range]) -> list[list[mx.array]]:
    """For each array, its columns in pieces."""
    views: list[list[mx.array]] = [[] for _ in sources[0].arrays]
    for first, last in ranges:
        while first < last:
            source, run = next((s, r) for s in sources for r in s.runs or () if r.first <= first < r.last)
            stop, column = min(last, run.last), run.column + first - run.first
            for view, array in zip(views, source.arrays, strict=True):
                assert array is not None, "every array has columns"
                view.append(array[:, :, column : column + stop - first])
            first = stop
    return views


def in_place(members: Iterable[Iterable[Held]]) -> list[Held]:
    """What the caches of a model, or the members of one, hold, each told by its place."""
    return [replace(held, place=(index, *held.place)) for index, each in enumerate(members) for held in each]
