"""Brings columns from CUDA's memory into page-locked memory of the host, by a kernel that writes there itself.

MLX gives the host an array by moving it into managed memory, which is made anew for it, and from where the driver
brings each page over when it is touched. Nor does MLX tell where its arrays lie, so that the driver could copy them;
but a kernel of MLX's is given them, and page-locked memory has one address for host and device.

Of Qwen3-8B's shape on an H200, 190 tokens of a row (26 MiB) in managed memory: 5 ms of the model's thread, and 9 ms of
whoever reads them.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock, Semaphore, Thread
from typing import Any, Final

import mlx.core as mx

from lanes.cuda_driver import CudaDriver
from lanes.freeze import Fetched, Source
from lanes.rows.held import Piece
from lanes.tuning import backend
from store.checkpoint import DTYPE_BYTES, CarrierFailed

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 4 << 20
ALIGNMENT: Final = 256
# Pieces that one launch copies: the kernel is made for so many.
NUM_SOURCES: Final = 24
# Blocks that are made at once, when there are only so many left.
BLOCKS_TOGETHER: Final = 16
FEW_BLOCKS: Final = 8
THREADS: Final = 256
BLOCKS: Final = 8  # of each piece: together they keep the bus busy
# What a thread moves at once, by its size.
LOADS: Final = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}

# Of each array [slots, heads, columns, dim] the columns [column, column + count) of one slot, to an array
# [heads, target_columns, dim].
COPY_SOURCE = """
    const int64_t* place = places + blockIdx.y * 5;
    const int64_t slot = place[1], column = place[2], count = place[3], target_columns = place[4];
    if (count == 0) return;
    const T* sources[] = {SOURCES};
    const int64_t steps[][4] = {STEPS};
    constexpr int PER_LOAD = sizeof(Load) / sizeof(T);
    const int dim = source0_shape[3], loads = dim / PER_LOAD;
    const int64_t* step = steps[blockIdx.y];
    const T* source = sources[blockIdx.y] + slot * step[0] + column * step[2];
    T* target = reinterpret_cast<T*>(place[0]);
    const int64_t all = source0_shape[1] * count * loads;
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) {
        const int64_t head = i / loads / count, at = i / loads % count, e = i % loads * PER_LOAD;
        const T* from = source + head * step[1] + at * step[2] + e * step[3];
        T* to = target + (head * target_columns + at) * dim + e;
        if (step[3] == 1) {
            *reinterpret_cast<Load*>(to) = *reinterpret_cast<const Load*>(from);
        } else {
            for (int k = 0; k < PER_LOAD; ++k) to[k] = from[k * step[3]];
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) done[blockIdx.y] = 1;
"""


@cache
def device_fetch() -> CudaFetch | None:
    """None where the host reads MLX's arrays where they are."""
    if backend() != "cuda":
        return None
    try:
        driver = CudaDriver()
    except (OSError, CarrierFailed, AttributeError) as error:
        logger.warning("what is remembered is kept by way of managed memory, which is slow: %s", error)
        return None
    return CudaFetch(PageLockedMemory(driver.page_locked))


class CudaFetch:
    """A lanes.freeze.Fetch. What it hands out is used again when the last view of it is gone."""

    def __init__(self, memory: PageLockedMemory) -> None:
        self._memory = memory
        self._has_failed = False

    def __call__(self, sources: Sequence[Source]) -> Fetched | None:
        sizes = [spec.nbytes for spec, _ in sources]
        if not all(sizes):
            return None
        try:
            rooms = self._memory.rooms(sizes)
        except CarrierFailed as error:
            if not self._has_failed:
                logger.warning("what is remembered is kept by way of managed memory, which is slow: %s", error)
            self._has_failed = True
            return None
        copies: defaultdict[tuple[str, int, int], list[Copy]] = defaultdict(list)
        for (_, target), (spec, pieces) in zip(rooms, sources, strict=True):
            heads, columns, dim = spec.shape if spec.at is None else (1, 1, math.prod(spec.shape))
            alike = copies[spec.dtype, heads, dim]
            for piece in pieces:
                alike.append((piece, target, columns))
                target += piece.num_columns * dim * DTYPE_BYTES[spec.dtype]
        launches = tuple(
            copy(alike[first : first + NUM_SOURCES])
            for alike in copies.values()
            for first in range(0, len(alike), NUM_SOURCES)
        )
        mx.async_eval(launches)
        return Fetched(tuple([view for view, _ in rooms]), launches)


# A piece, the address that its first column goes to, and how many columns the array there has.
Copy = tuple[Piece, int, int]


def copy(pieces: Sequence[Copy]) -> mx.array:
    """NUM_SOURCES pieces at most, of arrays of one type that are alike in heads and dim, lazy."""
    arrays = [piece.array for piece, _, _ in pieces]
    missing = NUM_SOURCES - len(pieces)
    places = [[target, piece.slot, piece.column, piece.num_columns, columns] for piece, target, columns in pieces]
    row_bytes = arrays[0].shape[3] * arrays[0].itemsize
    (done,) = _copy_kernel(next(size for size in LOADS if row_bytes % size == 0))(
        inputs=[*arrays, *[arrays[0]] * missing, mx.array(places + [[0] * 5] * missing, mx.int64)],
        template=[("T", arrays[0].dtype)],
        grid=(BLOCKS * THREADS, len(pieces), 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(NUM_SOURCES,)],
        output_dtypes=[mx.int32],
    )
    result: mx.array = done
    return result


@cache
def _copy_kernel(load_bytes: int) -> Any:
    names = [f"source{index}" for index in range(NUM_SOURCES)]
    steps = ("{" + ", ".join(f"{name}_strides[{axis}]" for axis in range(4)) + "}" for name in names)
    source = COPY_SOURCE.replace("SOURCES", ", ".join(names)).replace("STEPS", ", ".join(steps))
    return mx.fast.cuda_kernel(
        name=f"laned_fetch_{load_bytes}",
        input_names=[*names, "places"],
        output_names=["done"],
        source=f"using Load = {LOADS[load_bytes]};{source}",
        ensure_row_contiguous=False,
    )


class PageLockedMemory:
    """Blocks of which as many arrays as fit get a part each; larger ones have a block of their own.

    Making memory takes a while, so that a thread of its own does it ahead.
    """

    def __init__(self, page_locked: Callable[[int], int], is_ahead: bool = True) -> None:
        """page_locked: makes memory of so many bytes, which is never given back; its address."""
        self._page_locked = page_locked
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size
        self._lock = Lock()
        self._block, self._address, self._used = memoryview(b""), 0, BLOCK_BYTES
        self._runs_short = Semaphore(int(is_ahead))
        if is_ahead:
            Thread(target=self._make_ahead, name="page-locked memory", daemon=True).start()

    def rooms(self, sizes: Sequence[int]) -> list[tuple[memoryview, int]]:
        """So many bytes each, and where they are."""
        with self._lock:
            return [self._room(size) for size in sizes]

    def _room(self, size: int) -> tuple[memoryview, int]:
        if size > BLOCK_BYTES:
            block, address = self._new_block(1 << (size - 1).bit_length())
            return block[:size], address
        if self._used + size > BLOCK_BYTES:
            self._block, self._address = self._new_block(BLOCK_BYTES)
            self._used = 0
        start, self._used = self._used, self._used + -(-size // ALIGNMENT) * ALIGNMENT
        return self._block[start : start + size], self._address + start

    def _new_block(self, size: int) -> tuple[memoryview, int]:
        free = self._free[size]
        try:
            address = free.pop()
        except IndexError:
            address = self._page_locked(size)
        if size == BLOCK_BYTES and len(free) == FEW_BLOCKS:
            self._runs_short.release()
        block = (ctypes.c_char * size).from_address(address)
        weakref.finalize(block, free.append, address).atexit = False
        return memoryview(block).cast("B"), address

    def _make_ahead(self) -> None:
        free = self._free[BLOCK_BYTES]
        try:
            while self._runs_short.acquire():
                address = self._page_locked(BLOCKS_TOGETHER * BLOCK_BYTES)
                free.extend(range(address, address + BLOCKS_TOGETHER * BLOCK_BYTES, BLOCK_BYTES))
        except CarrierFailed as error:
            logger.warning("no more page-locked memory is made ahead: %s", error)
