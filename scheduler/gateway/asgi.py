"""What passes between Hypercorn and the app, and one request's part of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import trio

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# What is still to come of a body when its answer is ready is read for so long, and up to so much: a client that sends
# does not read, and would find the connection closed instead of the answer.
DISCARD_S = 5.0
DISCARD_BYTES = 64 << 20


class Gone(Exception):
    """The HTTP client has gone away: there is nobody to tell anything."""


class Exchange:
    """A request and its response. status: of the response, None before it has one. has_ended: whether it is whole."""

    def __init__(self, receive: Receive, send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """headers: that go with whatever is answered."""
        self._receive = receive
        self._send = send
        self._headers = list(headers)
        self._has_read_all = False
        self.status: int | None = None
        self.has_ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._has_read_all = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self._headers]}
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._send_last(message)
        else:
            await self._send(message)

    async def _send_last(self, message: Message) -> None:
        with trio.move_on_after(DISCARD_S):
            await self._discard(DISCARD_BYTES)
        self.has_ended = True
        # Hypercorn tells us of the disconnect that this is, and then closes the connection or readies it for the next
        # request: nobody who hears of it may stop it from that.
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                # It waits in its send for the body to be taken.
                nursery.start_soon(self._discard)
                await self._send(message)
                nursery.cancel_scope.cancel()

    async def _discard(self, most_bytes: float = float("inf")) -> None:
        num_bytes = 0
        while not self._has_read_all and num_bytes <= most_bytes:
            num_bytes += len((await self.receive()).get("body", b""))
