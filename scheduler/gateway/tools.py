"""Functions that a model may or has to call.

Whether it calls one is the model's choice with "auto": the daemon shows it the tools, in the model's own template, and
finds its calls in what it writes. Where a call is demanded, of one function or of any, the answer is kept to a grammar
that allows nothing else. That works with every model, also those of which nobody can parse the calls; the tools are
then shown through the template's variable alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from scheduler.gateway.dialect import Reshape, new_id
from scheduler.gateway.faults import bad
from scheduler.protocol import Delta, Done, FunctionCall, ToolCall

Name = Annotated[str, Field(min_length=1, max_length=128)]
# No parameters: an object with nothing in it.
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice:
    """auto, none, required, or the one function that has to be called."""

    def __init__(self, mode: Literal["auto", "none", "required"], name: str | None = None) -> None:
        self.mode = mode
        self.name = name


def options_of(
    functions: Sequence[Function], choice: ToolChoice, variables: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[], Reshape] | None]:
    """Options of Client.submit, with chat_template_kwargs, and what makes calls of the answer where the daemon doesn't.

    variables: the request's own for the template. Raises Fault.
    """
    said = {"chat_template_kwargs": dict(variables)} if variables else {}
    if choice.mode == "none" or not functions:
        if choice.mode == "required":
            raise bad("tool_choice demands a call, but there are no tools", param="tool_choice")
        return said, None
    tools = [shown(function) for function in functions]
    if choice.mode == "auto":
        return {"tools": tools, **said}, None
    callable_now = [function for function in functions if choice.name in (None, function.name)]
    if not callable_now:
        raise bad(f"tool_choice demands {choice.name}, which is none of the tools", param="tool_choice")
    # Thinking comes before the call, where the grammar has no room for it.
    shown_to_template = {"enable_thinking": False, **variables, "tools": tools}
    one = callable_now[0].name if len(callable_now) == 1 else None
    schema = _parameters(callable_now[0]) if one else _any_of(callable_now)
    options = {"structured_outputs": {"json": schema}, "chat_template_kwargs": shown_to_template}
    return options, lambda: ForcedCall(one)


def shown(function: Function) -> dict[str, Any]:
    """As chat templates want it."""
    said = function.model_dump(exclude_none=True, exclude={"strict"})
    return {"type": "function", "function": {"parameters": _NOTHING, **said}}


class ForcedCall:
    """Makes the call of an answer that is nothing but one. name: the function; None: the answer names it."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._text = ""

    def delta(self, delta: Delta) -> Delta | None:
        """Arguments are told when they are whole, as the daemon tells those of other calls."""
        self._text += delta.text
        return replace(delta, text="") if delta.reasoning or delta.logprobs else None

    def done(self, done: Done) -> tuple[Delta | None, Done]:
        text = done.text if done.text is not None else self._text
        call = self._call(text) if done.finish_reason == "stop" else None
        if call is None:
            # Cut off: better seen than lost.
            return (Delta(done.id, text, (), index=done.index) if done.text is None and text else None), done
        called = replace(done, finish_reason="tool_calls", tool_calls=(call,), text=None if done.text is None else "")
        return Delta(done.id, "", (), index=done.index, tool_calls=(call,)), called

    def _call(self, text: str) -> ToolCall | None:
        try:
            said = json.loads(text)
            name, arguments = (self._name, said) if self._name else (said["name"], said["arguments"])
        except (ValueError, LookupError, TypeError):
            return None
        return ToolCall(new_id("call_"), FunctionCall(name, json.dumps(arguments, ensure_ascii=False)))


def _parameters(function: Function) -> dict[str, Any]:
    """Arguments that nobody has declared are none: a model that has to write an object would find ever more."""
    declared = dict(function.parameters or _NOTHING)
    return {"additionalProperties": False, **declared} if "properties" in declared else declared


def _any_of(functions: Sequence[Function]) -> dict[str, Any]:
    """The schema of a call of any of them."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": _moved(_parameters(function), f"#/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    return {"anyOf": calls}


def _moved(schema: Any, to: str) -> Any:
    """A schema that stands at `to` in another one: what it refers to in itself has moved with it."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, to)
        for key, value in schema.items()
    }
