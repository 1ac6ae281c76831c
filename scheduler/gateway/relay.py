"""One request on its way through: submitted to the daemon, and what comes told to the HTTP client as it comes.

A refusal has its own status as long as nothing was sent. Headers go out with the first news, or, should a long prompt
keep those waiting, with the first sign of life. From then on what goes wrong is an event of the stream.

A client that goes away cancels its request: leaving the daemon's connection does, and everything here leaves it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

import trio

from scheduler.answer import Answer, ClientError
from scheduler.client import Client, Options
from scheduler.gateway.asgi import Gone, Receive, Send
from scheduler.gateway.dialect import Event, Order, Reply, Reshape
from scheduler.gateway.faults import of_client_error
from scheduler.protocol import Delta, Done

Job = Callable[[], Awaitable[None]]

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would gather events before it passes them on.
    (b"x-accel-buffering", b"no"),
]


async def unless_gone(receive: Receive, work: Job) -> None:
    """Do the work, and leave it when the client goes. To be called once the body is read. Raises Gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise Gone

    await _together([work], beside=watch)


async def whole(client: Client, order: Order) -> dict[str, Any]:
    """Everything at once. Raises ClientError."""
    dones: list[list[Done]] = [[] for _ in order.submits]

    async def ask(prompt: int) -> None:
        dones[prompt] = await client.ask_all(**cast(Options, order.submits[prompt]))

    await _together([partial(ask, prompt) for prompt in range(len(order.submits))])
    said = [done for of_prompt in dones for done in of_prompt]
    return order.reply.whole([order.reshape().done(done)[1] for done in said] if order.reshape else said)


async def stream(client: Client, order: Order, send: Send, keep_alive_s: float) -> ClientError | None:
    """As events. Raises ClientError as long as nothing was sent; returns one that came later, and was told."""
    out = _Out(send, order.reply)
    teller = _Teller(order)
    try:
        async with AsyncExitStack() as stack:
            submits = [client.submit(**cast(Options, options)) for options in order.submits]
            answers = [await stack.enter_async_context(submit) for submit in submits]

            async def pass_on(prompt: int) -> None:
                async for delta in answers[prompt]:
                    await out.tell(teller.delta(prompt, delta))

            await _together(
                [partial(pass_on, prompt) for prompt in range(len(answers))], partial(out.live, keep_alive_s)
            )
            await out.tell(teller.end(answers))
    except ClientError as error:
        if not out.has_begun:
            raise
        await out.tell(order.reply.fail(of_client_error(error)))
        await out.end()
        return error
    await out.end()
    return None


class _Teller:
    """The order's reply, with the answers numbered through and each reshaped by itself."""

    def __init__(self, order: Order) -> None:
        self._order = order
        num_answers = order.n * len(order.submits)
        self._reshapes: list[Reshape] | None = None
        if order.reshape is not None:
            self._reshapes = [order.reshape() for _ in range(num_answers)]

    def delta(self, prompt: int, delta: Delta) -> Iterable[Event]:
        answer = prompt * self._order.n + delta.index
        told = self._reshapes[answer].delta(delta) if self._reshapes else delta
        return self._order.reply.delta(answer, told) if told is not None else ()

    def end(self, answers: Sequence[Answer]) -> Iterable[Event]:
        reply = self._order.reply
        dones = [done for answer in answers for done in answer.all_done]
        for answer, done in enumerate(dones):
            last, told = self._reshapes[answer].done(done) if self._reshapes else (None, done)
            if last is not None:
                yield from reply.delta(answer, last)
            yield from reply.done(answer, told)
        yield from reply.end()


class _Out:
    """The response. Its head and the reply's opening go with the first news."""

    def __init__(self, send: Send, reply: Reply) -> None:
        self._send = send
        self._reply = reply
        self._turn = trio.Lock()
        self._sent_s = trio.current_time()
        self.has_begun = False

    async def tell(self, events: Iterable[Event]) -> None:
        """events are made in here, after those that the reply begins with."""
        async with self._turn:
            opening = () if self.has_begun else self._reply.begin()
            await self._write(b"".join([event.encode() for told in (opening, events) for event in told]))

    async def live(self, every_s: float) -> None:
        """Show a sign of life whenever nothing was told for so long."""
        while True:
            await trio.sleep_until(self._sent_s + every_s)
            if trio.current_time() >= self._sent_s + every_s:
                await self.tell(())
                async with self._turn:
                    await self._write(self._reply.keep_alive)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        if not body:
            return
        self._sent_s = trio.current_time()
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _together(jobs: Sequence[Job], beside: Job | None = None) -> None:
    """Do all of the jobs, and another one meanwhile. The first that raises an exception ends them all, and its
    exception is raised alone, without a nursery's group around it."""
    failures: list[Exception] = []

    async def do(job: Job) -> None:
        try:
            await job()
        except Exception as error:
            failures.append(error)
            all_of_it.cancel_scope.cancel()

    async with trio.open_nursery() as all_of_it:
        if beside is not None:
            all_of_it.start_soon(do, beside)
        async with trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(do, job)
        all_of_it.cancel_scope.cancel()
    if failures:
        raise failures[0]
