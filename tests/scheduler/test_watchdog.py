"""The watchdog is fed by what the model's thread does, and by nothing else."""

import socket
import threading
from pathlib import Path

import trio

from lanes.lane import Step, StepResult
from scheduler.notify import Notifier
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon, in_trio

PERIOD_S = 0.08


class Manager:
    """The other end of the notify socket."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        stdlib = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        stdlib.bind(self.address)
        self._sock = trio.socket.from_stdlib_socket(stdlib)

    async def fed(self) -> None:
        assert await self._sock.recv(100) == b"WATCHDOG=1"

    async def is_fed_within(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self.fed()
            return True
        return False

    def close(self) -> None:
        self._sock.close()


def watched(daemon: EchoDaemon, manager: Manager) -> None:
    daemon.loop._notifier = Notifier(manager.address, PERIOD_S)


@in_trio
async def test_an_idle_daemon_feeds_it_on_and_on(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "notify")
    async with echo_daemon(run_loop=False) as daemon, trio.open_nursery() as nursery:
        watched(daemon, manager)
        nursery.start_soon(daemon.run)
        for _ in range(8):
            await manager.fed()
        assert daemon.engine.num_turns == 0
        nursery.cancel_scope.cancel()
    manager.close()


@in_trio
async def test_a_hung_step_starves_it_although_trio_turns(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "notify")
    may_go_on = threading.Event()
    async with echo_daemon(run_loop=False) as daemon, trio.open_nursery() as nursery:
        watched(daemon, manager)
        real_step = daemon.engine.step
        hangs = threading.Event()

        def hanging_step(step: Step) -> StepResult:
            if daemon.engine.num_turns == 3:
                hangs.set()
                may_go_on.wait(60)
            return real_step(step)

        daemon.engine.step = hanging_step  # type: ignore[method-assign]
        nursery.start_soon(daemon.run)
        await manager.fed()
        client = await daemon.submit(prompt="abc", max_tokens=10)
        await trio.to_thread.run_sync(hangs.wait)
        while await manager.is_fed_within(0.02):
            pass
        assert not await manager.is_fed_within(5 * PERIOD_S)
        assert daemon.loop.silent_s >= 5 * PERIOD_S
        may_go_on.set()
        await client.done()
        await manager.fed()
        nursery.cancel_scope.cancel()
    manager.close()


@in_trio
async def test_a_hang_while_nothing_is_asked_starves_it_too(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "notify")
    may_go_on = threading.Event()
    async with echo_daemon(run_loop=False) as daemon, trio.open_nursery() as nursery:
        watched(daemon, manager)
        nursery.start_soon(daemon.run)
        await manager.fed()
        nursery.start_soon(daemon.loop.thread.run, may_go_on.wait, 60)
        while await manager.is_fed_within(0.05):
            pass
        assert not await manager.is_fed_within(5 * PERIOD_S)
        may_go_on.set()
        await manager.fed()
        nursery.cancel_scope.cancel()
    manager.close()
