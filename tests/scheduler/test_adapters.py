"""Adapters by name: who is answered with which, what a name stands for when, and whose remembered prompts are whose."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.lane import Sampling
from scheduler.adapters import MOST_ADAPTERS, namespace_of
from scheduler.chunks import ChunkPlan
from scheduler.client import Client, RequestError
from scheduler.errors import Refused
from scheduler.protocol import LoadAdapter, UnloadAdapter
from scheduler.rates import ChunkSize
from scheduler.request import Request, Wish
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import ByteStream
from tests.scheduler.echo import serving
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon, in_trio
from tests.scheduler.trio_test import trio_test, until

# Requests that run until they are cancelled.
ENDLESS = {"max_tokens": 1 << 30}


def folder_of(root: Path, content: bytes, scale: float = 2.0) -> str:
    """A folder that can be read; whether its tensors fit is the engine's affair, which refuses empty ones."""
    root.mkdir(exist_ok=True)
    (root / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"rank": 4, "scale": scale}}))
    (root / "adapters.safetensors").write_bytes(content)
    return str(root)


async def load(daemon: EchoDaemon, name: str, folder: str) -> tuple[str, ...]:
    return (await daemon.service.change_adapters(LoadAdapter(1, name, folder))).names


async def unload(daemon: EchoDaemon, name: str) -> tuple[str, ...]:
    return (await daemon.service.change_adapters(UnloadAdapter(1, name))).names


def adapter_of_row(daemon: EchoDaemon, row_id: int | None) -> str | None:
    assert row_id is not None
    return daemon.engine.specs[row_id].adapter


@in_trio
async def test_each_request_has_the_adapter_that_it_names(tmp_path: Path) -> None:
    async with echo_daemon() as daemon:
        assert await load(daemon, "b", folder_of(tmp_path / "b", b"bb")) == ("b",)
        assert await load(daemon, "a", folder_of(tmp_path / "a", b"a")) == ("a", "b")
        rows = [(await daemon.ask("x", adapter=name, max_tokens=1)).row_id for name in ("a", "b", None, "none", "a")]
        a, b, *bare, again = [adapter_of_row(daemon, row_id) for row_id in rows]
        assert a == again
        assert len({a, b, None}) == 3
        assert bare == [None, None]
        assert {a, b} == daemon.engine.adapters
        report = daemon.service.status().report["adapters"]
        assert list(report) == ["a", "b"]
        digest = report["b"].pop("digest")
        assert digest == b
        assert report["b"] == {"folder": str(tmp_path / "b"), "rank": 4, "layers": 1, "bytes": 2, "requests": 0}


@in_trio
async def test_the_one_named_default_is_for_those_that_name_none(tmp_path: Path) -> None:
    async with echo_daemon() as daemon:
        await load(daemon, "default", folder_of(tmp_path, b"a"))
        named, unnamed, bare = [
            adapter_of_row(daemon, (await daemon.ask("x", adapter=name, max_tokens=1)).row_id)
            for name in ("default", None, "none")
        ]
        assert named == unnamed
        assert unnamed is not None
        assert bare is None


@in_trio
async def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    async with echo_daemon() as daemon:
        with pytest.raises(Refused, match="there is no adapter poet: none is loaded") as caught:
            await daemon.submit(prompt="x", adapter="poet")
        assert caught.value.code == "unknown_adapter"
        await load(daemon, "a", folder_of(tmp_path / "a", b"a"))
        with pytest.raises(Refused, match="there is no adapter poet: there are a"):
            await unload(daemon, "poet")
        refusals = {
            "nowhere": "cannot be read: No such file",
            folder_of(tmp_path / "empty", b""): "cannot be used: it has no tensors",
        }
        for folder, reason in refusals.items():
            with pytest.raises(Refused, match=reason) as caught:
                await load(daemon, "a", folder)
            assert caught.value.code == "bad_adapter"
        with pytest.raises(Refused, match="choose another name"):
            await load(daemon, "none", str(tmp_path / "a"))
        assert adapter_of_row(daemon, (await daemon.ask("x", adapter="a", max_tokens=1)).row_id), "a is what it was"


@in_trio
async def test_there_is_a_limit(tmp_path: Path) -> None:
    async with echo_daemon() as daemon:
        folder = folder_of(tmp_path, b"a")
        for number in range(MOST_ADAPTERS):
            await load(daemon, str(number), folder)
        assert len(daemon.engine.adapters) == 1, "equal content is loaded once"
        with pytest.raises(Refused, match="which is the limit"):
            await load(daemon, "more", folder)
        await load(daemon, "7", folder_of(tmp_path / "other", b"b"))


