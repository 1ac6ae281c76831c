"""Log-probabilities of drawn tokens and of the likeliest beside them, for the rows that want to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from lanes.lane import Logprob, Sampling


@dataclass(frozen=True, slots=True)
class Asking:
    """A row that wants to know, where it is, and of how many of the likeliest."""

    row_id: int
    slot: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Scored:
    """What is told of a step's tokens once it is read, for each that asks. chosen: float32 [asking]; top_tokens int32
    and top float32 [asking, the most that any wants], None where that is 0."""

    asking: Sequence[Asking]
    chosen: mx.array
    top_tokens: mx.array | None = None
    top: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.chosen, self.top_tokens, self.top) if array is not None]

    def read(self) -> list[tuple[int, Logprob]]:
        """Waits for the device. A token that a grammar forbids is none of the likeliest."""
        chosen = cast(list[float], self.chosen.tolist())
        if self.top_tokens is None or self.top is None:
            return [(each.row_id, Logprob(logprob)) for each, logprob in zip(self.asking, chosen, strict=True)]
        tokens = cast(list[list[int]], self.top_tokens.tolist())
        values = cast(list[list[float]], self.top.tolist())
        told = []
        for each, logprob, ids, best in zip(self.asking, chosen, tokens, values, strict=True):
            pairs = zip(ids[: each.num_top], best[: each.num_top], strict=True)
            told.append((each.row_id, Logprob(logprob, tuple(pair for pair in pairs if pair[1] > -mx.inf))))
        return told


def asking(rows: Sequence[int | None], settings: Sequence[Sampling]) -> list[Asking]:
    """Which of a step's rows, by slot, want to know."""
    return [
        Asking(row, slot, s.num_top_logprobs)
        for slot, (row, s) in enumerate(zip(rows, settings, strict=True))
        if row is not None and s.num_top_logprobs is not None
    ]


def score(asking: Sequence[Asking], logits: mx.array, tokens: mx.array) -> Scored:
    """logits [slots, vocabulary] as tokens, int32 [slots], were drawn from. At least one row asks."""
    places = mx.array([each.slot for each in asking], dtype=mx.int32)
    raw = logits[places].astype(mx.float32)
    logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[places][:, None], axis=-1)[:, 0]
    most = min(max(each.num_top for each in asking), logits.shape[-1])
    if most == 0:
        return Scored(asking, chosen)
    best = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
    values = mx.take_along_axis(logprobs, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return Scored(
        asking,
        chosen,
        mx.take_along_axis(best, order, axis=-1).astype(mx.int32),
        mx.take_along_axis(values, order, axis=-1),
    )
