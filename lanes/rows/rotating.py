"""Sliding-window attention: a ring of the window's columns, some of the first tokens kept in front of it.

What a row has lost of its past is gone: it can be cut only where its ring was saved.
"""

from __future__ import annotations

from mlx_lm.models.cache import RotatingKVCache

from lanes.rows.columns import Arrays
from lanes.rows.kv import PlainRows
from lanes.rows.positions import Columns


class RotatingRows(PlainRows):
    kind = "rotating"

    def __init__(self, size: int, keep: int) -> None:
        super().__init__()
        self.size = size
        self.keep = keep

    @classmethod
    def like(cls, row: RotatingKVCache) -> RotatingRows:
        return cls(row.max_size, row.keep)

    def columns(self, window: int | None = None) -> Columns:
        return self.positions.ring(self.size, self.keep, window)

    def held_columns(self, tokens: int) -> int:
        return min(tokens, self.size)

    def solo_parts(self, row: RotatingKVCache, length: int) -> list[tuple[int, Arrays]]:
        assert row.offset == length, f"a row of {row.offset} tokens, {length} expected"
        # mlx-lm's ring turns too, at places of its own, and may hold more than the window after a chunk.
        return ring_pieces([row._temporal_order(part) for part in (row.keys, row.values)], length, self.size, self.keep)

    def solo_row(self, parts: Arrays, length: int) -> RotatingKVCache:
        row = RotatingKVCache(self.size, self.keep)
        if parts:
            turn = self.size - self.keep
            next_column = length if length <= self.size else self.keep + (length - self.keep) % turn
            row.state = (*parts, length, self.keep, self.size, next_column)
        return row


def ring_pieces(parts: Arrays, length: int, size: int, keep: int) -> list[tuple[int, Arrays]]:
    """Columns in the order of their tokens, for a ring of `size` columns: (first column, arrays) of each piece.

    parts [1, heads, n, dim] hold the first `keep` tokens and the last n - keep of a row of `length`, n at least what
    the ring holds.
    """
    held = parts[0].shape[2]
    if length <= size:
        assert held == length, f"{held} columns of a row of {length} tokens that fits its ring of {size}"
        return [(0, parts)]
    turn = size - keep
    start = (length - keep) % turn  # in the ring, where the oldest token that is kept has its column
    oldest = held - turn

    def piece(first: int, last: int) -> Arrays:
        return [part[..., first:last, :] for part in parts]

    pieces = [(keep + start, piece(oldest, held - start)), (keep, piece(held - start, held)), (0, piece(0, keep))]
    return [(column, arrays) for column, arrays in pieces if arrays[0].shape[2]]
