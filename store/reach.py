"""A folder that may go away, as disks do, and what is done to it: one at a time, on threads.

Whatever fails is counted, said once in the log, and answered as less being kept. A folder that is gone, or is another
one than it was, is away; who asks for it looks again, at most once in RETRY_S, and begins anew with what is there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple, Unpack

import trio

from store.disk_work import Folder, FolderGone, open_folder
from store.files import Files
from store.keeping import KeeperAway
from store.scan import Scan, scan
from store.troubles import Troubles

# How often a folder that is gone is looked for, and one that cannot be written to is tried again.
RETRY_S: Final = 1.0
RELOCK_S: Final = 60.0

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Reach:
    """begin: called whenever the folder has been opened, with what is in it."""

    def __init__(
        self, path: Path, writable: bool, files: Files, begin: Callable[[Folder, Scan], Awaitable[None]]
    ) -> None:
        self.troubles = Troubles()
        self._path = path
        self._writable = writable
        self._files = files
        self._begin = begin
        # None while it is away: then the one that was lost, as long as it is open, why, and when to look again.
        self._folder: Folder | None = None
        self._lost: Folder | None = None
        # The disk it was on when it was opened last.
        self._device: int | None = None
        self._away = ""
        self._retry_s = 0.0
        # Held by who changes the folder, so that what is to be deleted is not written again meanwhile.
        self._lock = trio.Lock()
        self._changes = trio.CapacityLimiter(1)
        self._reads = trio.CapacityLimiter(1)

    @property
    def folder(self) -> Folder | None:
        """None: it is away."""
        return self._folder

    async def opened(self) -> Folder:
        """To read from. Raises KeeperAway."""
        if self._folder is None:
            async with self.changing() as folder:
                return folder
        return self._folder

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[Folder]:
        """The folder, for the only one who changes it now; what was begun is finished. Raises KeeperAway."""
        async with self._lock:
            with trio.CancelScope(shield=True):
                refused = self._folder is not None and self._folder.refusal is not None
                if (self._folder is None or refused) and trio.current_time() >= self._retry_s:
                    await self._open_again()
                if self._folder is None:
                    raise KeeperAway(self._away)
                yield self._folder

    async def open(self) -> None:
        """Raises OSError."""
        folder = await self.change(open_folder, self._path, self._writable, self._device, self._files)
        try:
            found = await self.change(scan, self._path, self._files)
        except BaseException:
            folder.close(self._files)
            raise
        self._folder, self._device = folder, folder.device
        self.worked("reach")
        if folder.refusal is not None:
            self._retry_s = trio.current_time() + RELOCK_S
            self.failed(folder, "write to", folder.refusal)
        await self._begin(folder, found)

    def close(self) -> None:
        for folder in (self._folder, self._lost):
            if folder is not None:
                folder.close(self._files)
        self._folder = self._lost = None

    def lose(self, folder: Folder, error: FolderGone) -> None:
        """What has the folder open may go on with it; all others are told that it is away."""
        if self._folder is folder:
            self.troubles.note(f"reach {self._path}", error)
            self._folder, self._lost = None, folder
            self._away = str(error)

    def failed(self, folder: Folder, doing: str, error: OSError) -> None:
        """doing: "read from", say. Raises KeeperAway if it is the folder that is gone."""
        if isinstance(error, FolderGone):
            self.lose(folder, error)
            raise KeeperAway(str(error)) from error
        self.troubles.note(f"{doing} {self._path}", error)

    def worked(self, doing: str) -> None:
        self.troubles.over(f"{doing} {self._path}")

    async def change(self, job: Callable[[Unpack[Args]], T], *args: *Args) -> T:
        """In a thread, after all that was to be changed before."""
        return await trio.to_thread.run_sync(job, *args, limiter=self._changes)

    async def read(self, job: Callable[[Unpack[Args]], T], *args: *Args) -> T:
        """In a thread that waits for nobody who writes."""
        return await trio.to_thread.run_sync(job, *args, limiter=self._reads)

    async def _open_again(self) -> None:
        # One process cannot have the lock twice.
        self.close()
        try:
            await self.open()
        except OSError as error:
            self._away = why(self._path, error)
            self._retry_s = trio.current_time() + RETRY_S


def why(path: Path, error: OSError) -> str:
    """Why the folder cannot be opened, for a person."""
    if isinstance(error, BlockingIOError):
        return (
            f"another laned keeps {path}: choose another folder, or start with --store-read-only; "
            "several daemons share a folder through `laned store serve`"
        )
    return f"{path} cannot be used: {error.strerror or error}"
