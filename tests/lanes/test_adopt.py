"""A row that is made of a mapped file goes on as one that was read: to the last bit, and the file stays as it is."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lanes.adopt import adopt
from lanes.lane import RowSpec, Sampling
from lanes.load import load
from lanes.rows import rows_like
from lanes.rows.columns import ColumnRows
from lanes.solo import RowMaker
from lanes.thaw import Misfit
from store.checkpoint import Mapped, Part, Recall, TensorSpec
from store.files import FILES
from store.mapping import map_tensors
from store.segment import Segment, segment_id
from store.segment_file import verify_file, write_segment
from tests.lanes.families.facts import WINDOW
from tests.lanes.keeper import Rows, recall_of
from tests.lanes.test_thaw import KINDS, answer, assert_equal, every_kind, rounding, rows_of
from tests.lanes.tiny import prompt_of, tiny_llama

pytestmark = pytest.mark.usefixtures("mlx_lms_attention")

STEPS = 4
STOPS = (WINDOW - 2, WINDOW + 3, 2 * WINDOW + 1)


def saved(path: Path, part: Part, tokens: Sequence[int]) -> Segment:
    """A part that begins a row, in a file."""
    own = array("I", tokens[: part.stop])
    id_ = segment_id("0" * 32, None, 0, own, part.boundaries)
    segment = Segment(id_, "0" * 32, "a model", None, 0, own, part.boundaries, part.tensors)
    fd = FILES.create(path)
    write_segment(fd, segment, part.buffers)
    FILES.close(fd)
    return segment


def mapped(path: Path, segment: Segment, part: Part, known: int) -> tuple[Recall, Any]:
    """What is known of the row, and a reference to the mapping."""
    recall = recall_of([part], known)
    buffers = map_tensors(path, segment, [segment.tensors.index(spec) for spec in recall.specs], verify=False)
    return replace(recall, mapped=Mapped(buffers)), weakref.ref(buffers[0].obj)


def frozen(rows: Rows, prompt: tuple[int, ...], stops: Sequence[int]) -> Part:
    rows.admit(0, prompt)
    rows.process(0, 0, stops, stops)
    part = rows.freeze(0, 0, stops[-1])
    rows.turn(leave=(0,))
    return part


def goes_on(rows: Rows, path: Path, part: Part, prompt: tuple[int, ...], known: int, stops: set[int]) -> list[mx.array]:
    """The logits after a prompt of which a file has the beginning; the file stays as it is."""
    segment = saved(path, part, prompt)
    before = path.read_bytes()
    recall, mapping = mapped(path, segment, part, known)
    rows.tokens[0] = list(prompt)
    result = rows.turn(admit=(RowSpec(0, prompt, Sampling(), recall),))
    assert result.destinations == ()
    if not mx.metal.is_available():
        assert mapping() is None, "MLX has copied all, but the mapping is still there"
    rows.process(0, known, stops)
    logits = rows.decode(0, STEPS)
    assert mapping() is None, "a row in a lane keeps the mapping"
    assert path.read_bytes() == before
    verify_file(path)
    return logits


@every_kind
@pytest.mark.parametrize("at", [*range(len(STOPS)), "inside"])
def test_every_kind_goes_on(kind: str, at: int | str, tmp_path: Path) -> None:
    rows, prompt = rows_of(kind), prompt_of(STOPS[-1] + 9, 3)
    if isinstance(at, str) and not rows.anywhere:
        return
    part = frozen(rows, prompt, STOPS)
    known = STOPS[-1] - 3 if isinstance(at, str) else STOPS[at]
    stops = {*STOPS, known, len(prompt) - 1}
    logits = goes_on(rows_of(kind), tmp_path / "s", part, prompt, known, stops)
    assert_equal(logits, answer(kind, prompt, stops, [part], known))
    assert_equal(logits, answer(kind, prompt, stops), rounding(kind))


def test_a_prompt_that_is_known_is_merged_in_the_turn_it_comes(tmp_path: Path) -> None:
    rows, prompt = rows_of("kv"), prompt_of(41, 3)
    part = frozen(rows, prompt, [40])
    recall, _ = mapped(tmp_path / "s", saved(tmp_path / "s", part, prompt), part, 40)
    other = rows_of("kv")
    other.tokens[0] = list(prompt)
    other.turn(admit=(RowSpec(0, prompt, Sampling(), recall),), merge=(0,))
    for _ in range(STEPS - 1):
        other.turn()
    assert_equal(other.recording.logits[0], answer("kv", prompt, {40}))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_other_types(dtype: Any, tmp_path: Path) -> None:
    model = tiny_llama()
    model.set_dtype(dtype)
    make_row, prompt, stops = RowMaker(model), prompt_of(60, 3), {40, 59}
    part = frozen(Rows(make_row), prompt, [40])
    assert {spec.dtype for spec in part.tensors} == {str(dtype).removeprefix("mlx.core.")}
    cold = Rows(make_row)
    cold.admit(0, prompt)
    cold.process(0, 0, stops)
    assert_equal(goes_on(Rows(make_row), tmp_path / "s", part, prompt, 40, stops), cold.decode(0, STEPS))


@pytest.mark.parametrize("name", ["hybrid", pytest.param("demo", marks=pytest.mark.slow)])
def test_a_real_model(name: str, tmp_path: Path) -> None:
    loaded = load(name)
    make_row, prompt, stops = RowMaker(loaded.model), tuple(range(100, 130)), {20, 29}
    part = frozen(Rows(make_row), prompt, [20])
    cold = Rows(make_row)
    cold.admit(0, prompt)
    cold.process(0, 0, stops)
    assert_equal(goes_on(Rows(make_row), tmp_path / "s", part, prompt, 20, stops), cold.decode(0, STEPS))


def test_the_arrays_are_cut_from_whole_pages() -> None:
    """What follows an array in its last page is no part of it; columns of later tokens are room behind the row's."""
    spec = TensorSpec("0.0", "float32", (2, 3, 32), ((0, 3),))
    other = spec._replace(name="0.1")
    content = mx.random.normal((2, 3, 32))
    page = memoryview(bytearray(bytes(memoryview(content.view(mx.uint8))) + b"?" * 100))
    (row,) = adopt([rows_like(KINDS["kv"]()[0]).solo_row([], 0)], Recall(2, (spec, other), Mapped((page, page))))
    assert row.offset == 2
    assert mx.array_equal(row.keys, content[None])
    assert mx.array_equal(row.keys_and_values()[0], content[None, :, :2])


