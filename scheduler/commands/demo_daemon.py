"""The daemon of `laned demo`: started, watched while it loads, stopped, and its log shown where that explains why."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from scheduler.client import Client, ClientError
from scheduler.log import printable
from scheduler.usage import CommandFailed

# Loading takes seconds; a model that has to be downloaded first may take long, and then the log's last line says so.
_LOAD_S = 900.0
# A daemon that runs nothing ends at once.
_STOP_S = 30.0
_LOG_LINES = 15


class DemoDaemon:
    """`laned serve` as a process of its own, its log in a file."""

    def __init__(self, process: trio.Process, socket: str, log: Path) -> None:
        self.socket = socket
        self._process = process
        self._log = log

    async def wait_ready(self, progress: Callable[[str], None]) -> None:
        """Return when the socket answers; progress(line) gets the log's last line. Raises CommandFailed."""
        with trio.move_on_after(_LOAD_S):
            while self._process.returncode is None:
                try:
                    async with Client(self.socket):
                        return
                except ClientError:
                    lines = self.log_lines()
                    if lines:
                        # Without the time and the level, if that is what it begins with.
                        progress(lines[-1].split(" ", 2)[-1] if lines[-1][:2] == "20" else lines[-1])
                await trio.sleep(0.1)
            raise CommandFailed(
                self.explain(f"The daemon ended with status {self._process.returncode} before it was ready.")
            )
        raise CommandFailed(self.explain(f"The daemon was not ready after {_LOAD_S:.0f} s."))

    def log_lines(self) -> list[str]:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in deque(file, _LOG_LINES) if line.strip()]

    def explain(self, what: str) -> str:
        """what, and the end of the log."""
        return "\n".join([what, "The end of its log:", *(f"  {printable(line)}" for line in self.log_lines())])

    async def stop(self) -> int | None:
        """End it by SIGTERM. Returns its exit status, None where it does not end."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        with trio.move_on_after(_STOP_S):
            await self._process.wait()
        return self._process.returncode


@asynccontextmanager
async def running(model: str, folder: Path, num_rows: int) -> AsyncIterator[DemoDaemon]:
    """Start it with /metrics on a free port, in folder, where it finds what one before it has remembered. What is left
    of it afterwards is killed."""
    socket, log = str(folder / "laned.sock"), folder / "laned.log"
    command = [sys.executable, "-P", "-m", "scheduler.cli", "serve", "--model", model, "--socket", socket]
    command += ["--metrics-port", "0", "--max-rows", str(num_rows), "--log-level", "debug"]
    # It is gone with the demo, so that it may take what is left on a full disk, too.
    command += ["--store", str(folder / "store"), "--store-max", "2GiB", "--store-min-free", "0"]
    # The same code as ours, wherever it is installed and whatever lies in the current folder.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    async with await trio.open_file(log, "wb") as file:
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file.wrapped,
            stderr=file.wrapped,
            env=environment,
        )
    try:
        yield DemoDaemon(process, socket, log)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
