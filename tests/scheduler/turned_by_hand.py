"""A scheduler and a fake engine, turned by hand, and what their clients hear."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

import pytest
import trio

from lanes.lane import RowSpec, Sampling, Step
from lanes.thread import ModelThread
from scheduler.protocol import Delta, Done, Error, Reply
from scheduler.rates import ChunkSize
from scheduler.request import Request, Wish
from scheduler.scheduler import BatchScheduler
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import ByteStream
from tests.scheduler.fake_engine import INFO, FakeEngine, echoed

MAX_ROWS = INFO.max_rows
MAX_QUEUE = 5
STOP = 7

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass
class Memory:
    """A budget that others may take from, as tests say: limit tokens, and each slot has as many as the longest row."""

    limit: int = 100_000

    def fits(self, lane: Iterable[int], solo: Iterable[int], beside: int = 0) -> bool:
        lengths = list(lane)
        return len(lengths) * max(lengths, default=0) + sum(solo) + beside <= self.limit


class Heard:
    """What one client was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.end: Done | Error | None = None

    def reply(self, reply: Reply) -> None:
        assert self.end is None, f"{reply} after the end, {self.end}"
        if isinstance(reply, Delta):
            self.tokens.extend(reply.token_ids)
            self.text += reply.text
        else:
            assert isinstance(reply, Done | Error)
            self.end = reply


class AtOnce(ModelThread):
    """In place of the model's thread, for a loop over a bench's scheduler: all is in one thread."""

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        await trio.lowlevel.checkpoint()
        return function(*args)


class Bench:
    """A scheduler and its engine, turned by hand. A turn takes a second."""

    def __init__(
        self,
        max_rows: int = MAX_ROWS,
        max_queue: int = MAX_QUEUE,
        chunk_tokens: int = 8,
        early_reads: bool = False,
        tokens_a_step: int = 1,
    ) -> None:
        self.engine = FakeEngine(early_reads=early_reads, tokens_a_step=tokens_a_step)
        self.memory = Memory()
        self.scheduler = BatchScheduler(max_rows, max_queue, ChunkSize(chunk_tokens, 0.05), self.memory)  # type: ignore[arg-type]
        self.heard: dict[int, Heard] = {}
        self.wishes: dict[int, Wish] = {}
        self.now_s = 0.0

    def submit(self, prompt: list[int], max_tokens: int = 4, **wish_options: Any) -> int:
        row_id = len(self.wishes) + 1
        wish = Wish(f"r{row_id}", tuple(prompt), max_tokens, Sampling(), frozenset({STOP}), **wish_options)
        heard = Heard()
        request = Request(row_id, wish, Transcript(TextStream(ByteStream())), heard.reply, self.now_s)
        self.scheduler.submit(request)
        self.heard[row_id], self.wishes[row_id] = heard, wish
        return row_id

    def spec(self, row_id: int) -> RowSpec:
        return RowSpec(row_id, self.wishes[row_id].prompt, Sampling())

    def begin(self) -> Step | None:
        return self.scheduler.plan(self.now_s)

    def end(self, step: Step) -> list[tuple[Request, float | None]]:
        result = self.engine.step(step)
        self.now_s += 1.0
        return list(self.scheduler.apply(step, result, self.now_s))

    def turn(self) -> Step | None:
        step = self.begin()
        if step is not None:
            self.end(step)
        return step

    def run(self, turns: int = 500) -> None:
        """Until there is nothing to do."""
        for _ in range(turns):
            if self.turn() is None:
                break
        else:
            pytest.fail(f"still busy after {turns} turns")
        self.scheduler.check()
        self.engine.check()

    def expected(self, row_id: int) -> list[int]:
        """The tokens that a client of the whole answer sees: the stop token is not among them."""
        wish = self.wishes[row_id]
        answer = echoed(wish.prompt, wish.max_tokens)
        return answer[: answer.index(STOP)] if STOP in answer else answer

    def assert_answered(self, row_id: int) -> None:
        heard, wish = self.heard[row_id], self.wishes[row_id]
        assert isinstance(heard.end, Done)
        assert heard.tokens == self.expected(row_id)
        stopped = STOP in echoed(wish.prompt, wish.max_tokens)
        assert (heard.end.finish_reason, heard.end.stop_reason) == (("stop", STOP) if stopped else ("length", None))
        assert heard.end.usage.completion_tokens == len(heard.tokens) + stopped
        assert heard.end.usage.prompt_tokens == len(wish.prompt)
