"""Sliding-window attention over quantized keys and values, which mlx-lm does not have: so the solo row is here too."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from lanes.rows.columns import Arrays
from lanes.rows.qkv import QuantizedRows
from lanes.rows.runs import Ring


class RotatingQuantizedCache:
    """One row alone: its window's columns in the order of their tokens, the first `keep` tokens in front.

    Between chunks it holds as much as its next token needs to look back on, like mlx-lm's RotatingKVCache.
    """

    def __init__(self, max_size: int, keep: int, group_size: int, bits: int) -> None:
        self.max_size = max_size
        self.keep = keep
        self.group_size = group_size
        self.bits = bits
        self.offset = 0
        self.parts: Arrays = []

    @property
    def state(self) -> Arrays:
        return self.parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def empty(self) -> bool:
        return not self.parts

    def make_mask(self, num_tokens: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """A chunk's mask depends on the offset alone: it is mlx-lm's own for a ring that long. A token's is another:
        mlx-lm's ring turns, and these columns are in order."""
        if num_tokens == 1:
            held = min(self.offset + 1, self.max_size)
            return None if window_size is None or window_size >= held else mx.arange(held) >= held - window_size
        ring = RotatingKVCache(self.max_size, self.keep)
        ring.offset = self.offset
        return ring.make_mask(num_tokens, window_size=window_size, return_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Arrays, Arrays]:
        """[1, heads, tokens, dim]; returns what the new tokens may look at: the window before them, and themselves."""
        new = [part for plain in (keys, values) for part in mx.quantize(plain, self.group_size, self.bits)]
        surplus = min(self.offset, self._held) - self.max_size + 1
        if self.parts and surplus > 0:
            self.parts = [
                mx.concatenate([part[..., : self.keep, :], part[..., self.keep + surplus :, :]], axis=2)
                for part in self.parts
            ]
        if self.parts:
            new = [mx.concatenate(list(pair), axis=2) for pair in zip(self.parts, new, strict=True)]
        self.parts = new
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Arrays, Arrays]:
        return self.parts[:3], self.parts[3:]

    @property
    def _held(self) -> int:
        return self.parts[0].shape[2] if self.parts else 0


class RotatingQKVRows(QuantizedRows):
    kind = "rotating-qkv"

    def __init__(self, ring: Ring, group_size: int, bits: int) -> None:
        super().__init__(group_size, bits, ring)
        self._ring = ring

    @classmethod
    def like(cls, row: RotatingQuantizedCache) -> RotatingQKVRows:
        return cls(Ring(row.max_size, row.keep), row.group_size, row.bits)

    def solo_arrays(self, row: RotatingQuantizedCache) -> Arrays:
        return row.parts

    def solo_row(self, parts: Arrays, length: int) -> RotatingQuantizedCache:
        row = RotatingQuantizedCache(self._ring.size, self._ring.keep, self.group_size, self.bits)
        row.parts, row.offset = parts, length
        return row
