"""The gateway in this process, with Hypercorn, in front of the service that echoes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio

from scheduler.gateway.server import serve_http
from scheduler.gateway.settings import Settings
from tests.scheduler import echo

CHAT = "/v1/chat/completions"


def chat(words: str, **fields: object) -> dict[str, object]:
    """The body of a chat that echoes these words."""
    return {"messages": [{"role": "user", "content": words}], **fields}


@asynccontextmanager
async def gateway_at(socket: Path, settings: Settings | None = None) -> AsyncIterator[str]:
    """Its URL. On leaving it has to end, whatever its clients do."""
    settings = replace(settings or Settings(drain_s=1.0), socket=str(socket), port=0)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_http, settings, stop)
        yield url
        stop.set()


@asynccontextmanager
async def echoing(folder: Path, settings: Settings | None = None) -> AsyncIterator[tuple[str, echo.Daemon]]:
    """A gateway, and the daemon behind it."""
    path = folder / "d.sock"
    async with echo.serving(path) as daemon, gateway_at(path, settings) as url:
        yield url, daemon
