"""Calls that a model may or has to make."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from scheduler.gateway.faults import Fault
from scheduler.gateway.tools import ForcedCall, Function, ToolChoice, options_of
from tests.gateway.told import delta, done

OPEN = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"type": "string"}}}
WEATHER = Function(name="weather", description="of a city", parameters=OPEN)
CLOCK = Function(name="clock")


def test_auto_leaves_it_to_the_model() -> None:
    options, reshape = options_of([WEATHER, CLOCK], ToolChoice("auto"), {"a": 1})
    assert [tool["function"]["name"] for tool in options["tools"]] == ["weather", "clock"]
    assert options["tools"][1]["function"]["parameters"]["properties"] == {}
    assert (options["chat_template_kwargs"], reshape) == ({"a": 1}, None)


def test_none_shows_nothing() -> None:
    assert options_of([WEATHER], ToolChoice("none"), {}) == ({}, None)
    assert options_of([], ToolChoice("auto"), {"a": 1}) == ({"chat_template_kwargs": {"a": 1}}, None)


def test_one_function_has_its_own_parameters_for_a_grammar() -> None:
    options, reshape = options_of([WEATHER, CLOCK], ToolChoice("required", "weather"), {})
    assert options["structured_outputs"] == {"json": {"additionalProperties": False, **OPEN}}
    assert options["chat_template_kwargs"]["enable_thinking"] is False
    assert len(options["chat_template_kwargs"]["tools"]) == 2
    assert "tools" not in options
    assert reshape is not None


def test_of_several_functions_each_has_its_place_and_references_go_along() -> None:
    schema = options_of([CLOCK, WEATHER], ToolChoice("required"), {})[0]["structured_outputs"]["json"]
    clock, weather = schema["anyOf"]
    assert (clock["properties"]["name"], weather["properties"]["name"]) == ({"const": "clock"}, {"const": "weather"})
    arguments = weather["properties"]["arguments"]
    reference = arguments["properties"]["city"]["$ref"]
    assert reference == "#/anyOf/1/properties/arguments/$defs/city"
    found: Any = schema
    for step in reference.removeprefix("#/").split("/"):
        found = found[int(step)] if isinstance(found, list) else found[step]
    assert found == {"type": "string"}


def test_a_choice_that_cannot_be() -> None:
    for functions, choice in (([], ToolChoice("required")), ([CLOCK], ToolChoice("required", "weather"))):
        with pytest.raises(Fault) as raised:
            options_of(functions, choice, {})
        assert raised.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("name", "text"),
    [("weather", '{"city": "Paris"}'), (None, '{"name": "weather", "arguments": {"city": "Paris"}}')],
)
def test_the_answer_becomes_a_call_in_a_stream_and_whole(name: str | None, text: str) -> None:
    forced = ForcedCall(name)
    assert [forced.delta(delta(piece)) for piece in (text[:7], text[7:])] == [None, None]
    last, end = forced.done(done())
    assert last is not None
    _, whole = ForcedCall(name).done(done(text=text))
    for (call,), reason in ((last.tool_calls, end.finish_reason), (whole.tool_calls, whole.finish_reason)):
        assert (call.function.name, reason) == ("weather", "tool_calls")
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert whole.text == ""


def test_what_is_thought_is_still_told() -> None:
    thought = delta("{", reasoning="hm")
    assert ForcedCall("f").delta(thought) == replace(thought, text="")


@pytest.mark.parametrize("text", ['{"city": "Pa', "[]", '"x"', '{"name": "f"}'])
def test_half_a_call_is_text(text: str) -> None:
    end = done("length", text=text)
    assert ForcedCall("f").done(end)[1] == end
    forced = ForcedCall(None)
    forced.delta(delta(text))
    last, told = forced.done(done("length"))
    assert last is not None
    assert (last.text, told.finish_reason) == (text, "length")
