from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.connection import Limits
from store.framing import encode_frame
from tests.scheduler.echo import serving
from tests.scheduler.raw import HELLO, connected
from tests.scheduler.trio_test import trio_test, until


def submit(id: Any, prompt: str, **options: Any) -> dict[str, Any]:
    return {"type": "submit", "id": id, "prompt": prompt} | options


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
async def test_requests_of_one_connection_are_limited(path: Path) -> None:
    async with serving(path, Limits(requests=2)) as daemon, connected(path) as raw:
        await raw.send(*(submit(id, "hang") for id in range(3)))
        error = await raw.until("error")
        assert (error["id"], error["code"]) == (2, "overloaded")
        assert error["retry_after_s"] > 0
        assert len(daemon.service.rows) == 2
        await raw.send({"type": "cancel", "id": 0})
        await raw.until("done")
        await raw.send(submit(2, "a"))
        assert (await raw.until("done"))["id"] == 2


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
    path: Path, message: dict[str, Any], code: str
) -> None:
    async with serving(path) as daemon, connected(path) as raw:
        await raw.send(submit("others", "hang"), message, {"type": "ping"})
        error = await raw.next() or {}
        assert (error["type"], error["code"], error.get("id")) == ("error", code, message.get("id"))
        assert await raw.next() == {"type": "pong"}
        assert len(daemon.service.rows) == 1


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "frame_too_large"),
        (bytes(4), "bad_frame"),
        (b"\x00\x00\x00\x01\xc1", "bad_frame"),
        (encode_frame({"type": "ping"})[:-1] + b"\xff", "bad_frame"),
    ],
)
@trio_test
async def test_broken_framing_gets_an_error_and_ends_the_connection_and_its_requests(
    path: Path, data: bytes, code: str
) -> None:
    async with serving(path) as daemon, connected(path) as raw:
        await raw.send(submit(1, "hang"))
        await raw.stream.send_all(data)
        (error,) = await raw.rest()
        assert (error["type"], error["code"], "id" in error) == ("error", code, False)
        await until(lambda: daemon.cut_by == [code])
        assert daemon.service.num_cancelled == 1


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (submit(1, "a"), "hello_expected"),
        ({"type": "ping"}, "hello_expected"),
        ({}, "hello_expected"),
        ({"type": "hello"}, "bad_request"),
        ({"type": "hello", "version": "1"}, "bad_request"),
        ({"type": "hello", "version": 1, "name": "x"}, "bad_request"),
        ({"type": "hello", "version": 2, "new": "field"}, "unsupported_version"),
        ({"type": "hello", "version": 0}, "unsupported_version"),
    ],
)
@trio_test
async def test_a_wrong_beginning_ends_the_connection(path: Path, first: dict[str, Any], code: str) -> None:
    async with serving(path) as daemon, connected(path, hello=False) as raw:
        await raw.send(first, submit(2, "a"))
        (error,) = await raw.rest()
        assert (error["type"], error["code"]) == ("error", code)
        assert daemon.service.num_rows == 0


@trio_test
async def test_one_who_says_nothing_is_told_and_cut(path: Path) -> None:
    async with serving(path, Limits(hello_s=0.05)), connected(path, hello=False) as raw:
        (error,) = await raw.rest()
        assert (error["code"], error["message"]) == ("timeout", "no hello within 0.05 s")


@trio_test
async def test_a_beginning_in_small_pieces_does_not_get_more_time(path: Path) -> None:
    async with serving(path, Limits(hello_s=0.05)) as daemon, connected(path, hello=False) as raw:
        # The length of a frame of 256 bytes, and some of them.
        for byte in b"\x00\x00\x01\x00" + bytes(200):
            if daemon.cut_by:
                break
            await raw.stream.send_all(bytes([byte]))
            await trio.sleep(0.002)
        (error,) = await raw.rest()
        assert error["code"] == "timeout"


@trio_test
async def test_half_a_frame_is_waited_for_so_long_and_no_longer(path: Path) -> None:
    async with serving(path, Limits(frame_s=0.05)), connected(path) as raw:
        await trio.sleep(0.1)
        await raw.send({"type": "ping"})
        assert await raw.next() == {"type": "pong"}
        await raw.stream.send_all(encode_frame({"type": "ping"})[:-1])
        (error,) = await raw.rest()
        assert error["code"] == "timeout"


@trio_test
async def test_half_a_frame_at_the_end_is_an_error_that_can_still_be_read(path: Path) -> None:
    async with serving(path), connected(path) as raw:
        await raw.stream.send_all(encode_frame({"type": "ping"})[:-1])
        await raw.stream.send_eof()
        (error,) = await raw.rest()
        assert error["code"] == "bad_frame"


@trio_test
async def test_one_who_shuts_down_writing_only_gets_all_replies_and_then_the_end(path: Path) -> None:
    async with serving(path) as daemon, connected(path, hello=False) as raw:
        await raw.send(HELLO, submit(1, "one pause pause two", stream=False), submit(2, "three"))
        await raw.stream.send_eof()
        messages = await raw.rest()
        assert {message["id"] for message in messages if message["type"] == "done"} == {1, 2}
        assert next(message["text"] for message in messages if message.get("id") == 1) == "one pause pause two "
        assert daemon.service.num_cancelled == 0


@trio_test
async def test_one_who_vanishes_has_its_requests_cancelled_and_nobody_elses(path: Path) -> None:
    async with serving(path) as daemon, connected(path) as other:
        await other.send(submit(1, "hang"))
        async with connected(path) as raw:
            await raw.send(*(submit(id, "a hang") for id in range(5)))
            await until(lambda: len(daemon.service.rows) == 6)
        await until(lambda: len(daemon.service.rows) == 1)
        assert daemon.service.num_cancelled == 5
        await other.send({"type": "ping"})
        assert await other.next() == {"type": "pong"}


