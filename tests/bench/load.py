"""The whole daemon under open-loop load: requests arrive at random moments (Poisson), whether it keeps up or not, at
50, 80, 95 and 120% of what it can serve, which is measured first with as many clients as there are rows. Prompts and
answers are of random length, all different. What clients see: time to first token, time between tokens, refusals, and
goodput: requests a second that were answered to the end with a first token within GOOD_S.

    python -m tests.bench.load --plot docs/load.png
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from lanes.blas import preload
from scheduler.answer import RequestError
from scheduler.client import Client
from tests.bench.clients import ask_all, of_daemon
from tests.bench.harness import Bench, bench
from tests.bench.serve import Server, process, same_blas
from tests.bench.stories import Story

ROWS, QUEUE = 8, 16
PROMPT_TOKENS, ANSWER_TOKENS = (16, 128), (8, 64)
GOOD_S = 5.0
LOAD_S = 120.0
LEVELS = (0.5, 0.8, 0.95, 1.2)
# A request from its arrival to its end.
One = Callable[[Story], Awaitable[None]]
FLAGS = {
    "plot": "write a picture of it",
    "socket": "of a daemon that is there already, with eight rows",
}


@dataclass(frozen=True, slots=True)
class Level:
    """What came of so many requests a second, offered for seconds."""

    offered_per_s: float
    seconds: float
    stories: list[Story]

    def of(self, outcome: str) -> list[Story]:
        return [story for story in self.stories if story.outcome == outcome]

    @property
    def ttft_s(self) -> list[float]:
        return [story.ttft_s for story in self.stories if story.token_s]

    @property
    def gaps_s(self) -> list[float]:
        return [gap for story in self.stories for gap in story.gaps_s]

    @property
    def refused_per_s(self) -> float:
        return len(self.of("overloaded")) / self.seconds

    @property
    def goodput_per_s(self) -> float:
        return sum(story.ttft_s <= GOOD_S for story in self.of("done")) / self.seconds


class Source:
    """Requests of random length, none like another."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self) -> tuple[tuple[int, ...], int]:
        tokens = self.random.randint(*PROMPT_TOKENS)
        return tuple(self.random.randrange(100, 20_000) for _ in range(tokens)), self.random.randint(*ANSWER_TOKENS)


async def ask(client: Client, prompt: tuple[int, ...], max_tokens: int, story: Story) -> None:
    try:
        async with client.submit(prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True) as answer:
            async for delta in answer:
                story.token_s += [time.perf_counter()] * len(delta.token_ids)
        story.outcome = "done"
    except RequestError as error:
        story.outcome = error.code


async def capacity_of(path: Path, seconds: float) -> float:
    """Requests a second."""
    source = Source(1)
    async with Client(path) as client:
        return await closed_loop(lambda story: ask(client, *source.request(), story), seconds)


async def closed_loop(one: One, seconds: float) -> float:
    """Requests a second that are done, with as many clients as rows, each asking again at once."""
    done = 0

    async def again() -> None:
        nonlocal done
        while True:
            story = Story(time.perf_counter())
            await one(story)
            done += story.outcome == "done"

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(ROWS):
                nursery.start_soon(again)
    return done / seconds


async def stories_at(path: Path, per_s: float, seconds: float, seed: int) -> list[Story]:
    source = Source(seed)
    async with Client(path) as client:
        return await open_loop(lambda story: ask(client, *source.request(), story), source.random, per_s, seconds)


async def open_loop(one: One, source: random.Random, per_s: float, seconds: float) -> list[Story]:
    """Requests at a rate for some seconds, at random moments: of a Poisson process that has as many in that time as its
    rate says, so that the load is the one that is named. Returns when all have ended."""
    stories: list[Story] = []
    began_s = trio.current_time()
    moments = sorted(source.uniform(0, seconds) for _ in range(round(per_s * seconds)))
    async with trio.open_nursery() as nursery:
        for at_s in moments:
            await trio.sleep_until(began_s + at_s)
            stories.append(Story(time.perf_counter()))
            nursery.start_soon(one, stories[-1])
    return stories


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100)[round(share * 100) - 1] if len(values) > 1 else values[0]


