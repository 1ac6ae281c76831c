"""Rotary embeddings with a position for each row, against one call for each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx

from lanes.doctor.verdict import Verdict, off_by

HEADS, DIM = 2, 64
POSITIONS = (0, 1, 7, 100, 4095, 70_000, 131_071)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# The same sines and cosines, in another kernel: nothing but their last bits may differ.
TOLERANCE = 1e-3

THEN = "laned finds it when it tries a model that it loads, and then takes one row at a time"


def ways() -> dict[str, dict[str, Any]]:
    """Arguments of mx.fast.rope, as mlx-lm's models give them."""
    stretched = mx.exp(mx.arange(DIM // 2) * (13.1 / (DIM // 2)))
    return {
        "halves": {"dims": DIM, "traditional": False, "base": 10000.0, "scale": 1.0},
        "pairs": {"dims": DIM, "traditional": True, "base": 10000.0, "scale": 1.0},
        "part of a head": {"dims": DIM // 2, "traditional": False, "base": 1e6, "scale": 0.25},
        "frequencies": {"dims": DIM, "traditional": False, "base": None, "scale": 1.0, "freqs": stretched},
    }


def check_rope() -> Iterator[Verdict]:
    found = {
        f"{way}, {str(dtype).removeprefix('mlx.core.')}": difference(arguments, dtype)
        for way, arguments in ways().items()
        for dtype in DTYPES
    }
    name = "RoPE by a vector of positions"
    wrong = [f"{case}: {off_by(off)}" for case, off in found.items() if not off <= TOLERANCE]
    if wrong:
        yield Verdict(name, "wrong", "; ".join(wrong), THEN, found)
    else:
        yield Verdict(name, "right", f"as one call for each row, {off_by(max(found.values()))}", None, found)


def difference(arguments: dict[str, Any], dtype: mx.Dtype) -> float:
    """The largest, as a part of the numbers' range."""
    tokens = mx.random.normal((len(POSITIONS), 1, HEADS, DIM), key=mx.random.key(0)).astype(dtype)
    queries = tokens.transpose(0, 2, 1, 3)  # as models have them: not contiguous
    together = mx.fast.rope(queries, offset=mx.array(POSITIONS, dtype=mx.int32), **arguments)
    alone = [mx.fast.rope(queries[i : i + 1], offset=position, **arguments) for i, position in enumerate(POSITIONS)]
    off = mx.max(mx.abs(together.astype(mx.float32) - mx.concatenate(alone).astype(mx.float32)))
    return cast(float, (off / mx.max(mx.abs(queries.astype(mx.float32)))).item())
