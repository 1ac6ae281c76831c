"""The loop: plan, step, apply, for as long as there is something to do; then it sleeps until it is woken."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable

import trio

from lanes.lane import Engine, EngineFailed, EngineGauges, Step
from lanes.thread import ModelThread
from scheduler.metrics import Metrics
from scheduler.notify import Notifier
from scheduler.request import Request
from scheduler.scheduler import BatchScheduler
from store.checkpoint import Destination
from store.store import Store

# The engine is read between two steps, so reading it costs the next one a round trip between threads (0.3 ms).
GAUGES_EVERY_S = 1.0


class Loop:
    """Drives the engine by the scheduler's plans and tells requests, metrics and log what happened."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        engine: Engine,
        thread: ModelThread,
        metrics: Metrics,
        notifier: Notifier | None = None,
    ) -> None:
        """notifier: fed each time the model's thread has answered."""
        self.scheduler = scheduler
        self.engine = engine
        self.thread = thread
        self.metrics = metrics
        self.gauges: EngineGauges | None = None
        self.failure: str | None = None
        # Called when no request is left, by owners of what requests take: to assert that all of it was given back.
        self.idle_checks: list[Callable[[], None]] = []
        self._beat_s = trio.current_time()
        self._notifier = notifier or Notifier()
        self._gauges_read_s = float("-inf")
        self._work = trio.Event()
        self._idle = trio.Event()
        # Here waits who wants to know what the turns under way come to.
        self._turned = trio.lowlevel.ParkingLot()
        self._chores: deque[Callable[[], Awaitable[None]]] = deque()
        # As many as there are rows at most.
        self._recalls = trio.open_memory_channel[tuple[Request, tuple[Destination, ...]]](math.inf)
        # Where rows are read, by their ids: for one that leaves, no reading is begun any more.
        self._reading: dict[int, trio.CancelScope] = {}

    @property
    def silent_s(self) -> float:
        """For how long the model's thread has not answered; it has made the engine a moment before the loop was."""
        return trio.current_time() - self._beat_s

    def wake(self) -> None:
        """There is something to do: called after each submit and cancel."""
        self._work.set()

    def soon(self, chore: Callable[[], Awaitable[None]]) -> None:
        """Do this between two turns."""
        self._chores.append(chore)
        self.wake()

    async def wait_idle(self) -> None:
        """Return when no request is left and the engine holds no row, or has failed."""
        while self.failure is None and (self.scheduler.requests or not self._idle.is_set()):
            # It rests with requests left, too: those that wait for what is read.
            await (self._turned.park() if self._idle.is_set() else self._idle.wait())
            await trio.lowlevel.checkpoint()

    async def wait_booked(self) -> None:
        """Return when the rows of all that has ended by now have left the engine, and what is to be remembered of them
        has been handed over: that is done in the turn after the one in which they ended."""
        for _ in range(2):
            if self._idle.is_set():
                return
            await self._turned.park()

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineFailed, when all requests have been told, if the engine cannot go on."""
        try:
            await self._read_gauges()
            while True:
                # Waiting for the engine is shielded: this is where a cancelled loop ends.
                await trio.lowlevel.checkpoint_if_cancelled()
                while self._chores:
                    await self._chores.popleft()()
                step = self.scheduler.plan(trio.current_time())
                if step is None:
                    await self._rest()
                else:
                    await self._turn(step)
        except EngineFailed as error:
            self.failure = str(error)
            self.scheduler.fail_all("model_failed", f"the engine has failed: {error}", trio.current_time())
            self.scheduler.turn_failed()
            self._idle.set()
            self._turned.unpark_all()
            raise

    async def run_recalls(self, store: Store) -> None:
        """Read what is remembered into the memory of rows that wait for it, until cancelled. Which of them go side by
        side, the store knows."""
        async with trio.open_nursery() as nursery:
            async for request, destinations in self._recalls[1]:
                nursery.start_soon(self._recall, store, request, destinations)

    async def _recall(self, store: Store, request: Request, destinations: tuple[Destination, ...]) -> None:
        assert request.found is not None
        whole = False
        with trio.CancelScope() as scope:
            self._reading[request.row_id] = scope
            # Without memory for it there is nothing to fill.
            whole = bool(destinations) and await store.fill(request.found, destinations)
        del self._reading[request.row_id]
        if whole:
            self._count_saved(request)
        self.scheduler.filled(request, whole)
        self.wake()

    async def _turn(self, step: Step) -> None:
        now_s = trio.current_time()
        for row_id in step.leave:
            if row_id in self._reading:
                self._reading[row_id].cancel()
        for spec in step.admit:
            request = self.scheduler.requests[spec.row_id]
            self.metrics.admitted(now_s - request.times.arrived_s)
            if spec.recall is not None and spec.recall.mapped is not None:
                self._count_saved(request)
        result = await self.thread.run(self.engine.step, step)
        self._beat()
        now_s = trio.current_time()
        self.metrics.step(result)
        for request, since_s in self.scheduler.apply(step, result, now_s):
            if since_s is None:
                used = request.usage()
                self.metrics.first_token(
                    now_s - request.times.arrived_s,
                    used.prompt_tokens,
                    used.cached_memory_tokens,
                    used.cached_disk_tokens,
                )
            else:
                self.metrics.token(since_s)
        for recall in self.scheduler.to_fill(result):
            self._recalls[0].send_nowait(recall)
        self._turned.unpark_all()
        if now_s - self._gauges_read_s >= GAUGES_EVERY_S:
            await self._read_gauges()

    def _count_saved(self, request: Request) -> None:
        """It begins with what was found of its prompt."""
        rate = self.scheduler.prompt_rate.tokens_per_s
        if rate is not None and request.found is not None:
            self.metrics.store_saved(request.found.tokens / rate)

    async def _rest(self) -> None:
        self.scheduler.check()
        if not self.scheduler.requests:  # otherwise rows wait for what is read into them
            for check in self.idle_checks:
                check()
            await self.thread.run(self.engine.check)
        await self._read_gauges()
        self._idle.set()
        self._turned.unpark_all()
        while not self._work.is_set():
            self._beat()
            late_s = self.scheduler.first_deadline_s
            with trio.move_on_at(min(trio.current_time() + self._notifier.beat_s, late_s)) as nap:
                await self._work.wait()
            if trio.current_time() >= late_s:
                break
            if nap.cancelled_caught:
                # Whether the model's thread still answers, only a question to it can tell.
                await self._read_gauges()
        self._work, self._idle = trio.Event(), trio.Event()

    def _beat(self) -> None:
        """The model's thread has just answered."""
        self._beat_s = trio.current_time()
        self._notifier.alive()

    async def _read_gauges(self) -> None:
        self.gauges = await self.thread.run(self.engine.gauges)
        self._gauges_read_s = trio.current_time()
