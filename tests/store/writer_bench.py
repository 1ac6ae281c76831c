"""A writer above a keeper that does what a test says; files are real."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from store.keeping import Chain, KeeperAway, KeeperStats, Outcome
from store.memory import Entry, Memory
from store.reader import Precedence
from store.segment_file import verify_file
from store.writer import Writer
from tests.store.rows import Row
from tests.store.segments import segment

ROW = Row()


@dataclass
class Scripted:
    """outcomes: of the next commits, "kept" afterwards; away: whether every call raises KeeperAway."""

    folder: Path
    outcomes: list[Outcome] = field(default_factory=list)
    away: bool = False
    has_room: bool = True
    committed: list[str] = field(default_factory=list)
    abandoned: list[Path] = field(default_factory=list)
    reserved: int = 0
    on_reserve: Callable[[], None] = lambda: None
    away_when_abandoned: bool = False

    async def find(self, root: str, tokens: Sequence[int], limit: int) -> Chain:
        return Chain(0, 0, 0, ())

    async def release(self, pin: int) -> None: ...

    async def condemn(self, id_: str) -> None: ...

    async def reserve(self, nbytes: int) -> Path | None:
        await self._checkpoint()
        self.on_reserve()
        if not self.has_room:
            return None
        self.reserved += 1
        path = self.folder / f"{self.reserved}.writing"
        if self.folder.is_dir():
            path.touch()
        return path

    async def commit(self, temporary: Path) -> Outcome:
        await self._checkpoint()
        outcome: Outcome = self.outcomes.pop(0) if self.outcomes else "kept"
        self.committed.append(verify_file(temporary).segment.id)
        os.unlink(temporary)
        return outcome

    async def abandon(self, temporary: Path) -> None:
        self.abandoned.append(temporary)
        if self.away_when_abandoned:
            raise KeeperAway("the test says so")

    async def flush(self) -> None:
        await self._checkpoint()

    async def stat(self) -> KeeperStats:
        await self._checkpoint()
        return KeeperStats()

    async def _checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise KeeperAway("the test says so")


class Bench:
    """A writer and what it works with. Rows are of 16 bytes a token."""

    def __init__(self, keeper: Scripted, queue_bytes: int) -> None:
        self.keeper = keeper
        self.memory = Memory(1 << 20)
        self.precedence = Precedence()
        self.writer = Writer(self.memory, keeper, self.precedence, queue_bytes)

    def put(self, tokens: Sequence[int], parent: Entry | None = None) -> Entry:
        above = None if parent is None else parent.segment
        start = 0 if above is None else above.stop
        part = ROW.part([*([0] * start), *tokens], start)
        new = segment(tokens, above, tensors=part.tensors)
        entry = self.memory.put(new, part.buffers, True, 0.0)
        assert entry is not None
        self.writer.put(entry)
        self.check()
        return entry

    def check(self) -> None:
        self.memory.check()
        queued = list(self.writer._queue)
        assert self.writer.num_bytes == sum(entry.segment.nbytes for entry in queued)
        assert all(entry.queued for entry in queued)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.writer.run)
            yield
            nursery.cancel_scope.cancel()


def ids(*entries: Entry) -> list[str]:
    return [entry.segment.id for entry in entries]
