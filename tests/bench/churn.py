"""Rows that come and go: requests arrive at random moments (Poisson) with prompts and answers of random length, until
all are answered. Ours, scheduler and engine without sockets, beside mlx-lm's BatchGenerator: the same requests, the
same moments, the same model and BLAS, in turns.

They arrive faster than either side can serve them, so that tokens per second, counted from the first arrival to the
last token, is what a side can do.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from functools import partial

from tests.bench.drive import BLAS, Ask, Ours, Outcome, Peer, engine_for, play, random_prompt

# isort: split
import mlx.core as mx

from lanes.tuning import backend
from tests.bench.harness import Bench, bench, interleave_long
from tests.bench.models import default_model

SEED = 11


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests, arriving at a mean rate, prompts and answers of so many tokens (uniform), at most so many rows
    at once. scale: by what the lengths of the full load were divided."""

    requests: int
    per_s: float
    prompt_tokens: tuple[int, int] = (50, 2000)
    answer_tokens: tuple[int, int] = (10, 200)
    rows: int = 32
    scale: int = 1

    def asks(self, seed: int) -> list[Ask]:
        source = random.Random(seed)
        asks, now_s = [], 0.0
        for _ in range(self.requests):
            now_s += source.expovariate(self.per_s)
            tokens = source.randint(*self._scaled(self.prompt_tokens))
            asks.append(Ask(now_s, random_prompt(source, tokens), source.randint(*self._scaled(self.answer_tokens))))
        return asks

    def _scaled(self, span: tuple[int, int]) -> tuple[int, int]:
        return span[0] // self.scale, span[1] // self.scale

    def __str__(self) -> str:
        prompts, answers = self._scaled(self.prompt_tokens), self._scaled(self.answer_tokens)
        scaled = "" if self.scale == 1 else f" (lengths of the full case divided by {self.scale})"
        return (
            f"{self.requests} requests at {self.per_s:g}/s, prompts of {prompts[0]} to {prompts[1]:,}, answers of "
            f"{answers[0]} to {answers[1]} tokens{scaled}, up to {self.rows} rows"
        )


GPU_LOAD = Load(requests=256, per_s=40.0)
CPU_LOAD = Load(requests=48, per_s=3.0, scale=8)
QUICK_LOAD = Load(requests=12, per_s=4.0, rows=8, scale=10)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> None:
    with bench("churn", __doc__ or "") as run:
        run.blas = BLAS.sentence
        on_gpu = backend() != "cpu"
        load = GPU_LOAD if on_gpu else QUICK_LOAD if run.quick else CPU_LOAD
        if on_gpu and run.quick:
            load = Load(requests=64, per_s=40.0)
        name, plain = default_model()
        engine = engine_for(default_model()[1], load.rows)
        if on_gpu:  # kernels are compiled at their first use
            for side in (Ours(engine, load.rows), Peer(plain, load.rows)):
                play(side, Load(requests=40, per_s=100.0).asks(SEED + 1), lambda part: None)
                mx.clear_cache()
        asks = load.asks(SEED)
        ours, peer = interleave_long(
            2 if on_gpu and not run.quick else 1,
            "churn",
            lambda report: play(Ours(engine, load.rows), asks, report),
            lambda report: play(Peer(plain, load.rows), asks, report),
        )
        book(run, f"{name}, {load}", ours, peer)


def book(run: Bench, case: str, ours: list[Outcome], peer: list[Outcome]) -> None:
    run.add(case, "throughput", "tokens/s", [o.tokens_per_s for o in ours], [o.tokens_per_s for o in peer])
    less = partial(run.add, more_is_better=False)

    def gaps(outcomes: list[Outcome]) -> list[float]:
        return [p99(outcome.gaps_s) * 1000 for outcome in outcomes]

    less(case, "between tokens, p99", "ms", gaps(ours), gaps(peer))
    medians = [[statistics.median(o.gaps_s) * 1000 for o in outcomes] for outcomes in (ours, peer)]
    less(case, "between tokens, median", "ms", *medians)
    waits = [[statistics.median(s.ttft_s for s in o.stories) for o in outcomes] for outcomes in (ours, peer)]
    less(case, "time to first token, median", "s", *waits)
    peaks = [[o.peak_bytes / 2**20 for o in outcomes] for outcomes in (ours, peer)]
    less(case, "peak memory beyond the weights", "MiB", *peaks)


if __name__ == "__main__":
    main()
