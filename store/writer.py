"""Writing behind: what was remembered goes to disk when nothing waits for the disk, one segment after the other.

The queue is bounded in bytes, since what waits in it is memory that cannot be given up. When it is full, the oldest
segment that nothing in it hangs on is dropped: it stays in memory as long as it would have, and is not on disk. One
that is larger than the queue is taken where nothing else waits. A segment is queued after what it hangs on, always, so
none is written whose parent is not there before it.

What was dropped and is in memory still is queued again when it has not been used for a time, and by who waits until all
is on disk; never in place of anything else.

Files are written here, on a thread of their own; the keeper makes them durable. A keeper that is away is waited for:
what it has promised is lost, and the segment is written anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from store.files import Files
from store.keeping import Keeper, KeeperAway, Kept
from store.memory import Entry, Memory
from store.names import segment_path
from store.reader import Precedence
from store.segment import Segment
from store.segment_file import read_stored, write_segment

logger = logging.getLogger(__name__)

# Between two of these a restore can come in: some 20 ms of a disk.
PIECE_BYTES: Final = 16 << 20
# A keeper that is away is asked again after so long, then twice as long, and so on.
RETRY_S: Final = 0.25
MAX_RETRY_S: Final = 5.0
# Each that is refused is an error, and more than three of them in 15 minutes an alert.
PROBE_EVERY_S: Final = 600.0
# Of the daemon's end, for what it leaves in the folder.
ABANDON_S: Final = 1.0


@dataclass
class WriterCounts:
    """written: bytes of tensors, of segments that were kept. dropped: segments that were to be written and were not,
    each once. errors: files that could not be written here; what the disk refuses the keeper is the keeper's count."""

    written_bytes: int = 0
    written_segments: int = 0
    dropped: int = 0
    errors: int = 0


class _Yielding(Files):
    """Lets restores go first."""

    def __init__(self, precedence: Precedence) -> None:
        self._precedence = precedence

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._precedence.wait_quiet()
        return super().write(fd, data[:PIECE_BYTES], offset)


