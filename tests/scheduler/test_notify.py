"""What the service manager hears, over real datagram sockets."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler.notify import IDLE_BEAT_S, Notifier


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        sock.setblocking(False)
        yield sock


def heard(sock: socket.socket) -> list[dict[str, str]]:
    """All messages so far, each as its variables."""
    messages = []
    while True:
        try:
            text = sock.recv(4096).decode()
        except BlockingIOError:
            return messages
        messages.append(dict(line.split("=", 1) for line in text.split("\n")))


@pytest.mark.parametrize("kind", ["file", "abstract"])
def test_a_life_is_told_in_its_order(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify") if kind == "file" else f"@laned-{uuid.uuid4()}"
    with manager(address) as sock:
        notifier = Notifier(address, watchdog_s=1000)
        notifier.loading("reading weights", 50, 200)
        notifier.ready("Serving x\non y")
        notifier.alive()
        notifier.reloading()
        notifier.ready("Serving x")
        notifier.stopping("Finishing 3 requests", 45.0)
        loading, ready, alive, reloading, again, stopping = heard(sock)
    assert loading == {"STATUS": "Loading the model: reading weights (25 %)", "EXTEND_TIMEOUT_USEC": "600000000"}
    assert ready == {"READY": "1", "STATUS": "Serving x on y"}, "nobody smuggles a line of his own in"
    assert alive == {"WATCHDOG": "1"}
    assert (reloading["RELOADING"], again["READY"]) == ("1", "1")
    assert int(reloading["MONOTONIC_USEC"]) > 0
    assert stopping == {"STOPPING": "1", "STATUS": "Finishing 3 requests", "EXTEND_TIMEOUT_USEC": "45000000"}


def test_progress_and_heartbeats_are_told_as_often_as_is_of_use(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with manager(address) as sock:
        notifier = Notifier(address, watchdog_s=1000)
        for done in range(1000):
            notifier.loading("reading weights", done, 1000)
            notifier.alive()
        notifier.loading("measuring", 0, 0)
        messages = heard(sock)
    phases = [message["STATUS"] for message in messages if "STATUS" in message]
    assert phases[0] == "Loading the model: reading weights (0 %)"
    assert phases[-1] == "Loading the model: measuring", "another phase is told at once"
    assert len(phases) < 20
    assert [message for message in messages if "WATCHDOG" in message] == [{"WATCHDOG": "1"}]


def test_without_a_manager_nothing_is_sent_and_without_a_watchdog_it_is_not_fed(tmp_path: Path) -> None:
    Notifier().ready("x")
    address = str(tmp_path / "notify")
    with manager(address) as sock:
        Notifier(address).alive()
        assert heard(sock) == []


def test_a_manager_that_is_gone_or_does_not_read_harms_nobody(tmp_path: Path) -> None:
    Notifier(str(tmp_path / "none")).ready("x")
    address = str(tmp_path / "notify")
    with manager(address):
        for _ in range(5000):
            Notifier(address).ready("x" * 1000)


def test_what_the_manager_left_is_taken_from_the_environment(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    given = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    with manager(address) as sock:
        notifier = Notifier.from_environment(given)
        assert given == {"HOME": "/"}, "no child may speak for us"
        assert notifier.beat_s == 1.0
        notifier.alive()
        assert heard(sock) == [{"WATCHDOG": "1"}]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
    ],
)
def test_a_watchdog_that_is_not_for_us_is_none(variables: dict[str, str]) -> None:
    assert Notifier.from_environment(dict(variables)).beat_s == IDLE_BEAT_S
