"""The keeper's work on files: blocking, for a thread; it decides nothing and knows no index.

Order is what a crash is survived by: a segment's bytes are durable before its name is, the name of its folder before
that, and each call returns when what it did is durable. What is deleted need not be: if it comes back it is whole, or
the next start deletes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from store.files import Files, disk_bytes
from store.format import CorruptSegment, Stored
from store.keeping import Kept
from store.names import lock_path, may_delete, new_temporary, segment_path
from store.segment_file import read_stored, verify_file

T = TypeVar("T")


class FolderGone(OSError):
    """The folder that was opened is not at its path any more."""


class Unreadable(Exception):
    """A segment whose file is damaged or gone. cause: CorruptSegment or FileNotFoundError."""

    def __init__(self, id_: str, cause: CorruptSegment | FileNotFoundError) -> None:
        super().__init__(str(cause))
        self.id = id_
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Folder:
    """An open folder: fd is its own descriptor, lock that of its lock file, None where it was not wanted or the disk
    refused it. device: the disk's number. durable: names of the folders in it that a crash cannot take any more."""

    path: Path
    device: int
    fd: int
    lock: int | None
    refusal: OSError | None
    durable: set[str] = field(default_factory=set)

    def check(self, files: Files) -> None:
        """Raises FolderGone if the path leads nowhere or elsewhere, as it does after a disk was taken away, or if that
        of the lock does: another keeper may have the folder then."""
        _check_same(self.fd, self.path, files)
        if self.lock is not None:
            _check_same(self.lock, lock_path(self.path), files)

    def close(self, files: Files) -> None:
        files.close(self.fd)
        if self.lock is not None:
            files.close(self.lock)


def open_folder(path: Path, writable: bool, device: int | None, files: Files) -> Folder:
    """Lock the folder, if it is to be writable and the disk allows it. device: where it was before it was lost; None:
    it was not open before, and is made where it is not there.

    Raises BlockingIOError if another keeper has the lock, OSError as the system does."""
    if writable and device is None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = files.open(path)
    try:
        now = files.stat(fd).st_dev
        # Where a disk was mounted there is an empty folder when it is gone, which is not to be filled.
        if device not in (None, now) and not lock_path(path).exists():
            raise FolderGone(f"{path} is on another disk than it was")
        lock, refusal = None, None
        if writable:
            lock, refusal = _try_lock(lock_path(path), files)
        return Folder(path, now, fd, lock, refusal)
    except OSError:
        files.close(fd)
        raise


def read_all(wanted: Sequence[tuple[str, Path]], folder: Folder, files: Files) -> list[Kept]:
    """The headers of these segments, by id. Raises Unreadable, OSError."""
    return [_reading(_read_header, id_, path, folder, files) for id_, path in wanted]


def check_all(id_: str, path: Path, folder: Folder, files: Files) -> None:
    """Read all of a segment's file. Raises Unreadable, OSError."""
    _reading(_verify, id_, path, folder, files)


def examine(temporary: Path, folder: Folder, files: Files) -> tuple[Stored, int]:
    """The header of a file that is to be kept, and what it takes on disk. Raises CorruptSegment, OSError."""
    folder.check(files)
    fd = files.open(temporary)
    try:
        return read_stored(fd, files), disk_bytes(files.stat(fd))
    finally:
        files.close(fd)


def publish(temporary: Path, path: Path, folder: Folder, files: Files) -> int:
    """Make the file durable under its name, and return what it takes on disk. Raises OSError; the file may then be
    there under either name."""
    fd = files.open(temporary, writable=True)
    try:
        files.sync(fd)
        nbytes = disk_bytes(files.stat(fd))
    finally:
        files.close(fd)
    # That it is there does not mean that it was synced: who made it may have been killed before.
    if path.parent.name not in folder.durable:
        _make_durable(path.parent, folder, files)
    try:
        files.rename(temporary, path)
    except FileNotFoundError:
        # Somebody has deleted the folder that it goes to.
        _make_durable(path.parent, folder, files)
        files.rename(temporary, path)
    files.sync_folder(path.parent)
    return nbytes


def is_there(path: Path, files: Files) -> bool:
    """Whether there is a file. Raises OSError where that cannot be told."""
    try:
        files.close(files.open(path))
    except FileNotFoundError:
        return False
    return True


def make_temporary(folder: Folder, files: Files) -> Path:
    """An empty one. Raises OSError."""
    folder.check(files)
    path = new_temporary(folder.path)
    files.close(files.create(path))
    return path


def free_bytes(folder: Folder, files: Files) -> int:
    folder.check(files)
    return files.free_bytes(folder.path)


def delete(paths: Sequence[Path], folder: Folder, files: Files) -> list[tuple[Path, OSError]]:
    """Returns those that are still there, and why. Raises FolderGone."""
    folder.check(files)
    left = []
    for path in paths:
        assert may_delete(folder.path, path), f"{path} is not one of the store's files"
        try:
            files.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            left.append((path, error))
    return left


def touch(paths: Sequence[Path], time_ns: int, files: Files) -> None:
    """Note on disk that files were used now, one after the other. What cannot be noted is older after a restart."""
    for place, path in enumerate(paths):
        with suppress(OSError):
            files.touch(path, time_ns + place)


def _check_same(fd: int, path: Path, files: Files) -> None:
    """Raises FolderGone if the path does not lead to what is open."""
    try:
        same = files.is_same(fd, path)
    except OSError as error:
        raise FolderGone(error.errno, f"{path} is gone: {error.strerror}") from error
    if not same:
        raise FolderGone(f"{path} is another than it was")


def _make_durable(inner: Path, folder: Folder, files: Files) -> None:
    """Make a folder in the folder, and its name durable. Raises OSError."""
    with suppress(FileExistsError):
        files.make_folder(inner)
    files.sync_folder(folder.path)
    folder.durable.add(inner.name)


def _try_lock(path: Path, files: Files) -> tuple[int | None, OSError | None]:
    try:
        return files.lock(path), None
    except BlockingIOError:
        raise
    except OSError as error:
        return None, error


def _reading(read: Callable[[Path, Files], T], id_: str, path: Path, folder: Folder, files: Files) -> T:
    try:
        return read(path, files)
    except (CorruptSegment, FileNotFoundError) as error:
        folder.check(files)
        raise Unreadable(id_, error) from error


def _read_header(path: Path, files: Files) -> Kept:
    fd = files.open(path)
    try:
        stored = read_stored(fd, files)
    finally:
        files.close(fd)
    _check_name(path, stored)
    return Kept(stored.segment, path, stored.places)


def _verify(path: Path, files: Files) -> None:
    _check_name(path, verify_file(path, files))


def _check_name(path: Path, stored: Stored) -> None:
    if path.name != segment_path(path, stored.segment.id).name:
        raise CorruptSegment(f"it holds {stored.segment.id}")
