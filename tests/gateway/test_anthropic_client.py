"""Anthropic's own package, as it comes, against the gateway and the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.process import GatewayProcess

anthropic = pytest.importorskip("anthropic", reason="needs the dependency group gateway-test")

MODEL = "SmolLM2-135M-Instruct"
COLOUR: list[Any] = [{"role": "user", "content": "Name a colour."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": CITY}


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_message_and_the_same_in_a_stream(client: Any) -> None:
    options: Any = {"model": MODEL, "max_tokens": 5, "messages": COLOUR, "system": "Be brief."}
    options["extra_body"] = {"temperature": 0}
    said = client.messages.create(**options)
    assert (said.role, said.stop_reason, said.usage.output_tokens) == ("assistant", "max_tokens", 5)
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [text] == [block.text for block in said.content]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 5)
    read = [message.usage.input_tokens + message.usage.cache_read_input_tokens for message in (said, final)]
    assert read[0] == read[1] > 0


def test_a_stop_sequence_is_told(client: Any) -> None:
    said = client.messages.create(
        model=MODEL, max_tokens=16, messages=COLOUR, stop_sequences=[" is"], extra_body={"temperature": 0, "top_k": 5}
    )
    assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("The colour", "stop_sequence", " is")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_and_its_result(client: Any, choice: Any, stream: bool) -> None:
    question = [{"role": "user", "content": [{"type": "text", "text": "How is the weather in Paris?"}]}]
    options: Any = {"model": MODEL, "max_tokens": 64, "messages": question, "tools": [WEATHER], "tool_choice": choice}
    if stream:
        with client.messages.stream(**options) as events:
            said = events.get_final_message()
    else:
        said = client.messages.create(**options)
    (call,) = said.content
    assert (said.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [{"role": "assistant", "content": [call.model_dump(exclude_none=True)]}]
    turns += [{"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    again = client.messages.create(model=MODEL, max_tokens=3, messages=[*question, *turns])
    assert again.content[0].text


def test_an_answer_that_is_begun_goes_on(client: Any) -> None:
    begun = [*COLOUR, {"role": "assistant", "content": "One colour is"}]
    said = client.messages.create(model=MODEL, max_tokens=4, messages=begun, extra_body={"temperature": 0})
    assert said.content[0].text.startswith(" ")


def test_a_schema_is_kept_to(client: Any) -> None:
    schema = {"type": "object", "properties": {"dark": {"type": "boolean"}}, "required": ["dark"]}
    wanted = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    said = client.messages.create(model=MODEL, max_tokens=32, messages=COLOUR, output_config=wanted)
    assert isinstance(json.loads(said.content[0].text)["dark"], bool)


@pytest.mark.parametrize(
    ("options", "error", "kind"),
    [
        ({"model": "claude-none"}, "NotFoundError", "not_found_error"),
        ({"extra_body": {"temperature": -1}}, "BadRequestError", "invalid_request_error"),
        ({"extra_body": {"temprature": 3}}, "BadRequestError", "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "BadRequestError", "invalid_request_error"),
    ],
)
def test_errors(client: Any, options: Any, error: str, kind: str) -> None:
    with pytest.raises(getattr(anthropic, error)) as raised:
        client.messages.create(**{"model": MODEL, "messages": COLOUR, "max_tokens": 3, **options})
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == kind
    assert raised.value.request_id == raised.value.body["request_id"]
