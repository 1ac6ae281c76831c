"""What the tests of the store ask a daemon, and how they read what it says of it."""

from __future__ import annotations

import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import pytest
import trio

from scheduler.client import Client, Options
from scheduler.protocol import Usage
from tests.e2e.daemon import STOP_S
from tests.e2e.tiny_models import VOCABULARY

# Answers are long enough that a row which was put together wrongly does not say the same by chance.
ANSWER_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer: its tokens, their log-probabilities, and what the daemon says it took."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    usage: Usage

    @property
    def tiers(self) -> tuple[int, int]:
        """Tokens that were remembered, in memory and on disk."""
        assert self.usage.cached_tokens == self.usage.cached_memory_tokens + self.usage.cached_disk_tokens
        return self.usage.cached_memory_tokens, self.usage.cached_disk_tokens

    def assert_same(self, cold: Heard, within: float = 0.0) -> None:
        """It is what was answered without anything remembered: the same tokens, and as likely."""
        assert self.tokens == cold.tokens
        assert self.logprobs == pytest.approx(cold.logprobs, rel=0, abs=within)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """The same for the same seed; the end token is not in it."""
    return random.Random(seed).choices(range(1, VOCABULARY), k=num_tokens)


async def ask(client: Client, prompt: list[int], **options: Unpack[Options]) -> Heard:
    """The greedy answer to token ids."""
    wanted: Options = {
        "prompt_token_ids": prompt,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "logprobs": True,
    }
    wanted.update(options)
    done = await client.ask(**wanted)
    tokens = tuple(each.token_id for each in done.logprobs)
    return Heard(tokens, tuple(each.logprob for each in done.logprobs), done.usage)


def store_flags(folder: Path) -> list[str]:
    """A folder's, on a disk that may be nearly full already."""
    return ["--blas", "off", "--store", str(folder), "--store-min-free", "0"]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def flushed(client: Client) -> None:
    """Flush as soon as there is a disk to flush to."""
    while True:
        if await client.flush():
            return
        await trio.sleep(0.05)


async def figures(client: Client) -> dict[str, float]:
    """What /metrics says now, by name and labels."""
    port = (await client.status())["metrics_port"]
    page: bytes = await trio.to_thread.run_sync(
        lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()
    )
    lines = (line.rpartition(" ") for line in page.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def moved(client: Client, name: str, before: dict[str, float], at_least: float) -> None:
    """Wait until a counter has; those of the disk are read every few seconds."""
    while True:
        now = await figures(client)
        if now[name] >= before[name] + at_least:
            return
        await trio.sleep(0.1)


class StoreProcess:
    """`laned store serve` as a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.folder = folder
        self.socket = socket
        self.start()

    def start(self) -> None:
        """Returns when it serves."""
        command = [sys.executable, "-m", "scheduler.cli", "store", "serve", "--store-min-free", "0"]
        command += ["--store", str(self.folder), "--socket", str(self.socket)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "for the daemons that connect" in line:
                return
        raise AssertionError(f"the store ended with {self.process.wait(STOP_S)}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)


@contextmanager
def serving_store(folder: Path, socket: Path) -> Iterator[StoreProcess]:
    store = StoreProcess(folder, socket)
    try:
        yield store
    finally:
        store.kill()
