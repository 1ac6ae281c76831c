"""What lies in a store's folder, for a person to look at: read from names and headers, without being its keeper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.usage import CommandFailed, UsageError
from store.files import FILES
from store.format import CorruptSegment, Stored
from store.scan import File, Scan, scan
from store.segment import Segment
from store.segment_file import read_stored

# How much of an id is shown; among some million segments it is still one of a kind.
SHORT_ID = 12


@dataclass(frozen=True, slots=True)
class Line:
    """A segment in the order of a listing. depth: how many it hangs on."""

    segment: Segment
    file: File
    depth: int


class Listing:
    def __init__(self, folder: Path, found: Scan) -> None:
        self.folder = folder
        self.found = found
        self.files = {segment.id: file for segment, file in found.segments}
        self.segments = {segment.id: segment for segment, _ in found.segments}
        self.children: dict[str | None, list[str]] = {}
        # Of a whole tree the latest use counts, so that trees stay together.
        self._used_ns = {id_: file.used_ns for id_, file in self.files.items()}
        for segment in sorted(self.segments.values(), key=lambda segment: -segment.start):
            if segment.parent is not None and segment.parent in self._used_ns:
                self._used_ns[segment.parent] = max(self._used_ns[segment.parent], self._used_ns[segment.id])
        for id_ in sorted(self.segments, key=lambda id_: -self._used_ns[id_]):
            self.children.setdefault(self.segments[id_].parent, []).append(id_)

    @property
    def roots(self) -> list[str]:
        """The beginnings, the latest used first."""
        return self.children.get(None, [])

    @property
    def orphans(self) -> list[str]:
        """What hangs on nothing, and serves nobody."""
        reached = {line.segment.id for root in self.roots for line in self.tree(root)}
        return [id_ for id_ in self.segments if id_ not in reached]

    @property
    def our_bytes(self) -> int:
        files = (*self.files.values(), *self.found.opaque, *self.found.corrupt, *self.found.temporaries)
        return sum(file.nbytes for file in files) + self.found.sidecar_bytes

    def tree(self, root: str) -> Iterator[Line]:
        """A segment, and below it what hangs on it."""
        left = [(root, 0)]
        while left:
            id_, depth = left.pop()
            yield Line(self.segments[id_], self.files[id_], depth)
            left.extend((child, depth + 1) for child in reversed(self.children.get(id_, [])))

    def chain(self, id_: str) -> list[str]:
        """From the beginning to the segment, as far as it is there."""
        found = [id_]
        while (parent := self.segments[found[-1]].parent) in self.segments:
            assert parent is not None
            found.append(parent)
        return list(reversed(found))

    def resolve(self, beginning: str) -> str:
        """The one id that begins so. Raises UsageError."""
        fits = [id_ for id_ in self.segments if id_.startswith(beginning)]
        if len(fits) != 1:
            some = "no segment" if not fits else f"{len(fits)} segments"
            raise UsageError(f"{self.folder} holds {some} whose id begins with {beginning!r}: see `laned store ls`.")
        return fits[0]

    def stored(self, id_: str) -> Stored:
        """Its whole header. Raises CommandFailed."""
        try:
            fd = FILES.open(self.files[id_].path)
            try:
                return read_stored(fd)
            finally:
                FILES.close(fd)
        except (OSError, CorruptSegment) as error:
            raise CommandFailed(f"segment {id_} cannot be read: {error}.") from None

    def report(self) -> dict[str, Any]:
        found = self.found
        return {
            "folder": str(self.folder),
            "bytes": self.our_bytes,
            "other_bytes": found.other_bytes,
            "segments": [self._report(id_) for id_ in sorted(self.segments, key=lambda id_: -self._used_ns[id_])],
            "orphans": self.orphans,
            "corrupt": [str(file.path) for file in found.corrupt],
            "other_versions": [str(file.path) for file in found.opaque],
            "temporaries": [str(file.path) for file in found.temporaries],
        }

    def report_of(self, id_: str) -> dict[str, Any]:
        stored = self.stored(id_)
        tensors = [
            {**spec._asdict(), "offset": place, "bytes": size, "xxh3": digest}
            for spec, place, size, digest in zip(
                stored.segment.tensors, stored.places, stored.sizes, stored.xxh3, strict=True
            )
        ]
        return {
            **self._report(id_),
            "chain": self.chain(id_),
            "children": self.children.get(id_, []),
            "tokens": stored.segment.tokens.tolist(),
            "tensors": tensors,
        }

    def _report(self, id_: str) -> dict[str, Any]:
        segment, file = self.segments[id_], self.files[id_]
        return {
            "id": id_,
            "root": segment.root,
            "fingerprint": segment.fingerprint,
            "parent": segment.parent,
            "start": segment.start,
            "stop": segment.stop,
            "boundaries": segment.boundaries,
            "bytes": file.nbytes,
            "used_s": file.used_ns / 1e9,
            "path": str(file.path),
        }


def folder_of(name: str) -> Path:
    """Raises UsageError if it is no folder."""
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise UsageError(f"--store {name}: there is no such folder.")
    return folder


def listing(folder: Path) -> Listing:
    """Raises CommandFailed."""
    try:
        return Listing(folder, scan(folder))
    except OSError as error:
        raise CommandFailed(f"{folder} cannot be read: {error.strerror}.") from None
