"""Whether steps write a lane's arrays in place, told by the peak of MLX's memory while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from lanes.batch import SlotCaches
from lanes.decoder import Forward
from lanes.doctor.forms import compiled, plain
from lanes.doctor.models import TINY
from lanes.doctor.verdict import Verdict
from lanes.forward import COMPILE_AFTER
from lanes.rows import rows_like
from lanes.rows.positions import Positions
from lanes.solo import RowMaker

SLOTS, CAPACITY, HEADS, DIM = 8, 4096, 2, 64
FILLED, FEW = 600, 20
STEPS = 5

KINDS: dict[str, Callable[[], Any]] = {
    "kv": KVCache,
    "rotating": lambda: RotatingKVCache(CAPACITY),
    "qkv": lambda: QuantizedKVCache(64, 8),
}
THEN = "every step copies the caches here: answers are right, but take more time and memory; please report it"


def check_in_place() -> Iterator[Verdict]:
    """One verdict on the rows' own writes, one on whole steps."""
    written = {
        f"{kind}, {'all' if rows == SLOTS else rows} of {SLOTS} slots": write_rise(kind, rows)
        for kind in KINDS
        for rows in (SLOTS, SLOTS - 3)
    }
    yield _judge("writes of a token", written)
    yield _judge("whole steps", {"eager": step_rise(plain), "compiled": step_rise(compiled)})


def _judge(name: str, rises: dict[str, float]) -> Verdict:
    """rises: by how much of one array memory rose."""
    copies = [f"{case}: {rise:.1f} arrays more" for case, rise in rises.items() if not rise < 0.5]
    said = "; ".join(copies) or "in place"
    return Verdict(f"{name} in the slots", "wrong" if copies else "right", said, THEN if copies else None, rises)


def write_rise(kind: str, num_rows: int) -> float:
    """How far memory rises while a token is written in each row, as a part of the lane's largest array."""
    make = KINDS[kind]
    rows = rows_like(make())
    rows.resize(SLOTS, CAPACITY)
    for slot in range(SLOTS):
        row = make()
        row.update_and_fetch(*(mx.zeros((1, HEADS, FILLED, DIM)) for _ in range(2)))
        rows.merge(slot, row, FILLED)
        mx.eval(rows.state)
    del row

    def steps() -> None:
        writer: Any = rows
        for step in range(STEPS):
            rows.positions = Positions.of([FILLED + step + slot for slot in range(num_rows)])
            writer.update_and_fetch(*(mx.ones((num_rows, HEADS, 1, DIM)) for _ in range(2)))
            mx.eval(rows.state)

    return _rise(steps, max(part.nbytes for part in rows.state))


def step_rise(forward_of: Callable[[Any, SlotCaches], Forward]) -> float:
    """The same while a model steps, each step dispatched before the last one's tokens are read."""
    model = TINY[0].make()
    make_row = RowMaker(model)
    caches = SlotCaches(make_row(), SLOTS)
    # A long row makes the arrays large and goes: what is read for the short ones is next to nothing.
    for row_id, length in enumerate([CAPACITY - 1, *[FEW] * SLOTS]):
        if row_id == SLOTS:
            caches.leave(0)
        row = make_row()
        for cache in row:
            cache.update_and_fetch(*(mx.zeros((1, 2, length, 32)) for _ in range(2)))
        caches.merge(row_id, row, length)
        mx.eval([layer.state for layer in caches.layers])
    del row
    forward = forward_of(model, caches)
    tokens = mx.zeros((SLOTS,), dtype=mx.int32)

    def step() -> None:
        nonlocal tokens
        last, tokens = tokens, mx.argmax(forward(tokens), axis=-1).astype(mx.int32)
        mx.async_eval(tokens)
        caches.end_step()
        mx.eval(last)

    for _ in range(COMPILE_AFTER + 2):
        step()

    def steps() -> None:
        for _ in range(STEPS):
            step()
        mx.eval(tokens)

    return _rise(steps, max(array.nbytes for layer in caches.layers for array in layer.state))


def _rise(work: Callable[[], None], array_bytes: int) -> float:
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return (mx.get_peak_memory() - before) / array_bytes
