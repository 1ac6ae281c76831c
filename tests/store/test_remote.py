"""A keeper behind a socket, from the daemon's side: what it does when the other end is not there, or not well."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from store.framing import encode_frame
from store.keeper import LocalKeeper
from store.keeping import Chain, KeeperAway
from store.remote import RemoteKeeper, open_remote
from tests.scheduler.trio_test import trio_test, until
from tests.store.keepers import FINGERPRINT, local, served, serving
from tests.store.segments import ROOT
from tests.store.test_server import keep


async def back(keeper: RemoteKeeper) -> None:
    while True:
        try:
            await keeper.stat()
        except KeeperAway:
            await trio.sleep(0.02)
        else:
            return


@trio_test
async def test_it_need_not_be_there_at_the_start(tmp_path: Path) -> None:
    async with open_remote(tmp_path / "s", FINGERPRINT) as remote:
        with pytest.raises(KeeperAway, match="No such file"):
            await remote.find(ROOT, [1], 1)
        with pytest.raises(KeeperAway):
            assert remote.folder
        async with served(tmp_path):
            await back(remote)
            assert remote.folder == tmp_path / "store"
            await keep(remote, [1, 2])
            assert (await remote.find(ROOT, [1, 2, 3], 3)).tokens == 2
        await until(lambda: remote._connection is None)
        with pytest.raises(KeeperAway):
            await remote.find(ROOT, [1], 1)


@trio_test
async def test_what_was_pinned_or_reserved_went_with_the_connection(tmp_path: Path) -> None:
    async with local(tmp_path / "store") as keeper:
        await keep(keeper, [1, 2])
        async with serving(keeper, tmp_path / "s"), open_remote(tmp_path / "s", FINGERPRINT) as remote:
            old = await remote.find(ROOT, [1, 2], 2)
            temporary = await remote.reserve(100)
            assert temporary is not None
            connection = remote._connection
            assert connection is not None
            connection._end("the test says so")
            await until(lambda: remote._connection not in (None, connection))
            await until(lambda: not keeper._shelf._pins)
            new = await remote.find(ROOT, [1, 2], 2)
            await remote.release(old.pin)
            await remote.stat()
            assert len(keeper._shelf._pins) == 1
            await remote.release(new.pin)
            await remote.stat()
            assert not keeper._shelf._pins
            with pytest.raises(KeeperAway, match="went with"):
                await remote.commit(temporary)


class Late(LocalKeeper):
    """Finds, but answers only when it is let go."""

    gate: trio.Event

    async def find(self, root: str, tokens: Sequence[int], limit: int) -> Chain:
        chain = await super().find(root, tokens, limit)
        await self.gate.wait()
        return chain


@asynccontextmanager
async def late(tmp_path: Path) -> AsyncIterator[tuple[Late, RemoteKeeper]]:
    async with served(tmp_path) as (keeper, socket), open_remote(socket, FINGERPRINT) as remote:
        await keep(keeper, [1, 2])
        keeper.__class__ = Late
        assert isinstance(keeper, Late)
        keeper.gate = trio.Event()
        yield keeper, remote


@trio_test
async def test_who_is_cancelled_while_he_waits_pins_nothing(tmp_path: Path) -> None:
    async with late(tmp_path) as (keeper, remote):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(remote.find, ROOT, [1, 2], 2)
            await until(lambda: bool(keeper._shelf._pins))
            nursery.cancel_scope.cancel()
        keeper.gate.set()
        await until(lambda: not keeper._shelf._pins)
        assert not remote._pins
        await remote.stat()


@trio_test
async def test_a_store_that_does_not_answer_is_away_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.remote.FIND_S", 0.2)
    async with late(tmp_path) as (keeper, remote):
        with pytest.raises(KeeperAway, match="has not answered"):
            await remote.find(ROOT, [1, 2], 2)
        keeper.gate.set()
        await back(remote)
        assert (await remote.find(ROOT, [1, 2], 2)).tokens == 2


@trio_test
async def test_a_segment_that_cannot_be_read_ends_the_chain_and_is_told_of(tmp_path: Path) -> None:
    async with served(tmp_path) as (keeper, socket), open_remote(socket, FINGERPRINT) as remote:
        root = await keep(keeper, [1, 2])
        middle = await keep(keeper, [3, 4], root)
        await keep(keeper, [5, 6], middle)
        chain = await keeper.find(ROOT, [1, 2, 3, 4, 5, 6], 6)
        chain.kept[1].path.unlink()
        await keeper.release(chain.pin)
        found = await remote.find(ROOT, [1, 2, 3, 4, 5, 6], 6)
        assert (found.matched, found.tokens, len(found.kept)) == (2, 2, 1)
        await until(lambda: len(keeper._shelf) == 1)
        found.kept[0].path.unlink()
        remote._recent.clear()
        again = await remote.find(ROOT, [1, 2], 2)
        assert (again.tokens, again.kept) == (0, ())
        await remote.release(found.pin)
        await until(lambda: len(keeper._shelf) == 0)
        assert not keeper._shelf._pins


class Gone(LocalKeeper):
    async def find(self, root: str, tokens: Sequence[int], limit: int) -> Chain:
        raise KeeperAway("the disk was taken away")


@trio_test
async def test_headers_are_held_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.remote.NUM_RECENT", 2)
    async with served(tmp_path) as (keeper, socket), open_remote(socket, FINGERPRINT) as remote:
        above = None
        for token in range(4):
            above = await keep(keeper, [token], above)
        for limit in (4, 1, 2, 3, 4):
            found = await remote.find(ROOT, range(4), limit)
            assert (found.tokens, [kept.segment.stop for kept in found.kept]) == (limit, list(range(1, limit + 1)))
            assert len(remote._recent) <= 2


@trio_test
async def test_a_folder_that_is_away_there_is_away_here(tmp_path: Path) -> None:
    async with served(tmp_path) as (keeper, socket), open_remote(socket, FINGERPRINT) as remote:
        keeper.__class__ = Gone
        with pytest.raises(KeeperAway, match="taken away"):
            await remote.find(ROOT, [1, 2], 2)
        await remote.stat()


@pytest.mark.parametrize(
    "answers",
    [
        [{"type": "error", "code": "unsupported_version", "message": "the store speaks version 99"}],
        [{"type": "done", "n": 1}],
        [{"type": "fish"}],
        [{"type": "hello", "version": 1, "folder": "/"}, {"type": "hello", "version": 1, "folder": "/"}],
        [{"type": "hello", "version": 1, "folder": "/"}, {"type": "committed", "n": 1, "outcome": "kept"}],
        [],
    ],
)
@trio_test
async def test_another_end_that_speaks_something_else_is_away(answers: list[dict[str, object]], tmp_path: Path) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(1000)
        for answer in answers[:1]:
            await stream.send_all(encode_frame(answer))
        if len(answers) > 1:
            await stream.receive_some(1000)
            await stream.send_all(encode_frame(answers[1]))
            await stream.receive_some(1000)

    async with trio.open_nursery() as nursery:
        listeners = [await unix_listener(tmp_path / "s")]
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        async with open_remote(tmp_path / "s", FINGERPRINT) as remote:
            with pytest.raises(KeeperAway):
                await remote.stat()
            await until(lambda: remote._connection is None)
        nursery.cancel_scope.cancel()


async def unix_listener(path: Path) -> trio.SocketListener:
    sock = trio.socket.socket(trio.socket.AF_UNIX)
    await sock.bind(str(path))
    sock.listen()
    return trio.SocketListener(sock)


@trio_test
async def test_a_sequence_longer_than_a_frame_is_asked_for_by_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.wire.MAX_TOKENS", 3)
    async with served(tmp_path) as (keeper, socket), open_remote(socket, FINGERPRINT) as remote:
        await keep(keeper, [1, 2, 3, 4, 5])
        found = await remote.find(ROOT, [1, 2, 3, 4, 5], 5)
        assert (found.tokens, found.matched) == (3, 3)
