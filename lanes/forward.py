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
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from lanes.adapters import Adapters
from lanes.batch import SlotCaches
from lanes.rounding import compiled_width, round_rows
from lanes.rows.positions import Positions
from lanes.serial import SoloCaches

# Rows, columns, and which adapters are loaded; 0 where no row has one.
Shape = tuple[int, int, int]
Compiled = Callable[[mx.array, mx.array, list[mx.array], list[list[mx.array]]], tuple[mx.array, list[list[mx.array]]]]

# A shape that has come so often will come again: a row's length crosses a bucket every 256 steps at most.
COMPILE_AFTER = 4


def eager(model: Any, caches: SlotCaches | SoloCaches, tokens: mx.array, adapters: Adapters | None = None) -> mx.array:
    """tokens int32 [slots in use] -> logits [slots in use, vocabulary]."""
    with adapters.of_rows(caches.table.rows) if adapters else nullcontext():
        logits: mx.array = model(tokens[:, None], cache=caches.begin_step())
    return logits[:, -1, :]


def eager_drafts(model: Any, caches: SlotCaches, tokens: mx.array, adapters: Adapters | None = None) -> mx.array:
    """As eager(), of each row's input and what may follow it: tokens int32 [slots in use, n] -> logits of what follows
    each of them, [slots in use, n, vocabulary]."""
    with adapters.of_rows(caches.table.rows) if adapters else nullcontext():
        logits: mx.array = model(tokens, cache=caches.begin_step(tokens.shape[1]))
    return logits


class CompiledForward:
    """Forward passes of one batch lane; call it as eager()."""

    def __init__(
        self,
        model: Any,
        caches: SlotCaches,
        read_width: Callable[[int], int] = compiled_width,
        adapters: Adapters | None = None,
    ) -> None:
        """read_width: columns that a step reads for so many tokens. Attention that reads each row's own columns only
        does not mind many, and the fewer widths there are the fewer traces."""
        self.model = model
        self.caches = caches
        self.read_width = read_width
        self.adapters = adapters or Adapters(model)
        self._seen: Counter[Shape] = Counter()
        self._compiled: dict[Shape, Compiled] = {}

    def __call__(self, tokens: mx.array) -> mx.array:
        """As eager(). Rows beyond the slots in use are computed and dropped."""
        caches = self.caches
        rows = len(caches.table.rows)
        num_rows, width = round_rows(rows), self.read_width(max(caches.table.lengths) + 1)
        places = self.adapters.places(caches.table.rows, num_rows)
        shape = (num_rows, width, 0 if places is None else self.adapters.version)
        layers = caches.begin_padded_step(num_rows, width)
        self._seen[shape] += 1
        state = [list(layer.state) for layer in layers]
        if self._seen[shape] <= COMPILE_AFTER or not all(state):
            padded = _padded(tokens, num_rows)
            with self.adapters.at(places):
                logits: mx.array = self.model(padded[:, None], cache=layers)
            return logits[:rows, -1, :]
        if shape not in self._compiled:
            self._forget_traces_before(shape[2])
            self._compiled[shape] = self._trace(width)
        positions = layers[0].positions.array
        for layer in layers:  # the arguments are the only ones that hold the arrays: so they are written in place
            layer.state = [mx.array(0)] * len(layer.state)
        chosen = [] if places is None else [places]
        logits, state = self._compiled[shape](_padded(tokens, num_rows), positions, chosen, state)
        for layer, arrays in zip(layers, state, strict=True):
            layer.state = arrays
        return logits[:rows]

    def _forget_traces_before(self, version: int) -> None:
        """A trace holds the adapters that were loaded when it was made, and nobody asks for it when others are."""
        if version:
            for table in (self._seen, self._compiled):
                for shape in [shape for shape in table if 0 < shape[2] < version]:
                    del table[shape]

    def _trace(self, width: int) -> Compiled:
        def step(
            tokens: mx.array, positions: mx.array, chosen: list[mx.array], state: list[list[mx.array]]
        ) -> tuple[mx.array, list[list[mx.array]]]:
            layers = self.caches.layers
            at = Positions(positions, width)
            for layer, arrays in zip(layers, state, strict=True):
                layer.state, layer.positions = arrays, at
            before = [[array.shape for array in arrays] for arrays in state]
            with self.adapters.at(chosen[0] if chosen else None):
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
