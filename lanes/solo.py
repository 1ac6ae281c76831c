"""The caches of one row alone: mlx-lm's own, with keys and values quantized from the first token on where asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from lanes.rows.rotating_qkv import RotatingQuantizedCache


class CannotQuantize(Exception):
    """The model's keys and values cannot be quantized; the message says why."""


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Makes the caches of a new row. bits None: keys and values as the model computes them."""

    model: Any
    bits: int | None = None
    group_size: int = 64

    def __call__(self) -> list[Any]:
        """One for each of the model's caches, empty. Raises CannotQuantize."""
        caches = make_prompt_cache(self.model)
        return [self._quantized(cache) for cache in caches] if self.bits else caches

    def _quantized(self, cache: Any) -> Any:
        assert self.bits is not None
        if type(cache) is KVCache:
            return QuantizedKVCache(self.group_size, self.bits)
        if type(cache) is RotatingKVCache:
            return RotatingQuantizedCache(cache.max_size, cache.keep, self.group_size, self.bits)
        if type(cache) is CacheList:
            return CacheList(*(self._quantized(member) for member in cache.caches))
        if type(cache) is ArraysCache:
            return cache
        raise CannotQuantize(f"{type(cache).__name__} has no quantized form")
