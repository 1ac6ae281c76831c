"""Single keys from the terminal, without a return after them."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import trio


@contextmanager
def single_keys() -> Iterator[int | None]:
    """The descriptor to read keys from while the block lasts, None where standard input is no terminal.

    Keys are not shown; ^C still interrupts. The terminal is left as it was.
    """
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield None
        return
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def wait_for(wanted: str, descriptor: int | None) -> None:
    """Return when one of these keys is pressed, or the terminal has gone; never without a descriptor."""
    if descriptor is None:
        await trio.sleep_forever()
    while True:
        await trio.lowlevel.wait_readable(descriptor)
        pressed = os.read(descriptor, 64)
        if not pressed or any(key in wanted for key in pressed.decode("utf-8", "replace")):
            return
