"""Where a prompt's rings and recurrent state are saved, for models that can be taken up at boundaries only.

By content: the end of the system prompt, which other chats begin with; the place up to which somebody else's tokens
were the same, since where two have parted a third may; the end of the prompt less one token, where it is merged. And,
as nobody knows where the next prompt will part from this one, a series that thins towards the beginning: a later prompt
shares with this one all but its end, more often than not.
"""

from __future__ import annotations

# Boundaries of different prompts with the same beginning coincide on this grid.
GRID_TOKENS = 256
# The first of the series lies so far before the end, each next one twice as far.
NEAREST_TOKENS = 512


def boundaries(prompt_tokens: int, known: int, matched: int, system_tokens: int | None) -> tuple[int, ...]:
    """Token counts above `known` and below the prompt's length, ascending.

    known: tokens that were recalled. matched: tokens that are the same as some others', boundary or not.
    """
    last = prompt_tokens - 1
    wanted = {last, matched, system_tokens or 0}
    distance = NEAREST_TOKENS
    while distance < last:
        wanted.add((last - distance) // GRID_TOKENS * GRID_TOKENS)
        distance *= 2
    return tuple(sorted(at for at in wanted if known < at <= last))
