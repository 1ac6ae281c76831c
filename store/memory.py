"""What the daemon knows of kept segments, and those of them that it has in memory.

An entry is in memory, on disk, or both. In memory it is either resident (counted against the limit, least recently used
first to go) or waits to be written, or both: its bytes stay until neither holds. An entry that is on disk only stays as
long as somebody uses it or another hangs on it, so that this is no second index of the disk. One that is in neither
place vanishes, with what hangs on it.

Use touches a chain leaf before root: no segment is then less recent than one that hangs on it, and suffixes go before
prefixes by themselves. Bytes of an entry never change and are never copied: a reader holds on to the buffers it reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import inf

from store.keeping import Kept
from store.prefixes import Match, PrefixIndex
from store.segment import Segment


class Entry:
    """A segment and where it is. buffers: its tensors' bytes, None while they are not in memory. kept: its file, None
    while it is not on disk. pins: how many use it now. queued: it waits to be written. dropped: it was to be written
    and was not."""

    __slots__ = ("buffers", "dropped", "kept", "nbytes", "pins", "queued", "segment", "used_s")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.nbytes = segment.nbytes
        self.buffers: tuple[memoryview, ...] | None = None
        self.kept: Kept | None = None
        self.pins = 0
        self.queued = False
        self.dropped = False
        self.used_s = 0.0


class Memory:
    """The index of all entries, and the bytes of the resident ones: at most limit_bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self.num_given_up = 0  # vanished for lack of room and were never on disk
        self._index: PrefixIndex[Entry] = PrefixIndex()
        # By id, least recently used first.
        self._resident: OrderedDict[str, Entry] = OrderedDict()

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, entry: Entry) -> bool:
        """Whether it has not vanished."""
        return self._index.get(entry.segment.id) is entry

    def match(self, root: str, tokens: Sequence[int], limit: int) -> Match[Entry]:
        return self._index.match(root, tokens, limit)

    def chain(self, entry: Entry) -> tuple[Entry, ...]:
        """The entry and all it hangs on, root first."""
        return self._index.chain(entry)

    def touch(self, chain: Sequence[Entry], now_s: float) -> None:
        for entry in reversed(chain):
            entry.used_s = now_s
            if entry.segment.id in self._resident:
                self._resident.move_to_end(entry.segment.id)

    def pin(self, chain: Iterable[Entry]) -> None:
        """Nothing of it leaves memory, or the index, before it is unpinned."""
        for entry in chain:
            entry.pins += 1

    def unpin(self, chain: Sequence[Entry]) -> None:
        for entry in reversed(chain):
            assert entry.pins > 0, f"segment {entry.segment.id} is unpinned once too often"
            entry.pins -= 1
            self._settle(entry)

    def put(self, segment: Segment, buffers: tuple[memoryview, ...], queued: bool, now_s: float) -> Entry | None:
        """A new entry, whose parent is there: resident if it fits, others being evicted for it first. None where it is
        neither resident nor queued."""
        entry = Entry(segment)
        fits = self._make_room(entry.nbytes)
        if not (fits or queued):
            return None
        entry.buffers = buffers
        entry.queued = queued
        self._index.insert(entry)
        if fits:
            self._resident[segment.id] = entry
            self.num_bytes += entry.nbytes
        self.touch(self.chain(entry), now_s)
        return entry

    def enter(self, kept: Kept) -> Entry | None:
        """The entry of a segment that is on disk, made if there is none. None if its parent is not here."""
        entry = self._index.get(kept.segment.id)
        if entry is None:
            if not self._index.accepts(kept.segment):
                return None
            entry = Entry(kept.segment)
            self._index.insert(entry)
        entry.kept = kept
        return entry

    def lost(self, entry: Entry) -> None:
        """Its file is gone, or no good."""
        entry.kept = None
        if entry.buffers is None:
            self.forget(entry)

    def unqueue(self, entry: Entry) -> None:
        """It does not wait to be written any more: it has been (and kept is set), or will not be."""
        entry.queued = False
        self._settle(entry)

    def demote(self, before_s: float) -> None:
        """What is on disk too and was last used before that time leaves memory."""
        for entry in list(self._resident.values()):
            if entry.used_s >= before_s:
                return
            if entry.kept is not None and not entry.pins:
                self._evict(entry)

    def unwritten(self, before_s: float = inf) -> list[Entry]:
        """What is in memory, neither on disk nor queued, and was last used before that time; the longest ago first."""
        return [
            entry
            for entry in self._resident.values()
            if entry.used_s < before_s and entry.kept is None and not entry.queued
        ]

    def forget(self, entry: Entry) -> None:
        """It vanishes with all that hangs on it, in use or not; who uses it keeps what they have of it."""
        if entry not in self:
            return
        gone = {entry.segment.id: entry}
        # What hangs on a segment starts after it.
        for other in sorted(self._index, key=lambda other: other.segment.start):
            if other.segment.parent in gone:
                gone[other.segment.id] = other
        for other in reversed(gone.values()):
            self._index.remove(other)
            if self._resident.pop(other.segment.id, None) is not None:
                self.num_bytes -= other.nbytes
            other.buffers = None
        self._settle(self._above(entry))

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more fit now. Nothing is evicted if they would not."""
        in_use = sum(entry.nbytes for entry in self._resident.values() if entry.pins)
        if num_bytes > self.limit_bytes - in_use:
            return False
        unused = [entry for entry in self._resident.values() if not entry.pins]
        for entry in unused:
            if self.num_bytes + num_bytes <= self.limit_bytes:
                break
            if entry.segment.id in self._resident:
                self._evict(entry)
                self.num_evicted += 1
        return True

    def _evict(self, entry: Entry) -> None:
        del self._resident[entry.segment.id]
        self.num_bytes -= entry.nbytes
        self._settle(entry)

    def _settle(self, entry: Entry | None) -> None:
        """Something that held it has let go; where it goes, what it hung on is asked next."""
        while entry is not None and entry in self:
            segment = entry.segment
            if not entry.queued and segment.id not in self._resident:
                entry.buffers = None
            if entry.buffers is not None:
                return
            if entry.kept is None:
                self.num_given_up += 1
                self.forget(entry)
                return
            if entry.pins or self._index.num_children(segment.id):
                return
            self._index.remove(entry)
            entry = self._above(entry)

    def _above(self, entry: Entry) -> Entry | None:
        """What it hangs on."""
        parent = entry.segment.parent
        return None if parent is None else self._index.get(parent)

    def check(self) -> None:
        """Sums are right, and every entry has a reason to be here."""
        self._index.check()
        total = sum(entry.nbytes for entry in self._resident.values())
        assert total == self.num_bytes, f"{total} bytes are resident, {self.num_bytes} are booked"
        assert total <= self.limit_bytes, f"{total} bytes are resident, {self.limit_bytes} are allowed"
        for entry in self._index:
            id_ = entry.segment.id
            held = entry.queued or id_ in self._resident
            assert (entry.buffers is not None) == held, f"segment {id_}: bytes in memory, or not, for no reason"
            needed = held or entry.pins or (entry.kept is not None and self._index.num_children(id_))
            assert needed, f"segment {id_} is here for no reason"
        assert all(entry in self for entry in self._resident.values()), "a resident segment is in no index"
        places = {id_: place for place, id_ in enumerate(self._resident)}
        for id_, entry in self._resident.items():
            above = places.get(entry.segment.parent or "")
            assert above is None or above > places[id_], f"segment {id_} goes after what it hangs on"
