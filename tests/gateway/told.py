"""What the daemon tells, as tests want it, and what a dialect's reply makes of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from scheduler.codec import decode_request
from scheduler.gateway.dialect import Event, Order, read
from scheduler.protocol import Delta, Done, FunctionCall, Timings, TokenLogprob, ToolCall, TopLogprob, Usage


def usage(prompt: int = 5, completion: int = 3, cached: int = 0) -> Usage:
    return Usage(prompt, completion, cached, cached_memory_tokens=cached)


def done(reason: str = "stop", **fields: Any) -> Done:
    return Done(1, reason, fields.pop("usage", usage()), Timings(0.1, 0.2, 0.3, 0.6, 0.3), **fields)


def delta(text: str = "", **fields: Any) -> Delta:
    return Delta(1, text, (), **fields)


def call(name: str = "weather", arguments: str = '{"city": "Paris"}', id: str = "call_1") -> ToolCall:
    return ToolCall(id, FunctionCall(name, arguments))


def logprob(token: str, value: float = -0.5) -> TokenLogprob:
    return TokenLogprob(1, token, value, (TopLogprob(1, token, value), TopLogprob(2, "x", -2.0)))


def order_of(dialect: Any, body: str | bytes, model: str = "m") -> Order:
    """dialect: (body class, order function)."""
    kind, order = dialect
    made: Order = order(read(kind, body.encode() if isinstance(body, str) else body), model)
    return made


def submit_of(order: Order) -> dict[str, Any]:
    """What is asked of the daemon, which has to take it."""
    (options,) = order.submits
    decode_request({"type": "submit", "id": 1, **options})
    return dict(options)


def streamed(order: Order, deltas: Sequence[tuple[int, Delta]], dones: Sequence[Done]) -> list[Any]:
    """The data of all events of a stream."""
    return [event.data for event in events(order, deltas, dones)]


def events(order: Order, deltas: Sequence[tuple[int, Delta]], dones: Sequence[Done]) -> list[Event]:
    reply = order.reply
    told: list[Event] = list(reply.begin())
    for answer, each in deltas:
        told += copied(reply.delta(answer, each))
    for answer, end in enumerate(dones):
        told += copied(reply.done(answer, end))
    return told + copied(reply.end())


def copied(said: Iterable[Event]) -> list[Event]:
    """Events are encoded when they come: what they hold may grow afterwards."""
    return [copy.deepcopy(event) for event in said]
