"""The whole gateway over HTTP, in front of a service without a model: what goes around the dialects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.gateway.guard import Guard
from scheduler.gateway.settings import Settings
from tests.gateway.http_client import Exchange, asking, call, post
from tests.gateway.in_process import CHAT, chat, echoing, gateway_at
from tests.gateway.process import gateway_to
from tests.scheduler import echo
from tests.scheduler.trio_test import trio_test, until


def events(stream: bytes) -> list[Any]:
    """What an event stream says; of comments their text."""
    said = []
    for block in stream.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                said.append(json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]")
            elif line.startswith(":"):
                said.append(line)
    return said


@trio_test
async def test_a_chat_whole_and_as_events(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (url, _):
        status, said = await post(url, CHAT, chat("one two"))
        assert (status, said["choices"][0]["message"]["content"]) == (200, "one two ")
        status, headers, body = await call(url, "POST", CHAT, chat("one two", stream=True))
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        *chunks, end = events(body)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one two "
        assert end == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@trio_test
async def test_a_connection_is_closed_or_used_again(tmp_path: Path, stream: bool) -> None:
    async with echoing(tmp_path) as (url, _):
        async with asking(url, "POST", CHAT, chat("one", stream=stream), {"Connection": "close"}) as exchange:
            await exchange.head()
            await exchange.body()
            assert await exchange.stream.receive_some() == b""
        async with asking(url, "GET", "/health") as first:
            await first.head()
            await first.body()
            for _ in range(3):
                again = Exchange(first.stream)
                body = json.dumps(chat("one", stream=stream)).encode()
                await again.send("POST", CHAT, {"Content-Type": "application/json"}, body)
                await again.finish()
                assert await again.head() == 200
                assert b"one" in await again.body()


@trio_test
async def test_every_response_has_a_number(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (url, _):
        answers = [
            await call(url, "POST", CHAT, body) for body in (chat("one"), chat("refuse"), chat("a", stream=True))
        ]
        numbers = {headers["x-request-id"] for _, headers, _ in answers}
        assert len(numbers) == 3


@pytest.mark.parametrize(
    ("path", "error_type"), [(CHAT, "rate_limit_error"), ("/v1/messages", "rate_limit_error"), ("/v1/responses", None)]
)
@pytest.mark.parametrize("stream", [False, True])
@trio_test
async def test_too_much_waiting_is_told_with_a_time(
    tmp_path: Path, path: str, error_type: str | None, stream: bool
) -> None:
    async with echoing(tmp_path) as (url, _):
        body = {"input": "full", "stream": stream} if "responses" in path else chat("full", max_tokens=9, stream=stream)
        status, headers, said = await call(url, "POST", path, body)
        assert (status, headers["retry-after"]) == (429, "3")
        assert error_type in (None, json.loads(said)["error"]["type"])


@trio_test
async def test_a_failure_before_and_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (url, _):
        assert (await post(url, CHAT, chat("fail", stream=True)))[0] == 500
        status, _, body = await call(url, "POST", CHAT, chat("one fail", stream=True))
        *_, last = events(body)
        assert (status, last["error"]["code"]) == (200, "model_failed")
        status, _, body = await call(url, "POST", "/v1/messages", chat("one fail", stream=True, max_tokens=9))
        assert b"event: error\n" in body
        assert events(body)[-1]["error"]["type"] == "api_error"
        status, _, body = await call(url, "POST", "/v1/responses", {"input": "one fail", "stream": True})
        assert events(body)[-1]["type"] == "response.failed"


@pytest.mark.parametrize(
    ("path", "sign"),
    [(CHAT, b": keep-alive\n\n"), ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n')],
)
@trio_test
async def test_a_silent_stream_shows_signs_of_life(tmp_path: Path, path: str, sign: bytes) -> None:
    async with echoing(tmp_path, Settings(keep_alive_s=0.02, drain_s=1.0)) as (url, daemon):
        async with asking(url, "POST", path, chat("hang", stream=True, max_tokens=9)) as exchange:
            assert await exchange.head() == 200
            heard = b""
            async for piece in exchange.pieces():
                heard += piece
                if heard.count(sign) == 3:
                    break
        await until(lambda: daemon.service.num_cancelled == 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["hang", "one hang"])
@trio_test
async def test_a_client_that_goes_cancels_its_request(tmp_path: Path, words: str, stream: bool) -> None:
    async with echoing(tmp_path) as (url, daemon):
        async with asking(url, "POST", CHAT, chat(words, stream=stream)):
            await until(lambda: len(daemon.service.rows) == 1)
        await until(lambda: daemon.service.num_cancelled == 1)
        # With a status of its own where nothing had been sent yet.
        counted = re.compile(rb'laned_gateway_requests_total{route="/v1/chat/completions",status="(200|499)"} 1.0')
        while not counted.search((await call(url, "GET", "/metrics"))[2]):  # noqa: ASYNC110
            await trio.sleep(0.01)


@trio_test
async def test_several_prompts_with_one_that_fails(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (url, daemon):
        status, said = await post(url, "/v1/completions", {"prompt": ["hang", "one fail", "hang"]})
        assert (status, said["error"]["code"]) == (500, "model_failed")
        await until(lambda: daemon.service.num_cancelled == 2)
        status, _, body = await call(url, "POST", "/v1/completions", {"prompt": ["one", "two"], "stream": True})
        *chunks, end = events(body)
        texts = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in chunks[:2]}
        assert (texts, end) == ({0: "one ", 1: "two "}, "[DONE]")


@trio_test
async def test_without_a_daemon_until_it_is_back(tmp_path: Path) -> None:
    socket = tmp_path / "d.sock"
    # A process of its own, as the daemon here counts the descriptors of this one.
    with gateway_to(tmp_path, socket) as running:
        url = running.url
        for method, path, body in (("GET", "/health", None), ("GET", "/v1/models", None), ("POST", CHAT, chat("one"))):
            status, headers, said = await call(url, method, path, body)
            assert (status, headers["retry-after"]) == (503, "5")
            assert b"laned serve" in said
        for _ in range(2):
            async with echo.serving(socket):
                status, said = await post(url, CHAT, chat("one"))
                assert (status, said["choices"][0]["message"]["content"]) == (200, "one ")
                assert (await call(url, "GET", "/health"))[0] == 200
            assert (await call(url, "POST", CHAT, chat("one")))[0] == 503


@trio_test
async def test_a_daemon_that_goes_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (url, daemon), asking(url, "POST", CHAT, chat("one hang", stream=True)) as exchange:
        assert await exchange.head() == 200
        await until(lambda: len(daemon.service.rows) == 1)
        for scope in daemon.scopes:
            scope.cancel()
        *_, last = events(await exchange.body())
        assert last["error"]["code"] == "daemon_unavailable"


@trio_test
async def test_names_of_the_model(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (url, _):
        assert [model["id"] for model in json.loads((await call(url, "GET", "/v1/models"))[2])["data"]] == ["none"]
        assert (await post(url, CHAT, chat("one", model="none")))[0] == 200
        status, said = await post(url, CHAT, chat("one", model="gpt-4"))
        assert (status, said["error"]["code"], said["error"]["param"]) == (404, "model_not_found", "model")
        assert (await call(url, "GET", "/v1/models/none"))[0] == 200
        assert (await call(url, "GET", "/v1/models/a/b"))[0] == 404
    settings = Settings(names=("big", "org/big"), drain_s=1.0)
    async with echoing(tmp_path, settings) as (url, _):
        assert (await post(url, CHAT, chat("one", model="org/big")))[1]["model"] == "org/big"
        assert (await call(url, "GET", "/v1/models/org/big"))[0] == 200
        assert (await post(url, CHAT, chat("one", model="none")))[0] == 404
    async with echoing(tmp_path, Settings(any_model=True, drain_s=1.0)) as (url, _):
        assert (await post(url, CHAT, chat("one", model="gpt-4")))[1]["model"] == "gpt-4"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/nowhere", None, {}, 404),
        ("GET", CHAT, None, {}, 405),
        ("POST", "/v1/models", {}, {}, 405),
        ("POST", CHAT, b"{", {}, 400),
        ("POST", CHAT, b"\xff\xfe", {}, 400),
        ("POST", CHAT, b"[" * 100_000, {}, 400),
        ("POST", CHAT, [], {}, 400),
        ("POST", CHAT, {}, {}, 400),
        ("POST", CHAT, chat("one"), {"Content-Type": "text/plain"}, 415),
        ("POST", CHAT, chat("one"), {"Content-Type": ""}, 415),
        ("POST", CHAT, chat("one"), {"Origin": "https://evil.example"}, 403),
        ("POST", CHAT, chat("one"), {"Origin": "http://evil.example", "Host": "evil.example"}, 403),
    ],
)
@trio_test
async def test_what_is_refused(
    tmp_path: Path, method: str, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    async with echoing(tmp_path) as (url, daemon):
        told, _, said = await call(url, method, path, body, headers)
        assert told == status
        assert json.loads(said)["error"]["message"]
        assert daemon.service.num_rows == 0


@pytest.mark.parametrize("num_bytes", [2000, 300_000, 3_000_000])
@trio_test
async def test_a_body_that_is_too_large(tmp_path: Path, num_bytes: int) -> None:
    async with echoing(tmp_path, Settings(guard=Guard(body_bytes=1000), drain_s=1.0)) as (url, daemon):
        status, said = await post(url, CHAT, chat("x" * num_bytes))
        assert (status, "--max-body-bytes" in said["error"]["message"]) == (413, True)
        assert daemon.service.num_rows == 0
        assert (await post(url, CHAT, chat("one")))[0] == 200


@trio_test
async def test_half_a_body_and_then_nothing(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (url, daemon):
        async with asking(url, "GET", "/health") as exchange:
            await exchange.head()
            await exchange.body()
            half = Exchange(exchange.stream)
            await half.send("POST", CHAT, {"Content-Length": "100", "Content-Type": "application/json"}, b"{")
        assert (await post(url, CHAT, chat("one")))[0] == 200
        assert daemon.service.num_rows == 1


@trio_test
async def test_keys(tmp_path: Path) -> None:
    async with echoing(tmp_path, Settings(guard=Guard(keys=("k1", "a longer key")), drain_s=1.0)) as (url, _):
        for good in ({"Authorization": "Bearer k1"}, {"X-Api-Key": "a longer key"}, {"Authorization": "bearer  k1"}):
            assert (await post(url, CHAT, chat("one"), good))[0] == 200
        for bad in ({}, {"Authorization": "Bearer k2"}, {"Authorization": "Basic k1"}, {"X-Api-Key": "K1"}):
            bad = {**bad, "Authorization": bad.get("Authorization", "Bearer k")}
            status, said = await post(url, CHAT, chat("one"), bad)
            assert (status, said["error"]["code"]) == (401, "invalid_api_key")
        assert [(await call(url, "GET", path))[0] for path in ("/", "/health", "/openapi.json")] == [200, 200, 200]
        assert [(await call(url, "GET", path))[0] for path in ("/metrics", "/v1/models", "/docs")] == [401, 401, 401]


@trio_test
async def test_web_pages(tmp_path: Path) -> None:
    page = {"Origin": "https://chat.example"}
    async with echoing(tmp_path) as (url, _):
        own = {"Origin": url, "Host": url.removeprefix("http://")}
        assert (await post(url, CHAT, chat("one"), own))[0] == 200
        assert (await call(url, "OPTIONS", CHAT, None, page))[0] == 403
    settings = Settings(guard=Guard(keys=("k",), origins=frozenset({"https://chat.example"})), drain_s=1.0)
    async with echoing(tmp_path, settings) as (url, _):
        wish = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        status, headers, _ = await call(url, "OPTIONS", CHAT, None, wish)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        status, headers, _ = await call(url, "POST", CHAT, chat("one"), {**page, "Authorization": "Bearer k"})
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")


@trio_test
async def test_a_stop_lets_what_runs_finish(tmp_path: Path) -> None:
    words = " ".join(["pause"] * 50)
    said: list[Any] = []
    path = tmp_path / "d.sock"
    async with echo.serving(path) as daemon, trio.open_nursery() as nursery:
        async with gateway_at(path, Settings(drain_s=30.0)) as url:

            async def ask() -> None:
                said.append(await post(url, CHAT, chat(words)))

            nursery.start_soon(ask)
            await until(lambda: len(daemon.service.rows) == 1)
        assert said[0][0] == 200
        assert len(said[0][1]["choices"][0]["message"]["content"].split()) == 50
