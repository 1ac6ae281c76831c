"""Which lane a model runs in, and why: by the kinds of its caches, by its parts, then by trying.

A model may have caches that all fit and still be wrong when its rows have different lengths (its RoPE may read the
width of the arrays, say). So rows of unequal length are run side by side and alone, and their logits compared. One of
them has no token yet: what a model makes of no state need not be what it makes of a state of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.rows import kind_of
from lanes.solo import CannotQuantize, RowMaker

# Logits that differ by so much of their range are another model's. Rounding in float16 and bfloat16 is a tenth of it;
# a wrong offset or mask moves them by a quarter of the range and more.
TOLERATED_DIFFERENCE = 0.05
PROBE_LENGTHS = (11, 1, 0)
PROBE_STEPS = 2

# Parts of models that cannot have rows of different lengths, by module of mlx_lm.models and class. Most would be found
# by trying, but some go wrong only in rows longer than those that are tried, or only a little.
UNFIT_PARTS = {
    ("rope_utils", "DynamicNTKScalingRoPE"): "fails with a position for each row",
    ("afm7", "KVReuseAttention"): "takes the width of the arrays for the position of every row",
    ("minimax_m3_vl", "Attention"): "takes the width of the arrays for the position of every row",
    ("phi3small", "Attention"): "takes the width of the arrays for the position of every row",
    ("recurrent_gemma", "RGLRU"): "makes another thing of no state than of a state of zeros",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """lane: "batch" or "serial"; reason: a clause for the log; cache_kinds: one for each cache the model makes."""

    lane: str
    reason: str
    cache_kinds: tuple[str, ...]


def choose_lane(make_row: RowMaker) -> Choice:
    """Look at the model's caches and parts, then try it in slots. Raises CannotQuantize where keys and values are to be
    quantized and the model cannot do with that in any lane."""
    caches = make_row()
    if make_row.bits:
        try_quantized(make_row)
    kinds = tuple(kind_of(cache) or type(cache).__name__ for cache in caches)
    unknown = sorted({type(cache).__name__ for cache in caches if kind_of(cache) is None})
    if unknown:
        return Choice("serial", f"no rows in slots for {', '.join(unknown)}", kinds)
    if unfit := unfit_part(make_row.model):
        return Choice("serial", unfit, kinds)
    try:
        off = probe(make_row)
    except Exception as error:
        return Choice("serial", f"rows side by side fail: {type(error).__name__}: {error}", kinds)
    if not off <= TOLERATED_DIFFERENCE:
        return Choice("serial", f"side by side, rows' logits are off by {off:.0%} of their range", kinds)
    named = " and ".join(sorted(set(kinds)))
    return Choice("batch", f"its caches are {named}, and rows side by side agree with each alone", kinds)


def unfit_part(model: Any) -> str | None:
    """What is known of the first of the model's parts that cannot have rows of different lengths."""
    for part in model.modules():
        module = type(part).__module__.removeprefix("mlx_lm.models.")
        if reason := UNFIT_PARTS.get((module, type(part).__name__)):
            return f"{module}.{type(part).__name__} {reason}"
    return None


def try_quantized(make_row: RowMaker) -> None:
    """Run a row alone whose keys and values are quantized: mlx-lm has attention of its own in some models."""
    row = make_row()
    try:
        for tokens in ([[1, 2, 3]], [[4]]):
            mx.eval(make_row.model(mx.array(tokens), cache=row))
    except Exception as error:
        told = str(error).partition("\n")[0].removesuffix(" The following argument types are supported:")
        message = f"the model fails on quantized keys and values: {type(error).__name__}: {told}"
        raise CannotQuantize(message) from error


def probe(make_row: RowMaker, lengths: Sequence[int] = PROBE_LENGTHS, steps: int = PROBE_STEPS) -> float:
    """The largest difference, as a part of their range, between logits of rows side by side and alone."""
    model: Any = make_row.model
    lane = SlotCaches(make_row(), len(lengths))
    rows = []
    for row_id, length in enumerate(lengths):
        row = make_row()
        if length:
            model(mx.arange(1, length + 1)[None], cache=row)
            mx.eval([cache.state for cache in row])
        lane.merge(row_id, row, length)
        rows.append(row)
    worst = 0.0
    for step in range(steps):
        token = mx.array([[step + 1]])
        alone = mx.concatenate([model(token, cache=row)[:, -1] for row in rows])
        beside = model(mx.repeat(token, len(rows), axis=0), cache=lane.begin_step())[:, -1]
        lane.end_step()
        worst = max(worst, difference(alone, beside))
    return worst


def difference(alone: mx.array, beside: mx.array) -> float:
    """The largest difference of two lots of logits [rows, vocabulary], as a part of the first ones' range."""
    alone, beside = alone.astype(mx.float32), beside.astype(mx.float32)
    # Logits that a model switches off are equal, infinite, and no part of the range.
    finite = mx.isfinite(alone)
    span = mx.max(mx.where(finite, alone, -mx.inf), axis=-1) - mx.min(mx.where(finite, alone, mx.inf), axis=-1)
    off = mx.max(mx.where(alone == beside, 0.0, mx.abs(beside - alone)), axis=-1) / mx.maximum(span, 1e-6)
    return cast(float, mx.max(off).item())
