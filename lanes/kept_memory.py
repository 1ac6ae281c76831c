"""Freed memory that MLX keeps for reuse: bounded, and let go of when the bound is reached.

Without a bound every size ever used stays. At the bound MLX gives back what is freed and keeps what it has; where that
is of sizes nobody asks for again, every step from then on allocates and frees all that it needs. On an H200 with
Qwen3-8B's shape, 4 rows, behind a prompt of 16,000 tokens: 9.4 ms a step instead of 5.8, until the memory was let go.

On a CPU MLX keeps only what still fits, and the bound is never reached: there the C library has all the rest.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

# A prompt's chunks allocate and free the same few sizes over and over.
KEPT_BYTES: Final = 1 << 30


def bound_kept_memory() -> None:
    mx.set_cache_limit(KEPT_BYTES)


def release_if_full() -> None:
    if mx.get_cache_memory() >= KEPT_BYTES:
        mx.clear_cache()
