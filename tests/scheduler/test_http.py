"""The HTTP server, over real sockets: what it serves, what it refuses, and that nobody can end it."""

import contextlib
import gzip
import json
from collections.abc import Awaitable, Callable

import pytest
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from scheduler import http
from scheduler.http import Health, serve_http
from scheduler.metrics import Metrics, Readings

Reply = tuple[int, dict[str, str], bytes]


def on_server(
    test: Callable[[int], Awaitable[None]],
    metrics: Metrics | None = None,
    health: Callable[[], Health] = lambda: Health(True),
) -> None:
    """Run test(port) against a server; fail, not hang, if something never answers."""

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                port = await nursery.start(serve_http, "127.0.0.1", 0, metrics or Metrics(), health)
                await test(port)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def connect(port: int) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port)


async def read_reply(stream: trio.SocketStream, has_body: bool = True) -> Reply:
    """Read exactly one response by its Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = await stream.receive_some()
        assert part, f"closed after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while has_body and len(body) < int(headers["content-length"]):
        part = await stream.receive_some()
        assert part, "closed inside a body"
        body += part
    return int(first.split()[1]), headers, body


async def drip(stream: trio.SocketStream) -> None:
    while True:
        await stream.send_all(b"G")
        await trio.sleep(0.01)


async def ask(port: int, request: str, has_body: bool = True) -> Reply:
    async with await connect(port) as stream:
        await stream.send_all(request.encode("latin-1"))
        return await read_reply(stream, has_body)


def get(path: str, *headers: str, method: str = "GET") -> str:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: laned", *headers, "", ""])


def test_metrics_are_served_in_the_form_the_scraper_prefers() -> None:
    metrics = Metrics(lambda: Readings(running=3))

    async def test(port: int) -> None:
        status, headers, body = await ask(port, get("/metrics"))
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert "laned_requests_running" in {family.name for family in parse_text(body.decode())}
        assert b"laned_requests_running 3.0\n" in body

        accept = "Accept: application/openmetrics-text; version=1.0.0"
        status, headers, body = await ask(port, get("/metrics?x=1", accept, "Accept-Encoding: br, gzip"))
        assert status == 200
        assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert headers["content-encoding"] == "gzip"
        assert "laned_requests" in {family.name for family in parse_openmetrics(gzip.decompress(body).decode())}

    on_server(test, metrics)


def test_health_is_the_daemons_at_the_moment_of_the_probe() -> None:
    now = Health(False, "The model is loading.")

    async def test(port: int) -> None:
        nonlocal now
        assert (await ask(port, get("/healthz")))[::2] == (503, b"The model is loading.\n")
        status, headers, body = await ask(port, get("/healthz", "Accept: application/json"))
        assert (status, headers["content-type"]) == (503, "application/json")
        assert json.loads(body) == {"status": "unavailable", "reason": "The model is loading."}
        now = Health(True)
        assert (await ask(port, get("/healthz")))[::2] == (200, b"ok\n")
        assert json.loads((await ask(port, get("/healthz", "Accept: application/json")))[2])["status"] == "ok"

    on_server(test, health=lambda: now)


def test_head_has_the_headers_of_get_and_no_body() -> None:
    async def test(port: int) -> None:
        async with await connect(port) as stream:
            await stream.send_all(get("/healthz", method="HEAD").encode())
            status, headers, body = await read_reply(stream, has_body=False)
            assert (status, headers["content-length"], body) == (200, "3", b"")
            # The connection is still in step: the next answer is a whole one.
            await stream.send_all(get("/healthz").encode())
            assert (await read_reply(stream))[2] == b"ok\n"

    on_server(test)


def test_a_connection_is_kept_for_pipelined_requests_and_closed_when_asked() -> None:
    async def test(port: int) -> None:
        async with await connect(port) as stream:
            await stream.send_all((get("/healthz") * 2 + get("/healthz", "Connection: close")).encode())
            data = b""
            while part := await stream.receive_some():
                data += part
            assert data.count(b"HTTP/1.1 200") == 3

    on_server(test)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (get("/"), 404),
        (get("/metrics/x"), 404),
        (get("/metrics", method="DELETE"), 405),
        (get("/metrics", "Content-Length: 4", method="POST") + "abcd", 405),
        (get("/healthz", "Content-Length: 4") + "abcd", 200),
        (get("/healthz", "Content-Length: 999999") + "x" * 70_000, 413),
        (get("/healthz", "Content-Length: 4", "Expect: 100-continue"), 417),
        ("GET /healthz HTTP/1.1\r\n\r\n", 400),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (get("/healthz", "X: " + "y" * 70_000), 431),
        ("GET /healthz HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_what_is_asked_wrongly_is_answered_and_the_next_client_is_served(request_text: str, status: int) -> None:
    async def test(port: int) -> None:
        assert (await ask(port, request_text))[0] == status
        assert (await ask(port, get("/healthz")))[0] == 200

    on_server(test)


def test_clients_that_vanish_or_babble_end_nothing() -> None:
    async def test(port: int) -> None:
        for cut in (0, 1, 10, 30):
            stream = await connect(port)
            await stream.send_all(get("/metrics").encode()[:cut])
            await stream.aclose()
        for _ in range(5):
            stream = await connect(port)
            await stream.send_all(get("/metrics").encode() * 50)
            await stream.aclose()
        assert (await ask(port, get("/healthz")))[0] == 200

    on_server(test)


def test_a_failing_owner_is_a_500_and_no_more() -> None:
    def broken() -> Health:
        raise RuntimeError("no reading")

    def unreadable() -> Readings:
        raise RuntimeError("no reading")

    async def test(port: int) -> None:
        assert (await ask(port, get("/healthz")))[0] == 500
        assert (await ask(port, get("/metrics")))[0] == 500

    on_server(test, Metrics(unreadable), broken)


def test_a_slow_request_is_cut_however_often_it_adds_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_REQUEST_S", 0.2)

    async def test(port: int) -> None:
        async with await connect(port) as silent, await connect(port) as dripping:
            assert await silent.receive_some() == b""
            with pytest.raises(trio.BrokenResourceError):
                await drip(dripping)
        assert (await ask(port, get("/healthz")))[0] == 200

    on_server(test)


def test_more_connections_than_allowed_are_closed_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_CONNECTIONS", 2)

    async def test(port: int) -> None:
        async with await connect(port) as first, await connect(port) as second:
            for stream in (first, second):
                await stream.send_all(get("/healthz").encode())
                assert (await read_reply(stream))[0] == 200
            async with await connect(port) as third:
                assert await third.receive_some() == b""
        served = False
        while not served:
            with contextlib.suppress(trio.BrokenResourceError):
                async with await connect(port) as stream:
                    await stream.send_all(get("/healthz").encode())
                    served = (await stream.receive_some()).startswith(b"HTTP/1.1 200")

    on_server(test)
