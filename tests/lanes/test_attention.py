"""Every form of attention gives what MLX's own gives, and a model that takes one batches as exactly as before."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, llama

from lanes import attention
from lanes.attention import Form, LaneAttention, by_hand, fused, install, measure
from lanes.batch import SlotCaches
from lanes.cuda_attention import Packing, attend_own_columns, columns_of_chunk, lanes_per_column
from lanes.cuda_kernel import KernelFailed
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import eager
from lanes.lane import RowSpec, Sampling
from lanes.rows.positions import Positions
from lanes.solo import RowMaker
from lanes.tuning import backend
from tests.lanes.driver import INFO, Driver
from tests.lanes.tiny import alone, prompt_of, tiny_llama

FORMS: list[Form] = ["fused", "by hand"]


@pytest.fixture
def restored() -> Iterator[None]:
    """Whatever a test installs is gone after it."""
    yield
    llama.scaled_dot_product_attention = base.scaled_dot_product_attention


def random(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def test_by_hand_is_what_the_fused_kernel_computes() -> None:
    queries, keys, values = random((3, 8, 1, 16), 1), random((3, 2, 300, 16), 2), random((3, 2, 300, 16), 3)
    mask = Positions.of([0, 37, 299]).linear().mask[..., :300]
    difference = by_hand(queries, keys, values, 0.25, mask) - fused(queries, keys, values, 0.25, mask)
    assert mx.abs(difference).max() < (1e-6 if backend() == "cpu" else 1e-2)  # a GPU's products of float32 are rounder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns_per_call", [None, 1.0])
@pytest.mark.usefixtures("restored")
def test_rows_beside_each_other_answer_as_alone(form: Form, columns_per_call: float | None) -> None:
    """Also where a long row among short ones is read in a band of its own."""
    model = tiny_llama()
    install(model, LaneAttention(form, "cpu"))
    make_row = RowMaker(model)
    lengths = [3, 700, 9, 260, 1]
    specs = [(i, RowSpec(i, prompt_of(n, i), Sampling()), 12) for i, n in enumerate(lengths)]

    def answers(rows: list[tuple[int, RowSpec, int]]) -> dict[int, list[int]]:
        caches = SlotCaches(make_row(), 8, columns_per_call)
        return Driver(MlxEngine(make_row, INFO, Decoder(caches, partial(eager, model, caches)))).run(rows)

    together = answers(specs)
    for _, spec, tokens in specs:
        assert together[spec.row_id] == answers([(0, spec, tokens)])[spec.row_id]
        assert together[spec.row_id] == alone(model, spec.prompt, tokens)[0]


@pytest.mark.skipif(backend() == "cuda", reason="MLX's CUDA build has no quantized product to compare with")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.usefixtures("restored")
def test_quantized_rows_where_the_device_has_no_quantized_product(bits: int) -> None:
    """As on CUDA: the columns are unpacked first. Rows still agree with each alone, and almost with the other way."""
    args = tiny_llama().args
    args.hidden_size = 128
    model = llama.Model(args)
    make_row = RowMaker(model, bits=bits, group_size=32)
    specs = [(0, RowSpec(i, prompt_of(n, i), Sampling()), 8) for i, n in enumerate([5, 300, 1])]

    def answers(rows: list[tuple[int, RowSpec, int]]) -> dict[int, list[int]]:
        caches = SlotCaches(make_row(), 8)
        return Driver(MlxEngine(make_row, INFO, Decoder(caches, partial(eager, model, caches)))).run(rows)

    tokens = mx.array([prompt_of(20)])
    packed = model(tokens, cache=make_row())
    install(model, LaneAttention("fused", "cuda"))
    assert mx.allclose(model(tokens, cache=make_row()), packed, atol=1e-4)
    together = answers(specs)
    for row in specs:
        assert together[row[1].row_id] == answers([row])[row[1].row_id]


@pytest.mark.usefixtures("restored")
def test_only_the_steps_of_a_lane_take_the_form() -> None:
    """A prompt in mlx-lm's own caches runs as if nothing had been installed."""
    model = tiny_llama()
    prompt = mx.array([prompt_of(40)])
    before = model(prompt)
    install(model, LaneAttention("by hand", "cpu"))
    assert isinstance(llama.scaled_dot_product_attention, LaneAttention)
    assert mx.array_equal(model(prompt), before)


@pytest.mark.usefixtures("restored")
def test_whoever_attends_may_write_the_new_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the CUDA kernel does, behind MLX's back, into arrays that are never made anew."""
    written: set[int] = set()
    calls = count()

    def attend_and_write(queries: mx.array, parts: Any, new: Any, columns: mx.array, positions: Any, *rest: Any) -> Any:
        mx.eval(parts, new, columns)
        is_first_step = next(calls) < len(model.layers)
        for part, column in zip(parts, new, strict=True):
            view = np.array(part, copy=False)
            written.add(view.ctypes.data)
            for row, at in enumerate(columns.tolist()):
                assert is_first_step or not view[row, :, at].any(), "it is written twice"
                view[row, :, at] = np.array(column)[row, :, 0]
        keys, values = (part[: queries.shape[0], :, : rest[1]] for part in parts)
        mask = mx.arange(rest[1]) <= positions[:, None, None, None]
        return fused(queries, keys, values, rest[0], mask)

    monkeypatch.setattr(attention, "attend_own_columns", attend_and_write)
    monkeypatch.setattr(attention, "_fits_kernel", lambda *args: True)
    model = tiny_llama()
    specs = [RowSpec(i, prompt_of(n, i), Sampling()) for i, n in enumerate([5, 30, 1])]
    expected = {spec.row_id: alone(model, spec.prompt, 8)[0] for spec in specs}
    install(model, LaneAttention("own", "cuda"))
    make_row = RowMaker(model)
    caches = SlotCaches(make_row(), 4)
    engine = MlxEngine(make_row, INFO, Decoder(caches, partial(eager, model, caches)))
    assert Driver(engine).run([(0, spec, 8) for spec in specs]) == expected
    sizes_of_the_lane = 3  # of one, two and four slots
    assert len(written) == sizes_of_the_lane * 2 * len(model.layers)


