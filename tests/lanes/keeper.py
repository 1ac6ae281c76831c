"""Stands for the store where rows are frozen and thawed: it puts parts together, and drives the rows of one engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from lanes.batch import SlotCaches
from lanes.boundary import remembers
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.lane import Chunk, Freeze, RowSpec, Sampling, Step, StepResult
from lanes.rows import kind_of
from lanes.serial import SoloCaches
from lanes.solo import RowMaker
from store.checkpoint import Destination, Part, Recall, TensorSpec
from tests.lanes.driver import INFO
from tests.lanes.families.check import Recording


def recall_of(parts: Sequence[Part], tokens: int) -> Recall:
    """What is known of a row's first `tokens` tokens."""
    specs = [spec for part in parts for spec in part.tensors]
    columns = {spec.name: spec for spec in specs if spec.at is None}
    state = {spec.name: spec for spec in specs if spec.at == tokens}
    return Recall(tokens, (*columns.values(), *state.values()))


def fill(destinations: Iterable[Destination], parts: Sequence[Part]) -> None:
    """With what the parts have; each counts up to where one after it starts."""
    ends = [min((part.start for part in parts[index:]), default=1 << 40) for index in range(1, len(parts) + 1)]
    known = [
        (spec, np.frombuffer(buffer, np.uint8), end)
        for part, end in zip(parts, ends, strict=True)
        for spec, buffer in zip(part.tensors, part.buffers, strict=True)
    ]
    for destination in destinations:
        wanted, target = destination.wanted, np.frombuffer(destination.buffer, np.uint8)
        if not wanted.nbytes:  # some models have keys or values of no numbers
            continue
        found = [each for each in known if (each[0].name, each[0].at) == (wanted.name, wanted.at)]
        if wanted.at is not None:
            (target[:],) = [source for spec, source, end in found if wanted.at <= end][-1:]
            continue
        columns = {
            token: source.reshape(spec.shape[0], -1, spec.column_bytes)[:, column]
            for spec, source, end in found
            for column, token in enumerate(tokens_of(spec))
            if token < end
        }
        heads = target.reshape(wanted.shape[0], destination.head_bytes)
        for column, token in enumerate(tokens_of(wanted)):
            heads[:, column * wanted.column_bytes : (column + 1) * wanted.column_bytes] = columns[token]


def tokens_of(spec: TensorSpec) -> list[int]:
    return [token for first, last in spec.ranges for token in range(first, last)]


class Rows:
    """One engine and its rows: every verb is a turn."""

    def __init__(self, make_row: RowMaker, lane: str = "batch") -> None:
        kinds = tuple(str(kind_of(cache)) for cache in make_row())
        caches = SlotCaches(make_row(), 8) if lane == "batch" else SoloCaches()
        self.recording = Recording(make_row.model, caches)
        info = replace(INFO, remembers=remembers(kinds), cache_kinds=kinds, lane=lane)
        self.engine = MlxEngine(make_row, info, Decoder(caches, self.recording))
        self.tokens: dict[int, list[int]] = {}

    @property
    def anywhere(self) -> bool:
        return self.engine.info.remembers == "anywhere"

    def turn(self, **fields: Any) -> StepResult:
        result = self.engine.step(Step(**fields))
        assert not result.failures, result.failures
        self.engine.check()
        for row, token in result.tokens:
            self.tokens[row].append(token)
        return result

    def admit(self, row: int, prompt: Sequence[int], parts: Sequence[Part] = (), known: int = 0) -> None:
        """With what is known of the first tokens, if some are."""
        recall = recall_of(parts, known) if known else None
        self.tokens[row] = list(prompt)
        result = self.turn(admit=(RowSpec(row, tuple(prompt), Sampling(), recall),))
        if known:
            ((_, destinations),) = result.destinations
            fill(destinations, parts)
            self.turn(recalled=((row, True),))

    def process(self, row: int, start: int, stops: Iterable[int], saves: Iterable[int] = ()) -> None:
        """The row's prompt from `start` on, in chunks that end at stops, some of them saved."""
        for stop in sorted(stops):
            if stop > start:
                self.turn(chunk=Chunk(row, start, stop, save=stop in set(saves)))
                start = stop

    def decode(self, row: int, steps: int) -> list[mx.array]:
        """Merge the row and step it; returns the logits of each step."""
        self.turn(merge=(row,))
        for _ in range(steps - 1):
            self.turn()
        return self.recording.logits[row]

    def freeze(self, row: int, start: int, stop: int) -> Part:
        wanted = Freeze(row, start, stop)
        ((frozen, part),) = self.turn(freeze=(wanted,)).frozen
        assert frozen == wanted
        assert part is not None
        assert (part.start, part.stop) == (start, stop)
        for spec, buffer in zip(part.tensors, part.buffers, strict=True):
            assert buffer.nbytes == spec.nbytes
        return part
