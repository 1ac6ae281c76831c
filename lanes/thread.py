"""The door to the one thread that owns MLX.

MLX ties streams, random state and unevaluated arrays to the thread that made them, so all of its work is done on one
thread that lives as long as the daemon. What may cross: plain data (see lane.py) and callables to run there. An array
never leaves.
"""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ModelThread:
    """Runs callables one after another on the model's thread; see open_model_thread()."""

    def __init__(self) -> None:
        # Bounded by its callers: each waits for its own answer, so it never holds more than a handful.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = False

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call function(*args) on the model's thread and return what it returns, or raise what it raises.

        The wait is shielded: a call that MLX has begun cannot be taken back.
        """
        if self._ended:
            raise RuntimeError("the model's thread has ended")
        done = trio.Event()
        answer: list[outcome.Outcome[T]] = []
        token = trio.lowlevel.current_trio_token()

        def job() -> None:
            answer.append(outcome.capture(function, *args))
            token.run_sync_soon(done.set)

        self._jobs.put(job)
        with trio.CancelScope(shield=True):
            await done.wait()
        return answer[0].unwrap()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        _forget_streams()


def _forget_streams() -> None:
    """A thread that used MLX and ends with its streams alive aborts the process in half of the cases."""
    import sys

    core: Any = sys.modules.get("mlx.core")
    if core is not None:
        core.clear_streams()


@asynccontextmanager
async def open_model_thread() -> AsyncIterator[ModelThread]:
    """Start the thread, and end it when the block is left: what was asked of it before is still carried out."""
    thread = ModelThread()
    async with trio.open_nursery() as nursery:
        # A limiter of its own: the thread lives long and must not take a place among Trio's short jobs.
        nursery.start_soon(lambda: trio.to_thread.run_sync(thread._work, limiter=trio.CapacityLimiter(1)))
        try:
            yield thread
        finally:
            thread._ended = True
            thread._jobs.put(None)
