"""Stands for CUDA's kernel and driver, where there are none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from mmap import mmap

import mlx.core as mx
import numpy as np

from lanes.cuda_fetch import NUM_ARRAYS, Places


class Memory:
    """What the driver has made, which nobody frees."""

    def __init__(self) -> None:
        self.made: list[mmap] = []

    def __call__(self, nbytes: int) -> int:
        self.made.append(mmap(-1, nbytes))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.made[-1]))


def copy(arrays: Sequence[mx.array], places: Places, load_bytes: int) -> mx.array:
    assert 0 < len(arrays) <= NUM_ARRAYS
    assert len({array.dtype for array in arrays}) == 1
    for array, place in zip(arrays, places.tolist(), strict=True):
        heads, columns, dim, slot, column, count, target_columns, target = place
        assert (heads, columns, dim) == array.shape[1:]
        assert dim * array.itemsize % load_bytes == 0
        taken = array[slot : slot + 1, :, column : column + count]
        content = np.array(mx.contiguous(taken).view(mx.uint8))[0]
        _, _, row_bytes = content.shape
        for head in range(heads):
            ctypes.memmove(target + head * target_columns * row_bytes, content[head].tobytes(), count * row_bytes)
    return mx.array(1)
