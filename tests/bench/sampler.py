"""Drawing the tokens of eight rows with settings of their own, in one call, beside mlx-lm's sampler of each row, which
is what its BatchGenerator calls one after another."""

from __future__ import annotations

import time
from functools import partial

from tests.bench.drive import BLAS

# isort: split
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from lanes.lane import Sampling
from lanes.sampler import Sampler
from tests.bench.harness import bench, interleave

ROWS, VOCABULARY = 8, 49_152
GREEDY = Sampling()
CASES: dict[str, list[Sampling]] = {
    "all greedy": [GREEDY] * ROWS,
    "one with a temperature": [*[GREEDY] * (ROWS - 1), Sampling(1.0, seed=1)],
    "one with top_p": [*[GREEDY] * (ROWS - 1), Sampling(1.0, top_p=0.9, seed=1)],
    "all with top_p": [Sampling(1.0, top_p=0.9, seed=row) for row in range(ROWS)],
    "all with top_k and min_p": [Sampling(0.7, top_k=40, min_p=0.05, seed=row) for row in range(ROWS)],
}


def together(rows: list[Sampling], logits: mx.array, repetitions: int) -> float:
    """Milliseconds."""
    sampler, positions = Sampler(rows), list(range(ROWS))
    began = time.perf_counter()
    for _ in range(repetitions):
        mx.eval(sampler(logits, positions))
    return 1000 * (time.perf_counter() - began) / repetitions


def one_by_one(rows: list[Sampling], logits: mx.array, repetitions: int) -> float:
    samplers = [make_sampler(row.temperature, top_p=row.top_p, min_p=row.min_p, top_k=row.top_k) for row in rows]
    began = time.perf_counter()
    for _ in range(repetitions):
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval([sampler(scores[row : row + 1]) for row, sampler in enumerate(samplers)])
    return 1000 * (time.perf_counter() - began) / repetitions


def main() -> None:
    with bench("sampler", __doc__ or "") as run:
        run.blas = BLAS.sentence
        logits = mx.random.normal((ROWS, VOCABULARY), key=mx.random.key(1)) * 4
        mx.eval(logits)
        rounds, repetitions = (2, 3) if run.quick else (5, 20)
        for name, rows in CASES.items():
            measures = [partial(measure, rows, logits, repetitions) for measure in (together, one_by_one)]
            for measure in measures:
                measure()
            case = f"{ROWS} rows of {VOCABULARY:,}, {name}"
            run.add(case, "a draw", "ms", *interleave(rounds, name, *measures), more_is_better=False)


if __name__ == "__main__":
    main()
