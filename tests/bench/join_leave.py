"""What it costs that a row joins a full lane or leaves it: milliseconds, bytes, and parts of a decode step. Ours, rows
in slots, beside mlx-lm's left-padded batch caches, with caches of Qwen3-8B's shape.

A row that leaves a slot costs nothing by itself. If it was not the last slot, and nobody joins before the next step,
the last row is moved into its place, so that steps read no empty slot: that is measured too ("and the next step's
move"). Joining is set beside a plain copy of the row's bytes. All is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.bench.drive import BLAS, Ours, Peer, engine_for, peer_memory, seat

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from lanes.batch import SlotCaches
from lanes.lane import Step
from lanes.tuning import backend
from tests.bench.harness import Bench, bench, interleave
from tests.bench.models import qwen3_8b_shape

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A lane full of rows that are all so long. layers: as many as the model that is made has."""

    rows: int
    tokens: int
    layers: int
    rounds: int


GPU_CASES = [Case(8, 2048, 36, 5), Case(32, 8192, 36, 3)]
GPU_QUICK_CASES = [Case(8, 2048, 36, 3)]
CPU_CASES = [Case(8, 2048, 4, 5)]
CPU_QUICK_CASES = [Case(8, 2048, 2, 3)]


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    bytes: int


def solo_row(model: Any, tokens: int, dtype: mx.Dtype) -> list[KVCache]:
    """The caches of a row that was processed alone; their content does not matter."""
    heads, dim = model.args.num_key_value_heads, model.args.head_dim
    row = []
    for _ in model.layers:
        cache = KVCache()
        cache.state = (*(mx.random.uniform(shape=(1, heads, tokens, dim)).astype(dtype) for _ in range(2)), tokens)
        mx.eval(cache.keys, cache.values)
        row.append(cache)
    return row


def cost(work: Callable[[], None], caches: Callable[[], list[Any]]) -> Cost:
    """Of work that changes caches, which are waited for before and after it."""
    mx.eval(caches())
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    work()
    mx.eval(caches())
    mx.synchronize()
    return Cost(time.perf_counter() - began, max(0, mx.get_peak_memory() - before))


class Slots:
    """Our lane, full."""

    def __init__(self, row: list[KVCache], case: Case) -> None:
        self.row, self.case = row, case
        self.caches = SlotCaches(row, case.rows)
        for number in range(case.rows):
            self.caches.merge(number, row, case.tokens)
            mx.eval(self.arrays())
        self._next = case.rows

    def arrays(self) -> list[Any]:
        return [layer.state for layer in self.caches.layers]

    def leave_and_join(self, slot: int) -> tuple[Cost, Cost, Cost]:
        """The row in this slot leaves, the move that follows, and a new row that joins."""
        leaving = self.caches.table.rows[slot]
        assert leaving is not None
        leave = cost(lambda: self.caches.leave(leaving), self.arrays)
        move = cost(self._compact, self.arrays)
        self._next += 1
        join = cost(lambda: self.caches.merge(self._next, self.row, self.case.tokens), self.arrays)
        return leave, move, join

    def _compact(self) -> None:
        self.caches.compact()


class Padded:
    """mlx-lm's batch caches, full."""

    def __init__(self, row: list[KVCache], case: Case) -> None:
        self.row, self.case = row, case
        self.caches = []
        for cache in row:
            self.caches.append(BatchKVCache.merge([cache] * case.rows))
            mx.eval(self.caches[-1].state)

    def arrays(self) -> list[Any]:
        return [cache.state for cache in self.caches]

    def leave_and_join(self, index: int) -> tuple[Cost, Cost]:
        keep = [other for other in range(self.case.rows) if other != index]
        return cost(lambda: self._leave(keep), self.arrays), cost(self._join, self.arrays)

    def _leave(self, keep: list[int]) -> None:
        for batch in self.caches:
            batch.filter(keep)

    def _join(self) -> None:
        for batch, cache in zip(self.caches, self.row, strict=True):
            batch.extend(BatchKVCache.merge([cache]))


def copy_cost(row: list[KVCache]) -> Cost:
    """Of the row's bytes, read once and written once by one elementwise operation a tensor."""
    copies: list[mx.array] = []
    tensors = [tensor for cache in row for tensor in (cache.keys, cache.values)]
    return cost(lambda: copies.extend(tensor + 0 for tensor in tensors), lambda: copies)


def step_s(side: Ours | Peer, case: Case) -> float:
    """Seconds of a decode step of the full lane, dispatched ahead."""
    steps = 2 if backend() == "cpu" else 10
    turn = (lambda: side.engine.step(Step())) if isinstance(side, Ours) else side.generator.next
    for _ in range(steps):
        turn()
    began = time.perf_counter()
    for _ in range(steps):
        turn()
    return (time.perf_counter() - began) / steps


