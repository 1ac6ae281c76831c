"""OpenAI's responses: POST /v1/responses, without what a server would have to keep: every request brings its whole
conversation along. responses_reply tells the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from scheduler.gateway.content import Content, text_of
from scheduler.gateway.dialect import Order, given
from scheduler.gateway.faults import bad
from scheduler.gateway.formats import Format, structure_of
from scheduler.gateway.responses_reply import ResponsesReply
from scheduler.gateway.sampling import HINTS, UNSUPPORTED, Count, Drawing, drawing_of
from scheduler.gateway.template import effort_of
from scheduler.gateway.tools import Function, Name, ToolChoice, options_of

LOGPROBS = "message.output_text.logprobs"


class Item(BaseModel):
    """Of the conversation. One without a type is a message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: Content | None = None


class FlatFunction(Function):
    type: Literal["function"]


class FlatNamed(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    name: Name


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    format: Format | None = None


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    effort: str | None = None


class ResponsesBody(Drawing):
    IGNORED: ClassVar[frozenset[str]] = HINTS | {"truncation", "include_obfuscation"}
    REFUSED: ClassVar[Mapping[str, str]] = UNSUPPORTED | {
        "previous_response_id": "responses are not kept, send the whole conversation as input",
        "conversation": "conversations are not kept, send the whole one as input",
        "background": "responses are not kept for later",
        "prompt": "there are no stored prompts",
        "max_tool_calls": "the only tools are your own functions",
    }

    input: Annotated[str, Field(min_length=1)] | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[FlatFunction], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatNamed | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def order(body: ResponsesBody, model: str) -> Order:
    """Raises Fault."""
    if body.n not in (None, 1):
        raise bad("n is not supported: a response is one answer", param="n")
    called, reshape = options_of(list(body.tools or ()), _choice(body.tool_choice), _variables(body))
    drawing = drawing_of(body)
    structure = structure_of(body.text.format if body.text else None, "text.format")
    if structure is not None and "structured_outputs" in called:
        raise bad("tool_choice demands a call: text.format cannot hold at the same time", param="tool_choice")
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    submit = {
        "messages": messages_of(body.input, body.instructions),
        **drawing,
        **given(
            max_tokens=body.max_output_tokens,
            structured_outputs=structure,
            logprobs=wants_logprobs or None,
            top_logprobs=body.top_logprobs or None,
        ),
        **called,
    }
    return Order([submit], 1, bool(body.stream), ResponsesReply(model, _echoed(body), wants_logprobs), reshape)


def messages_of(said: str | Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """As a chat: calls belong to the assistant's turn before them. Raises Fault."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(said, str):
        return [*turns, {"role": "user", "content": said}]
    for turn in _turns(said):
        last = turns[-1] if turns else None
        if "tool_calls" in turn and last is not None and last["role"] == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
        else:
            turns.append(turn)
    return turns


def _turns(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.type:
            case "message":
                role = _needed(item.role, f"{where}.role")
                said = text_of(item.content, f"{where}.content")
                yield {"role": "system" if role == "developer" else role, "content": said}
            case "function_call":
                function = {
                    "name": _needed(item.name, f"{where}.name"),
                    "arguments": _needed(item.arguments, f"{where}.arguments"),
                }
                call = {"id": _needed(item.call_id, f"{where}.call_id"), "type": "function", "function": function}
                yield {"role": "assistant", "content": "", "tool_calls": [call]}
            case "function_call_output":
                said = text_of(_needed(item.output, f"{where}.output"), f"{where}.output")
                yield {"role": "tool", "content": said, "tool_call_id": _needed(item.call_id, f"{where}.call_id")}
            case "reasoning":
                # Templates leave out what was thought before.
                continue


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise bad(f"{where} is missing", param=where)
    return value


def _choice(choice: Literal["auto", "none", "required"] | FlatNamed | None) -> ToolChoice:
    if isinstance(choice, FlatNamed):
        return ToolChoice("required", choice.name)
    return ToolChoice(choice or "auto")


def _variables(body: ResponsesBody) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    return {**effort_of(effort), **(body.chat_template_kwargs or {})}


def _echoed(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request."""
    choice = body.tool_choice
    extra = body.model_extra or {}
    wanted = body.text.format if body.text else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": extra.get("metadata") or {},
        "parallel_tool_calls": bool(extra.get("parallel_tool_calls", True)),
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "temperature": body.temperature,
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
        "tool_choice": choice.model_dump() if isinstance(choice, FlatNamed) else choice or "auto",
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
    }


def _tool(tool: FlatFunction) -> dict[str, Any]:
    return {"strict": None, "parameters": None, "description": None, **tool.model_dump()}
