"""Options of requests through the socket, with the real model."""

from __future__ import annotations

import math
from typing import Any

from scheduler.client import Client
from scheduler.protocol import Delta, TokenLogprob
from tests.e2e.daemon import Daemon
from tests.lanes.demo_model import demo_tokenizer
from tests.scheduler.trio_test import trio_test

PROMPT = "One, two, three, four,"


async def deltas_of(client: Client, prompt: str | None = PROMPT, **options: Any) -> list[Delta]:
    async with client.submit(prompt, **options) as answer:
        return [delta async for delta in answer]


@trio_test
async def test_log_probabilities_come_with_their_tokens(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        deltas = await deltas_of(client, max_tokens=6, temperature=0.0, logprobs=True, top_logprobs=3)
        done = await client.ask(PROMPT, max_tokens=6, temperature=0.0, logprobs=True, top_logprobs=3)
    told: list[TokenLogprob] = [logprob for delta in deltas for logprob in delta.logprobs]
    assert [logprob.token_id for logprob in told] == [token for delta in deltas for token in delta.token_ids]
    assert len(told) == 6
    assert "".join(logprob.token for logprob in told) == done.text
    for logprob, again in zip(told, done.logprobs, strict=True):
        # The likeliest token was taken, so it leads the likeliest.
        assert logprob.top_logprobs[0].token_id == logprob.token_id
        values = [top.logprob for top in logprob.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert sum(math.exp(value) for value in values) <= 1.0001
        assert math.isclose(logprob.logprob, again.logprob, abs_tol=1e-3)


@trio_test
async def test_several_answers_to_one_prompt(daemon: Daemon) -> None:
    """The first is what the request alone would get; the others are drawn by seeds of their own, and again alike."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 11}
    async with Client(daemon.socket) as client:
        before = (await client.status())["totals"]["prompt_tokens"]
        answers = await client.ask_all(PROMPT, n=4, **options)
        again = await client.ask_all(PROMPT, n=4, **options)
        alone = await client.ask(PROMPT, **options)
        streamed = await deltas_of(client, n=4, **options)
        after = (await client.status())["totals"]["prompt_tokens"]
    assert [done.index for done in answers] == [0, 1, 2, 3]
    texts = [done.text for done in answers]
    assert len(set(texts)) == 4
    assert [done.text for done in again] == texts
    assert alone.text == texts[0]
    for index in range(4):
        assert "".join(delta.text for delta in streamed if delta.index == index) == texts[index]
    prompt_tokens = len(demo_tokenizer().encode(PROMPT))
    assert after - before == 13 * prompt_tokens


@trio_test
async def test_a_bias_a_penalty_and_the_least_of_tokens(daemon: Daemon) -> None:
    tokenizer = demo_tokenizer()
    (wanted,) = tokenizer.encode(" blue")
    end = min(tokenizer.eos_token_ids)
    async with Client(daemon.socket) as client:
        biased = await deltas_of(client, max_tokens=3, temperature=0.0, logit_bias={wanted: 100})
        assert [token for delta in biased for token in delta.token_ids] == [wanted] * 3
        # 100 is more than any logit is ahead of another.
        penalized = await deltas_of(client, max_tokens=40, temperature=0.0, frequency_penalty=100.0)
        tokens = [token for delta in penalized for token in delta.token_ids]
        assert all(
            tokens.index(token) == place or place - tokens.index(token) >= 20 for place, token in enumerate(tokens)
        )
        ends_at_once = await client.ask(PROMPT, max_tokens=9, logit_bias={end: 100}, min_tokens=4)
        assert ends_at_once.usage.completion_tokens == 5
        assert ends_at_once.stop_reason == end


@trio_test
async def test_the_prompt_is_echoed(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        plain = await client.ask(PROMPT, max_tokens=4, temperature=0.0)
        echoed = await client.ask(PROMPT, max_tokens=4, temperature=0.0, echo=True)
        streamed = await deltas_of(client, max_tokens=4, temperature=0.0, echo=True)
    assert echoed.text == PROMPT + (plain.text or "")
    assert "".join(delta.text for delta in streamed) == echoed.text
    assert sum(len(delta.token_ids) for delta in streamed) == 4
