"""The daemon behind the gateway: a connection for each request, and one that watches.

A connection for each request, because they cost little, and so no request waits behind another one's long prompt or big
grammar, and a client that is gone is a closed socket, which the daemon notices at once. A daemon that comes back needs
nothing either: the next request finds it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from scheduler.client import Client, ClientError, ConnectionLost

logger = logging.getLogger(__name__)

# A daemon whose socket was opened by the service manager accepts while it loads, and says hello after that.
HELLO_S = 3.0
# How often a daemon that is there is asked whether it still is, and one that is not, whether it is back.
WATCH_S = 1.0
# A daemon that has not answered for so long hangs; a prompt's tokenization takes a small part of it.
SILENT_S = 30.0


class Daemon:
    """away: why there is no daemon, None where there is one. model: its name, once known."""

    def __init__(self, path: Path | str | None) -> None:
        """path: of its socket; None is the default."""
        self._path = path
        self.away: str | None = "the gateway has not reached the daemon yet"
        self.model: str | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """Raises ConnectionLost where no daemon is."""
        async with Client(self._path, name="gateway", wait_s=HELLO_S) as client:
            self.away, self.model = None, client.hello.model
            yield client

    async def watch(self) -> None:
        """Know at any time whether the daemon is there. Runs until it is cancelled."""
        while True:
            try:
                async with self.connect() as client:
                    logger.info("the daemon serves %s", self.model)
                    await self._listen(client)
            except ClientError as error:
                if self.away != str(error):
                    logger.warning("%s", error)
                self.away = str(error)
            await trio.sleep(WATCH_S)

    async def _listen(self, client: Client) -> None:
        while True:
            with trio.move_on_after(SILENT_S) as patience:
                await client.ping()
            if patience.cancelled_caught:
                raise ConnectionLost(f"the daemon has not answered for {SILENT_S:g} s")
            self.away = None
            await trio.sleep(WATCH_S)
