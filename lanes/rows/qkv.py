"""Quantized attention: keys and values packed, with scales and biases, quantized from the first token on.

Attention is mlx-lm's quantized one, which it takes for a cache that has `bits`.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from lanes.rows.columns import Arrays, ColumnRows
from lanes.rows.runs import Ring


class QuantizedRows(ColumnRows):
    """What the quantized kinds share: three arrays for keys and three for values."""

    def __init__(self, group_size: int, bits: int, ring: Ring | None = None) -> None:
        super().__init__(ring)
        self.group_size = group_size
        self.bits = bits

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        return [part for plain in (keys, values) for part in mx.quantize(plain, self.group_size, self.bits)]

    def decode(self, parts: Arrays) -> tuple[list[mx.array], list[mx.array]]:
        return parts[:3], parts[3:]


class QKVRows(QuantizedRows):
    kind = "qkv"

    @classmethod
    def like(cls, row: QuantizedKVCache) -> QKVRows:
        return cls(row.group_size, row.bits)

    def solo_arrays(self, row: QuantizedKVCache) -> Arrays:
        return [*row.keys, *row.values]

    def solo_row(self, parts: Arrays, length: int) -> QuantizedKVCache:
        row = QuantizedKVCache(self.group_size, self.bits)
        if parts:
            row.state = (parts[:3], parts[3:], length, self.group_size, self.bits)
        return row
