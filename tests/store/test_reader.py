from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from store import reader as reader_module
from store.checkpoint import Destination, Part, Recall, TensorSpec, columns_of
from store.fill import Filled, Link, copy, fill
from store.keeping import Kept
from store.pieces import Missing, pieces, recalled_specs, used_bytes
from store.reader import RATE_AGE_S, Precedence, Reader, ReadRate
from store.segment import Segment, segment_id
from store.segment_file import read_stored, write_segment
from store.trim import trim
from tests.scheduler.trio_test import trio_test
from tests.store.rows import DIM, HEADS, Row
from tests.store.segments import FINGERPRINT, ROOT

MIB = 1 << 20
ANYWHERE, BOUNDARIES = Row(), Row(cut_anywhere=False)


def of(tokens: Sequence[int], part: Part, parent: Segment | None = None) -> Segment:
    own = array("I", tokens[part.start : part.stop])
    above = None if parent is None else parent.id
    id_ = segment_id(ROOT, above, part.start, own, part.boundaries)
    return Segment(id_, ROOT, FINGERPRINT, above, part.start, own, part.boundaries, part.tensors)


def in_memory(tokens: Sequence[int], row: Row, cuts: Sequence[int]) -> list[Link]:
    """A chain of segments, each but the last reaching beyond the start of the next."""
    links: list[Link] = []
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        beyond = [*tokens[:stop], 1000, 1001] if stop < len(tokens) else tokens
        part = row.part(beyond, start, [stop])
        parent = links[-1].segment if links else None
        links.append(Link(of(beyond, part, parent), part.buffers, None))
    return links


def on_disk(links: Sequence[Link], folder: Path) -> list[Link]:
    found = []
    for number, link in enumerate(links):
        path = folder / f"{number}.segment"
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        assert link.buffers is not None
        write_segment(file, link.segment, link.buffers)
        found.append(Link(link.segment, None, Kept(link.segment, path, read_stored(file).places)))
        os.close(file)
    return found


def room(row: Row, links: Sequence[Link], tokens: int) -> tuple[Destination, ...]:
    return row.memory(Recall(tokens, recalled_specs([link.segment for link in links], tokens)))


@given(
    length=st.integers(1, 30),
    cuts=st.sets(st.integers(1, 29), max_size=4),
    cut_anywhere=st.booleans(),
    window=st.integers(3, 12),
)
def test_a_chain_of_any_cuts_gives_the_row(length: int, cuts: set[int], cut_anywhere: bool, window: int) -> None:
    row, tokens = Row(cut_anywhere=cut_anywhere, window=window), list(range(length))

    async def main() -> None:
        links = in_memory(tokens, row, sorted(cut for cut in cuts if cut < length))
        memory = room(row, links, length)
        filled = await Reader(verify=False).fill(links, length, memory)
        assert filled.bad is None
        assert row.is_right(tokens, memory)
        assert filled.memory_bytes == sum(destination.wanted.nbytes for destination in memory)

    trio.run(main)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("row", [ANYWHERE, BOUNDARIES], ids=["anywhere", "boundaries"])
@trio_test
async def test_from_disk_and_memory_mixed(row: Row, verify: bool, tmp_path: Path) -> None:
    tokens = list(range(50))
    links = in_memory(tokens, row, [20, 30])
    links[:2] = on_disk(links[:2], tmp_path)
    memory = room(row, links, 50)
    filled = await Reader(verify).fill(links, 50, memory)
    assert filled.bad is None
    assert row.is_right(tokens, memory)
    assert filled.disk_bytes + filled.memory_bytes == sum(destination.wanted.nbytes for destination in memory)
    assert filled.disk_bytes >= 30 * 16


def test_a_whole_tensor_is_one_piece_and_a_cut_one_for_each_head() -> None:
    (link,) = in_memory(range(10), ANYWHERE, [])
    whole = list(pieces([link.segment], 10, room(ANYWHERE, [link], 10)))
    assert [(piece.offset, len(piece.into), piece.nbytes) for piece in whole] == [(0, 2, 160)]
    cut = list(pieces([link.segment], 4, room(ANYWHERE, [link], 4)))
    assert [(piece.offset, len(piece.into), piece.nbytes) for piece in cut] == [(0, 1, 32), (80, 1, 32)]


