"""What the files of a store take, and which of them go first.

First go files that nobody here can read, then segments of models that are not in use, then the others; among each, the
least recently used. Use touches a chain leaf before root, so that no segment goes before one that hangs on it. What is
pinned stays, and with it all it hangs on, as a pin holds a whole chain.

Pure: it holds sums and orders, and decides; the keeper deletes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from store.segment import Segment

# A file takes more than its tensors: a header, and the rest of each one's last block.
SLACK_BYTES: Final = 1 << 20


class Entry:
    """A segment's file, its segment being without tensors. used: the count of uses, of all entries, at its last one."""

    __slots__ = ("nbytes", "path", "pins", "segment", "used")

    def __init__(self, segment: Segment, path: Path, nbytes: int) -> None:
        self.segment = segment
        self.path = path
        self.nbytes = nbytes
        self.pins = 0
        self.used = 0


class Budget:
    """max_bytes None: no limit. min_free_bytes: what the disk is to have left for others."""

    def __init__(self, max_bytes: int | None, min_free_bytes: int, fingerprints: frozenset[str] = frozenset()) -> None:
        self.max_bytes = max_bytes
        self.min_free_bytes = min_free_bytes
        # Of files that are not ours, and of ours that are no segments, as they were when the folder was opened; and of
        # those that are being written.
        self.other_bytes = 0
        self.sidecar_bytes = 0
        self.reserved: dict[Path, int] = {}
        self._fingerprints = fingerprints
        self._opaque: OrderedDict[Path, int] = OrderedDict()
        # By id, the next to go first.
        self._foreign: OrderedDict[str, Entry] = OrderedDict()
        self._own: OrderedDict[str, Entry] = OrderedDict()
        self._segment_bytes = 0
        self._uses = 0

    @property
    def our_bytes(self) -> int:
        return self._segment_bytes + sum(self._opaque.values()) + self.sidecar_bytes + sum(self.reserved.values())

    @property
    def foreign_bytes(self) -> int:
        return sum(self._opaque.values()) + sum(entry.nbytes for entry in self._foreign.values())

    def add(self, chain: Sequence[Entry]) -> None:
        """The last one of a chain is new. Counts as use of all of it."""
        entry = chain[-1]
        self._list_of(entry)[entry.segment.id] = entry
        self._segment_bytes += entry.nbytes
        self.touch(chain)

    def add_opaque(self, path: Path, nbytes: int) -> None:
        self._opaque[path] = nbytes

    def touch(self, chain: Sequence[Entry]) -> None:
        for entry in reversed(chain):
            self._uses += 1
            entry.used = self._uses
            self._list_of(entry).move_to_end(entry.segment.id)

    def remove(self, entry: Entry) -> None:
        del self._list_of(entry)[entry.segment.id]
        self._segment_bytes -= entry.nbytes

    def remove_opaque(self, path: Path) -> int:
        """What it took."""
        return self._opaque.pop(path)

    def ids(self) -> set[str]:
        return {*self._foreign, *self._own}

    def use(self, fingerprint: str) -> None:
        """From now on segments of this model are not foreign."""
        if fingerprint in self._fingerprints:
            return
        self._fingerprints |= {fingerprint}
        mine = [entry for entry in self._foreign.values() if entry.segment.fingerprint == fingerprint]
        for entry in mine:
            del self._foreign[entry.segment.id]
        merged = sorted((*self._own.values(), *mine), key=lambda entry: entry.used)
        self._own = OrderedDict((entry.segment.id, entry) for entry in merged)

    def lacking_bytes(self, nbytes: int, free_bytes: int) -> int:
        """How much has to go before tensors of so much can be written, by our limit and by what the disk has free."""
        writing = nbytes + nbytes // 16 + SLACK_BYTES + sum(self.reserved.values())
        return max(self.over_bytes(nbytes), writing + self.min_free_bytes - free_bytes, 0)

    def over_bytes(self, nbytes: int = 0) -> int:
        """By how much we would be over our limit."""
        return 0 if self.max_bytes is None else max(0, self.our_bytes + self.other_bytes + nbytes - self.max_bytes)

    def going(self, nbytes: int) -> tuple[list[Entry | Path], int]:
        """What is to be deleted so that so much is free, and how much it takes: less, if there is not enough."""
        going: list[Entry | Path] = []
        gone_bytes = 0
        for found, taken in self._in_order():
            if gone_bytes >= nbytes:
                break
            going.append(found)
            gone_bytes += taken
        return going, gone_bytes

    def _in_order(self) -> Iterator[tuple[Entry | Path, int]]:
        yield from self._opaque.items()
        for listed in (self._foreign, self._own):
            yield from ((entry, entry.nbytes) for entry in listed.values() if not entry.pins)

    def _list_of(self, entry: Entry) -> OrderedDict[str, Entry]:
        return self._own if entry.segment.fingerprint in self._fingerprints else self._foreign

    def check(self) -> None:
        entries = [*self._foreign.values(), *self._own.values()]
        assert self._segment_bytes == sum(entry.nbytes for entry in entries), f"{self._segment_bytes} bytes counted"
        for listed in (self._foreign, self._own):
            order = {id_: place for place, id_ in enumerate(listed)}
            uses = [entry.used for entry in listed.values()]
            assert uses == sorted(uses), f"not in the order of use: {uses}"
            for id_, entry in listed.items():
                assert self._list_of(entry) is listed, f"{id_} is in the wrong list"
                parent = entry.segment.parent
                assert parent is None or order[id_] < order[parent], f"{id_} would go after {parent}, on which it hangs"
                assert parent is None or entry.pins <= listed[parent].pins, f"{id_} is pinned without {parent}"
