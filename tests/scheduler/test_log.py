"""The log: one line for one thing, readable by whom it is for, and no client's text that could forge a line."""

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler import log

NASTY = "a\nb\x1b[2J\u202ec\r\x9b"


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    for name in ("laned", "scheduler", "lanes", "store"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[str]:
    text = stream.getvalue()
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n")


def failing_call(logger: logging.Logger) -> None:
    try:
        raise ValueError(NASTY)
    except ValueError:
        logger.exception("it failed with %s", NASTY)


def test_json_is_one_object_a_line_with_its_fields() -> None:
    stream = io.StringIO()
    log.configure("json", "info", stream)
    logger = logging.getLogger("scheduler.x")
    logger.info("hello %s", NASTY, extra=log.fields(rows=3, path=Path("/x"), message="forged"))
    failing_call(logger)
    first, second = (json.loads(line) for line in lines(stream))
    assert first["message"] == f"hello {NASTY}"
    assert (first["level"], first["logger"], first["rows"], first["path"]) == ("info", "scheduler.x", 3, "/x")
    assert first["time"].endswith("Z")
    assert "ValueError" in second["exception"]


def test_text_has_a_time_and_stays_on_its_line() -> None:
    stream = io.StringIO()
    log.configure("text", "info", stream)
    logging.getLogger("scheduler.x").warning("hello %s", NASTY, extra=log.fields(rows=3))
    (line,) = lines(stream)
    time, level, rest = line.split(" ", 2)
    assert time.endswith("Z")
    assert level == "warning"
    assert rest == r"hello a\nb\x1b[2J\u202ec\r\x9b"


def test_the_journal_gets_levels_on_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "journal", "w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        log.configure("text", "debug", stream)
        logger = logging.getLogger("lanes.x")
        logger.debug("d")
        logger.info("i")
        logger.warning("w")
        failing_call(logger)
        stream.flush()
        stream.seek(0)
        written = stream.read().splitlines()
    assert written[:3] == ["<7>d", "<6>i", "<4>w"]
    assert len(written) > 5
    assert all(line.startswith("<3>") for line in written[3:])


def test_a_stream_that_is_not_the_journal_gets_no_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    stream = io.StringIO()
    log.configure("text", "info", stream)
    logging.getLogger("store.x").info("i")
    assert lines(stream)[0].endswith("info i")


def test_levels_hold_for_us_and_others_are_heard_from_warnings_on() -> None:
    stream = io.StringIO()
    log.configure("text", "info", stream)
    logging.getLogger("scheduler.x").debug("ours, too low")
    logging.getLogger("scheduler.x").info("ours")
    logging.getLogger("somebody.else").info("theirs, too low")
    logging.getLogger("somebody.else").warning("theirs")
    assert [line.split(" ", 2)[2] for line in lines(stream)] == ["ours", "theirs"]


def test_the_last_errors_are_kept_for_whoever_asks() -> None:
    for log_format in ("text", "json"):  # as after SIGHUP
        log.configure(log_format, "error", io.StringIO())
        logging.getLogger("scheduler.x").warning("a request failed")
        logging.getLogger("scheduler.x").error("%s is wrong", log_format)
    *_, first, last = log.last_errors()
    assert (first["message"], last["message"], last["level"]) == ("text is wrong", "json is wrong", "error")
    assert last["time"].endswith("Z")
    for number in range(50):
        logging.getLogger("scheduler.x").error("error %d", number)
    assert [error["message"] for error in log.last_errors()] == [f"error {number}" for number in range(40, 50)]


@pytest.mark.parametrize("level", ["info", "error"])
def test_warnings_of_ones_own_troubles_are_among_them_and_clients_mistakes_are_not(level: str) -> None:
    stream = io.StringIO()
    log.configure("text", level, stream)
    logging.getLogger("scheduler.x").error("the first")
    logging.getLogger("store.x").warning("cannot write to %s: %s", "/ssd", "it is full")
    logging.getLogger("lanes.x").warning("a chunk failed")
    service = logging.getLogger("scheduler.service")
    finish(service, finish="model_failed", message="out of memory", prompt="secret", request_id="also secret")
    logging.getLogger("scheduler.connection").warning("a client: cut off")
    finish(service, finish="timed_out", message="there is no whole answer within 1 s")
    finish(service)
    last = [(error["level"], error["message"]) for error in log.last_errors()]
    assert last[-4:] == [
        ("error", "the first"),
        ("warning", "cannot write to /ssd: it is full"),
        ("warning", "a chunk failed"),
        ("warning", "a request failed: out of memory"),
    ]
    assert len(lines(stream)) == (7 if level == "info" else 1), "what is written is as it was"


def test_what_is_asked_for_is_written_whatever_the_level() -> None:
    stream = io.StringIO()
    log.configure("json", "error", stream)
    logger = logging.getLogger("scheduler.x")
    logger.info("not asked for")
    before = log.last_errors()
    log.asked_for(logger, "task %s", "one")
    (line,) = (json.loads(line) for line in lines(stream))
    assert (line["level"], line["logger"], line["message"]) == ("info", "scheduler.x", "task one")
    assert log.last_errors() == before


def test_configuring_twice_does_not_write_twice() -> None:
    stream = io.StringIO()
    log.configure("text", "info", stream)
    log.configure("text", "info", stream)
    logging.getLogger("scheduler").info("once")
    assert len(lines(stream)) == 1


def finish(logger: logging.Logger, **more: Any) -> None:
    line: dict[str, Any] = {"request_id": "a\n1", "finish": "stop", "prompt_tokens": 40, "completion_tokens": 65}
    times = {"queued_s": 0.01, "ttft_s": 0.5, "decode_s": 2.0, "total_s": 2.51}
    log.request_finished(logger, **(line | times | more))


def test_a_request_is_one_line_with_its_numbers() -> None:
    stream = io.StringIO()
    log.configure("text", "info", stream)
    finish(logging.getLogger("scheduler.loop"))
    (line,) = lines(stream)
    assert line.endswith(
        r"info request a\n1 stop: 40 prompt + 65 new tokens in 2.51 s (queued 0.01, first token 0.50, 32.0 tokens/s)"
    )
    stream = io.StringIO()
    log.configure("json", "info", stream)
    finish(logging.getLogger("scheduler.loop"), request_id=7, cached_tokens=8)
    found = json.loads(stream.getvalue())
    assert (found["id"], found["finish"], found["tokens_per_s"], found["cached_tokens"]) == (7, "stop", 32.0, 8)
    assert "40 prompt (8 cached) + 65 new" in found["message"]
    assert not {"prompt", "answer", "error"} & set(found)


def test_a_request_that_failed_is_a_warning_and_one_without_tokens_has_no_rate() -> None:
    stream = io.StringIO()
    log.configure("json", "warning", stream)
    logger = logging.getLogger("scheduler.loop")
    finish(logger)
    finish(logger, request_id=2, message="the row ended", completion_tokens=0, ttft_s=None, prompt="secret")
    (line,) = lines(stream)
    found = json.loads(line)
    assert (found["level"], found["error"], found["prompt"]) == ("warning", "the row ended", "secret")
    assert (found["id"], found["tokens_per_s"], found["ttft_s"]) == (2, None, None)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_a_terminal_gets_a_console_and_no_control_characters() -> None:
    import pty

    leader, follower = pty.openpty()
    with open(follower, "w") as stream:
        console = log.configure("text", "info", stream)
        assert console is not None
        logging.getLogger("scheduler").info("hello [bold]%s", NASTY)
        stream.flush()
        seen = os.read(leader, 10_000).decode()
    os.close(leader)
    assert "hello [bold]" in seen.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "\x1b[2J" not in seen
    assert "\u202e" not in seen
