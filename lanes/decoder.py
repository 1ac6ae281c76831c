"""One decode step for all merged rows, dispatched before the tokens of the one before are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.lane import Sampling
from lanes.sampler import Sampler
from lanes.serial import SoloCaches

# Token ids, int32 [slots in use], to logits [slots in use, vocabulary], through the lane's caches; see lanes.forward.
Forward = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step under way: its rows by slot as they were then (None: a free slot), and their tokens, int32 [slots].

    behind_tokens: prompt tokens that the device has to process before this step.
    """

    rows: tuple[int | None, ...]
    tokens: mx.array
    behind_tokens: int

    @property
    def num_rows(self) -> int:
        return sum(row is not None for row in self.rows)

    def read(self) -> list[tuple[int, int]]:
        """(row id, token) of each row; waits for the device."""
        drawn = cast(list[int], self.tokens.tolist())
        return [(row, token) for row, token in zip(self.rows, drawn, strict=True) if row is not None]


class Decoder:
    """Feeds every merged row its last token and draws the next.

    A row that has just been merged is fed the last token of its prompt; from then on what it drew, which stays on the
    device: the host learns it a step later.
    """

    def __init__(self, caches: SlotCaches | SoloCaches, forward: Forward) -> None:
        self.caches = caches
        self.forward = forward
        self._settings: dict[int, Sampling] = {}
        self._entering: dict[int, int] = {}
        self._last: Dispatched | None = None
        self._sampler: tuple[tuple[int | None, ...], Sampler] | None = None

    def __len__(self) -> int:
        return len(self.caches.table)

    def merge(self, row_id: int, row: list[Any], length: int, next_token: int, sampling: Sampling) -> None:
        """Enter a row of `length` processed tokens, whose next input is next_token."""
        self.caches.merge(row_id, row, length)
        self._settings[row_id] = sampling
        self._entering[row_id] = next_token

    def sampling_of(self, row_id: int) -> Sampling:
        return self._settings[row_id]

    def leave(self, row_id: int) -> None:
        self.caches.leave(row_id)
        del self._settings[row_id]
        self._entering.pop(row_id, None)

    def set_aside(self, row_id: int) -> list[Any]:
        """Take a row out with its caches as they are after the step that is dispatched."""
        row = self.caches.take(row_id)
        self.leave(row_id)
        return row

    def clear(self) -> None:
        """Forget all rows, as after a failed step."""
        self.caches.clear()
        self._settings.clear()
        self._entering.clear()
        self._last = self._sampler = None

    def dispatch(self, behind_tokens: int = 0) -> Dispatched:
        """Begin a step of all rows, of which there is at least one; behind_tokens is only noted."""
        if not self._entering:
            self.caches.compact()
        rows = tuple(self.caches.table.rows)
        inputs = self._inputs(rows)
        positions = [length + 1 for length in self.caches.table.lengths]
        tokens = self._sampler_for(rows)(self.forward(inputs), positions)
        mx.async_eval(tokens)
        self.caches.end_step()
        self._entering.clear()
        self._last = Dispatched(rows, tokens, behind_tokens)
        return self._last

    def _inputs(self, rows: tuple[int | None, ...]) -> mx.array:
        """int32 [slots]: each row's last token, gathered from what the step before drew and from rows that enter."""
        if self._last is not None and self._last.rows == rows and not self._entering:
            return self._last.tokens
        drawn = () if self._last is None else self._last.rows
        place = {row: index for index, row in enumerate(drawn) if row is not None}
        entering: list[int] = []
        sources: list[int] = []
        for row in rows:
            if row in place and row not in self._entering:
                sources.append(place[row])
            else:
                sources.append(len(drawn) + len(entering))
                entering.append(0 if row is None else self._entering[row])
        pool = mx.array(entering, dtype=mx.int32)
        if self._last is not None:
            pool = mx.concatenate([self._last.tokens, pool])
        return pool[mx.array(sources, dtype=mx.int32)]

    def _sampler_for(self, rows: tuple[int | None, ...]) -> Sampler:
        if self._sampler is None or self._sampler[0] != rows:
            settings = [Sampling() if row is None else self._settings[row] for row in rows]
            self._sampler = (rows, Sampler(settings))
        return self._sampler[1]

    def check(self) -> None:
        self.caches.check()
        merged = {row for row in self.caches.table.rows if row is not None}
        assert merged == set(self._settings), f"rows {merged}, settings of {set(self._settings)}"
        assert set(self._entering) <= merged, f"rows {set(self._entering) - merged} enter but are not merged"
