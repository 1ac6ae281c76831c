"""A real daemon that systemd's own systemd-socket-activate starts, and what it tells the manager."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.client import Client
from tests.e2e.daemon import LANED, SOCKET_NAME, START_S, Daemon, at_once

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate, of systemd, is not installed"
)

WATCHDOG_S = 2.0
CONFIG = """model = "demo"
max_rows = 8
max_tokens = 4
"""


class Manager:
    """The service manager's end of the notify socket; said: all messages, each as its variables."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.address)
        self.said: list[dict[str, str]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while text := self._sock.recv(4096).decode():
            self.said.append(dict(line.split("=", 1) for line in text.split("\n")))

    def heard(self, name: str) -> list[dict[str, str]]:
        return [message for message in self.said if name in message]

    def last(self, name: str) -> dict[str, str]:
        """A message that was sent, and may be on its way to us yet."""
        deadline_s = time.monotonic() + START_S
        while not self.heard(name):
            assert time.monotonic() < deadline_s, f"no {name} among {self.said}"
            time.sleep(0.01)
        return self.heard(name)[-1]

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"", self.address)
        self._sock.close()


class Activated(Daemon):
    """Started by the first client that connects; `process` is systemd-socket-activate first and the daemon then."""

    def __init__(self, folder: Path, manager: Manager) -> None:
        self.folder = folder
        self.socket = folder / SOCKET_NAME
        self.config = folder / "laned.toml"
        self.config.write_text(CONFIG)
        self.manager = manager
        self._log = folder / "laned.log"
        told = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
        passed = [f"--setenv={name}" for name in ("HOME", "PATH", *told, *(n for n in os.environ if "PYTHON" in n))]
        command = ["systemd-socket-activate", f"--listen={self.socket}", *passed, str(LANED)]
        command += ["serve", "--config", str(self.config)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **told}
            )

    def wait_until_said(self, condition: Callable[[Manager], bool]) -> None:
        self.wait_for(lambda: condition(self.manager))


@pytest.fixture(scope="module")
def activated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Activated]:
    """Answered its first clients already, who came before the model did."""
    folder = tmp_path_factory.mktemp("activated")
    manager = Manager(folder)
    running = Activated(folder, manager)
    try:
        running.wait_for(running.socket.exists)
        yield running
    finally:
        running.kill()
        manager.close()


def test_what_is_sent_before_the_model_is_there_is_answered(activated: Activated) -> None:
    """Three clients connect, and send all they have to send, long before anybody accepts."""
    early: list[bool] = []

    async def ask(number: int) -> Any:
        async with Client(activated.socket, wait_s=START_S) as client:
            return await client.ask(f"Number {number}", max_tokens=3, ignore_eos=True)

    async def look() -> None:
        await trio.sleep(0.2)
        early.append(not activated.manager.heard("READY"))

    answers = trio.run(at_once, *[lambda number=number: ask(number) for number in range(3)], look)[:3]
    assert [done.usage.completion_tokens for done in answers] == [3, 3, 3]
    assert early == [True], "they had sent all they had to say before the daemon was ready"
    first, *_ = activated.manager.said
    assert first["STATUS"].startswith("Loading the model")
    assert int(first["EXTEND_TIMEOUT_USEC"]) > 60e6
    activated.wait_until_said(lambda manager: bool(manager.heard("READY")))
    (ready,) = activated.manager.heard("READY")
    assert ready["STATUS"] == f"Serving SmolLM2-135M-Instruct on {activated.socket}"
    report = activated.run("status", "--json")
    assert f'"socket": "{activated.socket}"' in report.stdout


def test_the_watchdog_is_fed_at_rest(activated: Activated) -> None:
    before = len(activated.manager.heard("WATCHDOG"))
    activated.wait_until_said(lambda manager: len(manager.heard("WATCHDOG")) > before + 3)


def test_the_options_are_read_again(activated: Activated) -> None:
    def reload(config: str) -> str:
        """What the log has of it."""
        num_ready, seen = len(activated.manager.heard("READY")), len(activated.log)
        activated.config.write_text(config)
        activated.process.send_signal(signal.SIGHUP)
        activated.wait_until_said(lambda manager: len(manager.heard("READY")) > num_ready)
        return activated.log[seen:]

    async def tokens() -> int:
        async with Client(activated.socket) as client:
            return (await client.ask("Once", ignore_eos=True)).usage.completion_tokens

    assert trio.run(tokens) == 4
    said = reload(CONFIG.replace("max_tokens = 4", "max_tokens = 6").replace("max_rows = 8", "max_rows = 9"))
    assert " info SIGHUP: --max-tokens is 6 now, and was 4\n" in said
    assert " warning SIGHUP: --max-rows stays 8: 9 takes a restart\n" in said
    assert trio.run(tokens) == 6
    said = reload("max_tokens = 'many'")
    assert "error SIGHUP: all stays as it was: 'max_tokens' in" in said
    assert trio.run(tokens) == 6
    assert "the options are as they were" in reload(CONFIG.replace("max_tokens = 4", "max_tokens = 6"))
    said = reload(CONFIG.replace("max_tokens = 4", "max_tokens = 6") + "log_format = 'json'\n")
    assert '"message": "SIGHUP: --log-format is json now, and was text"' in said
    reloading = activated.manager.heard("RELOADING")
    assert len(reloading) == 4
    assert all(int(message["MONOTONIC_USEC"]) > 0 for message in reloading)


def test_all_stacks_are_in_the_log(activated: Activated) -> None:
    activated.process.send_signal(signal.SIGUSR1)
    activated.wait_for(lambda: "scheduler.daemon.Daemon._run_loop" in activated.log)
    for place in ("lanes/thread.py", "scheduler/daemon.py", "(most recent call first)"):
        assert place in activated.log


def test_the_end_is_told_and_the_socket_left_to_its_owner(activated: Activated) -> None:
    assert activated.terminate() == 0, activated.log
    stopping = activated.manager.last("STOPPING")
    assert stopping["STATUS"] == "Finishing 0 requests"
    assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 30e6
    assert activated.socket.is_socket()
