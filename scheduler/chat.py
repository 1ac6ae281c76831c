"""A chat as the model's template takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from scheduler.errors import Refused
from scheduler.protocol import Message, Submit, ToolCall

TOOL_CHARS = 500


def chat_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Templates go through the arguments of calls, so they get them as what their JSON says. Raises Refused."""
    return [_turn(index, message) for index, message in enumerate(messages)]


def text_size(message: Submit) -> int:
    """About how many characters, or tokens, a prompt is to be made of; tools count as what they often take."""
    if message.messages is None:
        return len(message.prompt or message.prompt_token_ids or ())
    calls = sum(len(call.function.arguments) for turn in message.messages for call in turn.tool_calls)
    return sum(len(turn.content) for turn in message.messages) + calls + TOOL_CHARS * len(message.tools)


def _turn(index: int, message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_call(index, call) for call in message.tool_calls]
    return turn


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        where = f"messages[{index}].tool_calls: the arguments of {call.function.name}"
        raise Refused("bad_request", f"{where} are no JSON: {error}") from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
