"""Rows are made of plain bytes: memory for what is known of them, which somebody fills, and then caches of it.

That memory is the caches' own: keys and values are read to where they are used, and a prompt that goes on finds room
behind them, since mlx-lm's caches copy all they hold in order to grow. So it is on CUDA, where MLX's memory is unified:
600 MB of 72 arrays cost the model's thread 31 ms, and their first use on an H200 90; read into other memory and copied
they cost 335 and 50.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from lanes.blank import blank
from lanes.rows import rows_like
from lanes.rows.columns import ColumnRows
from lanes.rows.ssm import SSMRows
from store.checkpoint import Destination, Recall, TensorSpec, columns_of

# As mlx-lm's caches grow.
GROWTH_TOKENS = 256

Place = tuple[int, ...]
# What belongs into each cache, by its number there.
Arrays = dict[Place, dict[int, mx.array]]


class Misfit(Exception):
    """What is recalled is not of this model's caches."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes for one array of shape [1, ...]."""

    content: mx.array
    shape: tuple[int, ...]
    dtype: str

    def array(self) -> mx.array:
        """The array, lazy."""
        return self.content.view(getattr(mx, self.dtype)).reshape(self.shape)


class Thaw:
    """A row of which the first recall.tokens tokens are to be filled in."""

    def __init__(self, empty: Sequence[Any], recall: Recall, prompt_tokens: int) -> None:
        """empty: the row's caches with nothing in them. prompt_tokens: how many there will be at least.

        Raises Misfit where recall.specs and the caches do not fit together.
        """
        self.tokens = recall.tokens
        self._room_tokens = -(-prompt_tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        self._empty = empty
        self._memory: dict[Place, dict[int, _Memory]] = {}
        destinations: list[Destination] = []
        specs = by_place(recall.specs)
        for place, cache in leaves(empty):
            for index, spec in sorted(specs.pop(place, {}).items()):
                memory, destination = self._memory_for(cache, spec)
                self._memory.setdefault(place, {})[index] = memory
                destinations.append(destination)
        if specs:
            raise Misfit(f"there is no cache for {sorted(specs)}")
        self.destinations = tuple(destinations)

    @property
    def nbytes(self) -> int:
        return sum(memory.content.nbytes for arrays in self._memory.values() for memory in arrays.values())

    def caches(self) -> list[Any]:
        """The row's caches, once all destinations are filled. Nobody may look at these any more."""
        for destination in self.destinations:
            destination.buffer.release()
        arrays = {place: {i: m.array() for i, m in each.items()} for place, each in self._memory.items()}
        mx.eval([list(each.values()) for each in arrays.values()])
        # What is left of the memory is in these arrays alone: so it is written in place when the row goes on.
        self._memory.clear()
        return filled_caches(self._empty, arrays, self.tokens)

    def _memory_for(self, cache: Any, spec: TensorSpec) -> tuple[_Memory, Destination]:
        rows = rows_fitting(cache, spec)
        wanted, shape = spec, spec.shape
        if isinstance(rows, ColumnRows):
            wanted = columns_of(spec, rows.held_ranges(self.tokens))
            heads, columns, dim = wanted.shape
            shape = (heads, columns if rows.ring else max(columns, self._room_tokens), dim)
        nbytes = TensorSpec(spec.name, spec.dtype, shape).nbytes
        content: Any = blank(nbytes)
        buffer = memoryview(content)
        head_bytes = nbytes // shape[0] if isinstance(rows, ColumnRows) else nbytes
        return _Memory(content, (1, *shape), spec.dtype), Destination(wanted, buffer, head_bytes)


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
