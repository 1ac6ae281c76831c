"""Prompts: how fast one is processed, beside mlx-lm's generate_step, and how long each of several that come together
waits for its first token, beside mlx-lm's BatchGenerator. Same model, same BLAS, one process.

A prompt's rate is of all its tokens but the last, which belongs to the first decode step on both sides.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.bench.drive import BLAS, Ask, Ours, Outcome, Peer, engine_for, peer_memory, play, random_prompt

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step

from lanes.engine import MlxEngine
from lanes.lane import Chunk, RowSpec, Sampling
from lanes.prefill import Prefill
from lanes.tuning import backend
from tests.bench.harness import Bench, Report, bench, interleave, interleave_long
from tests.bench.models import default_model

ROWS = 8

# Lengths of prompts, sizes of their chunks.
CASES = [(100, 2048), (512, 64), (512, 512), (2048, 256), (2048, 2048)]
QUICK_CASES = [(100, 2048), (256, 64)]
GPU_CASES = [(100, 2048), (512, 64), (512, 2048), (2048, 512), (2048, 2048), (8192, 512), (8192, 2048)]

TOGETHER = (16, 32, 64, 128, 256, 512, 768, 1024)
QUICK_TOGETHER = (4, 16, 64, 256)
SEED = 7


def ours_tokens_per_s(engine: MlxEngine, prompt: tuple[int, ...], chunk_tokens: int) -> float:
    """The prompt's chunks one after another, each waited for, as the engine does it when no row decodes."""
    began = time.perf_counter()
    prefill = Prefill(engine.make_row, RowSpec(0, prompt, Sampling()))
    while not prefill.is_complete:
        start = prefill.processed
        mx.eval(prefill.dispatch(Chunk(0, start, min(start + chunk_tokens, len(prompt) - 1))))
    return (len(prompt) - 1) / (time.perf_counter() - began)


def peer_tokens_per_s(model: Any, prompt: tuple[int, ...], chunk_tokens: int) -> float:
    """From generate_step's first report of progress to the one before it feeds the prompt's last token."""
    times: dict[int, float] = {}

    def progress(processed: int, total: int) -> None:
        times[processed] = time.perf_counter()

    with peer_memory():
        for _ in generate_step(
            mx.array(prompt), model, max_tokens=0, prefill_step_size=chunk_tokens, prompt_progress_callback=progress
        ):
            pass
    last = len(prompt) - 1
    return last / (times[last] - times[0])


def first_tokens(side: Ours | Peer, asks: list[Ask], report: Report) -> Outcome:
    return play(side, asks, report, first_tokens_only=True)


def together(run: Bench, name: str, engine: MlxEngine, plain: Any, lengths: Sequence[int], rounds: int) -> None:
    """Prompts that all arrive at once, as many as there are rows."""
    source = random.Random(SEED)
    asks = [Ask(0.0, random_prompt(source, tokens), 64) for tokens in lengths]
    source.shuffle(asks)
    ours, peer = interleave_long(
        rounds,
        "prompts together",
        lambda report: first_tokens(Ours(engine, len(asks)), asks, report),
        lambda report: first_tokens(Peer(plain, len(asks)), asks, report),
    )

    def waits(outcomes: list[Outcome], part: float) -> list[float]:
        return [quantile([story.ttft_s for story in outcome.stories], part) for outcome in outcomes]

    case = f"{name}, {len(asks)} prompts of {lengths[0]} to {lengths[-1]:,} tokens at once"
    for part, what in ((0.5, "median"), (0.0, "shortest"), (1.0, "longest")):
        run.add(case, f"time to first token, {what}", "s", waits(ours, part), waits(peer, part), more_is_better=False)
    useful = sum(len(ask.prompt) for ask in asks)
    run.add(
        case,
        "prompt tokens until all have a first token",
        "tokens/s",
        [useful / wait for wait in waits(ours, 1.0)],
        [useful / wait for wait in waits(peer, 1.0)],
    )
    peaks = [[outcome.peak_bytes / 2**20 for outcome in outcomes] for outcomes in (ours, peer)]
    run.add(case, "peak memory beyond the weights", "MiB", *peaks, more_is_better=False)


def quantile(values: list[float], part: float) -> float:
    if part in (0.0, 1.0):
        return min(values) if part == 0.0 else max(values)
    return statistics.median(values)


def main() -> None:
    with bench("prefill", __doc__ or "") as run:
        run.blas = BLAS.sentence
        on_gpu = backend() != "cpu"
        name, plain = default_model()
        engine = engine_for(default_model()[1], ROWS)
        cases = GPU_CASES if on_gpu else QUICK_CASES if run.quick else CASES
        rounds = 5 if on_gpu else 2 if run.quick else 3
        source = random.Random(SEED)
        for tokens, chunk_tokens in cases:
            prompt = random_prompt(source, tokens + 1)
            measures = [
                partial(ours_tokens_per_s, engine, prompt, chunk_tokens),
                partial(peer_tokens_per_s, plain, prompt, chunk_tokens),
            ]
            if on_gpu:  # the first use of a shape compiles and chooses kernels
                for measure in measures:
                    measure()
            ours, peer = interleave(rounds, f"prompt of {tokens}", *measures)
            case = f"{name}, prompt of {tokens:,} in chunks of {min(chunk_tokens, tokens):,}"
            run.add(case, "prefill", "tokens/s", ours, peer)
        if on_gpu:
            together(Bench("warm-up", True, None), name, engine, plain, TOGETHER, 1)
        lengths = QUICK_TOGETHER if run.quick and not on_gpu else TOGETHER
        together(run, name, engine, plain, lengths, 3 if on_gpu else 1)


if __name__ == "__main__":
    main()
