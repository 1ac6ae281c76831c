"""kill -9 at random moments under load, again and again, in one folder: every answer is the one that was given before
anything was remembered, what was flushed is still known, and nothing is left lying about.

LANED_CRASH_ROUNDS says how often: 300 take half an hour on two cores.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from scheduler.client import Client, ClientError
from store.names import is_temporary
from tests.e2e.daemon import LANED, Daemon, at_once, run, serving
from tests.e2e.remembered import Heard, ask, files_in, flushed, prompt_of, serving_store, store_flags

ROUNDS = int(os.environ.get("LANED_CRASH_ROUNDS", "12"))
NUM_CLIENTS = 4
# A round lasts at most until so many answers have come, and then for so long.
ROUND_ANSWERS = 10
ROUND_S = 0.3
# So few that what is old is evicted while what is new is written.
STORE_MAX = "100MiB"
# How much of what was flushed is asked for after the kill.
NUM_CHECKED = 4

Key = tuple[int, str]


class Load:
    """Prompts with common beginnings and their answers without anything remembered. The same prompt under another salt
    is remembered anew, and answered as before."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        trunks = [prompt_of(40, seed=number) for number in range(2)]
        branches = [[*trunk, *prompt_of(20, seed=10 + number)] for trunk in trunks for number in range(2)]
        self.prompts = [*trunks, *branches, *([*branch, *prompt_of(10, seed=20)] for branch in branches)]
        self.cold: list[Heard] = []
        self.num_right = 0
        self.num_cached = 0
        self._more = trio.lowlevel.ParkingLot()
        self._salts: list[str] = []
        self._answered: set[Key] = set()
        self._flushed: set[Key] = set()

    async def learn(self, client: Client) -> None:
        """What is right, all at the same time."""
        asked = [lambda prompt=prompt: ask(client, prompt, cache="none") for prompt in self.prompts]
        self.cold = await at_once(*asked)

    async def flushed_is_known(self, client: Client, recalled: Callable[[Heard], int]) -> None:
        """Some of what was on disk when it was killed."""
        for number, salt in self.random.sample(sorted(self._flushed), min(NUM_CHECKED, len(self._flushed))):
            told = await self._ask(client, number, salt, "read")
            assert recalled(told) == len(self.prompts[number]) - 1, f"{number} of {salt} was flushed"

    def begin_round(self, salt: str) -> None:
        self._salts.append(salt)
        self._answered.clear()
        self._flushed.clear()

    async def put_on(self, path: Path) -> None:
        """Until the daemon is gone, or this is cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_CLIENTS):
                nursery.start_soon(self._ask_on, path)
            nursery.start_soon(self._flush_on, path)

    async def _ask_on(self, path: Path) -> None:
        try:
            async with Client(path) as client:
                while True:
                    number = self.random.randrange(len(self.prompts))
                    salt = self.random.choice(self._salts[-8:]) if self.random.random() < 0.3 else self._salts[-1]
                    await self._ask(client, number, salt, "both")
                    self._answered.add((number, salt))
        except ClientError:
            pass

    async def _ask(self, client: Client, number: int, salt: str, cache: str) -> Heard:
        told = await ask(client, self.prompts[number], cache_salt=salt, cache=cache)
        told.assert_same(self.cold[number])
        self.num_right += 1
        self.num_cached += told.usage.cached_tokens > 0
        self._more.unpark_all()
        return told

    async def _flush_on(self, path: Path) -> None:
        try:
            async with Client(path) as client:
                while True:
                    answered = set(self._answered)
                    if await client.flush():
                        self._flushed |= answered
                    await trio.sleep(0.02)
        except ClientError:
            pass

    async def until_then(self) -> None:
        """A moment that nobody has chosen, of a round that has just begun."""
        last = self.num_right + self.random.randrange(ROUND_ANSWERS + 1)
        while self.num_right < last:
            await self._more.park()
        await trio.sleep(self.random.uniform(0.0, ROUND_S))


def assert_no_strays(folder: Path, runtime: Path) -> None:
    """For when nobody keeps the folder, and whoever did last ended well."""
    checked = run(LANED, "store", "verify", "--json", "--store", folder, runtime=runtime)
    found = json.loads(checked.stdout)
    assert (checked.returncode, found["bad"]) == (0, {})
    assert found["segments"] > 0
    assert not [name for name in files_in(folder) if is_temporary(Path(name).name)]


@pytest.mark.slow
def test_a_daemon_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """Now and then it is killed while it starts."""
    folder = tmp_path / "store"
    flags = ["--model", "hybrid", *store_flags(folder), "--store-max", STORE_MAX, "--store-verify"]
    load = Load(seed=1)
    with serving(tmp_path, *flags) as daemon:
        trio.run(learn, load, daemon)
    for number in range(ROUNDS):
        if load.random.random() < 0.15:
            kill_while_it_starts(tmp_path, flags, load.random.uniform(0.1, 4.0))
        with serving(tmp_path, *flags) as daemon:
            trio.run(one_round, load, daemon, f"round {number}")
            assert_unashamed(daemon)
    with serving(tmp_path, *flags) as daemon:
        trio.run(still_knows, load, daemon)
        assert daemon.terminate() == 0
        assert_unashamed(daemon)
    assert_no_strays(folder, tmp_path)
    assert load.num_cached > load.num_right // 10


async def learn(load: Load, daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        await load.learn(client)


async def one_round(load: Load, daemon: Daemon, salt: str) -> None:
    await still_knows(load, daemon)
    load.begin_round(salt)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.put_on, daemon.socket)
        await load.until_then()
        daemon.kill()


async def still_knows(load: Load, daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        await load.flushed_is_known(client, lambda told: told.usage.cached_disk_tokens)


def kill_while_it_starts(folder: Path, flags: list[str], after_s: float) -> None:
    daemon = Daemon(folder, *flags)
    try:
        daemon.process.wait(after_s)
    except subprocess.TimeoutExpired:
        daemon.kill()


def assert_unashamed(daemon: Daemon) -> None:
    """Nothing that a kill leaves is worth a warning."""
    for word in (" warning ", " error ", " critical ", "Traceback"):
        assert word not in daemon.log, daemon.log


@pytest.mark.slow
def test_a_store_that_is_killed_again_and_again_under_a_daemon(tmp_path: Path) -> None:
    """The daemon goes on answering; after each kill the store comes back with all that it had said was on disk."""
    folder, socket = tmp_path / "store", tmp_path / "store.sock"
    flags = ["--model", "hybrid", "--blas", "off", "--store-socket", str(socket), "--prompt-cache-bytes", "1MiB"]
    load = Load(seed=2)
    with serving_store(folder, socket) as store, serving(tmp_path, *flags) as daemon:
        trio.run(learn, load, daemon)
        trio.run(rounds_of_the_store, load, daemon, store.kill, store.start)
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.log
        store.process.terminate()
        assert store.process.wait(60) == 0
    assert_no_strays(folder, tmp_path)
    assert load.num_cached > load.num_right // 10


async def rounds_of_the_store(load: Load, daemon: Daemon, kill: Callable[[], None], start: Callable[[], None]) -> None:
    async with Client(daemon.socket) as client:
        for number in range(2 * ROUNDS):
            await flushed(client)
            # What did not fit into memory is asked of the store.
            await load.flushed_is_known(client, lambda told: told.usage.cached_tokens)
            load.begin_round(f"round {number}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load.put_on, daemon.socket)
                await load.until_then()
                kill()
                # The daemon answers meanwhile, too.
                await load.until_then()
                nursery.cancel_scope.cancel()
            await trio.to_thread.run_sync(start)
