"""Two daemons and the process that keeps one folder for both; that process is killed, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from scheduler.client import Client
from tests.e2e.daemon import Daemon, reports, serving
from tests.e2e.remembered import StoreProcess, ask, figures, prompt_of, serving_store
from tests.e2e.tiny_models import tiny_model

PROMPT_TOKENS = 150
KNOWN = PROMPT_TOKENS - 1


def test_daemons_share_what_either_learnt_and_outlive_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The digests of the weights are noted there.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    socket = tmp_path / "store.sock"
    flags = ["--model", tiny_model("columns"), "--blas", "off", "--store-socket", str(socket), "--metrics-port", "0"]
    with (
        serving_store(tmp_path / "store", socket) as store,
        serving(tmp_path / "a", *flags) as one,
        serving(tmp_path / "b", *flags) as other,
    ):
        trio.run(learn_from_each_other, one, other)
        store.kill()
        trio.run(serve_on, one, other, store)
        for daemon in (one, other):
            assert daemon.log.count("the store is away, requests are served without it") == 1
            assert daemon.log.count("the store is back") == 1
            assert daemon.terminate() == 0
        checked = one.run("store", "verify", "--store", str(store.folder))
        assert checked.returncode == 0, checked.stdout


async def learn_from_each_other(one: Daemon, other: Daemon) -> None:
    async with Client(one.socket) as first, Client(other.socket) as second:
        for seed, (learns, is_told) in enumerate([(first, second), (second, first)]):
            prompt = prompt_of(PROMPT_TOKENS, seed)
            told = await ask(learns, prompt)
            assert told.tiers == (0, 0)
            assert await learns.flush()
            again = await ask(is_told, prompt)
            assert again.tiers == (0, KNOWN)
            again.assert_same(told)


async def serve_on(one: Daemon, other: Daemon, store: StoreProcess) -> None:
    """Without the store each knows what it has in memory, and computes the rest; what it learns meanwhile is written
    when the store is back."""
    async with Client(one.socket) as first, Client(other.socket) as second:
        learnt = prompt_of(PROMPT_TOKENS, seed=0)
        assert (await ask(first, learnt)).tiers == (KNOWN, 0)
        meanwhile = prompt_of(PROMPT_TOKENS, seed=2)
        told = await ask(first, meanwhile)
        assert told.tiers == (0, 0)
        (await ask(second, meanwhile, cache="read")).assert_same(told)
        assert not await first.flush()
        assert (await reports(first, lambda report: report["store"]["away"]))["store"]["away"]
        assert (await figures(first))["laned_store_away"] == 1
        await trio.to_thread.run_sync(store.start)
        for client in (first, second):
            await reports(client, lambda report: not report["store"]["away"])
        assert await first.flush()
        again = await ask(second, meanwhile)
        assert again.tiers == (0, KNOWN)
        again.assert_same(told)
