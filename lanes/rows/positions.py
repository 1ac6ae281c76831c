"""Where one step writes and what it may read, for every row at once and every layer alike.

Both are made anew for each step and never changed: models keep what they read of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from lanes.rounding import read_width
from lanes.rows.bands import Band


class Columns:
    """The columns of a [slots, heads, capacity, dim] array that one step touches.

    rows: slots in use, from 0 on. width: columns that are read, from 0 on. array [rows]: the column that each row
    writes, or [rows, tokens], where they write several. mask: bool [rows, 1, tokens, width], true where a row's token
    may look.
    """

    def __init__(self, array: mx.array, width: int, mask: mx.array) -> None:
        self.rows: int = array.shape[0]
        self.width = width
        self.array = array
        self.mask = mask

    @cached_property
    def write_index(self) -> mx.array:
        """[rows, 1, tokens, 1], to write along the length axis."""
        return self.array[:, None, None, None] if self.array.ndim == 1 else self.array[:, None, :, None]

    @cached_property
    def row_index(self) -> mx.array:
        """As array's shape."""
        rows = mx.arange(self.rows)
        return rows if self.array.ndim == 1 else rows[:, None]


class Positions:
    """The lengths of the rows in slots [0, rows) before a step, int32 [rows]: the position of each row's new token.

    tokens: how many new tokens each row has. read_width: columns that hold the longest row with these, or more; the
    host's number, not the device's.
    bands: which slots are read together, and how far. offset: what RoPE is given; one number where all rows are
    equally long, which it rotates by faster and to the same bits.
    """

    def __init__(self, array: mx.array, read_width: int, bands: Sequence[Band] = (), tokens: int = 1) -> None:
        self.rows: int = array.shape[0]
        self.read_width = read_width
        self.bands = bands
        self.tokens = tokens
        self.array = array
        self.offset: mx.array | int = array
        self._layouts: dict[tuple[int | None, int, int | None], Columns] = {}

    @classmethod
    def of(cls, lengths: list[int], bands: Sequence[Band] = (), tokens: int = 1) -> Positions:
        """For rows so long."""
        width = read_width(max(lengths, default=0) + tokens)
        positions = cls(mx.array(lengths, dtype=mx.int32), width, bands, tokens)
        if len(set(lengths)) == 1:
            positions.offset = lengths[0]
        return positions

    def linear(self, window: int | None = None) -> Columns:
        """Token p of a row is in column p. A window restricts what is looked at, not what is kept."""
        key = (None, 0, window)
        if key not in self._layouts:
            width = self.read_width
            array = self.array if self.tokens == 1 else self.array[:, None] + mx.arange(self.tokens)
            column, now = mx.arange(width), array[..., None]
            mask = column <= now
            if window is not None:
                mask = mask & (now - column < window)
            self._layouts[key] = Columns(array, width, mask[:, None, None, :] if self.tokens == 1 else mask[:, None])
        return self._layouts[key]

    def ring(self, size: int, keep: int, window: int | None = None) -> Columns:
        """Columns hold the first `keep` tokens and the last size - keep ones: token p beyond them is in column
        keep + (p - keep) % (size - keep). Until a row is longer than the ring that is column p."""
        assert self.tokens == 1, f"{self.tokens} tokens for a ring, which could not take them back"
        if window is not None and window >= size:
            window = None
        key = (size, keep, window)
        if key not in self._layouts:
            width = min(self.read_width, size)
            column, now = mx.arange(width), self.array[:, None]
            mask = column <= now
            if window is not None:
                ages = mx.where(column < keep, now - column, (now - column) % (size - keep))
                mask = mask & (ages < window)
            array = self.array
            if self.read_width > size:
                array = mx.where(array < size, array, keep + (array - keep) % (size - keep))
            self._layouts[key] = Columns(array, width, mask[:, None, None, :])
        return self._layouts[key]
