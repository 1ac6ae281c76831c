"""Takes bytes to CUDA's memory through page-locked blocks, by the driver itself.

MLX's CUDA arrays that the host can write lie in managed memory: the host touches a page, the driver moves it, later a
kernel touches it and the driver moves it back. Measured on an H200 with 16 cores, 600 MB from the page cache to where a
kernel reads them at full speed: 1.3 to 1.6 GB/s so, by one thread, 3.0 by four. Read into page-locked blocks, which the
device copies, they take no page faults on the host at all.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock
from typing import Final

from lanes.cuda_driver import address_of, sharing_driver
from lanes.tuning import backend
from store.checkpoint import CarrierFailed

logger = logging.getLogger(__name__)

# All of them together take the host's memory for as long as the process lives.
BLOCK_BYTES: Final = 4 << 20
NUM_BLOCKS: Final = 16

# Of the driver's interface: cuda.h.
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_SYNC_WITHOUT_TIMING: Final = 3
_MEMORY_HOST: Final = 1
_MEMORY_DEVICE: Final = 2


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("memory", ctypes.c_int),
            ("host", ctypes.c_uint64),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_uint64),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


@cache
def device_carrier() -> CudaCarrier | None:
    """The carrier to this device's memory; None where whoever reads had better write there."""
    if backend() != "cuda":
        return None
    try:
        return CudaCarrier()
    except CarrierFailed as error:
        logger.warning("what is remembered is read by way of managed memory, which is slow: %s", error)
        return None


class CudaCarrier:
    """A store.checkpoint.Carrier to the memory of the first CUDA device. All but its making may be on any thread."""

    def __init__(self) -> None:
        """Raises CarrierFailed where there is no driver, or none that can do this."""
        self._driver = sharing_driver()
        self._free: SimpleQueue[_Block] = SimpleQueue()
        self._blocks: dict[int, _Block] = {}
        self._starting = Lock()
        self._stream: ctypes.c_void_p | None = None

    def expect(self, buffers: Sequence[memoryview]) -> None:
        """Their memory is to be the device's before anything is copied there."""
        stream = self._start()
        for first, last in _spans(buffers):
            size = ctypes.c_size_t(last - first)
            self._driver.call("cuMemPrefetchAsync", ctypes.c_uint64(first), size, self._driver.device, stream)

    def lend(self) -> memoryview:
        block = self._free.get()
        try:
            self._driver.enter()
            self._driver.call("cuEventSynchronize", block.copied)
        except CarrierFailed:
            self._free.put(block)  # others wait for one, to learn the same
            raise
        return block.view

    def send(self, block: memoryview, into: Sequence[memoryview]) -> None:
        assert self._stream is not None, "nothing was lent"
        lent = self._blocks[address_of(block)]
        try:
            self._driver.enter()
            source = lent.address
            for target, pitch, width, height in _rectangles(into):
                self._copy(source, target, pitch, width, height)
                source += width * height
            self._driver.call("cuEventRecord", lent.copied, self._stream)
        finally:
            self._free.put(lent)

    def finish(self) -> None:
        self._driver.enter()
        self._driver.call("cuStreamSynchronize", self._stream)

    def _copy(self, source: int, target: int, pitch: int, width: int, height: int) -> None:
        if height == 1:
            self._driver.call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(target),
                ctypes.c_void_p(source),
                ctypes.c_size_t(width),
                self._stream,
            )
            return
        copy = _Copy2D(
            src_memory=_MEMORY_HOST,
            src_host=source,
            src_pitch=width,
            dst_memory=_MEMORY_DEVICE,
            dst_device=target,
            dst_pitch=pitch,
            width=width,
            height=height,
        )
        self._driver.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._stream)

    def _start(self) -> ctypes.c_void_p:
        """The blocks are made by the first who wants some: locking their pages takes 40 ms."""
        with self._starting:
            self._driver.enter()
            if self._stream is None:
                stream = self._driver.made("cuStreamCreate", ctypes.c_uint(_STREAM_NON_BLOCKING))
                while len(self._blocks) < NUM_BLOCKS:
                    copied = self._driver.made("cuEventCreate", ctypes.c_uint(_EVENT_BLOCKING_SYNC_WITHOUT_TIMING))
                    block = _Block(self._driver.page_locked(BLOCK_BYTES), copied)
                    self._blocks[block.address] = block
                    self._free.put(block)
                self._stream = stream
            return self._stream


class _Block:
    """Page-locked memory, and the event that its last copy is done."""

    def __init__(self, address: int, copied: ctypes.c_void_p) -> None:
        self.address = address
        self.copied = copied
        self.view = memoryview((ctypes.c_char * BLOCK_BYTES).from_address(address)).cast("B")


def _spans(buffers: Sequence[memoryview]) -> list[tuple[int, int]]:
    """From the first to the last byte of these in each array that they are of. The driver refuses a span of two."""
    spans: dict[int, tuple[int, int]] = {}
    for buffer in buffers:
        first, last = address_of(buffer), address_of(buffer) + buffer.nbytes
        before = spans.get(id(buffer.obj), (first, last))
        spans[id(buffer.obj)] = min(first, before[0]), max(last, before[1])
    return list(spans.values())


def _rectangles(views: Sequence[memoryview]) -> list[tuple[int, int, int, int]]:
    """Consecutive bytes' targets as (address, bytes from one line to the next, bytes of a line, lines): views of one
    length that lie at even distances, as the heads of an array do, are one copy."""
    spans = [(address_of(view), view.nbytes) for view in views if view.nbytes]
    distances = {after[0] - before[0] for before, after in pairwise(spans)}
    if len(spans) > 1 and len({size for _, size in spans}) == 1 and len(distances) == 1:
        (pitch,) = distances
        if pitch >= spans[0][1]:
            return [(spans[0][0], pitch, spans[0][1], len(spans))]
    return [(address, size, size, 1) for address, size in spans]
