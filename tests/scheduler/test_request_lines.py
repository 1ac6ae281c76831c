"""The one line of each request in the log, however it ends."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from scheduler.errors import Refused
from scheduler.protocol import Message, Submit
from scheduler.service import Service
from tests.scheduler.bytes_tokenizer import END, ByteTokenizer
from tests.scheduler.echo_daemon import echo_daemon, in_trio
from tests.scheduler.fake_engine import INFO

SHORT = replace(INFO, context_tokens=10)


def lines_of(caplog: pytest.LogCaptureFixture, id: str) -> list[dict[str, Any]]:
    """The fields of a request's lines, with the text and the level."""
    found = []
    for record in caplog.records:
        told = getattr(record, "fields", {})
        if told.get("id") == id:
            found.append({**told, "message": record.getMessage(), "level": record.levelname})
    return found


NUMBERS = {"prompt_tokens", "completion_tokens", "cached_tokens", "queued_s", "ttft_s", "decode_s", "total_s"}


@pytest.mark.parametrize("log_prompts", [True, False])
def test_prompts_and_answers_are_logged_only_where_asked(log_prompts: bool, caplog: pytest.LogCaptureFixture) -> None:
    @in_trio
    async def run() -> None:
        async with echo_daemon(log_prompts=log_prompts) as daemon:
            await daemon.ask("a secret", id="me", max_tokens=10)
            await daemon.submit(id="stopped", prompt_token_ids=(*b"ab", END), max_tokens=9, stream=False)
            await daemon.loop.wait_idle()

    caplog.set_level(logging.INFO)
    run()
    (line,), (stopped,) = lines_of(caplog, "me"), lines_of(caplog, "stopped")
    if log_prompts:
        assert (line["prompt"], line["answer"]) == ("a secret", "a secreta ")
        assert "prompt 'a secret', answer 'a secreta '" in line["message"]
        assert stopped["answer"] == "ab"
    else:
        assert not {"prompt", "answer"} & set(line)
        assert "a secret" not in caplog.text


def test_several_answers_have_a_line_each_with_their_index(caplog: pytest.LogCaptureFixture) -> None:
    @in_trio
    async def run() -> None:
        async with echo_daemon() as daemon:
            await daemon.service.submit(Submit(id="three", prompt="x", n=3, max_tokens=2), lambda said: None)
            await daemon.ask("x", id="one", max_tokens=2)
            await daemon.loop.wait_idle()

    caplog.set_level(logging.INFO)
    run()
    lines = lines_of(caplog, "three")
    assert sorted(line["index"] for line in lines) == [0, 1, 2]
    assert {line["message"].split(":")[0] for line in lines} == {
        f"request three ({index}) length" for index in range(3)
    }
    (line,) = lines_of(caplog, "one")
    assert "index" not in line
    assert line["message"].startswith("request one length:")


def test_one_that_is_refused_has_one_line_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    @in_trio
    async def run() -> None:
        async with echo_daemon(SHORT) as daemon:
            await daemon.ask("x", id="served", max_tokens=2)
            with pytest.raises(Refused):
                await daemon.submit(id="long", prompt="x" * 100)

    caplog.set_level(logging.INFO)
    run()
    (line,), (served,) = lines_of(caplog, "long"), lines_of(caplog, "served")
    assert (line["finish"], line["level"]) == ("context_length_exceeded", "INFO")
    assert line["message"] == f"request long refused: {line['error']}"
    assert set(line) >= NUMBERS
    assert set(served) == set(line) - {"error"}


class Stuck:
    """A store that never answers."""

    def __init__(self) -> None:
        self.asked = trio.Event()

    async def find(self, *args: object) -> None:
        self.asked.set()
        await trio.sleep_forever()


def test_one_that_is_cancelled_before_it_has_a_row_has_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @in_trio
    async def run() -> None:
        async with echo_daemon() as daemon:
            store = Stuck()
            monkeypatch.setattr(Service, "store", store)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(daemon.submit, id="gone", prompt="x"))
                await store.asked.wait()
                nursery.cancel_scope.cancel()
            assert daemon.counted("laned_requests_total", outcome="cancelled") == 1

    caplog.set_level(logging.INFO)
    run()
    (line,) = lines_of(caplog, "gone")
    assert (line["finish"], line["completion_tokens"], line["level"]) == ("cancelled", 0, "INFO")
    assert line["queued_s"] == line["total_s"]


class Faulty(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        raise ZeroDivisionError("a fault of the tokenizer's")

    def encode_chat(self, messages: Sequence[Mapping[str, str]], /, **variables: Any) -> list[int]:
        raise ZeroDivisionError("a fault of the tokenizer's")


@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"messages": (Message("user", "x"),)}])
def test_a_fault_of_the_tokenizer_is_raised_counted_and_logged(
    prompt: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Received equals ended, for whoever computes what runs as the difference of the two."""

    @in_trio
    async def run() -> None:
        async with echo_daemon(tokenizer=Faulty()) as daemon:
            with pytest.raises(ZeroDivisionError):
                await daemon.submit(id="me", **prompt)
            assert not daemon.loop.scheduler.requests
            assert daemon.counted("laned_requests_total", outcome="failed") == 1
            assert daemon.counted("laned_requests_received_total") == 1

    run()
    (line,) = lines_of(caplog, "me")
    assert (line["finish"], line["level"]) == ("internal", "WARNING")
    assert line["error"] == "ZeroDivisionError: a fault of the tokenizer's"
