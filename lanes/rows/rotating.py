"""Sliding-window attention: a ring of the window's columns, some of the first tokens kept in front of it.

What a row has lost of its past is gone: it can be cut only where its ring was saved.
"""

from __future__ import annotations

from mlx_lm.models.cache import RotatingKVCache

from lanes.rows.columns import Arrays
from lanes.rows.kv import PlainRows
from lanes.rows.runs import Ring


class RotatingRows(PlainRows):
    kind = "rotating"

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self._ring = ring

    @classmethod
    def like(cls, row: RotatingKVCache) -> RotatingRows:
        return cls(Ring(row.max_size, row.keep))

    def solo_arrays(self, row: RotatingKVCache) -> Arrays:
        # mlx-lm's ring turns too, at places of its own, and may hold more than the window after a chunk.
        return [row._temporal_order(part) for part in (row.keys, row.values)]

    def solo_row(self, parts: Arrays, length: int) -> RotatingKVCache:
        row = RotatingKVCache(self._ring.size, self._ring.keep)
        if parts:
            row.state = (*parts, length, self._ring.keep, self._ring.size, parts[0].shape[2])
        return row
