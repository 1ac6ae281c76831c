"""A daemon for minutes with everything mixed: requests of every kind arrive at random moments, at 80% of what it serves
of them, and clients of every kind send them: who read slowly, or not at all, cancel, or cut their connection in the
middle. The daemon's memory and latency in the last quarter are set beside those in the second; the first warms up.

    python -m tests.bench.soak --minutes 20
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from scheduler.answer import ConnectionLost, RequestError
from scheduler.client import Client
from tests.bench.harness import Bench, bench
from tests.bench.load import closed_loop, daemon, open_loop, percentile
from tests.bench.stories import Story
from tests.scheduler.raw import connected

CAPACITY_S = 60.0
PART_OF_CAPACITY = 0.8
PROMPT_TOKENS, LONG_TOKENS, ANSWER_TOKENS = (16, 128), (600, 1500), (8, 64)
SHARED = tuple(range(200, 500))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SLOW_S, DEAD_S = 0.3, 10.0
MEMORY = "resident memory beside what is remembered"

# What a request asks for beside its prompt and length, by name, and how many in a hundred are such.
Ask = Callable[[random.Random], dict[str, Any]]
KINDS: Mapping[str, tuple[int, Ask]] = {
    "greedy": (25, lambda source: {"ignore_eos": True}),
    "sampled": (15, lambda source: {"temperature": 0.8, "top_p": 0.9, "seed": source.randrange(1 << 32)}),
    "unlikely": (5, lambda source: {"temperature": 1.0, "xtc_probability": 0.5, "min_p": 0.05, "top_k": 50}),
    "penalized": (10, lambda source: {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.2}),
    "scored": (5, lambda source: {"logprobs": True, "top_logprobs": 5}),
    "structured": (10, lambda source: {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0}),
    "several": (5, lambda source: {"n": 3, "temperature": 1.0}),
    "urgent": (5, lambda source: {"priority": -1}),
    "limited": (5, lambda source: {"timeout_s": 4.0, "ignore_eos": True}),
    "private": (5, lambda source: {"cache_salt": str(source.randrange(4))}),
    "forgotten": (5, lambda source: {"cache": "none", "stop": ["\n"]}),
    "biased": (5, lambda source: {"logit_bias": {source.randrange(1000): -5.0}, "min_tokens": 4}),
}
# In a hundred clients.
MANNERS: Mapping[str, int] = {"patient": 70, "cancels": 8, "cuts": 8, "slow": 8, "dead": 6}
LONG_ONE_IN, SHARED_ONE_IN = 20, 4


def request(source: random.Random, adapters: list[str]) -> dict[str, Any]:
    """All that a client submits."""
    ((_, ask),) = source.choices(list(KINDS.values()), [weight for weight, _ in KINDS.values()])
    tokens = source.randint(*(LONG_TOKENS if source.randrange(LONG_ONE_IN) == 0 else PROMPT_TOKENS))
    prompt = tuple(source.randrange(100, 20_000) for _ in range(tokens))
    options = {"prompt_token_ids": prompt, "max_tokens": source.randint(*ANSWER_TOKENS), **ask(source)}
    if source.randrange(SHARED_ONE_IN) == 0:
        options["prompt_token_ids"] = SHARED + prompt
    if adapters and source.randrange(4) == 0:
        options["adapter"] = source.choice(adapters)
    return options


async def patient(path: Path, options: dict[str, Any], story: Story, pause_s: float = 0.0) -> None:
    async with Client(path) as client, client.submit(**options) as answer:
        async for delta in answer:
            story.token_s += [time.perf_counter()] * len(delta.token_ids)
            await trio.sleep(pause_s)
    story.outcome = "done"


async def slow(path: Path, options: dict[str, Any], story: Story) -> None:
    await patient(path, options, story, SLOW_S)


async def cancels(path: Path, options: dict[str, Any], story: Story) -> None:
    async with Client(path) as client, client.submit(**options) as answer:
        async for _ in answer:
            break
    story.outcome = "gone"


async def cuts(path: Path, options: dict[str, Any], story: Story) -> None:
    """The connection, behind the request, before or while it is answered."""
    await leave_unread(path, options, random.random())
    story.outcome = "gone"


async def dead(path: Path, options: dict[str, Any], story: Story) -> None:
    """Asks for much and never reads."""
    await leave_unread(path, {**options, "max_tokens": 200, "ignore_eos": True}, DEAD_S)
    story.outcome = "gone"


async def leave_unread(path: Path, options: dict[str, Any], seconds: float) -> None:
    biases = {str(token): bias for token, bias in options.get("logit_bias", {}).items()}
    async with connected(path) as raw:
        await raw.send({"type": "submit", "id": 1, **options, **({"logit_bias": biases} if biases else {})})
        await trio.sleep(seconds)


BY_MANNER: Mapping[str, Callable[[Path, dict[str, Any], Story], Awaitable[None]]] = {
    "patient": patient,
    "slow": slow,
    "cancels": cancels,
    "cuts": cuts,
    "dead": dead,
}


async def one(path: Path, source: random.Random, adapters: list[str], story: Story, manner: str) -> None:
    try:
        await BY_MANNER[manner](path, request(source, adapters), story)
    except RequestError as error:
        story.outcome = error.code
    except (ConnectionLost, OSError) as error:
        story.outcome = f"lost: {error}"


async def capacity_of(path: Path, adapters: list[str], seconds: float) -> float:
    """Requests a second of patient clients."""
    source = random.Random(1)
    return await closed_loop(lambda story: one(path, source, adapters, story, "patient"), seconds)


async def quarter(path: Path, adapters: list[str], per_s: float, seconds: float, seed: int) -> list[tuple[str, Story]]:
    """Each request by its client's manner; returns when all have ended."""
    source, stories = random.Random(seed), []

    async def any_manner(story: Story) -> None:
        (manner,) = source.choices(list(MANNERS), list(MANNERS.values()))
        stories.append((manner, story))
        await one(path, random.Random(source.random()), adapters, story, manner)

    await open_loop(any_manner, source, per_s, seconds)
    return stories


