"""Arrays whose memory nobody has touched, for content that comes from elsewhere.

Memory is touched once, by whoever writes it first, and that is most of what a large read costs: measured on Linux, 2
cores, 645 MB in 60 arrays (14,000 tokens of SmolLM2), a file in the page cache, medians of 5:

    mx.zeros, then read into it          312 ms at the model's thread, then 81 ms     1.6 GB/s
    blank, then read into it               5 ms, then 429 ms                          1.5 GB/s
    blank in huge pages                    5 ms, then 153 ms                          4.1 GB/s

So a row that is recalled costs its turn next to nothing, and the thread that reads touches the pages, 2 MiB at a time
where the kernel gives such to those who ask (transparent_hugepage madvise, the usual setting). Below some MiB an array
has no whole huge page in it and nothing is gained or lost. Asking glibc for huge pages everywhere (GLIBC_TUNABLES
glibc.malloc.hugetlb=1) gained nothing beyond it.

MLX makes no array without writing it, but one that it loads from a file it has not written before: so it is given a
file that has a header and leaves the rest of its buffer alone.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, cast

import mlx.core as mx

_MADV_HUGEPAGE = 14  # Linux: <asm-generic/mman-common.h>
_HUGE_PAGE_BYTES = 2 << 20
_MAGIC = b"\x93NUMPY\x01\x00"


def blank(nbytes: int) -> mx.array:
    """uint8 [nbytes], evaluated, in host memory, of whatever content."""
    if not nbytes:
        return mx.zeros((0,), mx.uint8)
    file: Any = _BlankFile(nbytes)
    return cast(mx.array, mx.load(file, format="npy", stream=mx.cpu))


class _BlankFile:
    """A .npy file of so many bytes, of which reading returns the header only."""

    closed = False

    def __init__(self, nbytes: int) -> None:
        about = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({nbytes},), }}".encode()
        about += b" " * (-(len(_MAGIC) + 2 + len(about) + 1) % 64) + b"\n"
        self._header = _MAGIC + len(about).to_bytes(2, "little") + about
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> None:
        assert whence == 0, f"nobody knows where {offset} from {whence} is"
        self._at = offset

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        part = self._header[self._at : self._at + len(buffer)]
        if part:
            buffer[: len(part)] = part
        else:
            _ask_for_huge_pages(buffer)
        self._at += len(buffer)
        return len(buffer)


def _ask_for_huge_pages(buffer: memoryview) -> None:
    """A wish: nothing depends on it."""
    if sys.platform != "linux" or len(buffer) < 2 * _HUGE_PAGE_BYTES:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    size = (start + len(buffer) - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_HUGEPAGE)
