"""Which columns of a cache hold which tokens of a row, and sums of token ranges: ints only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from store.checkpoint import Range


class Run(NamedTuple):
    """The tokens [first, last), whose columns are neighbours from `column` on."""

    first: int
    last: int
    column: int


Runs = tuple[Run, ...]


def linear(tokens: int) -> Runs:
    """Token p in column p."""
    return (Run(0, tokens, 0),) if tokens else ()


def in_order(tokens: int, columns: int, keep: int) -> Runs:
    """The first `keep` tokens and the last columns - keep, in their order; all of them where there are columns for."""
    if columns >= tokens:
        return linear(tokens)
    return _filled(Run(0, keep, 0), Run(tokens - (columns - keep), tokens, keep))


@dataclass(frozen=True, slots=True)
class Ring:
    """A window's columns: those of the first `keep` tokens, and of the last size - keep; see positions.Positions.ring
    for where each is."""

    size: int
    keep: int

    def runs(self, tokens: int) -> Runs:
        if tokens <= self.size:
            return linear(tokens)
        turn = self.size - self.keep
        oldest = tokens - turn
        column = self.keep + (oldest - self.keep) % turn
        turned = oldest + self.size - column  # the first token after the ring's end, back behind those that are kept
        return _filled(Run(0, self.keep, 0), Run(oldest, turned, column), Run(turned, tokens, self.keep))


def _filled(*runs: Run) -> Runs:
    return tuple(run for run in runs if run.first < run.last)


def ranges_of(runs: Iterable[Run]) -> tuple[Range, ...]:
    """The tokens of runs that are in the order of their tokens."""
    return joined((run.first, run.last) for run in runs)


def side_by_side(ranges: Iterable[Range]) -> Runs:
    """These tokens, one after another from column 0 on."""
    runs: list[Run] = []
    for first, last in ranges:
        runs.append(Run(first, last, runs[-1].column + runs[-1].last - runs[-1].first if runs else 0))
    return tuple(runs)


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges in ascending order, neighbours and overlapping ones made one."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def cut(ranges: Iterable[Range], start: int, stop: int) -> tuple[Range, ...]:
    """What of ranges lies in [start, stop)."""
    inside = ((max(first, start), min(last, stop)) for first, last in ranges)
    return tuple((first, last) for first, last in inside if first < last)


def without(ranges: Iterable[Range], others: Iterable[Range]) -> tuple[Range, ...]:
    """What of ranges lies in none of the others."""
    left = tuple(ranges)
    for first, last in others:
        left = (*cut(left, 0, first), *cut(left, last, max((stop for _, stop in left), default=0)))
    return joined(left)
