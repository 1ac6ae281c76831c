"""Rows become plain bytes: what their caches hold is copied once, and handed out.

A part of a row is its columns [start, stop) and, for models with rings or recurrent state, what these were at each
boundary in it. What a ring holds at a boundary may begin before the part: that lies in the part before it, which ends
at a boundary too. So of a ring a part has

    the union, over its boundaries, of what a ring holds there, cut to [start, stop)

each token once, however many boundaries want it.

Copies are evaluated before the turn goes on: one under way would hold the arrays that it reads, and MLX writes in place
only what nobody else holds (seen on an H200: the next step copied the whole lane). Everybody may then read them where
they are. MLX's memory is the host's too, on CUDA unified: there the bytes come over as they are read, by whoever does.

What freezing 256 tokens costs a turn: on 2 cores, SmolLM2 in float32 (11 MiB), 10 to 15 ms, in an answer of 256 steps
of 95 ms; on an H200, Qwen3-8B's shape in bfloat16 (36 MiB), 4 to 7 ms, in 256 steps of 7, where copying the bytes to
the host in that turn would take 17 to 19.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from lanes.boundary import Saved
from lanes.groups import in_groups
from lanes.rows.held import Held, columns, joined_copy
from lanes.rows.runs import cut, joined, ranges_of
from store.checkpoint import Part, Range, TensorSpec

# A copy of its own for each array is a launch and memory of its own for each; larger ones find no memory to use again.
GROUP_BYTES = 16 << 20

Tensors = list[tuple[TensorSpec, mx.array]]


def freeze(row: Sequence[Held], saved: Saved, start: int, stop: int, anywhere: bool) -> Part:
    """The part [start, stop) of a row, of which its caches hold `stop` tokens, or more where it can be cut anywhere."""
    boundaries = None if anywhere else (*(at for at in saved.boundaries if start < at < stop), stop)
    tensors: Tensors = []
    for held in row:
        if held.runs is None:
            continue
        sources, ranges = [held], joined([(start, stop)])
        if held.ring is not None:
            sources += saved.rings.get(held.place, [])
            ranges = cut(joined(r for at in boundaries or () for r in ranges_of(held.ring.runs(at))), start, stop)
        tensors += _named(held, columns(sources, ranges), ranges=ranges)
    for at in boundaries or ():
        for held in saved.state.get(at, row):
            if held.runs is None:
                tensors += _named(held, held.arrays, at=at)
    return Part(start, stop, boundaries, tuple(spec for spec, _ in tensors), _copied([a for _, a in tensors]))


def _copied(arrays: Sequence[mx.array]) -> tuple[memoryview, ...]:
    """The bytes of each array, in memory of their own."""
    groups = _alike(arrays)
    together = [joined_copy([arrays[index] for index in group]) for group in groups]
    content: list[Any] = [array.flatten().view(mx.uint8) for array in together]
    mx.eval(content)
    copies: dict[int, memoryview] = {}
    for group, array in zip(groups, content, strict=True):
        view = memoryview(array)
        nbytes = view.nbytes // len(group)
        copies |= {index: view[at * nbytes : (at + 1) * nbytes] for at, index in enumerate(group)}
    return tuple(copies[index] for index in range(len(arrays)))


def _alike(arrays: Sequence[mx.array]) -> list[list[int]]:
    """Which arrays are copied by one operation: those of one shape and type, up to GROUP_BYTES of them."""
    kinds: dict[tuple[tuple[int, ...], mx.Dtype], list[int]] = {}
    for index, array in enumerate(arrays):
        kinds.setdefault((array.shape, array.dtype), []).append(index)
    return [
        group for kind in kinds.values() for group in in_groups(kind, lambda index: arrays[index].nbytes, GROUP_BYTES)
    ]


def _named(
    held: Held, arrays: Iterable[mx.array | None], ranges: tuple[Range, ...] = (), at: int | None = None
) -> Tensors:
    found: Tensors = []
    for index, array in enumerate(arrays):
        if array is not None:
            assert array.shape[0] == 1, f"{array.shape} is not of one row"
            name = ".".join(map(str, (*held.place, index)))
            found.append((TensorSpec(name, dtype_name(array.dtype), array.shape[1:], ranges, at), array))
    return found


def dtype_name(dtype: mx.Dtype) -> str:
    """As store.checkpoint has it."""
    name = str(dtype).removeprefix("mlx.core.")
    return "bool_" if name == "bool" else name
