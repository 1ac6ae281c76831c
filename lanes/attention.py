"""Attention of a decode step: one query per row against the columns of its slot.

mlx-lm's models call scaled_dot_product_attention, a name in each model's own module, which calls MLX's fused kernel.
With a mask that kernel is the slow way for one query: on an H200 it takes twice (8 rows of 1,024) to four times (64
rows, or 8,192 tokens) as long as the three steps by hand, on a CPU half as long again. So the name is pointed at
attend() below, which takes the hand-written form for the steps of a lane and leaves everything else as it was. Which
form is faster on this device is measured when the model is loaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from lanes.rows.columns import ColumnRows

NAME = "scaled_dot_product_attention"
Attention = Callable[..., mx.array]

# What is measured: as many rows and columns as a lane under way, a few times, the best of each.
MEASURED_ROWS = 8
MEASURED_COLUMNS = 512
REPETITIONS = 5


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """As mlx_lm.models.base.scaled_dot_product_attention; queries [rows, heads, tokens, dim]."""
    by_hand = isinstance(cache, ColumnRows) and not hasattr(cache, "bits") and sinks is None
    if by_hand and queries.shape[2] == 1 and isinstance(mask, mx.array):
        return one_query(queries, keys, values, scale, mask)
    plain: Attention = base.scaled_dot_product_attention
    return plain(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def one_query(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
    """softmax(q k^T scale + mask) v for queries [rows, heads, 1, dim], keys and values [rows, kv_heads, columns, dim],
    bool mask [rows, 1, 1, columns]."""
    rows, heads, _, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = grouped @ keys.swapaxes(-1, -2)
    scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(rows, heads, 1, values.shape[-1])


def hand_written_is_faster(heads: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> bool:
    """Measure both forms on this device, some milliseconds each."""
    rows, columns = MEASURED_ROWS, MEASURED_COLUMNS
    queries = mx.ones((rows, heads, 1, dim), dtype)
    keys = mx.ones((rows, kv_heads, 2 * columns, dim), dtype)[:, :, :columns]
    mask = (mx.arange(columns) <= mx.full((rows, 1), columns // 2))[:, None, None, :]
    mx.eval(queries, keys, mask)

    def fused() -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask=mask)

    def by_hand() -> mx.array:
        return one_query(queries, keys, keys, 1.0, mask)

    return _best_s(by_hand) < _best_s(fused)


def _best_s(form: Callable[[], mx.array]) -> float:
    """Seconds for several calls that the device may overlap as it does in a model; the best of the repetitions."""
    mx.eval(form())
    best = float("inf")
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        mx.eval([form() for _ in range(4)])
        best = min(best, time.perf_counter() - began)
    return best


def install(model: Any) -> None:
    """Point the modules that the model's layers come from at attend()."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        if getattr(module, NAME, None) is base.scaled_dot_product_attention:
            setattr(module, NAME, attend)
