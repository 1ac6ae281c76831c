"""A model's tokenizer as the scheduler sees it: text or a chat to token ids, and back. Imports no MLX."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lanes.detokenize import Detokenizer, detokenizer_maker
from lanes.grammar import Compiled, GrammarCompiler
from lanes.lane import Grammar
from lanes.parts import AnswerParts

# Arguments of apply_chat_template that are not the template's own variables. A client may not set them: a template of
# its own would be a program that runs here, and the rest changes what comes back.
RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


class ChatTemplateError(ValueError):
    """The messages cannot be laid out as a prompt; the message says why."""


class Tokenizer:
    """Wraps a transformers tokenizer, or mlx-lm's wrapper of one. To be used from one thread at a time.

    eos_token_ids: ids that end an answer. vocab_size: ids in [0, vocab_size) may have a meaning; the model's embedding
    may have more rows.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int]) -> None:
        # mlx-lm's wrapper knows templates that are code instead of text; for everything else it only stands in the way.
        self._wrapper = tokenizer
        self._tokenizer: Any = tokenizer._tokenizer if _is_wrapper(tokenizer) else tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = len(self._tokenizer)
        self._token_texts: dict[int, str] = {}
        self.grammars = GrammarCompiler(self._tokenizer, sorted(self.eos_token_ids))
        self.parts = AnswerParts(tokenizer if _is_wrapper(tokenizer) else None)
        markers = (marker for edges in self.parts.transitions.values() for marker, _ in edges)
        spoken = (token for marker in markers for token in self._tokenizer.encode(marker, add_special_tokens=False))
        self._make_stream = detokenizer_maker(self._tokenizer)
        self._make_marked_stream = detokenizer_maker(self._tokenizer, frozenset(spoken))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around one. A text that spells out the
        first of them itself does not get it twice."""
        tokens = [int(token) for token in self._tokenizer.encode(text, verbose=False)]
        bos, spelled = self._tokenizer.bos_token_id, self._tokenizer.bos_token
        doubled = bos is not None and tokens[:2] == [bos, bos] and text.startswith(spelled)
        return tokens[1:] if doubled else tokens

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation in the model's template, ready for its answer.

        template_kwargs: variables for the template, add_generation_prompt (True) among them. Raises ChatTemplateError
        if the model has no template, or if it refuses the messages.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template: send a prompt instead of messages")
        if reserved := RESERVED.intersection(template_kwargs):
            raise ChatTemplateError(f"{', '.join(sorted(reserved))} cannot be set for a chat template")
        variables = {"add_generation_prompt": True, **template_kwargs, "tokenize": True, "return_dict": False}
        try:
            tokens = self._wrapper.apply_chat_template([dict(message) for message in messages], **variables)
            return [int(token) for token in tokens]
        except Exception as error:  # a template is the model's own program on the client's data: anything may be raised
            reason = str(error).strip() or type(error).__name__
            raise ChatTemplateError(f"the model's chat template does not accept these messages: {reason}") from error

    @property
    def has_chat_template(self) -> bool:
        if _is_wrapper(self._wrapper):
            return bool(self._wrapper.has_chat_template)
        return getattr(self._tokenizer, "chat_template", None) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out, nothing tidied."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def compile_grammar(self, grammar: Grammar) -> Compiled:
        """To be held until a row with this grammar is admitted. Raises GrammarError, a ValueError, if answers cannot be
        kept to it. To be called from any thread."""
        return self.grammars.compile(grammar)

    def token_text(self, token: int) -> str:
        """What a token reads as alone, special ones by their names; half a character as its replacement."""
        known = self._token_texts.get(token)
        if known is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            known = self._token_texts[token] = str(text)
        return known

    def stream(self, marked: bool = False) -> Detokenizer:
        """A detokenizer for a new sequence. Its pieces in sum are what decode() gives for the whole. marked: with the
        markers of `parts`, where those are special tokens."""
        return self._make_marked_stream() if marked else self._make_stream()


def _is_wrapper(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "has_chat_template") and hasattr(tokenizer, "detokenizer")
