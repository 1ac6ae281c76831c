"""Sizes of a model's caches and of the device's memory, in bytes. Nothing is computed for it: shapes are known before
values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from lanes.geometry import RowGeometry
from lanes.machine import memory_bytes
from lanes.rows import kind_of, rows_like
from lanes.rows.columns import ColumnRows
from lanes.solo import RowMaker
from lanes.tuning import backend

# Enough for every array of a row to be there, and less than any window.
TOKENS = 2
ENDLESS = 1 << 40


def row_geometry(make_row: RowMaker) -> RowGeometry | None:
    """Of a whole row; None where one of its caches is of no known kind."""
    found = cache_geometries(make_row)
    known = [geometry for geometry in found if geometry is not None]
    return RowGeometry.total(known) if len(known) == len(found) else None


def cache_geometries(make_row: RowMaker) -> list[RowGeometry | None]:
    """Of each cache, in the model's order; None for one of no known kind."""
    row = make_row()
    make_row.model(mx.zeros((1, TOKENS), dtype=mx.int32), cache=row)
    return [_geometry(cache) if kind_of(cache) else None for cache in row]


def _geometry(cache: Any) -> RowGeometry:
    """Of a cache that holds TOKENS tokens, or nothing where its layer uses none."""
    if isinstance(cache, CacheList):
        return RowGeometry.total(_geometry(member) for member in cache.caches)
    if cache.empty():
        return RowGeometry()
    rows = rows_like(cache)
    if not isinstance(rows, ColumnRows):
        return RowGeometry(state_bytes=cache.nbytes)
    column_bytes = sum(part[:, :, :1].nbytes for part in rows.solo_arrays(cache))
    ring = rows.held_columns(ENDLESS)
    return RowGeometry(rings=((ring, column_bytes),)) if ring < ENDLESS else RowGeometry(column_bytes=column_bytes)


def device_memory_bytes() -> int:
    """What the device has for weights and caches together."""
    info = mx.device_info()
    if backend() == "metal":
        return int(info["max_recommended_working_set_size"])
    if backend() == "cuda":
        return int(info.get("total_memory", mx.get_memory_limit()))
    return memory_bytes()
