"""Both sides driven without sockets, by one clock and one list of requests: our scheduler with its engine, as the
daemon's loop drives them, and mlx-lm's BatchGenerator.

Import this before MLX: it puts the BLAS in place.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

from lanes import cuda_environment
from lanes.blas import preload

cuda_environment.set_variables()
BLAS = preload()

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from lanes.build import build_engine
from lanes.engine import MlxEngine
from lanes.grammar import GrammarCompiler
from lanes.lane import LaneSettings, RowSpec, Sampling, Step
from lanes.load import LoadedModel
from scheduler.budget import Budget
from scheduler.options import Options
from scheduler.rates import make_chunk_size
from scheduler.request import Request, Wish
from scheduler.scheduler import BatchScheduler
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.bench.harness import Report
from tests.bench.models import weight_bytes
from tests.bench.stories import Story

# The engine bounds MLX's memory for reuse; the peer is to run with what MLX allows by itself.
_PEER_CACHE_BYTES = mx.set_cache_limit(0)
mx.set_cache_limit(_PEER_CACHE_BYTES)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when it arrives, in seconds from the beginning, its prompt, and how many tokens it is to get.

    again: whoever has asked it asks the same once it is answered, for as long as first tokens are waited for.
    """

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    again: bool = False


class Side(Protocol):
    """What serves requests, turn by turn."""

    def submit(self, ask: Ask) -> int:
        """Take a request in; returns a number for it."""
        ...

    def turn(self) -> list[int]:
        """Do one turn; returns the number of each request that got a token."""
        ...

    def stop(self) -> None:
        """Give up what still runs."""
        ...


class _Silent:
    """Text is not what is measured here, and random weights have no tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def engine_for(model: Any, max_rows: int) -> MlxEngine:
    """The engine that the daemon would make of this model, without guesses, which depend on the text; it may change the
    model."""
    config = {"model_type": model.args.model_type, "vocab_size": model.args.vocab_size}
    dtype = str(model.layers[0].input_layernorm.weight.dtype).removeprefix("mlx.core.")
    loaded = LoadedModel(model, _NO_TOKENIZER, config, "bench", weight_bytes(model), dtype, None, "")
    return build_engine(loaded, LaneSettings(max_rows=max_rows, num_draft_tokens=0), BLAS.kind)


_NO_TOKENIZER: Any = SimpleNamespace(grammars=GrammarCompiler(None, ()), eos_token_ids=frozenset())


class Ours:
    """plan, step, apply, one after another, with the daemon's defaults."""

    def __init__(self, engine: MlxEngine, max_rows: int) -> None:
        options = Options(model="bench")
        info = engine.info
        chunk_size = make_chunk_size(options.prefill_step_size, options.max_stall_ms / 1000, info.chunk_multiple)
        budget = Budget.for_model(info, options.kv_cache_memory_bytes)
        self.engine = engine
        self.scheduler = BatchScheduler(max_rows, 1 << 20, chunk_size, budget, info.shared_prompt_tokens)
        self._numbers = count(1)

    def submit(self, ask: Ask) -> int:
        number = next(self._numbers)
        wish = Wish(number, ask.prompt, ask.max_tokens, Sampling())
        request = Request(number, wish, Transcript(TextStream(_Silent())), lambda said: None, time.perf_counter())
        self.scheduler.submit(request)
        return number

    def turn(self) -> list[int]:
        step = self.scheduler.plan(time.perf_counter())
        if step is None:
            return []
        result = self.engine.step(step)
        assert not result.failures, f"rows failed: {result.failures}"
        return [request.row_id for request, _ in self.scheduler.apply(step, result, time.perf_counter())]

    def stop(self) -> None:
        for number in list(self.scheduler.requests):
            self.scheduler.cancel(number, time.perf_counter())
        while (step := self.scheduler.plan(time.perf_counter())) is not None:
            for _ in self.scheduler.apply(step, self.engine.step(step), time.perf_counter()):
                pass
        self.scheduler.check()
        self.engine.check()


