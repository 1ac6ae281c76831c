"""What remembering costs those who decode, and the disk.

Eight rows that end and come back with new prompts, on a daemon's service with a store on disk and on one that remembers
nothing: the same engine, the same requests, in turns. Rates differ by more than the tax from one minute to the next. So
turns in which rows leave, which is when they are frozen, are compared by themselves, and the work that only the store
brings is timed, by where it is done. What is remembered in memory is at its limit, as it is in a daemon's life but for
its first minutes: new copies find memory that others have left, where new memory takes several times as long to touch.

Then a conversation of 20 turns: bytes written for a turn over what its new tokens hold, beside writing the whole row
each time. --folder: on the disk that is to be measured.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import trio

from tests.bench.drive import BLAS, engine_for, random_prompt

# isort: split
import mlx.core as mx

from lanes.engine import MlxEngine
from lanes.lane import Step, StepResult
from lanes.thread import open_model_thread
from lanes.tuning import backend
from scheduler.options import Options
from scheduler.service import Service
from store import disk_work, writer
from store.store import Store
from tests.bench.harness import Bench, Report, bench
from tests.bench.models import default_model
from tests.bench.service import ask, interleave_async, open_service

ROWS, TURNS = 8, 20


@dataclass(frozen=True, slots=True)
class Size:
    """rounds of requests, so many one after another for each row, prompts and answers of so many tokens, a few of which
    fit into the memory for what is remembered; then a conversation whose turns bring so many tokens, and are answered
    with so many."""

    rounds: int
    requests: int
    prompt_tokens: int
    answer_tokens: tuple[int, int]
    asked_tokens: int
    answered_tokens: int
    memory_bytes: int = 64 << 20


FULL = Size(8, 2, 32, (112, 144), 96, 32)
QUICK = Size(1, 2, 8, (12, 18), 28, 4)
GPU = Size(4, 4, 64, (112, 144), 192, 64, memory_bytes=256 << 20)

# Where the store's work is done.
WAITING = "waiting for the step under way, which is due in any case, before freezing"
FREEZING = "freezing, on the model's thread"
BOOKING = "looking up and booking, on Trio's thread"
WRITING = "writing, processor time of other threads"


class Watch:
    """What work takes, while it is watched: seconds by where it is done, and the turns in which rows leave."""

    def __init__(self, engine: MlxEngine, store: Store) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.leaving_s: list[float] = []
        self._time(BOOKING, time.perf_counter, store, "_find", "draft", "remember")
        self._time(WRITING, time.thread_time, writer, "_write_file")
        self._time(WRITING, time.thread_time, disk_work, "free_bytes", "make_temporary", "examine", "publish")
        self._time(FREEZING, time.perf_counter, engine.memory, "begin_freeze", "_whole")
        self._begin_freeze, self._step, self._engine = engine.memory.begin_freeze, engine.step, engine
        replaced: list[Any] = [engine.memory, engine]
        replaced[0].begin_freeze, replaced[1].step = self._begin_freeze_after_steps, self._timed_step

    def _time(self, what: str, clock: Callable[[], float], owner: Any, *names: str) -> None:
        """Of an object or a module, these functions."""
        for name in names:
            setattr(owner, name, partial(self._timed, what, clock, getattr(owner, name)))

    def _timed(
        self, what: str, clock: Callable[[], float], work: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        began_s = clock()
        try:
            return work(*args, **options)
        finally:
            self.seconds[what] += clock() - began_s

    def _begin_freeze_after_steps(self, *args: Any) -> None:
        if not self._engine.decoder.caches.may_be_held:
            self._timed(WAITING, time.perf_counter, mx.synchronize)
        self._begin_freeze(*args)

    def _timed_step(self, step: Step) -> StepResult:
        began_s = time.perf_counter()
        result = self._step(step)
        if step.leave:
            self.leaving_s.append(time.perf_counter() - began_s)
        return result


@dataclass(frozen=True, slots=True)
class Played:
    """What came of all requests: tokens per second of all rows together, how long it took, and a turn in which rows
    left, the median."""

    tokens_per_s: float
    seconds: float
    leaving_s: float


@dataclass
class Side:
    """One of the two services, with requests that are new each time, and the other side's too."""

    service: Service
    size: Size
    watch: Watch
    seeds: Iterator[int]

    async def __call__(self, report: Report) -> Played:
        size, source = self.size, random.Random(f"round {next(self.seeds)}")
        asks = [
            [(random_prompt(source, size.prompt_tokens), source.randint(*size.answer_tokens)) for _ in range(ROWS)]
            for _ in range(size.requests)
        ]
        goal, done = sum(tokens for one_each in asks for _, tokens in one_each), 0

        async def row(number: int) -> None:
            nonlocal done
            for one_each in asks:
                done += len((await ask(self.service, *one_each[number])).tokens)
                report(done / goal)

        self.watch.leaving_s.clear()
        began_s = trio.current_time()
        async with trio.open_nursery() as rows:
            for number in range(ROWS):
                rows.start_soon(row, number)
        seconds = trio.current_time() - began_s
        # What is still to be written is not to be written while the other side is measured.
        await self.service.flush()
        await self.service.loop.wait_idle()
        return Played(goal / seconds, seconds, statistics.median(self.watch.leaving_s))


