"""Decode steps of full lanes: ours, eager and compiled, beside mlx-lm's BatchGenerator on the same model and BLAS.

Rows enter with caches of random keys and values, so that long rows need no prompt. A step is measured as it runs in the
daemon: the next one is dispatched before the last one's tokens are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lanes import cuda_environment
from lanes.blas import preload

cuda_environment.set_variables()
BLAS = preload()

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, make_prompt_cache

from lanes.batch import SlotCaches
from lanes.decoder import Decoder, Forward
from lanes.forward import COMPILE_AFTER, CompiledForward, eager
from lanes.lane import Sampling
from lanes.tuning import backend, tune
from tests.bench.harness import bench, interleave
from tests.bench.models import default_model, weight_bytes

CPU_CASES = [(rows, 128) for rows in (1, 2, 4, 8, 16)] + [(8, 1024)]
GPU_CASES = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (1, 8192), (8, 8192), (32, 4096), (32, 8192)]


def random_row(model: Any, tokens: int) -> list[Any]:
    """Solo caches that hold so many tokens, of shapes and types as the model makes them."""
    probe = make_prompt_cache(model)
    model(mx.zeros((1, 2), dtype=mx.int32), cache=probe)
    row = []
    for cache in probe:
        assert type(cache) is KVCache
        new = KVCache()
        shape = (1, cache.keys.shape[1], tokens, cache.keys.shape[3])
        keys, values = (0.1 * mx.random.normal(shape).astype(cache.keys.dtype) for _ in range(2))
        new.state = (keys, values, tokens)
        mx.eval(new.keys, new.values)
        row.append(new)
    return row


class Ours:
    """A lane of rows that are all so long."""

    def __init__(self, model: Any, rows: int, tokens: int, compiled: bool) -> None:
        caches = SlotCaches(make_prompt_cache(model), max(rows, 8))
        forward: Forward = CompiledForward(model, caches) if compiled else partial(eager, model, caches)
        self.decoder = Decoder(caches, forward)
        row = random_row(model, tokens)
        for row_id in range(rows):
            self.decoder.merge(row_id, row, tokens, 1, Sampling())
        self.last = self.decoder.dispatch()

    def step(self) -> None:
        previous, self.last = self.last, self.decoder.dispatch()
        previous.read()


class Peer:
    """mlx-lm's BatchGenerator with the same rows, all of them decoding."""

    def __init__(self, model: Any, rows: int, tokens: int) -> None:
        self.generator = BatchGenerator(model, max_tokens=1 << 20, completion_batch_size=rows)
        row = random_row(model, tokens)  # only copied from, so one serves all
        self.generator.insert([[1, 2]] * rows, caches=[row] * rows)
        while len(self.generator._generation_batch) < rows:
            self.generator.next()

    def step(self) -> None:
        self.generator.next()


def rate(step: Callable[[], None], rows: int, steps: int) -> float:
    """Tokens per second of all rows together."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return rows * steps / (time.perf_counter() - began)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a plain copy."""
    source = mx.zeros((1 << 28,), dtype=mx.uint32)
    mx.eval(source)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(source + 1)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - began))
    return best


def main() -> None:
    with bench("decode", __doc__ or "") as run:
        run.blas = BLAS.sentence
        on_gpu = backend() != "cpu"
        name, plain = default_model()
        _, tuned = default_model()
        name += f" ({tune(tuned)})"
        bandwidth = copy_bandwidth() if on_gpu else 0.0
        cases = GPU_CASES if on_gpu else CPU_CASES[3:5] if run.quick else CPU_CASES
        steps, rounds = (20, 3) if on_gpu else (3, 3) if run.quick else (6, 5)
        for rows, tokens in cases:
            makers: dict[str, Callable[[], Ours | Peer]] = {
                "eager": partial(Ours, tuned, rows, tokens, compiled=False),
                "compiled": partial(Ours, tuned, rows, tokens, compiled=True),
                "mlx-lm": partial(Peer, plain, rows, tokens),
            }
            label = f"{rows} rows of {tokens}"
            if on_gpu:  # one at a time: together they would not fit, and nobody else slows the card
                values = {form: measured(label, rows, steps, rounds, maker)[0] for form, maker in makers.items()}
            else:
                values = dict(zip(makers, measured(label, rows, steps, rounds, *makers.values()), strict=True))
            case = f"{name}, {rows} x {tokens}"
            for form in ("eager", "compiled"):
                row = run.add(case, f"decode, {form}", "tokens/s", values[form], values["mlx-lm"])
                if on_gpu:
                    cache_bytes = rows * sum(cache.nbytes for cache in random_row(plain, tokens))
                    floor_s = (weight_bytes(plain) + cache_bytes) / bandwidth
                    run.add(case, f"step, {form}", "times the floor", [rows / row.ours / floor_s])


def measured(label: str, rows: int, steps: int, rounds: int, *makers: Callable[[], Ours | Peer]) -> list[list[float]]:
    """Tokens per second of each lane, warmed up, in turns; then they are gone."""
    lanes = [maker() for maker in makers]
    for lane in lanes:
        rate(lane.step, rows, 2 * COMPILE_AFTER)
    values = interleave(rounds, label, *(partial(rate, lane.step, rows, steps) for lane in lanes))
    del lanes
    mx.clear_cache()
    return values


if __name__ == "__main__":
    main()
