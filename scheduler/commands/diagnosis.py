"""Asks lanes.doctor about this machine's backend, part by part, on the model's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from lanes.thread import open_model_thread
from scheduler.loading import look_at_device


def diagnose(blas: str, self_test: bool, begin: Callable[[str], None], found: Callable[[str, Any], None]) -> None:
    """Calls begin(part), then found(part, plain data), for each part.

    Parts are "device" (where MLX does not work, {"error": a sentence}) and, with self_test, each of lanes.doctor.CHECKS
    (its verdicts, as maps) and "costs". Raises UsageError, in a group, where blas is wrong.
    """
    trio.run(_diagnose, blas, self_test, begin, found)


async def _diagnose(
    blas: str, self_test: bool, begin: Callable[[str], None], found: Callable[[str, Any], None]
) -> None:
    async with open_model_thread() as thread:
        begin("device")
        device, checks = await thread.run(look_at_device, blas)
        found("device", device)
        for name in checks if self_test else ():
            begin(name)
            found(name, await thread.run(checks[name]))
