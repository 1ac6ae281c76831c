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

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models import base

from lanes.cuda_attention import Packing, attend_own_columns, lanes_per_column
from lanes.cuda_kernel import KernelFailed
from lanes.rows.columns import ColumnRows
from lanes.rows.positions import Positions

logger = logging.getLogger(__name__)

NAME = "scaled_dot_product_attention"
Form = Literal["fused", "by hand", "own"]

# What is measured: as many rows and columns as a lane under way, a few times, the best of each.
MEASURED_ROWS = 8
MEASURED_COLUMNS = 1024
REPETITIONS = 5


class LaneAttention:
    """Stands where a model's module has scaled_dot_product_attention. backend: cpu, cuda or metal."""

    def __init__(self, form: Form, backend: str) -> None:
        self.form = form
        self.backend = backend

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
        attended: mx.array
        packing = Packing(cache.group_size, cache.bits) if hasattr(cache, "bits") else None
        in_lane = isinstance(cache, ColumnRows) and sinks is None and queries.shape[2] == 1
        in_lane = in_lane and isinstance(mask, mx.array) and mask.dtype == mx.bool_
        own = in_lane and self.form == "own" and mask is cache.columns().mask
        if own and _fits_kernel(queries, cache.parts, packing):
            parts, new = cache.leave_writing()
            at, positions = cache.columns(), cache.positions.array
            return attend_own_columns(queries, parts, new, at.array, positions, scale, at.width, packing)
        if isinstance(cache, ColumnRows):
            cache.keep_written()
        if packing and self._lacks_quantized_matmul(queries.shape[2]):
            keys, values = (
                mx.dequantize(packed, scales, biases, packing.group_size, packing.bits)
                for packed, scales, biases in (keys, values)
            )
            if not in_lane:
                return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        elif packing or not in_lane:
            attended = base.scaled_dot_product_attention(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
            return attended
        one_call = fused if self.form == "fused" else by_hand
        if len(cache.positions.bands) < 2:
            return one_call(queries, keys, values, scale, mask)
        parts = []
        for band in cache.positions.bands:
            rows, width = slice(band.first, band.last), min(band.width, keys.shape[2])
            parts.append(
                one_call(queries[rows], keys[rows, :, :width], values[rows, :, :width], scale, mask[rows, ..., :width])
            )
        return mx.concatenate(parts)

    def _lacks_quantized_matmul(self, num_tokens: int) -> bool:
        """Where mlx-lm's attention over quantized keys and values cannot be used, the columns are unpacked first.

        MLX 0.32.4 has no quantized product of batched matrices on CUDA; on Metal, 0.31.2's without transposing was
        wrong for 2 and 3 rows of queries (whether 0.32.4's is right nobody has tried there).
        """
        return self.backend == "cuda" or (self.backend == "metal" and num_tokens in (2, 3))


def fused(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
    """MLX's kernel; arguments as by_hand()."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def by_hand(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
    """softmax(q k^T scale + mask) v for queries [rows, heads, 1, dim], keys and values [rows, kv_heads, columns, dim],
    bool mask [rows, 1, 1, columns]."""
    rows, heads, _, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = grouped @ keys.swapaxes(-1, -2)
    scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(rows, heads, 1, values.shape[-1])


def _fits_kernel(queries: mx.array, parts: Sequence[mx.array], packing: Packing | None) -> bool:
    """parts: as attend_own_columns() takes them."""
    heads, dim = queries.shape[1], queries.shape[3]
    keys, values = parts[0], parts[len(parts) // 2]
    fits = lanes_per_column(heads, keys.shape[1], dim, parts[1].dtype, packing) is not None
    return fits and keys.shape == values.shape and queries.dtype == parts[1].dtype


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest form, and what one more call of it costs, in columns of a row that could be read in its time.

    columns_per_call is None for a form that has no use for more calls.
    """

    form: Form
    columns_per_call: float | None


def forms_for(heads: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> list[Form]:
    """The forms that this device has for such heads."""
    forms: list[Form] = ["fused", "by hand"]
    if mx.cuda.is_available() and lanes_per_column(heads, kv_heads, dim, dtype) is not None:
        forms.append("own")
    return forms


def seconds_by_form(heads: int, kv_heads: int, dim: int, dtype: mx.Dtype, columns: int) -> dict[Form, float]:
    """What a call of each form takes, for MEASURED_ROWS rows of so many columns: twice MEASURED_COLUMNS at most."""
    calls, seconds = _Calls(heads, kv_heads, dim, dtype), dict[Form, float]()
    for form in forms_for(heads, kv_heads, dim, dtype):
        try:
            seconds[form] = calls.best_s(form, columns)
        except KernelFailed as error:
            logger.warning("attention goes by MLX's kernels: %s", error)
    return seconds


def measure(heads: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> Measured:
    """Time the forms that this device has, some milliseconds each."""
    seconds = seconds_by_form(heads, kv_heads, dim, dtype, MEASURED_COLUMNS)
    form = min(seconds, key=lambda form: seconds[form])
    if form == "own":
        return Measured(form, None)
    calls = _Calls(heads, kv_heads, dim, dtype)
    few = MEASURED_COLUMNS // 8
    few_s = calls.best_s(form, few)
    column_s = max(seconds[form] - few_s, 1e-9) / (MEASURED_ROWS * (MEASURED_COLUMNS - few))
    return Measured(form, max(few_s - MEASURED_ROWS * few * column_s, 0.0) / column_s)


class _Calls:
    """One call of each form on arrays of a model's shape."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> None:
        self.queries = [mx.full((MEASURED_ROWS, heads, 1, dim), call / 4, dtype) for call in range(4)]
        self.array = mx.ones((MEASURED_ROWS, kv_heads, 2 * MEASURED_COLUMNS, dim), dtype)
        self.new = mx.ones((MEASURED_ROWS, kv_heads, 1, dim), dtype)
        mx.eval(self.queries, self.array, self.new)

    def best_s(self, form: Form, columns: int) -> float:
        """Seconds for a call, of several that the device may overlap as it does in a model; the best of the trials."""
        positions = Positions.of([columns - 1] * MEASURED_ROWS)
        keys, mask = self.array[:, :, :columns], positions.linear().mask
        mx.eval(mask)

        def attend(queries: mx.array) -> mx.array:
            if form == "own":
                at = positions.array
                return attend_own_columns(queries, [self.array] * 2, [self.new] * 2, at, at, 1.0, columns)
            return (fused if form == "fused" else by_hand)(queries, keys, keys, 1.0, mask)

        def calls(*queries: mx.array) -> list[mx.array]:
            return [attend(each) for each in queries]

        # As a step is there: what a call costs Python is paid once.
        run = mx.compile(calls) if mx.cuda.is_available() else calls
        mx.eval(run(*self.queries))
        best = float("inf")
        for _ in range(REPETITIONS):
            began = time.perf_counter()
            mx.eval(run(*self.queries))
            best = min(best, time.perf_counter() - began)
        return best / len(self.queries)


def install(model: Any, attention: LaneAttention) -> None:
    """Have the modules that the model's layers come from call this."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        present = getattr(module, NAME, None)
        if present is base.scaled_dot_product_attention or isinstance(present, LaneAttention):
            setattr(module, NAME, attention)
