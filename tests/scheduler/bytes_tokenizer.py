"""A tokenizer whose tokens are the bytes of the text, and one token more for the end."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from lanes.lane import Grammar
from scheduler.channels import Transitions

END = 256


class ByteStream:
    """Text from bytes one by one; see scheduler.text.Decoder. The end token reads as nothing."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id == END else self._utf8.decode(bytes([token_id]))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class ByteParts:
    """See scheduler.service.Parts: "[" and "]" are around what is thought, "{" and "}" around the name of a call."""

    can_call = True

    def __init__(self) -> None:
        self.transitions: Transitions = {
            "normal": [("[", "reasoning"), ("{", "tool")],
            "reasoning": [("]", "normal")],
            "tool": [("}", "normal")],
        }

    def first(self, prompt: Sequence[int]) -> str:
        return "normal"

    def parse_call(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        if not any(tool["name"] == text for tool in tools):
            raise ValueError("no such tool")
        return {"name": text, "arguments": {"bytes": len(text)}}


class ByteTokenizer:
    """See scheduler.service.Tokenizer. Its chat template refuses a turn of the role "refused"."""

    eos_token_ids = frozenset({END})
    parts = ByteParts()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> list[int]:
        if any(turn["role"] == "refused" for turn in messages):
            raise ValueError("the template knows no such role")
        text = "".join(f"{turn['role']}:{turn['content']};" for turn in messages)
        return self.encode(text + "".join(f"{name}={value};" for name, value in sorted(variables.items())))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != END).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return "<end>" if token == END else chr(token)

    def compile_grammar(self, grammar: Grammar) -> object:
        if grammar.text == "(":
            raise ValueError("a bracket is open")
        return f"{grammar.text}, compiled"

    def stream(self, marked: bool = False) -> ByteStream:
        return ByteStream()
