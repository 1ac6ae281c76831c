"""The batch lane's caches: a slot for each row, in every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from lanes.rounding import capacity_for, read_width, round_rows
from lanes.rows import Rows, held_in, rows_for
from lanes.rows.bands import Cutter
from lanes.rows.held import Held
from lanes.rows.positions import Positions
from lanes.rows.slots import Slots

# So many times what is needed; a copy of what the rows hold each time that it is.
WASTED = 4
WORTH_GIVING_BACK_BYTES = 64 << 20
ROOM_TOKENS = 256


class SlotCaches:
    """The caches of all rows of a batch lane, and the table of which row is where.

    Arrays have a power of two of slots and of tokens, grow when a row needs it, and are given back with the last row,
    or when most of them is unused: one long row, or many, would else leave them large for as long as there is any.
    """

    lane = "batch"

    def __init__(
        self,
        solo: Sequence[object],
        max_rows: int,
        columns_per_call: float | None = None,
        step_rows: Callable[[int], int] = int,
    ) -> None:
        """solo: the caches that the model makes for one row, of kinds that have rows in slots. columns_per_call: see
        lanes.rows.bands; None reads all rows together. step_rows: how many rows a step computes for so many slots
        in use."""
        self.table = Slots(max_rows)
        self.layers: list[Rows] = rows_for(solo)
        self.slots = self.capacity_tokens = 0
        self._cutter = Cutter(columns_per_call)
        self.step_rows = step_rows

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def may_be_held(self) -> bool:
        """Whether others may hold the arrays while steps go on."""
        return all(layer.may_be_held for layer in self.layers)

    def merge(self, row_id: int, row: Sequence[Any], length: int) -> None:
        """Enter a row whose first `length` tokens have been processed in caches of its own."""
        slot = self.table.claim(row_id, length)
        self._reserve(slot + 1, length + 1)
        for layer, cache in zip(self.layers, row, strict=True):
            layer.merge(slot, cache, length)

    def leave(self, row_id: int) -> None:
        slot = self.table.release(row_id)
        for layer in self.layers:
            layer.filter(slot)
        if not self.table:
            self.clear()

    def shrink(self) -> None:
        """Give back the slots and columns that the rows which are left do not need."""
        while self.compact():
            pass
        if self.table:
            self.slots = round_rows(len(self.table.rows))
            self.capacity_tokens = capacity_for(max(self.table.lengths) + 1)
            for layer in self.layers:
                layer.resize(self.slots, self.capacity_tokens)

    def give_back(self) -> None:
        """Shrink, where what the rows need, with room to go on, is a small part of what there is and that is much."""
        needed = round_rows(len(self.table)) * capacity_for(max(self.table.lengths) + ROOM_TOKENS)
        if self.slots * self.capacity_tokens >= WASTED * needed and self.nbytes >= WORTH_GIVING_BACK_BYTES:
            self.shrink()

    def held(self, row_id: int) -> list[Held]:
        """What a row has in the lane's arrays, where it lies."""
        slot, length = self.table.rows.index(row_id), self.table.length_of(row_id)
        return held_in(self.layers, slot, length)

    def take(self, row_id: int) -> list[Any]:
        """A row's caches as they would be had it been alone, evaluated; the row stays."""
        slot, length = self.table.rows.index(row_id), self.table.length_of(row_id)
        return [layer.take(slot, length) for layer in self.layers]

    def compact(self) -> tuple[int, int] | None:
        """Move the last row into the lowest free slot, where steps get shorter by it; returns (source, target)."""
        hole = self.table.hole()
        if hole is None or self.step_rows(len(self.table.rows)) == self.step_rows(len(self.table)):
            return None
        source, target = hole
        length = self.table.lengths[source]
        lifted = [layer.lift(source, length) for layer in self.layers]
        # Copied out first: a lazy view of an array as its own source would turn the write into a copy of it all.
        mx.eval(lifted)
        for layer, arrays in zip(self.layers, lifted, strict=True):
            layer.put(target, arrays)
        self.table.move(source, target)
        return hole

    def begin_step(self, tokens: int = 1) -> list[Rows]:
        """Make room for so many tokens more in each row; returns the caches to call the model with."""
        lengths = self.table.lengths
        self._reserve(len(lengths), max(lengths) + tokens)
        widths = [read_width(length + tokens) for length in lengths]
        return self._at(Positions.of(lengths, self._cutter.bands(self.table.rows, widths), tokens))

    def begin_padded_step(self, rows: int, width: int) -> list[Rows]:
        """As begin_step(), for so many slots, those in use or more, that are all read to one width."""
        lengths = self.table.lengths
        self._reserve(rows, width)
        padded = mx.array(lengths + [0] * (rows - len(lengths)), dtype=mx.int32)
        return self._at(Positions(padded, width))

    def _at(self, positions: Positions) -> list[Rows]:
        for layer in self.layers:
            layer.positions = positions
        return self.layers

    def end_step(self, tokens: Sequence[int] | None = None) -> None:
        """The rows keep the token that they were fed, or so many of those, by slot: what is behind in their slots lies
        beyond their masks, and is written over by what comes."""
        self.table.advance(tokens)

    def clear(self) -> None:
        """Forget all rows and free the arrays."""
        self.table = Slots(self.table.limit)
        self.slots = self.capacity_tokens = 0
        self._at(Positions.of([]))
        for layer in self.layers:
            layer.clear()

    def _reserve(self, slots: int, tokens: int) -> None:
        if slots <= self.slots and tokens <= self.capacity_tokens:
            return
        self.slots = max(self.slots, round_rows(slots))
        self.capacity_tokens = max(self.capacity_tokens, capacity_for(tokens))
        for layer in self.layers:
            layer.resize(self.slots, self.capacity_tokens)

    def check(self) -> None:
        self.table.check()
        assert all(length <= self.capacity_tokens for length in self.table.lengths), (
            f"rows of {self.table.lengths} tokens in slots of {self.capacity_tokens}"
        )
        assert self.table or not self.nbytes, f"no rows, but {self.nbytes} bytes of caches"
