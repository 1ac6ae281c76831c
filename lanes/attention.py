"""Attention of a decode step: one query per row against the columns of its slot, in the form that is fastest here.

mlx-lm's models call scaled_dot_product_attention, a name in each model's own module, which calls MLX's fused kernel.
With a mask that kernel is the slow way for one query: on an H200 it takes twice (8 rows of 1,024) to four times (64
rows, or 8,192 tokens) as long as its three steps by hand, on a CPU half as long again. So the name is pointed at an
object of this file, which takes another form for the steps of a lane and leaves everything else as it was.

    fused    MLX's kernel, over the longest row's columns, with a mask
    by hand  softmax(q k^T + mask) v, over the longest row's columns
    own      a CUDA kernel over each row's own columns (cuda_attention.py)

Which is fastest is measured when the model is loaded, with the shape of its heads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models import base

from lanes.cuda_attention import attend_own_columns, lanes_per_column
from lanes.rows.columns import ColumnRows
from lanes.rows.positions import Positions

NAME = "scaled_dot_product_attention"
Form = Literal["fused", "by hand", "own"]

# What is measured: as many rows and columns as a lane under way, a few times, the best of each.
MEASURED_ROWS = 8
MEASURED_COLUMNS = 1024
REPETITIONS = 5


class LaneAttention:
    """Stands where a model's module has scaled_dot_product_attention."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As mlx_lm.models.base.scaled_dot_product_attention; queries [rows, heads, tokens, dim]."""
        ours = isinstance(cache, ColumnRows) and not hasattr(cache, "bits") and sinks is None and queries.shape[2] == 1
        if ours and self.form == "own" and mask is cache.columns().mask and _fits_kernel(queries, keys, values):
            all_keys, all_values = cache.parts
            positions, width = cache.positions.array, cache.columns().width
            return attend_own_columns(queries, all_keys, all_values, positions, scale, width)
        if ours and self.form != "fused" and isinstance(mask, mx.array) and mask.dtype == mx.bool_:
            return one_query(queries, keys, values, scale, mask)
        attended: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return attended


def _fits_kernel(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    heads, kv_heads, dim = queries.shape[1], keys.shape[1], keys.shape[3]
    return values.shape[3] == dim and lanes_per_column(heads, kv_heads, dim, keys.dtype) is not None


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


def fastest_form(heads: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> Form:
    """Measure the forms that this device has, some milliseconds each."""
    rows, columns = MEASURED_ROWS, MEASURED_COLUMNS
    queries = mx.ones((rows, heads, 1, dim), dtype)
    array = mx.ones((rows, kv_heads, 2 * columns, dim), dtype)
    keys = array[:, :, :columns]
    positions = Positions.of([columns - 1] * rows)
    mask = positions.linear().mask
    mx.eval(queries, array, mask)
    forms: dict[Form, Callable[[], mx.array]] = {
        "fused": lambda: mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask=mask),
        "by hand": lambda: one_query(queries, keys, keys, 1.0, mask),
    }
    if mx.cuda.is_available() and lanes_per_column(heads, kv_heads, dim, dtype) is not None:
        forms["own"] = lambda: attend_own_columns(queries, array, array, positions.array, 1.0, columns)
    return min(forms, key=lambda form: _best_s(forms[form]))


def _best_s(form: Callable[[], mx.array]) -> float:
    """Seconds for several calls that the device may overlap as it does in a model; the best of the repetitions."""
    mx.eval(form())
    best = float("inf")
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        mx.eval([form() for _ in range(4)])
        best = min(best, time.perf_counter() - began)
    return best


def install(model: Any, form: Form) -> None:
    """Have the modules that the model's layers come from take this form."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        present = getattr(module, NAME, None)
        if present is base.scaled_dot_product_attention or isinstance(present, LaneAttention):
            setattr(module, NAME, LaneAttention(form))
