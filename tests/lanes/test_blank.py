"""Memory that nobody has touched is an array like any other."""

import sys

import mlx.core as mx
import pytest

from lanes.blank import blank

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
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    mx.clear_cache()  # what another test has freed is there
    before = resident_bytes()
    array = blank(256 * MIB)
    assert resident_bytes() - before < 16 * MIB
    memoryview(array)[: 64 * MIB] = bytes(64 * MIB)
    assert resident_bytes() - before >= 64 * MIB


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
