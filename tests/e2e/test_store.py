"""What is remembered, with real processes: the next turn from memory, and from disk after the daemon's end, however
that came. Every answer is the one that is given without."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from scheduler.client import Client, RequestError
from store.names import digests_path
from tests.e2e.daemon import Daemon, serving
from tests.e2e.remembered import ANSWER_TOKENS, Heard, ask, files_in, prompt_of, store_flags
from tests.e2e.tiny_models import tiny_model
from tests.lanes.gemma_model import gemma_file

FIRST_TOKENS = 150
NEXT_TOKENS = 20

MODELS: dict[str, Callable[[], list[str]]] = {
    "columns": lambda: ["--model", tiny_model("columns")],
    "rings": lambda: ["--model", tiny_model("rings")],
    "hybrid": lambda: ["--model", "hybrid"],
    "quantized": lambda: ["--model", tiny_model("columns"), "--kv-bits", "8", "--kv-group-size", "32"],
    "demo": lambda: ["--model", "demo", "--blas", "auto"],
    "gemma": lambda: ["--model", str(gemma_file()), "--blas", "auto"],
}
# With OpenBLAS the last bits depend on shapes, and a ring's columns have another order.
WITHIN = {"rings": 1e-4, "demo": 1e-2, "gemma": 1e-2}


class Conversation:
    """Prompts and their answers without anything remembered, for daemons of one model that follow each other."""

    def __init__(self, model: str) -> None:
        self.within = WITHIN.get(model, 0.0)
        self.cold: list[tuple[list[int], Heard]] = []

    async def begin(self, client: Client) -> None:
        """Two turns, each also asked cold; the second takes up all of the first and its answer."""
        first = prompt_of(FIRST_TOKENS, seed=1)
        cold = await self.ask_cold(client, first)
        told = await ask(client, first)
        assert told.tiers == (0, 0), "what may not be remembered was"
        told.assert_same(cold, self.within)
        second = [*first, *told.tokens, *prompt_of(NEXT_TOKENS, seed=2)]
        cold = await self.ask_cold(client, second)
        told = await ask(client, second)
        assert told.tiers[0] >= len(first), "not all of the first turn's prompt was remembered"
        assert told.tiers[1] == 0
        told.assert_same(cold, self.within)

    async def ask_cold(self, client: Client, prompt: list[int]) -> Heard:
        heard = await ask(client, prompt, cache="none")
        assert heard.tiers == (0, 0)
        self.cold.append((prompt, heard))
        return heard

    async def ask_again(self, client: Client) -> list[tuple[int, int]]:
        """All of it, which is answered as before; returns what was remembered of each."""
        found = []
        for prompt, cold in self.cold:
            told = await ask(client, prompt, cache="read")
            told.assert_same(cold, self.within)
            found.append(told.tiers)
        return found


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[] if name in ("hybrid", "rings") else [pytest.mark.slow]) for name in MODELS],
)
def test_a_conversation_outlives_its_daemons(model: str, tmp_path: Path) -> None:
    """One is killed right after a flush; the next is told to end while it answers; the third knows all of it."""
    flags = [*store_flags(tmp_path / "store"), *MODELS[model]()]
    conversation = Conversation(model)
    with serving(tmp_path, *flags) as first:
        trio.run(is_remembered_in_memory, first, conversation)
    with serving(tmp_path, *flags, "--drain-timeout", "0.1") as second:
        trio.run(is_remembered_on_disk, second, conversation)
        interrupted = trio.run(ends_in_the_middle, second, conversation)
        assert second.process.wait(60) == 0, second.log
    with serving(tmp_path, *flags) as third:
        trio.run(knows_what_was_interrupted, third, conversation, interrupted)
        assert third.terminate() == 0
        checked = third.run("store", "verify", "--store", str(tmp_path / "store"))
        assert checked.returncode == 0, checked.stdout
    for daemon in (first, third):
        assert " warning " not in daemon.log
        assert " error " not in daemon.log


async def is_remembered_in_memory(daemon: Daemon, conversation: Conversation) -> None:
    async with Client(daemon.socket) as client:
        await conversation.begin(client)
        await each_cache_mode_does_as_it_says(client, conversation)
        await a_salt_is_its_own(client, conversation)
        assert await client.flush()
        daemon.kill()


async def each_cache_mode_does_as_it_says(client: Client, conversation: Conversation) -> None:
    prompt = prompt_of(FIRST_TOKENS, seed=3)
    told = [await ask(client, prompt, cache=cache) for cache in ("none", "read", "write", "write", "none", "read")]
    assert [heard.tiers for heard in told[:-1]] == [(0, 0)] * 5
    assert told[-1].tiers == (FIRST_TOKENS - 1, 0)
    for heard in told:
        heard.assert_same(told[0], conversation.within)


async def a_salt_is_its_own(client: Client, conversation: Conversation) -> None:
    prompt, cold = conversation.cold[0]
    told = [await ask(client, prompt, cache_salt=salt) for salt in ("mine", "mine", "yours")]
    assert [heard.tiers[0] for heard in told] == [0, len(prompt) - 1, 0]
    for heard in told:
        heard.assert_same(cold, conversation.within)


async def is_remembered_on_disk(daemon: Daemon, conversation: Conversation) -> None:
    async with Client(daemon.socket) as client:
        found = await conversation.ask_again(client)
        assert found == [(0, len(prompt) - 1) for prompt, _ in conversation.cold]
        (prompt, cold), *_ = conversation.cold
        salted = await ask(client, prompt, cache_salt="mine", cache="read")
        assert salted.tiers == (0, len(prompt) - 1)
        salted.assert_same(cold, conversation.within)
        assert (await ask(client, prompt, cache_salt="theirs", cache="read")).tiers == (0, 0)


async def ends_in_the_middle(daemon: Daemon, conversation: Conversation) -> list[int]:
    """SIGTERM a moment after one answer and in the middle of another. Returns the other's prompt."""
    async with Client(daemon.socket) as client:
        just_before = prompt_of(FIRST_TOKENS, seed=5)
        await conversation.ask_cold(client, just_before)
        interrupted = prompt_of(FIRST_TOKENS, seed=6)
        async with client.submit(prompt_token_ids=interrupted, max_tokens=1500, ignore_eos=True) as answer:
            await anext(answer)
            await ask(client, just_before)
            daemon.process.send_signal(signal.SIGTERM)
            with pytest.raises(RequestError, match="shutting_down"):
                async for _ in answer:
                    pass
        return interrupted


