"""Fills rows' memory from what is kept, or maps it: the reader's thread and its door.

What crosses is plain: segments, their buffers or files, destinations; a result comes back. Large rows that are read
from disk go one after another, in the order they came in: two would share the disk and both be late. Those that are
copied from memory do not wait for them, and small ones wait for neither: each kind has a thread. From memory it is
copies, from disk reads, both straight into the row, or into what brings it there (fill.py). Rows wait for this, so that
writing stops meanwhile (Precedence).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from store.checkpoint import Destination, Mapped
from store.fill import Filled, Link, fill, num_threads
from store.format import CorruptSegment
from store.mapping import map_tensors
from store.segment import Segment

logger = logging.getLogger(__name__)

# The kernel reads at most so much ahead for one call, or more where the device wants more.
READ_AHEAD_BYTES: Final = 128 << 10
# Of a row of fewer bytes the reading is over in some 30 ms, also from disk, and one thread does it.
SMALL_BYTES: Final = 64 << 20
# Where something is always read, something is written this often all the same.
MAX_WAIT_S: Final = 1.0
# What a measured rate counts for beside those before.
RATE_WEIGHT: Final = 0.3
# A rate measured on less says more of the calls than of the medium.
MIN_MEASURED_BYTES: Final = 1 << 20
# What was measured before is forgotten: where reading was slow nothing is read, and nothing would be measured again.
RATE_AGE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Bytes per second, lately; None where nothing was measured in the last RATE_AGE_S."""

    memory: float | None = None
    disk: float | None = None


class _Rate:
    """Of one tier."""

    def __init__(self) -> None:
        self._average = 0.0
        self._measured_s: float | None = None

    def at(self, now_s: float) -> float | None:
        """Bytes per second; None: it is not known, or not any more."""
        is_known = self._measured_s is not None and now_s < self._measured_s + RATE_AGE_S
        return self._average if is_known else None

    def measure(self, num_bytes: int, seconds: float, now_s: float) -> None:
        if num_bytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        rate, before = num_bytes / seconds, self.at(now_s)
        self._average = rate if before is None else before + RATE_WEIGHT * (rate - before)
        self._measured_s = now_s


class Precedence:
    """Restores go before writes: the writer's thread asks between two pieces of its work."""

    def __init__(self) -> None:
        self._num_readers = 0
        self._quiet = threading.Event()
        self._quiet.set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """On Trio's thread."""
        self._num_readers += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._quiet.set()

    def wait_quiet(self) -> None:
        """On the writer's thread: return when nothing is being read, or that has gone on for too long."""
        self._quiet.wait(MAX_WAIT_S)


class Reader:
    def __init__(self, verify: bool) -> None:
        self.precedence = Precedence()
        self._memory_rate = _Rate()
        self._disk_rate = _Rate()
        self._verify = verify
        self._small, self._copies, self._reads = (trio.CapacityLimiter(1) for _ in range(3))
        self._maps = trio.CapacityLimiter(1)
        # Read-ahead only asks; it must not wait behind a restore.
        self._ahead = trio.CapacityLimiter(1)

    @property
    def rate(self) -> ReadRate:
        now_s = trio.current_time()
        return ReadRate(self._memory_rate.at(now_s), self._disk_rate.at(now_s))

    async def fill(self, chain: Sequence[Link], tokens: int, destinations: Sequence[Destination]) -> Filled:
        """Read a row of `tokens` tokens into its memory. A reading that was begun is finished, cancelled or not."""
        limiter, threads = self._reads, num_threads()
        if sum(destination.wanted.nbytes for destination in destinations) < SMALL_BYTES:
            limiter, threads = self._small, 1
        elif all(link.buffers is not None for link in chain):
            limiter = self._copies
        with self.precedence.reading():
            filled = await trio.to_thread.run_sync(
                fill, chain, tokens, destinations, self._verify, threads, limiter=limiter
            )
        now_s = trio.current_time()
        self._memory_rate.measure(filled.memory_bytes, filled.memory_s, now_s)
        self._disk_rate.measure(filled.disk_bytes, filled.disk_s, now_s)
        return filled

    async def map(self, path: Path, segment: Segment, tensors: Sequence[int]) -> Mapped | None:
        """These tensors of a file as memory; None where they had better be read, which then tells what is wrong."""
        with self.precedence.reading():
            return await trio.to_thread.run_sync(_map, path, segment, tensors, self._verify, limiter=self._maps)

    async def read_ahead(self, paths: Sequence[Path]) -> None:
        """Ask the kernel to read files, so that they are in its memory when they are wanted."""
        if hasattr(os, "posix_fadvise"):
            await trio.to_thread.run_sync(_read_ahead, paths, limiter=self._ahead, abandon_on_cancel=True)


def _map(path: Path, segment: Segment, tensors: Sequence[int], verify: bool) -> Mapped | None:
    try:
        return Mapped(map_tensors(path, segment, tensors, verify))
    except (OSError, CorruptSegment) as error:
        logger.info("segment %s cannot be mapped: %s", segment.id, error)
        return None


def _read_ahead(paths: Sequence[Path]) -> None:
    for path in paths:
        # A file that cannot be opened is met again when it is to be read.
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset in range(0, os.fstat(file).st_size, READ_AHEAD_BYTES):
                    os.posix_fadvise(file, offset, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)
