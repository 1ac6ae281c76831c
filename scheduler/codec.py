"""Between the maps of the wire and the messages of protocol.py: every field's check, decode and encode.

FIELDS is protocol.py's table said to the machine: what is in no table is no field. A class is never named by the wire.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from scheduler import protocol
from scheduler.checks import (
    MAX_NAME_CHARS,
    MAX_TOKEN_ID,
    Check,
    absolute_path,
    array,
    flag,
    identity,
    integer,
    mapping,
    number,
    one_of,
    refuse,
    share,
    shown,
    text,
    text_or_array,
    text_or_token,
    token_biases,
    token_ids,
)
from scheduler.errors import Refused

T = TypeVar("T")

# Of a message that has more, a sentence names so many.
FIELDS_SHOWN = 20


class BadMessage(Refused):
    """A message that is refused; id is the request it speaks of, as far as that could be read."""

    def __init__(self, code: str, message: str, id: protocol.RequestId | None) -> None:
        super().__init__(code, message)
        self.id = id


def decode_request(message: Mapping[str, Any]) -> protocol.Request:
    """The client's message of this map. Raises BadMessage."""
    return _decode(message, protocol.REQUESTS, strict=True)


def decode_reply(message: Mapping[str, Any]) -> protocol.Reply:
    """The daemon's message of this map, unknown fields left out. Raises BadMessage."""
    return _decode(message, protocol.REPLIES, strict=False)


def encode(message: protocol.Request | protocol.Reply) -> dict[str, Any]:
    """The map of a message. Fields at their default are left out."""
    return {"type": _TAGS[type(message)], **_plain(message)}


def _decode(message: Mapping[str, Any], table: Mapping[str, type[T]], strict: bool) -> T:
    given = dict(message)
    tag = given.pop("type", None)
    try:
        if tag is None:
            refuse(f'the message has no "type": it must be one of {", ".join(table)}')
        if type(tag) is not str:
            refuse(f"type must be a string, not {shown(tag)}")
        if tag not in table:
            raise Refused("unknown_type", f"there is no type {shown(tag)}: it must be one of {', '.join(table)}")
        return _build(table[tag], tag, given, strict)
    except Refused as refusal:
        raise BadMessage(refusal.code, refusal.message, _readable_id(given)) from None


def _build(cls: type[T], name: str, given: Mapping[str, Any], strict: bool) -> T:
    checks = FIELDS[cls]
    values = {}
    for key, value in given.items():
        if key not in checks:
            if strict:
                _refuse_unknown(name, key, checks)
        elif value is not None:
            values[key] = checks[key](f"{name}.{key}", value)
    for key in _REQUIRED[cls]:
        if key not in values:
            refuse(f"{name}.{key} is missing")
    if cls is protocol.Submit:
        _check_submit(values)
    if cls is protocol.Message and "content" not in values and not values.get("tool_calls"):
        refuse(f"{name}.content is missing")
    return cls(**values)


def _check_submit(values: Mapping[str, Any]) -> None:
    prompts = [key for key in ("prompt", "messages", "prompt_token_ids") if key in values]
    if len(prompts) != 1:
        refuse(f"submit takes one of prompt, messages and prompt_token_ids, not {' and '.join(prompts) or 'none'}")
    if "chat_template_kwargs" in values and prompts != ["messages"]:
        refuse(f"submit.chat_template_kwargs go with messages: {prompts[0]} goes through no chat template")
    if "tools" in values and prompts != ["messages"]:
        refuse(f"submit.tools go with messages: {prompts[0]} goes through no chat template")
    if values.get("echo") and prompts == ["messages"]:
        refuse("submit.echo goes with prompt or prompt_token_ids: what messages become is the template's affair")
    if values.get("top_logprobs") and not values.get("logprobs"):
        refuse("submit.top_logprobs needs logprobs to be true")
    if "structured_outputs" in values:
        _check_structured(values)


