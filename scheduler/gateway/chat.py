"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from scheduler.gateway import logprobs as forms
from scheduler.gateway.content import Content, text_of
from scheduler.gateway.dialect import Event, Order, given
from scheduler.gateway.faults import bad
from scheduler.gateway.formats import Format, structure_of
from scheduler.gateway.openai_reply import OpenAIReply
from scheduler.gateway.sampling import HINTS, UNSUPPORTED, Count, Drawing, drawing_of
from scheduler.gateway.template import CONTINUE, effort_of
from scheduler.gateway.tools import Function, Name, ToolChoice, options_of
from scheduler.gateway.usage import counted
from scheduler.protocol import Delta, Done, ToolCall

# What templates know; developer is OpenAI's newer word for system.
_ROLES = {"developer": "system", "function": "tool"}


class Called(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name
    arguments: str


class Call(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    id: Name
    type: Literal["function"] = "function"
    function: Called


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    refusal: str | None = None
    name: Name | None = None
    tool_calls: Annotated[list[Call], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: Function


class Named(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: Named


class ChatBody(Drawing):
    IGNORED: ClassVar[frozenset[str]] = HINTS | {"modalities"}
    REFUSED: ClassVar[Mapping[str, str]] = UNSUPPORTED | {
        "functions": "its successor tools is",
        "function_call": "its successor tool_choice is",
        "audio": "answers are text",
        "web_search_options": "nothing here searches the web",
        "chat_template": "the daemon has its template, which --chat-template changes",
        "documents": "chat_template_kwargs can pass what a template wants",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=20)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def order(body: ChatBody, model: str) -> Order:
    """Raises Fault."""
    functions = [tool.function for tool in body.tools or ()]
    called, reshape = options_of(functions, _choice(body.tool_choice), template_variables(body))
    drawing = drawing_of(body)
    structure = structure_of(body.response_format, "response_format") or drawing.pop("structured_outputs", None)
    if structure is not None and "structured_outputs" in called:
        raise bad("tool_choice demands a call: response_format cannot hold at the same time", param="tool_choice")
    wants_top = (body.top_logprobs or 0) > 0
    submit = {
        "messages": [_turn(index, message) for index, message in enumerate(body.messages)],
        **drawing,
        **given(
            max_tokens=body.max_completion_tokens,
            logprobs=body.logprobs or None,
            top_logprobs=body.top_logprobs if body.logprobs and wants_top else None,
            structured_outputs=structure,
        ),
        **called,
    }
    n = body.n or 1
    reply = ChatReply(model, n, body.wants_usage, bool(body.logprobs), body.stop_token_ids or ())
    return Order([submit], n, bool(body.stream), reply, reshape)


def template_variables(body: ChatBody) -> dict[str, Any]:
    """What the request says to the template."""
    ending = given(add_generation_prompt=body.add_generation_prompt)
    if body.continue_final_message:
        ending = dict(CONTINUE)
    return {**effort_of(body.reasoning_effort), **ending, **(body.chat_template_kwargs or {})}


def _choice(choice: Literal["auto", "none", "required"] | NamedTool | None) -> ToolChoice:
    if isinstance(choice, NamedTool):
        return ToolChoice("required", choice.function.name)
    return ToolChoice(choice or "auto")


def _turn(index: int, message: ChatMessage) -> dict[str, Any]:
    calls = [call.model_dump() for call in message.tool_calls or ()]
    said = message.content if message.content is not None else message.refusal
    return {
        "role": _ROLES.get(message.role, message.role),
        "content": text_of(said, f"messages[{index}].content"),
        **given(name=message.name, tool_call_id=message.tool_call_id, tool_calls=calls or None),
    }


class ChatReply(OpenAIReply):
    """Chunks of one id, or one completion."""

    ID, CHUNK = "chatcmpl-", "chat.completion.chunk"

    def __init__(
        self, model: str, n: int, wants_usage: bool, wants_logprobs: bool, stop_token_ids: Collection[int] = ()
    ) -> None:
        super().__init__(model, n, wants_usage, wants_logprobs, stop_token_ids)
        self._num_calls = [0] * n

    def begin(self) -> Iterable[Event]:
        return [self._chunk(answer, {"role": "assistant", "content": ""}) for answer in range(self._n)]

    def delta(self, answer: int, delta: Delta) -> Iterable[Event]:
        said: dict[str, Any] = {}
        if delta.text:
            said["content"] = delta.text
        if delta.reasoning:
            said |= _reasoning(delta.reasoning)
        if delta.tool_calls:
            first = self._num_calls[answer]
            self._num_calls[answer] += len(delta.tool_calls)
            said["tool_calls"] = [{"index": first + at, **_call(call)} for at, call in enumerate(delta.tool_calls)]
        if said or delta.logprobs:
            yield self._chunk(answer, said, logprobs=self._logprobs(delta))

    def done(self, answer: int, done: Done) -> Iterable[Event]:
        self._count.take(answer, done)
        yield self._chunk(answer, {}, done=done)

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        count = counted(self._n, dones)
        choices = [
            {"index": done.index, "message": _message(done), "logprobs": self._logprobs(done), **self._ending(done)}
            for done in dones
        ]
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": count.openai()}
        return body | given(timings=count.timings())

    def _chunk(
        self,
        answer: int,
        delta: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
        done: Done | None = None,
    ) -> Event:
        """done: how the answer has ended, if it has."""
        return self._chunk_of({"index": answer, "delta": delta, "logprobs": logprobs, **self._ending(done)})

    def _logprobs(self, said: Delta | Done) -> dict[str, Any] | None:
        return {"content": forms.of_chat(said.logprobs), "refusal": None} if self._wants_logprobs else None


def _message(done: Done) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": done.text or "", "refusal": None}
    if done.reasoning:
        message |= _reasoning(done.reasoning)
    if done.tool_calls:
        message |= {"content": done.text or None, "tool_calls": [_call(call) for call in done.tool_calls]}
    return message


def _reasoning(text: str) -> dict[str, str]:
    """Clients look for it under either name."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}
