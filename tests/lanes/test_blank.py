"""Memory that nobody has touched is an array like any other."""

import ctypes
import gc
import sys
from mmap import PAGESIZE
from typing import Any

import mlx.core as mx
import pytest

from lanes.blank import blank
from lanes.kept_memory import trim

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 8, 4095, 100_000, 3 * MIB, 9 * MIB + 5])
def test_it_is_of_the_size_and_takes_what_is_written(nbytes: int) -> None:
    before = mx.get_active_memory()
    array = blank(nbytes)
    assert (array.shape, array.dtype) == ((nbytes,), mx.uint8)
    assert nbytes <= mx.get_active_memory() - before <= 2 * nbytes + 4096
    view = memoryview(array)
    content = (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    view[:] = content
    view.release()
    assert bytes(memoryview(array)) == content


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of the process")
def test_the_pages_of_a_large_one_are_not_there_before_they_are_written() -> None:
    gc.collect()
    mx.clear_cache()
    trim()  # what other tests have freed, or left to be found as garbage, is there
    array: Any = blank(256 * MIB)
    view = memoryview(array)
    assert resident_bytes(view) < 16 * MIB
    view[: 64 * MIB] = bytes(64 * MIB)
    assert 64 * MIB <= resident_bytes(view) < 96 * MIB


def resident_bytes(view: memoryview) -> int:
    """Of this memory, as mincore(2) tells."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    first = address // PAGESIZE * PAGESIZE
    length = address + view.nbytes - first
    pages = (ctypes.c_ubyte * -(-length // PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), pages) == 0
    return PAGESIZE * sum(page & 1 for page in pages)


def test_it_is_written_in_place_by_mlx_once_nobody_else_holds_it() -> None:
    memory = blank(16 * MIB)
    array = memory.view(mx.float32).reshape(4, MIB)
    mx.eval(array)
    del memory
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    array[2:3] = mx.ones((1, MIB))
    mx.eval(array)
    assert mx.get_peak_memory() - before <= 4 * MIB + 4096
    assert mx.all(array[2] == 1).item()
