"""OpenAI's chats: what a body asks for, and how answers are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.gateway import chat
from scheduler.gateway.dialect import Order
from scheduler.gateway.faults import Fault
from tests.gateway.told import call, delta, done, logprob, order_of, streamed, submit_of, usage

DIALECT = (chat.ChatBody, chat.order)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def order(**fields: Any) -> Order:
    return order_of(DIALECT, json.dumps({"messages": HI, **fields}))


def submit(**fields: Any) -> dict[str, Any]:
    return submit_of(order(**fields))


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, {}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 3, "max_completion_tokens": 4}, {"max_tokens": 4}),
        (
            {"temperature": 1, "top_p": 0.5, "top_k": 3, "min_p": 0},
            {"temperature": 1, "top_p": 0.5, "top_k": 3, "min_p": 0},
        ),
        ({"top_p": 0}, {"top_k": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"repetition_penalty": 0, "repetition_context_size": 0}, {}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"stop": "a"}, {"stop": "a"}),
        ({"stop": None, "n": None, "stream": None}, {}),
        ({"n": 2}, {"n": 2}),
        ({"adapters": "a"}, {"adapter": "a"}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100}}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"logprobs": False, "top_logprobs": -1}, {}),
        ({"user": "me", "store": True, "metadata": {"a": 1}, "not_invented_yet": 7}, {}),
        ({"functions": [], "audio": None}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
        ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"tools": [TOOL], "tool_choice": "none"}, {}),
    ],
)
def test_fields(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    assert submit(**fields) == {"messages": HI, **asked}


def test_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert submit(response_format=wanted)["structured_outputs"] == {"json": schema}


def test_messages_of_every_kind() -> None:
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "weather?", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "refusal": "no"},
    ]
    function = {"name": "f", "arguments": "{}"}
    assert submit(messages=said)["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "assistant", "content": "no"},
    ]


AUDIO = [{"role": "user", "content": [{"type": "input_audio"}]}]
OTHER = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "'user'"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content",
            "valid string, or Input should be a valid",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
            "input_audio",
        ),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": 101}, "temperature", "100"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"n": 0}, "n", "1"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"stop": ["a", ""]}, "stop[1]", "at least 1"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"functions": [{}]}, "functions", "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice", "g"),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "same",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(Fault) as raised:
        order(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert said in raised.value.message


def test_a_stream_adds_up_to_the_whole() -> None:
    asked = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    ends = [done("length", usage=usage(5, 2, 4)), done(index=1, stop_reason="!", usage=usage(5, 1, 5))]
    told = streamed(
        order(**asked),
        [
            (0, delta("a", logprobs=(logprob("a"),))),
            (1, delta("b", logprobs=(logprob("b"),))),
            (0, delta("c", logprobs=(logprob("c"),))),
        ],
        ends,
    )
    *chunks, last, end = told
    assert end == "[DONE]"
    texts = ["", ""]
    for chunk in chunks:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["ac", "b"]
    whole = order(**asked).reply.whole(
        [
            done("length", usage=usage(5, 2, 4), text="ac", logprobs=(logprob("a"), logprob("c"))),
            done(index=1, stop_reason="!", usage=usage(5, 1, 5), text="b", logprobs=(logprob("b"),)),
        ]
    )
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"]
    assert [choice["stop_reason"] for choice in whole["choices"]] == [None, "!"]
    assert [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]] == ["a", "c"]
    # What the second answer took over of the first is not what was remembered.
    assert last["usage"] == whole["usage"]
    assert whole["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4, "cached_memory_tokens": 4, "cached_disk_tokens": 0},
    }


def test_reasoning_and_calls() -> None:
    calls = (call(), call("clock", "{}", "call_2"))
    told = streamed(
        order(),
        [(0, delta(reasoning="hm")), (0, delta(tool_calls=calls[:1])), (0, delta(tool_calls=calls[1:]))],
        [done("tool_calls")],
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in told[1:-2]]
    assert deltas[0] == {"reasoning_content": "hm", "reasoning": "hm"}
    assert [each["tool_calls"][0]["index"] for each in deltas[1:]] == [0, 1]
    assert told[-2]["choices"][0]["finish_reason"] == "tool_calls"
    whole = order().reply.whole([done("tool_calls", text="", reasoning="hm", tool_calls=calls)])
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert [made["function"]["name"] for made in message["tool_calls"]] == ["weather", "clock"]


@pytest.mark.parametrize(("asked", "told"), [({}, None), ({"stop_token_ids": [7]}, 7), ({"stop_token_ids": [8]}, None)])
def test_an_end_token_is_no_stop_that_was_asked_for(asked: dict[str, Any], told: int | None) -> None:
    whole = order(**asked).reply.whole([done(stop_reason=7, text="")])
    assert whole["choices"][0]["stop_reason"] == told
