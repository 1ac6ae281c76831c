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
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from threading import Lock, Semaphore, Thread
from typing import Any, Final

import mlx.core as mx
import numpy as np

from lanes.cuda_driver import sharing_driver
from lanes.cuda_kernel import Kernel, KernelFailed
from lanes.freeze import Fetched, Source
from lanes.rows.held import Piece
from lanes.tuning import backend
from store.checkpoint import CarrierFailed

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 4 << 20
ALIGNMENT: Final = 256
# Arrays that one launch copies from: the kernel is made for so many, and gets the address of each.
NUM_ARRAYS: Final = 80
# Blocks that are made at once, when there are only so many left.
BLOCKS_TOGETHER: Final = 16
FEW_BLOCKS: Final = 8
THREADS: Final = 256
BLOCKS: Final = 8  # of each piece: together they keep the bus busy
# What a thread moves at once, by its size: the largest that a row of dim elements is whole ones of.
LOADS: Final = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}

# Of arrays [slots, heads, columns, dim] some columns of one slot each, to arrays [heads, target_columns, dim].
COPY_SOURCE = """
    const int64_t* place = places + blockIdx.y * PLACE_INTS;
    const int64_t heads = place[0], columns = place[1], dim = place[2], slot = place[3], column = place[4];
    const int64_t count = place[5], target_columns = place[6];
    const T* sources[] = {SOURCES};
    const T* source = sources[blockIdx.y] + (slot * heads * columns + column) * dim;
    T* target = reinterpret_cast<T*>(place[7]);
    constexpr int PER_LOAD = sizeof(Load) / sizeof(T);
    const bool is_aligned = reinterpret_cast<size_t>(source) % sizeof(Load) == 0;
    const int64_t loads = dim / PER_LOAD;
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < heads * count * loads; i += gridDim.x * blockDim.x) {
        const int64_t head = i / loads / count, at = i / loads % count, e = i % loads * PER_LOAD;
        const T* from = source + (head * columns + at) * dim + e;
        T* to = target + (head * target_columns + at) * dim + e;
        if (is_aligned) {
            *reinterpret_cast<Load*>(to) = *reinterpret_cast<const Load*>(from);
        } else {
            for (int k = 0; k < PER_LOAD; ++k) to[k] = from[k];
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) done[blockIdx.y] = 1;
"""
PLACE_INTS: Final = 8
_NAMES: Final = tuple(f"source{index}" for index in range(NUM_ARRAYS))
COPY: Final = Kernel("fetch", (*_NAMES, "places"), ("done",), (), COPY_SOURCE.replace("SOURCES", ", ".join(_NAMES)))


@cache
def device_fetch() -> CudaFetch | None:
    """None where the host reads MLX's arrays where they are."""
    if backend() != "cuda":
        return None
    try:
        driver = sharing_driver()
    except CarrierFailed as error:
        logger.warning("what is remembered is kept by way of managed memory, which is slow: %s", error)
        return None
    return CudaFetch(PageLockedMemory(driver.page_locked))


class CudaFetch:
    """A lanes.freeze.Fetch. What it hands out is used again when the last view of it is gone."""

    def __init__(self, memory: PageLockedMemory) -> None:
        self._memory = memory
        self._has_failed = self._has_no_kernel = False

    def __call__(self, sources: Sequence[Source]) -> Fetched | None:
        if self._has_no_kernel or not all(source.specs[0].nbytes for source in sources):
            return None
        try:
            return self._begun(sources)
        except (CarrierFailed, KernelFailed) as error:
            if not self._has_failed:
                logger.warning("what is remembered is kept by way of managed memory, which is slow: %s", error)
            self._has_failed = True
            self._has_no_kernel = isinstance(error, KernelFailed)
            return None

    def _begun(self, sources: Sequence[Source]) -> Fetched:
        rooms = [self._memory.rooms(source.specs[0].nbytes, len(source.specs)) for source in sources]
        copies: defaultdict[tuple[mx.Dtype, int], list[tuple[Piece, Places]]] = defaultdict(list)
        for source, (_, addresses) in zip(sources, rooms, strict=True):
            for piece, places in _with_places(source, addresses):
                array = piece.arrays[0]
                row_bytes = array.shape[3] * array.itemsize
                load_bytes = next(size for size in LOADS if row_bytes % size == 0)
                copies[array.dtype, load_bytes].append((piece, places))
        launches = tuple(launch for (_, load_bytes), alike in copies.items() for launch in _launches(alike, load_bytes))
        mx.async_eval(launches)
        return Fetched(tuple([view for views, _ in rooms for view in views]), launches)


