"""A file layer that writes down what was done, and from that makes every state a crash may leave.

Two kinds of crash. A process that is killed leaves all that it did, up to some byte of a write. A machine that stops
leaves what was synced; of the rest any part may be there: each write to a file, or some of its bytes, each name that
came or went in a folder, in any combination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from store.files import Files
from store.names import LOCK


@dataclass(frozen=True, slots=True)
class Write:
    """data None: the file's length becomes offset."""

    inode: int
    offset: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Sync:
    inode: int


@dataclass(frozen=True, slots=True)
class Name:
    """In a folder, a name comes to mean a file; None: nothing more."""

    folder: Path
    name: str
    inode: int | None


@dataclass(frozen=True, slots=True)
class SyncFolder:
    folder: Path


@dataclass(frozen=True, slots=True)
class Said:
    """Not done, but told to who asked: from here on it is promised."""

    what: str


Done = Write | Sync | Name | SyncFolder | Said
FOLDER: Literal[-1] = -1


class Recorder(Files):
    """Does what it is told, and notes it. ignores: kinds of calls that are neither done nor noted."""

    def __init__(self, ignores: tuple[str, ...] = ()) -> None:
        self.done: list[Done] = []
        self._ignores = ignores
        self._inodes: dict[Path, int] = {}
        self._open: dict[int, int] = {}
        self._num_inodes = 0

    def say(self, what: str) -> None:
        self.done.append(Said(what))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._num_inodes += 1
        self._inodes[path] = self._open[fd] = self._num_inodes
        self.done.append(Name(path.parent, path.name, self._num_inodes))
        return fd

    def open(self, path: Path, writable: bool = False) -> int:
        fd = super().open(path, writable)
        self._open[fd] = self._inodes.get(path, 0)
        return fd

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self.done.append(Write(self._open[fd], offset, bytes(data)))
        return super().write(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self.done.append(Write(self._open[fd], nbytes, None))
        super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        if "sync" not in self._ignores:
            self.done.append(Sync(self._open[fd]))

    def sync_folder(self, path: Path) -> None:
        if "sync_folder" not in self._ignores:
            self.done.append(SyncFolder(path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        inode = self._inodes[target] = self._inodes.pop(source)
        self.done.append(Name(target.parent, target.name, inode))
        self.done.append(Name(source.parent, source.name, None))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        del self._inodes[path]
        self.done.append(Name(path.parent, path.name, None))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.done.append(Name(path.parent, path.name, FOLDER))


@dataclass
class State:
    """Files' bytes by inode, names by folder."""

    files: dict[int, bytearray] = field(default_factory=dict)
    names: dict[Path, dict[str, int]] = field(default_factory=dict)

    def apply(self, done: Done) -> None:
        match done:
            case Write(inode, offset, None):
                file = self.files.setdefault(inode, bytearray())
                file[offset:] = bytes(max(0, offset - len(file)))
            case Write(inode, offset, bytes() as data):
                file = self.files.setdefault(inode, bytearray())
                file.extend(bytes(max(0, offset - len(file))))
                file[offset : offset + len(data)] = data
            case Name(folder, name, None):
                self.names.setdefault(folder, {}).pop(name, None)
            case Name(folder, name, int() as inode):
                self.names.setdefault(folder, {})[name] = inode

    def put(self, source: Path, target: Path) -> None:
        """Make a folder that holds what was in `source`."""
        target.mkdir()
        (target / LOCK).touch()
        for name, inode in self.names.get(source, {}).items():
            if inode == FOLDER:
                (target / name).mkdir()
                for inner, file in self.names.get(source / name, {}).items():
                    (target / name / inner).write_bytes(self.files.get(file, b""))
            else:
                (target / name).write_bytes(self.files.get(inode, b""))


def part_of(write: Write, num_bytes: int) -> Write:
    return Write(write.inode, write.offset, write.data[:num_bytes] if write.data else write.data)


def killed(done: list[Done], random: Random) -> State:
    """All of it, and of a write that is the last some bytes."""
    state = State()
    for each in done[:-1]:
        state.apply(each)
    if done:
        last = done[-1]
        if isinstance(last, Write) and last.data:
            last = part_of(last, random.randint(0, len(last.data)))
        state.apply(last)
    return state


def stopped(done: list[Done], random: Random) -> State:
    """What was synced, and any part of the rest; how likely each is there differs from crash to crash."""
    likely = random.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    state = State()
    for each in _survivors(done, random, likely):
        state.apply(each)
    return state


def _survivors(done: list[Done], random: Random, likely: float) -> Iterator[Done]:
    synced = {each: place for place, each in enumerate(done) if isinstance(each, (Sync, SyncFolder))}
    for place, each in enumerate(done):
        match each:
            case Write(inode):
                if synced.get(Sync(inode), -1) > place or random.random() < likely:
                    yield each
                elif each.data and random.random() < likely:
                    yield part_of(each, random.randint(0, len(each.data)))
            case Name(folder):
                if synced.get(SyncFolder(folder), -1) > place or random.random() < likely:
                    yield each
