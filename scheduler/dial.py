"""What `laned ask` and `laned status` share: the flag --socket, and a conversation that fails with one sentence."""

import argparse
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from scheduler.client import Client, ConnectionLost, RequestError
from scheduler.listener import default_socket_path
from scheduler.usage import CommandFailed, UsageError

T = TypeVar("T")

# What another value would mend; the rest is for the daemon, or for later.
_USERS_MISTAKES = ("bad_request", "context_length_exceeded")


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=f"the daemon's socket (default: {str(default_socket_path()).replace('%', '%%')})",
    )


def call(socket: str | None, talk: Callable[[Client], Awaitable[T]], wait_s: float | None = None) -> T:
    """Run talk(client) with the daemon at socket, the default one if None. Raises UsageError and CommandFailed.

    wait_s: how long the daemon may be loading its model.
    """

    async def run() -> T:
        async with Client(socket, wait_s=wait_s) as client:
            return await talk(client)

    try:
        return trio.run(run)
    except RequestError as error:
        if error.code in _USERS_MISTAKES:
            raise UsageError(_sentence(error.message)) from error
        later = "" if error.retry_after_s is None else f" Try again in {error.retry_after_s:g} s."
        raise CommandFailed(_sentence(f"{error.message} ({error.code})") + later) from error
    except ConnectionLost as error:
        raise CommandFailed(_sentence(str(error))) from error


def _sentence(message: str) -> str:
    return f"{message[:1].upper()}{message[1:].rstrip('.')}."