# int64 [arrays, PLACE_INTS], as COPY_SOURCE reads them.
Places = np.ndarray[Any, np.dtype[np.int64]]


def _with_places(source: Source, addresses: Sequence[int]) -> Iterator[tuple[Piece, Places]]:
    """Each piece, and for each of its arrays where it comes from and goes to. addresses: of the targets."""
    target_columns = sum(piece.num_columns for piece in source.pieces)
    targets = np.array(addresses, np.int64)
    for piece in source.pieces:
        _, heads, columns, dim = piece.arrays[0].shape
        places = np.empty((len(piece.arrays), PLACE_INTS), np.int64)
        places[:, :-1] = heads, columns, dim, piece.slot, piece.column, piece.num_columns, target_columns
        places[:, -1] = targets
        targets += piece.num_columns * dim * piece.arrays[0].itemsize
        yield piece, places


def _launches(copies: Sequence[tuple[Piece, Places]], load_bytes: int) -> Iterator[mx.array]:
    arrays = [array for piece, _ in copies for array in piece.arrays]
    places = np.concatenate([each for _, each in copies])
    for first in range(0, len(arrays), NUM_ARRAYS):
        yield copy(arrays[first : first + NUM_ARRAYS], places[first : first + NUM_ARRAYS], load_bytes)


def copy(arrays: Sequence[mx.array], places: Places, load_bytes: int) -> mx.array:
    """NUM_ARRAYS at most, of one type, whose rows of dim elements are whole loads; lazy."""
    (done,) = COPY(
        [*arrays, *[arrays[0]] * (NUM_ARRAYS - len(arrays)), mx.array(places)],
        (),
        {"T": arrays[0].dtype, "Load": LOADS[load_bytes], "PLACE_INTS": PLACE_INTS},
        blocks=(BLOCKS, len(arrays)),
        threads=THREADS,
        shapes=[(NUM_ARRAYS,)],
        dtypes=[mx.int32],
    )
    return done


class PageLockedMemory:
    """Blocks of which as many arrays as fit get a part each; larger ones have a block of their own.

    Making memory takes a while, so that a thread of its own does it ahead, from the first array on.
    """

    def __init__(self, page_locked: Callable[[int], int], is_ahead: bool = True) -> None:
        """page_locked: makes memory of so many bytes, which is never given back; its address."""
        self._page_locked = page_locked
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size
        self._lock = Lock()
        self._block, self._address, self._used = memoryview(b""), 0, BLOCK_BYTES
        self._runs_short = Semaphore(int(is_ahead))
        self._thread = Thread(target=self._make_ahead, name="page-locked memory", daemon=True) if is_ahead else None

    def rooms(self, size: int, number: int) -> tuple[list[memoryview], list[int]]:
        """For so many arrays of one size, and where they are."""
        views: list[memoryview] = []
        addresses: list[int] = []
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._thread is not None:
                self._thread.start()
                self._thread = None
            if size > BLOCK_BYTES:
                blocks = [self._new_block(1 << (size - 1).bit_length()) for _ in range(number)]
                return [block[:size] for block, _ in blocks], [address for _, address in blocks]
            while len(views) < number:
                if self._used + size > BLOCK_BYTES:
                    self._block, self._address = self._new_block(BLOCK_BYTES)
                    self._used = 0
                fit = min(number - len(views), 1 + (BLOCK_BYTES - self._used - size) // stride)
                starts = range(self._used, self._used + fit * stride, stride)
                views += [self._block[start : start + size] for start in starts]
                addresses += [self._address + start for start in starts]
                self._used += fit * stride
        return views, addresses

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
