"""One client's connection: frames in, messages to the service, replies out.

    reader    takes frames off the socket, one message at a time, each handled before the next
    sender    waits for replies in the outbox and writes them
    service   (the step loop) calls reply(), which puts into the outbox and returns

How it ends:

- The peer closes: reading ends, the socket is hung up, its requests are cancelled at once.
- The peer shuts down its writing side only (as `nc -N` does): what runs is finished and sent, then we close. On a Unix
  socket both look like the end of the stream; poll() tells them apart, now and, while something runs, every 20 ms.
- The frames are broken, the hello is wrong or late: requests are cancelled, an error is sent, we close.
- The peer does not read: sending makes no progress for a time, or the outbox is full; we close without a word.
- The daemon says goodbye (an event): what runs is finished and sent, new requests are refused by the service, we close.
- The daemon cancels the handler: requests are cancelled, we close.

A well-framed message that is wrong gets an error and nothing else happens. A fault in here or in the service is logged
and closes this connection: no exception leaves the handler, since one that did would end every other connection.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from scheduler import log, protocol
from scheduler.checks import shown
from scheduler.codec import BadMessage, decode_request
from scheduler.errors import Overloaded, Refused
from scheduler.outbox import Outbox
from scheduler.peer import hung_up, unread_bytes
from store.framing import FRAME_BYTES, FrameDecoder, ProtocolError

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 64 << 10
# The kernel counts what is unread in pieces as they were sent; a slow reader shows that it reads by finishing one.
SEND_BYTES = 4 << 10
HANGUP_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may take. None of them is a matter of taste for a client that means well.

    hello_s: a local client says hello within milliseconds. frame_s: so does the rest of a frame arrive; a half frame
    must not hold its buffer for ever. frame_bytes: see store/framing.py. outbox_bytes: one reply of the largest frame.
    stalled_s: no byte read by the peer for so long; a person who pauses a terminal is cut, a slow reader is not.
    requests: answers that run or wait at the same time; beyond it a client wants its own queue. Half of what may wait
    for a row, so that one client does not take all of it.
    """

    hello_s: float = 5.0
    frame_s: float = 30.0
    frame_bytes: int = FRAME_BYTES
    outbox_bytes: int = FRAME_BYTES
    stalled_s: float = 30.0
    requests: int = 128


class Service(Protocol):
    """What a connection needs of the daemon. Everything is called in Trio's thread."""

    def hello(self) -> protocol.Hello:
        """The daemon's own hello, the answer to each client's."""
        ...

    async def submit(self, message: protocol.Submit, reply: Callable[[protocol.Reply], None]) -> int:
        """Validate, tokenize and queue; returns a row id. Raises errors.Refused; if cancelled, nothing is queued.

        From then on reply() is called, synchronously, in Trio's thread, with Delta..., then exactly one Done or Error
        for each of the message's n answers, with its id and their index. It never blocks and never raises.
        """
        ...

    def cancel(self, row_id: int) -> None:
        """Idempotent; leads to Done(finish_reason="cancelled") through reply."""
        ...

    @property
    def retry_after_s(self) -> float:
        """When one who asks for too much now had better come again."""
        ...

    def status(self) -> protocol.Status: ...

    async def change_adapters(self, message: protocol.LoadAdapter | protocol.UnloadAdapter) -> protocol.Adapters:
        """Load or unload an adapter; returns what to reply. Raises errors.Refused."""
        ...

    @property
    def num_given_up(self) -> int:
        """How much has been given up so far that was remembered, and is gone for good."""
        ...

    async def flush(self) -> bool:
        """Return when all that is remembered is on disk or given up; whether all of it is on disk."""
        ...


async def serve_connection(
    stream: trio.SocketStream,
    service: Service,
    limits: Limits,
    goodbye: trio.Event | None = None,
    open_connections: set[Connection] | None = None,
) -> str | None:
    """Serve one client until it or we are done, and close the stream. Raises nothing but Trio's cancellation.

    open_connections: this one is among them for as long as it lasts. Returns why the connection was cut, for a counter:
    an error code that ends connections, "stalled" or "outbox_full"; None where nothing was wrong.
    """
    connection = Connection(stream, service, limits)
    among = set() if open_connections is None else open_connections
    among.add(connection)
    try:
        await connection.run(goodbye)
    except Exception:
        logger.exception("%s: a fault of the daemon; the connection is closed", connection.name)
        connection.cut_by = "internal"
    finally:
        among.discard(connection)
        connection.cancel_rows()
        await trio.aclose_forcefully(stream)
    return connection.cut_by