class Peer:
    """BatchGenerator with its own defaults."""

    def __init__(self, model: Any, max_rows: int) -> None:
        self.generator = BatchGenerator(model, completion_batch_size=max_rows)
        self._running: set[int] = set()

    def submit(self, ask: Ask) -> int:
        (number,) = self.generator.insert([list(ask.prompt)], [ask.max_tokens])
        self._running.add(number)
        return int(number)

    def turn(self) -> list[int]:
        _, generated = self.generator.next()
        self._running.difference_update(response.uid for response in generated if response.finish_reason)
        return [response.uid for response in generated]

    def stop(self) -> None:
        if self._running:
            self.generator.remove(list(self._running))
        self._running.clear()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a list of requests, and the most memory in use above what was in use before, in bytes."""

    stories: list[Story]
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together, from the first arrival to the last token."""
        tokens = [when for story in self.stories for when in story.token_s]
        return len(tokens) / (max(tokens) - min(story.arrived_s for story in self.stories))

    @property
    def gaps_s(self) -> list[float]:
        return [gap for story in self.stories for gap in story.gaps_s]


def play(
    side: Side,
    asks: Sequence[Ask],
    report: Report,
    first_tokens_only: bool = False,
    go_on_s: float = 0.0,
    before_turn: Callable[[float], None] = lambda now_s: None,
) -> Outcome:
    """Have the requests arrive in their time and serve them all to their end, or to their first token and so long
    after the last of those. before_turn is told the time, in seconds of the stories' clock."""
    with peer_memory() if isinstance(side, Peer) else peak_memory() as peak:
        stories = _play(side, asks, report, first_tokens_only, go_on_s, before_turn)
        side.stop()
    return Outcome(stories, peak[0])


def _play(
    side: Side,
    asks: Sequence[Ask],
    report: Report,
    first_tokens_only: bool,
    go_on_s: float,
    before_turn: Callable[[float], None],
) -> list[Story]:
    coming = deque(sorted(asks, key=lambda ask: ask.at_s))
    goal = len(asks) if first_tokens_only else sum(ask.max_tokens for ask in asks)
    stories: list[Story] = []
    answering: dict[int, tuple[Ask, Story, int]] = {}
    done = taken_in = 0
    began_s = time.perf_counter()
    now_s = stop_s = 0.0
    while (is_waiting := done < goal) or now_s < stop_s:
        now_s = time.perf_counter() - began_s
        while coming and coming[0].at_s <= now_s:
            ask = coming.popleft()
            stories.append(Story(ask.at_s))
            answering[side.submit(ask)] = ask, stories[-1], ask.max_tokens
            taken_in += 1 if first_tokens_only else ask.max_tokens
        # Where first tokens alone count, those who have theirs go on until all have.
        if done == taken_in and not (first_tokens_only and stories):
            time.sleep(max(0.0, coming[0].at_s - now_s))
            continue
        before_turn(now_s)
        numbers = side.turn()
        now_s = time.perf_counter() - began_s
        for number in numbers:
            ask, story, left = answering[number]
            story.token_s.append(now_s)
            done += not first_tokens_only or len(story.token_s) == 1
            answering[number] = ask, story, left - 1
            if left == 1 and ask.again:
                answering[side.submit(ask)] = ask, story, ask.max_tokens
        if is_waiting:
            stop_s = now_s + go_on_s
        report(done / goal)
    return stories


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """A list that holds, once the block is left, the most bytes that MLX had in use in it beyond those before it."""
    mx.clear_cache()
    before, peak = mx.get_active_memory(), [0]
    mx.reset_peak_memory()
    yield peak
    peak[0] = mx.get_peak_memory() - before


@contextmanager
def peer_memory() -> Iterator[list[int]]:
    """As peak_memory(), with as much memory kept for reuse as MLX keeps by itself."""
    ours = mx.set_cache_limit(_PEER_CACHE_BYTES)
    try:
        with peak_memory() as peak:
            yield peak
    finally:
        mx.set_cache_limit(ours)


def random_prompt(source: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(100, 20_000) for _ in range(tokens))


def seat(engine: MlxEngine, rows: Sequence[tuple[list[Any], int]]) -> None:
    """Enter rows whose caches are made already, (caches, length), as if their prompts had been processed, and merge
    them, each in a turn of its own."""
    for number, (caches, length) in enumerate(rows):
        place(engine, number, caches, length)
    for number in range(len(rows)):
        engine.step(Step(merge=(number,)))


def place(engine: MlxEngine, number: int, caches: list[Any], length: int) -> None:
    """Enter a row whose caches are made already, so that it can be merged."""
    engine.step(Step(admit=(RowSpec(number, (1,) * (length + 1), Sampling()),)))
    prompt = engine._prompts[number]
    prompt.caches, prompt.processed = caches, length
