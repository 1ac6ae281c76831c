"""`--restore map`: a daemon that maps what another left answers as without anything remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from scheduler.client import Client
from tests.e2e.daemon import Daemon, serving
from tests.e2e.remembered import ask, figures, files_in, prompt_of, store_flags
from tests.e2e.test_store import MODELS, WITHIN

PROMPT_TOKENS = 150
RESTORED = 'laned_store_restored_bytes_total{tier="disk"}'
SAVED = "laned_store_saved_seconds_total"


@pytest.mark.parametrize(
    "model", ["columns", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rings", "quantized"))]
)
def test_a_daemon_maps_what_another_left(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    flags = [*MODELS[model](), *store_flags(folder), "--metrics-port", "0"]
    with serving(tmp_path, *flags) as first:
        trio.run(remembers, first)
        assert first.terminate() == 0
    before = contents(folder)
    with serving(tmp_path, *flags, "--restore", "map", "--store-verify") as second:
        trio.run(answers_the_same, second, WITHIN.get(model, 0.0))
        assert second.terminate() == 0
        assert " warning " not in second.log
    assert before.items() <= contents(folder).items(), "a file is not what it was"


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_in(folder) if name.endswith(".segment")}


async def remembers(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        await ask(client, prompt_of(PROMPT_TOKENS, seed=1))
        assert await client.flush()


async def answers_the_same(daemon: Daemon, within: float) -> None:
    prompt = prompt_of(PROMPT_TOKENS, seed=1)
    async with Client(daemon.socket) as client:
        for known in (prompt, [*prompt[:-1], *prompt_of(30, seed=2)]):
            cold = await ask(client, known, cache="none")
            before = await figures(client)
            told = await ask(client, known, cache="read")
            told.assert_same(cold, within)
            assert told.tiers == (0, PROMPT_TOKENS - 1)
            now = await figures(client)
            assert now[RESTORED] == before[RESTORED] == 0, "it was read"
            assert now[SAVED] > before[SAVED]
