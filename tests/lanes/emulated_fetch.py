"""Stands for CUDA's kernel and driver, where there are none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from mmap import mmap

import mlx.core as mx
import numpy as np

from lanes.cuda_fetch import NUM_SOURCES, Copy


class Memory:
    """What the driver has made, which nobody frees."""

    def __init__(self) -> None:
        self.made: list[mmap] = []

    def __call__(self, nbytes: int) -> int:
        self.made.append(mmap(-1, nbytes))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.made[-1]))


def copy(pieces: Sequence[Copy]) -> mx.array:
    assert 0 < len(pieces) <= NUM_SOURCES
    assert len({(piece.array.dtype, piece.array.shape[1], piece.array.shape[3]) for piece, _, _ in pieces}) == 1
    for piece, target, columns in pieces:
        content = np.array(mx.contiguous(piece.view()).view(mx.uint8))[0]
        heads, count, row_bytes = content.shape
        for head in range(heads):
            ctypes.memmove(target + head * columns * row_bytes, content[head].tobytes(), count * row_bytes)
    return mx.array(1)
