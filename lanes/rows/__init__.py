"""Rows in slots: one file for each kind of cache, one table, the same verbs.

    like(row)                     empty rows for caches such as this solo one
    merge(slot, row, length)      a row that was processed alone enters a slot
    filter(slot)                  the row in a slot leaves
    take(slot, length)            the row comes out as a solo cache that holds nothing of the lane's
    lift(slot, length)            the row's arrays, copied out
    put(slot, lifted)             and into another slot
    held_alone(row, length)       what a solo cache holds, where it lies
    held_in(slot, length)         what is held of the row in a slot
    resize(slots, capacity)       hold so many slots of so many tokens
    clear()                       give the memory back
    may_be_held                   whether others may hold the arrays while steps go on

and what mlx-lm's models call while a step runs: update_and_fetch, make_mask, offset, state, keys_and_values; for
recurrent state [], lengths, advance. A new kind is a new file and a line in KINDS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from lanes.rows.columns import ColumnRows
from lanes.rows.group import GroupRows
from lanes.rows.held import Held, named, names_in, numbers
from lanes.rows.kv import KVRows
from lanes.rows.positions import Positions
from lanes.rows.qkv import QKVRows
from lanes.rows.rotating import RotatingRows
from lanes.rows.rotating_qkv import RotatingQKVRows, RotatingQuantizedCache
from lanes.rows.runs import linear
from lanes.rows.ssm import SSMRows


class Rows(Protocol):
    """All rows of a lane in one layer's cache."""

    kind: str

    @property
    def positions(self) -> Positions: ...
    @positions.setter
    def positions(self, positions: Positions) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def may_be_held(self) -> bool: ...
    @property
    def state(self) -> list[Any]: ...
    @state.setter
    def state(self, arrays: list[Any]) -> None: ...
    def merge(self, slot: int, row: Any, length: int) -> None: ...
    def filter(self, slot: int) -> None: ...
    def take(self, slot: int, length: int) -> Any: ...
    def lift(self, slot: int, length: int) -> list[Any]: ...
    def put(self, slot: int, lifted: list[Any]) -> None: ...
    def held_alone(self, row: Any, length: int) -> list[Held]: ...
    def held_in(self, slot: int, length: int) -> list[Held]: ...
    def resize(self, slots: int, capacity: int) -> None: ...
    def clear(self) -> None: ...


# By the exact type of the solo cache: a subclass differs in something, and nobody has looked at what.
KINDS: dict[type, Any] = {
    KVCache: KVRows,
    RotatingKVCache: RotatingRows,
    QuantizedKVCache: QKVRows,
    RotatingQuantizedCache: RotatingQKVRows,
    ArraysCache: SSMRows,
}


def kind_of(row: Any) -> str | None:
    """The name of a solo cache's kind, of a CacheList those of its members; None if one has no rows in slots."""
    if type(row) is CacheList:
        kinds = [kind_of(member) for member in row.caches]
        return None if None in kinds else "+".join(str(kind) for kind in kinds)
    rows = KINDS.get(type(row))
    return rows.kind if rows else None


def rows_like(row: Any) -> Rows:
    """Empty rows for a solo cache, of which kind_of() has said that it has a kind."""
    rows: Rows
    rows = GroupRows([rows_like(m) for m in row.caches]) if type(row) is CacheList else KINDS[type(row)].like(row)
    return rows


def rows_for(caches: Sequence[object]) -> list[Rows]:
    """Empty rows for each of a model's solo caches."""
    return [rows_like(cache) for cache in caches]


def held_alone(caches: Sequence[object], length: int) -> list[Held]:
    """What a row of `length` tokens holds in caches of its own, all of a known kind."""
    return named(enumerate(rows_like(cache).held_alone(cache, length) for cache in caches))


def held_in(layers: Sequence[Rows], slot: int, length: int) -> list[Held]:
    """What is held of the row in a slot. Layers that keep every token hold the same of it, and are told as one."""
    plain = {n: layer.parts for n, layer in enumerate(layers) if isinstance(layer, ColumnRows) and layer.ring is None}
    others = named((n, layer.held_in(slot, length)) for n, layer in enumerate(layers) if n not in plain)
    arrays = tuple([array for parts in plain.values() for array in parts])
    if length == 0 or not arrays:
        return others
    names = tuple([name for n, parts in plain.items() for name in names_in(n, numbers(len(parts)))])
    return [Held(names, arrays, linear(length), slot=slot), *others]
