"""What MLX computes on here, and how fast its products and copies are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from lanes.machine import memory_bytes, physical_cores
from lanes.sizes import device_memory_bytes
from lanes.tuning import backend

INNER, OUTER = 1024, 4096
# A decode step of one row and of eight, and a piece of a prompt.
ROW_COUNTS = (1, 8, 512)
COPY_BYTES = 64 << 20
REPETITIONS = 3
# What takes so long at once is slow enough to be told by that: the reference BLAS takes seconds.
SLOW_S = 0.5


def describe() -> dict[str, Any]:
    """Plain data: backend, device (a name, or None), cores, memory_bytes (of the machine), device_memory_bytes,
    product_gflops (by dtype and number of rows, with a matrix of 1024 x 4096), copy_bytes_per_s (read and written)."""
    on = backend()
    info = {} if on == "cpu" else mx.device_info()
    dtypes = (mx.float32,) if on == "cpu" else (mx.float32, mx.float16, mx.bfloat16)
    products = {str(dtype).removeprefix("mlx.core."): _products(dtype) for dtype in dtypes}
    return {
        "backend": on,
        "device": str(info["device_name"]) if "device_name" in info else None,
        "cores": physical_cores(),
        "memory_bytes": memory_bytes(),
        "device_memory_bytes": device_memory_bytes(),
        "product_gflops": products,
        "copy_bytes_per_s": _copy_rate(),
    }


def _products(dtype: mx.Dtype) -> dict[str, float]:
    matrix = mx.random.normal((OUTER, INNER)).astype(dtype)
    found = {}
    for rows in ROW_COUNTS:
        x = mx.random.normal((rows, INNER)).astype(dtype)
        mx.eval(matrix, x)
        seconds = _best_s(lambda x=x: x @ matrix.T)  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
        found[f"{rows} rows"] = 2e-9 * rows * INNER * OUTER / seconds
    return found


def _copy_rate() -> float:
    array = mx.zeros((COPY_BYTES // 4,), dtype=mx.float32)
    mx.eval(array)
    return 2 * COPY_BYTES / _best_s(lambda: array + 1)


def _best_s(work: Callable[[], mx.array]) -> float:
    """Seconds for one of four that the device may overlap; the best of the repetitions."""
    began_s = time.perf_counter()
    mx.eval(work())
    best = time.perf_counter() - began_s
    if best > SLOW_S:
        return best
    for _ in range(REPETITIONS):
        began_s = time.perf_counter()
        mx.eval([work() for _ in range(4)])
        best = min(best, (time.perf_counter() - began_s) / 4)
    return best