async def decode(run: Bench, case: str, size: Size, on: Service, off: Service, engine: MlxEngine) -> None:
    assert on.store is not None
    watch = Watch(engine, on.store)
    for service in (on, off):
        await Side(service, size, watch, count(-1))(lambda part: None)
    watch.seconds.clear()
    sides = [Side(service, size, watch, count()) for service in (on, off)]
    with_store, without = await interleave_async(size.rounds, "eight rows", *sides)
    stats = on.store.stats()
    assert stats.dropped == stats.errors == 0, f"not all was remembered: {stats}"
    rates = [[played.tokens_per_s for played in side] for side in (with_store, without)]
    row = run.add(case, "all tokens; peer: without a store", "tokens/s", *rates)
    assert row.ratio is not None
    leaving = [[1000 * played.leaving_s for played in side] for side in (with_store, without)]
    said = "a turn in which rows leave, median; peer: without a store"
    run.add(case, said, "ms", *leaving, more_is_better=False)
    seconds = sum(played.seconds for played in with_store)
    run.add(case, "tax by the rates", "%", [100 * (1 - row.ratio)])
    for what in (WAITING, FREEZING, BOOKING, WRITING):
        run.add(case, what, "% of the time", [100 * watch.seconds[what] / seconds])
    per_row = 1000 * watch.seconds[FREEZING] / (size.rounds * size.requests * ROWS)
    run.add(case, "freezing a row", "ms", [per_row])


async def conversation(run: Bench, name: str, size: Size, service: Service, folder: Path) -> None:
    """A client that asks each time with all that was said before."""
    geometry, store, source = service.info.geometry, service.store, random.Random("conversation")
    assert geometry is not None
    assert store is not None
    said: tuple[int, ...] = ()
    before = disk_bytes(folder)
    tensor_bytes = -store.stats().written_bytes
    held, written = [0], []
    for _ in range(TURNS):
        asked = said + random_prompt(source, size.asked_tokens)
        answer = await ask(service, asked, size.answered_tokens)
        assert answer.usage.cached_tokens >= len(said) - 1, f"of {len(said)} tokens {answer.usage} were known"
        said = (*asked, *answer.tokens)
        await service.flush()
        now = disk_bytes(folder)
        assert before.keys() <= now.keys(), "something was deleted"
        written.append(sum(now[path] for path in now.keys() - before.keys()))
        held.append(len(said) - 1)  # nothing was fed the last token
        before = now
    tensor_bytes += store.stats().written_bytes
    new = [(now - then) * geometry.column_bytes for then, now in pairwise(held)]
    whole = [tokens * geometry.column_bytes for tokens in held[1:]]
    case = f"{name}, conversation of {TURNS} turns, {size.asked_tokens} and {size.answered_tokens} tokens each"
    ratios = [[a / b for a, b in zip(side, new, strict=True)] for side in (written, whole)]
    unit = "times the new tokens' bytes"
    run.add(case, "written for a turn; peer: the whole row", unit, *ratios, more_is_better=False)
    in_all = [[sum(side) / sum(new)] for side in (written, whole)]
    run.add(case, "written in all; peer: the whole row each turn", unit, *in_all, more_is_better=False)
    run.add(case, "without headers and padding", unit, [tensor_bytes / sum(new)])


def disk_bytes(folder: Path) -> dict[Path, int]:
    """What each segment takes on the disk: holes take nothing."""
    return {path: 512 * path.stat().st_blocks for path in folder.glob("*/*.segment")}


async def measure(run: Bench, folder: Path) -> None:
    size = QUICK if run.quick else FULL if backend() == "cpu" else GPU
    keeps = Options(model="bench", store=str(folder), max_rows=ROWS, prompt_cache_bytes=size.memory_bytes)
    forgets = Options(model="bench", prompt_cache_bytes=0, max_rows=ROWS)
    async with open_model_thread() as thread:
        name, engine = await thread.run(make_engine)
        async with open_service(keeps, thread, engine) as on, open_service(forgets, thread, engine) as off:
            case = (
                f"{name}, {ROWS} rows, {size.requests} requests each, prompts of {size.prompt_tokens}, answers of "
                f"{size.answer_tokens[0]} to {size.answer_tokens[1]} tokens"
            )
            await decode(run, case, size, on, off, engine)
            await conversation(run, name, size, on, folder)


def make_engine() -> tuple[str, MlxEngine]:
    name, model = default_model()
    return name, engine_for(model, ROWS)


def main() -> None:
    flags = {"folder": "where the store is, on the disk to measure (default: where temporary files are)"}
    with bench("store_tax", __doc__ or "", flags=flags) as run:
        run.blas = BLAS.sentence
        with tempfile.TemporaryDirectory(dir=run.flags["folder"], prefix="laned-bench-") as folder:
            trio.run(measure, run, Path(folder))


if __name__ == "__main__":
    main()
