"""Tests that are coroutines."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import trio

# Not an expectation: a test that hangs should fail and not stop the others.
HANGS_S = 120.0


def trio_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def main() -> None:
            with trio.fail_after(HANGS_S):
                await test(**fixtures)

        trio.run(main)

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks are about to bring about."""
    while not condition():  # noqa: ASYNC110 (nobody would set an event for a test)
        await trio.sleep(0.001)
