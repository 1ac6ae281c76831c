"""Anthropic's messages: POST /v1/messages. messages_reply tells the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from scheduler.gateway.dialect import Body, Order, given
from scheduler.gateway.faults import bad
from scheduler.gateway.formats import Format, structure_of
from scheduler.gateway.messages_reply import MessagesReply
from scheduler.gateway.sampling import Count, Seed, Share, Stop, StopText, Temperature, seed_of, top_p_of
from scheduler.gateway.template import CONTINUE, effort_of
from scheduler.gateway.tools import Function, Name, ToolChoice, options_of


class Block(BaseModel):
    """A piece of a message. Kinds that are no text are known, so that they can be refused by name."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document"]
    text: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Turn(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class InputTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class Choice(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    format: Format | None = None
    effort: str | None = None


class MessagesBody(Body):
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        ["metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics"]
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "the only tools are your own",
        "container": "nothing is executed here",
        "context_management": "send what the model is to read",
    }

    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096)]
    max_tokens: Count
    system: str | list[Block] | None = None
    stream: bool | None = False
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=32)] | None = None
    tools: Annotated[list[InputTool], Field(max_length=128)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    seed: Seed | None = None
    min_p: Share | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def order(body: MessagesBody, model: str) -> Order:
    """Raises Fault."""
    functions = [
        Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
        for tool in body.tools or ()
    ]
    called, reshape = options_of(functions, _choice(body.tool_choice), _variables(body))
    wanted = (body.output_config.format if body.output_config else None) or body.output_format
    structure = structure_of(wanted, "output_config.format")
    if structure is not None and "structured_outputs" in called:
        raise bad("tool_choice demands a call: output_config.format cannot hold at the same time", param="tool_choice")
    stop: Stop | None = body.stop_sequences or None
    submit = {
        "messages": messages_of(body.messages, body.system),
        "max_tokens": body.max_tokens,
        **top_p_of(body.top_p, body.top_k),
        **given(
            temperature=body.temperature,
            min_p=body.min_p,
            seed=seed_of(body.seed),
            stop=stop,
            cache_salt=body.cache_salt,
            structured_outputs=structure,
        ),
        **called,
    }
    return Order([submit], 1, bool(body.stream), MessagesReply(model), reshape)


def messages_of(said: Sequence[Turn], system: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    """As a chat: results of calls, which are a user's blocks there, are turns of their own here. Raises Fault."""
    turns: list[dict[str, Any]] = []
    if system:
        turns.append({"role": "system", "content": _text(system, "system")})
    for index, turn in enumerate(said):
        turns += _turns(turn, f"messages[{index}].content")
    return turns


def _turns(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    calls, texts = [], []
    for index, block in enumerate(turn.content):
        at = f"{where}[{index}]"
        match block.type:
            case "tool_result":
                said = _text(block.content or "", f"{at}.content")
                yield {"role": "tool", "content": said, "tool_call_id": _needed(block.tool_use_id, f"{at}.tool_use_id")}
            case "tool_use":
                function = {"name": _needed(block.name, f"{at}.name"), "arguments": json.dumps(block.input or {})}
                calls.append({"id": _needed(block.id, f"{at}.id"), "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                # Templates leave out what was thought before.
                continue
            case _:
                texts.append(_text([block], where, index))
    if texts or calls or not turn.content:
        yield {"role": turn.role, "content": "".join(texts), **given(tool_calls=calls or None)}


def _text(said: str | Sequence[Block], where: str, first: int = 0) -> str:
    """Of blocks that are all text; `first` is the number of the first one."""
    if isinstance(said, str):
        return said
    texts = []
    for index, block in enumerate(said, first):
        if block.type != "text" or block.text is None:
            wrong = "has no text" if block.type == "text" else "is not read: text alone is"
            raise bad(f"{where}[{index}]: a block of type {block.type} {wrong}", param=f"{where}[{index}]")
        texts.append(block.text)
    return "".join(texts)


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise bad(f"{where} is missing", param=where)
    return value


def _variables(body: MessagesBody) -> dict[str, Any]:
    thinks = None if body.thinking is None else body.thinking.type != "disabled"
    effort = effort_of(body.output_config.effort if body.output_config else None)
    # An assistant's message at the end is the beginning of the answer.
    ending = CONTINUE if body.messages[-1].role == "assistant" else {}
    return {**effort, **given(enable_thinking=thinks), **ending, **(body.chat_template_kwargs or {})}


def _choice(choice: Choice | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice("auto")
    if choice.type == "none":
        return ToolChoice("none")
    if choice.type == "tool":
        return ToolChoice("required", _needed(choice.name, "tool_choice.name"))
    return ToolChoice("required")
