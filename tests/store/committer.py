"""Commits segments as fast as it can until it is killed: `python -m tests.store.committer`.

For each line on its input, a folder, a number for its choices and a budget, or 0, it forks a child, which says its
process id and then the id of each segment when it is kept. When the child is gone, it says "gone". Forking spares each
round the start of Python.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import Random

import trio

from store.segment import Segment
from tests.store.keeping import keep, opened
from tests.store.segments import with_tensors


def say(line: str) -> None:
    """In one piece."""
    os.write(1, f"{line}\n".encode())


async def commit_forever(folder: Path, random: Random, max_bytes: int | None) -> None:
    """With a budget segments are evicted, and some condemned."""
    recent: list[Segment] = []
    async with opened(folder, max_bytes=max_bytes) as keeper:
        while True:
            parent = random.choice([None, *recent])
            start = None if parent is None else random.randint(parent.start + 1, parent.stop)
            own = [random.randrange(50_000) for _ in range(20)]
            new = with_tensors(own, parent, start, dim=random.choice((1, 64, 512)))
            if await keep(keeper, new) == "kept":
                say(new.id)
                recent = [*recent[-9:], new]
            if max_bytes is not None and random.random() < 0.05:
                await keeper.condemn(random.choice(recent).id)


def main() -> None:
    for line in sys.stdin:
        folder, seed, max_bytes = line.split()
        child = os.fork()
        if child == 0:
            say(str(os.getpid()))
            trio.run(commit_forever, Path(folder), Random(int(seed)), int(max_bytes) or None)
        os.waitpid(child, 0)
        say("gone")


if __name__ == "__main__":
    main()
