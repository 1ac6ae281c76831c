"""What a keeper knows of its folder: the segments in it, who uses them, what they take. Pure; the keeper does the work.

What is here is durable on disk. It leaves here before its file is deleted, and comes here after its file is durable.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from store.budget import Budget, Entry
from store.keeping import Kept
from store.names import segment_path
from store.prefixes import Match, PrefixIndex
from store.scan import File, Scan
from store.segment import Segment

# How many headers are held as they were read, tensors and all: some 20 kB each.
NUM_RECENT: Final = 512


class Shelf:
    """pins: the numbers of pins, which no other shelf gives."""

    def __init__(self, folder: Path, budget: Budget, pins: Iterator[int]) -> None:
        self.budget = budget
        # Files that were used since this was last noted on disk, in the order of their use.
        self.touched: dict[Path, None] = {}
        self._folder = folder
        self._index: PrefixIndex[Entry] = PrefixIndex()
        self._pins: dict[int, tuple[Entry, ...]] = {}
        self._pin_numbers = pins
        self._recent: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._index)

    def load(self, found: Scan) -> list[File]:
        """Take in what was found, and return what hangs on nothing."""
        orphans = []
        used_ns: dict[str, int] = {}
        for segment, file in sorted(found.segments, key=lambda pair: pair[0].start):
            if self.accepts(segment):
                self._index.insert(Entry(segment, file.path, file.nbytes))
                used_ns[segment.id] = file.used_ns
            else:
                orphans.append(file)
        # Who is used is used with all it hangs on, whatever was noted of it before a crash.
        entries = sorted(self._index, key=lambda entry: -entry.segment.start)
        for entry in entries:
            if (parent := entry.segment.parent) is not None:
                used_ns[parent] = max(used_ns[parent], used_ns[entry.segment.id])
        for entry in sorted(entries, key=lambda entry: used_ns[entry.segment.id]):
            self.budget.add([entry])
        for file in sorted(found.opaque, key=lambda file: file.used_ns):
            self.budget.add_opaque(file.path, file.nbytes)
        self.budget.sidecar_bytes = found.sidecar_bytes
        self.budget.other_bytes = found.other_bytes
        return orphans

    def find(self, root: str, tokens: Sequence[int], limit: int) -> tuple[Match[Entry], tuple[Entry, ...]]:
        """What serves a sequence, and the whole chain of it. Counts as use."""
        match = self._index.match(root, tokens, limit)
        chain = () if match.entry is None else self._index.chain(match.entry)
        self._touch(chain)
        return match, chain

    def get(self, id_: str) -> Entry | None:
        return self._index.get(id_)

    def accepts(self, segment: Segment) -> bool:
        """Whether it can be inserted: what it hangs on is there, and of the same model."""
        if not self._index.accepts(segment):
            return False
        parent = None if segment.parent is None else self._index.get(segment.parent)
        return parent is None or parent.segment.fingerprint == segment.fingerprint

    def insert(self, bare: Segment, kept: Kept, nbytes: int) -> None:
        """A segment that is durable now; bare: without its tensors."""
        entry = Entry(bare, kept.path, nbytes)
        self._index.insert(entry)
        chain = self._index.chain(entry)
        self.budget.add(chain)
        self._touch(chain)
        self.remember(kept)

    def touch(self, entry: Entry) -> None:
        """Counts as use of it and all it hangs on."""
        self._touch(self._index.chain(entry))

    def drop(self, entry: Entry) -> None:
        """It must have nothing that hangs on it."""
        self._index.remove(entry)
        self.budget.remove(entry)
        self._recent.pop(entry.segment.id, None)
        self.touched.pop(entry.path, None)

    def drop_with_all(self, id_: str) -> list[Entry]:
        """Drop it and what hangs on it, used or not."""
        top = self._index.get(id_)
        if top is None:
            return []
        dropped = {id_: top}
        later = (e for e in self._index if e.segment.root == top.segment.root and e.segment.start > top.segment.start)
        for entry in sorted(later, key=lambda entry: entry.segment.start):
            if entry.segment.parent in dropped:
                dropped[entry.segment.id] = entry
        entries = list(reversed(dropped.values()))
        for entry in entries:
            self.drop(entry)
        return entries

    def make_room(self, lacking_bytes: int) -> list[tuple[Path, int]] | None:
        """Drop what goes first until so much is free, and return what is to be deleted and its size; None, and nothing
        is dropped, if that is not enough."""
        going, going_bytes = self.budget.going(lacking_bytes)
        if going_bytes < lacking_bytes:
            return None
        gone = []
        for found in going:
            if isinstance(found, Entry):
                self.drop(found)
                gone.append((found.path, found.nbytes))
            else:
                gone.append((found, self.budget.remove_opaque(found)))
        return gone

    def pin(self, chain: tuple[Entry, ...]) -> int:
        """Nothing of the chain goes before it is unpinned by this number."""
        pin = next(self._pin_numbers)
        self._pins[pin] = chain
        for entry in chain:
            entry.pins += 1
        return pin

    def unpin(self, pin: int) -> None:
        """Nothing happens where it is not of this shelf."""
        for entry in self._pins.pop(pin, ()):
            entry.pins -= 1

    @contextmanager
    def using(self, chain: tuple[Entry, ...]) -> Iterator[None]:
        pin = self.pin(chain)
        try:
            yield
        finally:
            self.unpin(pin)

    def chain_of(self, segment: Segment) -> tuple[Entry, ...]:
        """What a segment that is not here yet would hang on."""
        parent = None if segment.parent is None else self._index.get(segment.parent)
        return () if parent is None else self._index.chain(parent)

    def recent(self, entry: Entry) -> Kept | None:
        """Its header, if that was read lately."""
        kept = self._recent.get(entry.segment.id)
        if kept is not None:
            self._recent.move_to_end(entry.segment.id)
        return kept

    def remember(self, kept: Kept) -> None:
        self._recent[kept.segment.id] = kept
        self._recent.move_to_end(kept.segment.id)
        if len(self._recent) > NUM_RECENT:
            self._recent.popitem(last=False)

    def entries(self) -> Iterator[Entry]:
        return iter(self._index)

    def check(self) -> None:
        self._index.check()
        self.budget.check()
        assert self.budget.ids() == {entry.segment.id for entry in self._index}, "the budget counts other segments"
        # By entry: one that was dropped in use may have come back, as another.
        pins = Counter(id(entry) for chain in self._pins.values() for entry in chain)
        for entry in self._index:
            assert entry.path == segment_path(self._folder, entry.segment.id), f"{entry.segment.id} is at {entry.path}"
            assert entry.pins == pins[id(entry)], f"{entry.segment.id} has {entry.pins} pins"

    def _touch(self, chain: Sequence[Entry]) -> None:
        self.budget.touch(chain)
        for entry in reversed(chain):
            self.touched.pop(entry.path, None)
            self.touched[entry.path] = None
