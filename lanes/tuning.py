"""Which forms of a decode step a model takes on this device: attention, joined projections, compiled or eager, and
when a step is read.

Attention is measured at load. The other two follow what was measured once and written down in docs/performance.md: on
CUDA both pay (fewer and larger launches), on the CPU neither does; a compiled step there was no faster, and BLAS does
not mind seven products. On Metal both are off until somebody has measured them. Early reads (lanes.engine) are for
the CPU, where MLX's dispatch returns when about ten operations are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from lanes.attention import Form, LaneAttention, install, measure
from lanes.joined import join_projections
from lanes.rounding import capacity_for, compiled_width

# MLX asks cuDNN for a plan of attention for each new pair of lengths, queries and keys: 70 ms of the host's time.
CUDA_CHUNK_MULTIPLE = 256

CompileOption = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """attention: None where the model's heads are not known. joined: groups of projections made one.

    columns_per_call: what cutting a lane's rows into bands goes by (lanes.rows.bands); None: they are not cut.
    """

    attention: Form | None
    columns_per_call: float | None
    joined: int
    compiled: bool
    early_reads: bool
    chunk_multiple: int

    @property
    def read_width(self) -> Callable[[int], int]:
        """Columns that a compiled step reads for so many tokens; see lanes.forward."""
        return capacity_for if self.attention == "own" else compiled_width

    def __str__(self) -> str:
        forms = [
            f"attention {self.attention or 'as the model has it'}",
            f"{self.joined} groups of projections joined",
            "compiled" if self.compiled else "eager",
        ]
        return ", ".join(forms)


def tune(model: Any, compile_option: CompileOption = "auto") -> Tuning:
    """Choose, and change the model accordingly."""
    shape = head_shape(model)
    measured = None if shape is None else measure(*shape)
    install(model, LaneAttention("fused" if measured is None else measured.form, backend()))
    on_cuda = backend() == "cuda"
    joined = join_projections(model) if on_cuda else 0
    compiled = on_cuda if compile_option == "auto" else compile_option == "on"
    # A trace is for one width: a compiled step reads all rows alike.
    columns_per_call = None if measured is None or compiled else measured.columns_per_call
    return Tuning(
        measured.form if measured else None,
        columns_per_call,
        joined,
        compiled,
        early_reads=backend() == "cpu",
        chunk_multiple=CUDA_CHUNK_MULTIPLE if on_cuda else 1,
    )


def head_shape(model: Any) -> tuple[int, int, int, mx.Dtype] | None:
    """Query heads, key heads, their dim and their type, as the model's first call of attention has them; None if it
    makes none by the name that we point elsewhere."""
    seen: list[tuple[int, int, int, mx.Dtype]] = []

    class Watching(LaneAttention):
        def __call__(self, queries: mx.array, keys: Any, *args: Any, **kwargs: Any) -> mx.array:
            if isinstance(keys, mx.array):
                seen.append((queries.shape[1], keys.shape[1], keys.shape[3], keys.dtype))
            return super().__call__(queries, keys, *args, **kwargs)

    install(model, Watching("fused", backend()))
    model(mx.zeros((1, 2), dtype=mx.int32), cache=make_prompt_cache(model))
    return seen[0] if seen and seen[0][0] % seen[0][1] == 0 else None


def backend() -> str:
    """metal, cuda or cpu: what MLX computes on."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
