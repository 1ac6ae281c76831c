"""Text from tokens as they come, never half a character, and in sum exactly what decoding all tokens at once gives.

Two ways, for two kinds of tokenizer. In a byte-level one every token stands for fixed bytes, so text is an incremental
UTF-8 decoder away, at a microsecond a token. In any other what a token reads as depends on the token before it, so each
new one is decoded together with that one, and what that one reads as alone is cut off the front.

(tokenizers' own DecodeStream was tried: on random tokens it loses text or fails on every second sequence with bytes.)
"""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
# A character is at most 4 bytes, so a longer tail without an end is no character that is still to come.
MAX_UNFINISHED_TOKENS = 4


class Detokenizer(Protocol):
    """The text of one sequence of tokens, piece by piece."""

    def push(self, token_id: int) -> str:
        """What can be said after this token that could not before; often all of it, sometimes nothing."""
        ...

    def flush(self) -> str:
        """What is left at the end: the replacement for a character that never became whole, at most."""
        ...


def detokenizer_maker(tokenizer: Any, spoken: frozenset[int] = frozenset()) -> Callable[[], Detokenizer]:
    """What makes a detokenizer for a sequence. tokenizer: a transformers tokenizer. spoken: special tokens that are not
    left out of the text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        decode = _plain_decode(tokenizer)
        audible = frozenset(tokenizer.get_vocab().values()).difference(tokenizer.all_special_ids) | spoken
        return lambda: PairwiseDetokenizer(decode, audible, frozenset())
    skipped = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special) - spoken
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    if decoder.get("type") == "ByteLevel":
        table = TokenBytes(backend.id_to_token, skipped)
        return lambda: ByteDetokenizer(table)
    audible = frozenset(backend.get_vocab().values()) - skipped
    steps = decoder.get("decoders", [decoder])
    fallback = any(step.get("type") == "ByteFallback" for step in steps)
    spellings = {f"<0x{byte:02X}>" for byte in range(256)} if fallback else set()
    byte_tokens = frozenset(backend.token_to_id(spelling) for spelling in spellings) - {None}

    def decode_fast(tokens: Sequence[int]) -> str:
        # Those that are left out never come here.
        return str(backend.decode(tokens, skip_special_tokens=False))

    return lambda: PairwiseDetokenizer(decode_fast, audible, byte_tokens)


def _plain_decode(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


class TokenBytes:
    """The bytes that each token of a byte-level tokenizer stands for, looked up once each."""

    def __init__(self, token_text: Callable[[int], str | None], skipped: frozenset[int]) -> None:
        self._token_text = token_text
        self._known: dict[int, bytes] = dict.fromkeys(skipped, b"")
        self._byte_of = _byte_alphabet()

    def __getitem__(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        text = self._token_text(token)
        if text is None:  # a row of the embedding without a token: it reads as nothing
            return b""
        try:
            return bytes(self._byte_of[character] for character in text)
        except KeyError:  # an added token outside the alphabet stands for itself
            return text.encode()


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's spelling of bytes: printable ones of Latin-1 are themselves, the others follow from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(moved)}


class ByteDetokenizer:
    """For byte-level tokenizers."""

    __slots__ = ("_table", "_utf8")

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._table[token_id])

    def flush(self) -> str:
        rest = self._utf8.decode(b"", True)
        self._utf8.reset()
        return rest


class PairwiseDetokenizer:
    """For every other tokenizer.

    Tokens that read as nothing (special ones, ids without a token) are dropped as they come: the next one would look
    like the first of a text beside them. A run of byte tokens is held until another token ends it: whether its bytes
    are characters or all replacements is decided for the run as a whole.
    """

    __slots__ = ("_audible", "_byte_tokens", "_context", "_context_text", "_decode", "_held")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], audible: frozenset[int], byte_tokens: frozenset[int]
    ) -> None:
        self._decode = decode
        self._audible = audible
        self._byte_tokens = byte_tokens
        self._context: list[int] = []  # the last token that was said, or none so far
        self._context_text = ""  # what it reads as alone
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id not in self._audible:
            return ""
        self._held.append(token_id)
        if token_id in self._byte_tokens:
            return ""
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) <= MAX_UNFINISHED_TOKENS:
            return ""
        return self._say(text)

    def flush(self) -> str:
        return self._say(self._decode(self._context + self._held)) if self._held else ""

    def _say(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._context = self._held[-1:]
        self._context_text = self._decode(self._context)
        self._held = []
        return new
