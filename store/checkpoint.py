"""What of a row can be kept, as plain data: lanes fill it from arrays and arrays from it, the store keeps it.

A row's caches hold two kinds of things. **Columns** belong to one token each: keys and values, plain or packed. A cache
that keeps every token has a column for each; a ring has the last ones (and some first ones) only. **State** belongs to
a token count: it is what a recurrent layer made of all tokens before. A row with rings or state can be taken up again
only at a **boundary**, a token count at which these were saved; one with neither, at any token.

Arrays have no axis for rows here.

This file imports nothing of the project, and no MLX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# A token range [first, last).
Range = tuple[int, int]

# Bytes of an element, by MLX's names.
DTYPE_BYTES = {
    "bool_": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}


class TensorSpec(NamedTuple):
    """One array: what it is, without its bytes.

    name: the place of its cache in the model's order, that of the array in the cache, dots between ("3.0", and "3.1.0"
    in a CacheList). at None: columns, of shape [heads, columns, dim], `ranges` being the tokens they are of, in order.
    Otherwise the state, of any shape, that the cache had after `at` tokens.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...] = ()
    at: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def column_bytes(self) -> int:
        """Of one token in one head."""
        return self.shape[-1] * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """What a row has of its tokens [start, stop), and its rings and state at boundaries in (start, stop].

    boundaries None: the row can be taken up again at any token. buffers: the bytes of each tensor, C-contiguous, which
    nobody changes any more.
    """

    start: int
    stop: int
    boundaries: tuple[int, ...] | None
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


class Mapped:
    """The bytes of a recalled row's arrays as memory that a file is mapped to, which lives as long as one of them does.

    They can be taken once, by whoever makes the arrays: so that nobody else keeps the mapping.
    """

    def __init__(self, buffers: tuple[memoryview, ...]) -> None:
        """Each may have some bytes more than its array."""
        self._buffers = buffers

    def take(self) -> tuple[memoryview, ...]:
        buffers, self._buffers = self._buffers, ()
        return buffers


@dataclass(frozen=True, slots=True)
class Recall:
    """What is known of a row before it is processed: its first `tokens` tokens, of which specs tells the arrays.

    Of columns there is one spec for each name; its shape and ranges are those of some part of them, and only dtype,
    heads and dim count. Of state there are those at `tokens`.

    mapped: the arrays themselves, one for each spec, which then tells their shape and ranges: some columns may be of
    later tokens, or of none that the row has. None: they are to be read.
    """

    tokens: int
    specs: tuple[TensorSpec, ...]
    mapped: Mapped | None = None


class CarrierFailed(Exception):
    """A device refuses what it is asked for."""


class Carrier(Protocol):
    """Takes bytes to memory that the host writes slowly, a device's. Several threads may use one. All raise
    CarrierFailed."""

    def expect(self, buffers: Sequence[memoryview]) -> None:
        """These are going to be written to, by send()."""

    def lend(self) -> memoryview:
        """A block of host memory, writable, as soon as one is free. It is given back by send()."""

    def send(self, block: memoryview, into: Sequence[memoryview]) -> None:
        """Begin to copy the block's first bytes into these, one after the other."""

    def finish(self) -> None:
        """Return when all that was sent is there."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory that one array of a recalled row is to be read into: `wanted` says of what.

    buffer: its bytes, writable. Head h's column i of wanted.ranges starts at byte h * head_bytes + i *
    wanted.column_bytes, so head_bytes may be more than the columns of a head take. State takes the whole buffer.

    carrier: what writes to it; None: whoever reads.
    """

    wanted: TensorSpec
    buffer: memoryview
    head_bytes: int
    carrier: Carrier | None = None


def columns_of(spec: TensorSpec, ranges: tuple[Range, ...]) -> TensorSpec:
    """The spec of the same array for other tokens."""
    heads, _, dim = spec.shape
    return spec._replace(shape=(heads, sum(last - first for first, last in ranges), dim), ranges=ranges)
