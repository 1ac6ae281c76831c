from pathlib import Path

import pytest
import trio

from scheduler.client import Client
from tests.scheduler.assault import assault
from tests.scheduler.echo import serving
from tests.scheduler.trio_test import trio_test, until

# What must have come back if the frames were as varied as they are meant to be.
CODES = {"bad_frame", "frame_too_large", "hello_expected", "unknown_type", "bad_request", "duplicate_id"}


@pytest.mark.parametrize(
    ("frames", "seed"), [(5_000, 1), pytest.param(100_000, 2, marks=pytest.mark.slow)], ids=["quick", "whole"]
)
@trio_test
async def test_mutated_frames_harm_nobody_else(tmp_path: Path, frames: int, seed: int) -> None:
    """No crash, no task, row or descriptor left, and another client gets its answers all the while."""
    path = tmp_path / "laned.sock"
    num_asked = 0
    async with serving(path) as daemon:
        async with Client(path) as client, trio.open_nursery() as nursery:

            async def ask_on() -> None:
                nonlocal num_asked
                while True:
                    prompt = f"question {num_asked} pause and more "
                    async with client.submit(prompt=prompt) as answer:
                        assert "".join([delta.text async for delta in answer]) == prompt
                    num_asked += 1

            nursery.start_soon(ask_on)
            report = await assault(path, frames, seed)
            nursery.cancel_scope.cancel()
        await until(lambda: not daemon.handlers.child_tasks and not daemon.service.rows)
        async with Client(path) as client:
            assert (await client.ask("still here")).text == "still here "
    assert report.num_frames >= frames
    assert num_asked > report.num_connections / 100
    assert set(report.errors) >= CODES
    assert report.replies["done"] > 0
    assert "internal" not in {*report.errors, *daemon.cut_by}
