"""How a connection ends, and what it leaves behind: nothing."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.connection import SEND_BYTES, Limits
from store.framing import encode_frame
from tests.scheduler.echo import serving
from tests.scheduler.raw import HELLO, connected, submit
from tests.scheduler.trio_test import trio_test, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "laned.sock"


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
async def test_a_frame_in_small_pieces_does_not_get_more_time(path: Path) -> None:
    async with serving(path, Limits(frame_s=0.05)) as daemon, connected(path) as raw:
        for byte in encode_frame({"type": "ping", "nonce": "x" * 120}):
            if daemon.cut_by:
                break
            with suppress(trio.BrokenResourceError):  # it may be cut at any of them
                await raw.stream.send_all(bytes([byte]))
            await trio.sleep(0.005)
        (error,) = await raw.rest()
        assert error["code"] == "timeout"


@trio_test
async def test_many_frames_one_after_the_other_are_no_slow_frame(path: Path) -> None:
    """However long it takes that the stream never ends between two frames."""
    async with serving(path, Limits(frame_s=1.0)), connected(path) as raw:
        frames = encode_frame({"type": "ping"}) * 40
        for start in range(0, len(frames), 10):
            await raw.stream.send_all(frames[start : start + 10])
            await trio.sleep(0.02)
        for _ in range(40):
            assert await raw.next() == {"type": "pong"}


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
        await until(lambda: daemon.service.num_rows == 1 and not daemon.service.rows)
        deltas = []
        while (message := await raw.next() or {})["type"] == "delta":
            deltas.append(message)
        assert "".join(delta["text"] for delta in deltas).split() == words.split()
        assert [token for delta in deltas for token in delta["token_ids"]] == list(range(4000))
        assert len(deltas) < 1000


@trio_test
async def test_one_who_reads_slowly_is_not_cut(path: Path) -> None:
    async with serving(path, Limits(stalled_s=0.5)) as daemon, connected(path) as raw:
        await raw.send(submit(1, "0" * 1_000_000, stream=False))
        await until(lambda: daemon.service.num_rows == 1 and not daemon.service.rows)
        num_read = 0
        # Far less than what wakes a sender: for that the kernel wants most of its buffer free.
        for _ in range(15):
            num_read += len(await raw.stream.receive_some(2 * SEND_BYTES))
            await trio.sleep(0.1)
        while num_read < 1_000_000:
            data = await raw.stream.receive_some(100_000)
            assert data, f"cut off after {num_read} bytes"
            num_read += len(data)
        assert daemon.cut_by == []


@trio_test
async def test_one_who_stops_reading_is_cut_after_a_time(path: Path) -> None:
    async with serving(path, Limits(stalled_s=0.05)) as daemon, connected(path) as raw:
        await raw.send(submit(1, "0" * 1_000_000 + " hang"), submit(2, "hang"))
        await until(lambda: daemon.cut_by == ["stalled"])
        await until(lambda: not daemon.service.rows)
        assert daemon.service.num_cancelled == 2


@trio_test
async def test_broken_framing_ends_the_requests_of_one_who_does_not_read_too(path: Path) -> None:
    async with serving(path) as daemon, connected(path) as raw:
        await raw.send(submit(1, "0" * 1_000_000 + " hang"))
        await until(lambda: len(daemon.service.rows) == 1)
        await raw.stream.send_all(bytes(4))
        await until(lambda: not daemon.service.rows)
        daemon.scopes[0].cancel()


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
