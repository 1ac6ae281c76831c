"""Log-probabilities as OpenAI's chats (and responses) and its completions have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.protocol import TokenLogprob, TopLogprob


def of_chat(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [{**_token(each), "top_logprobs": [_token(top) for top in each.top_logprobs]} for each in logprobs]


def _token(each: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": each.token, "logprob": each.logprob, "bytes": list(each.token.encode())}


def of_completion(logprobs: Sequence[TokenLogprob], at: int) -> dict[str, Any]:
    """Parallel lists. at: characters of the answer's text before the first of these tokens."""
    offsets = []
    for each in logprobs:
        offsets.append(at)
        at += len(each.token)
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [{top.token: top.logprob for top in each.top_logprobs} for each in logprobs],
        "text_offset": offsets,
    }
