"""Tells an answer as a response of OpenAI's: items that begin, grow and end, each event with a number.

    response.created, response.in_progress
    for each item      response.output_item.added ... response.output_item.done
      reasoning        response.reasoning_text.delta ... .done
      message          response.content_part.added, response.output_text.delta ... .done, response.content_part.done
      function_call    response.function_call_arguments.delta, .done
    response.completed, or response.incomplete, or response.failed

Without a stream the response is what the last event would have held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from scheduler.gateway import logprobs as forms
from scheduler.gateway.dialect import Event, new_id, now_unix_s
from scheduler.gateway.faults import Fault
from scheduler.gateway.usage import Count, counted
from scheduler.protocol import Delta, Done, ToolCall

_PART = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponsesReply:
    keep_alive = b": keep-alive\n\n"

    def __init__(self, model: str, echoed: Mapping[str, Any], wants_logprobs: bool) -> None:
        """echoed: what the response repeats of its request."""
        self._response: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now_unix_s(),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **echoed,
        }
        self._wants_logprobs = wants_logprobs
        self._numbers = count()
        # The item that grows, and what it holds so far.
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._done: Done | None = None

    def begin(self) -> Iterable[Event]:
        return [self._event(f"response.{word}", response=dict(self._response)) for word in ("created", "in_progress")]

    def delta(self, answer: int, delta: Delta) -> Iterable[Event]:
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.text:
            yield from self._grow("message", delta.text, forms.of_chat(delta.logprobs) if self._wants_logprobs else [])
        for call in delta.tool_calls:
            yield from self._call(call)

    def done(self, answer: int, done: Done) -> Iterable[Event]:
        self._done = done
        return self._close("incomplete" if done.finish_reason == "length" else "completed")

    def end(self) -> Iterable[Event]:
        assert self._done is not None, "the response has not ended"
        status = self._finish(self._done)
        yield self._event(f"response.{status}", response=self._response)

    def fail(self, fault: Fault) -> Iterable[Event]:
        yield from self._close("incomplete")
        error = {"code": "server_error", "message": fault.message}
        self._response |= {"status": "failed", "error": error}
        yield self._event("response.failed", response=self._response)

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        (done,) = dones
        told = Delta(done.id, done.text or "", (), 0, done.reasoning, done.tool_calls, done.logprobs)
        for _ in (*self.delta(0, told), *self.done(0, done)):
            pass
        self._finish(done)
        return self._response

    def _finish(self, done: Done) -> str:
        tokens: Count = counted(1, [done])
        self._response["usage"] = {
            "input_tokens": tokens.prompt_tokens,
            "input_tokens_details": {"cached_tokens": tokens.cached_tokens},
            "output_tokens": tokens.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens.prompt_tokens + tokens.completion_tokens,
        }
        is_cut = done.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else now_unix_s(),
        }
        return status

    def _grow(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin_item(kind)
        self._text += text
        self._logprobs += logprobs
        extra = {"logprobs": list(logprobs)} if kind == "message" else {}
        yield self._item_event(f"response.{_PART[kind]}.delta", content_index=0, delta=text, **extra)

    def _begin_item(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            item = {"id": new_id("msg_"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs_"), "type": kind, "status": "in_progress", "summary": [], "content": []}
        self._open = item
        self._text, self._logprobs = "", []
        yield self._event("response.output_item.added", output_index=self._index, item=dict(item))
        yield self._item_event("response.content_part.added", content_index=0, part=self._part(kind))

    def _close(self, status: str) -> Iterator[Event]:
        """End the item that grows, if there is one."""
        item = self._open
        if item is None:
            return
        kind, extra = item["type"], {"logprobs": self._logprobs} if item["type"] == "message" else {}
        yield self._item_event(f"response.{_PART[kind]}.done", content_index=0, text=self._text, **extra)
        yield self._item_event("response.content_part.done", content_index=0, part=self._part(kind))
        item |= {"content": [self._part(kind)], "status": status}
        yield from self._add(item)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close("completed")
        function = {"name": call.function.name, "arguments": call.function.arguments}
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": call.id, **function}
        self._open = item
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        yield self._item_event("response.function_call_arguments.delta", delta=function["arguments"])
        yield self._item_event("response.function_call_arguments.done", **function)
        yield from self._add({**item, "status": "completed"})

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._response["output"].append(item)
        self._open = None

    def _part(self, kind: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PART[kind], "text": self._text}
        return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": self._logprobs}

    @property
    def _index(self) -> int:
        return len(self._response["output"])

    def _item_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None, "there is no item"
        return self._event(kind, item_id=self._open["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return Event({"type": kind, "sequence_number": next(self._numbers), **fields}, name=kind)
