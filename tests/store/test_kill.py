"""A process that keeps is killed at a random moment: the next start serves what it promised, all of it whole."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import trio

from store.names import segment_path
from store.segment_file import verify_file
from tests.store.keeping import files_in, opened


@pytest.fixture
def committer() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.store.committer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def one_round(committer: subprocess.Popen[str], folder: Path, random: Random, max_bytes: int) -> set[str]:
    """Let it run for a while, kill it, and return the ids that it said were kept."""
    assert committer.stdin is not None
    assert committer.stdout is not None
    committer.stdin.write(f"{folder} {random.randrange(10**9)} {max_bytes}\n")
    committer.stdin.flush()
    child = int(committer.stdout.readline())
    time.sleep(random.random() ** 2 * 0.3)
    os.kill(child, signal.SIGKILL)
    kept = set()
    while (line := committer.stdout.readline().strip()) != "gone":
        assert line, "the committer has ended"
        kept.add(line)
    return kept


async def serves(folder: Path) -> set[str]:
    async with opened(folder) as keeper:
        assert (await keeper.stat()).corrupt == 0
        return {entry.segment.id for entry in keeper._shelf.entries()}


def kill(committer: subprocess.Popen[str], folder: Path, num_rounds: int, seed: int) -> None:
    """Every other round has a budget, below what the one before it left."""
    random = Random(seed)
    num_kept = num_strays = 0
    for number in range(num_rounds):
        max_bytes = 0 if number % 2 else 50 * 36_000
        kept = one_round(committer, folder, random, max_bytes)
        num_kept += len(kept)
        num_strays += any(name.endswith(".writing") for name in files_in(folder))
        found = trio.run(serves, folder)
        assert files_in(folder) == {f"{id_}.segment" for id_ in found}
        for id_ in found:
            assert verify_file(segment_path(folder, id_)).segment.id == id_
        assert max_bytes or kept <= found, f"promised and lost in round {number}"
    assert num_kept > num_rounds
    assert num_strays > num_rounds // 10


def test_a_killed_keeper_leaves_what_it_promised(committer: subprocess.Popen[str], tmp_path: Path) -> None:
    kill(committer, tmp_path / "store", 20, 1)


@pytest.mark.slow
def test_a_keeper_killed_300_times(committer: subprocess.Popen[str], tmp_path: Path) -> None:
    kill(committer, tmp_path / "store", 300, 2)
