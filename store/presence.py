"""A keeper watched: whether it is there is said in the log once each time it changes, and known to who asks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from store.keeping import Chain, Keeper, KeeperAway, KeeperStats, Outcome

logger = logging.getLogger(__name__)


class Presence:
    """A keeper, as store.keeping.Keeper has it, before another. last: its latest figures."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.away = False
        self.last = KeeperStats()

    @property
    def folder(self) -> Path:
        return self._keeper.folder

    async def find(self, root: str, tokens: Sequence[int], limit: int) -> Chain:
        async with self._watched():
            return await self._keeper.find(root, tokens, limit)

    async def release(self, pin: int) -> None:
        async with self._watched():
            await self._keeper.release(pin)

    async def condemn(self, id_: str) -> None:
        async with self._watched():
            await self._keeper.condemn(id_)

    async def reserve(self, nbytes: int) -> Path | None:
        async with self._watched():
            return await self._keeper.reserve(nbytes)

    async def commit(self, temporary: Path) -> Outcome:
        async with self._watched():
            return await self._keeper.commit(temporary)

    async def abandon(self, temporary: Path) -> None:
        async with self._watched():
            await self._keeper.abandon(temporary)

    async def flush(self) -> None:
        async with self._watched():
            await self._keeper.flush()

    async def stat(self) -> KeeperStats:
        async with self._watched():
            self.last = await self._keeper.stat()
            return self.last

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        try:
            yield
        except KeeperAway as error:
            if not self.away:
                logger.warning("the store is away, requests are served without it: %s", error)
            self._set(True)
            raise
        if self.away:
            logger.info("the store is back")
        self._set(False)

    def _set(self, away: bool) -> None:
        self.away = away
        self.last = replace(self.last, away=away)