def test_what_a_row_may_take_from_each_segment() -> None:
    links = in_memory(range(10), ANYWHERE, [6])
    assert used_bytes([link.segment for link in links], 8) == [6 * 16, 2 * 16]


@pytest.mark.parametrize(
    "wanted",
    [
        TensorSpec("0.0", "uint8", (3, 4, 8), ((0, 4),)),
        TensorSpec("0.0", "int8", (2, 4, 8), ((0, 4),)),
        TensorSpec("0.0", "uint8", (2, 4, 4), ((0, 4),)),
        TensorSpec("7.0", "uint8", (2, 4, 8), ((0, 4),)),
        TensorSpec("1.0", "uint8", (2, 4, 8), ((0, 4),)),
        TensorSpec("2.0", "uint8", (16,), at=19),
        TensorSpec("2.0", "uint8", (8,), at=20),
    ],
)
def test_what_a_segment_does_not_have_as_it_is_wanted_is_missing(wanted: TensorSpec) -> None:
    (link,) = in_memory(range(20), BOUNDARIES, [])
    destination = Destination(wanted, memoryview(bytearray(1000)), 100)
    with pytest.raises(Missing) as missing:
        list(pieces([link.segment], 20, [destination]))
    assert missing.value.link == 0


@trio_test
async def test_what_is_nowhere_is_bad() -> None:
    first, second = in_memory(range(20), ANYWHERE, [10])
    filled = await Reader(False).fill([first, Link(second.segment, None, None)], 20, room(ANYWHERE, [first], 20))
    assert filled.bad is not None
    assert (filled.bad[0], type(filled.bad[1])) == (1, FileNotFoundError)


@trio_test
async def test_another_file_in_its_place_is_bad(tmp_path: Path) -> None:
    (first,) = on_disk(in_memory(range(20), ANYWHERE, []), tmp_path)
    (other,) = in_memory(range(1, 21), ANYWHERE, [])
    filled = await Reader(False).fill([Link(other.segment, None, first.kept)], 20, room(ANYWHERE, [other], 20))
    assert filled.bad is not None
    assert (filled.bad[0], str(filled.bad[1])) == (0, "it is another segment than it was")


@trio_test
async def test_rates_are_measured_on_what_is_large_enough(tmp_path: Path) -> None:
    heads, tokens, dim = 4, 4096, 64
    spec = TensorSpec("0.0", "float32", (heads, tokens, dim), ((0, tokens),))
    data = memoryview(bytearray(os.urandom(1 << 16) * (spec.nbytes >> 16)))
    part = Part(0, tokens, None, (spec,), (data,))
    link = Link(of(range(tokens), part), part.buffers, None)
    reader = Reader(verify=False)
    assert reader.rate == ReadRate(None, None)
    small = Destination(columns_of(spec, ((0, 1),)), memoryview(bytearray(heads * dim * 4)), dim * 4)
    assert (await reader.fill([link], 1, [small])).bad is None
    assert reader.rate == ReadRate(None, None)
    into = Destination(spec, memoryview(bytearray(spec.nbytes)), tokens * dim * 4)
    assert (await reader.fill([link], tokens, [into])).bad is None
    assert into.buffer == data
    assert reader.rate.memory is not None
    assert reader.rate.disk is None
    (stored,) = on_disk([link], tmp_path)
    assert stored.kept is not None
    await reader.read_ahead([stored.kept.path, tmp_path / "gone"])
    again = replace(into, buffer=memoryview(bytearray(spec.nbytes)))
    assert (await reader.fill([stored], tokens, [again])).bad is None
    assert again.buffer == data
    assert reader.rate.disk is not None


