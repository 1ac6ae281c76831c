"""Answers that keep to a grammar: what the next token of each row may be, by llguidance.

What a grammar allows depends on the token before, which is on the device until the step that drew it is read. So a step
with such rows is dispatched in two parts: its forward pass, and, when the last tokens have been read and the masks
computed, the drawing. A thread does both (masks on llguidance's own) while the pass is dispatched and runs. The other
rows of the step notice nothing, and the device has work all along as long as masks take no longer than a forward pass.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import llguidance
import llguidance.numpy
import numpy as np

from lanes.lane import Grammar

# Whitespace between JSON's tokens: a space, or a new line and its indentation. Let free, small models write nothing
# else for hundreds of tokens.
JSON_WHITESPACE = r"(\x20|\x0A(\x20{0,32}|\x09{0,8}))?"
# A compiled grammar takes some hundred kilobytes, and a service asks for the same few again and again: so many stay
# although nobody has them.
MAX_COMPILED = 64

Mask = np.ndarray[Any, np.dtype[np.int32]]


class GrammarError(ValueError):
    """The grammar is none, or too much; the message says why."""


class Compiled:
    """A grammar that is not compiled again as long as somebody has this."""

    __slots__ = ("__weakref__", "matcher")

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher


class GrammarCompiler:
    """Makes matchers for one tokenizer. May be used from several threads: compiling may take seconds, and is done
    before a row is admitted, on none that others wait for. What was compiled for a row is to be held until then."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        """tokenizer: a transformers tokenizer."""
        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids)
        self._tables: llguidance.LLTokenizer | None = None
        self._compiled: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._recent: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the tokenizer now, which the first grammar would do otherwise: it takes seconds where the vocabulary is
        large, and Python's other threads stand still meanwhile. A tokenizer that grammars are not for is left alone."""
        with suppress(GrammarError), self._lock:
            self._tables = self._tables or self._read_tokenizer()

    @property
    def is_ready(self) -> bool:
        """Whether the tokenizer has been read, which it never is where grammars are not for it."""
        return self._tables is not None

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                return self._used(grammar, known)
            tables = self._tables = self._tables or self._read_tokenizer()
        matcher = llguidance.LLMatcher(tables, _source(grammar), log_level=0)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        with self._lock:
            # Another thread may have been sooner; all are to have the same.
            return self._used(grammar, self._compiled.setdefault(grammar, Compiled(matcher)))

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at its beginning. Raises GrammarError."""
        compiled = self.compile(grammar)
        with self._lock:
            return compiled.matcher.deep_copy()

    def _used(self, grammar: Grammar, compiled: Compiled) -> Compiled:
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        if len(self._recent) > MAX_COMPILED:
            self._recent.popitem(last=False)
        return compiled

    @property
    def vocabulary(self) -> int:
        """Tokens that matchers know."""
        assert self._tables is not None, "no grammar was compiled yet"
        return self._tables.vocab_size

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GrammarError("this model's tokenizer has no tables that a grammar could be matched with")
        text = backend.to_str()
        settings = json.loads(text)
        if settings.get("padding") or settings.get("truncation"):
            text = json.dumps({**settings, "padding": None, "truncation": None})
        try:
            return llguidance.LLTokenizer(text, eos_token=self._eos_token_ids or None)
        except (ValueError, RuntimeError) as error:
            raise GrammarError(
                f"this model's tokenizer cannot be matched with grammars: {_first_line(str(error))}"
            ) from error


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json":
            options: Any = {"whitespace_pattern": JSON_WHITESPACE}
            try:
                return llguidance.LLMatcher.grammar_from_json_schema(grammar.text, defaults=options)
            except ValueError as error:
                raise GrammarError(_first_line(str(error))) from error
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)


def _first_line(message: str) -> str:
    """Without the dump of the parser's state that may follow."""
    return message.strip().split("\n")[0][:500]


class Grammars:
    """The matchers of the rows that have one, each at the end of what is known of its row's answer."""

    def __init__(self, compiler: GrammarCompiler, eos_token_ids: frozenset[int]) -> None:
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        self._executor: llguidance.LLExecutor | None = None
        self._failures: list[tuple[int, str]] = []

    def __len__(self) -> int:
        """Rows whose grammar has not come to its end."""
        return len(self._matchers)

    def admit(self, row_id: int, grammar: Grammar) -> None:
        """Raises GrammarError."""
        self._matchers[row_id] = self._compiler.matcher(grammar)

    def leave(self, row_id: int) -> None:
        self._matchers.pop(row_id, None)

    @property
    def rows(self) -> set[int]:
        return set(self._matchers)

    def concern(self, rows: Sequence[int | None]) -> bool:
        return any(row in self._matchers for row in rows)

    def allow(self, rows: Sequence[int | None], drawn: Mapping[int, int], vocabulary: int) -> Mask | None:
        """Take what rows drew last, and say what each may draw next; see lanes.decoder.Allow."""
        self.accept(drawn)
        return self.masks(rows, vocabulary) if self.concern(rows) else None

    def take_failures(self) -> list[tuple[int, str]]:
        """Rows whose grammar could not go on since this was asked last, with the reasons: they have to end."""
        failures, self._failures = self._failures, []
        return failures

    def accept(self, tokens: Mapping[int, int]) -> None:
        """Take what rows drew. One that has come to its end is free from then on, and so is one that fails."""
        for row_id, token in tokens.items():
            matcher = self._matchers.get(row_id)
            if matcher is None:
                continue
            if token in self._eos_token_ids:
                del self._matchers[row_id]
            elif not matcher.consume_token(token):
                self._fail(row_id, matcher)

    def masks(self, rows: Sequence[int | None], vocabulary: int) -> Mask:
        """A bit for each token that may come next: int32 [rows, vocabulary / 32, rounded up]. At least one of the rows
        has a grammar."""
        words = (vocabulary + 31) // 32
        masks = np.full((len(rows), words), -1, dtype=np.int32)
        bound = [(slot, row) for slot, row in enumerate(rows) if row is not None and row in self._matchers]
        matchers = [(self._matchers[row], place) for place, (_, row) in enumerate(bound)]
        known = self._compiler.vocabulary
        filled = llguidance.numpy.allocate_token_bitmask(len(bound), known)
        if self._executor is None:
            self._executor = llguidance.LLExecutor()
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, matchers, filled)
        for place, (slot, row) in enumerate(bound):
            if self._matchers[row].is_error() or not filled[place].any():
                self._fail(row, self._matchers[row])
                continue
            # The model may have more tokens than the tokenizer: these stand for nothing.
            masks[slot] = 0
            shared = min(words, filled.shape[1])
            masks[slot, :shared] = filled[place, :shared]
        return masks

    def _fail(self, row_id: int, matcher: llguidance.LLMatcher) -> None:
        del self._matchers[row_id]
        reason = _first_line(matcher.get_error()) or "it allows no token"
        self._failures.append((row_id, f"the grammar cannot go on: {reason}"))