def book(run: Bench, case: str, level: Level) -> None:
    run.add(case, "goodput", "requests/s", [level.goodput_per_s])
    for share in (0.5, 0.95, 0.99):
        run.add(case, f"time to first token, p{share * 100:.0f}", "s", [percentile(level.ttft_s, share)])
        run.add(case, f"between tokens, p{share * 100:.0f}", "ms", [percentile(level.gaps_s, share) * 1000])
    run.add(case, "refused", "%", [100 * level.refused_per_s / level.offered_per_s])


def plot(levels: list[Level], capacity: float, file: Path) -> None:
    """Percentiles over the offered load, and goodput beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    waits, gaps, good = figure.subplots(1, 3)
    load = [100 * level.offered_per_s / capacity for level in levels]
    for share in (0.5, 0.95, 0.99):
        label = f"p{share * 100:.0f}"
        waits.plot(load, [percentile(level.ttft_s, share) for level in levels], marker="o", label=label)
        gaps.plot(load, [1000 * percentile(level.gaps_s, share) for level in levels], marker="o", label=label)
    good.plot(load, [level.offered_per_s for level in levels], linestyle="--", color="grey", label="offered")
    good.plot(load, [level.goodput_per_s for level in levels], marker="o", label=f"first token within {GOOD_S:g} s")
    good.plot(load, [level.refused_per_s for level in levels], marker="x", color="tab:red", label="refused")
    for axes, title, unit in (
        (waits, "time to first token", "s"),
        (gaps, "between tokens", "ms"),
        (good, "goodput", "requests/s"),
    ):
        axes.set(title=title, xlabel="offered load, % of capacity", ylabel=unit, ylim=(0, None))
        axes.legend()
    figure.savefig(file, dpi=110)


async def wait_ready(path: Path) -> None:
    """A socket of the service manager's is there before the model is."""
    async with Client(path, wait_s=LOAD_S):
        pass


@contextmanager
def daemon(run: Bench) -> Iterator[Path]:
    """Its socket, once it has answered: the one that is there, or one of our own."""
    if socket := run.flags["socket"]:
        trio.run(wait_ready, Path(socket))
        ask_all(of_daemon(Path(socket)), ["Hello"], 4, lambda part: None)
        yield Path(socket)
        return
    report = preload()
    run.blas = report.sentence
    same_blas(report)
    with tempfile.TemporaryDirectory(prefix="laned-bench-") as folder:
        path, log = Path(folder, "laned.sock"), Path(folder, "daemon.log")
        command = ["scheduler.cli", "serve", "--model", "demo", "--socket", str(path)]
        command += ["--max-rows", str(ROWS), "--max-queue", str(QUEUE), "--num-draft-tokens", "0"]
        with process(command, log) as started:
            Server(started, log, of_daemon(path)).wait_ready("Hello")
            yield path


def main() -> None:
    with bench("load", __doc__ or "", flags=FLAGS) as run, daemon(run) as path:
        seconds = 20.0 if run.quick else 60.0
        capacity = trio.run(capacity_of, path, seconds)
        prompts, answers = (f"{least} to {most}" for least, most in (PROMPT_TOKENS, ANSWER_TOKENS))
        case = f"prompts of {prompts}, answers of {answers} tokens, {ROWS} rows"
        run.add(case, "capacity", "requests/s", [capacity])
        levels = []
        for seed, part in enumerate(LEVELS):
            per_s = part * capacity
            stories = trio.run(stories_at, path, per_s, seconds, 10 + seed)
            levels.append(Level(per_s, seconds, stories))
            book(run, f"{part:.0%} of capacity, {per_s:.2f} requests/s", levels[-1])
        if run.flags["plot"]:
            plot(levels, capacity, Path(run.flags["plot"]))


if __name__ == "__main__":
    main()
