"""What the daemon answers for its engine, and what of its options it takes anew, over the fake engine."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from lanes.lane import Step, StepResult
from lanes.thread import open_model_thread
from scheduler import daemon as daemon_module
from scheduler.client import Client
from scheduler.daemon import Daemon
from scheduler.door import Door
from scheduler.notify import Notifier
from scheduler.options import Options
from scheduler.signals import Signals
from tests.scheduler.bytes_tokenizer import ByteTokenizer
from tests.scheduler.echo_daemon import in_trio
from tests.scheduler.fake_engine import FakeEngine
from tests.scheduler.trio_test import until

OPTIONS = Options(model="echo", max_tokens=4)


class Running:
    """A daemon on a real socket. `told` is what its options are when it reads them again."""

    def __init__(self, daemon: Daemon, engine: FakeEngine, path: Path) -> None:
        self.daemon = daemon
        self.engine = engine
        self.path = path
        self.told = OPTIONS
        self.signals = Signals(lambda: None)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Running]:
    options = replace(OPTIONS, socket=str(folder / "laned.sock"))
    async with open_model_thread() as thread:
        engine = FakeEngine()
        daemon = Daemon(options, thread, engine, ByteTokenizer(), Notifier())
        found = Running(daemon, engine, folder / "laned.sock")
        found.told = options
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.run, found.signals, lambda: found.told, Door.for_options(options))
            await until(found.path.exists)
            yield found
            found.signals.stop.set()


@in_trio
async def test_health_is_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as found, Client(found.path) as client:
        assert found.daemon.health().ok
        monkeypatch.setattr(daemon_module, "SILENCE_S", 0.05)
        may_go_on = threading.Event()
        real_step = found.engine.step

        def hanging_step(step: Step) -> StepResult:
            may_go_on.wait(60)
            return real_step(step)

        found.engine.step = hanging_step  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask, "abc")
            await until(lambda: not found.daemon.health().ok)
            assert "the model's thread has not answered for" in found.daemon.health().reason
            may_go_on.set()
            await until(lambda: found.daemon.health().ok)
        found.signals.stop.set()
        await until(lambda: found.daemon.service.is_draining)
        assert found.daemon.health().reason == "the daemon is shutting down"


@in_trio
async def test_a_hangup_takes_what_can_be_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as found, Client(found.path) as client:
        assert len((await client.ask("abcdefgh")).text or "") == 4
        found.told = replace(found.told, max_tokens=6, max_requests_per_connection=0, max_queue=7, max_rows=2)
        found.signals._reload.set()
        await until(lambda: found.daemon.options.max_tokens == 6)
        assert len((await client.ask("abcdefgh")).text or "") == 6
        assert found.daemon.loop.scheduler.max_queue == 7
        assert found.daemon._limits.requests == 0
        assert "--max-rows stays 32: 2 takes a restart" in caplog.text


@in_trio
async def test_one_that_came_before_the_socket_was_open_is_not_lost(tmp_path: Path) -> None:
    options = replace(OPTIONS, socket=str(tmp_path / "laned.sock"))
    signals = Signals(lambda: None)
    signals._reload.set()
    async with open_model_thread() as thread:
        daemon = Daemon(options, thread, FakeEngine(), ByteTokenizer(), Notifier())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.run, signals, lambda: replace(options, max_tokens=9), Door.for_options(options))
            await until(lambda: daemon.options.max_tokens == 9)
            signals.stop.set()
