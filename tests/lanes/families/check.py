"""Six rows of unlike lengths through the real engine, each against itself alone in caches of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import eager
from lanes.lane import RowSpec, Sampling
from lanes.serial import SoloCaches
from lanes.solo import RowMaker
from tests.lanes.driver import INFO, Driver
from tests.lanes.families.facts import WINDOW
from tests.lanes.tiny import prompt_of

CHUNK_TOKENS = 12
# (turn of arrival, tokens in the prompt, tokens to draw). The first row is there for 48 steps; the second leaves early,
# and another moves into its slot; the last comes without any state to a lane that has had others.
ROWS = (
    (0, 2, 48),
    (0, 3 * WINDOW + 5, 9),
    (2, WINDOW, 40),
    (5, WINDOW + 1, 24),
    (16, WINDOW - 1, 30),
    (20, 1, 26),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """logits: the largest between two logits; rows: how many drew another token."""

    logits: float
    rows: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens that a row drew, and the logits [vocabulary] that each was drawn from."""

    tokens: list[int]
    logits: list[mx.array]


class Recording:
    """A forward pass that keeps each row's logits, step by step."""

    def __init__(self, model: Any, caches: SlotCaches | SoloCaches) -> None:
        self.forward = partial(eager, model, caches)
        self.caches = caches
        self.logits: dict[int, list[mx.array]] = {}

    def __call__(self, tokens: mx.array) -> mx.array:
        logits = self.forward(tokens)
        for row, own in zip(self.caches.table.rows, logits, strict=True):
            if row is not None:
                self.logits.setdefault(row, []).append(own)
        return logits


def specs() -> list[RowSpec]:
    return [RowSpec(i, prompt_of(length, i), Sampling()) for i, (_, length, _) in enumerate(ROWS)]


def together(make_row: RowMaker, lane: str) -> list[Answer]:
    """All rows through one engine, coming and leaving as ROWS says; in the serial lane one after another."""
    caches = SlotCaches(make_row(), len(ROWS)) if lane == "batch" else SoloCaches()
    arrivals = [arrival for arrival, _, _ in ROWS] if lane == "batch" else one_by_one()
    return _run(make_row, caches, list(zip(arrivals, specs(), strict=True)))


def each_in_its_own_lane(make_row: RowMaker) -> list[Answer]:
    """Every row in slots, but without company: rings turn as they do in company, to the last bit."""
    return [_run(make_row, SlotCaches(make_row(), 1), [(0, spec)])[0] for spec in specs()]


def alone(make_row: RowMaker) -> list[Answer]:
    """Every row by itself in caches of its own, processed in the same chunks."""
    return [_alone(make_row, spec.prompt, num_tokens) for spec, (_, _, num_tokens) in zip(specs(), ROWS, strict=True)]


def difference(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Difference:
    largest = 0.0
    for our, their in zip(ours, theirs, strict=True):
        a, b = (mx.stack(answer.logits).astype(mx.float32) for answer in (our, their))
        # Some models switch logits off: two infinities are equal, their difference is none.
        largest = max(largest, cast(float, mx.max(mx.where(a == b, 0.0, mx.abs(a - b))).item()))
    return Difference(largest, sum(our.tokens != their.tokens for our, their in zip(ours, theirs, strict=True)))


def one_by_one() -> list[int]:
    """Turns of arrival at which each row's prompt is ready as soon as the row before it leaves, and not sooner."""
    arrivals, free = [], 0
    for _, length, num_tokens in ROWS:
        chunks = -(-(length - 1) // CHUNK_TOKENS)
        arrivals.append(max(0, free - chunks))
        free = arrivals[-1] + chunks + num_tokens
    return arrivals


def _run(make_row: RowMaker, caches: SlotCaches | SoloCaches, rows: list[tuple[int, RowSpec]]) -> list[Answer]:
    recording = Recording(make_row.model, caches)
    driver = Driver(MlxEngine(make_row, INFO, Decoder(caches, recording), early_reads=True), CHUNK_TOKENS)
    answers = driver.run([(arrival, spec, ROWS[spec.row_id][2]) for arrival, spec in rows])
    assert not driver.failures, driver.failures
    return [Answer(answers[spec.row_id], recording.logits[spec.row_id]) for _, spec in rows]


def _alone(make_row: RowMaker, prompt: tuple[int, ...], num_tokens: int) -> Answer:
    model, caches = make_row.model, make_row()
    for start in range(0, len(prompt) - 1, CHUNK_TOKENS):
        model(mx.array([prompt[start : min(start + CHUNK_TOKENS, len(prompt) - 1)]]), cache=caches)
    tokens, logits, last = [], [], mx.array(prompt[-1])
    for _ in range(num_tokens):
        own = model(last[None, None], cache=caches)[0, -1]
        last = mx.argmax(own)
        mx.async_eval(last)
        tokens.append(last)
        logits.append(own)
    return Answer(cast(list[int], mx.stack(tokens).tolist()), logits)
