from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lanes import cuda_fetch
from lanes.cuda_driver import address_of
from lanes.cuda_fetch import (
    ALIGNMENT,
    BLOCK_BYTES,
    BLOCKS_TOGETHER,
    FEW_BLOCKS,
    NUM_ARRAYS,
    CudaFetch,
    PageLockedMemory,
    device_fetch,
)
from lanes.cuda_kernel import KernelFailed
from lanes.freeze import Fetched, Source, dtype_name
from lanes.rows.held import Piece, joined_copy
from lanes.tuning import backend
from store.checkpoint import CarrierFailed, TensorSpec
from tests.lanes import emulated_fetch
from tests.lanes.emulated_fetch import Memory


@pytest.fixture(params=["device", "emulated"])
def fetch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaFetch:
    if request.param == "device":
        if backend() != "cuda":
            pytest.skip("this machine has no NVIDIA GPU")
        found = device_fetch()
        assert found is not None
        return found
    monkeypatch.setattr(cuda_fetch, "copy", emulated_fetch.copy)
    return CudaFetch(PageLockedMemory(Memory()))


def content(pieces: Sequence[Piece], index: int) -> bytes:
    copied: Any = joined_copy([piece.view(index) for piece in pieces], axis=2).flatten().view(mx.uint8)
    mx.eval(copied)
    return bytes(memoryview(copied))


def random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.randint(0, 1 << 30, shape, key=mx.random.key(seed)).astype(dtype)


def source(*pieces: Piece) -> Source:
    array = pieces[0].arrays[0]
    shape = (array.shape[1], sum(piece.num_columns for piece in pieces), array.shape[3])
    specs = [TensorSpec(f"{index}.0", dtype_name(array.dtype), shape) for index in range(len(pieces[0].arrays))]
    return Source(specs, pieces)


def rows(number: int, columns: int, dtype: mx.Dtype, seed: int, dim: int = 32) -> Source:
    """Columns of a slot in the middle of arrays, as a lane has them."""
    return source(Piece(tuple(random((3, 4, 64, dim), dtype, seed + i) for i in range(number)), 1, 5, columns))


def fetched(fetch: CudaFetch, sources: list[Source]) -> list[bytes]:
    found = fetch(sources)
    assert found is not None
    mx.eval(found.copying)
    for view in found.buffers:
        assert address_of(view) % ALIGNMENT == 0
    return [bytes(view) for view in found.buffers]


def contents(sources: list[Source]) -> list[bytes]:
    return [content(each.pieces, index) for each in sources for index in range(len(each.specs))]


@pytest.mark.skipif(backend() == "cuda", reason="this machine has an NVIDIA GPU")
def test_where_memory_is_the_hosts_it_is_read_where_it_is() -> None:
    assert device_fetch() is None


@pytest.mark.parametrize("number", [1, NUM_ARRAYS, 2 * NUM_ARRAYS + 3])
def test_bytes_in_order(fetch: CudaFetch, number: int) -> None:
    sources = [rows(number, 7, mx.bfloat16, 1), rows(number, 9, mx.bfloat16, 50), rows(2, 40, mx.uint32, 90)]
    assert fetched(fetch, sources) == contents(sources)


@pytest.mark.parametrize("dim", [1, 2, 6, 24, 64])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32, mx.uint8])
def test_rows_of_every_size(fetch: CudaFetch, dim: int, dtype: mx.Dtype) -> None:
    sources = [rows(3, 11, dtype, 7, dim)]
    assert fetched(fetch, sources) == contents(sources)


def test_columns_of_several_arrays_one_behind_the_other(fetch: CudaFetch) -> None:
    """As of a ring that has wrapped, of which some was saved before; one has its heads behind its columns."""
    ring, saved, turned = (
        tuple(random(shape, mx.float32, seed + i) for i in range(2))
        for seed, shape in enumerate([(2, 3, 40, 16), (1, 3, 8, 16), (1, 12, 3, 16)])
    )
    turned = tuple(array.swapaxes(1, 2) for array in turned)
    sources = [source(Piece(saved, 0, 2, 5), Piece(ring, 1, 33, 7), Piece(turned, 0, 1, 10), Piece(ring, 1, 4, 20))]
    assert fetched(fetch, sources) == contents(sources)


def test_one_whose_elements_do_not_lie_side_by_side(fetch: CudaFetch) -> None:
    sources = [source(Piece((random((1, 3, 16, 12), mx.bfloat16, 1).swapaxes(2, 3),), 0, 3, 8))]
    assert fetched(fetch, sources) == contents(sources)


