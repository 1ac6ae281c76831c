"""The OpenAPI document: bodies as pydantic knows them, answers by their outlines, and every status that can come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_LIST = {"type": "array"}


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_ERRORS = {
    "400": "The body is not as it has to be; the error says what to change.",
    "401": "An API key is missing, or is none of the gateway's.",
    "403": "A web page of another origin asks.",
    "404": "There is no such model, or nothing at this path.",
    "408": "The body did not come in time.",
    "413": "The body, or the prompt in it, is too large.",
    "415": "The body is no application/json.",
    "429": "Too much is waiting: try again after Retry-After seconds.",
    "500": "The model failed on this request, or a fault.",
    "503": "The daemon is loading its model, or away: try again after Retry-After seconds.",
    "504": "The request's time was over.",
}
_OPENAI_ERROR = _object(
    error={
        **_object(message=_TEXT, type=_TEXT),
        "properties": {
            "message": _TEXT,
            "type": _TEXT,
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        },
    }
)
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_WHOLE, owned_by=_TEXT)
# By path: what it is for, its whole answer, and whether it is Anthropic's.
_ANSWERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": (
        "Answer a chat (OpenAI's)",
        _object(id=_TEXT, object={"const": "chat.completion"}, created=_WHOLE, model=_TEXT, choices=_LIST, usage={}),
    ),
    "/v1/completions": (
        "Continue a text (OpenAI's)",
        _object(id=_TEXT, object={"const": "text_completion"}, created=_WHOLE, model=_TEXT, choices=_LIST, usage={}),
    ),
    "/v1/responses": (
        "Answer a conversation (OpenAI's)",
        _object(id=_TEXT, object={"const": "response"}, created_at=_WHOLE, model=_TEXT, output=_LIST, status=_TEXT),
    ),
    "/v1/messages": (
        "Answer a conversation (Anthropic's)",
        _object(id=_TEXT, type={"const": "message"}, role={"const": "assistant"}, model=_TEXT, content=_LIST, usage={}),
    ),
}


class Described(Protocol):
    """What is told of a dialect; see scheduler.gateway.app."""

    @property
    def path(self) -> str: ...
    @property
    def body(self) -> type[BaseModel]: ...


def document(dialects: Sequence[Described], has_keys: bool) -> dict[str, Any]:
    """has_keys: whether a request needs one."""
    wanted: Any = [(each.body, "validation") for each in dialects]
    _, schemas = models_json_schema(wanted, ref_template=_REF)
    paths: dict[str, Any] = {each.path: {"post": _post(each)} for each in dialects}
    model_list = _object(object={"const": "list"}, data={"type": "array", "items": _MODEL})
    named = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    # A name may hold slashes, which a path's parameter cannot; written so they are fine.
    paths["/v1/models"] = {"get": _get("List the names of the model", _json(model_list), "401", "503")}
    paths["/v1/models/{name}"] = {
        "get": _get("Look one of them up", _json(_MODEL), "401", "404", "503") | {"parameters": [named]}
    }
    health = _json(_object(status=_TEXT))
    paths["/health"] = {"get": _get("Whether the daemon answers", health) | {"security": []}}
    paths["/health"]["get"]["responses"]["503"] = {"description": "It does not.", **health}
    paths["/metrics"] = {"get": _get("Metrics for Prometheus", {"content": {"text/plain": {}}}, "401")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "laned gateway", "version": version("laned")},
        "paths": paths,
        "security": [{"bearer": []}, {"key": []}] if has_keys else [],
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _post(dialect: Described) -> dict[str, Any]:
    summary, answer = _ANSWERS[dialect.path]
    error = _ANTHROPIC_ERROR if dialect.path == "/v1/messages" else _OPENAI_ERROR
    body = {"$ref": _REF.format(model=dialect.body.__name__)}
    content = {"application/json": {"schema": answer}, "text/event-stream": {}}
    responses = {"200": {"description": "The answer, or with stream its events.", "content": content}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": responses | {status: _error(status, error) for status in _ERRORS},
    }


def _get(summary: str, content: Mapping[str, Any], *errors: str) -> dict[str, Any]:
    responses = {"200": {"description": "As asked.", **content}}
    return {"summary": summary, "responses": responses | {status: _error(status, _OPENAI_ERROR) for status in errors}}


def _error(status: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": _ERRORS[status], **_json(schema)}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
