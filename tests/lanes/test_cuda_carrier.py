from __future__ import annotations

import os
from random import Random
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.blank import blank
from lanes.cuda_carrier import BLOCK_BYTES, NUM_BLOCKS, _rectangles, _spans, device_carrier
from lanes.cuda_driver import address_of
from lanes.tuning import backend

on_cuda = pytest.mark.skipif(backend() != "cuda", reason="this machine has no NVIDIA GPU")


@pytest.mark.skipif(backend() == "cuda", reason="this machine has an NVIDIA GPU")
def test_whoever_reads_writes_to_memory_that_is_the_hosts() -> None:
    assert device_carrier() is None


@given(data=st.data(), size=st.integers(1, 9), count=st.integers(1, 6), gap=st.integers(0, 5))
def test_views_at_even_distances_are_one_copy(data: st.DataObject, size: int, count: int, gap: int) -> None:
    memory = memoryview(bytearray(100))
    base = address_of(memory)
    views = [memory[at * (size + gap) :][:size] for at in range(count)]
    (rectangle,) = _rectangles(views)
    assert rectangle == (base, size + gap if count > 1 else size, size, count)
    if count > 2:
        shorter = data.draw(st.integers(0, count - 1))
        views[shorter] = views[shorter][: size - 1]
        lines = [(base + at * (size + gap), view.nbytes) for at, view in enumerate(views) if view.nbytes]
        found = [(a + line * pitch, width) for a, pitch, width, height in _rectangles(views) for line in range(height)]
        assert found == lines


def test_buffers_of_one_array_are_one_span() -> None:
    arrays = [memoryview(bytearray(100)) for _ in range(2)]
    bases = [address_of(array) for array in arrays]
    buffers = [arrays[0][50:60], arrays[1][:10], arrays[0][10:20], arrays[1][90:]]
    assert _spans(buffers) == [(bases[0] + 10, bases[0] + 60), (bases[1], bases[1] + 100)]


@on_cuda
def test_what_is_sent_is_what_the_device_reads() -> None:
    """More than all blocks hold, by several threads, in lines and in one piece."""
    carrier = device_carrier()
    assert carrier is not None
    random, heads = Random(1), 8
    contents = [os.urandom(heads * random.randrange(1, BLOCK_BYTES // heads)) for _ in range(3 * NUM_BLOCKS)]
    arrays = [blank(2 * len(content)) for content in contents]
    buffers = [memoryview(untyped) for untyped in list[Any](arrays)]
    carrier.expect(buffers)

    def send(numbers: range) -> None:
        for number in numbers:
            content, buffer, block = contents[number], buffers[number], carrier.lend()
            block[: len(content)] = content
            size = len(content) // heads
            carrier.send(block, [buffer[head * 2 * size :][:size] for head in range(heads)])

    threads = [Thread(target=send, args=(range(first, len(contents), 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    carrier.finish()
    buffers.clear()
    for content, array in zip(contents, arrays, strict=True):
        kept: Any = mx.contiguous(array.reshape(heads, -1)[:, : len(content) // heads]) + 0
        mx.eval(kept)
        assert bytes(memoryview(kept)) == content
