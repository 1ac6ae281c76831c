"""How a model marks the parts of its answers, as mlx-lm knows it: what it thinks, what it says, what it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class AnswerParts:
    """For one tokenizer. transitions: a part to (marker in the text, the part that begins there); the parts are named
    normal, reasoning and tool. can_call: whether there is a parser for calls."""

    def __init__(self, wrapper: Any) -> None:
        """wrapper: mlx-lm's of a tokenizer, or None: then an answer has one part."""
        self._wrapper = wrapper
        self.can_call = bool(wrapper is not None and wrapper.has_tool_calling)
        self.transitions: Mapping[str, Sequence[tuple[str, str]]] = _transitions(wrapper) if wrapper is not None else {}

    def first(self, prompt: Sequence[int]) -> str:
        """The part that an answer to this prompt begins with: a template may have opened the thinking itself."""
        wrapper = self._wrapper
        if wrapper is None:
            return "normal"
        if wrapper.response_initial_state:
            return str(wrapper.response_initial_state)
        if not wrapper.has_thinking:
            return "normal"
        is_open = wrapper.rfind_think_start(prompt) > wrapper.rfind_think_end(prompt)
        return "reasoning" if is_open else "normal"

    def parse_call(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        """What mlx-lm's parser makes of the text between a call's markers: a map, or several in a list. Raises
        ValueError."""
        assert self.can_call, "this model has no parser for calls"
        try:
            return self._wrapper.tool_parser(text, list(tools))
        except Exception as error:  # a parser meets whatever the model wrote: each raises things of its own
            raise ValueError(f"no call of a function: {error}") from error


def _transitions(wrapper: Any) -> dict[str, list[tuple[str, str]]]:
    """As mlx-lm's server has them."""
    table: dict[str, list[tuple[str, str]]] = {"normal": [], "reasoning": [], "tool": []}
    own = {part: list(edges) for part, edges in wrapper.response_transitions.items()}
    if wrapper.has_thinking:
        table["normal"].append((wrapper.think_start, "reasoning"))
        table["reasoning"].append((wrapper.think_end, "normal"))
    if wrapper.has_tool_calling:
        # A model whose format says itself where calls begin.
        if "tool" not in {to for edges in own.values() for _, to in edges}:
            table["normal"].append((wrapper.tool_call_start, "tool"))
        if wrapper.has_thinking:
            table["reasoning"].append((wrapper.tool_call_start, "tool"))
        if wrapper.tool_call_end:
            table["tool"].append((wrapper.tool_call_end, "normal"))
    table["normal"] += [(marker, "normal") for marker in wrapper.structural_markers or ()]
    for part, edges in own.items():
        table.setdefault(part, []).extend(edges)
    return table