def our_step_s(model: Any, row: list[KVCache], case: Case) -> float:
    side = Ours(engine_for(model, case.rows), case.rows)
    seat(side.engine, [(row, case.tokens)] * case.rows)
    return step_s(side, case)


def peer_step_s(model: Any, row: list[KVCache], case: Case) -> float:
    side = Peer(model, case.rows)
    side.generator.insert([[1, 2]] * case.rows, [1 << 20] * case.rows, caches=[row] * case.rows)
    while len(side.generator._generation_batch) < case.rows:
        side.generator.next()
    return step_s(side, case)


def measure_peer(model: Any, row: list[KVCache], case: Case) -> tuple[float, list[tuple[Cost, Cost]]]:
    with peer_memory():
        seconds = peer_step_s(model, row, case)
        mx.clear_cache()
        padded = Padded(row, case)
        padded.leave_and_join(1)  # kernels are compiled at their first use
        label = f"mlx-lm, {case.rows} rows of {case.tokens}"
        (costs,) = interleave(case.rounds, label, partial(padded.leave_and_join, case.rows // 2))
    return seconds, costs


def measure_ours(model: Any, row: list[KVCache], case: Case) -> tuple[float, list[tuple[Cost, Cost, Cost]], list[Cost]]:
    seconds = our_step_s(model, row, case)
    mx.clear_cache()
    slots = Slots(row, case)
    slots.leave_and_join(1)
    copy_cost(row)
    costs: list[tuple[Cost, Cost, Cost]] = []
    copies: list[Cost] = []

    def both() -> None:
        copies.append(copy_cost(row))
        costs.append(slots.leave_and_join(case.rows // 2))

    interleave(case.rounds, f"ours, {case.rows} rows of {case.tokens}", both)
    return seconds, costs, copies


def measure(run: Bench, case: Case, on_gpu: bool) -> None:
    dtype = mx.bfloat16 if on_gpu else mx.float32
    # On the CPU the output's matrix is left out: a step is made of layers only, which makes a row's part in it larger.
    model = qwen3_8b_shape(case.layers, dtype, *(() if on_gpu else (1024,)))
    row = solo_row(model, case.tokens, dtype)
    row_bytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in row)
    padded_step_s, theirs = measure_peer(model, row, case)
    mx.clear_cache()
    slots_step_s, ours, copies = measure_ours(model, row, case)
    what = f"{dtype} caches of Qwen3-8B's shape, {case.layers} layers".removeprefix("mlx.core.")
    book(run, f"{what}, {case.rows} x {case.tokens:,}", ours, theirs, copies, slots_step_s, padded_step_s)
    run.add(f"{what}, {case.rows} x {case.tokens:,}", "a row's bytes", "MiB", [row_bytes / MIB])


def book(
    run: Bench,
    name: str,
    ours: list[tuple[Cost, Cost, Cost]],
    theirs: list[tuple[Cost, Cost]],
    copies: list[Cost],
    our_step_s: float,
    their_step_s: float,
) -> None:
    columns = {
        "leave": ([leave for leave, _, _ in ours], [leave for leave, _ in theirs]),
        "leave and the next step's move": (
            [Cost(a.seconds + b.seconds, max(a.bytes, b.bytes)) for a, b, _ in ours],
            [leave for leave, _ in theirs],
        ),
        "join": ([join for *_, join in ours], [join for _, join in theirs]),
    }
    for what, (mine, peer) in columns.items():
        milliseconds = [[cost.seconds * 1000 for cost in costs] for costs in (mine, peer)]
        run.add(name, what, "ms", *milliseconds, more_is_better=False)
        bytes_ = [[cost.bytes / MIB for cost in costs] for costs in (mine, peer)]
        run.add(name, f"{what}, extra memory at the peak", "MiB", *bytes_, more_is_better=False)
        parts = [
            [cost.seconds / step_s * 100 for cost in costs]
            for costs, step_s in zip((mine, peer), (our_step_s, their_step_s), strict=True)
        ]
        run.add(name, f"{what}, part of a step", "%", *parts, more_is_better=False)
    joins = [join.seconds * 1000 for *_, join in ours]
    plain = [copy.seconds * 1000 for copy in copies]
    run.add(name, "join; peer: a plain copy of the row", "ms", joins, plain, more_is_better=False)
    run.add(name, "decode step", "ms", [our_step_s * 1000], [their_step_s * 1000], more_is_better=False)


def main() -> None:
    with bench("join_leave", __doc__ or "") as run:
        run.blas = BLAS.sentence
        on_gpu = backend() != "cpu"
        quick = GPU_QUICK_CASES if on_gpu else CPU_QUICK_CASES
        for case in quick if run.quick else GPU_CASES if on_gpu else CPU_CASES:
            measure(run, case, on_gpu)
            mx.clear_cache()


if __name__ == "__main__":
    main()
