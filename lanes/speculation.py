"""Drafts for the rows of a batch lane: which rows have some, how long they are, and what came of them.

A row may have drafts if it takes the likeliest token and nothing else bears on which that is. They are looked up in
its tokens, and the host must know all of these. So steps are read at once while drafts can be hoped for: a row's last
tokens, as far as they are known, have been found, or drafts of half of the rows have stood not long ago. Otherwise a
step is read when the next one is under way, as without drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.boundary import remembers
from lanes.choice import PROBE_LENGTHS, TOLERATED_DIFFERENCE, difference
from lanes.decoder import Dispatched
from lanes.lane import Sampling
from lanes.lookup import Lookup, best_width
from lanes.rounding import capacity_for
from lanes.rows.slots import Slots
from lanes.solo import RowMaker

PROBE_TOKENS = (1, 2, 3)
# Steps of a row, after one in which a draft stood, in which another is hoped for: where half of the rows do, steps are
# read at once.
PATIENCE_STEPS = 4


@dataclass(frozen=True, slots=True)
class Drafted:
    """A row's draft and by how many of its last tokens it was found."""

    ngram: int
    tokens: list[int]


class Speculation:
    """Of one lane. most_tokens: in a draft. weights_tokens: in a pass, that many tokens take as long as reading the
    weights. context_tokens: the longest row that the model takes; None: no limit.

    wants_tokens: whether the step that is begun is to be read at once.
    """

    def __init__(self, most_tokens: int, weights_tokens: int, context_tokens: int | None = None) -> None:
        self.most_tokens = most_tokens
        self.weights_tokens = weights_tokens
        self.context_tokens = context_tokens
        self.wants_tokens = False
        self._lookups: dict[int, Lookup] = {}
        self._patience: dict[int, int] = {}
        self._drafts: dict[int, Drafted] = {}

    @property
    def rows(self) -> set[int]:
        return set(self._lookups)

    def enter(self, row_id: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """A row is merged for the first time."""
        if may_draft(sampling):
            self._lookups[row_id] = Lookup(prompt)

    def leave(self, row_id: int) -> None:
        self._lookups.pop(row_id, None)
        self._patience.pop(row_id, None)

    def take(self, drawn: Iterable[tuple[int, int]]) -> None:
        """(row id, token) that rows have drawn, wherever they are now."""
        for row_id, token in drawn:
            if row_id in self._lookups:
                self._lookups[row_id].extend(token)

    def draft(self, table: Slots) -> dict[int, list[int]]:
        """Drafts for the rows of the next step; empty where none is worth its time. The caches never grow for them."""
        self._drafts, self.wants_tokens = {}, False
        rows = [row for row in table.rows if row is not None and row in self._lookups]
        # In more slots a draft would have to stand nearly always to be worth its time.
        if not rows or len(table.rows) > self.weights_tokens:
            return {}
        longest = max(table.lengths) + 1
        room = min(capacity_for(longest) - longest, self.most_tokens)
        if self.context_tokens is not None:
            room = min(room, self.context_tokens - longest)
        found = self._find(rows, room)
        chances = [self._lookups[row].chances[draft.ngram] for row, draft in found.items()]
        width = best_width(chances, room, len(table.rows), self.weights_tokens)
        num_hoping = sum(self._patience.get(row, 0) > 0 for row in rows)
        self.wants_tokens = width > 0 or 2 * num_hoping >= len(table)
        for row in rows:
            self._patience[row] = max(self._patience.get(row, 0) - 1, 0)
        if width == 0:
            for row, draft in found.items():
                self._lookups[row].book_untried(draft.ngram)
        elif all(len(self._lookups[row]) == table.length_of(row) + 1 for row in found):
            self._drafts = {row: Drafted(draft.ngram, draft.tokens[:width]) for row, draft in found.items()}
        # Otherwise the last step is not read yet. The next one is, and then there may be drafts.
        return {row: draft.tokens for row, draft in self._drafts.items()}

    def _find(self, rows: Sequence[int], most_tokens: int) -> dict[int, Drafted]:
        found = {row: Drafted(*self._lookups[row].draft(most_tokens)) for row in rows}
        return {row: draft for row, draft in found.items() if draft.tokens}

    def book(self, step: Dispatched) -> tuple[int, int]:
        """What came of the drafts made last, in their step: (tokens drafted, tokens of these that stood)."""
        num_drafted = num_accepted = 0
        runs = dict(zip(step.rows, step.runs or (), strict=False))
        for row, draft in self._drafts.items():
            num_stood = len(runs[row]) - 1
            self._lookups[row].book(draft.ngram, len(draft.tokens), num_stood)
            if num_stood:
                self._patience[row] = PATIENCE_STEPS
            num_drafted += len(draft.tokens)
            num_accepted += num_stood
        return num_drafted, num_accepted


def may_draft(sampling: Sampling) -> bool:
    plain = sampling.temperature == 0 and sampling.grammar is None and sampling.num_top_logprobs is None
    return plain and not (sampling.window or sampling.logit_bias or sampling.earliest_end)


def why_none(make_row: RowMaker, cache_kinds: Iterable[str], weights_tokens: int, *, compiled: bool) -> str | None:
    """Why a batch lane of this model can have no drafts; None if it can."""
    if compiled:
        return "its steps are compiled for one token a row"
    # A ring has written over what it held, and recurrent state has no way back.
    if others := sorted({kind for kind in cache_kinds if remembers([kind]) != "anywhere"}):
        return f"tokens in a cache of kind {' and '.join(others)} cannot be taken back"
    if weights_tokens < 1:
        return "every token of a pass takes as long as reading the weights"
    try:
        off = probe(make_row)
    except Exception as error:
        return f"several tokens a row fail: {type(error).__name__}: {error}"
    if not off <= TOLERATED_DIFFERENCE:
        return f"with several tokens a row, logits are off by {off:.0%} of their range"
    return None


def probe(make_row: RowMaker) -> float:
    """The largest difference, as a part of their range, between logits of several tokens of rows of different length at
    once and of one after another; after a first lot that is taken back."""
    lane = SlotCaches(make_row(), len(PROBE_LENGTHS))
    rows = []
    for row_id, length in enumerate(PROBE_LENGTHS):
        row = make_row()
        if length:
            make_row.model(mx.arange(1, length + 1)[None], cache=row)
        lane.merge(row_id, row, length)
        rows.append(row)
    count = len(PROBE_TOKENS)
    others = mx.array([[token + 10 for token in PROBE_TOKENS]] * len(rows))
    mx.eval(make_row.model(others, cache=lane.begin_step(count)))
    tokens = mx.array([PROBE_TOKENS] * len(rows))
    together = make_row.model(tokens, cache=lane.begin_step(count))
    worst = 0.0
    for place, token in enumerate(PROBE_TOKENS):
        alone = mx.concatenate([make_row.model(mx.array([[token]]), cache=row)[:, -1] for row in rows])
        worst = max(worst, difference(alone, together[:, place]))
    return worst
