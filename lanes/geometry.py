"""How many bytes a row of so many tokens takes, by the geometry of the model's caches. Imports no MLX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lanes.rounding import capacity_for, round_rows


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """A row's memory: state of a fixed size, columns that grow with every token, rings that grow up to their size.

    state_bytes: recurrent state. column_bytes: of each token in all caches that keep every token. rings: (columns,
    bytes of a column) for each size of ring.
    """

    state_bytes: int = 0
    column_bytes: int = 0
    rings: tuple[tuple[int, int], ...] = ()

    @classmethod
    def total(cls, parts: Iterable[RowGeometry]) -> RowGeometry:
        """Of all parts together."""
        state_bytes = column_bytes = 0
        rings: Counter[int] = Counter()
        for part in parts:
            state_bytes += part.state_bytes
            column_bytes += part.column_bytes
            for columns, ring_column_bytes in part.rings:
                rings[columns] += ring_column_bytes
        return cls(state_bytes, column_bytes, tuple(sorted(rings.items())))

    @property
    def fixed_bytes(self) -> int:
        """What does not grow any more in a row longer than every ring."""
        return self.state_bytes + sum(columns * column_bytes for columns, column_bytes in self.rings)

    def row_bytes(self, tokens: int) -> int:
        """A row alone."""
        rings = sum(min(tokens, columns) * column_bytes for columns, column_bytes in self.rings)
        return self.state_bytes + tokens * self.column_bytes + rings

    def lane_bytes(self, rows: int, longest_tokens: int) -> int:
        """A lane's arrays for so many rows, the longest of so many tokens: slots and columns as they are rounded up."""
        return round_rows(rows) * self.row_bytes(capacity_for(longest_tokens)) if rows else 0
