"""A keeper in another process, behind a socket: store.keeping.Keeper for a daemon. See store/wire.py for what is said.

The connection is kept up in the background: while it is down, every call raises KeeperAway at once. What was pinned or
reserved over a connection went with it: a file that was to be committed has to be written anew, and a pin that is
released later is nobody's.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Final

import trio

from store import wire
from store.connection import Connection
from store.format import CorruptSegment
from store.framing import ProtocolError
from store.keeping import Chain, KeeperAway, KeeperStats, Kept, Outcome
from store.names import segment_path
from store.segment_file import read_stored

# A request waits for find and for nothing else. Who does not answer for so long is stopped, or stuck.
FIND_S: Final = 5.0
# A connection that has ended is tried again after so long, then twice as long, and so on.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 5.0
# How many headers are held as they were read; a file that has changed since is noticed when it is read on.
NUM_RECENT: Final = 512


@asynccontextmanager
async def open_remote(socket: Path, fingerprint: str) -> AsyncIterator[RemoteKeeper]:
    """The keeper behind a socket, for as long as the block lasts. It need not be there yet, nor stay."""
    async with trio.open_nursery() as nursery:
        keeper = RemoteKeeper(socket, fingerprint)
        await nursery.start(keeper._run)
        try:
            yield keeper
        finally:
            nursery.cancel_scope.cancel()


class RemoteKeeper:
    """See open_remote()."""

    def __init__(self, socket: Path, fingerprint: str) -> None:
        self._socket = socket
        self._hello = wire.Hello(wire.VERSION, fingerprint)
        self._connection: Connection | None = None
        self._why_away = f"nothing answers at {socket} yet"
        self._folder: Path | None = None
        # Ours are numbered anew: a store that was started again begins with the same numbers.
        self._pins: dict[int, tuple[Connection, int]] = {}
        self._numbers = count(1)
        self._reserved: dict[Path, Connection] = {}
        # By id, of this connection's folder, the latest last.
        self._recent: dict[str, Kept] = {}
        self._one = trio.CapacityLimiter(1)

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise KeeperAway(self._why_away)
        return self._folder

    async def find(self, root: str, tokens: Sequence[int], limit: int) -> Chain:
        connection = self._connected()
        asked = array("I", tokens[: wire.MAX_TOKENS])
        found = await connection.ask(
            wire.FoundChain, lambda n: wire.Find(n, root, limit, asked.tobytes()), patience_s=FIND_S
        )
        if not found.ids:
            return Chain(0, found.matched, 0, ())
        pin = next(self._numbers)
        self._pins[pin] = connection, found.pin
        try:
            kept = await self._headers(found.ids)
        except trio.Cancelled:
            self._unpin(pin)
            raise
        if len(kept) == len(found.ids):
            return Chain(pin, found.matched, found.tokens, kept)
        connection.post(wire.Condemn(connection.number(), found.ids[len(kept)]))
        if not kept:
            self._unpin(pin)
            return Chain(0, 0, 0, ())
        last = kept[-1].segment
        return Chain(pin, min(found.matched, last.stop), last.last_boundary(found.tokens) or 0, kept)

    async def release(self, pin: int) -> None:
        self._unpin(pin)

    async def condemn(self, id_: str) -> None:
        await self._connected().ask(wire.Finished, lambda n: wire.Condemn(n, id_))

    async def reserve(self, nbytes: int) -> Path | None:
        connection = self._connected()
        reserved = await connection.ask(wire.Reserved, lambda n: wire.Reserve(n, nbytes))
        if reserved.file is None:
            return None
        path = self.folder / reserved.file
        self._reserved[path] = connection
        return path

    async def commit(self, temporary: Path) -> Outcome:
        connection = self._take(temporary)
        answer = await connection.ask(wire.Committed, lambda n: wire.Commit(n, temporary.name))
        return answer.outcome

    async def abandon(self, temporary: Path) -> None:
        connection = self._take(temporary)
        await connection.ask(wire.Finished, lambda n: wire.Abandon(n, temporary.name))

    async def flush(self) -> None:
        await self._connected().ask(wire.Finished, wire.Flush)

    async def stat(self) -> KeeperStats:
        return (await self._connected().ask(wire.Stats, wire.Stat)).stats()

    async def _headers(self, ids: Sequence[str]) -> tuple[Kept, ...]:
        """Of these segments, up to the first that cannot be read."""
        missing = [id_ for id_ in ids if id_ not in self._recent]
        read = await trio.to_thread.run_sync(_read_headers, self.folder, missing, limiter=self._one) if missing else ()
        known = {**self._recent, **{kept.segment.id: kept for kept in read}}
        found = tuple(known[id_] for id_ in takewhile(known.__contains__, ids))
        for kept in found:
            self._recent.pop(kept.segment.id, None)
            self._recent[kept.segment.id] = kept
        while len(self._recent) > NUM_RECENT:
            del self._recent[next(iter(self._recent))]
        return found

    def _connected(self) -> Connection:
        if self._connection is None:
            raise KeeperAway(self._why_away)
        return self._connection

    def _take(self, temporary: Path) -> Connection:
        connection = self._reserved.pop(temporary)
        if connection is not self._connection:
            raise KeeperAway(f"{temporary.name} went with the connection that it was reserved on")
        return connection

    def _unpin(self, pin: int) -> None:
        connection, theirs = self._pins.pop(pin, (None, 0))
        if connection is not None and connection is self._connection:
            connection.post(wire.Release(theirs))

    async def _run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, and connect again; started when the first attempt has come to something."""
        retry_s, is_first = RETRY_S, True

        def started() -> None:
            nonlocal is_first
            if is_first:
                task_status.started()
            is_first = False

        while True:
            try:
                why = await self._converse(started)
                retry_s = RETRY_S
            except (OSError, ProtocolError, trio.BrokenResourceError) as error:
                why = str(error)
            except trio.TooSlowError:
                why = "it does not answer"
            self._why_away = f"{self._socket}: {why}"
            started()
            await trio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _converse(self, started: Callable[[], None]) -> str:
        """Until the connection ends; returns why. Raises what opening a connection may raise."""
        with trio.fail_after(FIND_S):
            connection = Connection(await trio.open_unix_socket(self._socket))
        why = "the daemon ends"
        try:
            with trio.fail_after(FIND_S):
                self._folder = await connection.greet(self._hello)
            self._recent.clear()
            self._connection = connection
            started()
            why = await connection.run()
        finally:
            self._connection = None
            connection.close(f"{self._socket}: {why}")
        return why


def _read_headers(folder: Path, ids: Sequence[str]) -> tuple[Kept, ...]:
    """Of these segments, up to the first that cannot be read."""
    found = []
    for id_ in ids:
        path = segment_path(folder, id_)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                stored = read_stored(file)
            finally:
                os.close(file)
        except (OSError, CorruptSegment):
            break
        if stored.segment.id != id_:
            break
        found.append(Kept(stored.segment, path, stored.places))
    return tuple(found)
