"""Loop, service and the model's thread as the daemon nests them, over the fake engine; and clients without a socket."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from lanes.lane import EngineFailed, ModelInfo
from lanes.thread import open_model_thread
from scheduler.loop import Loop
from scheduler.metrics import Metrics
from scheduler.options import Options
from scheduler.protocol import Delta, Done, Error, Reply, Submit
from scheduler.rates import ChunkSize
from scheduler.scheduler import BatchScheduler
from scheduler.service import Service
from tests.scheduler.bytes_tokenizer import ByteTokenizer
from tests.scheduler.fake_engine import INFO, FakeEngine

# Long enough for a machine that is busy; only what hangs takes so long.
HANGS_S = 60


class Client:
    """What one request is told."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.end: Done | Error | None = None
        self.ended = trio.Event()
        self.row_id: int | None = None

    def reply(self, said: Reply) -> None:
        assert self.end is None, f"{said} after the end, {self.end}"
        if isinstance(said, Delta):
            self.text += said.text
            self.token_ids.extend(said.token_ids)
        else:
            assert isinstance(said, Done | Error)
            self.end = said
            self.ended.set()

    async def done(self) -> Done:
        await self.ended.wait()
        assert isinstance(self.end, Done), self.end
        return self.end

    async def error(self) -> Error:
        await self.ended.wait()
        assert isinstance(self.end, Error), self.end
        return self.end


class EchoDaemon:
    """engine_failure: what loop.run() ended with."""

    def __init__(self, options: Options, service: Service, engine: FakeEngine) -> None:
        self.options = options
        self.service = service
        self.engine = engine
        self.loop = service.loop
        self.metrics = service.metrics
        self.engine_failure: EngineFailed | None = None
        self.failed = trio.Event()

    async def submit(self, **fields: Any) -> Client:
        client = Client()
        client.row_id = await self.service.submit(Submit(**{"id": "x", **fields}), client.reply)
        return client

    def cancel(self, client: Client) -> None:
        assert client.row_id is not None
        self.service.cancel(client.row_id)

    async def ask(self, prompt: str, **fields: Any) -> Client:
        """Submit, and wait for the end."""
        client = await self.submit(prompt=prompt, **fields)
        await client.ended.wait()
        return client

    def counted(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no metric {name} {labels}"
        return value

    async def run(self) -> None:
        try:
            await self.loop.run()
        except EngineFailed as failure:
            self.engine_failure = failure
            self.failed.set()


@asynccontextmanager
async def echo_daemon(
    info: ModelInfo = INFO, tokenizer: Any = None, run_loop: bool = True, **options: Any
) -> AsyncIterator[EchoDaemon]:
    """When the block is left all is drained, and has to be in order."""
    engine = FakeEngine(replace(info))
    told = Options(**{"model": "echo", "max_rows": info.max_rows, **options})
    async with open_model_thread() as thread:
        metrics = Metrics()
        scheduler = BatchScheduler(info.max_rows, told.max_queue, ChunkSize(8, told.max_stall_ms / 1000))
        loop = Loop(scheduler, engine, thread, metrics)
        daemon = EchoDaemon(told, Service(told, info, tokenizer or ByteTokenizer(), loop, metrics, "0.1"), engine)
        async with trio.open_nursery() as nursery:
            if run_loop:
                nursery.start_soon(daemon.run)
            yield daemon
            if run_loop and daemon.engine_failure is None:
                await loop.wait_idle()
                scheduler.check()
                engine.check()
            nursery.cancel_scope.cancel()


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a plain test of an async one; it fails if it hangs."""

    async def guarded(arguments: dict[str, Any]) -> None:
        with trio.fail_after(HANGS_S):
            await test(**arguments)

    def run(**arguments: Any) -> None:
        trio.run(guarded, arguments)

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    # What pytest reads the names of arguments from.
    run.__wrapped__ = test  # type: ignore[attr-defined]
    return run
