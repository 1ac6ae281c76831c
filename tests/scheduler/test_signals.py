"""Real signals to this very process."""

import logging
import os
import signal

import pytest
import trio

from scheduler.signals import Signals
from tests.scheduler.trio_test import trio_test, until


@trio_test
async def test_the_end_is_asked_for_by_two_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        calls: list[int] = []
        signals = Signals(lambda calls=calls: calls.append(1))  # type: ignore[misc]
        async with trio.open_nursery() as nursery:
            await nursery.start(signals.watch)
            os.kill(os.getpid(), number)
            await signals.stop.wait()
            os.kill(os.getpid(), number)
            await until(lambda calls=calls: len(calls) == 2)
            nursery.cancel_scope.cancel()


@trio_test
async def test_hangups_are_told_once_each_time_they_are_waited_for() -> None:
    signals = Signals(lambda: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(signals.watch)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            await signals.reload_asked()
        with trio.move_on_after(0.05) as patience:
            await signals.reload_asked()
        assert patience.cancelled_caught
        assert not signals.stop.is_set()
        nursery.cancel_scope.cancel()


@trio_test
async def test_all_stacks_are_written_whatever_the_level(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def somewhere_in_particular() -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(logging.getLogger("scheduler.signals"), "level", logging.ERROR)
    signals = Signals(lambda: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(signals.watch)
        nursery.start_soon(somewhere_in_particular)
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: "somewhere_in_particular" in caplog.text)
        nursery.cancel_scope.cancel()
    threads = capfd.readouterr().err
    assert "(most recent call first)" in threads
    assert "test_signals.py" in threads
    (line,) = (message for message in caplog.messages if "somewhere_in_particular" in message)
    assert "scheduler/test_signals.py:" in line
    assert "_core" not in line, "Trio's own frames say nothing"


def test_what_a_signal_did_before_it_does_again() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(Signals(lambda: None).watch)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)] == before
