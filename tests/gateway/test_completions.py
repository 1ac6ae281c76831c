"""OpenAI's completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.codec import decode_request
from scheduler.gateway import completions
from scheduler.gateway.dialect import Order
from scheduler.gateway.faults import Fault
from tests.gateway.told import delta, done, logprob, order_of, streamed

DIALECT = (completions.CompletionBody, completions.order)


def order(**fields: Any) -> Order:
    return order_of(DIALECT, json.dumps({"prompt": "a", **fields}))


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("a", [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]),
    ],
)
def test_prompts(prompt: Any, asked: list[dict[str, Any]]) -> None:
    submits = order(prompt=prompt).submits
    assert list(submits) == asked
    for options in submits:
        decode_request({"type": "submit", "id": 1, **options})


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"logprobs": 0}, {"logprobs": True}),
        ({"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"logprobs": False}, {}),
        ({"echo": True}, {"echo": True}),
        ({"best_of": 2, "n": 2}, {"n": 2}),
        ({"suffix": None}, {}),
    ],
)
def test_fields(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    (options,) = order(**fields).submits
    assert options == {"prompt": "a", **asked}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "b"}, "suffix"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Fault) as raised:
        order(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_a_stream_adds_up_to_the_whole() -> None:
    asked: dict[str, Any] = {"prompt": ["a", "b"], "logprobs": 1, "stream_options": {"include_usage": True}}
    told = streamed(
        order(**asked),
        [
            (0, delta("ax", logprobs=(logprob("x"),))),
            (1, delta("by", logprobs=(logprob("y"),))),
            (0, delta("zz", logprobs=(logprob("zz"),))),
        ],
        [done("length"), done("length")],
    )
    whole = order(**asked).reply.whole(
        [
            done("length", text="axzz", logprobs=(logprob("x"), logprob("zz"))),
            done("length", text="by", logprobs=(logprob("y"),)),
        ]
    )
    *chunks, last, _ = told
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in mine) == choice["text"]
        offsets = [offset for each in mine if each["logprobs"] for offset in each["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert whole["choices"][0]["logprobs"]["text_offset"] == [1, 2]
    assert whole["choices"][0]["logprobs"]["top_logprobs"][1] == {"zz": -0.5, "x": -2.0}
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 10