def test_a_row_that_is_written_leaves_the_memory_it_was_made_of(tmp_path: Path) -> None:
    """Whether MLX copied or adopted it: a write is nobody else's."""
    rows, prompt = rows_of("kv"), prompt_of(41, 3)
    part = frozen(rows, prompt, [40])
    path = tmp_path / "s"
    segment = saved(path, part, prompt)
    recall, _ = mapped(path, segment, part, 30)
    caches = adopt(KINDS["kv"](), recall)
    # In place: there is room behind the row's 30 tokens.
    for cache in caches:
        assert isinstance(rows_like(cache), ColumnRows)
        cache.update_and_fetch(*(mx.full((1, part.shape[1], 5, part.shape[3]), 7.0) for part in cache.state[:2]))
        mx.eval(cache.state[:2])
        assert mx.all(cache.keys[..., 30:35, :] == 7).item()
    verify_file(path)
    recall, _ = mapped(path, segment, part, 40)
    for cache in adopt(KINDS["kv"](), recall):
        assert not mx.any(cache.keys == 7).item()


def test_what_does_not_fit_the_model_ends_its_row_alone() -> None:
    columns, state = TensorSpec("0.0", "float32", (2, 3, 32), ((0, 3),)), TensorSpec("0.0", "float32", (4,), (), 3)
    page = memoryview(bytearray(1024))
    for kind, spec, tokens in (
        ("kv", state, 3),
        ("ssm", columns, 3),
        ("kv", columns._replace(name="7.0"), 3),
        ("kv", columns, 4),
        ("rotating", columns, 4),
    ):
        with pytest.raises(Misfit):
            adopt(KINDS[kind](), Recall(tokens, (spec,), Mapped((page,))))
    rows = rows_of("kv")
    rows.admit(1, prompt_of(8, 1))
    spec = RowSpec(0, prompt_of(8, 1), Sampling(), Recall(3, (state,), Mapped((page,))))
    with pytest.raises(AssertionError, match="is not of a kv"):
        rows.turn(admit=(spec,))
    rows.process(1, 0, [7])
    assert_equal(rows.decode(1, STEPS), answer("kv", prompt_of(8, 1), {7}))
