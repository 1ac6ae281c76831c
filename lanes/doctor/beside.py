"""Rows side by side in a lane against each alone in mlx-lm's own caches: every kind of cache, type and form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from lanes.attention import Form, LaneAttention, forms_for, install
from lanes.choice import TOLERATED_DIFFERENCE, probe
from lanes.doctor.models import Tiny
from lanes.doctor.verdict import Verdict, off_by, told
from lanes.solo import RowMaker
from lanes.tuning import backend, head_shape

# Shorter than the window, longer, none at all, and far longer; enough steps for the shorter ones to fill it.
LENGTHS = (11, 1, 0, 30)
STEPS = 12
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
# In float32 no more than the order of additions may differ, or a GPU's shortened products. Where keys and values are
# quantized then, the least of it may move a number to the next step, as in the other types.
FLOAT32_TOLERANCE = 0.005
KV_BITS = (None, 8, 4)
GROUP_SIZE = 32

SERIAL = "laned tries each model when it loads it: those that fail so run in the serial lane, one row at a time"
UNSEEN = "laned's own trial lets so little pass: please report it"


def check_rows(tiny: Tiny) -> Iterator[Verdict]:
    """A verdict on its rows, and one for each size that its caches are quantized to."""
    for bits in KV_BITS if tiny.quantizable else (None,):
        yield _judge(tiny, bits)


def _judge(tiny: Tiny, bits: int | None) -> Verdict:
    name = f"rows of {tiny.family} ({tiny.kinds}{f', {bits} bits' if bits else ''})"
    worst: dict[str, float] = {}
    wrong: list[str] = []
    absent: dict[str, list[str]] = {}
    then = UNSEEN
    for dtype in DTYPES:
        model = tiny.make()
        model.set_dtype(dtype)
        word = str(dtype).removeprefix("mlx.core.")
        if (failure := _failure_alone(model, bits)) is not None:
            absent.setdefault(failure, []).append(word)
            continue
        tolerance = FLOAT32_TOLERANCE if dtype == mx.float32 and not bits else TOLERATED_DIFFERENCE
        for form in _forms(model, bits):
            case = f"{word}, {form}"
            try:
                worst[case] = off = difference_of(model, bits, form)
            except Exception as error:
                wrong.append(f"{case}: {told(error)}")
                then = SERIAL
                continue
            if not off <= tolerance:  # not a number is wrong, too
                wrong.append(f"{case}: {off_by(off)}")
                then = then if off <= TOLERATED_DIFFERENCE else SERIAL
    if wrong:
        return Verdict(name, "wrong", "; ".join(wrong), then, worst)
    not_at_all = [f"not in {' and '.join(words)} ({failure})" for failure, words in absent.items()]
    if not worst:
        return Verdict(name, "absent", "; ".join(not_at_all))
    word = next(iter(worst)).split(",")[0]
    off = max(off for case, off in worst.items() if case.startswith(word))
    return Verdict(name, "right", "; ".join([f"as alone, {off_by(off)} in {word}", *not_at_all]), None, worst)


def _failure_alone(model: Any, bits: int | None) -> str | None:
    """What one row by itself fails with, if it does: then there is nothing to compare with, and no lane to blame."""
    try:
        row = RowMaker(model, bits, GROUP_SIZE)()
        mx.eval(model(mx.array([[1, 2, 3]]), cache=row), model(mx.array([[4]]), cache=row))
    except Exception as error:
        return told(error)
    return None


def difference_of(model: Any, bits: int | None, form: Form) -> float:
    """The largest difference between logits side by side and alone, as a part of their range."""
    install(model, LaneAttention(form, backend()))
    return probe(RowMaker(model, bits, GROUP_SIZE), LENGTHS, STEPS)


def _forms(model: Any, bits: int | None) -> list[Form]:
    """Forms of attention that a step of this model may take; quantized columns have but one."""
    shape = head_shape(model)
    return ["fused"] if bits or shape is None else forms_for(*shape)
