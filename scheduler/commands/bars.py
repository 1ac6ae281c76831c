"""Bars and small curves of characters, for terminals that have block elements and for those that have only ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import OverflowMethod
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Glyphs:
    """levels: from nothing to full, for curves. first, second, rest: what a bar of two parts is made of. overflow: how
    rich ends a line that is cut."""

    levels: str
    first: str
    second: str
    rest: str
    rule: str
    overflow: OverflowMethod


BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", "▓", "█", "·", "─", "ellipsis")
ASCII = Glyphs(" ._-:=+*#", "=", "#", ".", "-", "crop")


def curve(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The values as so many characters, each the mean of its share of them; the largest is full height.

    What is above nothing is seen, however little it is.
    """
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    ends = [len(values) * place // width for place in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
    top, most = max(means), len(glyphs.levels) - 1
    return "".join(glyphs.levels[0 if mean <= 0 else max(1, round(mean / top * most))] for mean in means)


def two_part_bar(first: float, second: float, whole: float, width: int, glyphs: Glyphs) -> Text:
    """A bar of `whole` that is filled by first and then second. A part above nothing is seen, if there is room."""
    if whole <= 0:
        return Text(glyphs.rest * width, style="dim")
    both = min(max(_cells(first + second, whole, width), (first > 0) + (second > 0)), width)
    front = min(_cells(first, whole, width), both - (second > 0 and both > 1))
    return Text.assemble(
        (glyphs.first * front, "cyan"),
        (glyphs.second * (both - front), "green"),
        (glyphs.rest * (width - both), "dim"),
    )


def _cells(part: float, whole: float, width: int) -> int:
    return 0 if part <= 0 else min(width, max(1, round(part / whole * width)))
