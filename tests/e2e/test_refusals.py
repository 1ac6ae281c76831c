"""Every error of the wire's table that a client can bring about, over the real socket. Nobody else notices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from scheduler.client import Client
from store.framing import FRAME_BYTES, encode_frame
from tests.e2e.conftest import HELLO_TIMEOUT_S
from tests.e2e.daemon import Daemon, idle
from tests.scheduler.raw import HELLO, connected, submit
from tests.scheduler.trio_test import trio_test

VOCABULARY = 49152
CONTEXT = 8192
CHAT = [{"role": "user", "content": "hi"}]
SMALL = {"prompt": "a b", "max_tokens": 2}


def request(**fields: Any) -> dict[str, Any]:
    return {"type": "submit", "id": "r", **fields}


# One message after a good hello: it gets this error, with what a person can act on, and the connection goes on.
OF_A_MESSAGE: list[tuple[str, dict[str, Any], str, str]] = [
    ("no such type", {"type": "sumbit", "id": "r"}, "unknown_type", "submit"),
    ("no type", {"id": "r"}, "bad_request", "type"),
    ("no prompt", request(), "bad_request", "prompt"),
    ("two prompts", request(prompt="a", messages=CHAT), "bad_request", "one of prompt"),
    ("empty prompt", request(prompt=""), "bad_request", "empty"),
    ("no token", request(prompt_token_ids=[]), "bad_request", "empty"),
    ("no turn", request(messages=[]), "bad_request", "empty"),
    ("id beyond the vocabulary", request(prompt_token_ids=[1, VOCABULARY]), "bad_request", str(VOCABULARY - 1)),
    ("id far beyond", request(prompt_token_ids=[2**31 - 1]), "bad_request", str(VOCABULARY - 1)),
    ("id below zero", request(prompt_token_ids=[1, -1]), "bad_request", "-1"),
    ("max_tokens 0", request(prompt="a", max_tokens=0), "bad_request", "max_tokens"),
    ("max_tokens below zero", request(prompt="a", max_tokens=-5), "bad_request", "max_tokens"),
    ("temperature below zero", request(prompt="a", temperature=-0.1), "bad_request", "temperature"),
    ("temperature not a number", request(prompt="a", temperature=float("nan")), "bad_request", "temperature"),
    ("top_p 0", request(prompt="a", top_p=0), "bad_request", "top_p"),
    ("empty stop", request(prompt="a", stop=[""]), "bad_request", "stop"),
    ("misspelt option", request(prompt="a", temprature=1), "bad_request", "temperature"),
    ("template of one's own", request(messages=CHAT, chat_template_kwargs={"chat_template": "x"}), "bad_request", ""),
    ("as long as the context", request(prompt_token_ids=[5] * CONTEXT), "context_length_exceeded", str(CONTEXT)),
    ("longer than the context", request(prompt="word " * 10_000), "context_length_exceeded", str(CONTEXT)),
    ("second hello", HELLO, "bad_request", "once"),
]

# The bytes that a client sends first: it gets this error and the end of the connection.
OF_A_CONNECTION: list[tuple[str, bytes, str]] = [
    ("HTTP", b"GET / HTTP/1.1\r\n\r\n", "frame_too_large"),
    ("empty frame", bytes(4), "bad_frame"),
    ("garbage", encode_frame(HELLO) + b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1", "bad_frame"),
    ("no map", encode_frame(HELLO) + b"\x00\x00\x00\x01\x90", "bad_frame"),
    ("bytes behind the map", encode_frame(HELLO) + b"\x00\x00\x00\x02\x80\x80", "bad_frame"),
    ("too long", encode_frame(HELLO) + (FRAME_BYTES + 1).to_bytes(4, "big"), "frame_too_large"),
    ("no hello", encode_frame({"type": "status"}), "hello_expected"),
    ("version of tomorrow", encode_frame({"type": "hello", "version": 2, "new": 1}), "unsupported_version"),
    ("hello without version", encode_frame({"type": "hello"}), "bad_request"),
    ("hello of another kind", encode_frame({"type": "hello", "version": "1"}), "bad_request"),
]


@asynccontextmanager
async def bystander(daemon: Daemon) -> AsyncIterator[None]:
    """Another client, whose answer comes on while the block runs, and is whole and as it was before."""
    asked: dict[str, Any] = {"prompt": "The days of the week are", "max_tokens": 14, "ignore_eos": True}
    async with Client(daemon.socket) as client:
        before = await client.ask(**asked)
        async with client.submit(**asked) as answer:
            first = await anext(answer)
            yield
            texts = [first.text] + [delta.text async for delta in answer]
    assert "".join(texts) == before.text
    assert answer.done.finish_reason == "length"


@trio_test
async def test_a_wrong_message_gets_its_error_and_harms_nothing(daemon: Daemon) -> None:
    async with bystander(daemon), connected(daemon.socket) as raw:
        for what, message, code, hint in OF_A_MESSAGE:
            await raw.send(message)
            error = await raw.until("error")
            assert (error["code"], error.get("id")) == (code, message.get("id")), what
            assert hint in error["message"], what
            assert len(error["message"]) > 10, what
        await raw.send(submit("r", "still here", max_tokens=1))
        assert (await raw.until("done"))["id"] == "r"


@trio_test
async def test_a_broken_conversation_is_told_why_and_ends(daemon: Daemon) -> None:
    async with bystander(daemon):
        for what, data, code in OF_A_CONNECTION:
            async with connected(daemon.socket, hello=False) as raw:
                await raw.stream.send_all(data)
                *_, error = await raw.rest()
                assert (error["type"], error["code"]) == ("error", code), what
                assert "id" not in error, what


@pytest.mark.parametrize("hello", [b"", encode_frame(HELLO)], ids=["in hello", "in a submit"])
@trio_test
async def test_a_stream_that_ends_inside_a_frame(daemon: Daemon, hello: bytes) -> None:
    async with connected(daemon.socket, hello=False) as raw:
        await raw.stream.send_all(hello + encode_frame(submit("r", "a" * 100))[:50])
        await raw.stream.send_eof()
        *_, error = await raw.rest()
    assert error["code"] == "bad_frame"
    assert "inside" in error["message"] or "into a frame" in error["message"]


@trio_test
async def test_who_says_no_hello_is_cut_after_a_time(daemon: Daemon) -> None:
    async with connected(daemon.socket, hello=False) as raw:
        (error,) = await raw.rest()
    assert error["code"] == "timeout"
    assert str(HELLO_TIMEOUT_S) in error["message"]


@trio_test
async def test_an_id_that_runs_is_refused_and_the_first_goes_on(daemon: Daemon) -> None:
    async with connected(daemon.socket) as raw:
        await raw.send(submit(1, "Once upon a time", max_tokens=3), submit(1, "another", max_tokens=3))
        told = [await raw.next() for _ in range(2)]
        error = next(message for message in told if message and message["type"] == "error")
        done = await raw.until("done")
    assert (error["code"], error["id"]) == ("duplicate_id", 1)
    assert done["usage"]["completion_tokens"] == 3


@trio_test
async def test_more_requests_than_a_connection_may_have(daemon: Daemon) -> None:
    async with connected(daemon.socket) as raw:
        await raw.send(*[submit(number, "Once", max_tokens=500, ignore_eos=True) for number in range(129)])
        error = await raw.until("error")
    assert (error["code"], error["id"]) == ("overloaded", 128)
    assert error["retry_after_s"] > 0
    async with Client(daemon.socket) as client:
        await idle(client)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="it takes root to become somebody else")
def test_another_user_is_forbidden(daemon: Daemon) -> None:
    """Even one who gets past the modes of socket and folder."""
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1])\nexcept PermissionError: sys.exit(13)\n"
        "sys.stdout.buffer.write(s.recv(4096)[4:])"
    )

    def visit() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", code, daemon.socket], capture_output=True, timeout=60)

    assert visit().returncode == 13
    opened = [path for path in (daemon.socket, *daemon.socket.parents) if path != Path("/")]
    modes = {path: path.stat().st_mode for path in opened}
    try:
        for path in opened:
            path.chmod(modes[path] | (0o666 if path == daemon.socket else 0o001))
        answer = visit()
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert answer.returncode == 0, answer
    assert msgpack.unpackb(answer.stdout)["code"] == "forbidden"


@trio_test
async def test_refusals_are_counted(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        before = (await client.status())["totals"]["refused"]
        async with connected(daemon.socket) as raw:
            await raw.send(request(prompt_token_ids=[VOCABULARY]))
            await raw.until("error")
        assert (await client.status())["totals"]["refused"] == before + 1
