"""What it costs that a row joins a full lane or leaves it: milliseconds, bytes, and parts of a decode step. Ours, rows
in slots, beside mlx-lm's left-padded batch caches, with caches of Qwen3-8B's shape.

A row that leaves a slot costs nothing by itself. If it was not the last slot, and nobody joins before the next step,
the last row is moved into its place, so that steps read no empty slot: that is measured too ("and the next step's
move"). Joining is set beside a plain copy of the row's bytes. All is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.bench.drive import BLAS, Peer, engine_for, peer_memory, place, seat

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from lanes.batch import SlotCaches
from lanes.engine import MlxEngine
from lanes.lane import Step
from lanes.tuning import backend
from tests.bench.harness import Bench, bench, interleave
from tests.bench.models import qwen3_8b_shape

MIB = 1 << 20
# Rows that join in one turn, as when short prompts shared a pass.
SEVERAL = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A lane full of rows that are all so long. layers: as many as the model has. steps: for one measurement of a
    decode step."""

    rows: int
    tokens: int
    layers: int
    rounds: int
    steps: int


GPU_CASES = [Case(8, 2048, 36, 5, 10), Case(32, 8192, 36, 3, 10)]
GPU_QUICK_CASES = [Case(8, 2048, 36, 3, 10)]
CPU_CASES = [Case(8, 2048, 4, 5, 2)]
CPU_QUICK_CASES = [Case(8, 2048, 2, 2, 2)]


@dataclass(frozen=True, slots=True)
class Cost:
    """bytes: the most in use beyond what was in use before."""

    seconds: float
    bytes: int


@dataclass(slots=True)
class Costs:
    """What was measured of one side. step_s: a decode step of the full lane."""

    step_s: float
    leave: list[Cost] = field(default_factory=list)
    leave_and_move: list[Cost] = field(default_factory=list)
    join: list[Cost] = field(default_factory=list)
    join_several: list[Cost] = field(default_factory=list)
    copy: list[Cost] = field(default_factory=list)
    under_way: list[Cost] = field(default_factory=list)


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

    def join_several(self) -> Cost:
        """Rows that join in one turn, after as many have left."""
        for leaving in self.caches.table.rows[-SEVERAL:]:
            assert leaving is not None
            self.caches.leave(leaving)
        return cost(self._join_several, self.arrays)

    def _join_several(self) -> None:
        for _ in range(SEVERAL):
            self._next += 1
            self.caches.merge(self._next, self.row, self.case.tokens)


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

    def _join(self, count: int = 1) -> None:
        for batch, cache in zip(self.caches, self.row, strict=True):
            batch.extend(BatchKVCache.merge([cache] * count))

    def join_several(self) -> Cost:
        self._leave(list(range(self.case.rows - SEVERAL)))
        return cost(lambda: self._join(SEVERAL), self.arrays)


def copy_cost(row: list[KVCache]) -> Cost:
    """Of the row's bytes, read once and written once by one elementwise operation a tensor."""
    copies: list[mx.array] = []
    tensors = [tensor for cache in row for tensor in (cache.keys, cache.values)]
    return cost(lambda: copies.extend(tensor + 0 for tensor in tensors), lambda: copies)


def step_s(turn: Callable[[], object], steps: int) -> float:
    """Seconds of a decode step, each dispatched before the one before it is read."""
    for _ in range(steps):
        turn()
    began = time.perf_counter()
    for _ in range(steps):
        turn()
    return (time.perf_counter() - began) / steps


def measure_under_way(engine: MlxEngine, number: int, row: list[KVCache], case: Case) -> Cost:
    """Two turns, a row joining in the first while the step before it still runs; the row with this number leaves."""
    place(engine, number + 1, row, case.tokens)
    engine.step(Step(leave=(number,)))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    engine.step(Step(merge=(number + 1,)))
    engine.step(Step())
    mx.synchronize()
    return Cost(time.perf_counter() - began, max(0, mx.get_peak_memory() - before))


def measure_engine(model: Any, row: list[KVCache], case: Case) -> Costs:
    """Of the lane as the daemon drives it."""
    engine = engine_for(model, case.rows)
    seat(engine, [(row, case.tokens)] * case.rows)
    costs = Costs(step_s(lambda: engine.step(Step()), case.steps))
    for number in range(case.rows - 1, case.rows - 1 + case.rounds):
        costs.under_way.append(measure_under_way(engine, number, row, case))
    return costs


