"""Makes docs/top.svg: a daemon with the demonstration's model, clients that come and go, and a frame of `laned top`.

uv run --extra demo python -m tests.bench.top_picture docs/top.svg
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import trio

from scheduler.client import Client
from tests.e2e.daemon import LANED, serving

NUM_CLIENTS = 9
MAX_ROWS = 8
WARM_S = 90.0
SUBJECTS = ("a lighthouse in winter", "the moon", "a cat and its owner", "bees", "the sea", "an old clock", "bread")


async def keep_asking(socket: Path, number: int) -> None:
    """Conversations of some turns, of different lengths, with a pause now and then."""
    chance = random.Random(number)
    async with Client(socket) as client:
        while True:
            chat = [{"role": "system", "content": "You tell stories. " * chance.randint(1, 30)}]
            for _ in range(chance.randint(2, 4)):
                chat.append({"role": "user", "content": f"Write a story about {chance.choice(SUBJECTS)}."})
                done = await client.ask(messages=chat, max_tokens=chance.randint(20, 120), temperature=0.8)
                chat.append({"role": "assistant", "content": done.text or ""})
                await trio.sleep(chance.random())


async def load(socket: Path, seconds: float) -> None:
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for number in range(NUM_CLIENTS):
                nursery.start_soon(keep_asking, socket, number)


async def draw(socket: Path, picture: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load, socket, WARM_S + 60)
        await trio.sleep(WARM_S)
        command = [str(LANED), "top", "--once", "--svg", picture, "--socket", str(socket)]
        await trio.run_process(command)
        nursery.cancel_scope.cancel()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--max-rows", str(MAX_ROWS)) as daemon:
        subprocess.run([str(LANED), "status", "--socket", str(daemon.socket)], check=True)
        trio.run(draw, daemon.socket, sys.argv[1])


if __name__ == "__main__":
    main()
