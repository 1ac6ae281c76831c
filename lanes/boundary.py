"""What of a row cannot be had any more once it has gone on: its rings and recurrent state at a boundary.

At a boundary b a ring of `size` columns holds the first `keep` tokens and the last size - keep before b. Boundaries
that are near each other share most of these, so at each only those are saved that none before has saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from lanes.rows.held import Held, copied_columns
from lanes.rows.runs import ranges_of, side_by_side, without

Remembers = Literal["anywhere", "boundaries", "nothing"]

_KINDS: dict[str, Remembers] = {
    "kv": "anywhere",
    "qkv": "anywhere",
    "rotating": "boundaries",
    "rotating-qkv": "boundaries",
    "ssm": "boundaries",
}


def remembers(cache_kinds: Sequence[str]) -> Remembers:
    """At which token counts a row with such caches can be taken up again; kinds as lanes.choice tells them."""
    found = {_KINDS.get(member, "nothing") for kind in cache_kinds for member in kind.split("+")}
    return "nothing" if "nothing" in found else "boundaries" if "boundaries" in found else "anywhere"


class Saved:
    """Of one row. rings: by the names of their arrays, columns that no two of them have both. state: by token count."""

    def __init__(self) -> None:
        self.rings: dict[tuple[str, ...], list[Held]] = {}
        self.state: dict[int, list[Held]] = {}
        self.boundaries: list[int] = []

    def copy(self) -> Saved:
        """For a row that goes on from where this one is. What is saved never changes, and is shared."""
        other = Saved()
        other.rings = {names: list(held) for names, held in self.rings.items()}
        other.state = dict(self.state)
        other.boundaries = list(self.boundaries)
        return other

    @property
    def nbytes(self) -> int:
        held = [each for several in (*self.rings.values(), *self.state.values()) for each in several]
        return sum(array.nbytes for each in held for array in each.arrays)

    def add(self, row: Sequence[Held], at: int) -> list[mx.array]:
        """Save what a row holds that has `at` tokens. Returns what has to be evaluated before the row goes on."""
        new: list[Held] = []
        for held in row:
            if held.runs is None:
                # A model puts a new array in its place, and does not change this one; but that may be a view of more.
                new.append(Held(held.names, tuple(map(mx.contiguous, held.arrays))))
            elif held.ring is not None:
                saved = [range for each in self.rings.get(held.names, ()) for range in ranges_of(each.runs or ())]
                ranges = without(ranges_of(held.ring.runs(at)), saved)
                if ranges:
                    copies = tuple(copied_columns([held], ranges))
                    new.append(Held(held.names, copies, side_by_side(ranges), held.ring))
        self.boundaries.append(at)
        self.state[at] = [held for held in new if held.runs is None]
        for held in new:
            if held.runs is not None:
                self.rings.setdefault(held.names, []).append(held)
        return [array for held in new for array in held.arrays]
