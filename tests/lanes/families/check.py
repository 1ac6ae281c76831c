"""Six rows of unlike lengths through the real engine, each against itself alone in the same caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.choice import Choice, choose_lane
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
# so that others move into its slot; the last comes without any state to a lane that has had others.
ROWS = (
    (0, 2, 48),
    (0, 3 * WINDOW + 5, 9),
    (2, WINDOW, 40),
    (5, WINDOW + 1, 24),
    (16, WINDOW - 1, 30),
    (20, 1, 26),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """difference: the largest between two logits; wrong_tokens: how many rows drew another token than alone."""

    choice: Choice
    difference: float
    wrong_rows: int


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


def compare(make_row: RowMaker) -> Finding:
    """Run the rows in the lane that is chosen for the model. Raises what choose_lane() raises."""
    choice = choose_lane(make_row)
    batched = choice.lane == "batch"
    caches = SlotCaches(make_row(), len(ROWS)) if batched else SoloCaches()
    recording = Recording(make_row.model, caches)
    driver = Driver(MlxEngine(make_row, INFO, Decoder(caches, recording)), CHUNK_TOKENS)
    specs = [(RowSpec(i, prompt_of(length, i), Sampling()), tokens) for i, (_, length, tokens) in enumerate(ROWS)]
    arrivals = [arrival for arrival, _, _ in ROWS] if batched else one_by_one(specs)
    answers = driver.run([(at, spec, tokens) for at, (spec, tokens) in zip(arrivals, specs, strict=True)])
    assert not driver.failures, driver.failures
    difference, wrong_rows = 0.0, 0
    for spec, num_tokens in specs:
        tokens, logits = alone(make_row, spec.prompt, num_tokens)
        wrong_rows += answers[spec.row_id] != tokens
        difference = max(difference, _difference(recording.logits[spec.row_id], logits))
    return Finding(choice, difference, wrong_rows)


def one_by_one(specs: Sequence[tuple[RowSpec, int]]) -> list[int]:
    """Turns of arrival at which each row's prompt is ready as soon as the row before it leaves, and not sooner."""
    arrivals, free = [], 0
    for spec, num_tokens in specs:
        chunks = -(-(len(spec.prompt) - 1) // CHUNK_TOKENS)
        arrivals.append(max(0, free - chunks))
        free = arrivals[-1] + chunks + num_tokens
    return arrivals


def alone(make_row: RowMaker, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[mx.array]]:
    """The greedy answer of a row by itself, processed in the same chunks, and the logits of each token."""
    model, caches = make_row.model, make_row()
    for start in range(0, len(prompt) - 1, CHUNK_TOKENS):
        model(mx.array([prompt[start : min(start + CHUNK_TOKENS, len(prompt) - 1)]]), cache=caches)
    tokens, logits, last = [], [], prompt[-1]
    for _ in range(num_tokens):
        own = model(mx.array([[last]]), cache=caches)[0, -1]
        last = cast(int, mx.argmax(own).item())
        tokens.append(last)
        logits.append(own)
    return tokens, logits


def _difference(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> float:
    a, b = (mx.stack(list(logits)).astype(mx.float32) for logits in (ours, theirs))
    # Some models switch logits off: two infinities are equal, their difference is none.
    return cast(float, mx.max(mx.where(a == b, 0.0, mx.abs(a - b))).item())
