"""What goes wrong with a request, as HTTP says it: a status, a kind and a sentence. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.answer import ClientError, RequestError

# A daemon that loads its model is back in seconds to minutes; asking costs it nothing meanwhile.
AWAY_RETRY_S = 5.0

_STATUS = {
    "bad_request": 400,
    "context_length_exceeded": 400,
    # The client's own look at a request that fits in no frame.
    "bad_frame": 400,
    "bad_adapter": 400,
    "unknown_adapter": 404,
    "frame_too_large": 413,
    "overloaded": 429,
    "shutting_down": 503,
    "timed_out": 504,
}
# The daemon speaks of its own message; its fields have the names that they have here.
_FIELD = re.compile(r"submit\.(\w+)")


class Fault(Exception):
    """An answer that is an error. code: a word for programs. param: the field of the body that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            # Whole seconds, and never 0, which some clients take for "at once, for ever".
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))


def bad(message: str, param: str | None = None, code: str | None = None) -> Fault:
    return Fault(400, message, param=param, code=code)


def of_client_error(error: ClientError) -> Fault:
    """What the daemon's refusal, or its absence, is in HTTP."""
    if not isinstance(error, RequestError):
        return Fault(503, str(error), code="daemon_unavailable", retry_after_s=AWAY_RETRY_S)
    status = _STATUS.get(error.code, 500)
    found = _FIELD.search(error.message)
    return Fault(
        status,
        _FIELD.sub(r"\1", error.message),
        code=error.code,
        param=found[1] if found and status == 400 else None,
        retry_after_s=AWAY_RETRY_S if status == 503 else error.retry_after_s,
    )


def of_invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> Fault:
    """errors: pydantic's. body: what they are about, parsed, or None where it is no JSON."""
    if errors[0]["type"] == "json_invalid":
        return bad(f"the body is no JSON: {errors[0]['ctx']['error']}", code="invalid_json")
    places = [_place(error, body) for error in errors]
    # Of the kinds that a value may be, it is meant to be the one that fits furthest; and a kind goes before its fields.
    order = sorted(range(len(errors)), key=lambda at: (-len(places[at]), errors[at]["type"] != "literal_error"))
    where = places[order[0]]
    said = dict.fromkeys(errors[at]["msg"] for at in order if places[at] == where)
    sentence = ", or ".join(said)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")
    return bad(f"{name}: {sentence}" if name else sentence, param=name or None)


def _place(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """A place in the body; what pydantic adds for its unions is left out."""
    place: list[str | int] = []
    loc = error["loc"]
    for at, part in enumerate(loc):
        if isinstance(part, int) and isinstance(body, list):
            place.append(part)
            body = body[part]
        elif isinstance(body, dict) and (part in body or (error["type"] == "missing" and at == len(loc) - 1)):
            place.append(part)
            body = body.get(part)
    return tuple(place)


def openai_error(fault: Fault) -> dict[str, Any]:
    """The body of an error as OpenAI has it."""
    return {
        "error": {
            "message": fault.message,
            "type": _OPENAI_TYPES.get(fault.status, "server_error" if fault.status >= 500 else "invalid_request_error"),
            "param": fault.param,
            "code": fault.code,
        }
    }


def anthropic_error(fault: Fault) -> dict[str, Any]:
    """The body of an error as Anthropic has it."""
    kind = _ANTHROPIC_TYPES.get(fault.status, "api_error" if fault.status >= 500 else "invalid_request_error")
    message = f"{fault.param}: {fault.message}" if fault.param and fault.param not in fault.message else fault.message
    return {"type": "error", "error": {"type": kind, "message": message}}


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
