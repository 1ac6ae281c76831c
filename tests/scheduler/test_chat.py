"""A chat as a template takes it."""

import pytest

from scheduler.chat import chat_of
from scheduler.errors import Refused
from scheduler.protocol import FunctionCall, Message, ToolCall


def call(arguments: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("c1", FunctionCall("weather", arguments)),))


def test_what_is_not_said_is_not_there() -> None:
    """Templates ask whether a turn has a key."""
    assert chat_of([Message("user", "hi")]) == [{"role": "user", "content": "hi"}]


def test_calls_and_their_results() -> None:
    chat = chat_of([call('{"city": "Köln"}'), Message("tool", "9 degrees", name="weather", tool_call_id="c1")])
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert chat == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "9 degrees", "name": "weather", "tool_call_id": "c1"},
    ]
    assert chat_of([call("")])[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", "city=Köln", "[" * 100_000])
def test_arguments_that_are_no_json_are_refused(arguments: str) -> None:
    with pytest.raises(Refused, match=r"messages\[1\].tool_calls: the arguments of weather are no JSON"):
        chat_of([Message("user", "hi"), call(arguments)])
