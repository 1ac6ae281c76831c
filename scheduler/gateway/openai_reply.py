"""What replies in OpenAI's two older dialects have in common: chunks with choices, and how a stream ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from scheduler.gateway.dialect import Event, given, new_id, now_unix_s
from scheduler.gateway.faults import Fault, openai_error
from scheduler.gateway.usage import Count, stop_of
from scheduler.protocol import Done


class OpenAIReply:
    """See scheduler.gateway.dialect.Reply; a dialect adds begin, delta, done and whole."""

    keep_alive = b": keep-alive\n\n"
    # What ids begin with, and what a chunk says it is.
    ID: str
    CHUNK: str

    def __init__(
        self, model: str, n: int, wants_usage: bool, wants_logprobs: bool, stop_token_ids: Collection[int] = ()
    ) -> None:
        self._head = {"id": new_id(self.ID), "created": now_unix_s(), "model": model}
        self._n = n
        self._wants_usage = wants_usage
        self._wants_logprobs = wants_logprobs
        self._count = Count(n)
        self._stop_token_ids = stop_token_ids

    def end(self) -> Iterable[Event]:
        if self._wants_usage:
            last = {**self._head, "object": self.CHUNK, "choices": [], "usage": self._count.openai()}
            yield Event(last | given(timings=self._count.timings()))
        yield Event("[DONE]")

    def fail(self, fault: Fault) -> Iterable[Event]:
        return [Event(openai_error(fault))]

    def _chunk_of(self, choice: Mapping[str, Any]) -> Event:
        chunk = {**self._head, "object": self.CHUNK, "choices": [choice]}
        return Event({**chunk, "usage": None} if self._wants_usage else chunk)

    def _ending(self, done: Done | None) -> dict[str, Any]:
        """How an answer has ended, if it has."""
        if done is None:
            return {"finish_reason": None}
        return {"finish_reason": done.finish_reason, "stop_reason": stop_of(done, self._stop_token_ids)}
