"""Drives an engine as the scheduler does, without one: rows come at the turns that a test says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lanes.batch import SlotCaches
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import CompiledForward, eager
from lanes.lane import Chunk, Logprob, ModelInfo, RowSpec, Step
from lanes.solo import RowMaker

INFO = ModelInfo(
    "tiny", "llama", 97, None, (), "batch", "", 32, 0, 0, None, 0, 1, "anywhere", "float32", "cpu", "stock"
)


def engine_for(model: Any, max_rows: int = 32, *, compiled: bool = False, early_reads: bool = False) -> MlxEngine:
    make_row = RowMaker(model)
    caches = SlotCaches(make_row(), max_rows)
    forward = CompiledForward(model, caches) if compiled else partial(eager, model, caches)
    return MlxEngine(make_row, INFO, Decoder(caches, forward), early_reads=early_reads)


Answers = dict[int, list[int]]


@dataclass
class Driver:
    """Admits each row at its turn, one chunk a turn, and lets it leave after its number of tokens."""

    engine: MlxEngine
    chunk_tokens: int = 32
    answers: dict[int, list[int]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)

    def run(
        self, rows: Sequence[tuple[int, RowSpec, int]], cut: Mapping[int, int] | None = None
    ) -> dict[int, list[int]]:
        """rows: (turn of arrival, row, tokens wanted). cut: row id to the turn in which it is taken out."""
        cut = dict(cut or {})
        arrivals = sorted(rows, key=lambda row: row[0])
        wanted = {spec.row_id: number for _, spec, number in rows}
        prompts: dict[int, tuple[RowSpec, int]] = {}
        dispatched: dict[int, int] = {}
        turn, in_flight = 0, False
        while arrivals or prompts or dispatched or in_flight:
            leave = [row for row, number in dispatched.items() if number >= wanted[row]]
            leave += [row for row, at in cut.items() if at <= turn and (row in dispatched or row in prompts)]
            for row in leave:
                dispatched.pop(row, None)
                prompts.pop(row, None)
            arrivals = [row for row in arrivals if cut.get(row[1].row_id, turn + 1) > turn]
            admit = [spec for at, spec, _ in arrivals if at <= turn]
            arrivals = [row for row in arrivals if row[0] > turn]
            prompts.update({spec.row_id: (spec, 0) for spec in admit})
            merge = [row for row, (spec, done) in prompts.items() if done == len(spec.prompt) - 1]
            for row in merge:
                del prompts[row]
                dispatched[row] = 0
            chunk = None
            if prompts:
                row, (spec, done) = next(iter(prompts.items()))
                chunk = Chunk(row, done, min(done + self.chunk_tokens, len(spec.prompt) - 1))
            result = self.engine.step(Step(leave=tuple(leave), admit=tuple(admit), merge=tuple(merge), chunk=chunk))
            self.engine.check()
            if chunk:
                prompts[chunk.row_id] = (prompts[chunk.row_id][0], chunk.stop)
            for row in dispatched:
                dispatched[row] += 1
            for row, token in result.tokens:
                self.answers.setdefault(row, []).append(token)
                if row in dispatched:  # a step may give several
                    dispatched[row] = max(dispatched[row], len(self.answers[row]))
            for row, logprob in result.logprobs:
                self.logprobs.setdefault(row, []).append(logprob)
            for row, reason in result.failures:
                self.failures[row] = reason
                dispatched.pop(row, None)
                prompts.pop(row, None)
            turn, in_flight = turn + 1, result.in_flight
        return self.answers
