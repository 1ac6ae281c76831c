"""What adapters add to a layer's output: s (x A) B, for rows that have different A, B and s, or none.

The layer's own y = W x is computed once for all rows. Of the loaded adapters the layer has the A and B in two stacks,
the first place of which is zero, padded to the highest rank, which changes no sum. A pass goes one of three ways:

    none       the layer as it is: no operation is added
    one        two products and a sum, as mlx-lm's LoRALinear computes them
    several    the same row by row: mx.gather_mm takes each row's A and B from the stacks, where they lie

On a CPU gathered products were faster than taking A and B out for each row, and than products for each adapter's rows,
picked out and put back. Products over all adapters side by side, masked, were as fast for one or two and cost more with
each that is loaded.

A layer becomes another class while it has adapters, so names, parameters and types in the model stay what they were,
and a model without adapters is what it was before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lanes.joined import JoinedPart

# A and B of a layer, float32 [inputs, rank] and [rank, outputs].
Factors = tuple[mx.array, mx.array]


@dataclass(frozen=True, slots=True)
class One:
    """All rows of a pass have this adapter."""

    digest: str
    scale: float


@dataclass(frozen=True, slots=True)
class Several:
    """Each row's place in the stacks, int32 [rows], and its adapter's scale, float32 [rows, 1, 1]."""

    places: mx.array
    scales: mx.array


@dataclass(slots=True)
class Pass:
    """chosen: the adapters of the pass that is being built; None outside of passes, and where no row has one."""

    chosen: One | Several | None = None


class Term:
    """What adapters add to one layer's output. factors: theirs by digest, as far as they have any for this layer."""

    def __init__(self, layer: Any, current: Pass) -> None:
        self.layer = layer
        self.plain_class = plain_class(layer)
        self.factors: dict[str, Factors] = {}
        self._pass = current

    def stack(self, digests: Sequence[str], rank: int) -> list[mx.array]:
        """Put the factors of these, in this order, in the places from 1 on, and forget others; returns arrays to be
        evaluated. Without any the layer is what it was."""
        self.factors = {digest: self.factors[digest] for digest in digests if digest in self.factors}
        if not self.factors:
            if isinstance(self.layer, _Adapted):
                del self.layer.term
                self.layer.__class__ = self.plain_class
            return []
        inputs, outputs = dimensions(self.layer)
        nothing = mx.zeros((inputs, rank)), mx.zeros((rank, outputs))
        placed = [nothing, *(_padded(self.factors.get(digest, nothing), rank) for digest in digests)]
        self.a, self.b = (mx.stack([factors[side] for factors in placed]) for side in (0, 1))
        # Views: nothing is held twice.
        views = {digest: (self.a[place], self.b[place]) for place, digest in enumerate(digests, 1)}
        self.factors = {digest: views[digest] for digest in self.factors}
        self.layer.term, self.layer.__class__ = self, ADAPTED[self.plain_class]
        return [self.a, self.b, *(array for factors in self.factors.values() for array in factors)]

    def added(self, x: mx.array, y: mx.array) -> mx.array:
        """x [rows, ..., inputs], y [rows, ..., outputs] -> y with the term of each row's adapter."""
        chosen = self._pass.chosen
        if chosen is None:
            return y
        if isinstance(chosen, One):
            if chosen.digest not in self.factors:
                return y
            a, b = self.factors[chosen.digest]
            return y + (chosen.scale * ((x @ a) @ b)).astype(x.dtype)
        by_row = x if x.ndim == 3 else x.reshape(chosen.places.size, -1, x.shape[-1])
        z = mx.gather_mm(by_row, self.a, rhs_indices=chosen.places)
        z = chosen.scales * mx.gather_mm(z, self.b, rhs_indices=chosen.places)
        return y + (z if x.ndim == 3 else z.reshape(y.shape)).astype(x.dtype)


class _Adapted:
    """Stands before a layer's class."""

    term: Term

    def __call__(self, x: mx.array) -> mx.array:
        return self.term.added(x, super().__call__(x))  # type: ignore[misc]


class _AdaptedLinear(_Adapted, nn.Linear):  # type: ignore[misc]  # mlx.nn has no types
    pass


class _AdaptedQuantizedLinear(_Adapted, nn.QuantizedLinear):  # type: ignore[misc]
    pass


class _AdaptedPart(_Adapted, JoinedPart):
    pass


# The classes of layers that may have adapters, and what they become.
ADAPTED: Mapping[type, type] = {
    nn.Linear: _AdaptedLinear,
    nn.QuantizedLinear: _AdaptedQuantizedLinear,
    JoinedPart: _AdaptedPart,
}


def plain_class(layer: Any) -> type:
    """The class of a layer without adapters."""
    return layer.term.plain_class if isinstance(layer, _Adapted) else type(layer)


def dimensions(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a layer of one of these classes."""
    if isinstance(layer, JoinedPart):
        return dimensions(layer.linear)[0], layer.outputs
    outputs, packed = layer.weight.shape
    return packed * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else packed, outputs


def _padded(factors: Factors, rank: int) -> Factors:
    """Brought to a rank; what that cuts off is zero."""
    a, b = factors[0][:, :rank], factors[1][:rank]
    missing = rank - a.shape[1]
    return (mx.pad(a, [(0, 0), (0, missing)]), mx.pad(b, [(0, missing), (0, 0)])) if missing else (a, b)
