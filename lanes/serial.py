"""The serial lane's caches: one row at a time in mlx-lm's own, for models whose caches have no rows in slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lanes.rows import held_alone
from lanes.rows.held import Held
from lanes.rows.slots import Slots


class SoloCaches:
    """The caches of the one row of a serial lane, with the verbs of lanes.batch.SlotCaches."""

    lane = "serial"
    may_be_held = False

    def __init__(self) -> None:
        self.table = Slots(1)
        self.row: Sequence[Any] = ()

    @property
    def slots(self) -> int:
        return 1

    @property
    def capacity_tokens(self) -> int:
        return max(self.table.lengths, default=0)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.row if not cache.empty())

    def merge(self, row_id: int, row: Sequence[Any], length: int) -> None:
        self.table.claim(row_id, length)
        self.row = row

    def leave(self, row_id: int) -> None:
        self.table.release(row_id)
        self.row = ()

    def shrink(self) -> None:
        """One row has what it needs."""

    def held(self, row_id: int) -> list[Held]:
        """What a row has in its caches, which are of known kinds."""
        return held_alone(self.row, self.table.length_of(row_id))

    def take(self, row_id: int) -> list[Any]:
        assert row_id in self.table, f"row {row_id} is not in the lane"
        return list(self.row)

    def compact(self) -> None:
        """One row has no free slot before it."""

    def give_back(self) -> None:
        """It has what it needs."""

    def begin_step(self) -> Sequence[Any]:
        return self.row

    def end_step(self, tokens: Sequence[int] | None = None) -> None:
        self.table.advance(tokens)

    def clear(self) -> None:
        self.table = Slots(1)
        self.row = ()

    def check(self) -> None:
        self.table.check()
        assert self.table or not self.row, "no row, but caches"
