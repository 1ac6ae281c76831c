"""A keeper for the clients of a socket: the other end of store/remote.py. See store/wire.py for what is said.

Each question is answered by a task of its own, so that nobody who asks what is kept waits for somebody's sync. What a
client has pinned or reserved is given up when its connection ends, but not before what it has asked is done: a commit
that has arrived is carried out, whether anybody is left to hear of it or not.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from store import wire
from store.framing import FrameDecoder, ProtocolError, encode_frame
from store.keeping import Keeper, KeeperAway

logger = logging.getLogger(__name__)

RECEIVE_BYTES: Final = 64 << 10
HELLO_S: Final = 5.0
# Answers are small: a client that does not read them for so long is stopped or broken.
SEND_S: Final = 30.0
# A daemon asks once for each request that arrives, and has one commit under way.
MAX_QUESTIONS: Final = 256
# To give up what a client had, when we end ourselves: no longer than a supervisor waits.
CLEANUP_S: Final = 2.0

# The client's end of the stream, and ours.
GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)


async def serve_client(stream: trio.SocketStream, keeper: Keeper, greet: Callable[[str], None]) -> None:
    """Serve one daemon until it or we are done. Raises nothing but Trio's cancellation.

    greet: called with the fingerprint of the model that it serves.
    """
    client = _Client(stream, keeper)
    try:
        await client.run(greet)
    except Exception:
        logger.exception("a fault of the store; the connection is closed")
    finally:
        await client.give_up()
        await trio.aclose_forcefully(stream)


class _Client:
    def __init__(self, stream: trio.SocketStream, keeper: Keeper) -> None:
        self._stream = stream
        self._keeper = keeper
        self._pins: set[int] = set()
        self._reserved: set[str] = set()
        self._sending = trio.Lock()
        self._questions = trio.Semaphore(MAX_QUESTIONS)

    async def run(self, greet: Callable[[str], None]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await self._read(nursery, greet)
        except* ProtocolError as group:
            error = group.exceptions[0]
            assert isinstance(error, ProtocolError)
            logger.warning("a client is cut off: %s: %s", error.code, error.message)
            await self._send(wire.Failure(error.code, error.message))

    async def _read(self, nursery: trio.Nursery, greet: Callable[[str], None]) -> None:
        """Until the client ends its stream, if need be in the middle of a frame. Raises ProtocolError."""
        decoder = FrameDecoder()
        greeted = False
        deadline = trio.current_time() + HELLO_S
        while True:
            data = b""
            with trio.CancelScope(deadline=deadline) as patience, suppress(*GONE):
                data = await self._stream.receive_some(RECEIVE_BYTES)
            if patience.cancelled_caught:
                raise ProtocolError("bad_request", f"no hello within {HELLO_S:g} s")
            if not data:
                return
            decoder.feed(data)
            for said in decoder:
                if greeted:
                    await self._handle(wire.decode(said, wire.REQUESTS), nursery)
                else:
                    greet(self._hello(said).fingerprint)
                    greeted = True
                    deadline = float("inf")
                    await self._send(wire.Welcome(wire.VERSION, str(self._keeper.folder.absolute())))

    def _hello(self, said: dict[str, object]) -> wire.Hello:
        """Another version's hello may have other fields: its version is looked at before they are."""
        if said.get("type") == "hello" and said.get("version") != wire.VERSION:
            raise ProtocolError("unsupported_version", f"the store speaks version {wire.VERSION}")
        hello = wire.decode(said, wire.REQUESTS)
        if not isinstance(hello, wire.Hello):
            raise ProtocolError("bad_request", "the first message must be a hello")
        return hello

    async def _handle(self, message: wire.Request, nursery: trio.Nursery) -> None:
        match message:
            case wire.Hello():
                raise ProtocolError("bad_request", "hello is said once, at the beginning")
            case wire.Release(pin):
                if pin in self._pins:
                    self._pins.remove(pin)
                    with suppress(KeeperAway):
                        await self._keeper.release(pin)
            case _:
                await self._questions.acquire()
                nursery.start_soon(self._answer, message)

    async def _answer(self, question: wire.Question) -> None:
        try:
            try:
                answer = await self._do(question)
            except KeeperAway as away:
                answer = wire.Away(question.n, str(away))
            await self._send(answer)
        finally:
            self._questions.release()

    async def _do(self, question: wire.Question) -> wire.Answer:
        n, keeper = question.n, self._keeper
        match question:
            case wire.Find(_, root, limit, tokens):
                asked = array("I", tokens)
                chain = await keeper.find(root, asked, limit)
                if chain.kept:
                    self._pins.add(chain.pin)
                ids = tuple(kept.segment.id for kept in chain.kept)
                return wire.FoundChain(n, chain.pin, chain.matched, chain.tokens, ids)
            case wire.Condemn(_, id_):
                await keeper.condemn(id_)
            case wire.Reserve(_, nbytes):
                temporary = await keeper.reserve(nbytes)
                if temporary is None:
                    return wire.Reserved(n)
                self._reserved.add(temporary.name)
                return wire.Reserved(n, temporary.name)
            case wire.Commit(_, file):
                return wire.Committed(n, await keeper.commit(keeper.folder / self._take(file)))
            case wire.Abandon(_, file):
                await keeper.abandon(keeper.folder / self._take(file))
            case wire.Flush():
                await keeper.flush()
            case wire.Stat():
                return wire.Stats.of(n, await keeper.stat())
        return wire.Finished(n)

    def _take(self, file: str) -> str:
        """The name of a temporary that this client has reserved, once."""
        if file not in self._reserved:
            raise ProtocolError("bad_request", f"{file} was not reserved on this connection")
        self._reserved.remove(file)
        return file

    async def _send(self, message: wire.Reply) -> None:
        """A client that cannot be told is gone: reading will notice."""
        async with self._sending:
            with trio.move_on_after(SEND_S) as patience, suppress(*GONE):
                await self._stream.send_all(encode_frame(wire.encode(message)))
            if patience.cancelled_caught:
                await trio.aclose_forcefully(self._stream)

    async def give_up(self) -> None:
        with trio.move_on_after(CLEANUP_S, shield=True), suppress(KeeperAway):
            while self._pins:
                await self._keeper.release(self._pins.pop())
            while self._reserved:
                await self._keeper.abandon(self._keeper.folder / self._reserved.pop())
