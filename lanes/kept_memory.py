"""Freed memory that is kept for reuse, by MLX and by the C library: how much of it, and when it is let go of.

MLX without a bound keeps every size ever used. At the bound it gives back what is freed and keeps what it has; where
that is of sizes nobody asks for again, every step from then on allocates and frees all that it needs. On an H200 with
Qwen3-8B's shape, 4 rows, behind a prompt of 16,000 tokens: 9.4 ms a step instead of 5.8, until the memory was let go.

On a CPU MLX's arrays come from the C library, which keeps freed memory, too: with a bound of 64 MiB, of 256 or of 1 GiB
SmolLM2's steps and prompts took the same time. What is remembered lives long among arrays that do not, so its pages lie
between free ones, more of them by the minute: after 6 minutes of requests of every kind 583 MiB, of which
malloc_trim() gave back 573 in 38 ms. It waits for every thread that allocates, so it is done when no row is there, or
else once a minute.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Final

import mlx.core as mx

from lanes.tuning import backend

# A prompt's chunks allocate and free the same few sizes over and over.
KEPT_BYTES: Final = 128 << 20 if backend() == "cpu" else 1 << 30
TRIM_IDLE_S: Final = 10.0
TRIM_BUSY_S: Final = 60.0


class KeptMemory:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trimmed_s = clock()
        mx.set_cache_limit(KEPT_BYTES)

    def let_go(self, *, is_idle: bool) -> None:
        """What is too much; to be called after each turn."""
        if mx.get_cache_memory() >= KEPT_BYTES:
            mx.clear_cache()
        now_s = self._clock()
        if now_s - self._trimmed_s >= (TRIM_IDLE_S if is_idle else TRIM_BUSY_S):
            self._trimmed_s = now_s
            trim()


def trim() -> None:
    """Have the C library give back all free pages, where it is glibc: others keep few."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(ctypes.c_size_t(0))
