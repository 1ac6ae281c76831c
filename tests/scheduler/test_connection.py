"""What a connection does for one who stays."""

import logging
from pathlib import Path
from typing import Any

import pytest

from scheduler.connection import Limits
from tests.scheduler.echo import serving
from tests.scheduler.raw import Raw, connected, submit
from tests.scheduler.trio_test import trio_test


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "laned.sock"


@trio_test
async def test_a_request_is_answered_delta_by_delta_then_done(path: Path) -> None:
    async with serving(path), connected(path) as raw:
        await raw.send(submit("a", "one pause two"))
        said = []
        while (message := await raw.next() or {})["type"] == "delta":
            said.append(message)
        assert "".join(delta["text"] for delta in said) == "one pause two "
        assert [token for delta in said for token in delta["token_ids"]] == [0, 1, 2]
        assert (message["type"], message["id"], message["finish_reason"]) == ("done", "a", "stop")
        assert message["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
        assert "text" not in message


@trio_test
async def test_without_streaming_the_text_comes_with_done(path: Path) -> None:
    async with serving(path), connected(path) as raw:
        await raw.send(submit(-7, "one two", stream=False))
        done = await raw.next() or {}
        assert (done["type"], done["id"], done["text"]) == ("done", -7, "one two ")


@trio_test
async def test_many_requests_run_on_one_connection(path: Path) -> None:
    async with serving(path), connected(path) as raw:
        prompts = {id: f"{id} pause {'x ' * id}" for id in range(50)}
        await raw.send(*(submit(id, prompt) for id, prompt in prompts.items()))
        texts = dict.fromkeys(prompts, "")
        while prompts:
            message = await raw.next() or {}
            if message["type"] == "delta":
                texts[message["id"]] += message["text"]
            else:
                assert message["type"] == "done"
                assert texts[message["id"]].split() == prompts.pop(message["id"]).split()


@trio_test
async def test_who_flushes_is_told_what_was_given_up_since_it_came_or_asked(path: Path) -> None:
    async def is_on_disk(raw: Raw) -> Any:
        await raw.send({"type": "flush"})
        return (await raw.next() or {})["on_disk"]

    async with serving(path) as daemon:
        daemon.service.num_given_up = 3
        async with connected(path) as one, connected(path) as other:
            assert await is_on_disk(one)
            daemon.service.num_given_up = 5
            assert not await is_on_disk(one)
            assert await is_on_disk(one)
            assert not await is_on_disk(other)


@trio_test
async def test_ping_and_status_are_answered_while_requests_run(path: Path) -> None:
    async with serving(path), connected(path) as raw:
        await raw.send(submit(1, "hang"), {"type": "ping", "nonce": "n"}, {"type": "status"}, {"type": "ping"})
        replies = [await raw.next() for _ in range(3)]
        assert replies == [
            {"type": "pong", "nonce": "n"},
            {"type": "status", "report": {"running": 1}},
            {"type": "pong"},
        ]


@trio_test
async def test_cancel_ends_a_request_and_is_nothing_where_none_runs(path: Path) -> None:
    async with serving(path) as daemon, connected(path) as raw:
        await raw.send({"type": "cancel", "id": 1}, submit(1, "a hang"), {"type": "cancel", "id": 1})
        done = await raw.until("done")
        assert (done["id"], done["finish_reason"]) == (1, "cancelled")
        assert daemon.service.rows == {}
        await raw.send({"type": "cancel", "id": 1}, submit(1, "again"))
        assert (await raw.until("done"))["finish_reason"] == "stop"


@trio_test
async def test_an_id_may_be_used_again_but_not_at_the_same_time(path: Path) -> None:
    async with serving(path) as daemon, connected(path) as raw:
        await raw.send(submit("x", "hang"), submit("x", "other"))
        error = await raw.until("error")
        assert (error["id"], error["code"]) == ("x", "duplicate_id")
        assert daemon.service.num_rows == 1
        await raw.send({"type": "cancel", "id": "x"}, submit("y", "b"))
        assert {(await raw.until("done"))["id"] for _ in range(2)} == {"x", "y"}
        await raw.send(submit("x", "a"))
        assert (await raw.until("done"))["finish_reason"] == "stop"


@trio_test
async def test_requests_of_one_connection_are_limited(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(path, Limits(requests=2)) as daemon, connected(path) as raw:
        await raw.send(*(submit(id, "hang") for id in range(3)))
        error = await raw.until("error")
        assert (error["id"], error["code"]) == (2, "overloaded")
        assert error["retry_after_s"] > 0
        assert f"request 2 refused: {error['message']}" in caplog.messages
        assert len(daemon.service.rows) == 2
        await raw.send({"type": "cancel", "id": 0})
        await raw.until("done")
        await raw.send(submit(2, "a"))
        assert (await raw.until("done"))["id"] == 2


@trio_test
async def test_more_answers_than_a_connection_may_have_are_refused_with_the_number_that_would_do(path: Path) -> None:
    async with serving(path, Limits(requests=2)) as daemon, connected(path) as raw:
        await raw.send(submit(1, "hang"), submit(2, "a", n=3), submit(3, "a", n=2))
        never, later = await raw.until("error"), await raw.until("error")
        assert (never["id"], never["code"], "retry_after_s" in never) == (2, "bad_request", False)
        assert "ask for 2 or fewer" in never["message"]
        assert (later["id"], later["code"]) == (3, "overloaded")
        assert later["retry_after_s"] == daemon.service.retry_after_s
        await raw.send({"type": "cancel", "id": 1})


@trio_test
async def test_a_request_runs_until_its_last_answer_has_ended(path: Path) -> None:
    """Its id is taken, its answers count against the limit, and to cancel it cancels those that are left."""
    async with serving(path, Limits(requests=3)), connected(path) as raw:
        await raw.send(submit("a", "first", n=3))
        done = await raw.until("done")
        assert done.get("index", 0) == 0
        await raw.send(submit("a", "x"), submit("b", "x"))
        assert (await raw.until("error"))["code"] == "duplicate_id"
        await raw.send({"type": "cancel", "id": "a"})
        ends = [await raw.until("done") for _ in range(3)]
        assert sorted((end["id"], end.get("index", 0)) for end in ends) == [("a", 1), ("a", 2), ("b", 0)]
        await raw.send(submit("a", "x y", n=3))
        assert {(await raw.until("done")).get("index", 0) for _ in range(3)} == {0, 1, 2}
        await raw.send(submit("a", "first", n=2), submit("b", "x", n=2))
        refused = await raw.until("error")
        assert (refused["id"], refused["code"], refused.get("index")) == ("b", "overloaded", None)
        await raw.send({"type": "cancel", "id": "a"})


@trio_test
async def test_refusals_and_failures_of_the_service_are_errors_of_the_request(path: Path) -> None:
    async with serving(path), connected(path) as raw:
        await raw.send(submit(1, "refuse"), submit(2, "full"), submit(3, "a fail b"))
        expected = [(1, "bad_request", None), (2, "overloaded", 2.5), (3, "model_failed", None)]
        errors = [await raw.until("error") for _ in expected]
        assert [(error["id"], error["code"], error.get("retry_after_s")) for error in errors] == expected
        await raw.send(submit(1, "a"))
        assert (await raw.until("done"))["id"] == 1


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({}, "bad_request"),
        ({"type": "generate"}, "unknown_type"),
        ({"type": "submit", "id": 1}, "bad_request"),
        ({"type": "submit", "id": 1, "prompt": ""}, "bad_request"),
        ({"type": "submit", "id": 1, "prompt": "a", "max_tokens": 0}, "bad_request"),
        ({"type": "ping", "loud": True}, "bad_request"),
        ({"type": "hello", "version": 1}, "bad_request"),
        ({"type": "hello", "version": 2}, "bad_request"),
    ],
)
@trio_test
async def test_a_bad_message_gets_an_error_and_the_connection_lives(
    path: Path, message: dict[str, Any], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(path) as daemon, connected(path) as raw:
        await raw.send(submit("others", "hang"), message, {"type": "ping"})
        error = await raw.next() or {}
        assert (error["type"], error["code"], error.get("id")) == ("error", code, message.get("id"))
        assert await raw.next() == {"type": "pong"}
        assert len(daemon.service.rows) == 1
        (line,) = (line for line in caplog.messages if "refused" in line)
        assert line.endswith(f"a message is refused: {code}: {error['message']}")
