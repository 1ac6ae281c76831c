"""The forward pass of a decode step: eager, or compiled once for each shape that comes again.

Building the graph of a step in Python takes 2 to 3 ms for a model of 36 layers, and each small operation a launch; a
compiled step has neither. It is traced for fixed numbers of rows and of columns read, so both are rounded up to few
values, and only a shape that has come several times is compiled: others run eagerly, and no row waits for a trace that
is not used again.

The arrays of the caches go in and come out as arguments, so that MLX writes them in place; everything else that changes
from step to step (tokens, lengths) goes in as an array too. What a trace cannot follow, such as a length that is
baked into it as a number, is caught before it is used: the traced step must give the shapes the caches have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.rounding import compiled_width, round_rows
from lanes.rows.positions import Positions
from lanes.serial import SoloCaches

Compiled = Callable[[mx.array, mx.array, list[list[mx.array]]], tuple[mx.array, list[list[mx.array]]]]

# A shape that has come so often will come again: a row's length crosses a bucket every 256 steps at most.
COMPILE_AFTER = 4


def eager(model: Any, caches: SlotCaches | SoloCaches, tokens: mx.array) -> mx.array:
    """tokens int32 [slots in use] -> logits [slots in use, vocabulary]."""
    logits: mx.array = model(tokens[:, None], cache=caches.begin_step())
    return logits[:, -1, :]


class CompiledForward:
    """Forward passes of one batch lane; call it as eager()."""

    def __init__(self, model: Any, caches: SlotCaches, read_width: Callable[[int], int] = compiled_width) -> None:
        """read_width: columns that a step reads for so many tokens. Attention that reads each row's own columns only
        does not mind many, and the fewer widths there are the fewer traces."""
        self.model = model
        self.caches = caches
        self.read_width = read_width
        self._seen: Counter[tuple[int, int]] = Counter()
        self._compiled: dict[tuple[int, int], Compiled] = {}

    def __call__(self, tokens: mx.array) -> mx.array:
        """As eager(). Rows beyond the slots in use are computed and dropped."""
        caches = self.caches
        rows = len(caches.table.rows)
        shape = (round_rows(rows), self.read_width(max(caches.table.lengths) + 1))
        layers = caches.begin_padded_step(*shape)
        self._seen[shape] += 1
        state = [list(layer.state) for layer in layers]
        if self._seen[shape] <= COMPILE_AFTER or not all(state):
            padded = _padded(tokens, shape[0])
            logits: mx.array = self.model(padded[:, None], cache=layers)
            return logits[:rows, -1, :]
        if shape not in self._compiled:
            self._compiled[shape] = self._trace(shape)
        positions = layers[0].positions.array
        for layer in layers:  # the arguments are the only ones that hold the arrays: so they are written in place
            layer.state = [mx.array(0)] * len(layer.state)
        logits, state = self._compiled[shape](_padded(tokens, shape[0]), positions, state)
        for layer, arrays in zip(layers, state, strict=True):
            layer.state = arrays
        return logits[:rows]

    def _trace(self, shape: tuple[int, int]) -> Compiled:
        def step(
            tokens: mx.array, positions: mx.array, state: list[list[mx.array]]
        ) -> tuple[mx.array, list[list[mx.array]]]:
            layers = self.caches.layers
            at = Positions(positions, shape[1])
            for layer, arrays in zip(layers, state, strict=True):
                layer.state, layer.positions = arrays, at
            before = [[array.shape for array in arrays] for arrays in state]
            logits = self.model(tokens[:, None], cache=layers)[:, -1, :]
            after = [list(layer.state) for layer in layers]
            assert before == [[array.shape for array in arrays] for arrays in after], (
                "a step changed its caches' shapes"
            )
            return logits, after

        return mx.compile(step)


def _padded(tokens: mx.array, rows: int) -> mx.array:
    missing = rows - tokens.shape[0]
    return mx.concatenate([tokens, mx.zeros((missing,), tokens.dtype)]) if missing else tokens
