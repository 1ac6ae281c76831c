"""What goes wrong, as HTTP says it."""

from __future__ import annotations

import pytest

from scheduler.answer import ConnectionLost, RequestError
from scheduler.gateway.faults import Fault, anthropic_error, of_client_error, openai_error
from scheduler.protocol import ERROR_CODES

# These end a connection and are told as its loss.
_OF_CONNECTIONS = {"unsupported_version", "hello_expected", "timeout", "forbidden", "unknown_type", "duplicate_id"}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("bad_request", 400),
        ("context_length_exceeded", 400),
        ("bad_frame", 400),
        ("bad_adapter", 400),
        ("unknown_adapter", 404),
        ("frame_too_large", 413),
        ("overloaded", 429),
        ("model_failed", 500),
        ("internal", 500),
        ("shutting_down", 503),
        ("timed_out", 504),
    ],
)
def test_statuses(code: str, status: int) -> None:
    fault = of_client_error(RequestError(code, "because", 2.2))
    assert (fault.status, fault.code, fault.message) == (status, code, "because")
    assert fault.headers == ({"Retry-After": "5"} if status == 503 else {"Retry-After": "3"})


def test_every_error_of_a_request_has_a_status_of_its_own() -> None:
    told = {"bad_request", "context_length_exceeded", "bad_frame", "frame_too_large", "overloaded"}
    told |= {"model_failed", "internal", "shutting_down", "timed_out", "unknown_adapter", "bad_adapter"}
    assert told | _OF_CONNECTIONS == ERROR_CODES


def test_no_daemon() -> None:
    fault = of_client_error(ConnectionLost("no daemon answers"))
    assert (fault.status, fault.headers) == (503, {"Retry-After": "5"})


def test_the_daemons_fields_are_ours() -> None:
    fault = of_client_error(RequestError("bad_request", "submit.stop[0] is empty"))
    assert (fault.message, fault.param) == ("stop[0] is empty", "stop")


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_shapes(status: int, openai: str, anthropic: str) -> None:
    fault = Fault(status, "it is wrong", code="c", param="p")
    assert openai_error(fault) == {"error": {"message": "it is wrong", "type": openai, "param": "p", "code": "c"}}
    assert anthropic_error(fault) == {"type": "error", "error": {"type": anthropic, "message": "p: it is wrong"}}


def test_a_wait_is_never_nothing() -> None:
    assert Fault(429, "", retry_after_s=0.0).headers == {"Retry-After": "1"}
    assert Fault(429, "").headers == {}
