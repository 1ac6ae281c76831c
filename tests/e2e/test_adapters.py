"""Adapters through the socket and the commands, with the real model: named at the start, loaded and unloaded later."""

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from scheduler.client import Client, RequestError
from tests.e2e.daemon import Daemon, run, serving
from tests.scheduler.trio_test import trio_test

PROMPT = "Once upon a time there was a fox who lived at the edge of a wood. " * 8
RANK, HIDDEN, LAYERS = 4, 576, 30


def write_adapter(folder: Path, seed: int) -> Path:
    """For the queries of all layers of SmolLM2-135M."""
    folder.mkdir()
    keys = iter(mx.random.split(mx.random.key(seed), 2 * LAYERS))
    tensors = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_a"] = mx.random.normal((HIDDEN, RANK), key=next(keys))
        tensors[f"{name}.lora_b"] = mx.random.normal((RANK, HIDDEN), key=next(keys))
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": LAYERS, "lora_parameters": {"rank": RANK, "scale": 0.05}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate(("fox", "owl"))}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("daemon"), "--adapter", f"fox={folders['fox']}") as running:
        yield running
        assert running.terminate() == 0, running.log
        assert "Traceback" not in running.log, running.log


@trio_test
async def test_what_is_remembered_is_of_one_adapter(daemon: Daemon, folders: dict[str, Path]) -> None:
    """And of its content: the same name with other weights finds nothing, those that it had before are found again."""
    async with Client(daemon.socket) as client:

        async def ask(adapter: str | None) -> tuple[str | None, bool]:
            done = await client.ask(PROMPT, adapter=adapter, max_tokens=12, temperature=0.0)
            return done.text, done.usage.cached_tokens > 0

        bare, was_cached = await ask(None)
        assert not was_cached
        fox, was_cached = await ask("fox")
        assert not was_cached
        assert fox != bare
        assert await ask("fox") == (fox, True)
        assert await ask("none") == (bare, True)
        await client.load_adapter("fox", folders["owl"])
        owl, was_cached = await ask("fox")
        assert not was_cached
        assert owl not in (fox, bare)
        assert await client.load_adapter("other", folders["fox"]) == ("fox", "other")
        assert await ask("other") == (fox, True)
        await client.load_adapter("fox", folders["fox"])
        assert await client.unload_adapter("other") == ("fox",)


@trio_test
async def test_rows_with_and_without_side_by_side(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        alone = {
            name: (await client.ask("A fox", adapter=name, max_tokens=24, temperature=0.0)).text
            for name in ("fox", "none")
        }
        async with (
            client.submit("A fox", adapter="fox", max_tokens=24, temperature=0.0) as one,
            client.submit("A fox", adapter="none", max_tokens=24, temperature=0.0) as other,
        ):
            beside = {
                "fox": "".join([delta.text async for delta in one]),
                "none": "".join([delta.text async for delta in other]),
            }
    assert beside == alone


@trio_test
async def test_refusals(daemon: Daemon, tmp_path: Path) -> None:
    async with Client(daemon.socket) as client:
        with pytest.raises(RequestError, match="there is no adapter wolf: there are fox") as caught:
            await client.ask("x", adapter="wolf")
        assert caught.value.code == "unknown_adapter"
        with pytest.raises(RequestError, match="cannot be read: No such file") as caught:
            await client.load_adapter("wolf", tmp_path)
        assert caught.value.code == "bad_adapter"


def test_the_commands(daemon: Daemon) -> None:
    told = daemon.run("ask", "--raw", "A fox", "--adapter", "fox", "--max-tokens", "8", "--temperature", "0")
    bare = daemon.run("ask", "--raw", "A fox", "--max-tokens", "8", "--temperature", "0")
    assert (told.returncode, bare.returncode) == (0, 0)
    assert told.stdout != bare.stdout
    assert "fox rank 4" in daemon.run("status").stdout


def test_a_wrong_folder_ends_the_start(tmp_path: Path) -> None:
    ended = run("laned", "serve", "--model", "demo", "--adapter", f"x={tmp_path}", runtime=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"laned: --adapter: the adapter in {tmp_path} cannot be used: ")
