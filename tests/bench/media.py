"""What memory and disk do by themselves: plain copies and reads, and a page cache that is emptied of a file."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path


def drop_pages(paths: Sequence[Path]) -> None:
    """Have the kernel forget what it has of these files in memory."""
    for path in paths:
        file = os.open(path, os.O_RDWR)
        try:
            os.fsync(file)  # what is not on disk yet would stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(file).st_size
            with mmap.mmap(file, size) as mapped:
                pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
                place = ctypes.c_char.from_buffer(mapped)
                failed = ctypes.CDLL(None).mincore(ctypes.byref(place), ctypes.c_size_t(size), pages)
                del place
            assert not failed, f"nobody tells what is in memory of {path}"
            left = sum(page & 1 for page in pages)
            assert not left, f"{left} of {len(pages)} pages of {path} are still in memory"
        finally:
            os.close(file)


def new_memory(num_bytes: int) -> memoryview:
    """Memory that nobody has touched, in huge pages where there are such."""
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def read_all(paths: Sequence[Path], into: memoryview) -> float:
    """Bytes per second of reading whole files, one call each where the system lets."""
    at, began_s = 0, time.perf_counter()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            offset = 0
            while num := os.preadv(file, [into[at:]], offset):
                offset, at = offset + num, at + num
        finally:
            os.close(file)
    return at / (time.perf_counter() - began_s)


def copy_all(source: memoryview, into: memoryview) -> float:
    """Bytes per second."""
    began_s = time.perf_counter()
    into[:] = source
    return len(source) / (time.perf_counter() - began_s)