async def knows_what_was_interrupted(daemon: Daemon, conversation: Conversation, interrupted: list[int]) -> None:
    async with Client(daemon.socket) as client:
        assert await conversation.ask_again(client) == [(0, len(prompt) - 1) for prompt, _ in conversation.cold]
        cold = await ask(client, interrupted, cache="none")
        told = await ask(client, interrupted)
        assert told.tiers == (0, len(interrupted) - 1)
        told.assert_same(cold, conversation.within)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo", "gemma"])
def test_the_real_models_go_on_to_the_last_bit(model: str, tmp_path: Path) -> None:
    """From memory, and from disk after a kill, with MLX's own BLAS, which adds up in one order whatever the shapes."""
    flags = [*MODELS[model](), *store_flags(tmp_path / "store")]
    with serving(tmp_path, *flags) as first:
        trio.run(goes_on, first, 0)
        first.kill()
    with serving(tmp_path, *flags) as second:
        trio.run(goes_on, second, 1)


async def goes_on(daemon: Daemon, tier: int) -> None:
    """tier: where what was said is remembered once both turns are: 0 in memory, 1 on disk."""
    async with Client(daemon.socket) as client:
        first = prompt_of(24, seed=1)
        told = await ask(client, first)
        second = [*first, *told.tokens, *prompt_of(4, seed=2)]
        for prompt in (first, second):
            cold = await ask(client, prompt, cache="none")
            warm = [await ask(client, prompt) for _ in range(2)]
            assert warm[0].tiers[tier] >= len(first) - 1
            for heard in warm:
                heard.assert_same(cold)
        assert await client.flush()


@pytest.mark.parametrize("model", ["columns", "rings"])
def test_branches_of_a_conversation_share_its_trunk_on_disk(model: str, tmp_path: Path) -> None:
    flags = [*store_flags(tmp_path / "store"), *MODELS[model](), "--prompt-cache-bytes", "0"]
    with serving(tmp_path, *flags) as daemon:
        trio.run(branch, daemon, WITHIN.get(model, 0.0))


