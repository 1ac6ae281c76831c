"""Recurrent state: arrays [rows, ...] without a length axis, which a step replaces as a whole.

The arrays are as long as the part of the slots in use, since a step writes all of it anyway. Prompts are processed
alone, so no padding ever enters a state and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from lanes.rows.held import Held, numbers
from lanes.rows.positions import Positions


class SSMRows(ArraysCache):  # type: ignore[misc]
    """Rows of one ArraysCache. An array is None until a row brings a state or a step makes one.

    It derives from what it stands for because mamba stores its state in instances of that class only.
    """

    kind = "ssm"
    # What mlx-lm's models ask of a padded batch; here there is no padding.
    lengths = None
    left_padding = None
    may_be_held = True

    def __init__(self, num_arrays: int) -> None:
        self.arrays: list[mx.array | None] = [None] * num_arrays
        self._positions = Positions.of([])

    @classmethod
    def like(cls, row: ArraysCache) -> SSMRows:
        return cls(len(row.cache))

    @property
    def positions(self) -> Positions:
        return self._positions

    @positions.setter
    def positions(self, positions: Positions) -> None:
        """The next step has so many rows; slots that are free in between may hold anything."""
        self._positions = positions
        self.arrays = [None if array is None else _with_rows(array, positions.rows) for array in self.arrays]

    # What the models call.

    def __getitem__(self, index: int) -> mx.array | None:
        return self.arrays[index]

    def __setitem__(self, index: int, array: mx.array) -> None:
        self.arrays[index] = array

    @property
    def offset(self) -> mx.array | int:
        return self.positions.offset

    @property
    def state(self) -> list[mx.array]:
        return [array for array in self.arrays if array is not None]

    @state.setter
    def state(self, arrays: Sequence[mx.array]) -> None:
        assert len(arrays) == len(self.arrays), f"{len(arrays)} arrays for a state of {len(self.arrays)}"
        self.arrays = list(arrays)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def empty(self) -> bool:
        return self.arrays[0] is None

    def make_mask(self, num_tokens: int, **_: Any) -> None:
        assert num_tokens == 1, f"a lane steps one token a row, not {num_tokens}"

    def advance(self, num_tokens: int) -> None:
        """The lane counts."""

    # What the lane calls.

    def merge(self, slot: int, row: ArraysCache, length: int) -> None:
        """A row's state enters a slot; one of no tokens has none, which is a state of zeros."""
        for index, state in enumerate(row.cache):
            array = self.arrays[index]
            if array is None and state is None:
                continue  # nobody has a state yet: the next step begins with none
            like = state if array is None else array
            assert state is None or state.shape[1:] == like.shape[1:], (
                f"a state of {state.shape[1:]}, others of {like.shape[1:]}"
            )
            if array is None:
                array = mx.zeros((slot + 1, *like.shape[1:]), like.dtype)
            if array.shape[0] <= slot:
                array = _with_rows(array, slot + 1)
            array[slot : slot + 1] = mx.zeros((1, *like.shape[1:]), like.dtype) if state is None else state
            self.arrays[index] = array

    def filter(self, slot: int) -> None:
        """The row leaves; whoever gets its slot brings a state, if only zeros, that overwrites this one."""

    def lift(self, slot: int, length: int) -> list[mx.array]:
        """The row's state, to be evaluated and put into another slot."""
        return [mx.contiguous(array[slot : slot + 1]) for array in self.state]

    def put(self, slot: int, lifted: Sequence[mx.array]) -> None:
        for array, row in zip(self.state, lifted, strict=True):
            array[slot : slot + 1] = row

    def held_alone(self, row: ArraysCache, length: int) -> list[Held]:
        """A solo row's state: nothing where it has no tokens, or its layer keeps none."""
        return _held(row.cache) if length else []

    def held_in(self, slot: int, length: int) -> list[Held]:
        """The state of the row in a slot."""
        return _held([None if array is None else array[slot : slot + 1] for array in self.arrays]) if length else []

    def solo_row(self, arrays: Sequence[mx.array | None], length: int) -> ArraysCache:
        """A solo row of arrays that are its own, [1, ...], None where there is none."""
        row = ArraysCache(len(self.arrays))
        row.cache = list(arrays)
        return row

    def take(self, slot: int, length: int) -> ArraysCache:
        row = ArraysCache(len(self.arrays))
        if length:
            row.cache = [None if array is None else mx.contiguous(array[slot : slot + 1]) for array in self.arrays]
            mx.eval([array for array in row.cache if array is not None])
        return row

    def resize(self, slots: int, capacity: int) -> None:
        """A state has no length, and its array is as long as it is used."""

    def clear(self) -> None:
        self.arrays = [None] * len(self.arrays)


def _with_rows(array: mx.array, rows: int) -> mx.array:
    held = array.shape[0]
    if held > rows:
        return array[:rows]
    if held < rows:
        return mx.concatenate([array, mx.zeros((rows - held, *array.shape[1:]), array.dtype)])
    return array


def _held(arrays: Sequence[mx.array | None]) -> list[Held]:
    """Nothing where there is no array."""
    found = [(name, array) for name, array in zip(numbers(len(arrays)), arrays, strict=True) if array is not None]
    return [Held(tuple(name for name, _ in found), tuple(array for _, array in found))] if found else []
