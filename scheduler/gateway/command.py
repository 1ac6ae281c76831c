"""`laned gateway`: its flags."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from scheduler import dial, log, values
from scheduler.gateway.guard import Guard
from scheduler.gateway.settings import Settings
from scheduler.usage import CommandFailed, Parser, UsageError
from scheduler.values import Kind

KEY_VARIABLE = "LANED_API_KEY"
# What fits into the largest frame that the daemon takes.
MOST_BODY_BYTES = 1 << 30

_PORT = values.whole(0, 65535)
_SIZE = values.size(MOST_BODY_BYTES)
_SECONDS = values.seconds()
_PATIENCE = values.number("a number of seconds of at least 0", lambda value: value >= 0)


def main(argv: Sequence[str]) -> int:
    chosen = _parser().parse(argv)
    settings = settings_of(chosen, dict(os.environ))
    log.configure(chosen.log_format, chosen.log_level)
    try:
        from scheduler.gateway.server import run
    except ModuleNotFoundError as error:
        raise CommandFailed(f"The gateway needs {error.name}: install laned with its extra `gateway`.") from error
    run(settings)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "gateway",
        "Serve OpenAI's and Anthropic's HTTP APIs, and a page to chat with, in front of a running daemon.\n"
        "SIGTERM or ^C lets what runs finish, within --drain-timeout, and then ends the gateway.",
        (
            "laned gateway",
            "laned gateway --port 8000 --served-model-name qwen3 default",
            "laned gateway --host 0.0.0.0 --api-key-file /etc/laned/keys",
        ),
    )
    dial.add_flag(parser)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default: %(default)s)")
    http.add_argument("--port", default="8080", metavar="PORT", help="0 takes any free port (default: %(default)s)")
    http.add_argument(
        "--max-body-bytes", default="8MiB", metavar="SIZE", help="largest body of a request (default: %(default)s)"
    )
    http.add_argument(
        *("--keep-alive", "--sse-keep-alive"),
        default="10",
        metavar="SECONDS",
        help="tell a streaming client that it is not forgotten, whenever it heard nothing for so long "
        "(default: %(default)s)",
    )
    http.add_argument(
        "--drain-timeout", default="30", metavar="SECONDS", help="how long a SIGTERM lets requests go on (default: 30)"
    )
    who = parser.add_argument_group("who may ask")
    who.add_argument(
        "--api-key",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY",
        help="ask for one of these keys; who lists processes sees them: --api-key-file and the variable "
        f"{KEY_VARIABLE} hide them",
    )
    who.add_argument("--api-key-file", metavar="FILE", help="file with a key on each line; # begins a comment")
    who.add_argument(
        "--allowed-origins",
        action="extend",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages that may ask, such as https://chat.example.org, or * for all (default: the gateway's own)",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--served-model-name",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use, the first one being told (default: the daemon's name for it)",
    )
    model.add_argument("--any-model", action="store_true", help="take requests whatever model they name")
    logs = parser.add_argument_group("log")
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="for people or for machines")
    logs.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: %(default)s)"
    )
    return parser


def settings_of(chosen: Namespace, environment: dict[str, str]) -> Settings:
    """Raises UsageError."""
    return Settings(
        host=chosen.host,
        port=_checked("--port", _PORT, chosen.port),
        socket=chosen.socket,
        names=tuple(chosen.served_model_name),
        any_model=chosen.any_model,
        guard=Guard(
            keys=_keys(chosen, environment),
            origins=frozenset(_origins(chosen.allowed_origins)),
            body_bytes=_checked("--max-body-bytes", _SIZE, chosen.max_body_bytes),
        ),
        keep_alive_s=_checked("--keep-alive", _SECONDS, chosen.keep_alive),
        drain_s=_checked("--drain-timeout", _PATIENCE, chosen.drain_timeout),
    )


def _checked(flag: str, kind: Kind, text: str) -> Any:
    try:
        return kind.check(kind.read(text))
    except (ValueError, TypeError):
        raise UsageError(f"{flag} takes {kind.noun}, not {text[:80]!r}.") from None


def _keys(chosen: Namespace, environment: dict[str, str]) -> tuple[str, ...]:
    keys = [*chosen.api_key, environment.get(KEY_VARIABLE, "")]
    if chosen.api_key_file is not None:
        found = [line.partition("#")[0].strip() for line in _lines(chosen.api_key_file)]
        if not any(found):
            # Whoever names a file wants keys: an empty one must not open the door.
            raise UsageError(f"--api-key-file {chosen.api_key_file} holds no key.")
        keys += found
    return tuple(key for key in keys if key)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"Cannot read --api-key-file {path}: {reason}.") from None


def _origins(given: Sequence[str]) -> list[str]:
    """vLLM's users write a JSON list."""
    if len(given) == 1 and given[0].startswith("["):
        try:
            listed = json.loads(given[0])
        except ValueError:
            raise UsageError("--allowed-origins takes origins, or a JSON list of them.") from None
        return [str(origin) for origin in listed]
    return list(given)
