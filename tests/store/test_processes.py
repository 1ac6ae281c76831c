"""Real processes: a store, its daemons, and what is left when one of them is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from store.keeping import KeeperAway
from store.store import Store
from tests.scheduler.trio_test import trio_test, until
from tests.store.keepers import daemon, served
from tests.store.rows import Row
from tests.store.test_store import recall, remember

ROW = Row()
MIB = 1 << 20


class Process:
    """`laned store serve`, which may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.socket = folder / "s"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "scheduler.cli", "store", "serve", "--store-min-free", "0"]
        self.running = subprocess.Popen([*command, "--store", str(self.folder), "--socket", str(self.socket)])

    def end(self, how: int) -> int:
        self.running.send_signal(how)
        return self.running.wait(timeout=60)


@contextmanager
def process(folder: Path) -> Iterator[Process]:
    store = Process(folder)
    try:
        yield store
    finally:
        store.end(signal.SIGKILL)


async def connected(store: Store) -> None:
    while True:
        try:
            await store.flush()
        except KeeperAway:
            await trio.sleep(0.02)
        else:
            return


@trio_test
async def test_a_store_that_is_killed_loses_nothing_and_its_daemon_serves_on(tmp_path: Path) -> None:
    with process(tmp_path) as served_by:
        async with daemon(served_by.socket, memory_bytes=MIB) as store:
            await connected(store)
            for turn in range(3):
                remember(store, ROW, range(50 * (turn + 1)))
                await store.flush()
                served_by.end(signal.SIGKILL)
                assert (await recall(store, ROW, range(1000))).memory_tokens == 50 * (turn + 1)
                remember(store, ROW, [turn + 7, *range(40)])
                await until(lambda: store.stats().disk is not None and store.stats().disk.away)  # type: ignore[union-attr]
                served_by.start()
                await connected(store)
                assert store.stats().queue_bytes == 0
            assert store.stats().dropped == 0
            assert store.stats().written_segments == 6
        async with daemon(served_by.socket) as again:
            assert (await recall(again, ROW, range(1000))).disk_tokens == 150
            assert (await recall(again, ROW, [9, *range(40)])).disk_tokens == 41
        assert served_by.end(signal.SIGTERM) == 0
        assert not served_by.socket.exists()
        assert list(served_by.folder.glob("*.writing")) == []


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_store_killed_at_any_moment_has_whole_segments_and_all_that_was_flushed(rounds: int, tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(rounds * 40.0):
            await killed_at_any_moment(rounds, tmp_path)

    trio.run(main)


async def killed_at_any_moment(rounds: int, tmp_path: Path) -> None:
    random.seed(rounds)
    rows: list[list[int]] = []
    with process(tmp_path) as served_by:
        async with daemon(served_by.socket) as store:
            for number in range(rounds):
                await connected(store)
                assert store.stats().queue_bytes == 0
                flushed = len(rows)
                for _ in range(20):
                    stem = random.choice(rows)[: random.randint(1, 40)] if rows else []
                    rows.append([*stem, *(random.randint(0, 9) for _ in range(40)), number])
                    remember(store, ROW, rows[-1])
                    if random.random() < 0.3:
                        await trio.sleep(random.random() * 0.01)
                served_by.end(signal.SIGKILL)
                for tokens in random.sample(rows, 5):
                    await recall(store, ROW, tokens)
                served_by.start()
                async with daemon(served_by.socket) as another:
                    await connected(another)
                    for tokens in rows[:flushed]:
                        assert (await recall(another, ROW, tokens)).tokens == len(tokens)
            await connected(store)
            assert store.stats().dropped == 0
            assert store.stats().corrupt == 0
        async with daemon(served_by.socket) as last:
            await connected(last)
            for tokens in rows:
                assert (await recall(last, ROW, tokens)).disk_tokens == len(tokens)
        assert served_by.end(signal.SIGTERM) == 0
        assert list(served_by.folder.glob("*.writing")) == []


CLIENT = """
import sys, trio
from pathlib import Path
from store.remote import open_remote
from store.segment import root_id

async def main():
    async with open_remote(Path(sys.argv[1]), "model-1") as keeper:
        chain = await keeper.find(root_id("model-1", ""), range(50), 50)
        path = await keeper.reserve(1000)
        path.write_bytes(b"half a segment")
        print(chain.tokens, path.name, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@trio_test
async def test_a_client_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (keeper, socket):
        async with daemon(socket) as store:
            remember(store, ROW, range(50))
            await store.flush()
        command = [sys.executable, "-c", CLIENT, str(socket)]
        async with trio.open_nursery() as nursery:
            client = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE, check=False))
            said = b""
            async for data in client.stdout:
                said += data
                if said.endswith(b"\n"):
                    break
            tokens, name = said.decode().split()
            assert tokens == "50"
            assert (tmp_path / "store" / name).read_bytes() == b"half a segment"
            assert len(keeper._shelf._pins) == 1
            client.kill()
        await until(lambda: not keeper._shelf._pins and not (tmp_path / "store" / name).exists())
