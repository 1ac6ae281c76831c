"""What clients get: the same answer in any company, no part of a stop string, whole characters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from scheduler.client import Client
from scheduler.protocol import Done
from tests.e2e.daemon import Daemon, at_once, idle
from tests.lanes.demo_model import demo_tokenizer
from tests.scheduler.trio_test import trio_test

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}


@dataclass
class Told:
    """All that came for one request: its deltas as (text, token ids), and its end."""

    deltas: list[tuple[str, tuple[int, ...]]]
    done: Done

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for _, tokens in self.deltas for token in tokens]


async def ask(client: Client, prompt: str, max_tokens: int, **options: Any) -> Told:
    async with client.submit(prompt, max_tokens=max_tokens, **options) as answer:
        deltas = [(delta.text, delta.token_ids) async for delta in answer]
    return Told(deltas, answer.done)


async def ask_alone(daemon: Daemon, prompt: str, max_tokens: int, **options: Any) -> Told:
    """On a connection of its own."""
    async with Client(daemon.socket) as client:
        return await ask(client, prompt, max_tokens, **options)


@trio_test
async def test_a_request_is_answered_alike_alone_and_among_many_clients(daemon: Daemon) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("The capital of France is", GREEDY),
        ("One, two, three, four,", GREEDY),
        ("Once upon a time there was", DRAWN | {"seed": 7}),
        ("Once upon a time there was", DRAWN | {"seed": 8}),
        ("My favourite animal is the", DRAWN | {"seed": 7, "top_k": 40, "min_p": 0.02}),
    ]
    ours = [partial(ask_alone, daemon, prompt, 6, **options) for prompt, options in requests]
    strangers = [
        partial(ask_alone, daemon, f"Number {number} " + "and so on " * number, 12, temperature=1.0)
        for number in range(8)
    ]
    async with Client(daemon.socket) as client, trio.open_nursery() as nursery:
        alone = [await one() for one in ours]
        peak_rows = 0

        async def watch() -> None:
            nonlocal peak_rows
            while True:
                peak_rows = max(peak_rows, (await client.status())["rows"]["running"])
                await trio.sleep(0.02)

        nursery.start_soon(watch)
        together = await at_once(*strangers, *ours)
        nursery.cancel_scope.cancel()
    in_company = together[len(strangers) :]
    assert [told.token_ids for told in in_company] == [told.token_ids for told in alone]
    assert [told.text for told in in_company] == [told.text for told in alone]
    assert alone[2].token_ids != alone[3].token_ids
    for told in together:
        # The token that ended an answer counts, but is no part of it.
        ended_by_token = isinstance(told.done.stop_reason, int)
        assert told.done.usage.completion_tokens == len(told.token_ids) + ended_by_token
    assert peak_rows > 4


@trio_test
async def test_without_a_seed_two_requests_of_one_moment_differ(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        told = await at_once(*[partial(ask, client, "My favourite word is", 8, temperature=1.5) for _ in range(3)])
    assert len({tuple(one.token_ids) for one in told}) > 1


@trio_test
async def test_a_stop_string_across_tokens_never_leaks(daemon: Daemon) -> None:
    """Every stop here begins in one token and ends in a later one."""
    async with Client(daemon.socket) as client:
        whole = await ask(client, "The colours of the rainbow are", 11)
        ends = [len(demo_tokenizer().decode(whole.token_ids[: index + 1])) for index in range(len(whole.token_ids))]
        stops = [whole.text[end - 2 : end + 2] for end in ends[1:-1]] + [whole.text[ends[2] - 1 : ends[5] + 1]]
        stops = list(dict.fromkeys(stop for stop in stops if len(stop) > 2))
        assert len(stops) > 5
        stopped = await at_once(
            *[partial(ask, client, "The colours of the rainbow are", 11, stop=[stop, "never"]) for stop in stops]
        )
        unstreamed, by_token = await at_once(
            partial(client.ask, "The colours of the rainbow are", max_tokens=11, stop=stops[0]),
            partial(ask, client, "The colours of the rainbow are", 11, stop_token_ids=[whole.token_ids[3]]),
        )
    for stop, told in zip(stops, stopped, strict=True):
        assert told.text == whole.text[: whole.text.index(stop)]
        assert (told.done.finish_reason, told.done.stop_reason) == ("stop", stop)
    assert unstreamed.text == stopped[0].text
    kept = whole.token_ids.index(whole.token_ids[3])
    assert by_token.text == demo_tokenizer().decode(whole.token_ids[:kept])
    assert (by_token.done.finish_reason, by_token.done.stop_reason) == ("stop", whole.token_ids[3])


@trio_test
async def test_no_character_comes_in_halves(daemon: Daemon) -> None:
    prompts = ["🌍🌎🌏🌍🌎🌏🌍🌎🌏🌍🌎🌏", "日本語日本語日本語日本語日本語", "👩‍🚀👩‍🚀👩‍🚀👩‍🚀👩‍🚀👩‍🚀"]
    # At temperature 0 what repeats itself comes in runs of tokens, and halves seldom alone.
    options = {"ignore_eos": True, "temperature": 0.01, "seed": 1}
    async with Client(daemon.socket) as client:
        told = await at_once(*[partial(ask, client, prompt, 20, **options) for prompt in prompts])
    assert any(not text and tokens for one in told for text, tokens in one.deltas), "no token held half a character"
    for one in told:
        assert one.text.rstrip("\ufffd") == demo_tokenizer().decode(one.token_ids).rstrip("\ufffd")
        # The last token may leave a character unfinished; nothing before it may.
        assert "\ufffd" not in "".join(text for text, _ in one.deltas[:-1])
        assert any(ord(letter) > 0x7F for letter in one.text)


@trio_test
async def test_end_tokens_limits_and_usage(daemon: Daemon) -> None:
    chat = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
    async with Client(daemon.socket) as client:
        ended, cut, from_ids = await at_once(
            partial(client.ask, messages=chat, max_tokens=20),
            partial(client.ask, messages=chat, max_tokens=3),
            partial(client.ask, prompt_token_ids=[1, 2, 3], max_tokens=1),
        )
    assert ended.finish_reason == "stop"
    assert ended.stop_reason in demo_tokenizer().eos_token_ids
    assert "<|im_end|>" not in ended.text
    assert ended.text
    assert (cut.finish_reason, cut.usage.completion_tokens, cut.stop_reason) == ("length", 3, None)
    assert ended.text.startswith(cut.text)
    assert cut.usage.prompt_tokens == len(demo_tokenizer().encode_chat(chat))
    assert (from_ids.usage.prompt_tokens, from_ids.usage.completion_tokens) == (3, 1)
    assert 0 <= ended.timings.queued_s <= ended.timings.ttft_s <= ended.timings.total_s


@trio_test
async def test_cancel_ends_one_request_and_frees_its_slot(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        async with client.submit("Count to a thousand: 1, 2,", max_tokens=6, ignore_eos=True) as kept:
            async with client.submit("Once upon a time", max_tokens=2000, ignore_eos=True) as left:
                await anext(left)
            assert [delta async for delta in kept]
        assert kept.done.usage.completion_tokens == 6
        before = (await client.status())["totals"]["cancelled"]
        await idle(client)
    assert before >= 1
