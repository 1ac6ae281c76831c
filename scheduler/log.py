"""The daemon's log, on standard error: text for people, JSON lines for machines.

A message is a sentence for people. What a machine should find goes along as fields (see fields()), which only the JSON
lines show: {"time", "level", "logger", "message", ...fields, "exception"?}. Text comes in three forms: coloured on a
terminal, with syslog's levels as "<6>" where standard error is the journal, plain lines with the time elsewhere.

What clients sent may stand in a message: control characters are escaped, so that nobody writes lines or moves cursors
in somebody's terminal. Prompts and answers are logged only where request_finished() is handed them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Our packages log at the level that was asked for, others' libraries only when something is wrong.
_OURS = ("laned", "scheduler", "lanes", "store")
# The code with which a request ends that was the model's or the engine's to answer, and was not.
_OUR_FAULT = "model_failed"
_SYSLOG = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
# Controls of ASCII, DEL, C1 (some terminals obey them) and the marks that reverse the direction of text.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def configure(log_format: str, level: str, stream: TextIO | None = None) -> Console | None:
    """Send the log to stream (standard error) as "text" or "json", from level ("debug" ... "error") upwards.

    Returns the console where that is a terminal: progress bars drawn on it and the log's lines do not collide.
    """
    stream = stream or sys.stderr
    console = None
    handler: logging.Handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    elif _is_journal(stream):
        handler.setFormatter(JournalFormatter())
    elif stream.isatty():
        # `laned ask` needs printable() and no colours: rich takes a tenth of a second to import.
        from rich.console import Console
        from rich.logging import RichHandler

        console = Console(file=stream)
        handler = RichHandler(console=console, show_path=False, log_time_format="[%X]")
        handler.setFormatter(TextFormatter("%(message)s"))
    else:
        handler.setFormatter(TextFormatter("%(time)s %(word)s %(message)s"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.addHandler(_last_errors)
    number = logging.getLevelNamesMapping()[level.upper()]
    handler.addFilter(lambda record: record.levelno >= number or hasattr(record, "asked_for"))
    # Warnings come this far in any case, for last_errors().
    root.setLevel(number if number == logging.DEBUG else logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(min(number, logging.WARNING))
    logging.captureWarnings(True)
    return console


class _LastErrors(logging.Handler):
    """Keeps what went wrong with the daemon itself, for `laned status`: errors, and warnings of the model, of the store
    and of requests that failed through no fault of their clients."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        # A person reads the last few; the log has them all.
        self.seen: deque[dict[str, Any]] = deque(maxlen=10)

    def emit(self, record: logging.LogRecord) -> None:
        is_ours = record.levelno >= logging.ERROR or record.name.startswith(("lanes.", "store."))
        message = getattr(record, "trouble", record.getMessage() if is_ours else None)
        if message is not None:
            self.seen.append({"time": _time(record), "level": record.levelname.lower(), "message": message})


_last_errors = _LastErrors()


def last_errors() -> list[dict[str, Any]]:
    """What went wrong last since the start, the latest last: {"time", "level", "message"}."""
    return list(_last_errors.seen)


def asked_for(logger: logging.Logger, message: str, *args: object) -> None:
    """Write what somebody wants to see now, whatever the level of the log."""
    extra = {"asked_for": True}
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, args, None, extra=extra)
    logger.handle(record)


def fields(**values: object) -> dict[str, Any]:
    """For the argument extra of a logging call: values that go into the JSON line beside the message."""
    return {"fields": values}


def printable(text: str, keep: str = "") -> str:
    """text with its control characters escaped, so that it stays on its line; those in keep are left."""
    return _CONTROL.sub(lambda at: at[0] if at[0] in keep else at[0].encode("unicode_escape").decode("ascii"), text)


def request_finished(
    logger: logging.Logger,
    *,
    request_id: str | int,
    finish: str,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    cached_tokens: int = 0,
    queued_s: float = 0.0,
    ttft_s: float | None = None,
    decode_s: float = 0.0,
    total_s: float = 0.0,
    index: int | None = None,
    message: str | None = None,
    is_refused: bool = False,
    prompt: str | None = None,
    answer: str | None = None,
) -> None:
    """Write the one line of a request that has ended. finish: its finish reason, or the code of its error.

    ttft_s: seconds to its first token, None where there was none. index: which of several answers it is. message: the
    sentence of its error; makes the line a warning, unless the request was refused. prompt, answer: their text, to be
    given only where --log-prompts is on.
    """
    level = logging.INFO if message is None or is_refused else logging.WARNING
    if not logger.isEnabledFor(level):
        return
    rate = (completion_tokens - 1) / decode_s if completion_tokens > 1 and decode_s > 0 else None
    texts = {"error": message, "prompt": prompt, "answer": answer}
    said = {name: text for name, text in texts.items() if text is not None}
    machine = fields(
        id=request_id,
        **({} if index is None else {"index": index}),
        finish=finish,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        queued_s=round(queued_s, 4),
        ttft_s=None if ttft_s is None else round(ttft_s, 4),
        decode_s=round(decode_s, 4),
        total_s=round(total_s, 4),
        tokens_per_s=None if rate is None else round(rate, 2),
        **said,
    )
    if finish == _OUR_FAULT:
        # `laned status` shows it to whoever may connect: nothing of what the client sent.
        machine["trouble"] = f"a request failed: {message}"
    if is_refused:
        logger.log(level, "request %s refused: %s", request_id, message, extra=machine)
        return
    named = request_id if index is None else f"{request_id} ({index})"
    cached = f" ({cached_tokens} cached)" if cached_tokens else ""
    first = "" if ttft_s is None else f", first token {ttft_s:.2f}"
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    logger.log(
        level,
        "request %s %s: %d prompt%s + %d new tokens in %.2f s (queued %.2f%s%s)%s",
        *(named, finish, prompt_tokens, cached, completion_tokens, total_s, queued_s, first, speed),
        "".join(f", {name} {text!r}" for name, text in said.items()),
        extra=machine,
    )


def _is_journal(stream: TextIO) -> bool:
    """Whether systemd connected stream to the journal: JOURNAL_STREAM holds its device and inode (systemd.exec(5))."""
    named = os.environ.get("JOURNAL_STREAM")
    if not named:
        return False
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """The message on one line; a traceback, if there is one, indented below."""

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([first, *(f"  {printable(line)}" for line in others)])

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base class's name)
        record.message = printable(record.message)
        record.time = _time(record)
        record.word = record.levelname.lower()
        return super().formatMessage(record)


class JournalFormatter(TextFormatter):
    """Each line, those of a traceback too, begins with syslog's level; the journal adds time and unit itself."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_SYSLOG.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object on one line, ASCII only, so that no line is lost to an encoding."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {**getattr(record, "fields", {}), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: line[name] for name in ("time", "level", "logger", "message")} | line, default=str)
