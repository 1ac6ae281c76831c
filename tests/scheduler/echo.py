"""A service without a model, for tests at the connection's seam: it answers a prompt with its own words, one by one.

A word "pause" makes it wait, "hang" makes it wait for the end of the request, "fail" ends the answer with an error;
"first" makes all answers but the first wait as for "hang".
The prompts "refuse", "full" and "crash" are refused, refused for now, and a fault of the service.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from scheduler.connection import Limits, serve_connection
from scheduler.errors import Overloaded, Refused
from scheduler.listener import accept, listen
from scheduler.protocol import (
    PROTOCOL_VERSION,
    Adapters,
    Delta,
    Done,
    Error,
    Hello,
    LoadAdapter,
    Reply,
    Status,
    Submit,
    Timings,
    UnloadAdapter,
    Usage,
)
from tests.scheduler.trio_test import until

PAUSE_S = 0.002


class EchoService:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.rows: dict[int, list[trio.CancelScope]] = {}
        self.num_rows = 0
        self.num_cancelled = 0
        self.adapters: dict[str, str] = {}
        self.num_given_up = 0

    @property
    def retry_after_s(self) -> float:
        return 1.0 + len(self.rows)

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, "echo", "none")

    def status(self) -> Status:
        return Status({"running": len(self.rows)})

    async def flush(self) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    async def submit(self, message: Submit, reply: Callable[[Reply], None]) -> int:
        await trio.lowlevel.checkpoint()
        words = prompt_words(message)
        match words:
            case ["refuse"]:
                raise Refused("bad_request", "as asked")
            case ["full"]:
                raise Overloaded("as asked", 2.5)
            case ["crash"]:
                raise ZeroDivisionError
        self.num_rows += 1
        row_id = self.num_rows
        self.rows[row_id] = []
        for index in range(message.n):
            scope = trio.CancelScope()
            self.rows[row_id].append(scope)
            self._nursery.start_soon(self._answer, row_id, scope, message, words, reply, index)
        return row_id

    async def change_adapters(self, message: LoadAdapter | UnloadAdapter) -> Adapters:
        """Only a folder named good holds one."""
        await trio.lowlevel.checkpoint()
        if isinstance(message, UnloadAdapter):
            del self.adapters[message.name]
        elif message.path.endswith("/good"):
            self.adapters[message.name] = message.path
        else:
            raise Refused("bad_adapter", "as asked")
        return Adapters(message.id, tuple(self.adapters))

    def cancel(self, row_id: int) -> None:
        for scope in self.rows.get(row_id, ()):
            scope.cancel()

    async def _answer(
        self,
        row_id: int,
        scope: trio.CancelScope,
        message: Submit,
        words: list[str],
        reply: Callable[[Reply], None],
        index: int,
    ) -> None:
        said: list[str] = []
        reason = "cancelled"
        with scope:
            for number, word in enumerate(words[: message.max_tokens]):
                if word == "pause":
                    await trio.sleep(PAUSE_S)
                elif word == "hang":
                    await trio.sleep_forever()
                elif word == "fail":
                    self._leave(row_id, scope)
                    reply(Error("model_failed", "as asked", message.id, index=index if message.n > 1 else None))
                    return
                elif word == "first" and index > 0:
                    await trio.sleep_forever()
                await trio.lowlevel.checkpoint()
                said.append(word + " ")
                if message.stream:
                    reply(Delta(message.id, said[-1], (number,), index))
            reason = "stop" if len(said) == len(words) else "length"
        self._leave(row_id, scope)
        self.num_cancelled += reason == "cancelled"
        usage = Usage(len(words), len(said), 0)
        text = None if message.stream else "".join(said)
        reply(Done(message.id, reason, usage, Timings(0, 0, 0, 0), text=text, index=index))

    def _leave(self, row_id: int, scope: trio.CancelScope) -> None:
        self.rows[row_id].remove(scope)
        if not self.rows[row_id]:
            del self.rows[row_id]


def prompt_words(message: Submit) -> list[str]:
    if message.messages is not None:
        return [word for turn in message.messages for word in turn.content.split()]
    return (message.prompt or " ".join(map(str, message.prompt_token_ids or ()))).split()


class Daemon:
    """What `serving` has started. scopes: of the handlers; cut_by: why connections were cut, in order."""

    def __init__(self, path: Path, service: EchoService, handlers: trio.Nursery) -> None:
        self.path = path
        self.service = service
        self.handlers = handlers
        self.goodbye = trio.Event()
        self.scopes: list[trio.CancelScope] = []
        self.cut_by: list[str] = []


@asynccontextmanager
async def serving(path: Path, limits: Limits | None = None) -> AsyncIterator[Daemon]:
    """The echo service behind a real socket. On leaving there must be no row, no handler and no descriptor left."""
    gc.collect()  # what another test has left open is closed now, and not in between
    num_descriptors = len(os.listdir("/dev/fd"))
    async with trio.open_nursery() as rows:
        async with listen(path) as listener, trio.open_nursery() as accepting, trio.open_nursery() as handlers:
            daemon = Daemon(path, EchoService(rows), handlers)

            async def handle(stream: trio.SocketStream) -> None:
                with trio.CancelScope() as scope:
                    daemon.scopes.append(scope)
                    cut_by = await serve_connection(stream, daemon.service, limits or Limits(), daemon.goodbye)
                if not scope.cancelled_caught and cut_by is not None:
                    daemon.cut_by.append(cut_by)

            accepting.start_soon(accept, listener, handle, handlers)
            yield daemon
            daemon.goodbye.set()
            await until(lambda: not handlers.child_tasks)
            accepting.cancel_scope.cancel()
        await until(lambda: not daemon.service.rows)
    num_left = len(os.listdir("/dev/fd"))
    assert num_left == num_descriptors, f"{num_left} descriptors, {num_descriptors} before"
