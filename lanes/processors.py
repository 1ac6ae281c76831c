"""What changes the logits of a step before tokens are drawn: bias, penalties, ends that may not come yet, grammars.

The order and the arithmetic are mlx-lm's (bias, repetition, presence, frequency), for all rows at once, each by its own
settings. Everything touches few places of a row, and only those are computed: tables of token ids [rows, n], filled up
where a row has fewer with what changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from lanes.history import NOTHING
from lanes.lane import Sampling


class Processors:
    """Those of the rows of a step, in slot order; made anew when the rows change."""

    def __init__(self, settings: Sequence[Sampling]) -> None:
        self._settings = list(settings)
        # Few widths, so that a row that comes or goes seldom changes the shapes of the others' arrays.
        widest = max((s.window for s in settings), default=0)
        self.window = 1 << (widest - 1).bit_length() if widest else 0
        self._biased = _table([s.logit_bias for s in settings])
        self._repetition = _penalty([(s.repetition_penalty, s.repetition_context_size) for s in settings], off=1.0)
        self._presence = _penalty([(s.presence_penalty, s.presence_context_size) for s in settings], off=0.0)
        self._frequency = _penalty([(s.frequency_penalty, s.frequency_context_size) for s in settings], off=0.0)
        self._latest_end = max((s.earliest_end for s in settings if s.end_token_ids), default=0)

    def __call__(
        self, logits: mx.array, positions: Sequence[int], recent: mx.array | None, allowed: mx.array | None = None
    ) -> mx.array:
        """logits [rows, vocabulary], float32 afterwards where anything was to do.

        positions: of the tokens to be drawn. recent: each row's last tokens, int32 [rows, window], NOTHING where it
        has had fewer; None where window is 0. allowed: int32 [rows, vocabulary / 32, rounded up], a bit for each token
        that is not made impossible.
        """
        if self._biased is not None:
            logits = _added(logits.astype(mx.float32), *self._biased)
        if recent is not None:
            logits = self._penalized(logits.astype(mx.float32), recent)
        if self._latest_end and any(position < self._latest_end for position in positions):
            logits = self._without_ends(logits.astype(mx.float32), positions)
        if allowed is not None:
            logits = mx.where(_bits(allowed, logits.shape[-1]), logits.astype(mx.float32), -mx.inf)
        return logits

    def _penalized(self, logits: mx.array, recent: mx.array) -> mx.array:
        newest = recent[:, -1:]
        if self._repetition is not None:
            amount, size = self._repetition
            tokens = _seen(recent, size, newest)
            there = mx.take_along_axis(logits, tokens, axis=-1)
            there = mx.where(there < 0, there * amount, there / amount)
            logits = mx.put_along_axis(logits, tokens, there, axis=-1)
        if self._presence is not None:
            amount, size = self._presence
            tokens = _seen(recent, size, newest)
            there = mx.take_along_axis(logits, tokens, axis=-1) - amount
            logits = mx.put_along_axis(logits, tokens, there, axis=-1)
        if self._frequency is not None:
            amount, size = self._frequency
            logits = _added(logits, mx.maximum(recent, 0), mx.where(_counts(recent, size), -amount, 0))
        return logits

    def _without_ends(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        ends = [
            tuple((token, -mx.inf) for token in s.end_token_ids) if position < s.earliest_end else ()
            for s, position in zip(self._settings, positions, strict=True)
        ]
        table = _table(ends)
        return logits if table is None else _added(logits, *table)


def _table(rows: Sequence[Sequence[tuple[int, float]]]) -> tuple[mx.array, mx.array] | None:
    """(token, value) pairs of each row as two arrays [rows, n]; a row with fewer adds 0 to token 0. None if all are
    empty."""
    longest = max((len(row) for row in rows), default=0)
    if longest == 0:
        return None
    filled = [[*row, *[(0, 0.0)] * (longest - len(row))] for row in rows]
    tokens = mx.array([[token for token, _ in row] for row in filled], dtype=mx.int32)
    return tokens, mx.array([[value for _, value in row] for row in filled], dtype=mx.float32)


def _penalty(rows: Sequence[tuple[float, int]], off: float) -> tuple[mx.array, mx.array] | None:
    """(amount, context size) of each row as two arrays [rows, 1]; None if it is off in all."""
    if all(amount == off for amount, _ in rows):
        return None
    # A row without the penalty looks at its newest token, and leaves that as it is.
    sizes = [[size if amount != off else 1] for amount, size in rows]
    return mx.array([[amount] for amount, _ in rows], dtype=mx.float32), mx.array(sizes, dtype=mx.int32)


def _counts(recent: mx.array, size: mx.array) -> mx.array:
    """Which of recent are the row's tokens and among its last `size` [rows, 1]."""
    width = recent.shape[1]
    return (mx.arange(width) >= width - size) & (recent != NOTHING)


def _seen(recent: mx.array, size: mx.array, newest: mx.array) -> mx.array:
    """As recent; in place of what does not count the newest token, which always does: to write it twice is harmless."""
    return mx.where(_counts(recent, size), recent, newest)


def _added(logits: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    """Each of values [rows, n] added at its token [rows, n], several times where that is named so."""
    rows = mx.arange(logits.shape[0])[:, None]
    return logits.at[rows, tokens].add(values)


def _bits(words: mx.array, number: int) -> mx.array:
    """bool [rows, number] of int32 [rows, number / 32, rounded up], the lowest bit first."""
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.int32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :number] != 0
