"""Rows that are frozen into bytes and made of them again: they go on as the rows that never went away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from lanes.boundary import remembers
from lanes.choice import difference
from lanes.doctor.beside import GROUP_SIZE
from lanes.doctor.models import TINY
from lanes.doctor.verdict import Verdict, off_by, told
from lanes.lane import Freeze, RowSpec, Sampling
from lanes.remember import RowMemory
from lanes.rows import held_alone, kind_of
from lanes.solo import RowMaker
from store.checkpoint import Destination, Part, Range, Recall

# Beyond the window, and not a multiple of anything.
TOKENS = 37
STEPS = 4
TOLERANCE = 1e-5

THEN = "serve with --prompt-cache-bytes 0 and without --store here, so that nothing is remembered; please report it"


def check_remembered() -> Iterator[Verdict]:
    """One verdict over every kind of cache, in the types that keys and values have."""
    found: dict[str, float] = {}
    name = "rows frozen and thawed"
    for tiny in TINY:
        for bits in (None, 8) if tiny.quantizable else (None,):
            case = f"{tiny.family}{f', {bits} bits' if bits else ''}"
            try:
                found[case] = difference_of(tiny.make(), bits)
            except Exception as error:
                yield Verdict(name, "wrong", f"{case}: {told(error)}", THEN, found)
                return
    wrong = [f"{case}: {off_by(off)}" for case, off in found.items() if not off <= TOLERANCE]
    if wrong:
        yield Verdict(name, "wrong", "; ".join(wrong), THEN, found)
    else:
        yield Verdict(name, "right", f"go on as before, {off_by(max(found.values()))}", None, found)


def difference_of(model: Any, bits: int | None) -> float:
    """The largest difference between logits of a row and of one made of its bytes, as a part of their range."""
    make_row = RowMaker(model, bits, GROUP_SIZE)
    memory = RowMemory(make_row, remembers([kind_of(cache) or "" for cache in make_row()]))
    row = make_row()
    prompt = tuple(1 + token % 90 for token in range(TOKENS + 1))
    mx.eval(model(mx.array([prompt[:TOKENS]]), cache=row))
    part = memory.freeze(Freeze(1, 0, TOKENS), held_alone(row, TOKENS), TOKENS).wait()
    specs = tuple(spec for spec in part.tensors if spec.at in (None, TOKENS))
    destinations = memory.admit(RowSpec(2, prompt, Sampling(), Recall(TOKENS, specs)))
    fill(destinations, part)
    thaw = memory.recalled(2)
    assert thaw is not None, "there was no memory for the row"
    return difference(_steps(model, row), _steps(model, thaw.caches()))


def _steps(model: Any, row: Sequence[Any]) -> mx.array:
    logits = [model(mx.array([[step + 1]]), cache=row)[:, -1] for step in range(STEPS)]
    mx.eval(logits)
    return mx.concatenate(logits)


def fill(destinations: Sequence[Destination], part: Part) -> None:
    """Copy what is wanted of a part that has all of it."""
    sources = {(spec.name, spec.at): (spec, buffer) for spec, buffer in zip(part.tensors, part.buffers, strict=True)}
    for destination in destinations:
        wanted = destination.wanted
        spec, buffer = sources[wanted.name, wanted.at]
        raw = buffer.cast("B")
        if wanted.at is not None:
            destination.buffer[:] = raw
            continue
        size, places = spec.column_bytes, {token: at for at, token in enumerate(_tokens(spec.ranges))}
        for head in range(spec.shape[0]):
            for column, token in enumerate(_tokens(wanted.ranges)):
                source = (head * spec.shape[1] + places[token]) * size
                target = head * destination.head_bytes + column * size
                destination.buffer[target : target + size] = raw[source : source + size]


def _tokens(ranges: Sequence[Range]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last)
