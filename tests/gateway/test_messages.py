"""Anthropic's messages: blocks in, blocks out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.gateway import messages
from scheduler.gateway.dialect import Order
from scheduler.gateway.faults import Fault
from tests.gateway.told import call, delta, done, events, order_of, submit_of, usage

DIALECT = (messages.MessagesBody, messages.order)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


def order(**fields: Any) -> Order:
    return order_of(DIALECT, json.dumps({"messages": HI, "max_tokens": 9, **fields}))


def submit(**fields: Any) -> dict[str, Any]:
    return submit_of(order(**fields))


def test_a_conversation_with_calls() -> None:
    said = [
        {"role": "user", "content": [{"type": "text", "text": "wea"}, {"type": "text", "text": "ther?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    turns = submit(messages=said, system=[{"type": "text", "text": "be brief", "cache_control": {}}])["messages"]
    function = {"name": "f", "arguments": '{"city": "Paris"}'}
    assert turns == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}),
        ({"stop_sequences": ["a"], "metadata": {"user_id": "x"}}, {"stop": ["a"]}),
        ({"stop_sequences": []}, {}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"output_config": {"effort": "low"}}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"structured_outputs": {"json": {"type": "object"}}},
        ),
    ],
)
def test_fields(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    assert submit(**fields) == {"messages": HI, "max_tokens": 9, **asked}


def test_an_answer_that_is_begun_goes_on() -> None:
    variables = submit(messages=[*HI, {"role": "assistant", "content": "The"}])["chat_template_kwargs"]
    assert variables == {"add_generation_prompt": False, "continue_final_message": True}


def test_tools_are_shown_as_templates_want_them() -> None:
    (shown,) = submit(tools=[{**TOOL, "description": "d"}])["tools"]
    assert shown == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": TOOL["input_schema"]},
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"temprature": 1}, "temprature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Fault) as raised:
        order(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


DELTAS = [(0, delta(reasoning="h")), (0, delta("m", reasoning="m")), (0, delta("n")), (0, delta(tool_calls=(call(),)))]


def test_blocks_begin_grow_and_end() -> None:
    told = events(order(), DELTAS, [done("tool_calls", usage=usage(5, 3, 2))])
    block = ("content_block_start", "content_block_delta")
    assert [event.name for event in told] == [
        "message_start",
        *(*block, "content_block_delta", "content_block_stop"),
        *(*block, "content_block_delta", "content_block_stop"),
        *(*block, "content_block_stop", "message_delta", "message_stop"),
    ]
    data: list[Any] = [event.data for event in told]
    assert [each["type"] for each in data] == [event.name for event in told]
    assert [each["index"] for each in data if "index" in each] == [0] * 4 + [1] * 4 + [2] * 3
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (data[-2]["usage"]["input_tokens"], data[-2]["usage"]["cache_read_input_tokens"]) == (3, 2)


def test_the_whole_has_the_same_blocks() -> None:
    whole = order().reply.whole([done("tool_calls", text="mn", reasoning="hm", tool_calls=(call(),))])
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "mn"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}},
    ]
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (done("stop", stop_reason=2), "end_turn", None),
        (done("stop", stop_reason="!"), "stop_sequence", "!"),
        (done("length"), "max_tokens", None),
    ],
)
def test_why_it_stopped(end: Any, reason: str, sequence: str | None) -> None:
    whole = order().reply.whole([end])
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