def _check_structured(values: Mapping[str, Any]) -> None:
    wanted = values["structured_outputs"]
    given = [name for name in FIELDS[protocol.StructuredOutputs] if getattr(wanted, name) is not None]
    if len(given) != 1:
        kinds = ", ".join(FIELDS[protocol.StructuredOutputs])
        refuse(f"submit.structured_outputs takes one of {kinds}, not {' and '.join(given) or 'none'}")
    if wanted.json_object is False:
        refuse("submit.structured_outputs.json_object must be true, or left out with structured_outputs")
    if values.get("ignore_eos") or values.get("min_tokens"):
        refuse("submit.structured_outputs end where they end: they take neither ignore_eos nor min_tokens")


def _refuse_unknown(name: str, key: str, checks: Mapping[str, Check]) -> None:
    near = difflib.get_close_matches(key[:MAX_NAME_CHARS], checks, n=1)
    some = ", ".join(list(checks)[:FIELDS_SHOWN]) or "no field"
    hint = (
        f'did you mean "{near[0]}"?' if near else f"it has {some}{' and others' if len(checks) > FIELDS_SHOWN else ''}"
    )
    refuse(f"{name} has no field {shown(key)}: {hint}")


def _readable_id(given: Mapping[str, Any]) -> protocol.RequestId | None:
    try:
        return identity("id", given.get("id"))
    except Refused:
        return None


def _plain(message: object) -> dict[str, Any]:
    plain = {}
    for name, default in _DEFAULTS[type(message)]:
        value = getattr(message, name)
        if value is None or value == default:
            continue
        if type(value) in FIELDS:
            value = _plain(value)
        elif type(value) is tuple:
            value = [_plain(item) for item in value] if value and type(value[0]) in FIELDS else list(value)
        plain[name] = value
    return plain


def _record(cls: type[Any], strict: bool = False) -> Check:
    """A map that is a message's part, with fields of its own."""

    def check(name: str, value: Any) -> Any:
        if type(value) is not dict:
            refuse(f"{name} must be a map, not {shown(value)}")
        return _build(cls, name, value, strict)

    return check


_COUNT = integer(0, 2**63 - 1)
_SECONDS = number(0, math.inf)
_PENALTY = number(-100, 100, ": 0 switches it off")
_CONTEXT_SIZE = integer(1, 2**31 - 1)
_MAX_TOKENS_HINT = ": leave it out for the daemon's default, or ask for 1 at least"
_TOKEN = integer(0, MAX_TOKEN_ID)
_LOGPROB = number(-math.inf, math.inf)
# What a delta and the end of an answer have in common.
_ANSWER: dict[str, Check] = {
    "index": _COUNT,
    "reasoning": text(),
    "tool_calls": array(_record(protocol.ToolCall), 0, 1 << 16),
    "logprobs": array(_record(protocol.TokenLogprob), 0, 1 << 20),
}

