"""Decode steps of full lanes: ours, eager and compiled, beside mlx-lm's BatchGenerator on the same model and BLAS.

Rows enter with caches of random keys and values, so that long rows need no prompt. A step is measured as it runs in the
daemon: the next one is dispatched before the last one's tokens are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lanes import cuda_environment
from lanes.blas import preload

cuda_environment.set_variables()
BLAS = preload()

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from lanes.batch import SlotCaches
from lanes.decoder import Decoder, Forward
from lanes.forward import COMPILE_AFTER, CompiledForward, eager
from lanes.lane import Sampling
from lanes.rows import rows_like
from lanes.rows.columns import ColumnRows
from lanes.sizes import row_geometry
from lanes.solo import RowMaker
from lanes.tuning import Tuning, backend, tune
from tests.bench.harness import Bench, bench, interleave
from tests.bench.models import default_model, gemma3_shape, qwen3_5_shape, weight_bytes

KINDS = ("kv", "qkv", "rotating", "hybrid")
CPU_OTHERS = [(8, 128), (8, 1024)]
GPU_OTHERS = [(8, 1024), (32, 4096)]
CPU_CASES = [(rows, 128) for rows in (1, 2, 4, 8, 16)] + [(8, 1024)]
GPU_CASES = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (8, 8192), (32, 4096), (32, 8192)]
# What the rows of all lanes that are measured in turns may take of an H200's 150 GB: two models of 16 GB are there, and
# mlx-lm holds its rows twice while they enter.
TOGETHER_BYTES = 50e9


def random_row(make_row: RowMaker, tokens: int) -> list[Any]:
    """Solo caches that hold so many tokens: columns of random content, and the state that two tokens leave."""
    probe = make_row()
    make_row.model(mx.zeros((1, 2), dtype=mx.int32), cache=probe)
    mx.eval([cache.state for cache in probe])
    row = []
    for cache in probe:
        rows = rows_like(cache)
        if isinstance(rows, ColumnRows):
            long = [random_columns(part, rows.held_columns(tokens)) for part in rows.solo_arrays(cache)]
            mx.eval(long)
            cache = rows.solo_row(long, tokens)
        row.append(cache)
    return row


def random_columns(part: mx.array, columns: int) -> mx.array:
    """As part [1, heads, n, dim], with so many columns."""
    shape = (1, part.shape[1], columns, part.shape[3])
    if part.dtype == mx.uint32:
        return mx.random.randint(0, 1 << 30, shape).astype(part.dtype)
    return (0.1 * mx.random.normal(shape)).astype(part.dtype)


class Ours:
    """A lane of rows that are all so long."""

    def __init__(self, case: Case, rows: int, tokens: int, compiled: bool) -> None:
        make_row = case.tuned
        model = make_row.model
        caches = SlotCaches(make_row(), max(rows, 8))
        width = case.tuning.read_width
        forward: Forward = CompiledForward(model, caches, width) if compiled else partial(eager, model, caches)
        self.decoder = Decoder(caches, forward)
        row = random_row(make_row, tokens)
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
        row = random_row(RowMaker(model), tokens)  # only copied from, so one serves all
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
    """Bytes read and written per second by plain copies, several in a row, so that the host's part is hidden."""
    source = mx.zeros((1 << 28,), dtype=mx.uint32)
    mx.eval(source)
    best, copies = 0.0, 8
    for _ in range(5):
        began = time.perf_counter()
        mx.eval([source + number for number in range(copies)])
        best = max(best, copies * 2 * source.nbytes / (time.perf_counter() - began))
    return best


@dataclass(frozen=True)
class Case:
    """A model as the daemon would run it, and as mlx-lm has it; plain None where mlx-lm cannot batch it."""

    name: str
    tuned: RowMaker
    tuning: Tuning
    plain: Any | None
    rows_and_tokens: Sequence[tuple[int, int]]


def cases(kinds: Sequence[str], quick: bool) -> Iterator[Case]:
    """One model after another, so that no two are in memory on a GPU."""
    on_gpu = backend() != "cpu"
    plains = GPU_CASES if on_gpu else CPU_CASES[3:5] if quick else CPU_CASES
    others = GPU_OTHERS if on_gpu else CPU_OTHERS[:1] if quick else CPU_OTHERS
    for kind in kinds:
        mx.clear_cache()
        make = {"rotating": gemma3_shape, "hybrid": qwen3_5_shape}.get(kind, default_model)
        name, tuned = make()
        tuning = tune(tuned)
        bits = 8 if kind == "qkv" else None
        plain = None if bits else make()[1]  # mlx-lm does not batch quantized keys and values
        title = f"{kind}: {name}{', 8 bits' if bits else ''} ({tuning})"
        yield Case(title, RowMaker(tuned, bits, 64), tuning, plain, plains if kind == "kv" else others)
        del tuned, plain


def main() -> None:
    with bench("decode", __doc__ or "", KINDS) as run:
        run.blas = BLAS.sentence
        on_gpu = backend() != "cpu"
        bandwidth = copy_bandwidth() if on_gpu else 0.0
        steps, rounds = (20, 3) if on_gpu else (3, 3) if run.quick else (6, 5)
        for case in cases(run.only, run.quick):
            for rows, tokens in case.rows_and_tokens:
                measure_case(run, case, rows, tokens, steps, rounds, bandwidth)


def measure_case(run: Bench, case: Case, rows: int, tokens: int, steps: int, rounds: int, bandwidth: float) -> None:
    """bandwidth: bytes per second of a copy, 0 where no floor is asked for."""
    makers: dict[str, Callable[[], Ours | Peer]] = {
        "eager": partial(Ours, case, rows, tokens, compiled=False),
        "compiled": partial(Ours, case, rows, tokens, compiled=True),
    }
    if case.plain is not None:
        makers["mlx-lm"] = partial(Peer, case.plain, rows, tokens)
    sized = row_geometry(case.tuned)
    rows_bytes = rows * sized.row_bytes(tokens) if sized else 0
    if len(makers) * rows_bytes > TOGETHER_BYTES:
        del makers["eager"]
    label = f"{case.name.split(':')[0]}, {rows} rows of {tokens}"
    if len(makers) * rows_bytes > TOGETHER_BYTES:
        values = {form: measured(label, rows, steps, rounds, maker)[0] for form, maker in makers.items()}
    else:
        values = dict(zip(makers, measured(label, rows, steps, rounds, *makers.values()), strict=True))
    for form in [form for form in values if form != "mlx-lm"]:
        title = f"{case.name}, {rows} x {tokens}"
        row = run.add(title, f"decode, {form}", "tokens/s", values[form], values.get("mlx-lm", ()))
        if bandwidth and sized:
            read_bytes = weight_bytes(case.tuned.model) + rows_bytes
            run.add(title, f"step, {form}", "times the floor", [rows / row.ours / (read_bytes / bandwidth)])


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
