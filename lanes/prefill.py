"""A prompt on its way: processed alone and unpadded, chunk by chunk, in mlx-lm's own caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from lanes.lane import Chunk, RowSpec
from lanes.solo import RowMaker


class Prefill:
    """One row before it is merged: its caches hold the first `processed` tokens of its prompt."""

    def __init__(self, make_row: RowMaker, spec: RowSpec) -> None:
        self.model = make_row.model
        self.spec = spec
        self.caches: list[Any] = make_row()
        self.processed = 0

    @property
    def is_complete(self) -> bool:
        """All but the last token, which the row's first decode step will process."""
        return self.processed == len(self.spec.prompt) - 1

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches if not cache.empty())

    def dispatch(self, chunk: Chunk) -> list[mx.array]:
        """Begin to process a chunk; returns arrays to wait for. The logits are never computed."""
        assert chunk.start == self.processed, f"chunk at {chunk.start}, but {self.processed} tokens are processed"
        assert chunk.start < chunk.stop < len(self.spec.prompt), f"{chunk} of {len(self.spec.prompt)} tokens"
        tokens = mx.array(self.spec.prompt[chunk.start : chunk.stop], dtype=mx.int32)[None]
        self.model(tokens, cache=self.caches)
        self.processed = chunk.stop
        leaves = tree_flatten([cache.state for cache in self.caches])
        state = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
        mx.async_eval(state)
        return state
