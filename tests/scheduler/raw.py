"""A client that speaks in bytes, as no library of ours would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from store.framing import FrameDecoder, encode_frame

HELLO = {"type": "hello", "version": 1}


def submit(id: Any, prompt: str, **options: Any) -> dict[str, Any]:
    return {"type": "submit", "id": id, "prompt": prompt} | options


class Raw:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder()

    async def send(self, *messages: dict[str, Any]) -> None:
        await self.stream.send_all(b"".join(map(encode_frame, messages)))

    async def next(self) -> dict[str, Any] | None:
        """The next message of the daemon; None at the end of the stream."""
        while True:
            for message in self._decoder:
                return message
            try:
                data = await self.stream.receive_some(4096)
            except trio.BrokenResourceError:
                # What a close looks like to one who has sent what was not read.
                return None
            if not data:
                self._decoder.end()
                return None
            self._decoder.feed(data)

    async def rest(self) -> list[dict[str, Any]]:
        """All messages up to the end of the stream."""
        messages = []
        while (message := await self.next()) is not None:
            messages.append(message)
        return messages

    async def until(self, kind: str) -> dict[str, Any]:
        """The next message of this type, those before it dropped."""
        while (message := await self.next()) is not None:
            if message["type"] == kind:
                return message
        raise AssertionError(f"the stream ended without {kind}")


@asynccontextmanager
async def connected(path: Path, hello: bool = True) -> AsyncIterator[Raw]:
    async with await trio.open_unix_socket(str(path)) as stream:
        raw = Raw(stream)
        if hello:
            await raw.send(HELLO)
            assert (await raw.next() or {})["type"] == "hello"
        yield raw
