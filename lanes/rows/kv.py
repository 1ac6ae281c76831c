"""Plain attention: the keys and values of every token, token p in column p. A row may be cut at any token."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from lanes.rows.columns import Arrays, ColumnRows
from lanes.rows.positions import Columns


class KVRows(ColumnRows):
    kind = "kv"

    @classmethod
    def like(cls, row: KVCache) -> KVRows:
        return cls()

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        return [keys, values]

    def decode(self, parts: Arrays) -> tuple[mx.array, mx.array]:
        return parts[0], parts[1]

    def columns(self, window: int | None = None) -> Columns:
        return self.positions.linear(window)

    def solo_parts(self, row: KVCache, length: int) -> list[tuple[int, Arrays]]:
        assert row.offset == length, f"a row of {row.offset} tokens, {length} expected"
        return [(0, [part[..., :length, :] for part in (row.keys, row.values)])]

    def solo_row(self, parts: Arrays, length: int) -> KVCache:
        row = KVCache()
        if parts:
            row.state = (*parts, length)
        return row