FIELDS: dict[type, dict[str, Check]] = {
    protocol.ClientHello: {"version": _COUNT, "client": text(0, 256)},
    protocol.Submit: {
        "id": identity,
        "prompt": text(1),
        "messages": array(_record(protocol.Message, strict=True), 1, 4096),
        "prompt_token_ids": token_ids(1, 2**20),
        "max_tokens": integer(1, 2**31 - 1, _MAX_TOKENS_HINT),
        "temperature": number(0, 100, ": 0 takes the likeliest token"),
        "top_p": share,
        "top_k": integer(0, 2**31 - 1, ": 0 switches it off"),
        "min_p": number(0, 1, ": 0 switches it off"),
        "xtc_probability": number(0, 1, ": 0 switches it off"),
        "xtc_threshold": number(0, 0.5),
        "repetition_penalty": number(0.01, 100, ": 1 switches it off"),
        "repetition_context_size": _CONTEXT_SIZE,
        "presence_penalty": _PENALTY,
        "presence_context_size": _CONTEXT_SIZE,
        "frequency_penalty": _PENALTY,
        "frequency_context_size": _CONTEXT_SIZE,
        "logit_bias": token_biases(1024),
        "seed": integer(0, 2**63 - 1),
        "n": integer(1, 128),
        "stop": text_or_array(text(1, 256), 32),
        "stop_token_ids": token_ids(0, 128),
        "ignore_eos": flag,
        "min_tokens": integer(0, 2**31 - 1),
        "logprobs": flag,
        "top_logprobs": integer(0, 20),
        "echo": flag,
        "structured_outputs": _record(protocol.StructuredOutputs, strict=True),
        "tools": array(mapping(64), 0, 128),
        "tool_choice": one_of("auto", "none"),
        "stream": flag,
        "chat_template_kwargs": mapping(64),
        "priority": integer(-1000, 1000),
        "timeout_s": number(0.001, 10**6),
        "cache": one_of("both", "read", "write", "none"),
        "cache_salt": text(1, 256),
        "adapter": text(1, 128),
    },
    protocol.Message: {
        "role": text(1, 64),
        "content": text(),
        "name": text(1, 128),
        "tool_calls": array(_record(protocol.ToolCall, strict=True), 0, 128),
        "tool_call_id": text(1, 128),
    },
    protocol.FunctionCall: {"name": text(1, 128), "arguments": text()},
    protocol.ToolCall: {"id": text(1, 128), "function": _record(protocol.FunctionCall), "type": one_of("function")},
    protocol.StructuredOutputs: {
        "json": mapping(1024),
        "json_object": flag,
        "regex": text(1, 1 << 16),
        "choice": array(text(1, 4096), 1, 1024),
        "grammar": text(1, 1 << 16),
    },
    protocol.Cancel: {"id": identity},
    protocol.AskStatus: {},
    protocol.Ping: {"nonce": identity},
    protocol.Flush: {},
    protocol.LoadAdapter: {"id": identity, "name": text(1, 128), "path": absolute_path(4096)},
    protocol.UnloadAdapter: {"id": identity, "name": text(1, 128)},
    protocol.Hello: {"version": _COUNT, "server": text(), "model": text()},
    protocol.TopLogprob: {"token_id": _TOKEN, "token": text(), "logprob": _LOGPROB},
    protocol.TokenLogprob: {
        "token_id": _TOKEN,
        "token": text(),
        "logprob": _LOGPROB,
        "top_logprobs": array(_record(protocol.TopLogprob), 0, 20),
    },
    protocol.Delta: {"id": identity, "text": text(), "token_ids": token_ids(0, 2**20), **_ANSWER},
    protocol.Done: {
        "id": identity,
        "finish_reason": one_of("stop", "tool_calls", "length", "cancelled"),
        "usage": _record(protocol.Usage),
        "timings": _record(protocol.Timings),
        "stop_reason": text_or_token,
        "text": text(),
        **_ANSWER,
    },
    protocol.Usage: dict.fromkeys((field.name for field in fields(protocol.Usage)), _COUNT),
    protocol.Timings: dict.fromkeys(("queued_s", "prompt_s", "decode_s", "total_s", "ttft_s"), _SECONDS),
    protocol.Error: {"id": identity, "code": text(1), "message": text(), "retry_after_s": _SECONDS, "index": _COUNT},
    protocol.Status: {"report": mapping(1 << 16)},
    protocol.Pong: {"nonce": identity},
    protocol.Flushed: {"on_disk": flag},
    protocol.Adapters: {"id": identity, "names": array(text(1, 128), 0, 1 << 16)},
}

_TAGS: dict[type, str] = {cls: tag for table in (protocol.REQUESTS, protocol.REPLIES) for tag, cls in table.items()}
_DEFAULTS = {cls: tuple((field.name, field.default) for field in fields(cls)) for cls in FIELDS}
_REQUIRED = {cls: tuple(field.name for field in fields(cls) if field.default is MISSING) for cls in FIELDS}
