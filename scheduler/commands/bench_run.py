"""What `laned bench` measures: requests put to a daemon's service as its clients would, timed as they are answered.

Prompts are random tokens, of which nothing is remembered, and answers go on whatever they say. So the figures are the
scheduler's, the engine's and the tokenizer's together, only the socket is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import trio

from scheduler.budget import HEADROOM_TOKENS
from scheduler.errors import Refused
from scheduler.protocol import Delta, Done, Error, Reply, Submit
from scheduler.recent import percentile
from scheduler.service import Service
from scheduler.usage import CommandFailed

# Steps of a lane that has just filled up, before they count: buffers are made, and shapes compiled that come again.
WARM_STEPS = 6

# So that no row ends by itself while the last steps of others are still on their way.
SPARE_STEPS = 8
# Where the model sets no limit.
ENDLESS_TOKENS = 1 << 20

# Told how much of a measurement is done, 0 to 1.
Progress = Callable[[float], None]


class NotTogether(Exception):
    """A row came to the limit of the model's context, or of memory, before all had decoded together."""


@dataclass(frozen=True, slots=True)
class RowsFigures:
    """Rows that decode together. between: seconds from one token of a row to its next; first: from asking, all at the
    same moment, to a row's first token."""

    rows: int
    tokens_per_s: float
    between_p50_s: float
    between_p99_s: float
    first_p50_s: float
    first_last_s: float


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """One prompt alone. again_s: the same prompt once more, of which cached_tokens needed no processing; None where
    the model remembers nothing."""

    tokens: int
    first_s: float
    tokens_per_s: float
    again_s: float | None = None
    cached_tokens: int = 0


@dataclass
class _Asked:
    """One request: when it was asked, when each of its tokens came, and its end."""

    tell: Callable[[], None]
    asked_s: float = field(default_factory=trio.current_time)
    times_s: list[float] = field(default_factory=list)
    end: Done | Error | None = None

    def reply(self, said: Reply) -> None:
        if isinstance(said, Delta):
            self.times_s += [trio.current_time()] * len(said.token_ids)
        elif isinstance(said, Done | Error):
            self.end = said
        self.tell()

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.asked_s


class _Group:
    """Requests that are put at the same moment."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.asked: list[_Asked] = []
        self.row_ids: list[int] = []
        self._told = trio.Event()

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> None:
        asked = _Asked(lambda: self._told.set())
        self.asked.append(asked)
        message = Submit(
            id=len(self.asked),
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        try:
            self.row_ids.append(await self.service.submit(message, asked.reply))
        except Refused as refused:
            raise CommandFailed(f"A prompt of {len(prompt)} tokens is refused: {refused.message}.") from refused

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the requests' answers bring about. Raises CommandFailed if one of them fails."""
        while True:
            failed = next((asked.end for asked in self.asked if isinstance(asked.end, Error)), None)
            if failed is not None:
                raise CommandFailed(f"A request failed: {failed.message}.")
            if condition():
                return
            if any(asked.end for asked in self.asked):
                await self.end()
                raise NotTogether
            self._told = trio.Event()
            await self._told.wait()

    async def end(self) -> None:
        """Cancel what still runs, and return when the engine holds nothing of it."""
        for asked, row_id in zip(self.asked, self.row_ids, strict=True):
            if asked.end is None:
                self.service.cancel(row_id)
        await self.service.loop.wait_idle()


def random_prompt(service: Service, tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(service.info.vocab_size), k=tokens)


def most_tokens(service: Service, prompt_tokens: int) -> int:
    """The longest answer that may be asked for: rows go on while the prompts of others are processed, for as long as
    that takes."""
    budget = service.loop.scheduler.budget
    most = (service.context_tokens or ENDLESS_TOKENS) - prompt_tokens
    while most > 1 and not budget.admits_alone(prompt_tokens + most):
        most //= 2
    return most


def obstacle(service: Service, rows: int, prompt_tokens: int, steps: int) -> str | None:
    """Why so many rows cannot be measured here, if they cannot."""
    info, budget = service.info, service.loop.scheduler.budget
    if rows > info.max_rows:
        return f"the {info.lane} lane has {info.max_rows} at most ({info.lane_reason})"
    longest = prompt_tokens + WARM_STEPS + steps + SPARE_STEPS
    if service.context_tokens is not None and longest > service.context_tokens:
        return f"a row comes to {longest:,} tokens, the model's context is {service.context_tokens:,}"
    if not budget.fits([longest + HEADROOM_TOKENS] * rows, [longest]):
        return f"{rows} rows of {longest:,} tokens do not fit into {budget.limit_bytes >> 20:,} MiB"
    return None


async def measure_rows(
    service: Service, rows: int, prompt_tokens: int, steps: int, progress: Progress = lambda part: None
) -> RowsFigures:
    """So many requests at once. Only steps in which all of them decode and no prompt is in work count.

    Raises CommandFailed if one is refused or fails, NotTogether if one reaches its limit before the last has begun.
    """
    group = _Group(service)
    for row in range(rows):
        prompt = random_prompt(service, prompt_tokens, seed=1000 * rows + row)
        await group.ask(prompt, most_tokens(service, prompt_tokens))
    asked = group.asked

    def all_begun() -> bool:
        begun = sum(bool(each.times_s) for each in asked)
        progress(0.5 * begun / rows)
        return begun == rows

    await group.until(all_begun)
    starts = [len(each.times_s) + WARM_STEPS for each in asked]

    def all_measured() -> bool:
        num_steps = min(len(each.times_s) - start for each, start in zip(asked, starts, strict=True))
        progress(0.5 + 0.5 * max(num_steps, 0) / steps)
        return num_steps > steps

    await group.until(all_measured)
    measured = [each.times_s[start : start + steps + 1] for each, start in zip(asked, starts, strict=True)]
    await group.end()
    intervals = sorted(later - earlier for times in measured for earlier, later in pairwise(times))
    firsts = sorted(each.first_s for each in asked)
    seconds = max(times[-1] for times in measured) - min(times[0] for times in measured)
    return RowsFigures(
        rows=rows,
        tokens_per_s=rows * steps / seconds,
        between_p50_s=percentile(intervals, 50) or 0.0,
        between_p99_s=percentile(intervals, 99) or 0.0,
        first_p50_s=percentile(firsts, 50) or 0.0,
        first_last_s=firsts[-1],
    )


async def measure_prompt(service: Service, tokens: int) -> PromptFigures:
    """A prompt alone, up to its first token; then again, where what was computed is remembered."""
    prompt = random_prompt(service, tokens, seed=tokens)
    first_s, _ = await _one(service, prompt)
    rate = tokens / first_s
    if service.info.remembers == "nothing":
        return PromptFigures(tokens, first_s, rate)
    await service.flush()
    again_s, cached_tokens = await _one(service, prompt)
    return PromptFigures(tokens, first_s, rate, again_s, cached_tokens)


async def warm_up(service: Service) -> None:
    """What is done once in a daemon's life is done before anything is measured."""
    await _one(service, random_prompt(service, 8, seed=0), max_tokens=3)


async def _one(service: Service, prompt: Sequence[int], max_tokens: int = 1) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's tokens were remembered."""
    group = _Group(service)
    await group.ask(prompt, max_tokens)
    asked = group.asked[0]
    await group.until(lambda: asked.end is not None)
    await group.end()
    assert isinstance(asked.end, Done)
    return asked.first_s, asked.end.usage.cached_tokens
