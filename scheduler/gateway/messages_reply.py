"""Tells an answer as a message of Anthropic's: blocks of thinking, text and tool_use that begin, grow and end.

    message_start
    for each block   content_block_start, content_block_delta ..., content_block_stop
    message_delta    why it stopped, and the usage, which is not known before
    message_stop

Without a stream the message is what these events add up to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scheduler.gateway.dialect import Event, new_id
from scheduler.gateway.faults import Fault, anthropic_error
from scheduler.gateway.usage import counted
from scheduler.protocol import Delta, Done, ToolCall

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "end_turn"}


class MessagesReply:
    keep_alive = Event({"type": "ping"}, "ping").encode()

    def __init__(self, model: str) -> None:
        self._message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        # The block that grows.
        self._open: dict[str, Any] | None = None
        self._done: Done | None = None

    def begin(self) -> Iterable[Event]:
        return [_event("message_start", message=dict(self._message))]

    def delta(self, answer: int, delta: Delta) -> Iterable[Event]:
        if delta.reasoning:
            yield from self._grow("thinking", delta.reasoning)
        if delta.text:
            yield from self._grow("text", delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def done(self, answer: int, done: Done) -> Iterable[Event]:
        self._done = done
        return self._close()

    def end(self) -> Iterable[Event]:
        assert self._done is not None, "the message has not ended"
        told = self._ending(self._done)
        yield _event("message_delta", delta=told, usage=self._usage(self._done))
        yield _event("message_stop")

    def fail(self, fault: Fault) -> Iterable[Event]:
        return [Event(anthropic_error(fault), "error")]

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        (done,) = dones
        for _ in (
            *self.delta(0, Delta(done.id, done.text or "", (), 0, done.reasoning, done.tool_calls)),
            *self._close(),
        ):
            pass
        return {**self._message, **self._ending(done), "usage": self._usage(done)}

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            # A signature is what Anthropic's own servers check when a block comes back; here it is empty.
            begun = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield from self._begin(begun)
        assert self._open is not None
        self._open[kind] += text
        yield self._block_event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close()
        head = {"type": "tool_use", "id": call.id, "name": call.function.name}
        yield from self._begin({**head, "input": {}})
        written = call.function.arguments or "{}"
        yield self._block_event("content_block_delta", delta={"type": "input_json_delta", "partial_json": written})
        assert self._open is not None
        self._open["input"] = _object(written)
        yield from self._close()

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        self._open = block
        yield self._block_event("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            yield self._block_event("content_block_stop")
            self._message["content"].append(self._open)
            self._open = None

    def _block_event(self, kind: str, **fields: Any) -> Event:
        return _event(kind, index=len(self._message["content"]), **fields)

    @staticmethod
    def _ending(done: Done) -> dict[str, Any]:
        is_text = done.finish_reason == "stop" and isinstance(done.stop_reason, str)
        reason = "stop_sequence" if is_text else _REASONS[done.finish_reason]
        return {"stop_reason": reason, "stop_sequence": done.stop_reason if is_text else None}

    @staticmethod
    def _usage(done: Done) -> dict[str, Any]:
        """Anthropic's input_tokens are those that were not read from a cache."""
        count = counted(1, [done])
        return {
            "input_tokens": count.prompt_tokens - count.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": count.cached_tokens,
            "output_tokens": count.completion_tokens,
        }


def _object(written: str) -> dict[str, Any]:
    """Arguments are JSON as a model wrote it: mostly an object."""
    try:
        said = json.loads(written)
    except ValueError:
        return {"arguments": written}
    return said if isinstance(said, dict) else {"arguments": said}


def _event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)
