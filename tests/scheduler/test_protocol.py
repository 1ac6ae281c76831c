import math
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import protocol
from scheduler.codec import FIELDS, BadMessage, decode_reply, decode_request, encode
from scheduler.protocol import (
    ERROR_CODES,
    REPLIES,
    REQUESTS,
    Adapters,
    AskStatus,
    Cancel,
    ClientHello,
    Delta,
    Done,
    Error,
    Flush,
    Flushed,
    FunctionCall,
    Hello,
    LoadAdapter,
    Message,
    Ping,
    Pong,
    Status,
    StructuredOutputs,
    Submit,
    Timings,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    UnloadAdapter,
    Usage,
)
from store.framing import FrameDecoder, encode_frame

LAW = settings(deadline=None)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def tuples(values: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=least, max_size=most).map(tuple)


ids = st.text(min_size=1, max_size=128) | st.integers(-(2**63), 2**64 - 1)
counts = st.integers(0, 2**63 - 1)
seconds = st.floats(0, allow_infinity=False)
tokens = st.integers(0, 2**31 - 1)
variables = st.dictionaries(st.text(), st.booleans() | st.text() | st.lists(st.integers(0, 9)), max_size=4)

answers = st.fixed_dictionaries(
    {
        "id": ids,
        "max_tokens": maybe(st.integers(1, 2**31 - 1)),
        "temperature": maybe(st.floats(0, 100)),
        "top_p": maybe(st.floats(0, 1, exclude_min=True)),
        "top_k": maybe(st.integers(0, 2**31 - 1)),
        "min_p": maybe(st.floats(0, 1)),
        "seed": maybe(st.integers(0, 2**63 - 1)),
        "stop": tuples(st.text(min_size=1, max_size=256), 0, 4),
        "stop_token_ids": tuples(tokens, 0, 4),
        "ignore_eos": st.booleans(),
        "stream": st.booleans(),
        "xtc_probability": st.floats(0, 1),
        "xtc_threshold": st.floats(0, 0.5),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-100, 100),
        "frequency_context_size": st.integers(1, 2**31 - 1),
        "logit_bias": maybe(st.dictionaries(tokens.map(str), st.floats(-100, 100), max_size=4)),
        "n": st.integers(1, 128),
        "logprobs": st.just(True),
        "top_logprobs": st.integers(0, 20),
        "adapter": maybe(st.text(min_size=1, max_size=128)),
    }
)
shapes = st.one_of(
    st.builds(lambda schema: StructuredOutputs(json=schema), variables),
    st.just(StructuredOutputs(json_object=True)),
    st.builds(lambda text: StructuredOutputs(regex=text), st.text(min_size=1)),
    st.builds(lambda texts: StructuredOutputs(choice=texts), tuples(st.text(min_size=1), 1, 4)),
    st.builds(lambda text: StructuredOutputs(grammar=text), st.text(min_size=1)),
)
names = st.text(min_size=1, max_size=128)
calls = st.builds(ToolCall, names, st.builds(FunctionCall, names, st.text()))
messages = st.one_of(
    st.builds(Message, st.text(min_size=1, max_size=64), st.text(min_size=1), maybe(names)),
    st.builds(lambda called: Message("assistant", tool_calls=called), tuples(calls, 1, 3)),
    st.builds(lambda id: Message("tool", "5", tool_call_id=id), names),
)
prompts = (
    st.fixed_dictionaries({"prompt": st.text(min_size=1), "echo": st.booleans(), "min_tokens": st.integers(0, 9)})
    | st.builds(lambda shape: {"prompt": "a", "structured_outputs": shape, "ignore_eos": False}, shapes)
    | st.fixed_dictionaries({"prompt_token_ids": tuples(tokens, 1, 9)})
    | st.fixed_dictionaries(
        {
            "messages": tuples(messages, 1, 4),
            "tools": tuples(variables, 0, 3),
            "chat_template_kwargs": maybe(variables),
        }
    )
)
logprobs = st.floats(allow_nan=False, allow_infinity=False)
tops = st.builds(TopLogprob, tokens, st.text(), logprobs)
usages = st.builds(Usage, counts, counts, counts)
timings = st.builds(Timings, seconds, seconds, seconds, seconds, maybe(seconds))