async def branch(daemon: Daemon, within: float) -> None:
    trunk = prompt_of(4 * FIRST_TOKENS, seed=4)

    async with Client(daemon.socket) as client:

        async def written_bytes() -> int:
            assert await client.flush()
            store = (await client.status())["store"]
            return int(store["written_bytes"])

        await ask(client, trunk)
        trunk_bytes = await written_bytes()
        for seed in range(5, 9):
            prompt = [*trunk, *prompt_of(NEXT_TOKENS, seed)]
            told = await ask(client, prompt)
            assert told.tiers[0] == 0
            assert told.tiers[1] >= len(trunk) - 1
            told.assert_same(await ask(client, prompt, cache="none"), within)
        assert trunk_bytes < await written_bytes() < 2 * trunk_bytes, "all branches together take less than the trunk"


def test_a_folder_has_one_daemon_and_any_number_of_readers(tmp_path: Path) -> None:
    """A second daemon is told so before it loads anything; one that only reads is welcome, and changes nothing. Both
    tell the person who asks what was remembered."""
    (tmp_path / "other").mkdir()
    text = "The same words are said to both of them, and only the first one has to read them."
    flags = ["--model", tiny_model("columns"), *store_flags(tmp_path / "store")]
    with serving(tmp_path, *flags) as writer:
        refused = writer.run("serve", "--socket", str(tmp_path / "s"), *flags)
        assert (refused.returncode, refused.stdout) == (2, "")
        (said,) = (line for line in refused.stderr.splitlines() if line.startswith("laned: "))
        assert f"another laned keeps {tmp_path / 'store'}" in said
        assert "--store-read-only" in said
        first, again = (json.loads(writer.run("ask", "--json", "--raw", text).stdout) for _ in range(2))
        known = first["usage"]["prompt_tokens"] - 1
        assert first["usage"]["cached_tokens"] == 0
        assert cached(again) == (known, known, 0)
        assert f"{known + 1} prompt ({known} cached)" in writer.log
        assert trio.run(flush, writer)
        digests_path(tmp_path / "store").unlink(missing_ok=True)
        before = files_in(tmp_path / "store")
        with serving(tmp_path / "other", *flags, "--store-read-only") as reader:
            read = json.loads(reader.run("ask", "--json", "--raw", text).stdout)
            assert cached(read) == (known, 0, known)
            assert read["text"] == first["text"]
            json.loads(reader.run("ask", "--json", "--raw", "Words that nobody wrote down.").stdout)
            assert not trio.run(flush, reader), "nothing goes to disk"
            assert json.loads(reader.run("status", "--json").stdout)["store"]["dropped"] == 0
            assert reader.terminate() == 0
        assert files_in(tmp_path / "store") == before


def cached(record: dict[str, dict[str, int]]) -> tuple[int, int, int]:
    usage = record["usage"]
    return usage["cached_tokens"], usage["cached_memory_tokens"], usage["cached_disk_tokens"]


async def flush(daemon: Daemon) -> bool:
    async with Client(daemon.socket) as client:
        return await client.flush()


def test_a_chat_with_the_real_model_goes_on_where_it_was(daemon: Daemon) -> None:
    trio.run(has_two_turns, daemon)


async def has_two_turns(daemon: Daemon) -> None:
    turns = [
        {"role": "system", "content": "You are the keeper of a lighthouse, and you answer in a few words."},
        {"role": "user", "content": "Which ships have passed tonight?"},
    ]
    async with Client(daemon.socket) as client:
        first = await client.ask(messages=turns, max_tokens=ANSWER_TOKENS)
        turns += [{"role": "assistant", "content": first.text or ""}, {"role": "user", "content": "And how many?"}]
        cold = await client.ask(messages=turns, max_tokens=ANSWER_TOKENS, cache="none")
        second = await client.ask(messages=turns, max_tokens=ANSWER_TOKENS)
        assert second.usage.cached_memory_tokens >= first.usage.prompt_tokens
        assert second.text == cold.text