def peer_step_s(model: Any, row: list[KVCache], case: Case) -> float:
    generator = Peer(model, case.rows).generator
    generator.insert([[1, 2]] * case.rows, [1 << 20] * case.rows, caches=[row] * case.rows)
    while len(generator._generation_batch) < case.rows:
        generator.next()
    return step_s(generator.next, case.steps)


def measure_peer(model: Any, row: list[KVCache], case: Case) -> Costs:
    """Of mlx-lm's batch caches."""
    with peer_memory():
        seconds = peer_step_s(model, row, case)
        mx.clear_cache()
        padded = Padded(row, case)
        padded.leave_and_join(1)  # kernels are compiled at their first use
        costs = Costs(seconds)

        def both() -> None:
            leave, join = padded.leave_and_join(case.rows // 2)
            costs.leave.append(leave)
            costs.leave_and_move.append(leave)
            costs.join.append(join)
            costs.join_several.append(padded.join_several())

        interleave(case.rounds, f"mlx-lm, {case.rows} rows of {case.tokens}", both)
    return costs


def measure_ours(model: Any, row: list[KVCache], case: Case) -> Costs:
    """Of our slots, and of plain copies of a row beside them."""
    costs = measure_engine(model, row, case)
    mx.clear_cache()
    slots = Slots(row, case)
    slots.leave_and_join(1)
    copy_cost(row)

    def all_of_it() -> None:
        costs.copy.append(copy_cost(row))
        leave, move, join = slots.leave_and_join(case.rows // 2)
        costs.leave.append(leave)
        costs.leave_and_move.append(Cost(leave.seconds + move.seconds, max(leave.bytes, move.bytes)))
        costs.join.append(join)
        costs.join_several.append(slots.join_several())

    interleave(case.rounds, f"ours, {case.rows} rows of {case.tokens}", all_of_it)
    return costs


def measure(run: Bench, case: Case, on_gpu: bool) -> None:
    dtype = mx.bfloat16 if on_gpu else mx.float32
    # On the CPU the output's matrix is left out: a step is made of layers only, which makes a row's part in it larger.
    model = qwen3_8b_shape(case.layers, dtype, *(() if on_gpu else (1024,)))
    row = solo_row(model, case.tokens, dtype)
    row_bytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in row)
    theirs = measure_peer(model, row, case)
    mx.clear_cache()
    ours = measure_ours(model, row, case)
    what = f"{dtype} caches of Qwen3-8B's shape, {case.layers} layers".removeprefix("mlx.core.")
    name = f"{what}, {case.rows} x {case.tokens:,}"
    book(run, name, ours, theirs)
    run.add(name, "a row's bytes", "MiB", [row_bytes / MIB])


def book(run: Bench, name: str, ours: Costs, theirs: Costs) -> None:
    less = partial(run.add, name, more_is_better=False)
    for what, mine, peer in (
        ("leave", ours.leave, theirs.leave),
        ("leave and the next step's move", ours.leave_and_move, theirs.leave_and_move),
        ("join", ours.join, theirs.join),
        (f"join of {SEVERAL} at once", ours.join_several, theirs.join_several),
    ):
        less(what, "ms", *([cost.seconds * 1000 for cost in costs] for costs in (mine, peer)))
        less(f"{what}, extra memory", "MiB", *([cost.bytes / MIB for cost in costs] for costs in (mine, peer)))
        steps = ((mine, ours.step_s), (peer, theirs.step_s))
        less(
            f"{what}, part of a step",
            "%",
            *([cost.seconds / step_s * 100 for cost in costs] for costs, step_s in steps),
        )
    turns = [2 * ours.step_s * 1000] * len(ours.under_way)
    less("two turns with a join; peer: ours without", "ms", [cost.seconds * 1000 for cost in ours.under_way], turns)
    less("two turns with a join, extra memory", "MiB", [cost.bytes / MIB for cost in ours.under_way])
    joins, copies = ([cost.seconds * 1000 for cost in costs] for costs in (ours.join, ours.copy))
    less("join; peer: a plain copy of the row", "ms", joins, copies)
    less("decode step", "ms", [ours.step_s * 1000], [theirs.step_s * 1000])


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
