"""The second act of `laned demo`: a conversation whose daemon is stopped and started again before its next turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.client import Client

MAX_TOKENS = 24
# Long enough that processing it takes seconds on a CPU, which the next turn does not take.
TEXT = """\
Read this and answer the question at its end.

A lighthouse on a small island had three keepers. The eldest, Marta, wrote down everything that she did: when the lamp
was lit, how much oil it took, which ships had passed and where the wind came from. The second, Olaf, remembered
everything and wrote nothing down. The third, a boy named Pim, did neither, and asked the others.

For years it made no difference. When a captain called up to ask whether the channel was free, Marta looked into her
book, Olaf looked into his memory, and Pim climbed the stairs, one hundred and ninety-eight of them, to look for
himself. The answers were the same. Marta's took a moment, Olaf's took none, and Pim's took a quarter of an hour, and he
was out of breath when he gave it.

One night in November the storm took the roof of the house. Nobody was hurt, but Olaf was struck on the head by a beam,
and when he woke he knew his name and nothing else. In the morning four ships lay before the channel and asked what had
happened in the night: which lights had been seen, which buoys had broken loose, how high the water had stood. Olaf
could not say. Pim climbed the stairs, but the night was over and could not be looked at any more. Marta went to the
chest under the window, where the book lay, dry and whole, and read it out to them, hour by hour. It took her as long as
it takes to read a page.

From that day on the keepers had a rule. Whatever one of them had found out was told to Olaf, so that it was at hand,
and written into Marta's book, so that it was still there when nobody remembered it. And whoever came up the stairs
asked the two of them first, and climbed only the steps that nobody had climbed before.

The question: who of the three could answer after the storm, and why?"""
NEXT_QUESTION = "And what was the rule that they made?"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: seconds to its first token, its prompt's tokens, and how many were remembered."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


async def first_turn(client: Client, sampling: Mapping[str, Any]) -> Turn:
    return await _turn(client, [{"role": "user", "content": TEXT}], sampling)


async def next_turn(client: Client, before: Turn, sampling: Mapping[str, Any]) -> Turn:
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": before.text},
        {"role": "user", "content": NEXT_QUESTION},
    ]
    return await _turn(client, messages, sampling)


async def _turn(client: Client, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> Turn:
    asked_s = time.monotonic()
    first_s = None
    text = ""
    async with client.submit(messages=messages, max_tokens=MAX_TOKENS, **sampling) as answer:
        async for delta in answer:
            first_s = first_s or time.monotonic()
            text += delta.text
        usage = answer.done.usage
    return Turn((first_s or time.monotonic()) - asked_s, usage.prompt_tokens, usage.cached_tokens, text)
