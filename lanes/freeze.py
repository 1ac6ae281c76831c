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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.core as mx

from lanes.boundary import Saved
from lanes.groups import in_groups
from lanes.rows.held import Held, Piece, joined_copy, joined_view, pieces
from lanes.rows.runs import cut, joined, ranges_of
from store.checkpoint import Part, Range, TensorSpec

# A copy of its own for each array is a launch and memory of its own for each; larger ones find no memory to use again.
GROUP_BYTES = 16 << 20

# An array and where its bytes come from: columns in order, or a state's as if they were one.
Source = tuple[TensorSpec, Sequence[Piece]]


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
    whole = joined([(start, stop)])
    for held in row:
        if held.runs is None:
            continue
        holders, ranges = [held], whole
        if held.ring is not None:
            holders += saved.rings.get(held.place, [])
            ranges = cut(joined(r for at in boundaries or () for r in ranges_of(held.ring.runs(at))), start, stop)
        for index, found in enumerate(pieces(holders, ranges)):
            _, heads, _, dim = found[0].array.shape
            shape = (heads, sum([piece.num_columns for piece in found]), dim)
            sources.append((_spec(held, index, found[0].array, shape, ranges=ranges), found))
    for at in boundaries or ():
        for held in saved.state.get(at, row):
            for index, array in enumerate(held.arrays if held.runs is None else ()):
                if array is not None:
                    assert array.shape[0] == 1, f"{array.shape} is not of one row"
                    found = [Piece(array.reshape(1, 1, 1, array.size), 0, 0, 1)]
                    sources.append((_spec(held, index, array, array.shape[1:], at=at), found))
    fetched = (fetch(sources) if fetch else None) or _copied(sources)
    part = Part(start, stop, boundaries, tuple([spec for spec, _ in sources]), fetched.buffers)
    return Frozen(part, fetched.copying)


def _copied(sources: Sequence[Source]) -> Fetched:
    """By MLX, and evaluated."""
    arrays = [joined_view(found) for _, found in sources]
    groups = _alike(arrays)
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
    """Which arrays are copied by one operation: those of one shape and type, up to GROUP_BYTES of them."""
    kinds: dict[tuple[tuple[int, ...], mx.Dtype], list[int]] = {}
    for index, array in enumerate(arrays):
        kinds.setdefault((array.shape, array.dtype), []).append(index)
    return [
        group for kind in kinds.values() for group in in_groups(kind, lambda index: arrays[index].nbytes, GROUP_BYTES)
    ]


def _spec(
    held: Held,
    index: int,
    array: mx.array,
    shape: tuple[int, ...],
    ranges: tuple[Range, ...] = (),
    at: int | None = None,
) -> TensorSpec:
    return TensorSpec(_name((*held.place, index)), dtype_name(array.dtype), shape, ranges, at)


@cache
def _name(place: tuple[int, ...]) -> str:
    return ".".join(map(str, place))


@cache
def dtype_name(dtype: mx.Dtype) -> str:
    """As store.checkpoint has it."""
    name = str(dtype).removeprefix("mlx.core.")
    return "bool_" if name == "bool" else name
