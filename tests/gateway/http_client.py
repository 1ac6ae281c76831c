"""A client of HTTP/1.1 that does as it is told, also what no library would do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import h11
import trio


class Exchange:
    """A request that was sent, and its response as it comes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        head = [*{"Host": "127.0.0.1", **headers}.items()]
        if body and "content-length" not in map(str.lower, headers):
            head.append(("Content-Length", str(len(body))))
        events: list[Any] = [h11.Request(method=method, target=target, headers=head)]
        if body:
            events.append(h11.Data(data=body))
        data = b"".join(self._h11.send(event) or b"" for event in events)
        await self.stream.send_all(data)

    async def finish(self) -> None:
        await self.stream.send_all(self._h11.send(h11.EndOfMessage()) or b"")

    async def head(self) -> int:
        """Wait for the response's head; returns the status."""
        event = await self._next()
        assert isinstance(event, h11.Response), event
        self.status = event.status_code
        self.headers = {name.decode(): value.decode() for name, value in event.headers}
        return self.status

    async def pieces(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _next(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self.stream.receive_some(65536))
        return event


@asynccontextmanager
async def asking(
    url: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Exchange]:
    """A request on a connection of its own. body: bytes as they are, anything else as JSON."""
    at = urlsplit(url)
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    typed = {"Content-Type": "application/json", **(headers or {})} if data else headers or {}
    async with await trio.open_tcp_stream(at.hostname or "", at.port or 0) as stream:
        exchange = Exchange(stream)
        await exchange.send(method, path, {name: value for name, value in typed.items() if value}, data)
        await exchange.finish()
        yield exchange


async def call(
    url: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a response."""
    async with asking(url, method, path, body, headers) as exchange:
        status = await exchange.head()
        return status, exchange.headers, await exchange.body()


async def post(url: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """(status, parsed body) of a response."""
    status, _, said = await call(url, "POST", path, body, headers)
    return status, json.loads(said)
