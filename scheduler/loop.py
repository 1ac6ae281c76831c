"""The loop: plan, step, apply, for as long as there is something to do; then it sleeps until it is woken."""

from __future__ import annotations

import trio

from lanes.lane import Engine, EngineFailed, EngineGauges, Step
from lanes.thread import ModelThread
from scheduler.metrics import Metrics
from scheduler.scheduler import BatchScheduler

# The engine is read between two steps, so reading it costs the next one a round trip between threads (0.3 ms).
GAUGES_EVERY_S = 1.0


class Loop:
    """Drives the engine by the scheduler's plans and tells requests, metrics and log what happened."""

    def __init__(self, scheduler: BatchScheduler, engine: Engine, thread: ModelThread, metrics: Metrics) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.thread = thread
        self.metrics = metrics
        self.gauges: EngineGauges | None = None
        self.failure: str | None = None
        self._gauges_read_s = float("-inf")
        self._work = trio.Event()
        self._idle = trio.Event()

    def wake(self) -> None:
        """There is something to do: called after each submit and cancel."""
        self._work.set()

    async def wait_idle(self) -> None:
        """Return when no request is left and the engine holds no row, or has failed."""
        while self.failure is None and (self.scheduler.requests or not self._idle.is_set()):
            await self._idle.wait()
            await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineFailed, when all requests have been told, if the engine cannot go on."""
        try:
            await self._read_gauges()
            while True:
                # Waiting for the engine is shielded: this is where a cancelled loop ends.
                await trio.lowlevel.checkpoint_if_cancelled()
                step = self.scheduler.plan(trio.current_time())
                if step is None:
                    await self._rest()
                else:
                    await self._turn(step)
        except EngineFailed as error:
            self.failure = str(error)
            self.scheduler.fail_all("model_failed", f"the engine has failed: {error}", trio.current_time())
            self._idle.set()
            raise

    async def _turn(self, step: Step) -> None:
        now_s = trio.current_time()
        for spec in step.admit:
            request = self.scheduler.requests[spec.row_id]
            self.metrics.admitted(now_s - request.times.arrived_s)
        result = await self.thread.run(self.engine.step, step)
        now_s = trio.current_time()
        self.metrics.step(result)
        for request, since_s in self.scheduler.apply(step, result, now_s):
            if since_s is None:
                self.metrics.first_token(now_s - request.times.arrived_s, len(request.wish.prompt))
            else:
                self.metrics.token(since_s)
        if now_s - self._gauges_read_s >= GAUGES_EVERY_S:
            await self._read_gauges()

    async def _rest(self) -> None:
        self.scheduler.check()
        await self.thread.run(self.engine.check)
        await self._read_gauges()
        self._idle.set()
        await self._work.wait()
        self._work, self._idle = trio.Event(), trio.Event()

    async def _read_gauges(self) -> None:
        self.gauges = await self.thread.run(self.engine.gauges)
        self._gauges_read_s = trio.current_time()
