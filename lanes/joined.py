"""Projections of one input, joined into one matrix: query with key with value, gate with up, and what goes into a gated
delta layer.

On a GPU a matrix product of a few rows costs 30 to 50 microseconds of host time whatever its size, and a layer has
seven of them; joined there are four. The numbers are the same: an output's dot product does not know its neighbours.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)


class Joint:
    """One layer that computes several layers' outputs at once, handed out part by part.

    The parts are called one after another with the same input; the output is kept from the first call to the last.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.linear = _concatenated(layers)
        self.sizes: list[int] = [layer.weight.shape[0] for layer in layers]
        self._ends = [sum(self.sizes[: index + 1]) for index in range(len(layers) - 1)]
        self._input: mx.array | None = None
        self._outputs: list[mx.array | None] = []

    def part(self, index: int, x: mx.array) -> mx.array:
        if self._input is not x or self._outputs[index] is None:
            self._input = x
            self._outputs = list(mx.split(self.linear(x), self._ends, axis=-1))
        output, self._outputs[index] = self._outputs[index], None
        if all(other is None for other in self._outputs):
            self._input = None
        assert output is not None
        return output


class JoinedPart(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    """Stands where one of the joined layers stood."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        if index == 0:
            self.joint_linear = joint.linear  # so that the model still counts its weights
        self._joint = joint
        self._index = index

    @property
    def linear(self) -> Any:
        """The joined layer."""
        return self._joint.linear

    @property
    def outputs(self) -> int:
        """How many of that one's outputs are this one's."""
        return self._joint.sizes[self._index]

    def __call__(self, x: mx.array) -> mx.array:
        return self._joint.part(self._index, x)


def join_projections(model: Any) -> int:
    """Join what can be joined in all of the model's layers; returns how many groups were."""
    num_joined = 0
    for module in model.modules():
        for names in GROUPS:
            layers = [module.get(name) for name in names]
            if all(layers) and _alike(layers):
                joint = Joint(layers)
                mx.eval(joint.linear.parameters())
                for index, name in enumerate(names):
                    module[name] = JoinedPart(joint, index)
                num_joined += 1
    return num_joined


def _alike(layers: list[Any]) -> bool:
    first = layers[0]
    if type(first) not in (nn.Linear, nn.QuantizedLinear):
        return False

    def describe(layer: Any) -> tuple[Any, ...]:
        packing = [getattr(layer, name, None) for name in ("bits", "group_size", "mode")]
        return (type(layer), sorted(layer), layer.weight.shape[1:], layer.weight.dtype, *packing)

    return all(describe(layer) == describe(first) for layer in layers)


def _concatenated(layers: list[Any]) -> Any:
    """A layer like the first with the rows of all; every parameter of a linear layer has one row for each output."""
    joined = copy(layers[0])
    for name in layers[0]:
        joined[name] = mx.concatenate([layer[name] for layer in layers])
    return joined