async def left_behind(path: Path) -> dict[str, Any]:
    """The daemon's report once nobody asks any more; what has been cut is noticed at its next write."""
    report: dict[str, Any] = {}
    with trio.move_on_after(60):
        while True:
            async with Client(path) as client:
                report = await client.status()
            rows = report["rows"]
            if not sum(rows[state] for state in ("running", "waiting", "prefilling", "set_aside")):
                return report
            await trio.sleep(0.5)
    raise AssertionError(f"all have ended, but {report['rows']}")


async def soak(run: Bench, path: Path, minutes: float) -> None:
    console = Console(file=sys.stderr)
    async with Client(path) as client:
        adapters = list((await client.status()).get("adapters", {}))
    per_s = PART_OF_CAPACITY * await capacity_of(path, adapters, CAPACITY_S)
    quarters: list[list[tuple[str, Story]]] = []
    memory: list[float] = []  # without what is remembered, which grows to its limit
    for number in range(4):
        quarters.append(await quarter(path, adapters, per_s, minutes * 15, 100 + number))
        report = await left_behind(path)
        resident, remembered = (
            of_bytes / 2**20
            for of_bytes in (report["memory"]["rss_bytes"], report["store"]["tiers"]["memory"]["bytes"])
        )
        memory.append(resident - remembered)
        said = f"{len(quarters[-1])} requests, {resident:.0f} MiB, of which {remembered:.0f} are remembered"
        kept = report["memory"]["mlx_cache_bytes"] / 2**20
        console.print(f"quarter {number + 1}: {said}, {kept:.0f} kept by MLX for reuse", highlight=False)
    case = f"{minutes:g} minutes at {per_s:.2f} requests/s of every kind; the second quarter as peer"
    run.add(case, MEMORY, "MiB", [memory[3]], [memory[1]], more_is_better=False)
    last, second = ([story for manner, story in quarters[at] if manner == "patient"] for at in (3, 1))
    for share in (0.5, 0.95):
        waits = [[percentile([s.ttft_s for s in stories if s.token_s], share)] for stories in (last, second)]
        run.add(case, f"time to first token, p{share * 100:.0f}", "s", *waits, more_is_better=False)
    outcomes = [story.outcome for stories in quarters for _, story in stories]
    run.add(case, "requests", "", [len(outcomes)])
    expected = ("done", "gone", "overloaded", "timed_out")
    unexpected = sorted({outcome for outcome in outcomes if outcome not in expected})
    run.add(case, "failed", "requests", [sum(outcome not in expected for outcome in outcomes)])
    assert not unexpected, f"some ended otherwise: {unexpected}"


def main() -> None:
    flags = {"minutes": "how long", "socket": "of a daemon that is there already, with eight rows"}
    with bench("soak", __doc__ or "", flags=flags) as run, daemon(run) as path:
        trio.run(soak, run, path, float(run.flags["minutes"] or (1 if run.quick else 20)))


if __name__ == "__main__":
    main()