parts: dict[str, Any] = {
    "index": counts,
    "reasoning": st.text(),
    "tool_calls": tuples(calls, 0, 2),
    "logprobs": tuples(st.builds(TokenLogprob, tokens, st.text(), logprobs, tuples(tops, 0, 3)), 0, 3),
}

requests = {
    ClientHello: st.builds(ClientHello, counts, maybe(st.text(max_size=256))),
    Submit: st.builds(lambda answer, prompt: Submit(**{**answer, **prompt}), answers, prompts),
    Cancel: st.builds(Cancel, ids),
    AskStatus: st.just(AskStatus()),
    Ping: st.builds(Ping, maybe(ids)),
    Flush: st.builds(Flush),
    LoadAdapter: st.builds(LoadAdapter, ids, names, st.text(max_size=99).map(lambda path: f"/{path}")),
    UnloadAdapter: st.builds(UnloadAdapter, ids, names),
}
replies = {
    Hello: st.builds(Hello, counts, st.text(), st.text()),
    Delta: st.builds(Delta, ids, st.text(), tuples(tokens, 0, 9), **parts),
    Done: st.builds(
        Done,
        ids,
        st.sampled_from(["stop", "tool_calls", "length", "cancelled"]),
        usages,
        timings,
        maybe(st.text() | tokens),
        maybe(st.text()),
        **parts,
    ),
    Error: st.builds(Error, st.sampled_from(sorted(ERROR_CODES)), st.text(), maybe(ids), maybe(seconds), maybe(counts)),
    Status: st.builds(Status, variables),
    Pong: st.builds(Pong, maybe(ids)),
    Flushed: st.builds(Flushed, st.booleans()),
    Adapters: st.builds(Adapters, ids, tuples(names, 0, 3)),
}


def over_the_wire(message: Any) -> dict[str, Any]:
    decoder = FrameDecoder()
    decoder.feed(encode_frame(encode(message)))
    return next(decoder)


@LAW
@given(st.one_of(*requests.values()))
def test_a_request_is_the_same_after_the_wire(message: protocol.Request) -> None:
    assert decode_request(over_the_wire(message)) == message


@LAW
@given(st.one_of(*replies.values()), st.text(min_size=20))
def test_a_reply_is_the_same_after_the_wire_whatever_is_added(message: protocol.Reply, new: str) -> None:
    assert decode_reply(over_the_wire(message) | {new: 1}) == message


@LAW
@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.integers())))
def test_any_map_is_a_message_or_bad(fields: dict[str, Any]) -> None:
    for tag in [None, *REQUESTS]:
        assert code_of(fields if tag is None else fields | {"type": tag}) in (None, "bad_request", "unknown_type")


def test_the_laws_cover_every_message() -> None:
    assert set(requests) == set(REQUESTS.values())
    assert set(replies) == set(REPLIES.values())


def test_every_field_has_a_check_and_a_line_in_the_table() -> None:
    for cls, checks in FIELDS.items():
        assert set(checks) == {field.name for field in fields(cls)}
    table = protocol.__doc__ or ""
    for table_part, messages in (("client to daemon", REQUESTS), ("daemon to client", REPLIES)):
        part = table[table.index(f"    {table_part}\n") :]
        for tag, cls in messages.items():
            entry = re.split(r"\n    \w|\n\n", part[re.search(rf"\n    {tag}\b", part).start() + 1 :])[0]  # type: ignore[union-attr]
            for field in fields(cls):
                assert re.search(rf"\b{field.name}\b", entry), f"{tag}.{field.name} is not in the table"
    assert set(re.findall(r"^    (\w+) +the (?:connection|message|request)", table, re.MULTILINE)) == ERROR_CODES


def test_what_is_at_its_default_is_not_sent() -> None:
    assert encode(Submit("a", prompt="b")) == {"type": "submit", "id": "a", "prompt": "b"}
    assert encode(Delta(1, "", ())) == {"type": "delta", "id": 1, "text": "", "token_ids": []}
    assert encode(Error("internal", "no")) == {"type": "error", "code": "internal", "message": "no"}


def test_what_is_left_out_and_what_is_nil_are_the_same() -> None:
    left_out = {"type": "submit", "id": 1, "prompt": "a"}
    assert decode_request(left_out | {"seed": None, "stop": None, "stream": None}) == decode_request(left_out)


def test_one_stop_is_as_good_as_a_list_of_one() -> None:
    assert decode_request({"type": "submit", "id": 1, "prompt": "a", "stop": "b"}) == Submit(1, "a", stop=("b",))


