"""Files that are mapped instead of read: where their tensors lie, that a write stays out of them, how long it lasts."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from store.checkpoint import Mapped, Recall
from store.format import ALIGN_BYTES, CorruptSegment
from store.mapping import map_tensors
from store.segment_file import read_stored, verify_file
from store.settings import StoreSettings
from store.store import Store, open_store
from tests.scheduler.trio_test import trio_test
from tests.store.keepers import FINGERPRINT, local
from tests.store.rows import Row
from tests.store.segments import bytes_for, save, with_tensors
from tests.store.test_store import recall, remember

ROW = Row()
BOUNDARIES = Row(cut_anywhere=False)
# A tensor of 24 KB: a page and a half, where pages are the largest.
SEGMENT = with_tensors(range(1500))
ALL = range(len(SEGMENT.tensors))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "a.segment", SEGMENT)
    return tmp_path / "a.segment"


def address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_each_tensor_begins_on_a_page_and_has_whole_ones(path: Path) -> None:
    buffers = map_tensors(path, SEGMENT, ALL, verify=False)
    first = address(buffers[0])
    for buffer, spec, right in zip(buffers, SEGMENT.tensors, bytes_for(SEGMENT), strict=True):
        assert buffer[: spec.nbytes] == right
        assert address(buffer) % mmap.PAGESIZE == 0
        assert (address(buffer) - first) % ALIGN_BYTES == 0
    assert all(len(buffer) % ALIGN_BYTES == 0 for buffer in buffers[:-1])
    # The last one ends with its file.
    assert len(buffers[-1]) == SEGMENT.tensors[-1].nbytes


def test_a_write_never_reaches_the_file(path: Path) -> None:
    before = path.read_bytes()
    buffers = map_tensors(path, SEGMENT, ALL, verify=False)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    (other, *_) = map_tensors(path, SEGMENT, ALL, verify=True)
    assert other[: SEGMENT.tensors[0].nbytes] == bytes_for(SEGMENT)[0]
    del buffers
    assert path.read_bytes() == before
    verify_file(path)


def test_it_lasts_as_long_as_one_of_its_buffers_is_used(path: Path) -> None:
    gc.disable()  # it ends by itself, and not when garbage is collected
    try:
        buffers = list(map_tensors(path, SEGMENT, ALL, verify=False))
        mapping = weakref.ref(buffers[0].obj)
        part = buffers[1][5:9]
        for buffer in buffers:
            assert buffer.obj is mapping()
        del buffer, buffers
        assert mapping() is not None
        del part
        assert mapping() is None
        assert str(path) not in mapped_files()
    finally:
        gc.enable()


def mapped_files() -> str:
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""


def test_a_file_that_is_deleted_stays_until_the_mapping_ends(path: Path) -> None:
    buffers = map_tensors(path, SEGMENT, ALL, verify=False)
    path.unlink()
    assert buffers[0][: SEGMENT.tensors[0].nbytes] == bytes_for(SEGMENT)[0]


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_cut_short_or_another_is_not_mapped(path: Path, verify: bool) -> None:
    with pytest.raises(CorruptSegment, match="another segment"):
        map_tensors(path, with_tensors(range(9)), [0], verify)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptSegment, match="bytes, not"):
        map_tensors(path, SEGMENT, ALL, verify)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        map_tensors(path, SEGMENT, ALL, verify)


def test_a_damaged_tensor_is_noticed_where_it_is_verified_and_wanted(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"!!!!", read_stored(fd).places[2])
    os.close(fd)
    map_tensors(path, SEGMENT, ALL, verify=False)
    map_tensors(path, SEGMENT, [0, 1], verify=True)
    with pytest.raises(CorruptSegment, match="not what was written"):
        map_tensors(path, SEGMENT, ALL, verify=True)


def test_a_file_that_is_cut_short_beneath_a_mapping_ends_the_process(path: Path) -> None:
    """As the head of store/mapping.py warns: nothing of ours does it."""
    script = f"""
import os, pathlib
from store.mapping import map_tensors
from tests.store.test_mapping import ALL, SEGMENT
path = pathlib.Path({str(path)!r})
buffers = map_tensors(path, SEGMENT, ALL, verify=False)
os.truncate(path, 0)
print("cut", flush=True)
bytes(buffers[0])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "cut\n", ended.stderr
    assert ended.returncode == -signal.SIGBUS


def segment_path(folder: Path) -> Path:
    (path,) = folder.rglob("*.segment")
    return path