def test_a_rate_is_forgotten_when_nothing_is_measured_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Filled] = []
    monkeypatch.setattr("store.reader.fill", lambda *arguments: reads.pop(0))
    clock = MockClock()

    async def main() -> None:
        reader = Reader(verify=False)

        async def rates_after(read: Filled) -> ReadRate:
            reads.append(read)
            await reader.fill([], 0, [])
            return reader.rate

        assert await rates_after(Filled(disk_bytes=MIB, disk_s=10.0)) == ReadRate(None, MIB / 10)
        clock.jump(RATE_AGE_S - 1)
        # One that measures nothing makes what was measured no newer.
        assert await rates_after(Filled(disk_bytes=MIB - 1, disk_s=1.0)) == ReadRate(None, MIB / 10)
        clock.jump(1)
        assert reader.rate == ReadRate(None, None)
        assert await rates_after(Filled(disk_bytes=MIB - 1, disk_s=1.0)) == ReadRate(None, None)
        fast = Filled(memory_bytes=MIB, memory_s=0.001, disk_bytes=MIB, disk_s=0.01)
        assert await rates_after(fast) == ReadRate(MIB / 0.001, MIB / 0.01)

    trio.run(main, clock=clock)


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 3])
@pytest.mark.parametrize("writable", [False, True])
def test_copies_of_any_size(size: int, writable: bool) -> None:
    source = os.urandom(size)
    into = bytearray(size + 2)
    copy(memoryview(into)[1 : size + 1], memoryview(bytearray(source) if writable else source))
    assert into == b"\0" + source + b"\0"


def test_more_heads_than_one_call_takes(tmp_path: Path) -> None:
    spec = TensorSpec("0.0", "uint8", (3000, 2, 1), ((0, 2),))
    data = os.urandom(6000)
    part = Part(0, 2, None, (spec,), (memoryview(data),))
    (link,) = on_disk([Link(of([1, 2], part), part.buffers, None)], tmp_path)
    into = Destination(spec, memoryview(bytearray(9000)), 3)

    async def main() -> None:
        assert (await Reader(verify=False).fill([link], 2, [into])).bad is None

    trio.run(main)
    assert b"".join(bytes(into.buffer[head * 3 :][:2]) for head in range(3000)) == data


@trio_test
async def test_small_rows_wait_for_no_large_one_and_copies_for_no_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large is here what has more than ten tokens. A large row is read from disk until the others are done."""
    may_go_on, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(reader_module, "SMALL_BYTES", 11 * HEADS * DIM)

    def held_back(chain: Sequence[Link], tokens: int, *rest: Any) -> Filled:
        if chain[0].buffers is None and tokens > 10:
            begun.set()
            may_go_on.wait(60)
        return fill(chain, tokens, *rest)

    monkeypatch.setattr(reader_module, "fill", held_back)
    reader, filled = Reader(False), list[str]()
    held, read = in_memory(range(20), ANYWHERE, []), on_disk(in_memory(range(20), ANYWHERE, []), tmp_path)

    async def fill_row(name: str, links: list[Link], tokens: int) -> None:
        assert (await reader.fill(links, tokens, room(ANYWHERE, links, tokens))).bad is None
        filled.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill_row, "large", read, 20)
        await trio.to_thread.run_sync(begun.wait)
        nursery.start_soon(fill_row, "another large", read, 20)
        await fill_row("small", read, 10)
        await fill_row("from memory", held, 20)
        assert filled == ["small", "from memory"]
        may_go_on.set()
    assert sorted(filled[2:]) == ["another large", "large"]


@trio_test
async def test_a_writer_waits_while_anything_is_read() -> None:
    precedence = Precedence()
    precedence.wait_quiet()
    with precedence.reading():
        with precedence.reading():
            pass
        assert not precedence._quiet.is_set()
    assert precedence._quiet.is_set()


@given(
    length=st.integers(2, 25),
    at=st.integers(1, 24),
    bounds=st.sets(st.integers(1, 24), max_size=3),
    cut_anywhere=st.booleans(),
)
def test_a_part_cut_in_front_is_the_part_that_begins_there(
    length: int, at: int, bounds: set[int], cut_anywhere: bool
) -> None:
    row, tokens, start = Row(cut_anywhere=cut_anywhere, window=5), list(range(length)), min(at, length - 1)
    inside = sorted({bound for bound in bounds if bound < length} | {start})
    whole = row.part(tokens, 0, inside)
    cut = trim(whole, start)
    right = row.part(tokens, start, [bound for bound in inside if bound > start])
    assert (cut.start, cut.stop, cut.boundaries) == (right.start, right.stop, right.boundaries)
    # The ring of the boundary at `start` itself is the parent's; what of it lies behind `start` is none.
    assert {spec.name for spec in cut.tensors} == {spec.name for spec in right.tensors}
    for spec, buffer in zip(right.tensors, right.buffers, strict=True):
        place = cut.tensors.index(spec)
        assert cut.buffers[place] == buffer
