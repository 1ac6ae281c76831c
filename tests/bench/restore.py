"""How soon a prompt that was processed before has its first token again: from memory, from disk, after a restart of the
daemon; beside the rate of the memory and of the disk themselves, and mlx-lm's save_prompt_cache and load_prompt_cache.

Ours is the daemon's service in this process, everything but the socket. A restart is a new store and a new keeper on
the same folder, which know nothing but its files; the model stays. Where files are dropped from the page cache it is
looked whether they have gone; what a disk, or the host of a virtual one, keeps of them is out of reach. --folder: on
the disk that is to be measured.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import trio

from tests.bench.drive import BLAS, engine_for, peer_memory, random_prompt

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache

from lanes.engine import MlxEngine
from lanes.thread import ModelThread, open_model_thread
from lanes.tuning import backend
from scheduler.options import Options
from scheduler.service import Service
from tests.bench.harness import Bench, Report, bench
from tests.bench.media import copy_all, drop_pages, new_memory, read_all
from tests.bench.models import model_for_long_prompts
from tests.bench.service import Answer, ask, interleave_async, open_service

LENGTHS, QUICK_LENGTHS = (1000, 4000, 14_000), (1000,)
ROUNDS, QUICK_ROUNDS = 3, 2
DROPPED = ", page cache dropped"
WAYS = ("memory", "disk", f"disk{DROPPED}", "disk after a restart", f"disk after a restart{DROPPED}")
NEW, USED = "to new memory", "to memory in use"
# By name, of one round.
Figures = dict[str, float]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.segment"))


def plain_rates(way: str, paths: Sequence[Path]) -> dict[str, float]:
    """What the medium of this way does with as many bytes, B/s: to memory that this touches first, and once more."""
    num_bytes = sum(path.stat().st_size for path in paths)
    source, into, rates = new_memory(num_bytes), new_memory(num_bytes), {}
    if way == "memory":
        read_all(paths, source)
    for where in (NEW, USED):
        if way.endswith(DROPPED):
            drop_pages(paths)
        rates[plain(way, where)] = copy_all(source, into) if way == "memory" else read_all(paths, into)
    return rates


def plain(way: str, where: str) -> str:
    return f"plain {'copy' if way == 'memory' else 'read'} {where}, from {way}"


async def warm_up(service: Service) -> None:
    """What is done once in a daemon's life is done; nothing of it is remembered."""
    await ask(service, range(100, 108), 3, cache="none")
    await service.loop.wait_idle()


@dataclass
class Ours:
    """The service, asked for each prompt first when nothing is known of it, then in each of WAYS."""

    thread: ModelThread
    engine: MlxEngine
    folder: Path
    tokens: int
    seeds: Iterator[int]

    async def __call__(self, report: Report) -> Figures:
        prompt = random_prompt(random.Random(next(self.seeds)), self.tokens)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            # The longest prompt of a GPU's model is more than may wait to be written if nothing is said.
            options = Options(model="bench", store=name, max_rows=2, store_queue_bytes=8 << 30)
            async with open_service(options, self.thread, self.engine) as service:
                await warm_up(service)
                cold = await ask(service, prompt, 1)
                await service.flush()
                kept_s = trio.current_time() - cold.asked_s - cold.first_s
                figures = {"cold": cold.first_s, "kept": kept_s}
                await service.loop.wait_idle()
                report(0.9)
                paths = segments(Path(name))
                for way in WAYS[:3]:
                    figures |= await ask_again(service, prompt, way, paths, cold)
            for way in WAYS[3:]:
                async with open_service(options, self.thread, self.engine) as service:
                    await warm_up(service)
                    figures |= await ask_again(service, prompt, way, paths, cold)
        return figures


async def ask_again(service: Service, prompt: Sequence[int], way: str, paths: Sequence[Path], cold: Answer) -> Figures:
    """The time to the first token, the part of the prompt that was recalled, how fast that was read, B/s, and how fast
    the medium is right after."""
    store = service.store
    assert store is not None
    if way != "memory":
        store._memory.demote(math.inf)  # as --demote-idle does
    if way.endswith(DROPPED):
        drop_pages(paths)
    before = store.stats()
    answer = await ask(service, prompt, 1)
    await service.loop.wait_idle()
    after, usage = store.stats(), answer.usage
    elsewhere = usage.cached_disk_tokens if way == "memory" else usage.cached_memory_tokens
    assert not elsewhere, f"from {way}: {usage}"
    if backend() == "cpu":  # elsewhere the last bits may differ
        assert answer.tokens == cold.tokens, f"{answer.tokens} from {way}, {cold.tokens} computed"
    num_bytes, seconds = (
        (after.memory_restored_bytes - before.memory_restored_bytes, after.memory_restored_s - before.memory_restored_s)
        if way == "memory"
        else (after.disk_restored_bytes - before.disk_restored_bytes, after.disk_restored_s - before.disk_restored_s)
    )
    recalled = usage.cached_tokens / (len(prompt) - 1)
    figures = {way: answer.first_s, recalled_of(way): recalled, rate_of(way): num_bytes / seconds if seconds else 0.0}
    return figures | await trio.to_thread.run_sync(plain_rates, way, paths)


