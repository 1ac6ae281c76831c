"""One connection to the process that keeps segments, from the daemon's side: questions out, answers back to who asked.

Whoever is cancelled while he waits leaves an answer that nobody takes: what it grants is given back when it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf
from pathlib import Path
from typing import Final, TypeVar

import trio

from store import wire
from store.framing import FrameDecoder, ProtocolError, encode_frame
from store.keeping import KeeperAway

RECEIVE_BYTES: Final = 64 << 10
# Who does not answer for so long is stopped, or stuck. For most questions nobody waits, and they may stand behind the
# sync of a large file.
ANSWER_S: Final = 120.0

A = TypeVar("A", bound=wire.Answer)


class _Asked:
    """A question, until its answer, or why there will be none, is here."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: wire.Answer | KeeperAway | None = None

    def settle(self, answer: wire.Answer | KeeperAway) -> None:
        self.answer = answer
        self.done.set()


class Connection:
    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._numbers = count(1)
        self._asked: dict[int, _Asked] = {}
        # Bounded by those who wait for answers: what is not answered is a few bytes.
        self._outbox, self._unsent = trio.open_memory_channel[wire.Request](inf)
        self._scope = trio.CancelScope()
        self._why = "the connection was closed"

    async def greet(self, hello: wire.Hello) -> Path:
        """Say hello; returns the folder. Raises ProtocolError if it is turned away, trio.BrokenResourceError."""
        await self._stream.send_all(encode_frame(wire.encode(hello)))
        decoder = FrameDecoder()
        while True:
            data = await self._stream.receive_some(RECEIVE_BYTES)
            decoder.feed(data)
            for said in decoder:
                match wire.decode(said, wire.REPLIES):
                    case wire.Welcome(_, folder):
                        return Path(folder)
                    case wire.Failure(code, message):
                        raise ProtocolError(code, message)
                    case _:
                        raise ProtocolError("bad_request", "the store's first message is no hello")
            if not data:
                decoder.end()
                raise ProtocolError("bad_frame", "the store hung up")

    async def run(self) -> str:
        """Send and receive until the connection ends; returns why."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._send)
            try:
                await self._receive()
            except (ProtocolError, trio.BrokenResourceError) as error:
                self._why = str(error)
            nursery.cancel_scope.cancel()
        return self._why

    def _end(self, why: str) -> KeeperAway:
        self._why = why
        self._scope.cancel()
        return KeeperAway(why)

    def close(self, why: str) -> None:
        """Those who wait are told that there will be no answer."""
        for asked in self._asked.values():
            asked.settle(KeeperAway(why))
        self._asked.clear()
        self._stream.socket.close()

    def post(self, message: wire.Request) -> None:
        """Send what is not answered, or whose answer nobody needs."""
        self._outbox.send_nowait(message)

    def number(self) -> int:
        return next(self._numbers)

    async def ask(self, kind: type[A], question: Callable[[int], wire.Question], patience_s: float = ANSWER_S) -> A:
        """Send question(n) and wait for its answer. Raises KeeperAway."""
        n, asked = self.number(), _Asked()
        self._asked[n] = asked
        try:
            self._outbox.send_nowait(question(n))
            with trio.move_on_after(patience_s):
                await asked.done.wait()
        finally:
            self._asked.pop(n, None)
        answer = asked.answer
        if answer is None:
            raise self._end(f"it has not answered for {patience_s:g} s")
        if isinstance(answer, KeeperAway):
            raise answer
        if not isinstance(answer, kind):
            raise self._end(f"it has answered with {type(answer).__name__} where {kind.__name__} belongs")
        return answer

    async def _send(self) -> None:
        try:
            async for message in self._unsent:
                await self._stream.send_all(encode_frame(wire.encode(message)))
        except trio.BrokenResourceError as error:
            self._end(str(error))

    async def _receive(self) -> None:
        decoder = FrameDecoder()
        while True:
            data = await self._stream.receive_some(RECEIVE_BYTES)
            if not data:
                decoder.end()
                raise ProtocolError("bad_frame", "the store hung up")
            decoder.feed(data)
            for said in decoder:
                match wire.decode(said, wire.REPLIES):
                    case wire.Failure(code, message):
                        raise ProtocolError(code, message)
                    case wire.Welcome():
                        raise ProtocolError("bad_request", "the store says hello twice")
                    case answer:
                        self._take(answer)

    def _take(self, answer: wire.Answer) -> None:
        asked = self._asked.pop(answer.n, None)
        match answer:
            case wire.Away(_, message) if asked is not None:
                asked.settle(KeeperAway(message))
            case _ if asked is not None:
                asked.settle(answer)
            case wire.FoundChain(_, pin, ids=ids) if ids:
                self.post(wire.Release(pin))
            case wire.Reserved(_, file) if file is not None:
                self.post(wire.Abandon(self.number(), file))
