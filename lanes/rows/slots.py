"""Which row has which slot, and how long it is: the host's side of a lane's arrays.

Slots in use are kept low: a row enters the lowest free one, and the arrays are read up to the highest used one. Lengths
are plain ints here and go to the device once a step, as one small array for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence


class Slots:
    """The table of slots: rows[i] is the row id in slot i or None, lengths[i] the tokens that its caches hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: list[int | None] = []
        self.lengths: list[int] = []
        self._by_row: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_row)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._by_row

    def length_of(self, row_id: int) -> int:
        return self.lengths[self._by_row[row_id]]

    def claim(self, row_id: int, length: int) -> int:
        """Give the row the lowest free slot."""
        assert row_id not in self._by_row, f"row {row_id} is in slot {self._by_row[row_id]} already"
        if None in self.rows:
            slot = self.rows.index(None)
        else:
            slot = len(self.rows)
            assert slot < self.limit, f"row {row_id} finds all {self.limit} slots taken"
            self.rows.append(None)
            self.lengths.append(0)
        self.rows[slot], self.lengths[slot] = row_id, length
        self._by_row[row_id] = slot
        return slot

    def release(self, row_id: int) -> int:
        """Take the row out and return its slot, which is free now."""
        slot = self._by_row.pop(row_id)
        self._free(slot)
        return slot

    def _free(self, slot: int) -> None:
        self.rows[slot], self.lengths[slot] = None, 0
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
            self.lengths.pop()

    def hole(self) -> tuple[int, int] | None:
        """(source, target) of the move that makes the part in use shorter, or None if it has no free slot."""
        return (len(self.rows) - 1, self.rows.index(None)) if None in self.rows else None

    def move(self, source: int, target: int) -> None:
        row_id, length = self.rows[source], self.lengths[source]
        assert row_id is not None, f"slot {source} holds no row"
        assert self.rows[target] is None, f"slot {target} holds row {self.rows[target]}"
        self.rows[target], self.lengths[target] = row_id, length
        self._by_row[row_id] = target
        self._free(source)

    def advance(self, tokens: Sequence[int] | None = None) -> None:
        """Book one step: every row is a token longer, or as many as said, by slot."""
        for slot, row_id in enumerate(self.rows):
            if row_id is not None:
                self.lengths[slot] += 1 if tokens is None else tokens[slot]

    def check(self) -> None:
        listed = {row_id: slot for slot, row_id in enumerate(self.rows) if row_id is not None}
        assert listed == self._by_row, f"slots {listed} and rows {self._by_row} disagree"
        assert not self.rows or self.rows[-1] is not None, "the last slot in use is free"
        assert len(self.rows) <= self.limit, f"{len(self.rows)} slots in use, limit {self.limit}"
