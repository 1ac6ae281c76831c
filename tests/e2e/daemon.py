"""`laned serve` as a process of its own, and its commands: nothing here reaches into the daemon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from scheduler.client import Client

LANED = Path(sys.executable).with_name("laned")
SOCKET_NAME = "laned.sock"
# Not expectations: what hangs should fail, on a machine however busy.
START_S = 120.0
STOP_S = 60.0
COMMAND_S = 120.0
# What the allocator may keep of a storm that filled all slots: buffers beyond what MLX keeps itself go back to malloc,
# whose arenas give up their pages late. That nothing is held is told by MLX's own count of its live arrays.
MARGIN_BYTES = 400 << 20


class Daemon:
    """The process, its socket and its log; `folder` is as an XDG_RUNTIME_DIR with the socket in it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.socket = folder / SOCKET_NAME
        self._log = folder / f"laned-{time.monotonic_ns()}.log"
        command = [str(LANED), "serve", "--model", "demo", "--socket", str(self.socket), *flags]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Poll for something that a living daemon brings about."""
        deadline_s = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline_s, f"the daemon hangs:\n{self.log}"
            time.sleep(0.05)

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL, and wait for the end of it."""
        self.process.kill()
        self.process.wait(STOP_S)

    def run(self, *arguments: str, text_in: str = "") -> subprocess.CompletedProcess[str]:
        """A command of laned's that finds this daemon at its default socket."""
        return run(LANED, *arguments, text_in=text_in, runtime=self.folder)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Daemon]:
    """A daemon that answers; killed when the block is left, if it still runs."""
    daemon = Daemon(folder, *flags)
    try:
        daemon.wait_for(daemon.answers)
        yield daemon
    finally:
        daemon.kill()


def run(*command: str | Path, text_in: str = "", runtime: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "COLUMNS": "200"}
    return subprocess.run(command, input=text_in, capture_output=True, text=True, env=environment, timeout=COMMAND_S)


async def reports(client: Client, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for the daemon's status until the condition holds; returns that report."""
    while True:
        report = await client.status()
        if condition(report):
            return report
        await trio.sleep(0.02)


async def idle(client: Client) -> dict[str, Any]:
    """Wait until nothing runs, no slot is in use and no cache is held; returns the report."""

    def is_idle(report: dict[str, Any]) -> bool:
        # Rows are as of now, slots as of the last reading, which may be of a moment before the last row came.
        num_rows = sum(number for state, number in report["rows"].items() if state != "max")
        return (num_rows, report["slots"]["used"], report["slots"]["cache_bytes"]) == (0, 0, 0)

    return await reports(client, is_idle)


async def memory(client: Client) -> dict[str, int]:
    """The daemon's memory at rest, read after this was called.

    The slots of a report, and MLX's memory, are as of their last reading, which may be older; and one that was taken
    when the last row had gone may count what the device was still computing for it. So a row is run until it is seen,
    and cancelled: what is at rest after that has been read anew.
    """
    async with client.submit("Once", max_tokens=4000, ignore_eos=True):
        await reports(client, lambda report: bool(report["slots"]["used"]))
    at_rest = await idle(client)
    return {**at_rest["memory"], "remembered_bytes": at_rest["store"]["tiers"]["memory"]["bytes"]}


def assert_memory_is_back(before: dict[str, int], after: dict[str, int]) -> None:
    """Both of times when nothing ran. What MLX keeps for reuse, and what is remembered, have limits of their own."""
    active_before, active_after = (rest["mlx_active_bytes"] - rest["remembered_bytes"] for rest in (before, after))
    assert active_after <= active_before + (1 << 20)
    kept_before, kept_after = (
        rest["rss_bytes"] - rest["mlx_cache_bytes"] - rest["remembered_bytes"] for rest in (before, after)
    )
    assert kept_after <= kept_before + MARGIN_BYTES


async def at_once(*tasks: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Run all tasks side by side; their results in order."""
    results: list[Any] = [None] * len(tasks)

    async def run_one(index: int, task: Callable[[], Awaitable[Any]]) -> None:
        results[index] = await task()

    async with trio.open_nursery() as nursery:
        for index, task in enumerate(tasks):
            nursery.start_soon(run_one, index, task)
    return results
