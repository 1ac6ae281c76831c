"""Prompt lookup: what may come next in a row, guessed from where its last tokens stood before. Pure; imports no MLX.

An answer often repeats what its row has: a text that is corrected, names, code, quotations. So where the last tokens
of a row have occurred in it before, what followed them there is a draft of what comes now (Saxena 2023, "Prompt Lookup
Decoding"). One pass verifies it: of the tokens that the model draws after each drafted one, those up to the first that
differs from the draft stand, and that one with them. The answer is what it would be without.

A pass over n tokens takes a + b n, and a / b is known (lanes.sharing). In a lane of r rows, drafts of up to w tokens
make the pass one of r (1 + w) tokens, for rows without a draft are padded. Where a drafted token stands with chance p,
if those before it do, a draft of k tokens gives p + p^2 + ... + p^k on average. The w is taken that gives most tokens
for its time, and none unless that is more by a margin; often it is none.
"""

from __future__ import annotations

from collections.abc import Sequence

# Numbers of last tokens that are looked up, the most telling first, and the chance of a drafted token to stand before
# any was tried.
FIRST_CHANCES = {3: 0.5, 2: 0.3}
# How much each tried token counts, and how far a step in which a draft was not worth its time brings the chance back:
# so drafts that have failed are tried again, now and then.
WEIGHT = 0.15
RECOVERY = 0.003
# What drafts have to give more than a step without: for them the last step is read before the next one is begun, which
# takes a CPU 5 to 10% of a step, and long rows cost more a token than was measured with short ones.
MARGIN = 1.1


class Lookup:
    """One row's tokens, prompt and answer, and how its drafts went.

    chances: for each number of last tokens, how likely a token drafted by them stands.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # Where what has followed these last tokens begins: the latest place counts.
        self._followed: dict[tuple[int, ...], int] = {}
        self.chances = dict(FIRST_CHANCES)
        for token in tokens:
            self.extend(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token: int) -> None:
        """The row's next token."""
        tokens = self._tokens
        for n in FIRST_CHANCES:
            if len(tokens) >= n:
                self._followed[tuple(tokens[-n:])] = len(tokens)
        tokens.append(token)

    def draft(self, most: int) -> tuple[int, list[int]]:
        """(how many last tokens were found again, up to `most` tokens that may come next); (0, []) if none were. What
        repeats itself is drafted to go on so."""
        for n in FIRST_CHANCES:
            at = self._followed.get(tuple(self._tokens[-n:]))
            if at is not None:
                period = len(self._tokens) - at
                return n, [self._tokens[at + index % period] for index in range(most)]
        return 0, []

    def book(self, ngram: int, num_drafted: int, num_accepted: int) -> None:
        """How a draft went of which so many tokens were tried."""
        chance = self.chances[ngram]
        for _ in range(num_accepted):
            chance += WEIGHT * (1 - chance)
        if num_accepted < num_drafted:
            chance -= WEIGHT * chance
        self.chances[ngram] = chance

    def book_untried(self, ngram: int) -> None:
        """There was a draft, and it was not thought worth its time."""
        self.chances[ngram] += RECOVERY * max(FIRST_CHANCES[ngram] - self.chances[ngram], 0.0)


def best_width(chances: Sequence[float], most: int, num_slots: int, weights_tokens: int) -> int:
    """How many tokens to draft, 0 to `most`, in a step of so many slots; chances: of each row that has a draft.

    weights_tokens: in a pass, that many tokens take as long as reading the weights.
    """
    best, best_rate = 0, MARGIN * num_slots / (weights_tokens + num_slots)
    expected, standing = float(num_slots), list(chances)
    for width in range(1, most + 1):
        expected += sum(standing)
        standing = [each * chance for each, chance in zip(standing, chances, strict=True)]
        rate = expected / (weights_tokens + num_slots * (1 + width))
        if rate > best_rate:
            best, best_rate = width, rate
    return best


def accepted(draft: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """What stands of the tokens drawn after a row's input and after each token of its draft, in this order: those that
    the draft has too, and the first that it has not."""
    agreed = 0
    while agreed < len(draft) and draft[agreed] == drawn[agreed]:
        agreed += 1
    return list(drawn[: agreed + 1])
