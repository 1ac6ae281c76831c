"""Which prompts gain from sharing a forward pass.

A pass over n tokens takes a + b n seconds: a for reading the weights and launching, b for each token. Prompts of L
tokens, k of them, one after another make their owners wait (k + 1) / 2 x (a + b L) on average, and k x b L + a all
together. The latter is less for every k where b L < a: where a prompt is shorter than what reading the weights costs.
"""

from __future__ import annotations

import time

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from lanes.choice import TOLERATED_DIFFERENCE, difference
from lanes.lane import RowSpec, Sampling
from lanes.prefill import Prefill, dispatch_together
from lanes.rows import rows_like
from lanes.rows.columns import ColumnRows
from lanes.solo import RowMaker

MEASURED_TOKENS = (4, 32)
REPETITIONS = 2
# A prompt beyond this is no short one on any device: its own pass is large enough.
LONGEST_TOKENS = 1024


def shared_prompt_tokens(make_row: RowMaker) -> int:
    """The longest prompt that should share a pass, measured; 0 where the model's caches do not allow it."""
    longest = min((_longest(cache) for cache in make_row()), default=0)
    if longest == 0 or not _is_exact(make_row):
        return 0
    few, many = MEASURED_TOKENS
    few_s, many_s = _pass_s(make_row, few), _pass_s(make_row, many)
    token_s = max((many_s - few_s) / (many - few), 1e-9)
    return min(int(max(few_s - few * token_s, 0.0) / token_s), longest)


def _longest(cache: object) -> int:
    if isinstance(cache, CacheList):
        return min(map(_longest, cache.caches))
    rows = rows_like(cache)
    return min(rows.held_columns(LONGEST_TOKENS), LONGEST_TOKENS) if isinstance(rows, ColumnRows) else 0


def _is_exact(make_row: RowMaker) -> bool:
    """Whether rows that shared a pass go on as rows that did not."""
    specs = [RowSpec(length, tuple(range(1, length + 1)), Sampling()) for length in (3, 7)]
    together = [Prefill(make_row, spec) for spec in specs]
    dispatch_together(make_row, together)
    worst = 0.0
    for spec, shared in zip(specs, together, strict=True):
        alone = make_row()
        make_row.model(mx.array([spec.prompt[:-1]]), cache=alone)
        last = mx.array([spec.prompt[-1:]])
        logits = [make_row.model(last, cache=cache)[:, -1] for cache in (alone, shared.caches)]
        worst = max(worst, difference(*logits))
    return worst <= TOLERATED_DIFFERENCE


def _pass_s(make_row: RowMaker, num_tokens: int) -> float:
    """Seconds of a pass over so many tokens, the best of the repetitions."""
    best = float("inf")
    for _ in range(REPETITIONS + 1):  # the first warms up
        began = time.perf_counter()
        row = make_row()
        make_row.model(mx.zeros((1, num_tokens), dtype=mx.int32), cache=row)
        mx.eval([cache.state for cache in row])
        best = min(best, time.perf_counter() - began)
    return best
