"""Rows are made of mapped files: their caches are the files' pages, where MLX can use memory that is not its own.

That is on Metal, for memory that begins on a page and is whole pages long; elsewhere MLX copies, and the mapping ends
here. MLX 0.32 writes in place only into memory of its own, so a prompt that goes on copies what was adopted, and so
does the merge into a lane. A mapping therefore lives for a chunk or none, and is never kept by rows that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from lanes.rows.columns import ColumnRows
from lanes.rows.held import Held, copied_columns
from lanes.rows.runs import side_by_side, without
from lanes.thaw import Arrays, Misfit, by_place, filled_caches, leaves, rows_fitting
from store.checkpoint import Recall, TensorSpec


def adopt(empty: Sequence[Any], recall: Recall) -> list[Any]:
    """The caches of a row of recall.tokens tokens, made of what is mapped, which is taken. empty: with nothing in them.

    Raises Misfit where recall.specs and the caches do not fit together.
    """
    assert recall.mapped is not None, "nothing is mapped"
    content = {spec.name: _array(spec, buffer) for spec, buffer in zip(recall.specs, recall.mapped.take(), strict=True)}
    specs, arrays = by_place(recall.specs), Arrays()
    for place, cache in leaves(empty):
        for index, spec in specs.pop(place, {}).items():
            array = _fitted(rows_fitting(cache, spec), spec, content.pop(spec.name), recall.tokens)
            arrays.setdefault(place, {})[index] = array
    if specs:
        raise Misfit(f"there is no cache for {sorted(specs)}")
    mx.eval([list(each.values()) for each in arrays.values()])
    return filled_caches(empty, arrays, recall.tokens)


def _array(spec: TensorSpec, buffer: memoryview) -> mx.array:
    """[1, ...]; lazy. Whole pages are adopted, and what is behind the array is cut off then."""
    pages = mx.asarray(np.asarray(buffer), copy=None)
    return pages[: spec.nbytes].view(getattr(mx, spec.dtype)).reshape(1, *spec.shape)


def _fitted(rows: Any, spec: TensorSpec, array: mx.array, tokens: int) -> mx.array:
    """As a solo row wants it. Columns of later tokens are room behind the row's own; a ring has none, and is copied
    where its window is not all that the segment has."""
    if not isinstance(rows, ColumnRows):
        return array
    wanted = rows.held_ranges(tokens)
    if without(wanted, spec.ranges):
        raise Misfit(f"{spec} lacks columns of {wanted}")
    if rows.ring is None or spec.ranges == wanted:
        return array
    (copied,) = copied_columns([Held((spec.name,), (array,), side_by_side(spec.ranges))], wanted)
    return copied
