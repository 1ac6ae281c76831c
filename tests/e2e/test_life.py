"""Starts and ends of a daemon: drained, killed, stopped while it loads, refused a socket that is in use."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import trio

from scheduler.client import Client, ConnectionLost, RequestError
from tests.e2e.daemon import Daemon, at_once, serving
from tests.scheduler.trio_test import until


def test_a_second_daemon_on_a_live_socket_is_told_so_before_it_loads_anything(daemon: Daemon) -> None:
    refused = daemon.run("serve", "--model", "demo", "--socket", str(daemon.socket))
    assert refused.returncode == 2
    assert "a daemon already answers" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert daemon.run("status", "--json").returncode == 0


def test_sigterm_while_the_model_loads_ends_it_at_once_and_well(tmp_path: Path) -> None:
    loading = Daemon(tmp_path)
    try:
        # The first line comes when the signals are watched already.
        loading.wait_for(lambda: bool(loading.log))
        assert loading.terminate() == 0
    finally:
        loading.kill()
    assert "stopped while the model was loading" in loading.log
    assert not loading.socket.exists()


def test_a_killed_daemon_is_followed_by_another_on_its_socket(tmp_path: Path) -> None:
    """kill -9 in the middle of an answer; then the next one, which drains on SIGTERM."""
    with serving(tmp_path) as first:
        trio.run(is_killed, first)
    assert first.socket.exists()
    with serving(tmp_path, "--metrics-port", "0") as second:
        trio.run(drains, second)
        assert second.process.wait(60) == 0, second.log
    assert not second.socket.exists()
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".log"] == []


async def is_killed(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        with pytest.raises(ConnectionLost):  # noqa: PT012
            async with client.submit("Once upon a time", max_tokens=500, ignore_eos=True) as answer:
                await anext(answer)
                daemon.kill()
                async for _ in answer:
                    pass


async def drains(daemon: Daemon) -> None:
    """What runs is answered to its end, and nothing new is begun."""

    async def ask(client: Client, number: int) -> int:
        async with client.submit(f"Number {number}", max_tokens=16, ignore_eos=True) as answer:
            await anext(answer)
            begun.append(number)
            return 1 + sum([len(delta.token_ids) async for delta in answer])

    begun: list[int] = []
    with trio.fail_after(60):
        async with Client(daemon.socket) as client, Client(daemon.socket) as late, trio.open_nursery() as nursery:
            port = (await client.status())["metrics_port"]

            async def end_it() -> None:
                await until(lambda: len(begun) == 3)
                daemon.process.send_signal(signal.SIGTERM)
                await until(lambda: not daemon.socket.exists())
                with pytest.raises(RequestError, match="shutting_down"):
                    await late.ask("Am I too late?", max_tokens=1)
                with pytest.raises(ConnectionLost):
                    async with Client(daemon.socket):
                        pass
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    await trio.to_thread.run_sync(urllib.request.urlopen, f"http://127.0.0.1:{port}/healthz")

            nursery.start_soon(end_it)
            lengths = await at_once(*[lambda number=number: ask(client, number) for number in range(3)])
    assert lengths == [16, 16, 16]
