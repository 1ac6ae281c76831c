"""A prompt on its way: processed alone and unpadded, chunk by chunk, in mlx-lm's own caches.

Several short prompts may share one forward pass. They are padded on the right, where causal attention lets nothing of
the padding into a row, and each row is cut out to its own length; so it is exact where every cache has columns, and no
ring is shorter than the longest of the prompts. Recurrent state would take the padding in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList

from lanes.lane import Chunk, RowSpec
from lanes.rows import rows_like
from lanes.rows.columns import ColumnRows
from lanes.solo import RowMaker


class Prefill:
    """One row before it is merged: its caches hold the first `processed` tokens of its prompt.

    multiple: each pass begins and ends at multiples of so many tokens, for devices that make a plan for each new pair
    of lengths: it processes again what is before the chunk, and padding after it that is cut off. Only where every
    cache can be cut at any token.
    """

    def __init__(self, make_row: RowMaker, spec: RowSpec, multiple: int = 1) -> None:
        self.model = make_row.model
        self.spec = spec
        self.multiple = multiple
        self.caches: list[Any] = make_row()
        self.processed = 0

    @property
    def is_complete(self) -> bool:
        """All but the last token, which the row's first decode step will process."""
        return self.processed == len(self.spec.prompt) - 1

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches if not cache.empty())

    def take_up(self, caches: list[Any], tokens: int) -> None:
        """Go on from caches that hold the first `tokens` tokens of the prompt."""
        self.caches, self.processed = caches, tokens

    def dispatch(self, chunk: Chunk) -> list[mx.array]:
        """Begin to process a chunk; returns arrays to wait for. The logits are never computed."""
        assert chunk.start == self.processed, f"chunk at {chunk.start}, but {self.processed} tokens are processed"
        assert chunk.start < chunk.stop < len(self.spec.prompt), f"{chunk} of {len(self.spec.prompt)} tokens"
        again, padding = chunk.start % self.multiple, -chunk.stop % self.multiple
        tokens = mx.array([*self.spec.prompt[chunk.start - again : chunk.stop], *[0] * padding], dtype=mx.int32)
        self._cut(again)
        self.model(tokens[None], cache=self.caches)
        self._cut(padding)
        self.processed = chunk.stop
        return _begin(self.caches)

    def _cut(self, tokens: int) -> None:
        if tokens:
            for cache in self.caches:
                cache.trim(tokens)


def dispatch_together(make_row: RowMaker, prompts: Sequence[Prefill]) -> list[mx.array]:
    """Begin to process several prompts, none of which has been begun, up to the last token but one of each."""
    lengths = [len(prompt.spec.prompt) - 1 for prompt in prompts]
    longest = max(lengths)
    longest += -longest % min(prompt.multiple for prompt in prompts)
    padded = [[*prompt.spec.prompt[:-1], *[0] * (longest - n)] for prompt, n in zip(prompts, lengths, strict=True)]
    together = make_row()
    make_row.model(mx.array(padded, dtype=mx.int32), cache=together)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        prompt.caches = [_row_of(cache, row, length) for cache in together]
        prompt.processed = length
    return _begin(together)


def _row_of(cache: Any, row: int, length: int) -> Any:
    """One row of a cache of several, cut to its own length."""
    if isinstance(cache, CacheList):
        return CacheList(*(_row_of(member, row, length) for member in cache.caches))
    rows = rows_like(cache)
    assert isinstance(rows, ColumnRows), f"{type(cache).__name__} has no columns to cut out"
    if cache.empty():  # its layer does not use it
        return rows.solo_row([], 0)
    return rows.solo_row([part[row : row + 1, :, :length] for part in rows.solo_arrays(cache)], length)


def _begin(caches: list[Any]) -> list[mx.array]:
    """Start the computation of caches; returns their arrays."""
    leaves = tree_flatten([cache.state for cache in caches])
    state = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    mx.async_eval(state)
    return state
