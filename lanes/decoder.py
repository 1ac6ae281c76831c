"""One decode step for all merged rows, dispatched before the tokens of the one before are read.

Where a grammar has to know the tokens of the step before to say what may come, a thread waits for those and computes
the masks while the forward pass is dispatched, which on a GPU may take the host as long as the pass takes the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np

from lanes.batch import SlotCaches
from lanes.history import History
from lanes.lane import Logprob, Sampling
from lanes.logprobs import Asking, Scored, asking, score
from lanes.lookup import accepted
from lanes.processors import Processors
from lanes.sampler import Sampler
from lanes.serial import SoloCaches

# Token ids, int32 [slots in use], to logits [slots in use, vocabulary], through the lane's caches; see lanes.forward.
Forward = Callable[[mx.array], mx.array]
# The same of each row's input and its draft behind it: [slots in use, n] to logits [slots in use, n, vocabulary].
ForwardDrafts = Callable[[mx.array], mx.array]
# Rows by slot, what they drew in the step before, and the size of the vocabulary, to the tokens that each may draw now:
# int32 [slots in use, vocabulary / 32, rounded up], a bit for each; None: all of them.
Allow = Callable[[tuple[int | None, ...], Mapping[int, int], int], np.ndarray[Any, np.dtype[np.int32]] | None]


@dataclass(frozen=True, slots=True)
class Queued:
    """Tokens of prompts that the device has been given to process, and the host's time for that."""

    tokens: int = 0
    seconds: float = 0.0


NOTHING = Queued()


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step under way: its rows by slot as they were then (None: a free slot), and their tokens, int32 [slots].

    told: the tokens for the host, on any thread: an array of their own, for one that a thread waits for may not be an
    input of what another dispatches. behind: what the device has to do before this step. runs: of a step with drafts,
    which has been waited for, all tokens by slot, the last of which are those in `tokens`.
    """

    rows: tuple[int | None, ...]
    tokens: mx.array
    told: mx.array
    behind: Queued
    scored: Scored | None = None
    runs: Sequence[Sequence[int]] | None = None

    @property
    def num_rows(self) -> int:
        return sum(row is not None for row in self.rows)

    def read(self) -> list[tuple[int, int]]:
        """(row id, token) of each row, of several tokens of a row in their order; waits for the device."""
        if self.runs is not None:
            pairs = zip(self.rows, self.runs, strict=True)
            return [(row, token) for row, run in pairs if row is not None for token in run]
        drawn = cast(list[int], self.told.tolist())
        return [(row, token) for row, token in zip(self.rows, drawn, strict=True) if row is not None]

    def read_logprobs(self) -> list[tuple[int, Logprob]]:
        """(row id, of its token) of each row that wants them."""
        return self.scored.read() if self.scored else []


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the rows of a step draw: made anew when they change."""

    rows: tuple[int | None, ...]
    processors: Processors
    sampler: Sampler
    asking: list[Asking]


