"""What each form of a decode step costs on this device: the figures by which forms are chosen in lanes.tuning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

from lanes.attention import MEASURED_COLUMNS, LaneAttention, install, seconds_by_form
from lanes.batch import SlotCaches
from lanes.decoder import Forward
from lanes.doctor.forms import compiled, plain
from lanes.forward import COMPILE_AFTER
from lanes.joined import join_projections
from lanes.rounding import round_rows
from lanes.solo import RowMaker
from lanes.tuning import backend

ROWS = (1, 8)
PROMPT_TOKENS = 64
STEPS = 6
ROUNDS = 2
# Llama's proportions: small enough for a CPU to take it in a moment, large enough for a GPU not to be all launches.
CPU_SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
GPU_SHAPE = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12}
ATTENTION_HEADS, ATTENTION_KV_HEADS, ATTENTION_DIM = 32, 8, 128
ATTENTION_COLUMNS = (128, MEASURED_COLUMNS, 2 * MEASURED_COLUMNS)

ForwardOf = Callable[[Any, SlotCaches], Forward]


def measure_costs() -> dict[str, Any]:
    """Plain data, times in seconds.

    attention: by "8 rows of N columns" and form. steps: by "N rows" and form. dispatch_part: of a step's time, how much
    goes by before dispatching it returns; near 1, pipelining steps is of no use. shape: of the model that stepped.
    """
    dtype = mx.float32 if backend() == "cpu" else mx.bfloat16
    attention = {
        f"8 rows of {columns} columns": dict(
            seconds_by_form(ATTENTION_HEADS, ATTENTION_KV_HEADS, ATTENTION_DIM, dtype, columns)
        )
        for columns in ATTENTION_COLUMNS
    }
    steps: dict[str, dict[str, float]] = {f"{rows} rows": {} for rows in ROWS}
    model = _model(dtype)
    install(model, LaneAttention("by hand", backend()))
    dispatch_part = _Lane(model, ROWS[-1], plain).dispatch_part()
    for joined in (False, True):
        if joined:
            join_projections(model)
        for name, forward_of in (("eager", plain), ("compiled", compiled)):
            for rows in ROWS:
                form = f"{name}, joined" if joined else name
                steps[f"{rows} rows"][form] = _Lane(model, rows, forward_of).step_s()
    return {"attention": attention, "steps": steps, "dispatch_part": dispatch_part, "shape": shape()}


def shape() -> dict[str, int]:
    return CPU_SHAPE if backend() == "cpu" else GPU_SHAPE


def _model(dtype: mx.Dtype) -> Any:
    heads = shape()["hidden_size"] // 64
    args = llama.ModelArgs(
        model_type="llama",
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        rms_norm_eps=1e-5,
        vocab_size=8192,
        **shape(),
    )
    model = llama.Model(args)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


class _Lane:
    """Rows that all hold the same prompt."""

    def __init__(self, model: Any, rows: int, forward_of: ForwardOf) -> None:
        make_row = RowMaker(model)
        row = make_row()
        model(mx.zeros((1, PROMPT_TOKENS), dtype=mx.int32), cache=row)
        mx.eval([cache.state for cache in row])
        self.caches = SlotCaches(make_row(), rows, step_rows=round_rows)
        for row_id in range(rows):
            self.caches.merge(row_id, row, PROMPT_TOKENS)
        self.forward = forward_of(model, self.caches)
        self.tokens = mx.zeros((rows,), dtype=mx.int32)
        for _ in range(COMPILE_AFTER + 2):
            self._dispatch()
        mx.eval(self.tokens)

    def _dispatch(self) -> None:
        self.tokens = mx.argmax(self.forward(self.tokens), axis=-1).astype(mx.int32)
        mx.async_eval(self.tokens)
        self.caches.end_step()

    def step_s(self) -> float:
        """Seconds of a step, each dispatched before the last one is waited for; the best round's mean."""
        best = float("inf")
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            for _ in range(STEPS):
                before = self.tokens
                self._dispatch()
                mx.eval(before)
            mx.eval(self.tokens)
            best = min(best, (time.perf_counter() - began_s) / STEPS)
        return best

    def dispatch_part(self) -> float:
        dispatching_s = whole_s = 0.0
        for _ in range(STEPS):
            began_s = time.perf_counter()
            self._dispatch()
            dispatching_s += time.perf_counter() - began_s
            mx.eval(self.tokens)
            whole_s += time.perf_counter() - began_s
        return dispatching_s / whole_s
