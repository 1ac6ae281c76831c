"""What rows begin with is read for each as soon as it can be, whatever is read for others."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from scheduler.loop import Loop
from scheduler.metrics import Metrics
from scheduler.protocol import Done
from scheduler.request import State
from store.checkpoint import Destination
from store.store import Found
from tests.scheduler.test_remembering import LONG, RememberingBench, bench_of
from tests.scheduler.trio_test import trio_test, until
from tests.scheduler.turned_by_hand import AtOnce

SHORT = [200 + i % 50 for i in range(100)]


class Recalling:
    """A bench that has a loop, and knows LONG and SHORT. What is read of LONG is read when `may_go_on` is set."""

    def __init__(self, bench: RememberingBench) -> None:
        self.bench = bench
        self.loop = Loop(bench.scheduler, bench.engine, AtOnce(), Metrics())
        self.may_go_on = trio.Event()
        self.num_read = 0
        self._fill = bench.store.fill
        bench.store.fill = self.fill  # type: ignore[method-assign]

    async def fill(self, found: Found, destinations: Sequence[Destination]) -> bool:
        if found.tokens > len(SHORT):
            await self.may_go_on.wait()
        self.num_read += 1
        return await self._fill(found, destinations)

    def submit(self, prompt: list[int]) -> int:
        self.bench.now_s = trio.current_time()
        row_id = self.bench.submit(prompt)
        self.loop.wake()
        return row_id

    def has_ended(self, row_id: int) -> bool:
        return self.bench.heard[row_id].end is not None


@asynccontextmanager
async def recalling() -> AsyncIterator[Recalling]:
    async with bench_of() as bench, trio.open_nursery() as nursery:
        for prompt in (LONG, SHORT):
            await bench.answer(prompt)
        found = Recalling(bench)
        nursery.start_soon(found.loop.run)
        nursery.start_soon(found.loop.run_recalls, bench.store)
        yield found
        await found.loop.wait_idle()
        assert not found.loop._reading
        for owner in (bench.scheduler, bench.engine, bench.store):
            owner.check()
        nursery.cancel_scope.cancel()


@trio_test
async def test_a_small_one_does_not_wait_for_a_large_one() -> None:
    async with recalling() as found:
        large = found.submit(LONG)
        await until(lambda: found.bench.scheduler.requests[large].state is State.RECALLING)
        small = found.submit(SHORT)
        await until(lambda: found.has_ended(small))
        assert found.bench.cached(small) == len(SHORT) - 1
        assert found.bench.scheduler.requests[large].state is State.RECALLING
        found.may_go_on.set()
        await until(lambda: found.has_ended(large))
        assert found.bench.cached(large) == len(LONG) - 1


@trio_test
async def test_for_one_that_has_ended_no_reading_is_begun() -> None:
    async with recalling() as found:
        row_id = found.submit(LONG)
        await until(lambda: row_id in found.loop._reading)
        found.bench.scheduler.cancel(row_id, trio.current_time())
        found.loop.wake()
        await until(lambda: not found.loop._reading)
        assert isinstance(found.bench.heard[row_id].end, Done)
        assert found.num_read == 0
