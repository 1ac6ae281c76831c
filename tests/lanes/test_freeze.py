"""What is frozen is a copy of its own: it costs the lane nothing afterwards, and is there as long as it is used."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from lanes import cuda_fetch
from lanes.batch import SlotCaches
from lanes.cuda_fetch import CudaFetch, PageLockedMemory, device_fetch
from lanes.lane import Chunk, Freeze, RowSpec, Sampling, Step
from lanes.remember import RowMemory
from lanes.solo import RowMaker
from store.checkpoint import Part
from tests.lanes import emulated_fetch
from tests.lanes.families import make_model
from tests.lanes.families.facts import WINDOW
from tests.lanes.keeper import Rows
from tests.lanes.test_thaw import assert_equal, every_kind, rows_of
from tests.lanes.tiny import prompt_of, tiny_llama

pytestmark = pytest.mark.usefixtures("mlx_lms_attention")

KEPT = 4


def processed(rows: Rows, row: int, length: int, saves: tuple[int, ...] = ()) -> None:
    """A row with `length` tokens, in its own caches."""
    rows.admit(row, prompt_of(length + 1, row))
    rows.process(row, 0, [*saves, length], saves)


def content(part: Part) -> list[bytes]:
    return [bytes(buffer) for buffer in part.buffers]


def test_the_lanes_arrays_are_not_held_and_written_in_place_afterwards() -> None:
    """Of a row that has all of a layer's columns side by side, and nearly fills them: there it is easiest to share."""
    args = tiny_llama().args
    args.num_key_value_heads, args.hidden_size, args.head_dim = 1, 256, 64
    model = llama.Model(args)
    rows = Rows(RowMaker(model))
    processed(rows, 0, 1000)
    rows.decode(0, 2)
    lane_bytes = rows.engine.decoder.caches.nbytes
    array_bytes = lane_bytes // (2 * len(model.layers))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches = rows.engine.decoder.caches
    part = rows.engine.memory.freeze(Freeze(0, 0, 1002), caches.held(0), 1002).wait()
    assert part.nbytes == lane_bytes // 1024 * 1002
    if device_fetch() is None:  # otherwise it is the host's memory
        assert mx.get_active_memory() - before > part.nbytes - array_bytes // 2
    for _ in range(3):
        rows.turn()
    assert mx.get_peak_memory() - before < part.nbytes + array_bytes // 2
    rows.turn(leave=(0,))
    rows.turn()
    assert mx.get_active_memory() - before < part.nbytes + array_bytes // 2 - lane_bytes


@every_kind
def test_its_bytes_stay_as_they_are(kind: str) -> None:
    """Whatever becomes of the row; in another thread, too, where they are written to a disk and let go."""
    rows = rows_of(kind)
    processed(rows, 0, 2 * WINDOW, (WINDOW + 1,))
    early = rows.freeze(0, 0, 2 * WINDOW)
    rows.decode(0, 2)
    late = rows.freeze(0, 0, 2 * WINDOW + 2)
    before = content(early), content(late)
    for _ in range(WINDOW):
        rows.turn()
    rows.turn(leave=(0,))
    processed(rows, 1, 3 * WINDOW)
    found: list[tuple[list[bytes], list[bytes]]] = []
    parts = [early, late]
    del early, late

    def write() -> None:
        found.append((content(parts[0]), content(parts[1])))
        parts.clear()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert found == [before]


