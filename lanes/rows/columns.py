"""What all kinds with a length axis share: arrays [slots, heads, capacity, dim], one row in each slot.

A kind says how keys and values become arrays and back (plain, quantized), and which column a token has (linear, ring).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from lanes.rows.positions import Columns, Positions

Arrays = list[mx.array]


class ColumnRows:
    """Rows of one layer whose cache has a column for each token it holds. Subclasses fill in what differs."""

    kind: str

    def __init__(self) -> None:
        self.parts: Arrays = []
        self.slots = self.capacity = 0
        self.positions = Positions.of([])

    # What a kind says of itself.

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        """Keys and values [rows, heads, tokens, dim] as the arrays that are kept."""
        raise NotImplementedError

    def decode(self, parts: Arrays) -> tuple[Any, Any]:
        """Arrays as the keys and values that attention takes."""
        raise NotImplementedError

    def columns(self, window: int | None = None) -> Columns:
        """What this step touches."""
        raise NotImplementedError

    def solo_parts(self, row: Any, length: int) -> list[tuple[int, Arrays]]:
        """A solo row's arrays, in pieces: (first column, arrays)."""
        raise NotImplementedError

    def solo_row(self, parts: Arrays, length: int) -> Any:
        """A solo row of arrays that are its own; what take() returns."""
        raise NotImplementedError

    def held_columns(self, tokens: int) -> int:
        """Columns that so many tokens take."""
        return tokens

    # What the models call.

    @property
    def offset(self) -> mx.array | int:
        return self.positions.offset

    @property
    def state(self) -> Arrays:
        return self.parts

    @state.setter
    def state(self, parts: Arrays) -> None:
        self.parts = list(parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def empty(self) -> bool:
        return not self.parts

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        assert num_tokens == 1, f"a lane steps one token a row, not {num_tokens}"
        return self.columns(window_size).mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write [rows, heads, 1, dim] at each row's own column; return the columns that the step reads."""
        new = self.encode(keys, values)
        self._allocate(new)
        at = self.columns()
        for index, part in enumerate(new):
            if at.rows == self.slots:
                self.parts[index] = mx.put_along_axis(self.parts[index], at.write_index, part, axis=2)
            else:
                self.parts[index][at.row_index, :, at.array] = part.squeeze(2)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        at = self.columns()
        return self.decode([part[: at.rows, :, : at.width] for part in self.parts])

    # What the lane calls.

    def merge(self, slot: int, row: Any, length: int) -> None:
        """Copy a row of `length` tokens that was processed alone into a slot."""
        if length == 0 or row.empty():  # a prompt of one token, or a layer that uses no cache
            return
        for first, parts in self.solo_parts(row, length):
            self._allocate(parts)
            for index, part in enumerate(parts):
                self.parts[index][slot : slot + 1, :, first : first + part.shape[2]] = part

    def filter(self, slot: int) -> None:
        """A row leaves: nothing is copied, and what it leaves behind lies beyond every other row's mask."""

    def lift(self, slot: int, length: int) -> Arrays:
        """The row's columns, to be evaluated and put into another slot."""
        return [mx.contiguous(part[slot : slot + 1, :, : self.held_columns(length)]) for part in self.parts]

    def put(self, slot: int, lifted: Sequence[mx.array]) -> None:
        for part, row in zip(self.parts, lifted, strict=True):
            part[slot : slot + 1, :, : row.shape[2]] = row

    def take(self, slot: int, length: int) -> Any:
        """The row as a solo cache, evaluated: it holds nothing of the lane's arrays."""
        parts = self.lift(slot, length) if length else []
        mx.eval(parts)
        return self.solo_row(parts, length)

    def resize(self, slots: int, capacity: int) -> None:
        """Hold so many slots of so many tokens each."""
        self.slots, self.capacity = slots, self.held_columns(capacity)
        self.parts = [_resized(part, self.slots, self.capacity) for part in self.parts]
        # One layer at a time, so that only one is ever held twice.
        mx.eval(self.parts)

    def clear(self) -> None:
        self.parts = []

    def _allocate(self, like: Sequence[mx.array]) -> None:
        """Heads, dims and types are known from the first arrays that are seen."""
        if not self.parts:
            self.parts = [mx.zeros((self.slots, p.shape[1], self.capacity, p.shape[3]), p.dtype) for p in like]


def _resized(array: mx.array, slots: int, capacity: int) -> mx.array:
    kept_slots, kept_columns = min(slots, array.shape[0]), min(capacity, array.shape[2])
    if (kept_slots, kept_columns) == (slots, capacity) == (array.shape[0], array.shape[2]):
        return array
    new = mx.zeros((slots, array.shape[1], capacity, array.shape[3]), array.dtype)
    new[:kept_slots, :, :kept_columns] = array[:kept_slots, :, :kept_columns]
    return new
