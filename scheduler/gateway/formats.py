"""What an answer is to look like, as OpenAI's response_format and text.format say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from scheduler.gateway.faults import bad


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Format(BaseModel):
    """type json_schema has its schema in json_schema (chats), or beside the type (responses)."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: str | None = None
    strict: bool | None = None


def structure_of(wanted: Format | None, param: str) -> Mapping[str, Any] | None:
    """As submit's structured_outputs; None for plain text. Raises Fault."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else wanted.schema_
    if schema is None:
        raise bad(f"{param}: type json_schema needs a schema", param=param)
    return {"json": schema}
