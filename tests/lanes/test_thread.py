"""The door to the model's thread: one thread, answers and errors come back, nothing begun is left behind."""

import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from lanes.thread import ModelThread, open_model_thread


def with_thread(work: Callable[[ModelThread], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with open_model_thread() as thread:
            return await work(thread)

    return trio.run(run)


class Gate:
    """A job that begins, waits until it is let go, and returns."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def job(self) -> str:
        self.begun.set()
        assert self.open.wait(30), "nobody opened the gate"
        return "done"

    async def wait_begun(self) -> None:
        assert await trio.to_thread.run_sync(self.begun.wait, 30)


def test_all_jobs_run_on_one_thread_that_is_not_trios() -> None:
    async def work(thread: ModelThread) -> None:
        found = set()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                found.add(await thread.run(threading.get_ident))

            for _ in range(60):
                nursery.start_soon(ask)
                # Trio's own short jobs do not run there.
                await trio.to_thread.run_sync(lambda: None)
        assert len(found) == 1
        assert threading.get_ident() not in found
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0, "it takes no place among them"

    with_thread(work)


def test_arguments_go_and_answers_come_in_order() -> None:
    async def work(thread: ModelThread) -> None:
        ran: list[int] = []

        def job(number: int) -> int:
            ran.append(number)
            return number * number

        answers: dict[int, int] = {}

        async def ask(number: int) -> None:
            answers[number] = await thread.run(job, number)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, number)
        assert sorted(ran) == list(range(20))
        assert answers == {number: number * number for number in range(20)}

        # From one task, one after another.
        ran.clear()
        assert [await thread.run(job, number) for number in range(5)] == [0, 1, 4, 9, 16]
        assert ran == list(range(5))

    with_thread(work)


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyError(3), SystemExit(2), KeyboardInterrupt()])
def test_errors_come_back_and_the_thread_goes_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def work(thread: ModelThread) -> None:
        with pytest.raises(type(error)) as caught:
            await thread.run(fail)
        assert caught.value is error
        assert await thread.run(lambda: "alive") == "alive"

    with_thread(work)


def test_a_cancelled_wait_ends_with_the_job_and_keeps_its_answer() -> None:
    async def work(thread: ModelThread) -> None:
        gate = Gate()
        answers = []
        scope = trio.CancelScope()

        async def ask() -> None:
            with scope:
                answers.append(await thread.run(gate.job))
                await trio.lowlevel.checkpoint()
                answers.append("not cancelled")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await gate.wait_begun()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert answers == []
            gate.open.set()
        assert answers == ["done"], "the wait is shielded, and what follows is cancelled"
        assert scope.cancelled_caught

    with_thread(work)


def test_trio_goes_on_while_a_job_runs() -> None:
    async def work(thread: ModelThread) -> None:
        gate = Gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread.run, gate.job)
            await gate.wait_begun()
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            gate.open.set()

    with_thread(work)


def test_leaving_the_block_ends_the_thread_after_what_was_asked() -> None:
    ran: list[str] = []
    gate = Gate()

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            async with open_model_thread() as thread:
                nursery.start_soon(thread.run, lambda: ran.append(gate.job()))
                await gate.wait_begun()
                nursery.start_soon(thread.run, ran.append, "second")
                await wait_all_tasks_blocked()
                gate.open.set()
            assert ran == ["done", "second"]

    trio.run(run)


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
def test_the_thread_ends_however_the_block_is_left(how: str) -> None:
    jobs_done: list[str] = []

    async def run() -> ModelThread:
        with trio.CancelScope() as scope:
            async with open_model_thread() as thread:
                await thread.run(jobs_done.append, "one")
                if how == "raises":
                    raise ValueError("the body fails")
                if how == "is cancelled":
                    scope.cancel()
                    await trio.sleep_forever()
        return thread

    if how == "raises":
        with pytest.raises(ExceptionGroup) as caught:
            trio.run(run)
        assert caught.group_contains(ValueError, match="the body fails")
    else:
        thread = trio.run(run)
        assert thread._jobs.empty(), "the thread has taken the word to end"
    assert jobs_done == ["one"]


# Trio keeps a thread that has nothing to do for 10 s before it ends; here it ends at once, while the process lives on.
# Forked, because starting twenty interpreters takes longer than all the rest.
WITH_MLX = """
import os, sys, threading
import trio
import trio._core._thread_cache as cache
from lanes.thread import open_model_thread

def compute():
    import mlx.core as mx
    x = mx.random.normal((64, 64))
    return (x @ x).sum().item(), threading.current_thread()

async def main():
    async with open_model_thread() as thread:
        number, worker = await thread.run(compute)
    assert isinstance(number, float)
    return worker

cache.IDLE_TIMEOUT = 0.01
for _ in range(20):
    child = os.fork()
    if not child:
        trio.run(main).join()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_processes_that_used_mlx_on_the_thread_exit_cleanly() -> None:
    """A thread that ends with MLX's streams alive aborts its process, but not in every run."""
    ran = subprocess.run([sys.executable, "-c", WITH_MLX], capture_output=True, text=True, timeout=60)
    assert (ran.stdout.split(), ran.stderr) == (["0"] * 20, "")


def test_the_door_itself_imports_no_mlx() -> None:
    code = "import sys, lanes.thread, lanes.lane; assert not [m for m in sys.modules if m.startswith('mlx')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
