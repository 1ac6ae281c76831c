"""What an engine remembers of its rows for as long as they are there: boundaries saved on their way, and the memory
that a row is waiting for to be filled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lanes.boundary import Remembers, Saved
from lanes.freeze import Fetch, Frozen, freeze
from lanes.lane import Freeze, RowSpec
from lanes.rows import held_alone
from lanes.rows.held import Held
from lanes.solo import RowMaker
from lanes.thaw import Thaw
from store.checkpoint import Carrier, Destination, Part

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a row of `length` tokens holds. may_be_held: whether the arrays may be read while steps go on."""

    row: Sequence[Held]
    length: int
    may_be_held: bool = False


class RowMemory:
    """Of all rows of an engine. What fails here ends no row: it is logged, and the row goes on without."""

    def __init__(
        self,
        make_row: RowMaker,
        remembers: Remembers,
        carrier: Carrier | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        """remembers: see lanes.lane.ModelInfo. carrier: see lanes.thaw.Thaw. fetch: see lanes.freeze.freeze."""
        self.make_row = make_row
        self._carrier = carrier
        self._fetch = fetch
        self.remembers = remembers
        self._saved: dict[int, Saved] = {}
        self.saved_bytes = 0  # of all boundaries of all rows
        self._thaws: dict[int, Thaw] = {}
        self._begun: list[tuple[Freeze, Frozen | None]] = []  # in this turn
        self._left: list[tuple[Freeze, Frozen | None]] = []  # by the turn before

    @property
    def rows(self) -> set[int]:
        return {*self._saved, *self._thaws}

    @property
    def nbytes(self) -> int:
        return self.saved_bytes + sum(thaw.nbytes for thaw in self._thaws.values())

    def save(self, row_id: int, caches: Sequence[Any], at: int) -> list[mx.array]:
        """The row is at a boundary, with `at` tokens in caches of its own. Returns arrays that are being computed."""
        if self.remembers != "boundaries":
            return []
        try:
            begun = self._saved.setdefault(row_id, Saved()).add(held_alone(caches, at), at)
            mx.async_eval(begun)
        except Exception:
            logger.warning("row %d could not be saved at %d tokens", row_id, at, exc_info=True)
            self._saved.pop(row_id, None)  # some of it may be there without the rest
            begun = []
        self._count()
        return begun

    def begin_freeze(self, wanted: Freeze, find: Callable[[int], Holding | None]) -> None:
        """take_frozen() tells what comes of it. find: by row id; None where the row is gone."""
        frozen = None
        try:
            if (holding := find(wanted.row_id)) is not None:
                frozen = self.freeze(wanted, holding.row, holding.length)
                if not holding.may_be_held:
                    frozen = Frozen(frozen.wait())
        except Exception:
            logger.warning("%s failed", wanted, exc_info=True)
            frozen = None
        self._begun.append((wanted, frozen))

    def take_frozen(self, is_step_behind: bool) -> tuple[tuple[Freeze, Part | None], ...]:
        """What was frozen in the turn that ends. is_step_behind: another turn reads what has been dispatched since; to
        that is left what is still being copied."""
        told, self._left = self._left, []
        for wanted, frozen in self._begun:
            is_left = is_step_behind and frozen is not None and frozen.copying
            (self._left if is_left else told).append((wanted, frozen))
        self._begun = []
        return tuple((wanted, self._whole(wanted, frozen)) for wanted, frozen in told)

    def _whole(self, wanted: Freeze, frozen: Frozen | None) -> Part | None:
        try:
            return frozen.wait() if frozen else None
        except Exception:
            logger.warning("%s failed", wanted, exc_info=True)
            return None

    def freeze(self, wanted: Freeze, row: Sequence[Held], length: int) -> Frozen:
        """The part that is wanted of a row that has `length` tokens. Whatever it raises, the row can go on."""
        anywhere, saved = self.remembers == "anywhere", self._saved.get(wanted.row_id, Saved())
        least = wanted.stop if anywhere else length
        assert wanted.start < wanted.stop == least <= length, f"{wanted} of a row of {length} tokens"
        return freeze(row, saved, wanted.start, wanted.stop, anywhere, self._fetch)

    def admit(self, spec: RowSpec) -> tuple[Destination, ...]:
        """Where to read what is known of the row; nowhere, if memory for it cannot be made."""
        if spec.recall is None:
            return ()
        try:
            thaw = Thaw(self.make_row(), spec.recall, len(spec.prompt), self._carrier)
        except Exception:
            logger.warning("row %d cannot be recalled", spec.row_id, exc_info=True)
            return ()
        self._thaws[spec.row_id] = thaw
        return thaw.destinations

    def recalled(self, row_id: int) -> Thaw | None:
        """The memory that was made for the row; nobody else knows of it from now on."""
        return self._thaws.pop(row_id, None)

    def fork(self, source: int, target: int) -> None:
        """A row goes on from where another is."""
        if source in self._saved:
            self._saved[target] = self._saved[source].copy()
            self._count()

    def forget(self, row_id: int) -> None:
        if self._saved.pop(row_id, None):
            self._count()
        self._thaws.pop(row_id, None)

    def _count(self) -> None:
        self.saved_bytes = sum(saved.nbytes for saved in self._saved.values())
