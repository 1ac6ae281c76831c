"""What lies under a store's folder, read from names and headers. Nothing is decided here, and nothing changed.

A file that vanishes meanwhile was never there: who only reads does not own the folder. One that cannot be read, or has
another version's format, is opaque: it takes space, and serves nobody here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from store.files import FILES, Files, disk_bytes
from store.format import CorruptSegment, OtherVersion
from store.names import is_fan, is_sidecar, is_temporary, segment_in
from store.segment import Segment
from store.segment_file import read_identity


@dataclass(frozen=True, slots=True)
class File:
    """nbytes: what it takes on disk. used_ns: when it was used last, after the Epoch."""

    path: Path
    nbytes: int
    used_ns: int


@dataclass(slots=True)
class Scan:
    """segments: each without its tensors. corrupt: files with a segment's name that are none. other_bytes: of files
    that are not ours."""

    segments: list[tuple[Segment, File]] = field(default_factory=list)
    opaque: list[File] = field(default_factory=list)
    corrupt: list[File] = field(default_factory=list)
    temporaries: list[File] = field(default_factory=list)
    sidecar_bytes: int = 0
    other_bytes: int = 0


def scan(folder: Path, files: Files = FILES) -> Scan:
    """Raises OSError if the folder cannot be listed."""
    found = Scan()
    for entry in files.entries(folder):
        if entry.is_dir(follow_symlinks=False):
            for inner in _entries(Path(entry.path), files):
                id_ = segment_in(entry.name, inner.name) if is_fan(entry.name) else None
                if id_ is None or not inner.is_file(follow_symlinks=False):
                    found.other_bytes += _bytes_under(inner, files)
                else:
                    _add_segment(found, id_, Path(inner.path), files)
        elif is_temporary(entry.name):
            with suppress(FileNotFoundError):
                found.temporaries.append(_file(Path(entry.path), entry.stat(follow_symlinks=False)))
        elif is_sidecar(entry.name):
            found.sidecar_bytes += _bytes_under(entry, files)
        else:
            found.other_bytes += _bytes_under(entry, files)
    return found


def _add_segment(found: Scan, id_: str, path: Path, files: Files) -> None:
    try:
        fd = files.open(path)
    except FileNotFoundError:
        return
    except OSError:
        with suppress(OSError):
            found.opaque.append(_file(path, os.stat(path, follow_symlinks=False)))
        return
    file = None
    try:
        file = _file(path, files.stat(fd))
        segment = read_identity(fd, files)
        if segment.id == id_:
            found.segments.append((segment, file))
        else:
            found.corrupt.append(file)
    except OtherVersion:
        assert file is not None
        found.opaque.append(file)
    except CorruptSegment:
        assert file is not None
        found.corrupt.append(file)
    except OSError:
        if file is not None:
            found.opaque.append(file)
    finally:
        files.close(fd)


def _bytes_under(entry: os.DirEntry[str], files: Files) -> int:
    if entry.is_dir(follow_symlinks=False):
        return sum(_bytes_under(inner, files) for inner in _entries(Path(entry.path), files))
    try:
        return disk_bytes(entry.stat(follow_symlinks=False))
    except OSError:
        return 0


def _entries(folder: Path, files: Files) -> Iterator[os.DirEntry[str]]:
    """None where it cannot be listed."""
    with suppress(OSError):
        yield from files.entries(folder)


def _file(path: Path, found: os.stat_result) -> File:
    return File(path, disk_bytes(found), found.st_mtime_ns)