@in_trio
async def test_who_is_under_way_ends_with_what_it_began_with(tmp_path: Path) -> None:
    """Two of the engine's rows, one request that waits, and then a name that gets other weights."""
    async with echo_daemon(max_rows=2) as daemon:
        daemon.loop.scheduler.max_rows = 2
        await load(daemon, "a", folder_of(tmp_path, b"old"))
        (old,) = daemon.engine.adapters
        running = [await daemon.submit(prompt="x", adapter="a", **ENDLESS) for _ in range(3)]
        await until(lambda: len(daemon.engine.rows) == 2)
        await load(daemon, "a", folder_of(tmp_path, b"new"))
        (new,) = daemon.engine.adapters - {old}
        daemon.cancel(running[0])
        await until(lambda: running[2].row_id in daemon.engine.rows)
        assert adapter_of_row(daemon, running[2].row_id) == old
        daemon.cancel(running[1])
        last = await daemon.ask("x", adapter="a", max_tokens=1)
        assert adapter_of_row(daemon, last.row_id) == new
        assert daemon.engine.adapters == {old, new}
        daemon.cancel(running[2])
        await until(lambda: daemon.engine.adapters == {new})


@in_trio
async def test_an_unloaded_one_goes_with_the_last_that_needs_it(tmp_path: Path) -> None:
    async with echo_daemon() as daemon:
        folder = folder_of(tmp_path, b"a")
        await load(daemon, "a", folder)
        await load(daemon, "b", folder)
        running = [await daemon.submit(prompt="x", adapter=name, **ENDLESS) for name in ("a", "b")]
        await until(lambda: len(daemon.engine.rows) == 2)
        assert await unload(daemon, "a") == ("b",)
        assert await unload(daemon, "b") == ()
        with pytest.raises(Refused, match="no adapter a"):
            await daemon.submit(prompt="x", adapter="a")
        daemon.cancel(running[0])
        await until(lambda: len(daemon.engine.rows) == 1)
        assert len(daemon.engine.adapters) == 1
        await load(daemon, "c", folder)
        daemon.cancel(running[1])
        await daemon.ask("x", adapter="c", max_tokens=1)
        assert len(daemon.engine.adapters) == 1, "there is a name for it again"
        await unload(daemon, "c")
        await until(lambda: not daemon.engine.adapters)


@in_trio
async def test_a_refused_request_needs_no_adapter(tmp_path: Path) -> None:
    async with echo_daemon(max_queue=0) as daemon:
        await load(daemon, "a", folder_of(tmp_path, b"a"))
        running = [await daemon.submit(prompt="x", **ENDLESS) for _ in range(4)]
        with pytest.raises(Refused):
            await daemon.submit(prompt="x", adapter="a")
        await unload(daemon, "a")
        await until(lambda: not daemon.engine.adapters)
        for client in running:
            daemon.cancel(client)


salts = st.none() | st.text(min_size=1) | st.sampled_from(["salt a", "adapter aa ", "adapter aa salt a"])
digests = st.none() | st.sampled_from(["aa", "ab"])


@given(st.tuples(salts, digests), st.tuples(salts, digests))
def test_no_two_pairs_share_a_namespace(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    assert (namespace_of(*one) == namespace_of(*other)) == (one == other)


def test_short_prompts_share_a_pass_where_they_have_the_same_adapter() -> None:
    plan = ChunkPlan(ChunkSize(64, 0.05), shared_prompt_tokens=10)
    prompts = []
    for row_id, adapter in enumerate(["a", "b", "a", None, "a"], 1):
        wish = Wish(row_id, (1,) * (4 + row_id), 4, Sampling(), adapter=adapter)
        prompts.append(Request(row_id, wish, Transcript(TextStream(ByteStream())), lambda said: None, 0.0))
    passes = []
    while prompts:
        chunk, sharing = plan.next(prompts, 0)
        assert chunk is not None
        passes.append({chunk.row_id, *sharing})
        prompts = [request for request in prompts if request.row_id not in passes[-1]]
    assert sorted(map(sorted, passes)) == [[1, 3, 5], [2], [4]]


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Client]:
    async with serving(path / "laned.sock"), Client(path / "laned.sock") as client:
        yield client


@trio_test
async def test_over_the_wire(tmp_path: Path) -> None:
    async with connected(tmp_path) as client, client.submit(prompt="a hang") as answer:
        assert await client.load_adapter("a", "/a/good") == ("a",)
        with pytest.raises(RequestError, match="as asked") as caught:
            await client.load_adapter("b", "/a/bad")
        assert caught.value.code == "bad_adapter"
        with pytest.raises(RequestError, match="must be an absolute path"):
            await client.load_adapter("b", "a/good")
        assert await client.load_adapter("b", Path("/b/good")) == ("a", "b")
        assert await client.unload_adapter("a") == ("b",)
        assert not answer.ended
