"""How the answers of a request draw their tokens: its options in the words of the lanes."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from typing import Any

from lanes.lane import Grammar, Sampling
from scheduler.errors import Refused
from scheduler.options import Options
from scheduler.protocol import StructuredOutputs, Submit


def sampling_of(
    message: Submit,
    defaults: Options,
    *,
    prompt_tokens: int,
    max_tokens: int,
    vocabulary: int,
    end_token_ids: Iterable[int],
    spared: Iterable[int],
) -> Sampling:
    """Of a request's first answer. end_token_ids: all that end it. spared: tokens that XTC leaves alone. Raises
    Refused."""
    if message.min_tokens > max_tokens:
        raise Refused("bad_request", f"min_tokens is {message.min_tokens}, but there are {max_tokens} new ones at most")
    biases = tuple((int(token), bias) for token, bias in (message.logit_bias or {}).items())
    outside = next((token for token, _ in biases if token >= vocabulary), None)
    if outside is not None:
        raise Refused("bad_request", f"logit_bias names {outside}, but the model's ids are 0 to {vocabulary - 1}")
    longest = prompt_tokens + max_tokens
    # What is off is as if it had not been named: rows that draw alike have equal settings.
    windows = {
        f"{name}_context_size": min(getattr(message, f"{name}_context_size"), longest)
        for name, off in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0))
        if getattr(message, f"{name}_penalty") != off
    }
    return Sampling(
        temperature=_given(message.temperature, defaults.temperature),
        top_p=_given(message.top_p, defaults.top_p),
        top_k=_given(message.top_k, defaults.top_k),
        min_p=_given(message.min_p, defaults.min_p),
        seed=_given(message.seed, secrets.randbits(63)),
        xtc_probability=message.xtc_probability,
        xtc_threshold=message.xtc_threshold,
        xtc_spared=_within(spared, vocabulary),
        logit_bias=biases,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        earliest_end=prompt_tokens + message.min_tokens if message.min_tokens else 0,
        end_token_ids=_within(end_token_ids, vocabulary) if message.min_tokens else (),
        num_top_logprobs=message.top_logprobs if message.logprobs else None,
        grammar=grammar_of(message.structured_outputs) if message.structured_outputs else None,
        **windows,
    )


def grammar_of(wanted: StructuredOutputs) -> Grammar:
    """Raises Refused. Whether it is a grammar is for one to say who has a tokenizer."""
    if wanted.json is not None:
        try:
            return Grammar("json", json.dumps(wanted.json))
        except (TypeError, ValueError) as error:
            raise Refused("bad_request", f"structured_outputs.json is no JSON: {error}") from error
    if wanted.json_object:
        return Grammar("json", '{"type": "object"}')
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.grammar is not None:
        return Grammar("lark", wanted.grammar)
    assert wanted.choice is not None
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice))


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's answer number `index`: of the first the request's own, of the others unrelated ones."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _within(tokens: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    """Those that the model knows: MLX checks no bounds."""
    return tuple(sorted(token for token in set(tokens) if token < vocabulary))


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