@trio_test
async def test_one_who_vanishes_after_shutting_down_writing_is_noticed_too(path: Path) -> None:
    async with serving(path) as daemon:
        async with connected(path) as raw:
            await raw.send(submit(1, "hang"))
            await raw.stream.send_eof()
            await until(lambda: len(daemon.service.rows) == 1)
        await until(lambda: not daemon.service.rows)
        assert daemon.service.num_cancelled == 1


@trio_test
async def test_one_who_vanishes_in_the_middle_of_a_frame_leaves_nothing(path: Path) -> None:
    async with serving(path) as daemon:
        async with connected(path) as raw:
            await raw.send(submit(1, "hang"))
            await raw.stream.send_all(encode_frame(submit(2, "x" * 100_000))[:50_000])
            await until(lambda: len(daemon.service.rows) == 1)
        await until(lambda: not daemon.service.rows)


@trio_test
async def test_a_slow_reader_gets_fewer_deltas_and_all_of_the_text(path: Path) -> None:
    async with serving(path) as daemon, connected(path) as raw:
        words = " ".join(f"{number:0500}" for number in range(4000))
        await raw.send(submit(1, words))
        await until(lambda: not daemon.service.rows)
        deltas = []
        while (message := await raw.next() or {})["type"] == "delta":
            deltas.append(message)
        assert "".join(delta["text"] for delta in deltas).split() == words.split()
        assert [token for delta in deltas for token in delta["token_ids"]] == list(range(4000))
        assert len(deltas) < 2000


@trio_test
async def test_one_who_reads_slowly_is_not_cut(path: Path) -> None:
    async with serving(path, Limits(stalled_s=0.2)) as daemon, connected(path) as raw:
        await raw.send(submit(1, "0" * 1_000_000, stream=False))
        await until(lambda: not daemon.service.rows)
        num_read = 0
        # Far less than what wakes a sender: the kernel wants a good part of its buffer free before it does.
        for _ in range(20):
            num_read += len(await raw.stream.receive_some(1000))
            await trio.sleep(0.05)
        while num_read < 1_000_000:
            num_read += len(await raw.stream.receive_some(100_000))
        assert daemon.cut_by == []


@trio_test
async def test_one_who_stops_reading_is_cut_after_a_time(path: Path) -> None:
    async with serving(path, Limits(stalled_s=0.05)) as daemon, connected(path) as raw:
        await raw.send(submit(1, "0" * 1_000_000 + " hang"), submit(2, "hang"))
        await until(lambda: daemon.cut_by == ["stalled"])
        await until(lambda: not daemon.service.rows)
        assert daemon.service.num_cancelled == 2


@trio_test
async def test_one_for_whom_too_much_waits_is_cut(path: Path) -> None:
    async with serving(path, Limits(outbox_bytes=1_000_000)) as daemon, connected(path) as raw:
        await raw.send(submit(1, " ".join(["0" * 100_000] * 20) + " hang"))
        await until(lambda: daemon.cut_by == ["outbox_full"])
        await until(lambda: not daemon.service.rows)


@trio_test
async def test_a_fault_of_the_service_ends_one_connection_and_is_told_and_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path) as daemon, connected(path) as other:
        async with connected(path) as raw:
            await raw.send(submit(1, "hang"), submit(2, "crash"))
            (error,) = await raw.rest()
            assert (error["code"], "id" in error) == ("internal", False)
        assert "ZeroDivisionError" in caplog.text
        await until(lambda: not daemon.service.rows)
        await other.send(submit(1, "a"))
        assert (await other.until("done"))["finish_reason"] == "stop"


@trio_test
async def test_at_goodbye_what_runs_is_answered_and_then_all_connections_end(path: Path) -> None:
    async with serving(path) as daemon, connected(path) as busy, connected(path) as idle:
        await busy.send(submit(1, "one pause two", stream=False), submit(2, "hang"))
        await until(lambda: len(daemon.service.rows) == 2)
        daemon.goodbye.set()
        (last,) = await idle.rest()
        assert (last["code"], "id" in last) == ("shutting_down", False)
        assert (await busy.until("done"))["text"] == "one pause two "
        await busy.send({"type": "cancel", "id": 2})
        assert [message["type"] for message in await busy.rest()] == ["done", "error"]


@trio_test
async def test_a_cancelled_handler_cancels_its_requests(path: Path) -> None:
    async with serving(path) as daemon, connected(path) as raw:
        await raw.send(submit(1, "hang"))
        await until(lambda: len(daemon.service.rows) == 1)
        daemon.scopes[0].cancel()
        assert await raw.next() is None
        await until(lambda: not daemon.service.rows)


@trio_test
async def test_two_hundred_clients_come_submit_and_vanish(path: Path) -> None:
    async with serving(path) as daemon:

        async def visit(number: int) -> None:
            async with connected(path, hello=number % 7 != 0) as raw:
                await raw.send(submit(1, "a hang"), submit(2, "b pause c"))
                await trio.sleep(number % 11 / 1000)

        async with trio.open_nursery() as visitors:
            for number in range(200):
                visitors.start_soon(visit, number)
        await until(lambda: not daemon.service.rows)
        await until(lambda: not daemon.handlers.child_tasks)
        async with connected(path) as raw:
            await raw.send(submit(1, "still here", stream=False))
            assert (await raw.until("done"))["text"] == "still here "
