"""Mutated frames against the real daemon, while another client asks one question over and over."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from scheduler.client import Client
from tests.e2e.daemon import Daemon, assert_memory_is_back, idle, memory
from tests.scheduler.assault import assault

# What must have come back if the frames were as varied as they are meant to be.
CODES = {"bad_frame", "frame_too_large", "hello_expected", "unknown_type", "bad_request", "duplicate_id"}
ASKED: dict[str, Any] = {"prompt": "The colours of the rainbow are", "max_tokens": 8}
# Not an expectation: a hundred thousand frames hold some ten thousand requests that the model has to answer.
HANGS_S = 3600.0


@pytest.mark.parametrize(
    ("frames", "seed"), [(3_000, 1), pytest.param(100_000, 2, marks=pytest.mark.slow)], ids=["quick", "whole"]
)
def test_mutated_frames_harm_nobody_else(daemon: Daemon, frames: int, seed: int) -> None:
    async def main() -> None:
        answers = []
        is_over = False
        async with Client(daemon.socket) as client:
            alone = await client.ask(**ASKED)
            before = await memory(client)
            num_failed = (await client.status())["totals"]["failed"]

            async def ask_on() -> None:
                while not is_over:
                    answers.append((await client.ask(**ASKED)).text)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_on)
                with trio.fail_after(HANGS_S):
                    report = await assault(daemon.socket, frames, seed)
                is_over = True
        async with Client(daemon.socket) as client:
            await idle(client)
            assert (await client.ask(**ASKED)).text == alone.text
            after = await memory(client)
            assert (await client.status())["totals"]["failed"] == num_failed
        assert report.num_frames >= frames
        assert set(answers) == {alone.text}
        assert set(report.errors) >= CODES
        assert "internal" not in report.errors
        assert report.replies["done"] > 0
        assert_memory_is_back(before, after)

    trio.run(main)
