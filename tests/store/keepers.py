"""A keeper of either kind for a test: in this process, or behind a socket."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from store.keeper import KeeperSettings, LocalKeeper, open_keeper
from store.keeping import Keeper
from store.remote import open_remote
from store.server import serve_client
from store.settings import StoreSettings
from store.store import Store, open_store

FINGERPRINT = "model-1"


@asynccontextmanager
async def serving(keeper: Keeper, socket: Path) -> AsyncIterator[None]:
    """The keeper behind a socket at this path, until the block is left, as if its process had ended then."""
    with trio.socket.socket(trio.socket.AF_UNIX) as sock:
        await sock.bind(str(socket))
        sock.listen()
        greet = keeper.use if isinstance(keeper, LocalKeeper) else lambda fingerprint: None
        try:
            async with trio.open_nursery() as nursery:
                serve = partial(serve_client, keeper=keeper, greet=greet)
                nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(sock)])
                yield
                nursery.cancel_scope.cancel()
        finally:
            os.unlink(socket)


@asynccontextmanager
async def local(folder: Path, max_bytes: int | None = None) -> AsyncIterator[LocalKeeper]:
    fingerprints = frozenset([FINGERPRINT])
    async with open_keeper(KeeperSettings(folder, max_bytes, fingerprints=fingerprints, scrub_every_s=None)) as keeper:
        yield keeper
        keeper.check()


@asynccontextmanager
async def keeper_of(kind: str, folder: Path, max_bytes: int | None = None) -> AsyncIterator[Keeper]:
    """kind: "embedded" or "remote"."""
    async with local(folder, max_bytes) as keeper:
        if kind == "embedded":
            yield keeper
            return
        socket = folder.with_suffix(".sock")
        async with serving(keeper, socket), open_remote(socket, FINGERPRINT) as remote:
            yield remote


@asynccontextmanager
async def daemon(socket: Path, fingerprint: str = FINGERPRINT, memory_bytes: int = 0) -> AsyncIterator[Store]:
    settings = StoreSettings(fingerprint, memory_bytes, queue_bytes=1 << 20)
    async with open_remote(socket, fingerprint) as keeper, open_store(settings, keeper) as store:
        yield store
        store.check()


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[LocalKeeper, Path]]:
    async with local(tmp_path / "store") as keeper, serving(keeper, tmp_path / "s"):
        yield keeper, tmp_path / "s"
