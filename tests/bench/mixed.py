"""Decode steps of rows of very different length: seven of 200 tokens beside one of 16,000. Ours, through the engine,
beside mlx-lm's BatchGenerator on the same model and BLAS, in turns.

Left-padded to one length, every row costs the longest one's columns. Rows enter with caches of random keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.bench.drive import BLAS, Ours, Peer, engine_for, peak_memory, peer_memory, seat

# isort: split
from lanes.lane import Step
from lanes.solo import RowMaker
from lanes.tuning import backend
from tests.bench.decode import random_row
from tests.bench.harness import bench, interleave
from tests.bench.models import default_model

SHORT_ROWS = 7
Row = tuple[list[Any], int]


def our_step(model: Any, rows: Sequence[Row]) -> Callable[[], object]:
    engine = Ours(engine_for(model, len(rows)), len(rows)).engine
    seat(engine, rows)
    return lambda: engine.step(Step())


def peer_step(model: Any, rows: Sequence[Row]) -> Callable[[], object]:
    generator: Any = Peer(model, len(rows)).generator
    generator.insert([[1, 2]] * len(rows), [1 << 20] * len(rows), caches=[caches for caches, _ in rows])
    while len(generator._generation_batch) < len(rows):
        generator.next()
    step: Callable[[], object] = generator.next
    return step


def tokens_per_s(step: Callable[[], object], rows: int, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return rows * steps / (time.perf_counter() - began)


def main() -> None:
    with bench("mixed", __doc__ or "") as run:
        run.blas = BLAS.sentence
        on_gpu = backend() != "cpu"
        short, long = (25, 2000) if run.quick and not on_gpu else (200, 16_000)
        rounds, steps, warm_up = (5, 20, 20) if on_gpu else (2 if run.quick else 3, 2, 2)
        name, plain = default_model()
        own = default_model()[1]
        short_row, long_row = random_row(RowMaker(plain), short), random_row(RowMaker(plain), long)
        rows = [(long_row, long)] + [(short_row, short)] * SHORT_ROWS
        with peer_memory() as their_peak:
            theirs = peer_step(plain, rows)
            tokens_per_s(theirs, len(rows), warm_up)
        with peak_memory() as our_peak:
            ours = our_step(own, rows)
            tokens_per_s(ours, len(rows), warm_up)
        scaled = " (the full case's lengths divided by 8)" if short != 200 else ""
        case = f"{name}, {SHORT_ROWS} rows of {short} beside one of {long:,}{scaled}"
        measures = [partial(tokens_per_s, step, len(rows), steps) for step in (ours, theirs)]
        run.add(case, "decode", "tokens/s", *interleave(rounds, "mixed", *measures))
        peaks = [[peak[0] / 2**20] for peak in (our_peak, their_peak)]
        run.add(case, "peak memory beyond weights and rows' own caches", "MiB", *peaks, more_is_better=False)


if __name__ == "__main__":
    main()
