"""All that the store asks of the file system: one method, one system call. Tests put one in its place that loses what
was not synced, or fails.

Durable means durable: on macOS fsync leaves data in the disk's own cache, F_FULLFSYNC does not.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Of stat's st_blocks, whatever the file system's own blocks are.
BLOCK_BYTES = 512


class Files:
    """Descriptors are ints, offsets and lengths bytes. Everything raises OSError as the system does."""

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing; only we may read it."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: Path, writable: bool = False) -> int:
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        return os.pread(fd, nbytes, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def is_same(self, fd: int, path: Path) -> bool:
        """Whether the path leads to what is open."""
        ours, there = os.fstat(fd), os.stat(path)
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def sync(self, fd: int) -> None:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Names in it that came or went are durable afterwards."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def touch(self, path: Path, time_ns: int) -> None:
        """Set when it was used last."""
        os.utime(path, ns=(time_ns, time_ns))

    def entries(self, path: Path) -> Iterator[os.DirEntry[str]]:
        with os.scandir(path) as found:
            yield from found

    def free_bytes(self, path: Path) -> int:
        """What we may still write."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, path: Path) -> int:
        """A descriptor that holds the lock of the file, which is made where it is not there, until it is closed.
        BlockingIOError: another process holds it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd


FILES = Files()


def disk_bytes(found: os.stat_result) -> int:
    """What a file takes: holes take nothing."""
    return found.st_blocks * BLOCK_BYTES
