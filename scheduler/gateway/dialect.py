"""What the dialects have in common: a body becomes an Order, and what comes for it becomes events or one whole."""

from __future__ import annotations

import difflib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from scheduler.gateway.faults import Fault, bad, of_invalid
from scheduler.protocol import Delta, Done

# So close to a field's name that nothing else was meant: max_token, top-p, temprature.
_MISSPELT = 0.85


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event. name is left out where a dialect has none."""

    data: Mapping[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        text = self.data if isinstance(self.data, str) else to_json(self.data)
        return (f"event: {self.name}\ndata: {text}\n\n" if self.name else f"data: {text}\n\n").encode()


class Reply(Protocol):
    """Tells one request's answers in its dialect. Pure, and told everything in order.

    answer: which of all the request's answers, from 0 on. In whole() they are all told at once.
    """

    def begin(self) -> Iterable[Event]: ...
    def delta(self, answer: int, delta: Delta) -> Iterable[Event]: ...
    def done(self, answer: int, done: Done) -> Iterable[Event]: ...
    def end(self) -> Iterable[Event]:
        """After the last answer's done."""
        ...

    def fail(self, fault: Fault) -> Iterable[Event]:
        """Instead of all that would follow."""
        ...

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        """Each with its text."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """What shows, while nothing is to be told, that somebody is there."""
        ...


class Reshape(Protocol):
    """Makes of one answer's news other news, in front of the dialect's reply; see tools.ForcedCall."""

    def delta(self, delta: Delta) -> Delta | None: ...
    def done(self, done: Done) -> tuple[Delta | None, Done]: ...


@dataclass(frozen=True, slots=True)
class Order:
    """What a body asks of the daemon: options of Client.submit, for each prompt. n: answers to each of them.

    reshape: makes what one answer's news go through.
    """

    submits: Sequence[Mapping[str, Any]]
    n: int
    is_stream: bool
    reply: Reply
    reshape: Callable[[], Reshape] | None = None


class Body(BaseModel):
    """A request's body. Fields that it does not have are looked at by check_others."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Fields of the API, or of other servers, that change nothing here.
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    # Those that would change what is answered, and which are not to be dropped in silence: why not.
    REFUSED: ClassVar[Mapping[str, str]] = {}

    model: str | None = None

    def check_others(self) -> None:
        """Raises Fault for what can't be served, and for what looks like a slip. All else is ignored, as new fields
        come up in clients faster than anywhere else."""
        known = {*type(self).model_fields, *self.IGNORED, *self.REFUSED}
        for name, value in (self.model_extra or {}).items():
            if name in self.REFUSED and value not in (None, False, [], {}):
                raise bad(f"{name} is not supported: {self.REFUSED[name]}", param=name)
            if name not in known and (near := difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)):
                raise bad(f"there is no field {name}: did you mean {near[0]}?", param=name)


def read(kind: type[Body], raw: bytes) -> Body:
    """Raises Fault."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as invalid:
        raise of_invalid(invalid.errors(include_url=False), _lenient(raw)) from None
    body.check_others()
    return body


def _lenient(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def now_unix_s() -> int:
    return int(time.time())


def given(**fields: Any) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in fields.items() if value is not None}
