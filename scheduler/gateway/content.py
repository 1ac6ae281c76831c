"""What a message says, in the forms that OpenAI's APIs have for it, as the one text that the daemon takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from scheduler.gateway.faults import bad


class Part(BaseModel):
    """A piece of a message. Kinds that are no text are known, so that they can be refused by name."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal[
        "text",
        "input_text",
        "output_text",
        "reasoning_text",
        "refusal",
        "image_url",
        "input_image",
        "input_audio",
        "file",
        "input_file",
    ]
    text: str | None = None
    refusal: str | None = None


Content = str | list[Part]


def text_of(content: Content | None, where: str) -> str:
    """Parts follow on one another as they are. Raises Fault for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_texts(content, where))


def _texts(parts: Sequence[Part], where: str) -> list[str]:
    texts = []
    for index, part in enumerate(parts):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            wrong = (
                "has no text" if part.type.endswith("text") or part.type == "refusal" else "is not read: text alone is"
            )
            raise bad(f"{where}[{index}]: a part of type {part.type} {wrong}", param=f"{where}[{index}]")
        texts.append(text)
    return texts