def recalled_of(way: str) -> str:
    return f"{way}, recalled"


def rate_of(way: str) -> str:
    return f"{way}, rate"


@dataclass
class Peer:
    """mlx-lm, which a program would have save a prompt's cache in a file, and load it."""

    thread: ModelThread
    model: Any
    folder: Path
    tokens: int
    seeds: Iterator[int]

    async def __call__(self, report: Report) -> Figures:
        return await self.thread.run(self._round)

    def _round(self) -> Figures:
        prompt = mx.array(random_prompt(random.Random(next(self.seeds)), self.tokens))
        with peer_memory(), tempfile.TemporaryDirectory(dir=self.folder) as name:
            path = Path(name) / "prompt.safetensors"
            cache = make_prompt_cache(self.model)
            figures = {"cold": self._first_s(prompt, cache, time.perf_counter())}
            trim_prompt_cache(cache, 1)
            began_s = time.perf_counter()
            save_prompt_cache(str(path), cache)
            figures["kept"] = time.perf_counter() - began_s
            del cache
            for way in WAYS[1:3]:
                if way.endswith(DROPPED):
                    drop_pages([path])
                began_s = time.perf_counter()
                loaded = load_prompt_cache(str(path))
                figures[way] = self._first_s(prompt[-1:], loaded, began_s)
            return figures

    def _first_s(self, prompt: mx.array, cache: list[Any], began_s: float) -> float:
        # Asked for no token it computes the first; asked for one it begins the second before it hands that out.
        for _ in generate_step(prompt, self.model, max_tokens=0, prompt_cache=cache):
            pass
        return time.perf_counter() - began_s


def book(run: Bench, case: str, ours: list[Figures], peer: list[Figures]) -> None:
    def of(name: str, side: list[Figures] = ours, per: float = 1.0) -> list[float]:
        return [figures[name] / per for figures in side if name in figures]

    run.add(f"{case}, cold", "first token", "s", of("cold"), of("cold", peer), more_is_better=False)
    said = "first token to all on disk; peer: saved, not synced"
    run.add(f"{case}, cold", said, "s", of("kept"), of("kept", peer), more_is_better=False)
    for way in WAYS:
        title = f"{case}, from {way}"
        run.add(title, "first token", "s", of(way), of(way, peer), more_is_better=False)
        run.add(title, "first token, of the time cold", "%", [100 * f[way] / f["cold"] for f in ours])
        if min(of(recalled_of(way))) < 1:
            run.add(title, "not computed: less than all, as that was sooner", "%", of(recalled_of(way), per=0.01))
            continue
        for where in (NEW, USED):
            rates = of(rate_of(way), per=1e9), of(plain(way, where), per=1e9)
            run.add(title, f"read; peer: {plain(way, where).split(',')[0]}", "GB/s", *rates)


async def measure(run: Bench, folder: Path) -> None:
    async with open_model_thread() as thread:
        name, model = await thread.run(model_for_long_prompts)
        engine = await thread.run(engine_for, model, 2)
        _, theirs = await thread.run(model_for_long_prompts)
        for tokens in QUICK_LENGTHS if run.quick else LENGTHS:
            ours = Ours(thread, engine, folder, tokens, count(tokens))
            peer = Peer(thread, theirs, folder, tokens, count(tokens))
            rounds = QUICK_ROUNDS if run.quick else ROUNDS
            figures = await interleave_async(rounds, f"{tokens:,} tokens", ours, peer)
            book(run, f"{name}, {tokens:,} tokens", *figures)


def main() -> None:
    flags = {"folder": "where files are written, on the disk to measure (default: where temporary files are)"}
    with bench("restore", __doc__ or "", flags=flags) as run:
        run.blas = BLAS.sentence
        with tempfile.TemporaryDirectory(dir=run.flags["folder"], prefix="laned-bench-") as folder:
            trio.run(measure, run, Path(folder))


if __name__ == "__main__":
    main()
