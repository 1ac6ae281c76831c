"""Keeps segments in a folder: which are there, which go, what a disk that fails does.

The folder is the truth. The index is made of headers when it is opened; what is in the index is durable on disk, and
was whole when it came there. All decisions are taken on Trio's thread, and what was decided is true at once; threads
only work on files (store/disk_work.py), and what only reads never waits there for a sync.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

import trio

from store import disk_work
from store.budget import Budget, Entry
from store.disk_work import Folder, FolderGone, Unreadable
from store.files import FILES, Files
from store.format import CorruptSegment
from store.keeping import Chain, KeeperAway, KeeperStats, Kept, Outcome
from store.names import is_temporary, segment_path
from store.reach import Reach, why
from store.scan import Scan
from store.shelf import Shelf
from store.troubles import is_full

logger = logging.getLogger(__name__)

# How often uses are noted on disk: a crash forgets as much of who was used last.
ROUND_S: Final = 5.0


class FolderUnavailable(Exception):
    """The folder cannot be used, and the message says why."""


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """max_bytes: of all files under the folder; None: no limit. min_free_bytes: what the disk has left afterwards.
    fingerprints: of the models in use; what belongs to others goes first. read_only: nothing in the folder is changed.
    scrub_every_s: how often one file is checked in full; None: never."""

    folder: Path
    max_bytes: int | None = None
    min_free_bytes: int = 0
    fingerprints: frozenset[str] = frozenset()
    read_only: bool = False
    scrub_every_s: float | None = 60.0


@asynccontextmanager
async def open_keeper(settings: KeeperSettings, files: Files = FILES) -> AsyncIterator[LocalKeeper]:
    """The keeper of a folder, which is made where it is not there, for as long as the block lasts.

    Raises FolderUnavailable if another keeper has it, or it cannot be opened at all."""
    keeper = LocalKeeper(settings, files)
    try:
        await keeper._reach.open()
    except OSError as error:
        raise FolderUnavailable(why(settings.folder, error)) from error
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper._run)
            try:
                yield keeper
            finally:
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await keeper._note_uses()
        keeper._reach.close()


class LocalKeeper:
    """See open_keeper() and store.keeping.Keeper."""

    def __init__(self, settings: KeeperSettings, files: Files) -> None:
        self._settings = settings = replace(settings, folder=settings.folder.absolute())
        self._files = files
        self._fingerprints = settings.fingerprints
        self._pin_numbers = count(1)
        self._shelf = Shelf(settings.folder, Budget(None, 0), self._pin_numbers)
        self._reach = Reach(settings.folder, not settings.read_only, files, self._begin)
        self._num_evicted = 0
        self._num_corrupt = 0
        # Whether nobody asked for anything since the last round of housekeeping, and what the next ones check.
        self._is_idle = True
        self._unchecked: list[Entry] = []

    @property
    def folder(self) -> Path:
        return self._settings.folder

    def use(self, fingerprint: str) -> None:
        """What belongs to this model is not foreign from now on."""
        self._fingerprints |= {fingerprint}
        self._shelf.budget.use(fingerprint)

    async def find(self, root: str, tokens: Sequence[int], limit: int) -> Chain:
        self._is_idle = False
        while True:
            folder = await self._reach.opened()
            shelf = self._shelf
            match, chain = shelf.find(root, tokens, limit)
            if not chain:
                return Chain(0, match.matched, 0, ())
            with shelf.using(chain):
                try:
                    kept = await self._headers(chain, folder)
                except Unreadable as found:
                    unreadable = found
                except OSError as error:
                    self._reach.failed(folder, "read from", error)
                    return Chain(0, 0, 0, ())
                else:
                    # One of them may have been condemned meanwhile, or all be away.
                    if all(self._shelf.get(entry.segment.id) is entry for entry in chain):
                        return Chain(shelf.pin(chain), match.matched, match.tokens, kept)
                    continue
            await self._condemn(unreadable)

    async def release(self, pin: int) -> None:
        self._shelf.unpin(pin)

    async def condemn(self, id_: str) -> None:
        folder = await self._reach.opened()
        entry = self._shelf.get(id_)
        if entry is None:
            return
        try:
            await self._verify(entry, folder)
        except Unreadable as unreadable:
            await self._condemn(unreadable)
            return
        except OSError as error:
            self._reach.failed(folder, "read from", error)
        else:
            logger.info("segment %s is whole, and of no use to a reader: it is dropped", id_)
        await self.remove(id_)

    async def remove(self, id_: str) -> int:
        """Delete a segment and what hangs on it, used or not; returns how many there were. Raises KeeperAway."""
        async with self._reach.changing() as folder:
            return await self._drop(id_, folder)

    async def reserve(self, nbytes: int) -> Path | None:
        self._is_idle = False
        async with self._reach.changing() as folder:
            if folder.lock is None:
                return None
            budget = self._shelf.budget
            try:
                free_bytes = await self._reach.change(disk_work.free_bytes, folder, self._files)
                await self._make_room(budget.lacking_bytes(nbytes, free_bytes), folder)
                temporary = await self._reach.change(disk_work.make_temporary, folder, self._files)
            except OSError as error:
                self._reach.failed(folder, "write to", error)
                return None
            budget.reserved[temporary] = nbytes
            return temporary

    async def commit(self, temporary: Path) -> Outcome:
        self._is_idle = False
        async with self._reach.changing() as folder:
            if folder.lock is None or not self._is_temporary(temporary):
                return "failed"
            self._shelf.budget.reserved.pop(temporary, None)
            try:
                outcome = await self._keep(temporary, folder)
            except CorruptSegment as error:
                logger.warning("%s is not kept: %s", temporary, error)
                outcome = "bad"
            except OSError as error:
                self._reach.failed(folder, "write to", error)
                outcome = "full" if is_full(error) else "failed"
            if outcome != "kept":
                await self._delete([(temporary, 0)], folder)
            return outcome

    async def abandon(self, temporary: Path) -> None:
        async with self._reach.changing() as folder:
            if folder.lock is not None and self._is_temporary(temporary):
                self._shelf.budget.reserved.pop(temporary, None)
                await self._delete([(temporary, 0)], folder)

    async def flush(self) -> None:
        # A commit that has returned is durable.
        async with self._reach.changing():
            pass

    async def stat(self) -> KeeperStats:
        folder = await self._reach.opened()
        free_bytes = 0
        try:
            free_bytes = await self._reach.read(disk_work.free_bytes, folder, self._files)
        except OSError as error:
            self._reach.failed(folder, "look at", error)
        budget = self._shelf.budget
        return KeeperStats(
            bytes=budget.our_bytes,
            segments=len(self._shelf),
            foreign_bytes=budget.foreign_bytes,
            free_bytes=free_bytes,
            evicted=self._num_evicted,
            corrupt=self._num_corrupt,
            errors=self._reach.troubles.num,
        )

    def check(self) -> None:
        self._shelf.check()

    async def _headers(self, chain: Sequence[Entry], folder: Folder) -> tuple[Kept, ...]:
        """Raises Unreadable, OSError."""
        shelf = self._shelf
        found = {entry.segment.id: shelf.recent(entry) for entry in chain}
        missing = [(entry.segment.id, entry.path) for entry in chain if found[entry.segment.id] is None]
        if missing:
            read = await self._reach.read(disk_work.read_all, missing, folder, self._files)
            self._reach.worked("read from")
            for kept in read:
                shelf.remember(kept)
                found[kept.segment.id] = kept
        return tuple(kept for kept in found.values() if kept is not None)

    async def _keep(self, temporary: Path, folder: Folder) -> Outcome:
        """Raises CorruptSegment, OSError."""
        shelf = self._shelf
        stored, nbytes = await self._reach.change(disk_work.examine, temporary, folder, self._files)
        segment = stored.segment
        known = shelf.get(segment.id)
        if known is not None:
            if await self._reach.change(disk_work.is_there, known.path, self._files):
                shelf.touch(known)
                return "known"
            await self._drop(segment.id, folder)
        if not shelf.accepts(segment):
            return "orphan"
        path = segment_path(self.folder, segment.id)
        with shelf.using(shelf.chain_of(segment)):
            await self._make_room(shelf.budget.over_bytes(nbytes), folder)
            try:
                nbytes = await self._reach.change(disk_work.publish, temporary, path, folder, self._files)
            except OSError:
                await self._delete([(path, 0)], folder)
                raise
        if self._reach.folder is not folder:
            return "failed"
        shelf.insert(replace(segment, tensors=()), Kept(segment, path, stored.places), nbytes)
        self._reach.worked("write to")
        return "kept"

    async def _drop(self, id_: str, folder: Folder) -> int:
        """A segment and what hangs on it; returns how many there were."""
        dropped = self._shelf.drop_with_all(id_)
        if folder.lock is not None:
            await self._delete([(entry.path, entry.nbytes) for entry in dropped], folder)
        return len(dropped)

    async def _condemn(self, unreadable: Unreadable) -> None:
        if await self.remove(unreadable.id) and isinstance(unreadable.cause, CorruptSegment):
            self._num_corrupt += 1
            logger.warning("segment %s is dropped, and all that hangs on it: %s", unreadable.id, unreadable.cause)

    async def _make_room(self, lacking_bytes: int, folder: Folder) -> None:
        """Raises OSError if not so much may go; nothing goes then."""
        going = self._shelf.make_room(lacking_bytes)
        if going is None:
            raise OSError(errno.ENOSPC, f"{lacking_bytes} bytes are lacking, and not so much may be deleted")
        self._num_evicted += len(going)
        await self._delete(going, folder)

    async def _delete(self, going: Sequence[tuple[Path, int]], folder: Folder) -> None:
        """What cannot be deleted still counts, as bytes that nobody owns."""
        sizes = dict(going)
        if not sizes:
            return
        try:
            left = await self._reach.change(disk_work.delete, list(sizes), folder, self._files)
        except FolderGone as error:
            self._reach.lose(folder, error)
            return
        for path, refusal in left:
            self._reach.failed(folder, "delete from", refusal)
            self._shelf.budget.other_bytes += sizes[path]
        if not left:
            self._reach.worked("delete from")

    def _is_temporary(self, path: Path) -> bool:
        return path.parent == self.folder and is_temporary(path.name)

    async def _begin(self, folder: Folder, found: Scan) -> None:
        """The folder has been opened, for the first time or again."""
        settings = self._settings
        budget = Budget(settings.max_bytes, settings.min_free_bytes, self._fingerprints)
        self._shelf = Shelf(settings.folder, budget, self._pin_numbers)
        orphans = self._shelf.load(found)
        self._num_corrupt += len(found.corrupt)
        if folder.lock is not None:
            reaped = [*found.temporaries, *found.corrupt, *orphans]
            await self._delete([(file.path, file.nbytes) for file in reaped], folder)
            over_bytes = budget.over_bytes()
            await self._make_room(min(over_bytes, budget.going(over_bytes)[1]), folder)
        logger.info("%s holds %d segments, %d bytes", self.folder, len(self._shelf), budget.our_bytes)

    async def _run(self) -> None:
        last_check_s = trio.current_time()
        while True:
            await trio.sleep(ROUND_S)
            await self._note_uses()
            every_s = self._settings.scrub_every_s
            if self._is_idle and every_s is not None and trio.current_time() >= last_check_s + every_s:
                last_check_s = trio.current_time()
                await self._check_one()
            self._is_idle = True

    async def _note_uses(self) -> None:
        used, self._shelf.touched = list(self._shelf.touched), {}
        if used and self._reach.folder is not None and self._reach.folder.lock is not None:
            await self._reach.change(disk_work.touch, used, time.time_ns(), self._files)

    async def _check_one(self) -> None:
        """Check a file in full, each in its turn. What is found damaged is dropped."""
        if not self._unchecked:
            self._unchecked = list(self._shelf.entries())
        while self._unchecked and self._reach.folder is not None:
            entry = self._unchecked.pop()
            if self._shelf.get(entry.segment.id) is not entry:
                continue
            folder = self._reach.folder
            try:
                await self._verify(entry, folder)
            except Unreadable as unreadable:
                with suppress(KeeperAway):
                    await self._condemn(unreadable)
            except OSError as error:
                with suppress(KeeperAway):
                    self._reach.failed(folder, "read from", error)
            return

    async def _verify(self, entry: Entry, folder: Folder) -> None:
        """Read all of a file; nobody else who reads or writes waits for that. Raises Unreadable, OSError."""
        await trio.to_thread.run_sync(
            disk_work.check_all, entry.segment.id, entry.path, folder, self._files, abandon_on_cancel=True
        )
