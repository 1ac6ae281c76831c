"""`laned top`: it follows a daemon over its end and its return, in lines, in pictures, and on a terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.commands import top
from scheduler.connection import Limits, serve_connection
from scheduler.listener import accept, listen
from tests.scheduler.commands.test_top_frame import report
from tests.scheduler.echo import EchoService, serving
from tests.scheduler.trio_test import trio_test, until


@asynccontextmanager
async def answering(path: Path) -> AsyncIterator[None]:
    """A daemon that is gone in the middle of everything when the block is left."""
    async with listen(path) as listener, trio.open_nursery() as nursery:
        service = EchoService(nursery)

        async def handle(stream: trio.SocketStream) -> None:
            await serve_connection(stream, service, Limits(), trio.Event())

        nursery.start_soon(accept, listener, handle, nursery)
        yield
        nursery.cancel_scope.cancel()


COMMAND = (sys.executable, "-m", "scheduler.cli", "top")


@trio_test
async def test_a_daemon_that_goes_away_is_told_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "laned.sock"
    told: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(top.follow, str(path), 0.01, lambda report: told.append("report"), told.append)
        for _ in range(2):
            told.clear()
            async with answering(path):
                await until(lambda: told[-2:] == ["report", "report"])
            told.clear()
            await until(lambda: len(told) > 1)
            assert "laned.sock" in told[-1]
            assert "report" not in told
        nursery.cancel_scope.cancel()


@trio_test
async def test_a_daemon_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "PATIENCE_S", 0.05)
    told: list[str] = []
    with trio.socket.socket(trio.socket.AF_UNIX) as silent:
        await silent.bind(str(tmp_path / "s"))
        silent.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(top.follow, str(tmp_path / "s"), 0.01, lambda report: None, told.append)
            await until(lambda: len(told) > 1)
            nursery.cancel_scope.cancel()
    assert set(told) == {"the daemon does not answer"}


def test_figures_stand_under_their_heading() -> None:
    figures = top.figures(report())
    assert len(top.HEADING) == len("12:00:00" + figures) == 80
    assert figures.split()[:3] == ["3", "1", "7"]
    assert figures.split()[-4:] == ["98", "ms", "98", "ms"]
    assert len(top.figures({})) == len(figures)


def test_the_picture_is_one() -> None:
    drawn = top.picture(report())
    assert drawn.startswith("<svg")
    assert "SmolLM2" in drawn
    assert "decoding" in drawn


class Terminal:
    """A command on a terminal of 80 x 24."""

    def __init__(self, path: Path, term: str, *flags: str) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*COMMAND, "--socket", str(path), *flags],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**environment, "TERM": term, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )

    def read_until(self, marker: bytes) -> bytes:
        said = b""
        while marker not in said:
            said += os.read(self.ours, 65536)
        return said

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


async def watched(path: Path, term: str, marker: bytes, key: bytes | None) -> tuple[bytes, int, bool]:
    """What was written until the marker, the exit status, and whether the terminal is as it was."""
    terminal = Terminal(path, term, "--interval", "0.1")
    try:
        said = await trio.to_thread.run_sync(terminal.read_until, marker)
        if key is None:
            terminal.process.terminate()
        else:
            os.write(terminal.ours, key)
        end = await trio.to_thread.run_sync(terminal.process.wait)
        return said, end, termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()


@pytest.mark.parametrize(("key", "status"), [(b"xq", 0), (None, 130)])
def test_on_a_terminal_it_has_a_screen_of_its_own_and_leaves_it(tmp_path: Path, key: bytes | None, status: int) -> None:
    async def run() -> tuple[bytes, int, bool]:
        async with serving(tmp_path / "s"):
            return await watched(tmp_path / "s", "xterm-256color", b"ends", key)

    said, end, is_restored = trio.run(run)
    assert b"\x1b[?1049h" in said
    assert (end, is_restored) == (status, True)


def test_a_dumb_terminal_gets_lines(tmp_path: Path) -> None:
    async def run() -> tuple[bytes, int, bool]:
        async with serving(tmp_path / "s"):
            return await watched(tmp_path / "s", "dumb", b"\n" + b"", None)

    said, end, _ = trio.run(run)
    assert said.decode().startswith(top.HEADING)
    assert b"\x1b" not in said
    assert end != 0


@pytest.mark.parametrize(
    ("flags", "status", "hint"),
    [
        (["--svg", "x.svg"], 2, "--once"),
        (["--interval", "0"], 2, "--interval takes"),
        (["--once", "--socket", "/nowhere/laned.sock"], 1, "laned serve"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(flags: list[str], status: int, hint: str) -> None:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert hint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_keys_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from scheduler.commands.keys import wait_for

    read, write = os.pipe()

    async def run() -> Any:
        with trio.move_on_after(0.05) as patience:
            os.write(write, b"abc")
            await wait_for("qQ", read)
        os.write(write, b"zQ")
        await wait_for("qQ", read)
        return patience.cancelled_caught

    assert trio.run(run)
    os.close(write)
    trio.run(wait_for, "q", read)  # the terminal has gone
    os.close(read)
