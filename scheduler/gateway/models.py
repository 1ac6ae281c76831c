"""The one model's names: which a request may use, and GET /v1/models."""

from __future__ import annotations

from typing import Any

from scheduler.gateway.dialect import now_unix_s
from scheduler.gateway.faults import Fault
from scheduler.gateway.settings import Settings

# What mlx_lm.server's users write for the model that it was started with.
DEFAULT = "default_model"


def adapter_of(wanted: str | None, settings: Settings, model: str) -> str | None:
    """The adapter that a request's model names, as in "qwen3:legal". model: the daemon's name for its model. Raises
    Fault where a request wants another one."""
    names = (*(settings.names or (model,)), DEFAULT)
    if wanted is None or wanted in names:
        return None
    base, _, adapter = wanted.rpartition(":")
    if base in names and adapter:
        return adapter
    if settings.any_model:
        return None
    said = f"there is no model {wanted!r} here: {' and '.join(names[:-1])} is served"
    raise Fault(404, said, code="model_not_found", param="model")


def listed(settings: Settings, model: str, since_unix_s: int | None = None) -> dict[str, Any]:
    """The list as OpenAI's and Anthropic's clients read it."""
    created = now_unix_s() if since_unix_s is None else since_unix_s
    models = [one(name, created) for name in settings.names or (model,)]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return {"object": "list", "data": models, **ends}


def one(name: str, created_unix_s: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "laned",
        "type": "model",
        "display_name": name,
    }
