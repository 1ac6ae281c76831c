"""A carrier to the host's own memory, for rows on a machine without a device of its own."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from lanes.cuda_driver import address_of
from store.checkpoint import CarrierFailed


class HostCarrier:
    """Has few small blocks, and minds that it is used as it is told to. refuses_after: bytes that it takes."""

    def __init__(self, block_bytes: int, num_blocks: int = 2, refuses_after: int | None = None) -> None:
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(num_blocks):
            self._free.put(memoryview(bytearray(block_bytes)))
        self._num_blocks = num_blocks
        self._expected: list[tuple[int, int]] = []
        self._left_bytes = refuses_after
        self.num_bytes = 0
        self.num_sent = 0
        self.finished = False

    @property
    def is_idle(self) -> bool:
        return self._free.qsize() == self._num_blocks

    def expect(self, buffers: Sequence[memoryview]) -> None:
        self._expected += [(address_of(buffer), address_of(buffer) + buffer.nbytes) for buffer in buffers]

    def lend(self) -> memoryview:
        return self._free.get(timeout=10)

    def send(self, block: memoryview, into: Sequence[memoryview]) -> None:
        at = 0
        for view in into:
            begin = address_of(view)
            assert any(first <= begin and begin + view.nbytes <= last for first, last in self._expected)
            view[:] = block[at : at + view.nbytes]
            at += view.nbytes
        self._free.put(block)
        self.num_bytes += at
        self.num_sent += 1
        if self._left_bytes is not None and self.num_bytes > self._left_bytes:
            raise CarrierFailed("it has had enough")

    def finish(self) -> None:
        assert self.is_idle
        self.finished = True
