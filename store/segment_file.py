"""A segment to and from its file. Nothing is cached, nothing decided; what the disk does is raised as OSError."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_hexdigest

from store.files import FILES, Files
from store.format import (
    PREAMBLE,
    CorruptSegment,
    Stored,
    aligned,
    decode,
    decode_identity,
    encode,
    header_bytes,
    layout,
    validate,
    validate_identity,
    validate_length,
)
from store.segment import Segment

# Most headers are shorter: they take one read.
_HEAD_BYTES = 32 << 10
# Digests are made of pieces that stay in a core's cache. A write of 2 GiB and more is refused by macOS.
_PIECE_BYTES = 1 << 20
_WRITE_BYTES = 1 << 30


def write_segment(fd: int, segment: Segment, buffers: Sequence[memoryview], files: Files = FILES) -> int:
    """Write a whole segment to an empty file, and return how many bytes were written.

    buffers: the bytes of each of segment.tensors, C-contiguous. The header goes last, so that a file with a header is
    whole as far as this process knows. Nothing is synced."""
    views = [buffer.cast("B") for buffer in buffers]
    head = encode(segment, [xxh3_64_hexdigest(view) for view in views])
    offsets, data_bytes = layout(segment.tensors)
    data_start = aligned(len(head))
    files.truncate(fd, data_start + data_bytes)
    for view, spec, offset in zip(views, segment.tensors, offsets, strict=True):
        assert len(view) == spec.nbytes, f"{spec.name}: {len(view)} bytes for {spec.nbytes}"
        _write(fd, view, data_start + offset, files)
    _write(fd, memoryview(head), 0, files)
    return len(head) + sum(map(len, views))


def read_stored(fd: int, files: Files = FILES) -> Stored:
    """All of a file's header, every rule checked. Raises CorruptSegment."""
    stored = decode(_read_head(fd, files))
    validate(stored, files.stat(fd).st_size)
    return stored


@contextmanager
def opened(path: Path, segment: Segment, files: Files = FILES) -> Iterator[tuple[int, Stored]]:
    """A segment's file for reading, and what its head says. Raises CorruptSegment, also where it is another's."""
    fd = files.open(path)
    try:
        stored = read_stored(fd, files)
        if stored.segment != segment:
            raise CorruptSegment("it is another segment than it was")
        yield fd, stored
    finally:
        files.close(fd)


def read_identity(fd: int, files: Files = FILES) -> Segment:
    """The segment without its tensors, for what reads very many. Raises CorruptSegment."""
    segment, said_bytes = decode_identity(_read_head(fd, files))
    validate_identity(segment)
    validate_length(said_bytes, files.stat(fd).st_size)
    return segment


def verify_tensor(fd: int, stored: Stored, place: int, files: Files = FILES) -> None:
    """Read one tensor and compare its digest. Raises CorruptSegment."""
    begin, left = stored.places[place], stored.sizes[place]
    digest = xxh3_64()
    while left:
        piece = files.read(fd, min(left, _PIECE_BYTES), begin)
        if not piece:
            break
        digest.update(piece)
        begin += len(piece)
        left -= len(piece)
    if left or digest.hexdigest() != stored.xxh3[place]:
        raise CorruptSegment(f"{stored.segment.tensors[place].name} is not what was written")


def verify_file(path: Path, files: Files = FILES) -> Stored:
    """Read all of a file and check all that can be checked. Raises CorruptSegment."""
    fd = files.open(path)
    try:
        stored = read_stored(fd, files)
        for place in range(len(stored.sizes)):
            verify_tensor(fd, stored, place, files)
        return stored
    finally:
        files.close(fd)


def _read_head(fd: int, files: Files) -> bytes:
    head = files.read(fd, _HEAD_BYTES, 0)
    end = PREAMBLE.size + header_bytes(head)
    while len(head) < end:
        more = files.read(fd, end - len(head), len(head))
        if not more:
            raise CorruptSegment(f"its file has {len(head)} bytes, its header {end}")
        head += more
    return head


def _write(fd: int, view: memoryview, offset: int, files: Files) -> None:
    while view:
        written = files.write(fd, view[:_WRITE_BYTES], offset)
        view, offset = view[written:], offset + written
