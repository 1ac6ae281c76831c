"""A disk that is full, read-only, gone: requests are answered all the same, a counter moves, and the log has a line."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from scheduler.client import Client
from tests.e2e.daemon import Daemon, reports, serving
from tests.e2e.remembered import Heard, ask, figures, moved, prompt_of, store_flags
from tests.e2e.tiny_models import tiny_model

PROMPT_TOKENS = 150
DISK_BYTES = 8 << 20


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of its own. Skips where only root may have one."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "laned-test", folder], capture_output=True, text=True
    ).returncode
    if mounted != 0:
        pytest.skip("a disk of its own takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def flags(folder: Path) -> list[str]:
    return ["--model", tiny_model("columns"), *store_flags(folder), "--metrics-port", "0"]


class Asking:
    """New prompts for a daemon, each answered as without a store."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.num = 0

    async def new_prompt(self) -> tuple[list[int], Heard]:
        self.num += 1
        prompt = prompt_of(PROMPT_TOKENS, self.num)
        told = await ask(self.client, prompt)
        told.assert_same(await ask(self.client, prompt, cache="none"))
        return prompt, told

    async def is_known(self, prompt: list[int]) -> bool:
        return (await ask(self.client, prompt, cache="read")).usage.cached_tokens == len(prompt) - 1


def test_a_disk_that_is_full_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with serving(tmp_path, *flags(disk / "store")) as daemon:
            prompt = trio.run(is_full, daemon, disk)
            assert daemon.terminate() == 0
            assert "Traceback" not in daemon.log
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with serving(tmp_path, *flags(disk / "store")) as daemon:
            trio.run(is_read_only, daemon, prompt)
            assert daemon.terminate() == 0
            # Unless the first one has, this one wants to note the model's digests, too.
            warnings = [line for line in daemon.log.splitlines() if " warning " in line and "digests" not in line]
            assert len(warnings) == 1
            assert "Read-only file system" in warnings[0]
            assert "Traceback" not in daemon.log


async def is_full(daemon: Daemon, disk: Path) -> list[int]:
    """Returns a prompt that is on the disk."""
    async with Client(daemon.socket) as client:
        asking = Asking(client)
        await asking.new_prompt()
        assert await client.flush()
        fill(disk)
        before = await figures(client)
        for _ in range(3):
            prompt, _ = await asking.new_prompt()
            assert not await client.flush()
            assert await asking.is_known(prompt), "memory has it"
        await moved(client, "laned_store_errors_total", before, 3)
        await moved(client, "laned_store_dropped_total", before, 3)
        assert daemon.log.count(f"cannot write to {disk / 'store'}") == 1
        (disk / "of somebody else").unlink()
        prompt, _ = await asking.new_prompt()
        assert await client.flush()
        await moved(client, "laned_store_written_bytes_total", before, 1)
        assert daemon.log.count(f"can write to {disk / 'store'} again") == 1
        return prompt


def fill(disk: Path) -> None:
    """With somebody else's file, to the last byte."""
    with (disk / "of somebody else").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass


async def is_read_only(daemon: Daemon, prompt: list[int]) -> None:
    """What is there is read; what is new stays in memory."""
    async with Client(daemon.socket) as client:
        asking = Asking(client)
        asking.num = 10
        assert (await ask(client, prompt)).tiers == (0, len(prompt) - 1)
        before = await figures(client)
        for _ in range(3):
            new, _ = await asking.new_prompt()
            assert not await client.flush()
            assert await asking.is_known(new), "memory has it"
        after = await figures(client)
        assert after["laned_store_dropped_total"] >= before["laned_store_dropped_total"] + 3
        assert after["laned_store_errors_total"] >= 1


def test_a_folder_that_is_removed_and_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with serving(tmp_path, *flags(folder), "--prompt-cache-bytes", "0") as daemon:
        trio.run(is_written_once, daemon)
        trio.run(goes_away_and_comes_back, daemon, folder)
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.log


async def is_written_once(daemon: Daemon) -> None:
    """A long prompt is written before its answer has ended; the answer hangs on it, although memory has no room."""
    async with Client(daemon.socket) as client:
        prompt = prompt_of(4 * PROMPT_TOKENS, seed=100)
        await ask(client, prompt, max_tokens=50)
        assert await client.flush()
        report = await client.status()
        num_tokens = len(prompt) + 50 - 1
        assert report["store"]["written_bytes"] == num_tokens * report["model"]["bytes_per_token"]


async def goes_away_and_comes_back(daemon: Daemon, folder: Path) -> None:
    """Nothing is held in memory here: what is remembered is on disk, or is not."""
    async with Client(daemon.socket) as client:
        asking = Asking(client)
        prompt, _ = await asking.new_prompt()
        assert await client.flush()
        assert await asking.is_known(prompt)
        shutil.rmtree(folder)
        for _ in range(3):
            await asking.new_prompt()
        assert not await asking.is_known(prompt)
        assert not await client.flush()
        await reports(client, lambda report: report["store"]["away"])
        found = await figures(client)
        assert found["laned_store_away"] == 1
        assert daemon.log.count("the store is away, requests are served without it") == 1
        os.mkdir(folder)
        await reports(client, lambda report: not report["store"]["away"])
        assert daemon.log.count("the store is back") == 1
        await moved(client, "laned_store_errors_total", found, 1)
        prompt, _ = await asking.new_prompt()
        assert await client.flush()
        assert await asking.is_known(prompt)
