"""Clients of a daemon and of mlx_lm.server, all asking at the same moment, and what they heard."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from scheduler.client import Client
from tests.bench.harness import Report

REPORT_EVERY_S = 0.5
# A round that takes so long has gone wrong.
LIMIT_S = 600.0


@dataclass(slots=True)
class Heard:
    """What a client heard: when text came, in seconds from when all asked, and how many tokens in all."""

    began_s: float
    text_s: list[float] = field(default_factory=list)
    tokens: int = 0

    def text(self) -> None:
        self.text_s.append(time.perf_counter() - self.began_s)


# Of a prompt, with so many tokens to answer.
Asking = Callable[[str, int, Heard], Awaitable[None]]


def of_daemon(path: Path) -> Asking:
    async def ask(prompt: str, max_tokens: int, heard: Heard) -> None:
        async with Client(path) as client, client.submit(prompt, max_tokens=max_tokens, ignore_eos=True) as answer:
            async for delta in answer:
                if delta.text:
                    heard.text()
                heard.tokens += len(delta.token_ids)

    return ask


def of_http(port: int, **more: bool) -> Asking:
    """more: fields of the body that not every server knows."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, **more}

    async def ask(prompt: str, max_tokens: int, heard: Heard) -> None:
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **options}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(head.encode() + body)
            rest = b""
            async for data in stream:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        if any(choice.get("text") for choice in event.get("choices", ())):
                            heard.text()
                        heard.tokens = (event.get("usage") or {}).get("completion_tokens", heard.tokens)

    return ask


@dataclass(frozen=True, slots=True)
class Round:
    """What all clients heard."""

    heard: list[Heard]

    @property
    def tokens_per_s(self) -> float:
        """Of all clients together, from their asking to the last word."""
        return sum(each.tokens for each in self.heard) / max(each.text_s[-1] for each in self.heard)

    @property
    def ttft_s(self) -> float:
        """Until the first text: the median of the clients."""
        return statistics.median(each.text_s[0] for each in self.heard)

    @property
    def decode_tokens_per_s(self) -> float:
        """While all rows decode: from the last one's first word to the first one's end, by the row that ends first."""
        from_s = max(each.text_s[0] for each in self.heard)
        first = min(self.heard, key=lambda each: each.text_s[-1])
        within = [when for when in first.text_s if when >= from_s]
        # Each word is a step of all rows, but for the few tokens that are half a character.
        steps = (len(within) - 1) * first.tokens / len(first.text_s)
        return len(self.heard) * steps / (within[-1] - within[0])


def ask_all(ask: Asking, prompts: Sequence[str], max_tokens: int, report: Report) -> Round:
    """Every client asks for one prompt. Raises what goes wrong for one of them, or trio.TooSlowError."""
    return trio.run(_ask_all, ask, prompts, max_tokens, report)


async def _ask_all(ask: Asking, prompts: Sequence[str], max_tokens: int, report: Report) -> Round:
    began_s = time.perf_counter()
    heard = [Heard(began_s) for _ in prompts]
    async with trio.open_nursery() as watching:
        watching.start_soon(_watch, heard, len(prompts) * max_tokens, report)
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as clients:
                for prompt, each in zip(prompts, heard, strict=True):
                    clients.start_soon(ask, prompt, max_tokens, each)
        watching.cancel_scope.cancel()
    for each in heard:
        assert each.tokens == max_tokens, f"an answer of {each.tokens} tokens, not {max_tokens}"
    return Round(heard)


async def _watch(heard: Sequence[Heard], goal: int, report: Report) -> None:
    while True:
        await trio.sleep(REPORT_EVERY_S)
        report(sum(len(each.text_s) for each in heard) / goal)
