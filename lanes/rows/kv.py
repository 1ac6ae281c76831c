"""Plain attention: the keys and values of every token, token p in column p. A row may be cut at any token."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from lanes.rows.columns import Arrays, ColumnRows


class PlainRows(ColumnRows):
    """What the kinds share that keep keys and values as the model computes them."""

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        return [keys, values]

    def decode(self, parts: Arrays) -> tuple[mx.array, mx.array]:
        return parts[0], parts[1]

    # Some models read and set the whole arrays, to tie the evaluation of one to another's.

    @property
    def keys(self) -> mx.array:
        return self.parts[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.parts[0] = array

    @property
    def values(self) -> mx.array:
        return self.parts[1]

    @values.setter
    def values(self, array: mx.array) -> None:
        self.parts[1] = array


class KVRows(PlainRows):
    kind = "kv"

    @classmethod
    def like(cls, row: KVCache) -> KVRows:
        return cls()

    def solo_arrays(self, row: KVCache) -> Arrays:
        return [row.keys, row.values]

    def solo_row(self, parts: Arrays, length: int) -> KVCache:
        row = KVCache()
        if parts:
            row.state = (*parts, length)
        return row