@every_kind
def test_a_row_that_cannot_be_frozen_serves_on(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rows, others = rows_of(kind), rows_of(kind)
    for each in (rows, others):
        processed(each, 0, WINDOW + 1)
        processed(each, 1, WINDOW + 3)
    wanted = (Freeze(0, 0, WINDOW + 2), Freeze(1, 0, WINDOW + 3), Freeze(7, 0, 3))
    assert [each.row_id for each, part in rows.turn(freeze=wanted).frozen if part] == [1]
    assert "failed" in caplog.text
    assert_equal(rows.decode(0, 4), others.decode(0, 4))


@pytest.mark.parametrize("keep", [0, KEPT])
def test_a_ring_has_what_its_boundaries_want_and_no_more(keep: int) -> None:
    """Each token once, though windows overlap; what is before the part is left to the part before."""
    rows = rows_of("rotating, kept" if keep else "rotating")
    turn = WINDOW - keep
    processed(rows, 0, 40, (12, 15, 30))
    saved = rows.engine.memory.nbytes
    column_bytes = saved // {0: 11 + 8, KEPT: 4 + 4 + 3 + 4}[keep]
    assert saved % column_bytes == 0
    parts = [rows.freeze(0, start, 40) for start in (0, 12, 15, 20)]
    assert [part.boundaries for part in parts] == [(12, 15, 30, 40), (15, 30, 40), (30, 40), (30, 40)]
    first = ((0, keep),) if keep else ()
    expected = [
        (*first, (12 - turn, 15), (30 - turn, 30), (40 - turn, 40)),
        ((max(12, 15 - turn), 15), (30 - turn, 30), (40 - turn, 40)),
        ((30 - turn, 30), (40 - turn, 40)),
        ((30 - turn, 30), (40 - turn, 40)),
    ]
    for part, ranges in zip(parts, expected, strict=True):
        (found,) = {spec.ranges for spec in part.tensors if spec.name.startswith("0.")}
        (plain,) = {spec.ranges for spec in part.tensors if spec.name.startswith("1.")}
        assert (found, plain) == (joined(ranges), ((part.start, 40),))
    rows.turn(leave=(0,))
    assert rows.engine.gauges().cache_bytes == 0


def joined(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    tokens = sorted({token for first, last in ranges for token in range(first, last)})
    starts = [token for token in tokens if token - 1 not in tokens]
    ends = [token + 1 for token in tokens if token + 1 not in tokens]
    return tuple(zip(starts, ends, strict=True))


def test_names_types_and_shapes() -> None:
    rows = Rows(RowMaker(make_model("falcon_h1"), 8, 32))
    processed(rows, 0, 5, (3,))
    part = rows.freeze(0, 0, 5)
    found = {(spec.name, spec.at): (spec.dtype, spec.shape, spec.ranges) for spec in part.tensors}
    assert found["0.1.0", None] == ("uint32", (2, 5, 8), ((0, 5),))
    assert found["1.1.4", None] == ("float32", (2, 5, 1), ((0, 5),))
    assert {name for name, at in found if at == 3} == {"0.0.0", "0.0.1", "1.0.0", "1.0.1"}
    assert {name for name, at in found if at == 5} == {name for name, at in found if at == 3}
    assert all(shape[0] != 1 and not ranges for (_, at), (_, shape, ranges) in found.items() if at)


def test_what_is_in_16_bits_is_handed_out_as_it_is() -> None:
    model = tiny_llama()
    model.set_dtype(mx.bfloat16)
    rows = Rows(RowMaker(model))
    processed(rows, 0, 9)
    part = rows.freeze(0, 4, 7)
    keys = rows.engine._prompts[0].caches[2].keys[0, :, 4:7]
    (buffer,) = [b for spec, b in zip(part.tensors, part.buffers, strict=True) if spec.name == "2.0"]
    assert np.array_equal(np.frombuffer(buffer, np.uint8), np.array(keys.view(mx.uint8)).flatten())
    assert {spec.dtype for spec in part.tensors} == {"bfloat16"}


def test_a_row_that_takes_over_a_prompt_has_its_boundaries() -> None:
    rows, prompt = rows_of("ssm"), prompt_of(9, 1)
    rows.admit(0, prompt)
    rows.process(0, 0, [5, 8], [5])
    rows.tokens[1] = list(prompt)
    rows.turn(admit=(RowSpec(1, prompt, Sampling()),))
    rows.turn(fork=((0, 1),), merge=(0, 1))
    rows.turn()
    first, second = (part for _, part in rows.turn(freeze=(Freeze(0, 0, 10), Freeze(1, 0, 10))).frozen)
    assert first is not None
    assert second is not None
    assert first.boundaries == second.boundaries == (5, 10)
    assert content(first) == content(second)
    rows.turn(leave=(0,))
    assert rows.freeze(1, 5, 12).boundaries == (12,)


def test_a_chunk_that_was_held_back_is_frozen_too() -> None:
    """It counts as processed."""
    rows = rows_of("kv")
    rows.engine.early_reads = True
    processed(rows, 0, 4)
    rows.turn(merge=(0,))
    prompt = prompt_of(9, 1)
    rows.tokens[1] = list(prompt)
    rows.turn(admit=(RowSpec(1, prompt, Sampling()),), chunk=Chunk(1, 0, 6))
    assert rows.engine._held_back is not None
    assert rows.freeze(1, 0, 6).stop == 6


def test_a_prompt_that_fails_leaves_nothing_behind() -> None:
    rows = rows_of("rotating")
    processed(rows, 0, 20, (12,))
    assert rows.engine.memory.nbytes
    result = rows.engine.step(Step(chunk=Chunk(0, 20, 99)))
    assert [row for row, _ in result.failures] == [0]
    assert rows.engine.gauges().cache_bytes == 0
    rows.engine.check()


@every_kind
def test_what_is_on_its_way_is_told_in_the_next_turn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where others may hold the lane's arrays; with the bytes that it has where MLX copies them."""
    monkeypatch.setattr(cuda_fetch, "copy", emulated_fetch.copy)
    monkeypatch.setattr(SlotCaches, "may_be_held", True)
    parts: list[Part | None] = []
    for fetch in (None, CudaFetch(PageLockedMemory(emulated_fetch.Memory(), is_ahead=False))):
        rows = rows_of(kind)
        rows.engine.memory = RowMemory(rows.engine.make_row, rows.engine.info.remembers, fetch=fetch)
        processed(rows, 0, 2 * WINDOW, (WINDOW + 1,))
        early = Freeze(0, 0, 2 * WINDOW)
        ((wanted, part),) = rows.turn(freeze=(early,), merge=(0,)).frozen
        assert wanted == early
        parts.append(part)
        late = Freeze(0, 0, 2 * WINDOW + 1)
        first, then = (rows.turn(freeze=(late,)), rows.turn())
        is_late = fetch is not None and rows.engine.decoder.caches.lane == "batch"
        assert not (first.frozen if is_late else then.frozen)
        ((wanted, part),) = (then if is_late else first).frozen
        assert wanted == late
        parts.append(part)
        last = Freeze(0, 0, 2 * WINDOW + 3)
        ((wanted, part),) = [*rows.turn(freeze=(last,), leave=(0,)).frozen, *rows.turn().frozen]
        assert wanted == last
        parts.append(part)
    for plain, other in zip(parts[:3], parts[3:], strict=True):
        assert plain is not None
        assert other is not None
        assert plain.tensors == other.tensors
        assert content(plain) == content(other)
