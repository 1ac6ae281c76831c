"""OpenAI's responses: conversations in, items out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.gateway import responses
from scheduler.gateway.dialect import Order
from scheduler.gateway.faults import Fault
from tests.gateway.told import call, delta, done, events, logprob, order_of, submit_of

DIALECT = (responses.ResponsesBody, responses.order)


def order(**fields: Any) -> Order:
    return order_of(DIALECT, json.dumps({"input": "hi", **fields}))


def submit(**fields: Any) -> dict[str, Any]:
    return submit_of(order(**fields))


def test_a_conversation_with_calls() -> None:
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    turns = submit(input=said, instructions="be brief")["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "tool"]
    assert turns[2]["content"] == "let me see"
    assert [made["id"] for made in turns[2]["tool_calls"]] == ["1", "2"]
    assert [turn.get("tool_call_id") for turn in turns[3:]] == ["1", "2"]
    assert turns[4]["content"] == "sun"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, {}),
        ({"max_output_tokens": 3}, {"max_tokens": 3}),
        ({"text": {"format": {"type": "json_object"}}}, {"structured_outputs": {"json_object": True}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
            {"structured_outputs": {"json": {"type": "object"}}},
        ),
        ({"reasoning": {"effort": "low"}}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"store": True, "previous_response_id": None, "truncation": "auto"}, {}),
    ],
)
def test_fields(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    assert submit(**fields) == {"messages": [{"role": "user", "content": "hi"}], **asked}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": {"type": "x"}}]}, "input[0].content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Fault) as raised:
        order(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


DELTAS = [
    (0, delta(reasoning="h")),
    (0, delta("m", reasoning="m", logprobs=(logprob("m"),))),
    (0, delta("n", logprobs=(logprob("n"),))),
    (0, delta(tool_calls=(call(), call("clock", "{}", "call_2")))),
]


def test_items_begin_grow_and_end() -> None:
    told = events(order(top_logprobs=1), DELTAS, [done("tool_calls")])
    kinds = [event.name.removeprefix("response.") for event in told if event.name]
    part = ["output_item.added", "content_part.added"]
    called = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", *part, "output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", *called, *called, "completed"),
    ]
    data: list[Any] = [event.data for event in told]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    assert [each["type"] for each in data] == [event.name for event in told]
    added = [each["output_index"] for each in data if each["type"] == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    assert [item["type"] for item in data[-1]["response"]["output"]] == ["reasoning", "message", *["function_call"] * 2]


def test_the_whole_is_what_the_last_event_holds() -> None:
    last: Any = events(order(top_logprobs=1), DELTAS, [done("tool_calls")])[-1].data
    calls = (call(), call("clock", "{}", "call_2"))
    whole = order(top_logprobs=1).reply.whole(
        [done("tool_calls", text="mn", reasoning="hm", tool_calls=calls, logprobs=(logprob("m"), logprob("n")))]
    )
    streamed = last["response"]
    for response in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            del response[name]
        for item in response["output"]:
            del item["id"]
    assert whole == streamed
    assert whole["output"][1]["content"][0]["text"] == "mn"


def test_an_answer_that_is_cut_off() -> None:
    whole = order().reply.whole([done("length", text="m")])
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"


def test_a_failure_ends_the_item_that_grows() -> None:
    reply = order().reply
    for event in (*reply.begin(), *reply.delta(0, delta("m"))):
        assert event.name != "response.failed"
    told = list(reply.fail(Fault(500, "it broke")))
    assert told[-1].name == "response.failed"
    said: Any = told[-1].data
    assert said["response"]["error"]["message"] == "it broke"
    assert said["response"]["output"][0]["status"] == "incomplete"