def code_of(fields: dict[str, Any]) -> str | None:
    try:
        decode_request(fields)
    except BadMessage as bad:
        return bad.code
    return None


def submit(**changes: Any) -> dict[str, Any]:
    return {"type": "submit", "id": 1, "prompt": "a"} | changes


def chat(*messages: Any, **changes: Any) -> dict[str, Any]:
    return {"type": "submit", "id": 1, "messages": list(messages)} | changes


BAD = [
    ({}, "has no"),
    ({"type": 1}, "type must be a string"),
    ({"type": []}, "type must be a string"),
    ({"type": "hello"}, "version is missing"),
    ({"type": "hello", "version": "1"}, "hello.version must be an integer"),
    ({"type": "hello", "version": True}, "not true"),
    ({"type": "hello", "version": 1, "client": "x" * 257}, "257 characters long, the most is 256"),
    ({"type": "status", "verbose": True}, "status has no field 'verbose': it has no field"),
    ({"type": "cancel"}, "cancel.id is missing"),
    ({"type": "ping", "nonce": 1.5}, "ping.nonce must be"),
    ({"type": "submit", "prompt": "a"}, "submit.id is missing"),
    (submit(id=None), "submit.id is missing"),
    (submit(id=True), "not true"),
    (submit(id=1.0), "not 1.0"),
    (submit(id=b"x"), "not binary"),
    (submit(id=""), "1 to 128 characters"),
    (submit(id="x" * 129), "1 to 128 characters"),
    (submit(prompt=""), "submit.prompt is empty"),
    (submit(prompt=["a"]), "must be a string, not an array of 1"),
    (submit(prompt=None), "takes one of prompt, messages and prompt_token_ids, not none"),
    (submit(prompt_token_ids=[1]), "not prompt and prompt_token_ids"),
    (submit(prompt=None, prompt_token_ids=[]), "prompt_token_ids is empty"),
    (submit(prompt=None, prompt_token_ids="12"), "must be an array"),
    (submit(prompt=None, prompt_token_ids=[1, -1]), r"prompt_token_ids\[1\] must be an integer from 0"),
    (submit(prompt=None, prompt_token_ids=[1, True]), r"prompt_token_ids\[1\].*not true"),
    (submit(prompt=None, prompt_token_ids=[2**31]), r"prompt_token_ids\[0\]"),
    (submit(prompt=None, prompt_token_ids=[1.0]), r"prompt_token_ids\[0\].*not 1.0"),
    (submit(prompt=None, prompt_token_ids=[1] * (2**20 + 1)), "has 1048577 items, the most is 1048576"),
    (chat(), "messages is empty"),
    (chat("hi"), r"messages\[0\] must be a map"),
    (chat({"role": "user"}), r"messages\[0\].content is missing"),
    (chat({"role": "user", "content": "a"}, {"role": "", "content": "a"}), r"messages\[1\].role is empty"),
    (chat({"role": "user", "content": ["a"]}), r"messages\[0\].content must be a string"),
    (chat({"role": "user", "content": "a", "image": "b"}), r"messages\[0\] has no field 'image'"),
    (chat({"role": "tool", "content": "a", "tool_call_id": 7}), r"messages\[0\].tool_call_id must be a string"),
    (chat({"role": "assistant", "tool_calls": []}), r"messages\[0\].content is missing"),
    (chat({"role": "assistant", "tool_calls": [{"id": "a"}]}), r"tool_calls\[0\].function is missing"),
    (chat({"role": "u", "content": "a"}, echo=True), "submit.echo goes with prompt"),
    (chat({"role": "u", "content": "a"}, tools=[1]), r"submit.tools\[0\] must be a map"),
    (chat({"role": "u", "content": "a"}, tool_choice="required"), "must be one of auto, none, not 'required'"),
    (submit(tools=[{}]), "submit.tools go with messages"),
    (submit(xtc_threshold=0.6), "xtc_threshold must be a finite number from 0 to 0.5"),
    (submit(repetition_penalty=0), "1 switches it off"),
    (submit(presence_penalty="1"), "0 switches it off"),
    (submit(frequency_context_size=0), "frequency_context_size must be an integer from 1"),
    (submit(logit_bias={"a": 1}), "logit_bias has the key 'a', which is no token id"),
    (submit(logit_bias={"-1": 1}), "logit_bias has the key '-1'"),
    (submit(logit_bias={"9" * 11: 1}), "which is no token id"),
    (submit(logit_bias={"5": 101}), r"logit_bias\[5\] must be a finite number from -100 to 100"),
    (submit(logit_bias=[[5, 1]]), "a map of at most 1024 token ids"),
    (submit(n=0), "n must be an integer from 1 to 128"),
    (submit(top_logprobs=5), "top_logprobs needs logprobs"),
    (submit(logprobs=True, top_logprobs=21), "from 0 to 20"),
    (submit(structured_outputs={}), "takes one of json, json_object, regex, choice, grammar, not none"),
    (submit(structured_outputs={"json": {}, "regex": "a"}), "not json and regex"),
    (submit(structured_outputs={"json": True}), "structured_outputs.json must be a map"),
    (submit(structured_outputs={"json_object": False}), "json_object must be true"),
    (submit(structured_outputs={"jsn": {}}), 'did you mean "json"'),
    (submit(structured_outputs={"choice": []}), "choice is empty"),
    (submit(structured_outputs={"regex": "a"}, ignore_eos=True), "neither ignore_eos nor min_tokens"),
    (submit(structured_outputs={"regex": "a"}, min_tokens=1), "neither ignore_eos nor min_tokens"),
    (chat({"role": "user", "content": "a"}, chat_template_kwargs=[]), "chat_template_kwargs must be a map"),
    (submit(chat_template_kwargs={}), "go with messages"),
    (submit(max_tokens=0), "not 0: leave it out for the daemon's default, or ask for 1 at least"),
    (submit(max_tokens=-1), "max_tokens must be an integer from 1"),
    (submit(max_tokens=True), "not true"),
    (submit(max_tokens="9"), "not '9'"),
    (submit(max_tokens=1.0), "not 1.0"),
    (submit(temperature=math.nan), "temperature must be a finite number from 0 to 100, not nan"),
    (submit(temperature=math.inf), "not inf"),
    (submit(temperature=-0.1), "not -0.1"),
    (submit(temperature=True), "not true"),
    (submit(temperature="hot"), "not 'hot'"),
    (submit(top_p=0), "above 0 and at most 1, not 0"),
    (submit(top_p=1.01), "not 1.01"),
    (submit(top_p=math.nan), "not nan"),
    (submit(top_k=-1), "0 switches it off"),
    (submit(min_p=2), "0 switches it off"),
    (submit(seed=-1), "seed must be an integer"),
    (submit(seed=2**63), "seed must be an integer"),
    (submit(stop=""), "submit.stop is empty"),
    (submit(stop=["a", ""]), r"stop\[1\] is empty"),
    (submit(stop=["a"] * 33), "the most is 32"),
    (submit(stop=1), "stop must be an array"),
    (submit(stop_token_ids=[-1]), r"stop_token_ids\[0\]"),
    (submit(stop_token_ids=3), "must be an array"),
    (submit(ignore_eos=1), "must be true or false, not 1"),
    (submit(stream="yes"), "must be true or false"),
    (submit(max_new_tokens=5), "no field 'max_new_tokens': did you mean \"max_tokens\""),
    (submit(frobnicate=5), "no field 'frobnicate': it has id, prompt"),
    (submit(**{"x" * 100_000: 5}), r"no field 'x{40}'\.\.\.: it has"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=range(len(BAD)))
def test_a_bad_message_is_refused_with_a_sentence_that_names_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadMessage, match=says) as raised:
        decode_request(fields)
    assert raised.value.code == "bad_request"
    assert len(raised.value.message) < 400
    readable = type(fields.get("id")) in (int, str) and fields["id"] not in ("", "x" * 129)
    assert raised.value.id == (fields["id"] if readable else None)


def test_a_type_that_is_not_there_has_a_code_of_its_own() -> None:
    with pytest.raises(BadMessage, match="no type 'generate': it must be one of hello, submit") as raised:
        decode_request({"type": "generate", "id": "x"})
    assert raised.value.code == "unknown_type"
    assert raised.value.id == "x"


def test_a_reply_is_checked_too() -> None:
    done = encode(Done(1, "stop", Usage(1, 2, 0), Timings(0, 0, 0, 0)))
    for change in ({"finish_reason": "eos"}, {"usage": {}}, {"usage": 3}, {"timings": {"queued_s": -1}}, {"id": None}):
        with pytest.raises(BadMessage):
            decode_reply(done | change)
