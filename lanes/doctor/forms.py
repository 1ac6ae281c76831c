"""Compiled steps and joined projections: the same logits as the plain step, over the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.choice import difference
from lanes.decoder import Forward
from lanes.doctor.beside import FLOAT32_TOLERANCE
from lanes.doctor.models import TINY
from lanes.doctor.verdict import Verdict, off_by, told
from lanes.forward import COMPILE_AFTER, CompiledForward, eager
from lanes.joined import join_projections
from lanes.rounding import round_rows
from lanes.solo import RowMaker

LENGTHS = (11, 1, 5)
# A shape is compiled when it has come often enough; these come after that.
STEPS = COMPILE_AFTER + 4

OFF = "run laned with --compile off (which is what `auto` is on Metal and the CPU)"
REPORT = "laned joins projections on CUDA only: please report it"


def check_forms() -> Iterator[Verdict]:
    """A verdict for each form, over every tiny model."""
    yield _judge("compiled steps", _compiled_differ, OFF)
    yield _judge("joined projections", _joined_differ, REPORT)


def _judge(name: str, differ: Callable[[Any], float], then: str) -> Verdict:
    found: dict[str, float] = {}
    for tiny in TINY:
        try:
            found[tiny.family] = differ(tiny.make())
        except Exception as error:
            return Verdict(name, "wrong", f"{tiny.family}: {told(error)}", then, found)
    wrong = [f"{family}: {off_by(off)}" for family, off in found.items() if not off <= FLOAT32_TOLERANCE]
    if wrong:
        return Verdict(name, "wrong", "; ".join(wrong), then, found)
    return Verdict(name, "right", f"as plain ones, {off_by(max(found.values()))}", None, found)


def plain(model: Any, caches: SlotCaches) -> Forward:
    return partial(eager, model, caches)


def compiled(model: Any, caches: SlotCaches) -> Forward:
    return CompiledForward(model, caches)


def _compiled_differ(model: Any) -> float:
    return difference(logits_of(model, plain), logits_of(model, compiled))


def _joined_differ(model: Any) -> float:
    before = logits_of(model, plain)
    join_projections(model)
    return difference(before, logits_of(model, plain))


def logits_of(model: Any, forward_of: Callable[[Any, SlotCaches], Forward], steps: int = STEPS) -> mx.array:
    """What each row's steps give, fed the same tokens: [steps x rows, vocabulary]."""
    make_row = RowMaker(model)
    caches = SlotCaches(make_row(), len(LENGTHS), step_rows=round_rows)
    for row_id, length in enumerate(LENGTHS):
        row = make_row()
        model(mx.arange(1, length + 1)[None], cache=row)
        mx.eval([cache.state for cache in row])
        caches.merge(row_id, row, length)
    forward = forward_of(model, caches)
    logits = []
    for step in range(steps):
        logits.append(forward(mx.array([step + 1, step + 2, step + 3], dtype=mx.int32)))
        mx.eval(logits[-1])
        caches.end_step()
    return mx.concatenate(logits)