class Connection:
    """See serve_connection()."""

    def __init__(self, stream: trio.SocketStream, service: Service, limits: Limits) -> None:
        self.name = "a client"
        self.cut_by: str | None = None
        self._stream = stream
        self._service = service
        self._limits = limits
        self._outbox = Outbox(limits.outbox_bytes)
        # What runs, by the client's id; None while the service has not taken it yet.
        self._rows: dict[protocol.RequestId, int | None] = {}
        # How many of its answers have yet to end.
        self._num_left: dict[protocol.RequestId, int] = {}
        # What was given up before the client came, or has been told.
        self._num_given_up = service.num_given_up
        self._greeted = False
        self._closing = False
        # Here waits the sender for replies, and there one who waits for the end of a request.
        self._unsent = trio.lowlevel.ParkingLot()
        self._ended = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()

    async def run(self, goodbye: trio.Event | None) -> None:
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._send)
            try:
                with trio.CancelScope() as reading:
                    if goodbye is not None:
                        nursery.start_soon(self._leave, goodbye, reading)
                    await self._read()
                    await self._finish_rows()
            except trio.BrokenResourceError:
                self._scope.cancel()
            except ProtocolError as error:
                self._fail(error.code, error.message)
            except Exception:
                logger.exception("%s: a fault of the daemon", self.name)
                self._fail("internal", "a fault of the daemon, which its log explains; the connection is closed")
            self._closing = True
            self._unsent.unpark_all()

    def cancel_rows(self) -> None:
        """Never raises, since nothing would catch it."""
        for row_id in list(self._rows.values()):
            try:
                if row_id is not None:
                    self._service.cancel(row_id)
            except Exception:
                logger.exception("%s: row %s could not be cancelled", self.name, row_id)
        self._rows.clear()
        self._num_left.clear()

    def check(self) -> None:
        """For when the service has no request left: none that it has taken counts as under way here."""
        left = [id for id, row_id in self._rows.items() if row_id is not None]
        assert not left, f"{self.name}: no request is left, but {left} are under way"
        assert self._rows.keys() == self._num_left.keys(), f"{self.name}: {self._rows}, but {self._num_left} answers"

    def _fail(self, code: str, message: str) -> None:
        """The last words of a connection that cannot go on."""
        logger.info("%s: closed: %s: %s", self.name, code, message)
        self.cut_by = code
        self._put(protocol.Error(code, message))
        self._closing = True
        self.cancel_rows()

    def _cut(self, reason: str, why: str) -> None:
        """The end of a connection that cannot be told why."""
        if not self._scope.cancel_called:
            logger.warning("%s: cut off: %s", self.name, why)
            self.cut_by = reason
        self._scope.cancel()

    # The reader.

    async def _read(self) -> None:
        """Serve messages until the peer ends its stream. Raises ProtocolError, trio.BrokenResourceError."""
        decoder = FrameDecoder(self._limits.frame_bytes)
        deadline = trio.current_time() + self._limits.hello_s
        while True:
            with trio.CancelScope(deadline=deadline) as patience:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            if patience.cancelled_caught:
                late = f"the rest of a frame did not come within {self._limits.frame_s:g} s"
                raise ProtocolError("timeout", late if self._greeted else f"no hello within {self._limits.hello_s:g} s")
            if not data:
                decoder.end()
                return
            decoder.feed(data)
            num_frames = 0
            for fields in decoder:
                num_frames += 1
                await self._handle(fields)
                # A client that sends a thousand messages at once does not stop the others' tokens meanwhile.
                await trio.lowlevel.checkpoint()
            if self._greeted and (num_frames or deadline == math.inf):
                deadline = trio.current_time() + self._limits.frame_s if decoder.mid_frame else math.inf

    async def _handle(self, fields: dict[str, Any]) -> None:
        try:
            if not self._greeted:
                self._greet(fields)
                return
            match decode_request(fields):
                case protocol.Submit() as message:
                    await self._submit(message)
                case protocol.Cancel(id):
                    if (row_id := self._rows.get(id)) is not None:
                        self._service.cancel(row_id)
                case protocol.Ping(nonce):
                    self._put(protocol.Pong(nonce))
                case protocol.AskStatus():
                    self._put(self._service.status())
                case protocol.Flush():
                    self._put(protocol.Flushed(await self._flush()))
                case protocol.LoadAdapter() | protocol.UnloadAdapter() as message:
                    await self._change_adapters(message)
                case protocol.ClientHello():
                    raise Refused("bad_request", "hello is said once, at the beginning")
        except Refused as refusal:
            about = refusal.id if isinstance(refusal, BadMessage) else None
            said = log.fields(id=about, code=refusal.code)
            logger.info("%s: a message is refused: %s: %s", self.name, refusal.code, refusal.message, extra=said)
            self._put(protocol.Error(refusal.code, refusal.message, about))

    def _greet(self, fields: dict[str, Any]) -> None:
        """Another version's hello may have other fields: its version is looked at before they are."""
        tag, version = fields.get("type"), fields.get("version")
        if tag != "hello":
            raise ProtocolError("hello_expected", f"the first frame must be a hello, not {shown(tag)}")
        if type(version) is int and version != protocol.PROTOCOL_VERSION:
            ours = protocol.PROTOCOL_VERSION
            raise ProtocolError("unsupported_version", f"this daemon speaks version {ours}, the client {version}")
        try:
            hello = decode_request(fields)
        except BadMessage as bad:
            raise ProtocolError(bad.code, bad.message) from bad
        assert isinstance(hello, protocol.ClientHello)
        self.name = f"client {hello.client}" if hello.client else self.name
        self._greeted = True
        self._put(self._service.hello())

    async def _submit(self, message: protocol.Submit) -> None:
        id = message.id
        if id in self._rows:
            raise BadMessage("duplicate_id", f"request {shown(id)} still runs, and goes on: choose another id", id)
        try:
            self._check_number(message.n)
        except Refused as refusal:
            log.request_finished(logger, request_id=id, finish=refusal.code, message=refusal.message, is_refused=True)
            self._put(_error(refusal, id))
            return
        try:
            self._rows[id], self._num_left[id] = None, message.n
            row_id = await self._service.submit(message, self._reply)
            # It may have ended meanwhile.
            if id in self._rows:
                self._rows[id] = row_id
        except Refused as refusal:
            self._reply(_error(refusal, id))

    def _check_number(self, n: int) -> None:
        """Raises Refused where a request asks for more answers than the connection may have now, or ever."""
        most, num_left = self._limits.requests, sum(self._num_left.values())
        if n > most:
            raise Refused(
                "bad_request",
                f"n is {n}, but a connection may have {most} answers under way (--max-requests-per-connection): ask "
                f"for {most} or fewer",
            )
        if num_left + n > most:
            raise Overloaded(
                f"{num_left} answers are under way on this connection, which may have {most} "
                "(--max-requests-per-connection); try again later",
                self._service.retry_after_s,
            )

    async def _flush(self) -> bool:
        is_on_disk = await self._service.flush()
        before, self._num_given_up = self._num_given_up, self._service.num_given_up
        return is_on_disk and self._num_given_up == before

    async def _change_adapters(self, message: protocol.LoadAdapter | protocol.UnloadAdapter) -> None:
        try:
            self._put(await self._service.change_adapters(message))
        except Refused as refusal:
            raise BadMessage(refusal.code, refusal.message, message.id) from refusal

    async def _finish_rows(self) -> None:
        """The peer sends no more: wait for the end of what runs, or of the peer."""
        while self._rows:
            if hung_up(self._stream.socket):
                self._scope.cancel()
            with trio.move_on_after(HANGUP_POLL_S):
                await self._ended.park()

    async def _leave(self, goodbye: trio.Event, reading: trio.CancelScope) -> None:
        await goodbye.wait()
        while self._rows:
            await self._ended.park()
        self._put(protocol.Error("shutting_down", "the daemon is going down"))
        reading.cancel()

    # The sender.

    def _reply(self, reply: protocol.Reply) -> None:
        """What the service calls: never blocks, never raises."""
        if isinstance(reply, protocol.Done | protocol.Error) and reply.id in self._num_left:
            # An error without an index refuses all of a request's answers.
            self._num_left[reply.id] -= 1
            if self._num_left[reply.id] == 0 or reply.index is None:
                del self._rows[reply.id], self._num_left[reply.id]
            self._ended.unpark_all()
        self._put(reply)

    def _put(self, reply: protocol.Reply) -> None:
        if self._closing:
            return
        try:
            self._outbox.put(reply)
        except (ProtocolError, ValueError) as error:
            self._cut("internal", f"a reply that no frame can hold: {error}")
        if self._outbox.full:
            self._cut("outbox_full", f"{self._outbox.num_bytes} bytes wait to be read")
        self._unsent.unpark_all()

    async def _send(self) -> None:
        with suppress(OSError):
            while self._outbox or not self._closing:
                if self._outbox:
                    await self._write(self._outbox.take())
                else:
                    await self._unsent.park()
        self._scope.cancel()

    async def _write(self, data: bytes) -> None:
        """Send it all, for as long as the peer reads on, however slowly. Raises OSError when it is gone."""
        rest = memoryview(data)
        while rest:
            unread = unread_bytes(self._stream.socket)
            with trio.move_on_after(self._limits.stalled_s) as patience:
                rest = rest[await self._stream.socket.send(rest[:SEND_BYTES]) :]
            if patience.cancelled_caught and unread_bytes(self._stream.socket) >= unread:
                self._cut("stalled", f"it has read nothing for {self._limits.stalled_s:g} s")


def _error(refusal: Refused, id: protocol.RequestId) -> protocol.Error:
    retry_after_s = refusal.retry_after_s if isinstance(refusal, Overloaded) else None
    return protocol.Error(refusal.code, refusal.message, id, retry_after_s)