class Writer:
    def __init__(self, memory: Memory, keeper: Keeper, precedence: Precedence, limit_bytes: int) -> None:
        self.counts = WriterCounts()
        self.num_bytes = 0
        self._memory = memory
        self._keeper = keeper
        self._files = _Yielding(precedence)
        self._limit_bytes = limit_bytes
        # In the order they came in, each after what it hangs on; the first may be in work.
        self._queue: dict[Entry, None] = {}
        self._in_work: Entry | None = None
        # Whose parent was found to be gone, and is written once more before them.
        self._orphans: set[Entry] = set()
        self._away: KeeperAway | None = None
        self._is_failing = False
        # Whether anything was dropped since anything was written.
        self._has_dropped = False
        self._probe_s = 0.0
        self._one = trio.CapacityLimiter(1)
        self._changed = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, entry: Entry) -> None:
        """Queue an entry that is in memory, and before it what it hangs on and is neither queued nor on disk.

        Never waits. What finds no room is dropped and counted."""
        for link in self._memory.chain(entry):
            if link.kept is None and link not in self._queue and not self._append(link):
                self._count_dropped(entry)
                self._orphans.discard(entry)
                self._memory.unqueue(entry)
                self._changed.unpark_all()
                return

    def put_again(self, entries: Sequence[Entry]) -> None:
        """Queue what was dropped and is in memory still, as far as there is room for it now. Where nothing was written
        since, the smallest alone, to find out, and not more often than once in PROBE_EVERY_S."""
        now_s = trio.current_time()
        if self._away is not None or (self._has_dropped and now_s < self._probe_s):
            return
        if self._has_dropped:
            self._probe_s = now_s + PROBE_EVERY_S
            entries = sorted(entries, key=self._needed_bytes)[:1]
        for entry in entries:
            if entry.kept is None and not entry.queued and self._has_room(entry):
                self.put(entry)

    def _has_room(self, entry: Entry) -> bool:
        """Whether it can be queued and nothing be dropped for it."""
        return not self._queue or self.num_bytes + self._needed_bytes(entry) <= self._limit_bytes

    def _needed_bytes(self, entry: Entry) -> int:
        """Of the queue, for it and what it hangs on and is neither queued nor on disk."""
        return sum(link.nbytes for link in self._memory.chain(entry) if link.kept is None and not link.queued)

    def _append(self, entry: Entry) -> bool:
        num_bytes = entry.nbytes
        if entry.buffers is None or not self._make_room(num_bytes, entry):
            return False
        entry.queued = True
        self._queue[entry] = None
        self.num_bytes += num_bytes
        self._changed.unpark_all()
        return True

    def _make_room(self, num_bytes: int, coming: Entry) -> bool:
        """What is larger than the queue is taken where nothing else waits: rather that than never."""
        if num_bytes > self._limit_bytes:
            return not self._queue
        while self.num_bytes + num_bytes > self._limit_bytes:
            needed = {entry.segment.parent for entry in (*self._queue, coming)}
            droppable = (e for e in self._queue if e is not self._in_work and e.segment.id not in needed)
            oldest = next(droppable, None)
            if oldest is None:
                return False
            self._drop(oldest)
        return True

    def _drop(self, entry: Entry) -> None:
        self._count_dropped(entry)
        self._remove(entry)

    def _count_dropped(self, entry: Entry) -> None:
        self.counts.dropped += not entry.dropped
        entry.dropped = self._has_dropped = True

    def _remove(self, entry: Entry) -> None:
        del self._queue[entry]
        self._orphans.discard(entry)
        self.num_bytes -= entry.nbytes
        self._memory.unqueue(entry)
        self._changed.unpark_all()

    async def wait_written(self) -> None:
        """Return when all that is queued now has been written, or dropped. Raises KeeperAway if that has to wait."""
        waiting = set(self._queue)
        while not waiting.isdisjoint(self._queue):
            await self._wait_changed()

    async def write_all(self) -> bool:
        """Wait for what is queued now, then write what memory has and the disk has not, the latest used first, until
        some is refused. Returns whether all of it is on disk, and nothing was dropped since anything was written.
        Raises KeeperAway if it has to wait."""
        asked = list(self._queue)
        await self.wait_written()
        again = list(reversed(self._memory.unwritten()))
        for entry in again:
            if entry in self._memory:
                await self._write_again(entry)
                if entry.kept is None and self._has_dropped:
                    return False
        return not self._has_dropped and all(entry.kept is not None for entry in (*asked, *again))

    async def _write_again(self, entry: Entry) -> None:
        """Return when it has been written, or dropped. Raises KeeperAway if that has to wait."""
        while entry in self._memory and entry.kept is None and not entry.queued:
            if self._has_room(entry):
                self.put(entry)
            else:
                await self._wait_changed()
        while entry in self._queue:
            await self._wait_changed()

    async def _wait_changed(self) -> None:
        if self._away is not None:
            raise KeeperAway(f"what was remembered lately is not on disk: {self._away}")
        await self._changed.park()

    async def run(self) -> None:
        """Write what is queued, until cancelled."""
        retry_s = RETRY_S
        while True:
            self._in_work = next(iter(self._queue), None)
            if self._in_work is None:
                await self._changed.park()
                continue
            try:
                await self._write(self._in_work)
                self._away, retry_s = None, RETRY_S
            except KeeperAway as away:
                self._in_work, self._away = None, away
                self._changed.unpark_all()
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _write(self, entry: Entry) -> None:
        """One segment, from the queue to the disk. Raises KeeperAway, and it is still queued."""
        # Should it vanish while it is written, its bytes are still whole.
        buffers = entry.buffers
        if entry not in self._memory or buffers is None:
            self._drop(entry)
            return
        temporary = await self._keeper.reserve(entry.nbytes)
        if temporary is None:
            self._drop(entry)
            return
        try:
            offsets = await trio.to_thread.run_sync(
                _write_file, self._files, temporary, entry.segment, buffers, limiter=self._one
            )
            # The file is whole. A writer that is to end does so here, and leaves nothing behind.
            await trio.lowlevel.checkpoint_if_cancelled()
        except OSError as error:
            # If the keeper is away, this is why, and it is written anew.
            await self._keeper.abandon(temporary)
            self.counts.errors += 1
            self._fail(entry, str(error))
            return
        except trio.Cancelled:
            with trio.move_on_after(ABANDON_S, shield=True), suppress(KeeperAway):
                await self._keeper.abandon(temporary)
            raise
        outcome = await self._keeper.commit(temporary)
        match outcome:
            case "kept" | "known":
                entry.kept = Kept(entry.segment, segment_path(self._keeper.folder, entry.segment.id), offsets)
                if outcome == "kept":
                    self.counts.written_bytes += entry.nbytes
                    self.counts.written_segments += 1
                entry.dropped = False
                self._remove(entry)
                self._is_failing = self._has_dropped = False
            case "orphan":
                self._adopt(entry)
            case "bad":
                self.counts.errors += 1
                self._fail(entry, "the store says bad")
            case "full" | "failed":
                self._fail(entry, f"the store says {outcome}")

    def _fail(self, entry: Entry, why: str) -> None:
        """The first time is told; a disk that stays full is not told again for each segment."""
        if not self._is_failing:
            logger.warning("segment %s could not be written: %s", entry.segment.id, why)
        self._is_failing = True
        self._drop(entry)

    def _adopt(self, entry: Entry) -> None:
        """What it hangs on is not on disk any more. Both are written, once, if memory has both."""
        tried = entry in self._orphans
        if entry not in self._memory:
            self._drop(entry)
            return
        for parent in self._memory.chain(entry)[-2:-1]:
            self._memory.lost(parent)
        if tried or entry not in self._memory:
            self._drop(entry)
            return
        del self._queue[entry]
        self.num_bytes -= entry.nbytes
        self._in_work = None
        self._orphans.add(entry)
        self.put(entry)


def _write_file(files: Files, path: Path, segment: Segment, buffers: tuple[memoryview, ...]) -> tuple[int, ...]:
    """Where each tensor is in the file. Raises OSError."""
    file = files.open(path, writable=True)
    try:
        write_segment(file, segment, buffers, files)
        return read_stored(file, files).places
    finally:
        files.close(file)
