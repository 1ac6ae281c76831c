"""A segment's file as memory, mapped instead of read.

Where MLX can use memory that is not its own (Metal), a row's arrays are then the file's pages, and nothing is copied.
The mapping is private: what is written to it goes into copies of its pages, never into the file. It lives as long as
somebody has one of its buffers, or an array made of one, and needs the file's name no more: one that is deleted
meanwhile is gone from the disk when the mapping is.

What a reading call reports as an error ends the process where memory is touched (SIGBUS): a disk that fails, a file
that somebody cuts short. Nobody cuts a segment's file short, and one that is too short already is not mapped. Digests
are therefore checked by reading, which brings the file into the same pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from store.format import CorruptSegment, aligned
from store.segment import Segment
from store.segment_file import opened, verify_tensor


def map_tensors(path: Path, segment: Segment, tensors: Sequence[int], verify: bool) -> tuple[memoryview, ...]:
    """Of each of these tensors, told by their places in segment.tensors, the bytes, writable.

    Each begins on a page and goes on to the end of its last page, or to that of the file: memory can be adopted by
    whole pages only. Raises OSError, CorruptSegment.
    """
    with opened(path, segment) as (file, stored):
        if verify:
            for tensor in tensors:
                verify_tensor(file, stored, tensor)
        end = stored.data_start + stored.data_bytes
        try:
            mapping = mmap.mmap(file, end, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise CorruptSegment(f"it is shorter than it was: {error}") from error
    mapping.madvise(mmap.MADV_WILLNEED)
    content = memoryview(mapping)
    begins = [stored.places[tensor] for tensor in tensors]
    sizes = [aligned(stored.sizes[tensor]) for tensor in tensors]
    return tuple(content[begin : min(begin + size, end)] for begin, size in zip(begins, sizes, strict=True))
