"""Tokens and times of one request's answers, and what ended them, as the APIs tell it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from scheduler.protocol import Done, Usage


class Count:
    """Adds up the answers. The n answers to one prompt process it once; prompts are counted once each."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._dones: dict[int, Done] = {}

    def take(self, answer: int, done: Done) -> None:
        self._dones[answer] = done

    @property
    def _of_prompts(self) -> list[Usage]:
        # What the other answers to a prompt took over of the first is not what was remembered.
        return [done.usage for answer, done in self._dones.items() if answer % self._n == 0]

    @property
    def prompt_tokens(self) -> int:
        return sum(usage.prompt_tokens for usage in self._of_prompts)

    @property
    def cached_tokens(self) -> int:
        return sum(usage.cached_tokens for usage in self._of_prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(done.usage.completion_tokens for done in self._dones.values())

    def openai(self) -> dict[str, Any]:
        """As chats and completions have it; by tier is what laned adds."""
        prompts = self._of_prompts
        tiers = {
            "cached_memory_tokens": sum(usage.cached_memory_tokens for usage in prompts),
            "cached_disk_tokens": sum(usage.cached_disk_tokens for usage in prompts),
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, **tiers},
        }

    def timings(self) -> dict[str, Any] | None:
        """Where the time went, in seconds, where there was one answer."""
        if len(self._dones) != 1:
            return None
        (done,) = self._dones.values()
        times = done.timings
        seconds = (times.queued_s, times.prompt_s, times.decode_s, times.total_s, times.ttft_s)
        names = ("queued_s", "prompt_s", "decode_s", "total_s", "ttft_s")
        return {name: None if s is None else round(s, 6) for name, s in zip(names, seconds, strict=True)}


def stop_of(done: Done, stop_token_ids: Collection[int]) -> str | int | None:
    """The stop string or token that the request had asked for, if one of those ended the answer."""
    reason = done.stop_reason
    return reason if isinstance(reason, str) or reason in stop_token_ids else None


def counted(n: int, dones: Sequence[Done]) -> Count:
    count = Count(n)
    for answer, done in enumerate(dones):
        count.take(answer, done)
    return count
