"""The smallest HTTP server that Prometheus and a supervisor's probe need: GET and HEAD of /metrics and /healthz.

HTTP/1.1 by h11, which holds the rules; this file moves bytes and keeps limits: of the head's size, of a body (nobody
needs one here), of the time that a request or a client's reading may take, of connections. Whatever a client does,
its handler returns; an exception that escaped would end the daemon.
"""

import gzip
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol

import h11
import trio
from prometheus_client.exposition import choose_encoder, gzip_accepted

from scheduler.metrics import Metrics

# A scraper's head is under 1 KiB; a body on GET is legal but pointless, so a small one is skipped.
_HEAD_BYTES = 16 * 1024
_BODY_BYTES = 16 * 1024
# Prometheus scrapes every minute by default and likes to keep its connection.
_IDLE_S = 120.0
# For a connection's first request, for the rest of any once its first byte is here, and for taking the response.
_REQUEST_S = 10.0
# A handful of scrapers and probes. Beyond that a connection is closed at once, so that sockets stay for clients.
_CONNECTIONS = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are being served. reason: a sentence, where they are not."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class _TaskStatus(Protocol):
    def started(self, value: int) -> None: ...


async def serve_http(
    host: str,
    port: int,
    metrics: Metrics,
    health: Callable[[], Health],
    *,
    task_status: _TaskStatus = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled. Started with the port that is listened on (port 0 takes a free one).

    health is called at each probe, in Trio's thread. Raises OSError where host and port cannot be listened on.
    """
    listeners = await trio.open_tcp_listeners(port, host=host)
    open_connections = 0

    async def handle(stream: trio.SocketStream) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            async with stream:
                if open_connections <= _CONNECTIONS:
                    await _Connection(stream, metrics, health).run()
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            logger.debug("an HTTP client went away")
        except Exception:
            logger.exception("an HTTP handler failed; its connection was closed")
        finally:
            open_connections -= 1

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, handle, listeners)
        task_status.started(int(listeners[0].socket.getsockname()[1]))


class _Connection:
    """One client: request, response, and again as long as both sides keep the connection."""

    def __init__(self, stream: trio.SocketStream, metrics: Metrics, health: Callable[[], Health]) -> None:
        self._stream = stream
        self._metrics = metrics
        self._health = health
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)

    async def run(self) -> None:
        patience_s = _REQUEST_S
        while True:
            try:
                request = await self._read_request(patience_s)
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint)
                return
            if request is None:
                return
            await self._send(request.method.decode("ascii"), self._answer(request))
            if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                return
            self._h11.start_next_cycle()
            patience_s = _IDLE_S

    async def _read_request(self, patience_s: float) -> h11.Request | None:
        """The next request, its body skipped; None where the client has gone, idles or is slow.

        Raises h11.RemoteProtocolError for what is not HTTP or too large.
        """
        request, body_bytes = None, 0
        with trio.move_on_after(patience_s) as limit:
            while True:
                event = self._h11.next_event()
                if event is h11.NEED_DATA:
                    if self._h11.they_are_waiting_for_100_continue:
                        raise h11.RemoteProtocolError("no body is wanted", error_status_hint=417)
                    data = await self._stream.receive_some()
                    # The clock of a request starts with its first byte, and more bytes do not wind it up again.
                    limit.deadline = min(limit.deadline, trio.current_time() + _REQUEST_S)
                    self._h11.receive_data(data)
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body_bytes += len(event.data)
                    if body_bytes > _BODY_BYTES:
                        raise h11.RemoteProtocolError("too large a body", error_status_hint=413)
                elif isinstance(event, h11.EndOfMessage):
                    return request
                else:
                    return None
        return None

    def _answer(self, request: h11.Request) -> _Response:
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        path = request.target.split(b"?", 1)[0]
        if path not in (b"/metrics", b"/healthz"):
            return _text(404, "Not found: this server has /metrics and /healthz.\n")
        if request.method not in (b"GET", b"HEAD"):
            return _text(405, "Only GET and HEAD are served here.\n", ("Allow", "GET, HEAD"))
        try:
            if path == b"/metrics":
                return self._scrape(headers.get("accept", ""), headers.get("accept-encoding", ""))
            return self._probe(headers.get("accept", ""))
        except Exception:
            logger.exception("%s failed", path.decode("ascii"))
            return _text(500, "The daemon could not answer; its log says why.\n")

    def _scrape(self, accept: str, accept_encoding: str) -> _Response:
        encode, content_type = choose_encoder(accept)
        body = encode(self._metrics.registry)
        if gzip_accepted(accept_encoding):
            packed = gzip.compress(body, compresslevel=1)
            return _Response(200, content_type, packed, (("Content-Encoding", "gzip"), _VARY))
        return _Response(200, content_type, body, (_VARY,))

    def _probe(self, accept: str) -> _Response:
        health = self._health()
        status = 200 if health.ok else 503
        if "application/json" in accept:
            report = {"status": "ok" if health.ok else "unavailable", "reason": health.reason or None}
            return _Response(status, "application/json", json.dumps(report).encode() + b"\n", _NOT_STORED)
        said = "ok" if health.ok else health.reason
        return _Response(status, "text/plain; charset=utf-8", f"{said}\n".encode(), _NOT_STORED)

    async def _send(self, method: str, response: _Response) -> None:
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *response.headers,
        ]
        parts = [self._h11.send(h11.Response(status_code=response.status, headers=headers))]
        if method != "HEAD":
            parts.append(self._h11.send(h11.Data(data=response.body)))
        parts.append(self._h11.send(h11.EndOfMessage()))
        with trio.move_on_after(_REQUEST_S) as limit:
            await self._stream.send_all(b"".join(part for part in parts if part is not None))
        if limit.cancelled_caught:
            raise trio.BrokenResourceError("the client reads too slowly")

    async def _refuse(self, status: int) -> None:
        """Answer what could not be understood, if an answer is still possible, before the connection is closed."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = _text(status, "This is not a request that can be served here.\n", ("Connection", "close"))
            await self._send("GET", response)


_VARY = ("Vary", "Accept, Accept-Encoding")
_NOT_STORED = (("Cache-Control", "no-store"),)


def _text(status: int, said: str, *headers: tuple[str, str]) -> _Response:
    return _Response(status, "text/plain; charset=utf-8", said.encode(), headers)
