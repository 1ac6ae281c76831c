"""OpenAI's own package, as it comes, against the gateway and the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from pydantic import BaseModel

from scheduler.client import Client
from tests.e2e.daemon import Daemon, idle, reports
from tests.gateway.process import GatewayProcess, gateway_to

openai = pytest.importorskip("openai", reason="needs the dependency group gateway-test")

MODEL = "SmolLM2-135M-Instruct"
COLOUR: list[Any] = [{"role": "user", "content": "Name a colour."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "clock", "parameters": {**CITY, "additionalProperties": False}}}


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "laned"


def test_a_chat(client: Any) -> None:
    said = client.chat.completions.create(model=MODEL, messages=COLOUR, max_completion_tokens=5, temperature=0)
    (choice,) = said.choices
    assert choice.message.role == "assistant"
    assert choice.message.content.startswith("The colour")
    assert (choice.finish_reason, said.usage.completion_tokens, said.model) == ("length", 5, MODEL)
    assert said.usage.total_tokens == said.usage.prompt_tokens + 5
    assert said.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_says_what_the_whole_says(client: Any) -> None:
    options = {"model": MODEL, "messages": COLOUR, "max_tokens": 6, "seed": 7, "temperature": 0.8}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_answers_and_log_probabilities(client: Any) -> None:
    said = client.chat.completions.create(
        model=MODEL, messages=COLOUR, max_tokens=3, n=3, logprobs=True, top_logprobs=2, temperature=1, seed=3
    )
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    assert said.usage.completion_tokens == 9
    for choice in said.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


def test_a_stop_ends_before_itself(client: Any) -> None:
    said = client.chat.completions.create(model=MODEL, messages=COLOUR, max_tokens=16, temperature=0, stop=[" is"])
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == ("The colour", "stop")


def test_fields_of_other_servers(client: Any) -> None:
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "cache_salt": "mine"}
    extra |= {"chat_template_kwargs": {"enable_thinking": False}, "ignore_eos": True, "xtc_probability": 0.1}
    said = client.chat.completions.create(
        model=MODEL, messages=COLOUR, max_tokens=4, logit_bias={"28": -100}, presence_penalty=0.5, extra_body=extra
    )
    assert said.usage.completion_tokens == 4


def test_a_schema_is_kept_to(client: Any) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": {**schema, "additionalProperties": False}}}
    said = client.chat.completions.create(model=MODEL, messages=COLOUR, response_format=wanted, max_tokens=32)
    assert json.loads(said.choices[0].message.content)["colour"] in ("red", "blue")


def test_a_pydantic_model_is_filled_in(client: Any) -> None:
    class Shade(BaseModel):
        is_dark: bool

    said = client.chat.completions.parse(model=MODEL, messages=COLOUR, response_format=Shade, max_tokens=32)
    assert isinstance(said.choices[0].message.parsed, Shade)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_a_call_that_is_demanded(client: Any, choice: Any, stream: bool) -> None:
    options = {"model": MODEL, "messages": COLOUR, "tools": [WEATHER, TIME], "tool_choice": choice, "max_tokens": 100}
    if stream:
        with client.chat.completions.stream(**options) as events:
            said = events.get_final_completion()
    else:
        said = client.chat.completions.create(**options)
    (call,) = said.choices[0].message.tool_calls
    assert said.choices[0].finish_reason == "tool_calls"
    assert call.function.name in (("weather", "clock") if choice == "required" else ("clock",))
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    answer = [{"role": "assistant", "tool_calls": [call.model_dump()]}]
    answer += [{"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    again = client.chat.completions.create(model=MODEL, messages=[*COLOUR, *answer], max_tokens=2)
    assert again.choices[0].message.content


def test_a_call_that_this_model_cannot_make(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="calls no functions"):
        client.chat.completions.create(model=MODEL, messages=COLOUR, tools=[WEATHER])


def test_completions_of_several_prompts(client: Any) -> None:
    options: Any = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    prompts = ["The capital of France is", "One, two,"]
    said = client.completions.create(**options, prompt=prompts, echo=True, logprobs=1)
    assert [choice.index for choice in said.choices] == [0, 1]
    assert said.choices[0].text.startswith("The capital of France is Paris")
    assert said.choices[1].text.startswith("One, two,")
    assert len(said.choices[0].logprobs.tokens) == 3
    assert said.choices[0].logprobs.text_offset[0] == len(prompts[0])
    chunks = client.completions.create(**options, prompt="One, two,", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == said.choices[1].text.removeprefix("One, two,")


def test_responses(client: Any) -> None:
    said = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=5, temperature=0)
    assert said.output_text.startswith("The colour")
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(
        model=MODEL, instructions="Be brief.", input=COLOUR, max_output_tokens=5, temperature=0
    ) as stream:
        events = list(stream)
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output[0].content[0].text
    assert final.usage.output_tokens == 5


def test_a_response_that_calls(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}
    said = client.responses.create(
        model=MODEL, input="Weather in Paris?", tools=[tool], tool_choice="required", max_output_tokens=64
    )
    (call,) = said.output
    assert (call.type, call.name) == ("function_call", "weather")
    results: list[Any] = [call.model_dump(exclude_none=True)]
    results += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    again = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Weather?"}, *results], max_output_tokens=3
    )
    assert again.output_text


def test_a_response_that_is_parsed(client: Any) -> None:
    class Shade(BaseModel):
        is_dark: bool

    said = client.responses.parse(model=MODEL, input="Name a colour.", text_format=Shade, max_output_tokens=32)
    assert isinstance(said.output_parsed, Shade)


LONG = [{"role": "user", "content": "word " * 9000}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}


@pytest.mark.parametrize(
    ("options", "error", "status", "code"),
    [
        ({"model": "gpt-none"}, "NotFoundError", 404, "model_not_found"),
        ({"temperature": -1}, "BadRequestError", 400, None),
        ({"messages": LONG}, "BadRequestError", 400, "context_length_exceeded"),
        ({"extra_body": {"max_token": 3}}, "BadRequestError", 400, None),
        ({"messages": PICTURE}, "BadRequestError", 400, None),
        ({"response_format": NO_SCHEMA}, "BadRequestError", 400, "bad_request"),
    ],
)
def test_errors(client: Any, options: Any, error: str, status: int, code: str | None) -> None:
    with pytest.raises(getattr(openai, error)) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": COLOUR, **options})
    assert raised.value.status_code == status
    assert raised.value.code == code
    assert raised.value.body["message"]
    assert raised.value.request_id


def test_a_key_is_asked_for(real_daemon: Daemon, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# the only one\nsecret  # for us\n")
    with gateway_to(tmp_path, real_daemon.socket, "--api-key-file", str(keys)) as locked:
        url = f"{locked.url}/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="guess", max_retries=0).models.list()
        assert openai.OpenAI(base_url=url, api_key="secret", max_retries=0).models.list().data[0].id == MODEL


def test_a_client_that_goes_cancels(client: Any, real_daemon: Daemon) -> None:
    options = {"model": MODEL, "messages": COLOUR, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(**options, stream=True)
    for chunk, _ in zip(stream, range(3), strict=False):
        assert chunk.object == "chat.completion.chunk"

    async def settled() -> None:
        async with Client(real_daemon.socket) as asking:
            await reports(asking, lambda report: report["rows"]["running"] == 1)
            stream.close()
            await idle(asking)

    trio.run(settled)
