"""Prompts with the same beginning that are there together: it is processed once, and the others wait for it.

A prompt that waits takes no row. What it waits for is frozen as soon as it is there, not at the end of the other's
prompt, and recalled from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.request import Request

# So many tokens more than what is known already are worth a turn or two of waiting.
WORTH_WAITING_TOKENS = 64


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same, found by comparing ever smaller slices."""
    low, high = 0, min(len(one), len(other)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def longest_beginning(request: Request, under_way: Iterable[Request], cut_anywhere: bool) -> tuple[int, Request] | None:
    """The prompt under way that shares most with a request's, and how many tokens; None: there is none to wait for."""
    wish = request.wish
    found: tuple[int, Request] | None = None
    for other in under_way:
        if not other.is_kept or other.wish.namespace != wish.namespace:
            continue
        shared = min(shared_tokens(wish.prompt, other.wish.prompt), len(wish.prompt) - 1, len(other.wish.prompt) - 1)
        # One that is past the place cannot save its state there any more.
        if other.num_processed > shared and not cut_anywhere:
            continue
        if shared >= WORTH_WAITING_TOKENS and (found is None or shared > found[0]):
            found = shared, other
    return found
