"""Rows become plain bytes: what their caches hold is copied once, and handed out.

A part of a row is its columns [start, stop) and, for models with rings or recurrent state, what these were at each
boundary in it. What a ring holds at a boundary may begin before the part: that lies in the part before it, which ends
at a boundary too. So of a ring a part has

    the union, over its boundaries, of what a ring holds there, cut to [start, stop)

each token once, however many boundaries want it.

Copies that MLX makes are evaluated before the turn goes on: one under way would hold the arrays that it reads, and MLX
writes in place only what nobody else holds (seen on an H200: the next step copied the whole lane). Everybody may then
read them where they are. MLX's memory is the host's too; not so on CUDA, where the device writes into memory of the
host (lanes/cuda_fetch.py), if it can while steps go on.

What freezing 256 tokens costs a turn: on 2 cores, SmolLM2 in float32 (11 MiB), 10 to 15 ms, in an answer of 256 steps
of 95 ms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from lanes.boundary import Saved
from lanes.groups import in_groups
from lanes.rows.held import Held, Piece, joined_copy, joined_views, pieces
from lanes.rows.runs import cut, joined, ranges_of
from store.checkpoint import Part, Range, TensorSpec

# A copy of its own for each array is a launch and memory of its own for each; larger ones find no memory to use again.
GROUP_BYTES = 16 << 20


class Source(NamedTuple):
    """Arrays alike in type and shape, and where their bytes come from: of each piece that of the same number. A state
    is one column."""

    specs: Sequence[TensorSpec]
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes of several arrays, C-contiguous, in memory of their own; they are there when `copying` is evaluated."""

    buffers: tuple[memoryview, ...]
    copying: tuple[mx.array, ...] = ()


class Fetch(Protocol):
    def __call__(self, sources: Sequence[Source]) -> Fetched | None:
        """Begin to copy all of these; None if that cannot be done for some of them."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A part whose bytes may still be on their way."""

    part: Part
    copying: tuple[mx.array, ...] = ()

    def wait(self) -> Part:
        mx.eval(self.copying)
        return self.part


def freeze(
    row: Sequence[Held], saved: Saved, start: int, stop: int, anywhere: bool, fetch: Fetch | None = None
) -> Frozen:
    """The part [start, stop) of a row, of which its caches hold `stop` tokens, or more where it can be cut anywhere.

    fetch: for memory that is not the host's.
    """
    boundaries = None if anywhere else (*(at for at in saved.boundaries if start < at < stop), stop)
    sources: list[Source] = []
    for held in row:
        if held.runs is None:
            continue
        holders, ranges = [held], joined([(start, stop)])
        if held.ring is not None:
            holders += saved.rings.get(held.names, [])
            ranges = cut(joined(r for at in boundaries or () for r in ranges_of(held.ring.runs(at))), start, stop)
        sources += _of_columns(held, pieces(holders, ranges), ranges)
    for at in boundaries or ():
        for held in saved.state.get(at, row):
            if held.runs is None:
                sources += [_of_state(name, array, at) for name, array in zip(held.names, held.arrays, strict=True)]
    fetched = (fetch(sources) if fetch else None) or _copied(sources)
    part = Part(start, stop, boundaries, tuple([spec for each in sources for spec in each.specs]), fetched.buffers)
    return Frozen(part, fetched.copying)


def _of_columns(held: Held, found: Sequence[Piece], ranges: tuple[Range, ...]) -> Iterator[Source]:
    num_columns = sum(piece.num_columns for piece in found)
    for indices in _alike(held.arrays):
        first = held.arrays[indices[0]]
        _, heads, _, dim = first.shape
        dtype, shape = dtype_name(first.dtype), (heads, num_columns, dim)
        specs = [TensorSpec(held.names[index], dtype, shape, ranges) for index in indices]
        yield Source(specs, [piece._replace(arrays=tuple([piece.arrays[i] for i in indices])) for piece in found])


def _of_state(name: str, array: mx.array, at: int) -> Source:
    assert array.shape[0] == 1, f"{array.shape} is not of one row"
    spec = TensorSpec(name, dtype_name(array.dtype), array.shape[1:], at=at)
    return Source([spec], [Piece((array.reshape(1, 1, 1, array.size),), 0, 0, 1)])


def _copied(sources: Sequence[Source]) -> Fetched:
    """By MLX, those of one shape and type in one operation, up to GROUP_BYTES of them; evaluated."""
    arrays = [array for source in sources for array in joined_views(source.pieces)]
    groups = [g for each in _alike(arrays) for g in in_groups(each, lambda index: arrays[index].nbytes, GROUP_BYTES)]
    together = [joined_copy([arrays[index] for index in group]) for group in groups]
    flat: list[Any] = [array.flatten().view(mx.uint8) for array in together]
    mx.eval(flat)
    copies: dict[int, memoryview] = {}
    for group, array in zip(groups, flat, strict=True):
        view = memoryview(array)
        nbytes = view.nbytes // len(group)
        copies |= {index: view[at * nbytes : (at + 1) * nbytes] for at, index in enumerate(group)}
    return Fetched(tuple(copies[index] for index in range(len(arrays))))


def _alike(arrays: Sequence[mx.array]) -> list[list[int]]:
    """Which of them are of one shape and type."""
    kinds: defaultdict[tuple[tuple[int, ...], mx.Dtype], list[int]] = defaultdict(list)
    for index, array in enumerate(arrays):
        kinds[array.shape, array.dtype].append(index)
    return list(kinds.values())


@cache
def dtype_name(dtype: mx.Dtype) -> str:
    """As store.checkpoint has it."""
    name = str(dtype).removeprefix("mlx.core.")
    return "bool_" if name == "bool" else name
