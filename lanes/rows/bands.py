"""Rows of very different length in one lane: which of them are read together.

Attention over arrays reads, for every row of a call, the columns of the longest one. So the slots are cut into
bands, runs of neighbours that are read in one call each, to the width of their own longest row. The cost of a step's
reading, in columns (the key and the value of one token in one layer):

    sum over bands of (rows x width)  +  bands x columns per call

where a call's fixed cost counts as the columns that could be read in its time (measured, see lanes.attention). Several
lanes, each with its own rows, would save the same and read all weights once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# More would be more graph than reading.
MOST_BANDS = 4


@dataclass(frozen=True, slots=True)
class Band:
    """Slots [first, last), read to `width` columns."""

    first: int
    last: int
    width: int


def cost_columns(bands: Sequence[Band], columns_per_call: float) -> float:
    """The formula above."""
    return sum((band.last - band.first) * band.width for band in bands) + columns_per_call * len(bands)


def cut(widths: Sequence[int], columns_per_call: float) -> list[Band]:
    """The cheapest way to read slots that need so many columns each, in at most MOST_BANDS bands."""
    whole = [Band(0, len(widths), max(widths))]
    wasted = len(widths) * max(widths) - sum(widths)
    if wasted <= columns_per_call:  # what a second call costs: no cut can pay
        return whole
    # cheapest[last] after k rounds: (cost, places of the cuts) of reading slots [0, last) in k bands at most.
    unreached: tuple[float, tuple[int, ...]] = (float("inf"), ())
    cheapest = [(0.0, unreached[1]), *[unreached] * len(widths)]
    for _ in range(MOST_BANDS):
        extended = list(cheapest)
        for last in range(1, len(widths) + 1):
            width = 0
            for first in range(last - 1, -1, -1):
                width = max(width, widths[first])
                cost = cheapest[first][0] + (last - first) * width + columns_per_call
                if cost < extended[last][0]:
                    extended[last] = (cost, (*cheapest[first][1], first))
        cheapest = extended
    starts = cheapest[-1][1]
    ends = (*starts[1:], len(widths))
    return [Band(a, b, max(widths[a:b])) for a, b in zip(starts, ends, strict=True)]


class Cutter:
    """Cuts the slots of a lane for each step. To find the cheapest cuts costs a while, so they are kept until a row
    comes or goes, or has grown by a number of columns that could move them."""

    def __init__(self, columns_per_call: float | None) -> None:
        """None: one band always, for a form of attention that reads each row's own columns anyway."""
        self.columns_per_call = columns_per_call
        self._known: tuple[tuple[int | None, ...], int, list[tuple[int, int]]] | None = None

    def bands(self, rows: Sequence[int | None], widths: Sequence[int]) -> list[Band]:
        """rows: who is in each slot. widths: columns that each slot's row has, with its new token."""
        if self.columns_per_call is None or len(widths) < 2:
            return [Band(0, len(widths), max(widths))]
        key, generation = tuple(rows), max(widths) // 256
        if self._known is None or self._known[:2] != (key, generation):
            places = [(s.first, s.last) for s in cut(widths, self.columns_per_call)]
            self._known = (key, generation, places)
        return [Band(first, last, max(widths[first:last])) for first, last in self._known[2]]
