"""Which lane a model runs in, and why: by the kinds of its caches, then by trying.

A model may have caches that all fit and still be wrong when its rows have different lengths (its RoPE may read the
width of the arrays, say). So two rows of unequal length are run side by side and alone, and their logits compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.rows import kind_of
from lanes.solo import RowMaker

# Logits that differ by so much of their range are another model's. Rounding in float16 and bfloat16 is a tenth of it;
# a wrong offset or mask moves them by a quarter of the range and more.
TOLERATED_DIFFERENCE = 0.05
PROBE_LENGTHS = (3, 11)
PROBE_STEPS = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """lane: "batch" or "serial"; reason: a clause for the log; cache_kinds: one for each cache the model makes."""

    lane: str
    reason: str
    cache_kinds: tuple[str, ...]


def choose_lane(make_row: RowMaker) -> Choice:
    """Look at the caches that the model makes, then try it in slots."""
    caches = make_row()
    kinds = tuple(kind_of(cache) or type(cache).__name__ for cache in caches)
    unknown = sorted({type(cache).__name__ for cache in caches if kind_of(cache) is None})
    if unknown:
        return Choice("serial", f"no rows in slots for {', '.join(unknown)}", kinds)
    try:
        difference = probe(make_row)
    except Exception as error:
        return Choice("serial", f"two rows side by side fail: {type(error).__name__}: {error}", kinds)
    if not difference <= TOLERATED_DIFFERENCE:
        return Choice("serial", f"side by side, two rows' logits are off by {difference:.0%} of their range", kinds)
    named = " and ".join(sorted(set(kinds)))
    return Choice("batch", f"its caches are {named}, and two rows side by side agree with each alone", kinds)


def probe(make_row: RowMaker) -> float:
    """The largest difference, as a part of their range, between logits of rows side by side and alone."""
    model: Any = make_row.model
    lane = SlotCaches(make_row(), len(PROBE_LENGTHS))
    rows = []
    for row_id, length in enumerate(PROBE_LENGTHS):
        row = make_row()
        tokens = mx.arange(1, length + 1)[None]
        model(tokens, cache=row)
        mx.eval([cache.state for cache in row])
        lane.merge(row_id, row, length)
        rows.append(row)
    worst = 0.0
    for step in range(PROBE_STEPS):
        token = mx.array([[step + 1]])
        alone = mx.concatenate([model(token, cache=row)[:, -1] for row in rows]).astype(mx.float32)
        beside = model(mx.repeat(token, len(rows), axis=0), cache=lane.begin_step())[:, -1].astype(mx.float32)
        lane.end_step()
        span = mx.max(alone, axis=-1) - mx.min(alone, axis=-1)
        off = mx.max(mx.abs(beside - alone), axis=-1) / mx.maximum(span, 1e-6)
        worst = max(worst, cast(float, mx.max(off).item()))
    return worst
