"""What all kinds with a length axis share: arrays [slots, heads, capacity, dim], one row in each slot.

A kind says how keys and values become arrays and back (plain, quantized), and what its solo cache is like. Which column
a token has is the same for all: that of its own number, or a place in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from lanes.rows.held import Held, columns, copied_columns, numbers
from lanes.rows.positions import Columns, Positions
from lanes.rows.runs import Ring, Runs, in_order, linear, ranges_of
from store.checkpoint import Range

Arrays = list[mx.array]


class ColumnRows:
    """Rows of one layer whose cache has a column for each token it holds. Subclasses fill in what differs.

    ring: what is kept of a row's tokens; None: all of them.
    """

    kind: str

    def __init__(self, ring: Ring | None = None) -> None:
        self.ring = ring
        self.parts: Arrays = []
        self.slots = self.capacity = 0
        self.positions = Positions.of([])
        self._new: Arrays = []
        self._unwritten: Arrays = []
        self._leaves_writing = False

    # What a kind says of itself.

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        """Keys and values [rows, heads, tokens, dim] as the arrays that are kept."""
        raise NotImplementedError

    def decode(self, parts: Arrays) -> tuple[Any, Any]:
        """Arrays as the keys and values that attention takes."""
        raise NotImplementedError

    def solo_arrays(self, row: Any) -> Arrays:
        """A solo row's arrays, their columns in the order of their tokens: where every token is kept there may be more
        room behind them; otherwise they are the first tokens, as many as the ring keeps, and the last ones."""
        raise NotImplementedError

    def solo_row(self, parts: Arrays, length: int) -> Any:
        """A solo row of arrays that are its own, with the columns of held_ranges(length) in that order. Where every
        token is kept there may be more room behind them."""
        raise NotImplementedError

    # Which tokens have columns, and where.

    def held_columns(self, tokens: int) -> int:
        """Columns that so many tokens take."""
        return tokens if self.ring is None else min(tokens, self.ring.size)

    def held_ranges(self, tokens: int) -> tuple[Range, ...]:
        """Those of a row's tokens that are held when it has so many."""
        return ranges_of(self._slot_runs(tokens))

    def _slot_runs(self, tokens: int) -> Runs:
        return linear(tokens) if self.ring is None else self.ring.runs(tokens)

    def columns(self, window: int | None = None) -> Columns:
        """What this step touches."""
        ring = self.ring
        return self.positions.linear(window) if ring is None else self.positions.ring(ring.size, ring.keep, window)

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
        self._new, self._unwritten = [], []

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def may_be_held(self) -> bool:
        """Whether it costs nothing if others hold the arrays for a while: what MLX writes then, it copies."""
        return self._leaves_writing

    def empty(self) -> bool:
        return not self.parts

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        assert num_tokens == self.positions.tokens, f"{num_tokens} tokens in a step of {self.positions.tokens}"
        return self.columns(window_size).mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write [rows, heads, tokens, dim] at each row's own columns; return the columns that the step reads."""
        new = self.encode(keys, values)
        self._allocate(new)
        # Handles of their own: writing with an index changes the one that it is given.
        self._new, self._unwritten = new, [part[...] for part in self.parts] if self._leaves_writing else []
        at = self.columns()
        for index, part in enumerate(new):
            if at.rows == self.slots:
                self.parts[index] = mx.put_along_axis(self.parts[index], at.write_index, part, axis=2)
            else:
                rows = part.squeeze(2) if at.array.ndim == 1 else part.swapaxes(1, 2)
                self.parts[index][at.row_index, :, at.array] = rows
        return self.keys_and_values()

    def leave_writing(self) -> tuple[Arrays, Arrays]:
        """For who writes the new columns himself, into the very arrays: these, and the columns. From the next step on
        update_and_fetch() leaves it to him; what it gives him must not be used then."""
        if self._unwritten:
            self.parts, self._unwritten = self._unwritten, []
        self._leaves_writing = True
        return self.parts, self._new

    def keep_written(self) -> None:
        """Nobody else writes. Only arrays that nothing else holds are written in place."""
        self._leaves_writing, self._unwritten = False, []

    def keys_and_values(self) -> tuple[Any, Any]:
        at = self.columns()
        return self.decode([part[: at.rows, :, : at.width] for part in self.parts])

    # What the lane calls.

    def merge(self, slot: int, row: Any, length: int) -> None:
        """Copy a row of `length` tokens that was processed alone into a slot."""
        if held := self.held_alone(row, length):
            for run in self._slot_runs(length):
                new = columns(held, [(run.first, run.last)])
                self._allocate(new)
                for index, part in enumerate(new):
                    self.parts[index][slot : slot + 1, :, run.column : run.column + part.shape[2]] = part

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
        held = self.held_in(slot, length)
        parts = copied_columns(held, self.held_ranges(length)) if held else []
        mx.eval(parts)
        return self.solo_row(parts, length)

    def held_alone(self, row: Any, length: int) -> list[Held]:
        """What a solo row of `length` tokens holds: nothing where it has none, or its layer uses no cache."""
        if length == 0 or row.empty():
            return []
        assert row.offset == length, f"a row of {row.offset} tokens, {length} expected"
        arrays = self.solo_arrays(row)
        columns = arrays[0].shape[2]
        assert columns >= self.held_columns(length), f"{columns} columns of a row of {length} tokens in {self.ring}"
        runs = linear(length) if self.ring is None else in_order(length, columns, self.ring.keep)
        return [Held(numbers(len(arrays)), tuple(arrays), runs, self.ring)]

    def held_in(self, slot: int, length: int) -> list[Held]:
        """What is held of the row in a slot."""
        if length == 0 or not self.parts:
            return []
        return [Held(numbers(len(self.parts)), tuple(self.parts), self._slot_runs(length), self.ring, slot)]

    def resize(self, slots: int, capacity: int) -> None:
        """Hold so many slots of so many tokens each."""
        self.slots, self.capacity = slots, self.held_columns(capacity)
        self.parts = [_resized(part, self.slots, self.capacity) for part in self.parts]
        # One layer at a time, so that only one is ever held twice.
        mx.eval(self.parts)

    def clear(self) -> None:
        self.state = []

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
