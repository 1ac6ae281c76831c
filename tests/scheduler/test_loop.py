"""The loop works while there is work, sleeps while there is none, and says so when the engine is gone."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from lanes.lane import EngineFailed, Step, StepResult
from scheduler.protocol import Done, Error
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon, in_trio
from tests.scheduler.fake_engine import FakeEngine


async def quiet(daemon: EchoDaemon) -> None:
    """Give everything that is about to happen the time to."""
    for _ in range(3):
        await wait_all_tasks_blocked()
        await daemon.loop.thread.run(lambda: None)


@in_trio
async def test_many_requests_are_answered_together() -> None:
    async with echo_daemon(max_queue=100) as daemon:
        clients = [await daemon.submit(prompt=f"prompt {i:02}" * (1 + i), max_tokens=5 + i) for i in range(20)]
        for i, client in enumerate(clients):
            done = await client.done()
            assert client.text == (f"prompt {i:02}" * 20)[: 5 + i]
            assert done.finish_reason == "length"
        assert daemon.engine.most_rows == daemon.engine.info.max_rows


@in_trio
async def test_what_happens_is_counted() -> None:
    async with echo_daemon() as daemon:
        clients = [await daemon.submit(prompt="x" * 10, max_tokens=tokens) for tokens in (1, 4, 6)]
        for client in clients:
            await client.done()
        await daemon.loop.wait_idle()
        assert daemon.counted("laned_generation_tokens_total") == 11
        assert daemon.counted("laned_prompt_tokens_total", source="computed") == 30
        assert daemon.counted("laned_time_to_first_token_seconds_count") == 3
        assert daemon.counted("laned_inter_token_latency_seconds_count") == 8
        assert daemon.counted("laned_request_queue_time_seconds_count") == 3
        assert daemon.counted("laned_prefill_tokens_total") == 27, "the last token of each prompt is the first step's"
        assert daemon.counted("laned_step_rows_sum") == 11
        assert daemon.counted("laned_requests_total", outcome="length") == 3


@in_trio
async def test_without_work_it_sleeps() -> None:
    async with echo_daemon() as daemon:
        await daemon.ask("abc", max_tokens=3)
        await daemon.loop.wait_idle()
        await quiet(daemon)
        turns = daemon.engine.num_turns
        for _ in range(20):
            await quiet(daemon)
        assert daemon.engine.num_turns == turns
        daemon.loop.wake()
        await quiet(daemon)
        assert daemon.engine.num_turns == turns, "woken for nothing it looks, and sleeps on"


@in_trio
async def test_no_call_is_missed_on_the_way_to_sleep() -> None:
    """A request may come at each moment in which the loop goes to rest."""
    async with echo_daemon() as daemon:
        for pause in range(60):
            first = await daemon.ask("a", max_tokens=1)
            for _ in range(pause % 12):
                await trio.lowlevel.checkpoint()
            second = await daemon.ask("b", max_tokens=2)
            assert (first.text, second.text) == ("a", "bb")


@in_trio
async def test_wait_idle_waits_until_the_engine_is_empty() -> None:
    async with echo_daemon() as daemon:
        await daemon.loop.wait_idle()
        for cancelled in (False, True):
            clients = [await daemon.submit(prompt="some words", max_tokens=20) for _ in range(6)]
            if cancelled:
                await quiet(daemon)
                for client in clients:
                    daemon.cancel(client)
            await daemon.loop.wait_idle()
            assert all(client.end for client in clients)
            daemon.engine.check()


@in_trio
async def test_a_cancelled_request_frees_its_row_for_the_next() -> None:
    async with echo_daemon() as daemon:
        endless = [await daemon.submit(prompt="x", max_tokens=2**31 - 1) for _ in range(daemon.engine.info.max_rows)]
        waiting = await daemon.submit(prompt="short", max_tokens=5)
        await quiet(daemon)
        assert waiting.end is None
        daemon.cancel(endless[0])
        assert (await waiting.done()).finish_reason == "length"
        for client in endless:
            daemon.cancel(client)
            assert (await client.done()).finish_reason == "cancelled"


@in_trio
async def test_the_engine_is_read_at_the_start_and_at_rest() -> None:
    async with echo_daemon() as daemon:
        assert daemon.loop.gauges is None
        await daemon.loop.wait_idle()
        assert daemon.loop.gauges == daemon.engine.gauges()
        await daemon.ask("abc", max_tokens=3)
        await daemon.loop.wait_idle()
        assert daemon.loop.gauges is not None
        assert daemon.loop.gauges.slots_used == 0


@in_trio
async def test_a_row_that_fails_is_told_and_the_loop_goes_on() -> None:
    async with echo_daemon() as daemon:
        daemon.engine.fail_step = True
        error = await (await daemon.submit(prompt="x", max_tokens=5)).error()
        assert (error.code, error.message) == ("model_failed", "the step failed")
        assert (await daemon.ask("y", max_tokens=1)).text == "y"
        assert daemon.loop.failure is None


@in_trio
async def test_when_the_engine_is_gone_all_are_told_and_it_raises() -> None:
    async with echo_daemon(max_queue=10) as daemon:
        clients = [await daemon.submit(prompt="x" * 30, max_tokens=1000) for _ in range(9)]
        await quiet(daemon)
        daemon.engine.fail_engine = True
        for client in clients:
            error = await client.error()
            assert error.code == "model_failed"
            assert "the device is gone" in error.message
        await daemon.failed.wait()
        assert isinstance(daemon.engine_failure, EngineFailed)
        assert daemon.loop.failure == "the device is gone"
        assert not daemon.loop.scheduler.requests


@in_trio
async def test_wait_idle_returns_when_the_engine_is_gone() -> None:
    """Whoever drains must not wait for a loop that has ended: no request is left, and no engine to hold a row."""
    async with echo_daemon() as daemon, trio.open_nursery() as nursery:
        returned = []

        async def wait(name: str) -> None:
            await daemon.loop.wait_idle()
            returned.append(name)

        await daemon.submit(prompt="x", max_tokens=2**31 - 1)
        nursery.start_soon(wait, "began before")
        await quiet(daemon)
        daemon.engine.fail_engine = True
        await daemon.failed.wait()
        nursery.start_soon(wait, "began after")
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        assert sorted(returned) == ["began after", "began before"]


class Broken(FakeEngine):
    def step(self, step: Step) -> StepResult:
        raise ZeroDivisionError("a fault of ours")


@in_trio
async def test_a_fault_of_ours_is_not_swallowed() -> None:
    async with echo_daemon(run_loop=False) as daemon:
        daemon.loop.engine = Broken()
        await daemon.submit(prompt="x")
        with pytest.raises(ZeroDivisionError):
            await daemon.loop.run()


@in_trio
async def test_cancelled_it_stops_after_the_turn_that_has_begun() -> None:
    async with echo_daemon(run_loop=False) as daemon:
        client = await daemon.submit(prompt="x", max_tokens=3000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.loop.run)
            while len(client.token_ids) < 3:
                await trio.lowlevel.checkpoint()
            turns = daemon.engine.num_turns
            nursery.cancel_scope.cancel()
        assert daemon.engine.num_turns <= turns + 1, "it went on although it was cancelled"
        daemon.loop.scheduler.fail_all("shutting_down", "too late", trio.current_time())
        assert isinstance(client.end, Error)


@in_trio
async def test_a_hundred_clients_that_come_and_go_leave_nothing() -> None:
    async with echo_daemon(max_queue=1000) as daemon:
        ends = []

        async def visit(number: int) -> None:
            client = await daemon.submit(prompt="hello" * (1 + number % 9), max_tokens=1 + number % 30)
            for _ in range(number % 17):
                await trio.lowlevel.checkpoint()
            if number % 3 == 0:
                daemon.cancel(client)
            await client.ended.wait()
            assert isinstance(client.end, Done)
            ends.append(client.end.finish_reason)

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(visit, number)
        await daemon.loop.wait_idle()
        assert len(ends) == 100
        assert ends.count("length") >= 66
        assert daemon.loop.scheduler.requests == {}
        assert daemon.engine.rows == set()


@in_trio
async def test_what_has_ended_is_booked_while_others_go_on() -> None:
    """An answer is told a turn before its row leaves."""
    async with echo_daemon() as daemon:
        await daemon.loop.wait_booked()
        await daemon.submit(prompt="somebody else", max_tokens=500)
        for number in range(20):
            client = await daemon.submit(prompt="a" * (1 + number), max_tokens=2)
            await client.done()
            await daemon.loop.wait_booked()
            assert len(daemon.engine.rows) == 1