@asynccontextmanager
async def mapping_store(
    folder: Path, row: Row, memory_bytes: int = 0, max_bytes: int | None = None
) -> AsyncIterator[Store]:
    settings = StoreSettings(FINGERPRINT, memory_bytes, 1 << 20, verify=True, cut_anywhere=row.cut_anywhere, maps=True)
    async with local(folder, max_bytes) as keeper, open_store(settings, keeper) as store:
        yield store
        store.check()


def content(row: Row, tokens: Sequence[int], known: Recall | None) -> bool:
    """Take what is mapped; whether it is what a row of these tokens has."""
    assert known is not None
    assert known.mapped is not None
    for spec, buffer in zip(known.specs, known.mapped.take(), strict=True):
        right = row._state(tokens[: spec.at]) if spec.at is not None else row._columns(tokens, spec)
        if buffer[: spec.nbytes] != right:
            return False
    return True


@pytest.mark.parametrize("row", [ROW, BOUNDARIES], ids=["anywhere", "boundaries"])
@pytest.mark.parametrize("known", [100, 60])
@trio_test
async def test_one_file_is_found_as_memory_whole_and_cut(row: Row, known: int, tmp_path: Path) -> None:
    tokens = list(range(100))
    async with mapping_store(tmp_path, row) as store:
        remember(store, row, tokens, boundaries=[60])
        await store.flush()
        found = await store.find(tokens[:known], "", known)
        assert (found.tokens, found.disk_tokens) == (known, known)
        assert content(row, tokens, found.recall)
        found.release()


@trio_test
async def test_what_is_in_memory_or_in_two_files_or_little_of_one_is_read(tmp_path: Path) -> None:
    tokens = list(range(100))
    async with mapping_store(tmp_path / "a", ROW, memory_bytes=1 << 20) as store:
        remember(store, ROW, tokens)
        await store.flush()
        assert (await recall(store, ROW, tokens)).memory_tokens == 100
    async with mapping_store(tmp_path / "b", ROW) as store:
        remember(store, ROW, tokens)
        await store.flush()
        # Most of what a row would hold for a few tokens would be others'.
        few = await store.find(tokens, "", 49)
        assert few.tokens == 49
        assert few.recall is not None
        assert few.recall.mapped is None
        few.release()
        remember(store, ROW, [*tokens, 7, 8])
        await store.flush()
        found = await recall(store, ROW, [*tokens, 7, 8])
        assert (found.tokens, found.disk_tokens) == (102, 102)


@trio_test
async def test_what_cannot_be_mapped_is_read_and_a_miss_if_that_fails_too(tmp_path: Path) -> None:
    tokens = list(range(100))
    async with mapping_store(tmp_path, ROW) as store:
        remember(store, ROW, tokens)
        await store.flush()
        os.truncate(segment_path(tmp_path), 20_000)
        found = await store.find(tokens, "", 100)
        assert found.recall is not None
        assert found.recall.mapped is None
        assert not await store.fill(found, ROW.memory(found.recall))
        found.release()
        assert (await recall(store, ROW, tokens)).tokens == 0
        assert store._keeper is not None
        assert (await store._keeper.stat()).corrupt == 1


@trio_test
async def test_who_lets_go_unused_keeps_no_mapping(tmp_path: Path) -> None:
    tokens = list(range(100))
    async with mapping_store(tmp_path, ROW) as store:
        remember(store, ROW, tokens)
        await store.flush()
        for end in ("release", "unmap"):
            found = await store.find(tokens, "", 100)
            assert found.recall is not None
            assert found.recall.mapped is not None
            mapping = weakref.ref(found.recall.mapped._buffers[0].obj)
            getattr(found, end)()
            assert mapping() is None
            found.release()


@trio_test
async def test_a_file_is_not_evicted_before_its_row_has_left_and_serves_it_even_then(tmp_path: Path) -> None:
    tokens = list(range(100))
    async with mapping_store(tmp_path, ROW, max_bytes=64 << 10) as store:
        remember(store, ROW, tokens)
        await store.flush()
        path = segment_path(tmp_path)
        found = await store.find(tokens, "", 100)
        known = found.recall
        assert known is not None
        assert known.mapped is not None
        buffers = known.mapped.take()

        async def others(first: int) -> None:
            for number in range(first, first + 1000, 100):
                remember(store, ROW, range(number, number + 100))
                await store.flush()

        await others(1000)
        assert path.exists()
        found.release()
        await others(2000)
        assert not path.exists()
        assert content(ROW, tokens, Recall(known.tokens, known.specs, Mapped(buffers)))


def test_what_is_mapped_is_taken_once() -> None:
    mapped = Mapped((memoryview(b"ab"),))
    assert mapped.take() == (memoryview(b"ab"),)
    assert mapped.take() == ()
