"""Clients that go away, one by one and two hundred at once: what they had is given back."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import trio

from scheduler.client import Client
from store.framing import encode_frame
from tests.e2e.daemon import Daemon, assert_memory_is_back, idle, memory, reports
from tests.scheduler.raw import HELLO, connected, submit
from tests.scheduler.trio_test import trio_test

NUM_CLIENTS = 200
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}


@trio_test
async def test_a_client_that_leaves_in_the_middle_frees_its_rows(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        before = (await client.status())["totals"]["cancelled"]
        async with connected(daemon.socket) as raw:
            await raw.send(*[submit(number, "Once upon a time", **ENDLESS) for number in range(3)])
            await raw.until("delta")
            await reports(client, lambda report: report["rows"]["running"] > 0)
        assert (await idle(client))["totals"]["cancelled"] == before + 3


@trio_test
async def test_one_that_stops_writing_still_gets_its_answer(daemon: Daemon) -> None:
    async with connected(daemon.socket) as raw:
        await raw.send(submit("r", "Once upon a time", max_tokens=4))
        await raw.stream.send_eof()
        *_, done = await raw.rest()
    assert (done["type"], done["usage"]["completion_tokens"]) == ("done", 4)


async def vanish(daemon: Daemon, dice: random.Random, ended: Counter[str]) -> None:
    """Connect, perhaps say something, and be gone at some moment, in one of the ways in which clients go."""
    await trio.sleep(dice.random() * 3)
    async with await trio.open_unix_socket(str(daemon.socket)) as stream:
        words = " ".join(dice.choice(["red", "green", "blue", "seven"]) for _ in range(dice.randint(1, 40)))
        requests: list[dict[str, Any]] = [
            submit(number, words, seed=number, temperature=1.0, stream=dice.random() < 0.8, **ENDLESS)
            for number in range(dice.choice([1, 1, 1, 3]))
        ]
        data = b"".join(map(encode_frame, [HELLO, *requests][dice.random() < 0.05 :]))
        if half := dice.random() < 0.1:
            data = data[: dice.randrange(len(data))]
        await stream.send_all(data)
        with trio.move_on_after(dice.choice([0.0, 0.05, 1.0, 5.0]) * dice.random()):
            await stream.receive_some(1)
            await trio.sleep_forever()
        if dice.random() < 0.2:
            await stream.send_eof()
        ended["half a frame" if half else "whole"] += 1


@trio_test
async def test_two_hundred_that_vanish_leave_nothing_behind(daemon: Daemon) -> None:
    dice = random.Random(1)
    ended: Counter[str] = Counter()
    async with Client(daemon.socket) as client:
        asked: dict[str, Any] = {"prompt": "The days of the week are", "max_tokens": 6}
        answer = await client.ask(**asked)
        before = await memory(client)
        peak_rows = 0
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_CLIENTS):
                nursery.start_soon(vanish, daemon, random.Random(dice.random()), ended)
            while sum(ended.values()) < NUM_CLIENTS:
                peak_rows = max(peak_rows, (await client.status())["rows"]["running"])
                await trio.sleep(0.05)
        await idle(client)
        assert (await client.ask(**asked)).text == answer.text
        after = await memory(client)
    assert ended["half a frame"] > 0
    assert peak_rows > 1
    assert_memory_is_back(before, after)
