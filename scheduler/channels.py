"""An answer's text taken apart: what the model thinks, what it says, and which functions it calls.

A model marks these parts in its text. The markers and what they lead to are mlx-lm's for its tokenizer, as a table from
a part to (marker, next part); a marker is never told, and the end of the text that could still become one is held back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.protocol import FunctionCall, TokenLogprob, ToolCall
from scheduler.text import overlap

# The parts that mlx-lm's tables name.
NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"

Transitions = Mapping[str, Sequence[tuple[str, str]]]
# The text between a call's markers to what it holds: a map of name, arguments and, from some models, id, or an array of
# such maps. Raises ValueError.
CallParser = Callable[[str], Any]

MAX_NAME_CHARS = 128


@dataclass(slots=True)
class Piece:
    """What became known of an answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.token_ids)

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """What became known by all of them."""
        return cls(
            text="".join(piece.text for piece in pieces),
            reasoning="".join(piece.reasoning for piece in pieces),
            tool_calls=[call for piece in pieces for call in piece.tool_calls],
            token_ids=[token for piece in pieces for token in piece.token_ids],
            logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        )


class Channels:
    """Takes one answer's text apart."""

    def __init__(
        self, transitions: Transitions | None = None, start: str = NORMAL, parse: CallParser | None = None
    ) -> None:
        """parse None: there are no calls, and markers that lead to them are text."""
        self._transitions = {
            part: [(marker, to) for marker, to in edges if marker and (to != TOOL or parse is not None)]
            for part, edges in (transitions or {}).items()
        }
        self._part = start
        self._parse = parse
        self._held = ""
        self._call: list[str] = []
        # The marker that the call began with, in case that it turns out to be none.
        self._call_marker = ""
        self.num_calls = 0

    def push(self, text: str) -> Piece:
        piece = Piece()
        text = self._held + text
        while found := self._next_marker(text):
            at, marker, to = found
            self._say(piece, text[:at])
            if self._part == TOOL:
                self._end_call(piece, marker)
            if to == TOOL:
                self._call_marker = marker
            self._part, text = to, text[at + len(marker) :]
        held = max((overlap(text, marker) for marker, _ in self._edges), default=0)
        self._held = text[len(text) - held :]
        self._say(piece, text[: len(text) - held])
        return piece

    def flush(self) -> Piece:
        """The rest, when no text follows."""
        piece = Piece()
        self._say(piece, self._held)
        self._held = ""
        if self._part == TOOL:
            self._end_call(piece, "")
        return piece

    @property
    def _edges(self) -> list[tuple[str, str]]:
        return self._transitions.get(self._part, [])

    def _next_marker(self, text: str) -> tuple[int, str, str] | None:
        """The first one that is whole: (where it begins, marker, part)."""
        found = [(at, marker, to) for marker, to in self._edges if (at := text.find(marker)) >= 0]
        return min(found, key=lambda each: (each[0] + len(each[1]), each[0])) if found else None

    def _say(self, piece: Piece, text: str) -> None:
        if self._part == TOOL:
            self._call.append(text)
        elif self._part == REASONING:
            piece.reasoning += text
        else:
            piece.text += text

    def _end_call(self, piece: Piece, marker: str) -> None:
        assert self._parse is not None
        text = "".join(self._call)
        self._call.clear()
        try:
            parsed = self._parse(text)
            calls = [_tool_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except ValueError:
            # Cut off, or no call at all: better seen by the client than lost.
            piece.text += self._call_marker + text + marker
            return
        piece.tool_calls += calls
        self.num_calls += len(calls)


def _tool_call(call: Any) -> ToolCall:
    """Raises ValueError if it is none: what was parsed is whatever the model wrote."""
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ValueError("a call names no function")
    arguments, id = call.get("arguments", {}), call.get("id")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    has_id = isinstance(id, str) and 0 < len(id) <= MAX_NAME_CHARS
    return ToolCall(id if has_id else f"call_{secrets.token_hex(12)}", FunctionCall(name, written))