@pytest.mark.parametrize("start", [1, 2, 4])
def test_one_that_begins_between_loads(fetch: CudaFetch, start: int) -> None:
    """As the end of what a convolution was given may."""
    state = random((1, 1, 1, 64), mx.bfloat16, 1)[..., start : start + 32]
    sources = [source(Piece((state,), 0, 0, 1))]
    assert fetched(fetch, sources) == contents(sources)


def test_what_is_larger_than_a_block(fetch: CudaFetch) -> None:
    columns = 3 * BLOCK_BYTES // 512
    large = source(Piece((random((1, 2, columns, 64), mx.float32, 1),), 0, 0, columns))
    sources = [rows(1, 7, mx.float32, 2), large, rows(1, 7, mx.float32, 3)]
    assert fetched(fetch, sources) == contents(sources)


def test_nothing_is_fetched_of_what_is_empty(fetch: CudaFetch) -> None:
    assert fetch([rows(1, 7, mx.bfloat16, 1), source(Piece((mx.zeros((1, 1, 0, 8)),), 0, 0, 0))]) is None


def test_memory_is_used_again_when_nobody_looks_at_it(fetch: CudaFetch) -> None:
    memory = Memory()
    if backend() != "cuda":
        fetch = CudaFetch(PageLockedMemory(memory, is_ahead=False))
    sources = [rows(8, 32, mx.float32, 3, dim=512)]
    expected = contents(sources)
    kept: list[Fetched] = []
    chance = Random(2)
    for _ in range(12):
        found = fetch(sources)
        assert found is not None
        mx.eval(found.copying)
        kept.append(found)
        while len(kept) > 3:
            kept.pop(chance.randrange(3))
        for each in kept:
            assert [bytes(view) for view in each.buffers] == expected
    del each, found
    gc.collect()
    needed = sum(map(len, expected)) * 4 / BLOCK_BYTES
    assert backend() == "cuda" or len(memory.made) <= needed + 4


def test_what_is_looked_at_stays_as_it_is() -> None:
    memory = Memory()
    pool = PageLockedMemory(memory, is_ahead=False)
    ((first,), _) = pool.rooms(BLOCK_BYTES, 1)
    np.frombuffer(first, np.uint8)[:] = 7
    part = first[10:20]
    del first
    ((other,), (address,)) = pool.rooms(BLOCK_BYTES, 1)
    assert address == address_of(other)
    other[:] = bytes(BLOCK_BYTES)
    assert bytes(part) == bytes([7]) * 10
    del part, other
    pool.rooms(BLOCK_BYTES, 2)
    assert len(memory.made) == 2


def test_memory_is_made_ahead() -> None:
    memory = Memory()
    pool = PageLockedMemory(memory)

    def made(blocks: int) -> bool:
        deadline_s = time.monotonic() + 30
        while sum(map(len, memory.made)) < blocks * BLOCK_BYTES and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return blocks <= sum(map(len, memory.made)) / BLOCK_BYTES <= blocks + 1  # the first may be made by who wants it

    assert made(0)
    first, _ = pool.rooms(BLOCK_BYTES, 1)
    assert made(BLOCKS_TOGETHER)
    kept, addresses = pool.rooms(BLOCK_BYTES, BLOCKS_TOGETHER - FEW_BLOCKS)
    assert made(2 * BLOCKS_TOGETHER)
    assert len(set(addresses)) == len(kept)
    del first, kept
    pool.rooms(BLOCK_BYTES, 1)
    assert made(2 * BLOCKS_TOGETHER)


def test_without_a_kernel_it_is_told_and_tried_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def none(arrays: Sequence[mx.array], places: Any, load_bytes: int) -> mx.array:
        tried.append(len(arrays))
        raise KernelFailed("no compiler")

    monkeypatch.setattr(cuda_fetch, "copy", none)
    fetch = CudaFetch(PageLockedMemory(Memory(), is_ahead=False))
    for _ in range(2):
        assert fetch([rows(3, 7, mx.bfloat16, 1)]) is None
    assert tried == [3]
    assert [record.message for record in caplog.records] == [
        "what is remembered is kept by way of managed memory, which is slow: no compiler"
    ]


def test_without_such_memory_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def none(nbytes: int) -> int:
        raise CarrierFailed(f"no {nbytes} bytes")

    fetch = CudaFetch(PageLockedMemory(none, is_ahead=False))
    for _ in range(2):
        assert fetch([rows(1, 7, mx.bfloat16, 1)]) is None
    assert len(caplog.records) == 1
