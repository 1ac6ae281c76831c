"""What the reader's threads do: the bytes of a chain's segments into a row's memory, from buffers or from files.

The tensors of a segment are independent of each other, so that several threads share them where there are processors
for it: one thread copies from the page cache at about 5 GB/s, eight at 30 (16 processors). Destinations of a device
have a carrier: what goes there is read into blocks that it lends, and it copies one while the next is filled.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Final

from store.checkpoint import Carrier, CarrierFailed, Destination
from store.format import CorruptSegment, Stored
from store.keeping import Kept
from store.pieces import Missing, Piece, pieces
from store.segment import Segment
from store.segment_file import opened, verify_tensor

# One call takes at most so many buffers (IOV_MAX).
MAX_BUFFERS: Final = 1024
# Below this a copy takes less time than to find out where it goes. A larger one lets other threads run.
SMALL_COPY_BYTES: Final = 64 << 10
# Of a segment of which less is wanted, one thread reads it all.
SHARED_BYTES: Final = 4 << 20
MAX_THREADS: Final = 8

# Reads consecutive bytes of a tensor, from an offset on, into these views one after the other.
Take = Callable[[int, Sequence[memoryview]], None]


@dataclass(frozen=True, slots=True)
class Link:
    """A segment of a chain and where its bytes are: buffers, or else kept."""

    segment: Segment
    buffers: tuple[memoryview, ...] | None
    kept: Kept | None


@dataclass
class Filled:
    """What came of filling a row: all is well, or else one of these.

    bad: the place in the chain of what could not be read, and why. unreached: why it did not get to the row's memory.
    """

    bad: tuple[int, Exception] | None = None
    unreached: CarrierFailed | None = None
    memory_bytes: int = 0
    memory_s: float = 0.0
    disk_bytes: int = 0
    disk_s: float = 0.0


def num_threads() -> int:
    """How many read for one row: of the processors that this process may use half, as the model's thread goes on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, usable // 2))


def fill(chain: Sequence[Link], tokens: int, destinations: Sequence[Destination], verify: bool, threads: int) -> Filled:
    """Read a row of `tokens` tokens into its memory."""
    filled = Filled()
    try:
        wanted = sorted(
            pieces([link.segment for link in chain], tokens, destinations),
            key=lambda piece: (piece.link, piece.tensor, piece.offset),
        )
    except Missing as missing:
        filled.bad = missing.link, CorruptSegment(f"it lacks {missing}")
        return filled
    try:
        with ExitStack() as stack:
            for carrier, buffers in _carried(destinations).items():
                carrier.expect(buffers)
                stack.callback(carrier.finish)
            pool = stack.enter_context(ThreadPoolExecutor(threads)) if threads > 1 else None
            for number, of_link in groupby(wanted, key=lambda piece: piece.link):
                try:
                    _fill_from(chain[number], list(of_link), verify, pool, filled)
                except (OSError, CorruptSegment) as error:
                    filled.bad = number, error
                    break
    except CarrierFailed as error:
        filled.unreached = error
    return filled


def _carried(destinations: Sequence[Destination]) -> dict[Carrier, list[memoryview]]:
    found: dict[Carrier, list[memoryview]] = {}
    for destination in destinations:
        if destination.carrier is not None:
            found.setdefault(destination.carrier, []).append(destination.buffer)
    return found


def _fill_from(link: Link, wanted: Sequence[Piece], verify: bool, pool: Executor | None, filled: Filled) -> None:
    """What is wanted of one segment. Raises OSError, CorruptSegment."""
    num_bytes, began_s = sum(piece.nbytes for piece in wanted), time.perf_counter()
    shared_by = pool if num_bytes >= SHARED_BYTES else None
    if link.buffers is not None:
        _copy(link.buffers, wanted, shared_by)
        filled.memory_bytes += num_bytes
        filled.memory_s += time.perf_counter() - began_s
    elif link.kept is not None:
        _read(link.kept, link.segment, wanted, verify, shared_by)
        filled.disk_bytes += num_bytes
        filled.disk_s += time.perf_counter() - began_s
    else:
        raise FileNotFoundError("it is nowhere")


def _copy(buffers: tuple[memoryview, ...], wanted: Sequence[Piece], pool: Executor | None) -> None:
    def copy_tensor(tensor: int, of_tensor: Sequence[Piece]) -> None:
        take = partial(_copy_from, buffers[tensor].cast("B"))
        for piece in of_tensor:
            _deliver(take, piece)

    _run([partial(copy_tensor, tensor, of_tensor) for tensor, of_tensor in _by_tensor(wanted)], pool)


def _read(kept: Kept, segment: Segment, wanted: Sequence[Piece], verify: bool, pool: Executor | None) -> None:
    """Raises OSError, CorruptSegment."""
    with opened(kept.path, segment) as (file, stored):
        jobs = [partial(_read_tensor, file, stored, tensor, each, verify) for tensor, each in _by_tensor(wanted)]
        _run(jobs, pool)


def _read_tensor(file: int, stored: Stored, tensor: int, wanted: Sequence[Piece], verify: bool) -> None:
    if verify:
        verify_tensor(file, stored, tensor)
    take = partial(_read_from, file, stored.places[tensor])
    for piece in wanted:
        _deliver(take, piece)


def _by_tensor(wanted: Iterable[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    for tensor, of_tensor in groupby(wanted, key=lambda piece: piece.tensor):
        yield tensor, list(of_tensor)


def _run(jobs: Sequence[Callable[[], None]], pool: Executor | None) -> None:
    """Raises what the first job that fails does, once none of them runs any more."""
    if pool is None:
        for job in jobs:
            job()
        return
    futures = [pool.submit(job) for job in jobs]
    wait(futures)
    for future in futures:
        future.result()


def _deliver(take: Take, piece: Piece) -> None:
    if piece.carrier is None:
        take(piece.offset, piece.into)
        return
    offset, left = piece.offset, [view for view in piece.into if view.nbytes]
    while left:
        block = piece.carrier.lend()
        filled: list[memoryview] = []
        try:
            into, left = first_bytes(left, block.nbytes)
            num_bytes = sum(view.nbytes for view in into)
            take(offset, [block[:num_bytes]])
            offset, filled = offset + num_bytes, into
        finally:
            piece.carrier.send(block, filled)


def first_bytes(views: Sequence[memoryview], num_bytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """So many bytes of these, one after the other, or all if they are fewer; and the rest."""
    first: list[memoryview] = []
    for number, view in enumerate(views):
        if view.nbytes > num_bytes:
            return [*first, view[:num_bytes]] if num_bytes else first, [view[num_bytes:], *views[number + 1 :]]
        first.append(view)
        num_bytes -= view.nbytes
    return first, []


def copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes between buffers of the same length. Large ones let other threads run, where Python allows it."""
    if into.nbytes >= SMALL_COPY_BYTES and not source.readonly:
        to, at = (ctypes.c_char.from_buffer(view) for view in (into, source))
        ctypes.memmove(ctypes.addressof(to), ctypes.addressof(at), into.nbytes)
    else:
        into[:] = source


def _copy_from(source: memoryview, offset: int, into: Sequence[memoryview]) -> None:
    for view in into:
        copy(view, source[offset : offset + view.nbytes])
        offset += view.nbytes


def _read_from(file: int, place: int, offset: int, into: Sequence[memoryview]) -> None:
    """With as few calls as the system lets."""
    left, at = [view for view in into if view.nbytes], place + offset
    while left:
        num = os.preadv(file, left[:MAX_BUFFERS], at)
        if num == 0:
            raise CorruptSegment("it is shorter than it was")
        at += num
        _, left = first_bytes(left, num)
