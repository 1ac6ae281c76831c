"""Opens what the daemon remembers with, as the options say: memory, a folder, another process that keeps the folder."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from lanes.lane import ModelInfo
from scheduler.options import Options
from scheduler.remembering import Remembering
from scheduler.usage import UsageError
from store.keeper import FolderUnavailable, KeeperSettings, LocalKeeper, open_keeper
from store.keeping import Keeper
from store.remote import open_remote
from store.settings import StoreSettings
from store.store import open_store

logger = logging.getLogger(__name__)

# Of the memory that it is kept in, for what was processed before; the rows that run need more.
MEMORY_SHARE = 10


def memory_bytes(options: Options, info: ModelInfo) -> int:
    """What may stay in memory of what was processed before."""
    if info.remembers == "nothing":
        return 0
    if options.prompt_cache_bytes is not None:
        return options.prompt_cache_bytes
    return (info.host_memory_bytes or info.memory_bytes) // MEMORY_SHARE


def store_folder(name: str) -> Path:
    return Path(name).expanduser()


@asynccontextmanager
async def open_folder(options: Options) -> AsyncIterator[LocalKeeper | None]:
    """The keeper of --store. Raises UsageError where the folder is of no use, before a model is loaded for it."""
    if options.store is None:
        yield None
        return
    if options.store_socket is not None:
        raise UsageError("--store and --store-socket exclude each other: the folder is kept here, or elsewhere")
    settings = KeeperSettings(
        folder=store_folder(options.store),
        max_bytes=options.store_max,
        min_free_bytes=options.store_min_free,
        read_only=options.store_read_only,
    )
    async with AsyncExitStack() as stack:
        try:
            keeper = await stack.enter_async_context(open_keeper(settings))
        except FolderUnavailable as unavailable:
            raise UsageError(f"--store: {unavailable}") from None
        yield keeper


@asynccontextmanager
async def open_remembering(
    options: Options, info: ModelInfo, fingerprint: str, folder: LocalKeeper | None
) -> AsyncIterator[Remembering | None]:
    """What a model's rows are remembered with; None where nothing is."""
    if info.remembers == "nothing":
        logger.info("nothing is remembered of prompts: their caches are of no known kind")
        yield None
        return
    async with AsyncExitStack() as stack:
        keeper: Keeper | None = folder
        if folder is not None:
            folder.use(fingerprint)
        elif options.store_socket is not None:
            keeper = await stack.enter_async_context(open_remote(Path(options.store_socket), fingerprint))
        settings = StoreSettings(
            fingerprint,
            memory_bytes(options, info),
            options.store_queue_bytes,
            options.demote_idle,
            options.store_verify,
            cut_anywhere=info.remembers == "anywhere",
            # auto is read until somebody has measured mapping where MLX adopts what is mapped.
            maps=options.restore == "map",
            read_only=options.store_read_only,
        )
        if not settings.memory_bytes and keeper is None:
            yield None
            return
        store = await stack.enter_async_context(open_store(settings, keeper))
        token_bytes = info.geometry.column_bytes if info.geometry else 0
        yield Remembering(store, settings.cut_anywhere, token_bytes)
