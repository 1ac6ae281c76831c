"""The last tokens of the rows, on the device: the newest of them the host learns a step later only."""

from __future__ import annotations

from collections.abc import Sequence, Set

import mlx.core as mx

NOTHING = -1


class History:
    """A window over each row's tokens, int32 [slots in use, width], newest last, NOTHING where a row has had fewer.

    Only rows that enter with tokens have a history; what the others' windows hold means nothing.
    """

    def __init__(self) -> None:
        self._rows: tuple[int | None, ...] = ()
        self._tokens: mx.array | None = None
        self._entering: dict[int, mx.array] = {}

    def enter(self, row_id: int, tokens: mx.array) -> None:
        """tokens: int32 [any number], what the row has been fed so far, or the end of it."""
        self._entering[row_id] = tokens

    def take(self, row_id: int) -> mx.array:
        """What the row would enter with elsewhere."""
        if row_id in self._entering:
            return self._entering[row_id]
        assert self._tokens is not None, f"row {row_id} has no history"
        tokens = self._tokens[self._rows.index(row_id)]
        mx.eval(tokens)
        return tokens

    def leave(self, row_id: int) -> None:
        self._entering.pop(row_id, None)

    def clear(self) -> None:
        self._rows, self._tokens = (), None
        self._entering.clear()

    def check(self, rows: Set[int]) -> None:
        """rows: those that are there."""
        assert self._entering.keys() <= rows, f"rows {self._entering.keys() - rows} have a history but are not there"
        assert rows or self._tokens is None, "no rows, but their last tokens"

    def push(self, rows: tuple[int | None, ...], inputs: mx.array, width: int) -> mx.array:
        """Book that each slot's row is fed its token of inputs, int32 [slots in use]; returns the windows, `width` (at
        least 1) wide, with these tokens in them. width is no less than any row's with a history needs."""
        if self._tokens is None or self._rows != rows or self._entering or self._tokens.shape[1] != width:
            self._tokens = self._gathered(rows, width)
            self._rows = rows
            self._entering.clear()
        self._tokens = mx.concatenate([self._tokens[:, 1:], inputs[:, None]], axis=1)
        return self._tokens

    def _gathered(self, rows: Sequence[int | None], width: int) -> mx.array:
        """The windows in the order of these rows, before their inputs."""
        pool = [mx.full((1, width), NOTHING, dtype=mx.int32)]
        if self._tokens is not None:
            pool.append(_fitted(self._tokens, width))
        places = {row: place for place, row in enumerate(self._rows, 1) if row is not None}
        for place, (row, tokens) in enumerate(self._entering.items(), 1 + len(self._rows)):
            pool.append(_fitted(tokens[None], width))
            places[row] = place
        sources = [0 if row is None else places.get(row, 0) for row in rows]
        return mx.concatenate(pool)[mx.array(sources, dtype=mx.int32)]


def _fitted(tokens: mx.array, width: int) -> mx.array:
    """[rows, any width] made [rows, width], the newest kept."""
    missing = width - tokens.shape[1]
    if missing <= 0:
        return tokens[:, -missing:]
    return mx.concatenate([mx.full((tokens.shape[0], missing), NOTHING, dtype=mx.int32), tokens], axis=1)
