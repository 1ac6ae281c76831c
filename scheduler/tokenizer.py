"""What the scheduler asks of the model's tokenizer, which is lanes.tokenizer's."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lanes.lane import Grammar
from scheduler.channels import Transitions
from scheduler.text import Decoder


class Parts(Protocol):
    """How the model marks what it thinks and what it calls; see lanes.parts."""

    can_call: bool
    transitions: Transitions

    def first(self, prompt: Sequence[int]) -> str: ...
    def parse_call(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Any: ...


class Tokenizer(Protocol):
    """The model's tokenizer and chat template; see lanes.tokenizer."""

    eos_token_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def token_text(self, token: int) -> str: ...
    def stream(self, marked: bool = False) -> Decoder: ...
    def compile_grammar(self, grammar: Grammar) -> object: ...
    @property
    def parts(self) -> Parts: ...