def test_the_measured_form_is_one_that_this_device_has() -> None:
    measured = measure(4, 2, 8, mx.float32)
    if measured.form == "own":
        assert mx.cuda.is_available()
        assert measured.columns_per_call is None
    else:
        assert measured.columns_per_call is not None
        assert measured.columns_per_call >= 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "lanes"),
    [
        (32, 8, 128, mx.bfloat16, 16),
        (9, 3, 64, mx.bfloat16, 8),
        (8, 4, 256, mx.float16, 32),
        (32, 8, 128, mx.float32, 32),
        (64, 1, 128, mx.bfloat16, None),  # too many queries to a key head for a thread's registers
        (8, 8, 80, mx.bfloat16, None),  # 10 threads to a column do not divide a warp
    ],
)
def test_heads_that_the_cuda_kernel_is_for(heads: int, kv_heads: int, dim: int, dtype: mx.Dtype, lanes: Any) -> None:
    assert lanes_per_column(heads, kv_heads, dim, dtype) == lanes


def test_packed_columns_that_the_cuda_kernel_is_for() -> None:
    """A thread unpacks whole words of one group."""
    assert lanes_per_column(32, 8, 128, mx.bfloat16, Packing(64, 4)) == 16
    assert lanes_per_column(32, 8, 128, mx.float32, Packing(64, 8)) == 32
    assert lanes_per_column(32, 8, 128, mx.float32, Packing(64, 4)) is None


def test_few_rows_are_cut_into_more_chunks() -> None:
    assert columns_of_chunk(8, 1024) == 64
    assert columns_of_chunk(64 * 8, 1280) == 512


def without_added(parts: list[mx.array], lengths: list[int]) -> tuple[list[mx.array], list[mx.array]]:
    """Copies in which the column that each row adds is 0, and those columns."""
    rows, at = mx.arange(len(lengths)), mx.array(lengths)
    emptied, new = [mx.array(part) for part in parts], [part[rows, :, at][:, :, None] for part in parts]
    for part in emptied:
        part[rows, :, at] = 0
    mx.eval(emptied, new)
    return emptied, new


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (16, 2, 128), (8, 4, 256), (8, 8, 128)]
)
def test_the_cuda_kernel(heads: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> None:
    lengths = [0, 5, 300, 1000]
    queries = random((4, heads, 1, dim), 1, dtype)
    keys, values = random((6, kv_heads, 1024, dim), 2, dtype), random((6, kv_heads, 1024, dim), 3, dtype)
    positions = Positions.of(lengths)
    columns = positions.linear()
    exact = fused(
        *(
            array.astype(mx.float32)
            for array in (queries, keys[:4, :, : columns.width], values[:4, :, : columns.width])
        ),
        dim**-0.5,
        columns.mask,
    )
    parts, new = without_added([keys, values], lengths)
    at = positions.array
    own = attend_own_columns(queries, parts, new, at, at, dim**-0.5, columns.width).astype(mx.float32)
    assert mx.allclose(own, exact, atol={mx.bfloat16: 2e-2, mx.float16: 3e-3, mx.float32: 1e-5}[dtype])
    assert mx.array_equal(parts[0], keys)
    assert mx.array_equal(parts[1], values)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build")
@pytest.mark.parametrize("packing", [Packing(64, 4), Packing(64, 8), Packing(32, 8)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (8, 4, 256)])
def test_the_cuda_kernel_on_packed_columns(heads: int, kv_heads: int, dim: int, packing: Packing) -> None:
    queries = random((4, heads, 1, dim), 1, mx.bfloat16)
    plain = [random((6, kv_heads, 1024, dim), seed, mx.bfloat16) for seed in (2, 3)]
    parts = [part for array in plain for part in mx.quantize(array, packing.group_size, packing.bits)]
    lengths = [0, 5, 300, 1000]
    positions = Positions.of(lengths)
    columns = positions.linear()
    unpacked = [mx.dequantize(*parts[at : at + 3], packing.group_size, packing.bits) for at in (0, 3)]
    keys, values = (array[:4, :, : columns.width].astype(mx.float32) for array in unpacked)
    exact = fused(queries.astype(mx.float32), keys, values, dim**-0.5, columns.mask)
    emptied, new = without_added(parts, lengths)
    at = positions.array
    own = attend_own_columns(queries, emptied, new, at, at, dim**-0.5, columns.width, packing)
    assert mx.allclose(own.astype(mx.float32), exact, atol=2e-2)
    assert all(mx.array_equal(written, part) for written, part in zip(emptied, parts, strict=True))


def test_a_kernel_that_cannot_be_compiled_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*args: object) -> mx.array:
        raise KernelFailed("no compiler")

    monkeypatch.setattr(attention, "forms_for", lambda *shape: ["fused", "by hand", "own"])
    monkeypatch.setattr(attention, "attend_own_columns", none)
    assert measure(4, 2, 32, mx.float32).form in ("fused", "by hand")
    assert [record.message for record in caplog.records] == ["attention goes by MLX's kernels: no compiler"]