class Decoder:
    """Feeds every merged row its last token and draws the next.

    A row that has just been merged is fed the last token of its prompt; from then on what it drew, which stays on the
    device: the host learns it a step later.
    """

    def __init__(
        self, caches: SlotCaches | SoloCaches, forward: Forward, forward_drafts: ForwardDrafts | None = None
    ) -> None:
        """forward_drafts: None where no step has drafts."""
        self.caches = caches
        self.forward = forward
        self.forward_drafts = forward_drafts
        self._settings: dict[int, Sampling] = {}
        self._entering: dict[int, int] = {}
        self.last: Dispatched | None = None  # the step begun last
        self._history = History()
        self._drawing: Drawing | None = None
        self._masking = ThreadPoolExecutor(1, "masks")

    def __len__(self) -> int:
        return len(self.caches.table)

    def merge(
        self,
        row_id: int,
        row: list[Any],
        length: int,
        next_token: int,
        sampling: Sampling,
        recent: mx.array | None = None,
    ) -> None:
        """Enter a row of `length` processed tokens, whose next input is next_token. recent: the end of those, int32, as
        far as its penalties look."""
        self.caches.merge(row_id, row, length)
        self._settings[row_id] = sampling
        self._entering[row_id] = next_token
        if sampling.window and recent is not None:
            self._history.enter(row_id, recent)

    def sampling_of(self, row_id: int) -> Sampling:
        return self._settings[row_id]

    def recent_of(self, row_id: int) -> mx.array | None:
        """What the row has been fed last, as merge() takes it; None where it has no penalty."""
        return self._history.take(row_id) if self._settings[row_id].window else None

    def leave(self, row_id: int) -> None:
        self.caches.leave(row_id)
        del self._settings[row_id]
        self._entering.pop(row_id, None)
        self._history.leave(row_id)
        if not self._settings:
            self.clear()

    def set_aside(self, row_id: int) -> list[Any]:
        """Take a row out with its caches as they are after the step that is dispatched."""
        row = self.caches.take(row_id)
        self.leave(row_id)
        return row

    def clear(self) -> None:
        """Forget all rows, and what the steps of those who have left were made of."""
        self.caches.clear()
        self._settings.clear()
        self._entering.clear()
        self._history.clear()
        self.last = self._drawing = None

    def dispatch(
        self, behind: Queued = NOTHING, allow: Allow | None = None, drafts: Mapping[int, Sequence[int]] | None = None
    ) -> Dispatched:
        """Begin a step of all rows, of which there is at least one; behind is only noted. allow is asked for the
        grammars' masks, by a thread, while the forward pass is dispatched. drafts: what may follow the inputs of some
        rows, all of which take the likeliest token as it is; a step with any is waited for."""
        if not self._entering:
            self.caches.compact()
            self.caches.give_back()
        rows = tuple(self.caches.table.rows)
        drawing = self._drawing_of(rows)
        inputs = self._inputs(rows)
        positions = [length + 1 for length in self.caches.table.lengths]
        window = drawing.processors.window
        recent = self._history.push(rows, inputs, window) if window else None
        drafted = [drafts.get(row, ()) if drafts and row is not None else () for row in rows]
        after_drafts: mx.array | None = None
        if any(drafted):
            assert self.forward_drafts is not None, "drafts, but nothing to verify them with"
            with_drafts = self.forward_drafts(_with_drafts(inputs, drafted))
            logits, after_drafts = with_drafts[:, 0], with_drafts[:, 1:]
        else:
            logits = self.forward(inputs)
        allowed = None
        if allow is not None:
            masking = self._masking.submit(_allowed, allow, rows, self._staying(rows), self.last, logits.shape[-1])
            try:
                mx.async_eval(logits)
            finally:
                allowed = masking.result()  # whatever happens: the grammars are one thread's at a time
        logits = drawing.processors(logits, positions, recent, allowed)
        tokens = drawing.sampler(logits, positions)
        scored = score(drawing.asking, logits, tokens) if drawing.asking else None
        runs = None
        if after_drafts is not None:
            runs = _runs(tokens, after_drafts, drafted)
            tokens = mx.array([run[-1] for run in runs], dtype=mx.int32)
        told = mx.stop_gradient(tokens)
        mx.async_eval(tokens, told, *(scored.arrays if scored else ()))
        self.caches.end_step(None if runs is None else [len(run) for run in runs])
        self._entering.clear()
        self.last = Dispatched(rows, tokens, told, behind, scored, runs)
        return self.last

    def _staying(self, rows: tuple[int | None, ...]) -> frozenset[int]:
        """Those of the rows that do not enter."""
        return frozenset(row for row in rows if row is not None and row not in self._entering)

    def _inputs(self, rows: tuple[int | None, ...]) -> mx.array:
        """int32 [slots]: each row's last token, gathered from what the step before drew and from rows that enter."""
        if self.last is not None and self.last.rows == rows and not self._entering:
            return self.last.tokens
        drawn = () if self.last is None else self.last.rows
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
        if self.last is not None:
            pool = mx.concatenate([self.last.tokens, pool])
        return pool[mx.array(sources, dtype=mx.int32)]

    def _drawing_of(self, rows: tuple[int | None, ...]) -> Drawing:
        if self._drawing is None or self._drawing.rows != rows:
            settings = [Sampling() if row is None else self._settings[row] for row in rows]
            self._drawing = Drawing(rows, Processors(settings), Sampler(settings), asking(rows, settings))
        return self._drawing

    def check(self) -> None:
        self.caches.check()
        merged = {row for row in self.caches.table.rows if row is not None}
        assert merged == set(self._settings), f"rows {merged}, settings of {set(self._settings)}"
        assert set(self._entering) <= merged, f"rows {set(self._entering) - merged} enter but are not merged"
        assert merged or (self.last is None and self._drawing is None), "no rows, but what their last step was made of"
        self._history.check(merged)


def _allowed(
    allow: Allow, rows: tuple[int | None, ...], staying: frozenset[int], before: Dispatched | None, vocabulary: int
) -> mx.array | None:
    """What allow says of the rows, of which those that stay drew something in the step before: waits for it."""
    drawn = before.read() if before else []
    masks = allow(rows, {row: token for row, token in drawn if row in staying}, vocabulary)
    return None if masks is None else mx.array(masks)


def _with_drafts(inputs: mx.array, drafts: Sequence[Sequence[int]]) -> mx.array:
    """inputs int32 [slots], with each row's draft behind its own: [slots, 1 + the longest draft], filled up with 0."""
    longest = max(map(len, drafts))
    filled = [[*draft, *[0] * (longest - len(draft))] for draft in drafts]
    return mx.concatenate([inputs[:, None], mx.array(filled, dtype=mx.int32)], axis=1)


def _runs(tokens: mx.array, after_drafts: mx.array, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What stands of each slot: of tokens int32 [slots], and of the likeliest by logits [slots, longest draft,
    vocabulary]. Waits for the device."""
    drawn = mx.concatenate([tokens[:, None], mx.argmax(after_drafts, axis=-1).astype(mx.int32)], axis=1)
    by_slot = cast(list[list[int]], drawn.tolist())
    return [accepted(draft, of_slot) for draft, of_slot in zip(drafts, by_slot, strict=True)]
