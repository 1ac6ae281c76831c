"""Draws one token for each row of a step, in one call, each row by its own settings.

The filters are mlx-lm's (top-p, then min-p, then XTC, then top-k, on the log-probabilities before the temperature),
written for a different setting in each row. Only rows that draw are filtered, and only those with a top-p are sorted:
on 2 cores, for 8 rows and 49,152 tokens, that sort takes 45 ms, half a step of a small model.

A row's randomness comes from a key of its own, made of its seed and the position that the token will have, so that a
draw does not depend on which rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import mlx.core as mx
import numpy as np

from lanes.lane import Sampling

T = TypeVar("T")

_MASK64 = (1 << 64) - 1
# Settings closer to 0 would be 0, or overflow, in float32.
LEAST = 1e-30


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """The two 32-bit words of the random key for a row's token at a position.

    SplitMix64's finalizer (Steele, Lea, Flood 2014) over the seed, and again with the position added: neighbouring
    seeds and positions give unrelated keys.
    """
    word = _mix(_mix(seed & _MASK64) + position)
    return word >> 32, word & 0xFFFFFFFF


def xtc_chance(seed: int, position: int) -> float:
    """A row's number of [0, 1) that decides whether XTC takes part at a position; unrelated to draw_key()."""
    return _mix(_mix(_mix(seed & _MASK64) + position)) / 2**64


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


_draw_each = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))


class Sampler:
    """The settings of the rows of a step, in slot order; made anew when the rows change."""

    def __init__(self, settings: Sequence[Sampling]) -> None:
        self._drawing = _Chosen([s.temperature > 0 for s in settings])
        self._drawn = drawn = self._drawing.of(settings)
        self._temperature = _column([max(s.temperature, LEAST) for s in drawn])
        self._sorted = _Chosen([0 < s.top_p < 1 for s in drawn])
        self._top_p = _column([max(s.top_p, LEAST) for s in self._sorted.of(drawn)])
        self._min_p = _column([s.min_p for s in drawn])
        self._uses_min_p = any(s.min_p > 0 for s in drawn)
        self._uses_xtc = any(s.xtc_probability > 0 for s in drawn)
        self._xtc_threshold = _column([s.xtc_threshold for s in drawn])
        self._xtc_spared: mx.array | None = None
        self._top_k = [s.top_k for s in drawn]
        self._widest_top_k = max(self._top_k, default=0)

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """logits [rows, vocabulary], positions [rows] of the tokens to be drawn -> token ids [rows], int32."""
        likeliest = mx.argmax(logits, axis=-1).astype(mx.int32)
        if not self._drawn:
            return likeliest
        places = self._drawing.of(positions)
        scores = self.filtered(self._drawing.take(logits), places)
        # The likeliest token has a score of 0 at every temperature, so that the coldest leaves at least that one.
        scores = (scores - mx.max(scores, axis=-1, keepdims=True)) / self._temperature
        keys = [draw_key(s.seed, place) for s, place in zip(self._drawn, places, strict=True)]
        return self._drawing.put(likeliest, _draw_each(scores, mx.array(keys, dtype=mx.uint32)).astype(mx.int32))

    def filtered(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Log-probabilities [drawing rows, vocabulary] in float32, minus infinity where a row's filters leave a token
        out, of the logits and positions of the rows that draw."""
        logits = logits.astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._sorted:
            scores = self._sorted.put(scores, _keep_top_p(self._sorted.take(scores), self._top_p))
        if self._uses_min_p:
            scores = _keep_min_p(scores, self._min_p)
        if self._uses_xtc:
            chances = [xtc_chance(s.seed, position) for s, position in zip(self._drawn, positions, strict=True)]
            takes_part = [chance <= s.xtc_probability > 0 for s, chance in zip(self._drawn, chances, strict=True)]
            if any(takes_part):
                scores = self._without_top_choices(scores, takes_part)
        if self._widest_top_k:
            scores = self._keep_top_k(scores)
        return scores

    def _without_top_choices(self, scores: mx.array, takes_part: list[bool]) -> mx.array:
        """Of the tokens more likely than the threshold leave out all but the least likely, and but those spared."""
        if self._xtc_spared is None:
            self._xtc_spared = _marked([s.xtc_spared for s in self._drawn], scores.shape[-1])
        probability = mx.softmax(scores, axis=-1)
        likely = mx.where(probability > self._xtc_threshold, probability, mx.inf)
        left_out = (probability > likely.min(axis=-1, keepdims=True)) & ~self._xtc_spared
        return mx.where(mx.array(takes_part)[:, None] & left_out, -mx.inf, scores)

    def _keep_top_k(self, scores: mx.array) -> mx.array:
        """One partial sort at the widest k serves all rows; a row without a k keeps everything."""
        vocabulary = scores.shape[-1]
        widest = min(self._widest_top_k, vocabulary)
        highest = mx.sort(mx.topk(scores, widest, axis=-1), axis=-1)
        # The k-th highest of `widest` ascending values stands at widest - k.
        places = [widest - min(k, widest) if k > 0 else 0 for k in self._top_k]
        lowest_kept = mx.take_along_axis(highest, mx.array(places)[:, None], axis=-1)
        limited = mx.array([0 < k < vocabulary for k in self._top_k])[:, None]
        return mx.where(limited & (scores < lowest_kept), -mx.inf, scores)


class _Chosen:
    """Some of several rows, which are computed by themselves."""

    def __init__(self, chosen: Sequence[bool]) -> None:
        self._indices = [index for index, is_chosen in enumerate(chosen) if is_chosen]
        self._are_all = len(self._indices) == len(chosen)
        self._rows = mx.array(self._indices, dtype=mx.int32)

    def __bool__(self) -> bool:
        return bool(self._indices)

    def of(self, values: Sequence[T]) -> list[T]:
        return [values[index] for index in self._indices]

    def take(self, rows: mx.array) -> mx.array:
        return rows if self._are_all else rows[self._rows]

    def put(self, rows: mx.array, new: mx.array) -> mx.array:
        """The rows, with these in the places of those that were chosen."""
        if self._are_all:
            return new
        rows[self._rows] = new
        return rows


def _marked(tokens_of_rows: list[tuple[int, ...]], vocabulary: int) -> mx.array:
    """bool [rows, vocabulary], True at each row's tokens."""
    marks = np.zeros((len(tokens_of_rows), vocabulary), dtype=bool)
    for row, tokens in enumerate(tokens_of_rows):
        marks[row, list(tokens)] = True
    return mx.array(marks)


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def _keep_top_p(scores: mx.array, top_p: mx.array) -> mx.array:
    """Keep the fewest tokens whose probability together reaches top_p [rows, 1]."""
    ascending = mx.sort(scores, axis=-1)
    probability = mx.exp(ascending)
    above = mx.cumsum(probability, axis=-1, reverse=True, inclusive=False)
    total = above[:, :1] + probability[:, :1]
    num_dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    lowest_kept = mx.take_along_axis(ascending, num_dropped, axis=-1)
    return mx.where(scores < lowest_kept, -mx.inf, scores)


def _keep_min_p(scores: mx.array, min_p: mx.array) -> mx.array:
    """Keep tokens at least min_p [rows, 1] times as likely as the likeliest; 0 keeps all."""
    likeliest = mx.max(scores, axis=-1, keepdims=True)
    return mx.where(scores < likeliest + mx.log(min_p), -mx.inf, scores)
