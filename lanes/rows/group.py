"""Several caches of one layer (mlx-lm's CacheList): every verb goes to each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from lanes.rows.held import Held, named
from lanes.rows.positions import Positions


class GroupRows:
    kind = "list"

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = tuple(rows)

    @property
    def positions(self) -> Positions:
        positions: Positions = self.rows[0].positions
        return positions

    @positions.setter
    def positions(self, positions: Positions) -> None:
        for rows in self.rows:
            rows.positions = positions

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    @property
    def offset(self) -> mx.array | int:
        return self.positions.offset

    @property
    def state(self) -> list[mx.array]:
        return [array for rows in self.rows for array in rows.state]

    @state.setter
    def state(self, arrays: Sequence[mx.array]) -> None:
        first = 0
        for rows in self.rows:
            count = len(rows.state)
            rows.state = arrays[first : first + count]
            first += count

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows)

    @property
    def may_be_held(self) -> bool:
        return all(rows.may_be_held for rows in self.rows)

    def empty(self) -> bool:
        return bool(self.rows[0].empty())

    def merge(self, slot: int, row: CacheList, length: int) -> None:
        for rows, cache in zip(self.rows, row.caches, strict=True):
            rows.merge(slot, cache, length)

    def take(self, slot: int, length: int) -> CacheList:
        return CacheList(*(rows.take(slot, length) for rows in self.rows))

    def held_alone(self, row: CacheList, length: int) -> list[Held]:
        members = zip(self.rows, row.caches, strict=True)
        return named(enumerate(rows.held_alone(cache, length) for rows, cache in members))

    def held_in(self, slot: int, length: int) -> list[Held]:
        return named(enumerate(rows.held_in(slot, length) for rows in self.rows))

    def filter(self, slot: int) -> None:
        self._each(lambda rows: rows.filter(slot))

    def lift(self, slot: int, length: int) -> list[mx.array]:
        return [array for rows in self.rows for array in rows.lift(slot, length)]

    def put(self, slot: int, lifted: Sequence[mx.array]) -> None:
        first = 0
        for rows in self.rows:
            count = len(rows.state)
            rows.put(slot, lifted[first : first + count])
            first += count

    def resize(self, slots: int, capacity: int) -> None:
        self._each(lambda rows: rows.resize(slots, capacity))

    def clear(self) -> None:
        self._each(lambda rows: rows.clear())

    def _each(self, call: Callable[[Any], None]) -> None:
        for rows in self.rows:
            call(rows)
