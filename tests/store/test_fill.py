from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import fill as filling
from store.checkpoint import CarrierFailed, Destination
from store.fill import fill, first_bytes, num_threads
from store.format import CorruptSegment
from store.segment_file import read_stored
from tests.store.carrier import HostCarrier
from tests.store.rows import Row
from tests.store.test_reader import ANYWHERE, BOUNDARIES, in_memory, on_disk, room


@pytest.fixture(autouse=True)
def threads_share_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "SHARED_BYTES", 1)


def carried(destinations: tuple[Destination, ...], carrier: HostCarrier) -> tuple[Destination, ...]:
    return tuple(replace(destination, carrier=carrier) for destination in destinations)


@given(
    length=st.integers(1, 30),
    cuts=st.sets(st.integers(1, 29), max_size=4),
    cut_anywhere=st.booleans(),
    threads=st.sampled_from([1, 3]),
    block_bytes=st.sampled_from([1, 7, 64, 1000]),
    from_disk=st.booleans(),
)
def test_through_a_carrier_in_blocks_of_any_size(
    length: int, cuts: set[int], cut_anywhere: bool, threads: int, block_bytes: int, from_disk: bool
) -> None:
    row, tokens, carrier = Row(cut_anywhere=cut_anywhere, window=5), list(range(length)), HostCarrier(block_bytes)
    with tempfile.TemporaryDirectory() as folder:
        links = in_memory(tokens, row, sorted(cut for cut in cuts if cut < length))
        if from_disk:
            links = on_disk(links, Path(folder))
        memory = carried(room(row, links, length), carrier)
        filled = fill(links, length, memory, verify=from_disk, threads=threads)
    assert (filled.bad, filled.unreached, carrier.finished) == (None, None, True)
    assert row.is_right(tokens, memory)
    num_bytes = sum(destination.wanted.nbytes for destination in memory)
    assert carrier.num_bytes == filled.memory_bytes + filled.disk_bytes == num_bytes


@pytest.mark.parametrize("row", [ANYWHERE, BOUNDARIES], ids=["anywhere", "boundaries"])
def test_by_several_threads(row: Row, tmp_path: Path) -> None:
    tokens = list(range(50))
    links = in_memory(tokens, row, [20, 30])
    links[:2] = on_disk(links[:2], tmp_path)
    memory = room(row, links, 50)
    assert fill(links, 50, memory, verify=True, threads=4).bad is None
    assert row.is_right(tokens, memory)


@pytest.mark.parametrize("threads", [1, 4])
def test_what_cannot_be_read_gives_its_block_back(threads: int, tmp_path: Path) -> None:
    links = on_disk(in_memory(range(40), BOUNDARIES, [20]), tmp_path)
    kept = links[1].kept
    assert kept is not None
    with kept.path.open("r+b") as file:
        file.seek(read_stored(file.fileno()).places[0])
        file.write(b"\xff\xff\xff")
    carrier = HostCarrier(16)
    filled = fill(links, 40, carried(room(BOUNDARIES, links, 40), carrier), verify=True, threads=threads)
    assert filled.bad is not None
    assert (filled.bad[0], type(filled.bad[1])) == (1, CorruptSegment)
    assert carrier.finished


@pytest.mark.parametrize("threads", [1, 4])
def test_a_carrier_that_fails_is_no_fault_of_the_segments(threads: int) -> None:
    links = in_memory(range(40), ANYWHERE, [20])
    carrier = HostCarrier(16, refuses_after=100)
    filled = fill(links, 40, carried(room(ANYWHERE, links, 40), carrier), verify=False, threads=threads)
    assert filled.bad is None
    assert isinstance(filled.unreached, CarrierFailed)
    assert carrier.finished


@given(sizes=st.lists(st.integers(0, 5), max_size=6), num_bytes=st.integers(0, 20))
def test_the_first_bytes_of_several_views(sizes: list[int], num_bytes: int) -> None:
    content = bytes(range(sum(sizes)))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(content)[at : at + size])
        at += size
    first, left = first_bytes(views, num_bytes)
    assert (b"".join(first), b"".join(left)) == (content[:num_bytes], content[num_bytes:])


def test_a_processor_is_left_to_the_model() -> None:
    assert 1 <= num_threads() <= 8
