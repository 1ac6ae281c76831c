"""Rows are made of plain bytes: memory for what is known of them, which somebody fills, and then caches of it.

That memory is the caches' own: keys and values are read to where they are used, and a prompt that goes on finds room
behind them, since mlx-lm's caches copy all they hold in order to grow. So it is on CUDA, where MLX's memory is unified:
600 MB of 72 arrays cost the model's thread 31 ms, and their first use on an H200 90; read into other memory and copied
they cost 335 and 50.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from lanes.blank import blank
from lanes.groups import in_groups
from lanes.rows import rows_like
from lanes.rows.columns import ColumnRows
from lanes.rows.held import joined_copy
from lanes.rows.ssm import SSMRows
from store.checkpoint import Carrier, Destination, Recall, TensorSpec, columns_of

# As mlx-lm's caches grow.
GROWTH_TOKENS = 256
# Where a device's memory is filled by a carrier: so much is allocated at once, and taken twice while it is copied.
SHARED_BYTES = 128 << 20
ALIGNMENT = 512

Place = tuple[int, ...]
# What belongs into each cache, by its number there.
Arrays = dict[Place, dict[int, mx.array]]


class Misfit(Exception):
    """What is recalled is not of this model's caches."""


@dataclass(frozen=True, slots=True)
class _Array:
    """One array of shape [1, ...] that is to be filled, and how its bytes lie: see Destination."""

    place: Place
    index: int
    wanted: TensorSpec
    shape: tuple[int, ...]
    head_bytes: int

    @property
    def nbytes(self) -> int:
        return TensorSpec(self.wanted.name, self.wanted.dtype, self.shape).nbytes


class _Memory:
    """The bytes of some arrays: of one, whose own they become, or of several, which are copied out of them."""

    def __init__(self, arrays: Sequence[_Array]) -> None:
        self._arrays = arrays
        self._starts = [*accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0)]
        self._content = blank(arrays[0].nbytes if len(arrays) == 1 else self._starts[-1])
        content: Any = self._content
        self._view = memoryview(content)

    @property
    def nbytes(self) -> int:
        return self._content.nbytes

    def destinations(self, carrier: Carrier | None) -> Iterator[Destination]:
        for array, start in zip(self._arrays, self._starts, strict=False):
            buffer = self._view[start : start + array.nbytes]
            yield Destination(array.wanted, buffer, array.head_bytes, carrier)

    def take(self) -> Iterator[tuple[Place, int, mx.array]]:
        """Each array, lazy, with its place. Only they keep this memory then."""
        self._view.release()
        for each, start in zip(self._arrays, self._starts, strict=False):
            content = self._content[start : start + each.nbytes] if len(self._arrays) > 1 else self._content
            array = content.view(getattr(mx, each.wanted.dtype)).reshape((1, *each.shape))
            yield each.place, each.index, joined_copy([array]) if len(self._arrays) > 1 else array
        del self._content


class Thaw:
    """A row of which the first recall.tokens tokens are to be filled in."""

    def __init__(
        self, empty: Sequence[Any], recall: Recall, prompt_tokens: int, carrier: Carrier | None = None
    ) -> None:
        """empty: the row's caches with nothing in them. prompt_tokens: how many there will be at least. carrier: what
        brings bytes to this device's memory, where not whoever reads them writes there.

        Raises Misfit where recall.specs and the caches do not fit together.
        """
        self.tokens = recall.tokens
        self._room_tokens = -(-prompt_tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        self._empty = empty
        arrays: list[_Array] = []
        specs = by_place(recall.specs)
        for place, cache in leaves(empty):
            for index, spec in sorted(specs.pop(place, {}).items()):
                arrays.append(self._array_for(cache, place, index, spec))
        if specs:
            raise Misfit(f"there is no cache for {sorted(specs)}")
        self._memory = [
            _Memory(group) for group in in_groups(arrays, lambda array: array.nbytes, SHARED_BYTES if carrier else 0)
        ]
        self.destinations = tuple(each for memory in self._memory for each in memory.destinations(carrier))

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def caches(self) -> list[Any]:
        """The row's caches, once all destinations are filled. Nobody may look at these any more."""
        for destination in self.destinations:
            destination.buffer.release()
        arrays: Arrays = {}
        while self._memory:
            taken = list(self._memory.pop().take())
            if len(taken) > 1:  # the memory that they are copied out of is free before more are
                mx.eval([array for _, _, array in taken])
            for place, index, array in taken:
                arrays.setdefault(place, {})[index] = array
        # What is left of the memory is in these arrays alone: so it is written in place when the row goes on.
        mx.eval([list(each.values()) for each in arrays.values()])
        return filled_caches(self._empty, arrays, self.tokens)

    def _array_for(self, cache: Any, place: Place, index: int, spec: TensorSpec) -> _Array:
        rows = rows_fitting(cache, spec)
        if not isinstance(rows, ColumnRows):
            return _Array(place, index, spec, spec.shape, spec.nbytes)
        wanted = columns_of(spec, rows.held_ranges(self.tokens))
        heads, columns, dim = wanted.shape
        shape = (heads, columns if rows.ring else max(columns, self._room_tokens), dim)
        return _Array(place, index, wanted, shape, shape[1] * wanted.column_bytes)


def filled_caches(empty: Sequence[Any], arrays: Arrays, tokens: int) -> list[Any]:
    """The caches of a row of so many tokens, of empty ones and what belongs into them."""
    return [_filled(cache, (index,), arrays, tokens) for index, cache in enumerate(empty)]


def _filled(cache: Any, place: Place, arrays: Arrays, tokens: int) -> Any:
    if isinstance(cache, CacheList):
        members = enumerate(cache.caches)
        return CacheList(*(_filled(member, (*place, index), arrays, tokens) for index, member in members))
    found = arrays.get(place)
    if found is None:  # its layer does not use it
        return cache
    rows = rows_like(cache)
    if isinstance(rows, SSMRows):
        return rows.solo_row([found.get(index) for index in range(len(cache.cache))], tokens)
    assert isinstance(rows, ColumnRows), f"{type(cache).__name__} is of no known kind"
    return rows.solo_row([found[index] for index in range(len(found))], tokens)


def rows_fitting(cache: Any, spec: TensorSpec) -> Any:
    """The kind of rows that the cache is of. Raises Misfit where such have no arrays like this one."""
    rows = rows_like(cache)
    if isinstance(rows, ColumnRows) == (spec.at is not None):
        raise Misfit(f"{spec} is not of a {rows.kind}")
    return rows


def by_place(specs: Sequence[TensorSpec]) -> dict[Place, dict[int, TensorSpec]]:
    found: dict[Place, dict[int, TensorSpec]] = {}
    for spec in specs:
        *place, index = map(int, spec.name.split("."))
        found.setdefault(tuple(place), {})[index] = spec
    return found


def leaves(caches: Sequence[Any], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Each cache, of a CacheList its members, with its place."""
    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches, (*above, index))
        else:
            yield (*above, index), cache
