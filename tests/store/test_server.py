"""The store's process: what its clients may do, and what happens when they, or it, are killed."""

from __future__ import annotations

import os
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from store import wire
from store.checkpoint import Part
from store.framing import FrameDecoder, encode_frame
from store.keeper import LocalKeeper
from store.keeping import Keeper
from store.remote import open_remote
from store.segment import Segment
from store.segment_file import write_segment
from tests.scheduler.trio_test import trio_test, until
from tests.store.keepers import FINGERPRINT, daemon, served
from tests.store.rows import Row
from tests.store.segments import ROOT, segment
from tests.store.test_store import recall, remember

ROW = Row()
MIB = 1 << 20


class Raw:
    """A client that says what it is told to."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder()

    async def say(self, **said: Any) -> None:
        await self.stream.send_all(encode_frame(said))

    async def say_for_ever(self, **said: Any) -> None:
        while True:
            await self.say(**said)

    async def hear(self) -> wire.Reply | None:
        """None: the store has hung up."""
        while True:
            for said in self._decoder:
                return wire.decode(said, wire.REPLIES)
            data = await self.stream.receive_some(65536)
            if not data:
                return None
            self._decoder.feed(data)


@asynccontextmanager
async def raw(socket: Path, greets: bool = True) -> AsyncIterator[Raw]:
    async with await trio.open_unix_socket(socket) as stream:
        client = Raw(stream)
        if greets:
            await client.say(type="hello", version=wire.VERSION, fingerprint=FINGERPRINT)
            assert isinstance(await client.hear(), wire.Welcome)
        yield client


async def keep(keeper: Keeper, tokens: Sequence[int], parent: Segment | None = None) -> Segment:
    """A segment on disk."""
    start = 0 if parent is None else parent.stop
    part: Part = ROW.part([*range(start), *tokens], start)
    made = segment(tokens, parent, tensors=part.tensors)
    temporary = await keeper.reserve(made.nbytes)
    assert temporary is not None
    write(temporary, made, part)
    assert await keeper.commit(temporary) == "kept"
    return made


def write(path: Path, what: Segment, part: Part) -> None:
    file = os.open(path, os.O_RDWR)
    write_segment(file, what, part.buffers)
    os.close(file)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"type": "stat", "n": 1}, "bad_request"),
        ({"type": "hello", "version": 99, "whatever": 1}, "unsupported_version"),
        ({"type": "hello", "version": wire.VERSION}, "bad_request"),
        ({"type": "fish"}, "bad_request"),
    ],
)
@trio_test
async def test_who_does_not_say_hello_is_told_why_and_cut_off(said: dict[str, Any], code: str, tmp_path: Path) -> None:
    async with served(tmp_path) as (_, socket), raw(socket, greets=False) as client:
        await client.say(**said)
        answer = await client.hear()
        assert isinstance(answer, wire.Failure)
        assert answer.code == code
        assert await client.hear() is None


@pytest.mark.parametrize(
    "said",
    [
        {"type": "hello", "version": wire.VERSION, "fingerprint": FINGERPRINT},
        {"type": "commit", "n": 1, "file": "0123456789abcdef.writing"},
        {"type": "abandon", "n": 1, "file": "0123456789abcdef.writing"},
        {"type": "find", "n": 1, "root": ROOT, "limit": -1, "tokens": b""},
    ],
)
@trio_test
async def test_who_asks_what_nobody_may_is_cut_off_and_others_are_not(said: dict[str, Any], tmp_path: Path) -> None:
    async with served(tmp_path) as (_, socket), raw(socket) as other, raw(socket) as client:
        await client.say(**said)
        assert isinstance(await client.hear(), wire.Failure)
        assert await client.hear() is None
        await other.say(type="stat", n=1)
        assert isinstance(await other.hear(), wire.Stats)


@trio_test
async def test_bytes_that_are_no_frames_end_the_connection(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, socket), raw(socket) as client:
        await client.stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        answer = await client.hear()
        assert isinstance(answer, wire.Failure)
        assert answer.code == "frame_too_large"


@trio_test
async def test_who_never_says_hello_or_never_reads_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.server.HELLO_S", 0.05)
    monkeypatch.setattr("store.server.SEND_S", 0.05)
    async with served(tmp_path) as (_, socket):
        async with raw(socket, greets=False) as silent:
            assert isinstance(await silent.hear(), wire.Failure)
            assert await silent.hear() is None
        async with raw(socket) as deaf:
            with pytest.raises(trio.BrokenResourceError):
                await deaf.say_for_ever(type="stat", n=1)


@trio_test
async def test_one_client_may_not_release_or_commit_what_is_anothers(tmp_path: Path) -> None:
    async with served(tmp_path) as (keeper, socket), raw(socket) as owner, raw(socket) as thief:
        await keep(keeper, [1, 2])
        await owner.say(type="find", n=1, root=ROOT, limit=2, tokens=array("I", [1, 2]).tobytes())
        found = await owner.hear()
        assert isinstance(found, wire.FoundChain)
        assert len(found.ids) == 1
        await owner.say(type="reserve", n=2, nbytes=100)
        reserved = await owner.hear()
        assert isinstance(reserved, wire.Reserved)
        await thief.say(type="release", pin=found.pin)
        await thief.say(type="commit", n=1, file=reserved.file)
        assert isinstance(await thief.hear(), wire.Failure)
        assert set(keeper._shelf._pins) == {found.pin}
        await owner.say(type="release", pin=found.pin)
        await owner.say(type="abandon", n=3, file=reserved.file)
        assert await owner.hear() == wire.Finished(3)
        assert not keeper._shelf._pins


@trio_test
async def test_a_vanished_client_leaves_no_pin_and_no_file(tmp_path: Path) -> None:
    async with served(tmp_path) as (keeper, socket):
        await keep(keeper, [1, 2])
        async with raw(socket) as client:
            await client.say(type="find", n=1, root=ROOT, limit=2, tokens=array("I", [1, 2]).tobytes())
            await client.hear()
            await client.say(type="reserve", n=2, nbytes=100)
            assert isinstance(await client.hear(), wire.Reserved)
            assert len(list((tmp_path / "store").glob("*.writing"))) == 1
        await until(lambda: not keeper._shelf._pins and not list((tmp_path / "store").glob("*.writing")))


@trio_test
async def test_a_commit_that_has_arrived_is_carried_out_for_nobody(tmp_path: Path) -> None:
    async with served(tmp_path) as (keeper, socket):
        made = segment([1, 2], tensors=ROW.part([1, 2]).tensors)
        async with raw(socket) as client:
            await client.say(type="reserve", n=1, nbytes=100)
            reserved = await client.hear()
            assert isinstance(reserved, wire.Reserved)
            assert reserved.file is not None
            write(tmp_path / "store" / reserved.file, made, ROW.part([1, 2]))
            await client.say(type="commit", n=2, file=reserved.file)
        await until(lambda: keeper._shelf.get(made.id) is not None)


class Slow(LocalKeeper):
    """Commits wait until they are let go."""

    gate: trio.Event

    async def commit(self, temporary: Path) -> Any:
        await self.gate.wait()
        return await super().commit(temporary)


@trio_test
async def test_what_is_kept_is_found_while_somebody_commits(tmp_path: Path) -> None:
    async with served(tmp_path) as (keeper, socket), open_remote(socket, FINGERPRINT) as remote:
        first = await keep(remote, [1, 2])
        keeper.__class__ = Slow
        keeper.gate = trio.Event()  # type: ignore[attr-defined]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep, remote, [5, 6])
            for _ in range(100):
                chain = await remote.find(ROOT, [1, 2], 2)
                assert [kept.segment.id for kept in chain.kept] == [first.id]
                await remote.release(chain.pin)
            keeper.gate.set()  # type: ignore[attr-defined]
        assert (await remote.find(ROOT, [5, 6], 2)).tokens == 2


@trio_test
async def test_daemons_of_several_models_share_a_store(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (keeper, socket),
        daemon(socket, "model-1") as one,
        daemon(socket, "model-1") as two,
        daemon(socket, "model-2") as other,
    ):
        remember(one, ROW, range(50))
        remember(other, ROW, range(70))
        await one.flush()
        await other.flush()
        assert (await recall(two, ROW, range(60))).disk_tokens == 50
        assert (await recall(other, ROW, range(80))).disk_tokens == 70
        assert (await recall(one, ROW, range(80))).disk_tokens == 50
        assert (await keeper.stat()).foreign_bytes == 0
