"""The store above a disk: the same, whether the keeper is in this process or behind a socket."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from store.files import disk_bytes
from store.keeping import KeeperStats
from store.remote import open_remote
from store.settings import StoreSettings
from store.store import Store, open_store
from tests.scheduler.trio_test import trio_test, until
from tests.store.keepers import FINGERPRINT, keeper_of
from tests.store.rows import Row
from tests.store.test_store import ANYWHERE, BOUNDARIES, MIB, recall, remember

BOTH = pytest.mark.parametrize("row", [ANYWHERE, BOUNDARIES], ids=["anywhere", "boundaries"])
KINDS = pytest.mark.parametrize("kind", ["embedded", "remote"])


@asynccontextmanager
async def store_on(
    kind: str, folder: Path, row: Row = ANYWHERE, max_bytes: int | None = None, **settings: Any
) -> AsyncIterator[Store]:
    """In memory nothing stays that is on disk, unless said otherwise."""
    chosen = {"fingerprint": FINGERPRINT, "memory_bytes": 0, "queue_bytes": MIB, **settings}
    async with (
        keeper_of(kind, folder, max_bytes) as keeper,
        open_store(StoreSettings(cut_anywhere=row.cut_anywhere, **chosen), keeper) as store,
    ):
        yield store
        store.check()


@KINDS
@BOTH
@trio_test
async def test_what_is_on_disk_is_found_and_read_after_a_restart(kind: str, row: Row, tmp_path: Path) -> None:
    folder, tokens = tmp_path / "store", list(range(100))
    async with store_on(kind, folder, row) as store:
        remember(store, row, tokens[:60], boundaries=[40])
        remember(store, row, tokens)
        await store.flush()
        assert store.stats().written_segments == 2
        assert len(store._memory) == 0
    async with store_on(kind, folder, row) as store:
        found = await recall(store, row, [*tokens, 7])
        assert (found.tokens, found.matched, found.memory_tokens, found.disk_tokens) == (100, 100, 0, 100)
        assert store.stats().disk_restored_bytes >= 100 * 16
        shorter = await recall(store, row, [*tokens[:50], 0, 0])
        assert shorter.tokens == (50 if row.cut_anywhere else 40)
        assert len(store._memory) == 0


@KINDS
@BOTH
@trio_test
async def test_a_conversation_goes_on_after_a_restart_and_adds_only_what_is_new(
    kind: str, row: Row, tmp_path: Path
) -> None:
    folder, tokens = tmp_path / "store", list(range(30))
    async with store_on(kind, folder, row) as store:
        remember(store, row, tokens)
        await store.flush()
    for turn in range(3):
        async with store_on(kind, folder, row) as store:
            found = await store.find(tokens, "", len(tokens))
            assert found.tokens == len(tokens)
            tokens += [turn * 100 + at for at in range(10)]
            assert remember(store, row, tokens) == 10
            found.release()
            await store.flush()
            assert store.stats().written_segments == 1


@KINDS
@BOTH
@trio_test
async def test_branches_share_their_trunk_on_disk(kind: str, row: Row, tmp_path: Path) -> None:
    folder, trunk, at = tmp_path / "store", list(range(20_000)), 15_000
    branches = [[*trunk[:at], *[branch] * 10] for branch in range(4)]
    async with store_on(kind, folder, row) as store:
        assert remember(store, row, trunk, boundaries=[at]) == len(trunk)
        await store.flush()
        trunk_bytes = store.stats().written_bytes
        (trunk_file,) = folder.rglob("*.segment")
        for tokens in branches:
            found = await store.find(tokens, "", len(tokens))
            assert (found.tokens, found.disk_tokens) == (at, at)
            assert remember(store, row, tokens) == 10
            found.release()
            await store.flush()
        # Ten columns each, and where a row is taken up at boundaries a ring and a state at the end.
        assert store.stats().written_bytes - trunk_bytes <= len(branches) * (10 + 10) * 16
    sizes = {path: disk_bytes(path.stat()) for path in folder.rglob("*.segment")}
    assert len(sizes) == 1 + len(branches)
    assert all(size < sizes[trunk_file] / 3 for path, size in sizes.items() if path != trunk_file)
    async with store_on(kind, folder, row) as store:
        for tokens in (trunk, *branches):
            assert (await recall(store, row, tokens)).disk_tokens == len(tokens)


@KINDS
@trio_test
async def test_what_is_read_twice_comes_from_memory_where_there_is_room(kind: str, tmp_path: Path) -> None:
    async with store_on(kind, tmp_path / "store", memory_bytes=MIB) as store:
        remember(store, ANYWHERE, range(50))
        await store.flush()
        assert (await recall(store, ANYWHERE, range(50))).memory_tokens == 50
        store._memory.demote(float("inf"))
        assert (await recall(store, ANYWHERE, range(50))).disk_tokens == 50
        found = await store.find(range(50), "", 50)
        assert remember(store, ANYWHERE, range(80)) == 30
        found.release()
        mixed = await recall(store, ANYWHERE, range(80))
        assert (mixed.disk_tokens, mixed.memory_tokens) == (50, 30)


@KINDS
@trio_test
async def test_what_waits_to_be_written_is_found(kind: str, tmp_path: Path) -> None:
    async with store_on(kind, tmp_path / "store") as store:
        remember(store, ANYWHERE, range(50))
        assert (await recall(store, ANYWHERE, range(50))).memory_tokens == 50
        await store.flush()
        assert (await recall(store, ANYWHERE, range(50))).disk_tokens == 50


async def disk_of(store: Store) -> KeeperStats:
    assert store._keeper is not None
    return await store._keeper.stat()


def damage(folder: Path, offset: int) -> None:
    """Change a byte of the one segment there is; a negative offset counts from the end."""
    (path,) = folder.rglob("*.segment")
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@KINDS
@trio_test
async def test_a_damaged_file_is_a_miss_then_gone_and_kept_anew(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with store_on(kind, folder, verify=True) as store:
        remember(store, ANYWHERE, range(50))
        await store.flush()
        found = await store.find(range(50), "", 50)
        damage(folder, -1)
        assert found.recall is not None
        assert not await store.fill(found, ANYWHERE.memory(found.recall))
        found.release()
        assert (store.stats().corrupt, (await disk_of(store)).corrupt) == (0, 1)
        assert (await recall(store, ANYWHERE, range(50))).tokens == 0
        assert list(folder.rglob("*.segment")) == []
        assert remember(store, ANYWHERE, range(50)) == 50
        await store.flush()
        assert (await recall(store, ANYWHERE, range(50))).disk_tokens == 50


@KINDS
@pytest.mark.parametrize("what", ["cut", "gone", "header"])
@trio_test
async def test_a_file_that_is_cut_gone_or_has_a_damaged_header_is_a_miss(kind: str, what: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with store_on(kind, folder) as store:
        remember(store, ANYWHERE, range(50))
        remember(store, ANYWHERE, range(80))
        await store.flush()
        found = await store.find(range(80), "", 80)
        path = found._chain[0].kept.path  # type: ignore[union-attr]
        if what == "gone":
            path.unlink()
        elif what == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            path.write_bytes(path.read_bytes().replace(b"model-1", b"model-2"))
        assert found.recall is not None
        assert not await store.fill(found, ANYWHERE.memory(found.recall))
        assert (await recall(store, ANYWHERE, range(80))).tokens == 0
        found.release()
        assert (store.stats().corrupt, (await disk_of(store)).corrupt) == (0, what != "gone")


@KINDS
@trio_test
async def test_a_disk_that_is_too_small_keeps_the_rest_right(kind: str, tmp_path: Path) -> None:
    random.seed(0)
    rows = [[client, *range(60)] for client in range(12)]
    async with store_on(kind, tmp_path / "store", max_bytes=200_000) as store:
        for _ in range(40):
            tokens = random.choice(rows)[: random.randint(1, 61)]
            await recall(store, ANYWHERE, tokens)
            remember(store, ANYWHERE, tokens)
            await store.flush()
        assert store.stats().written_segments > 12
        assert store.stats().corrupt == 0


@KINDS
@trio_test
async def test_a_parent_that_the_disk_has_given_up_is_written_once_more(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with store_on(kind, folder, memory_bytes=MIB) as store:
        remember(store, ANYWHERE, range(50))
        await store.flush()
        assert store._keeper is not None
        (path,) = folder.rglob("*.segment")
        await store._keeper.condemn(path.stem)
        remember(store, ANYWHERE, range(80))
        await store.flush()
        assert store.stats().written_segments == 3
    async with store_on(kind, folder) as store:
        assert (await recall(store, ANYWHERE, range(80))).disk_tokens == 80


@KINDS
@trio_test
async def test_a_row_larger_than_what_may_wait_is_written_where_it_waits_alone(kind: str, tmp_path: Path) -> None:
    """And so is what hangs on it."""
    async with store_on(kind, tmp_path / "store", memory_bytes=MIB, queue_bytes=1000) as store:
        remember(store, ANYWHERE, range(500))
        remember(store, ANYWHERE, range(510))
        assert store.stats().dropped == 1, "the second hangs on the first, which is in the way"
        assert await store.flush()
        remember(store, ANYWHERE, range(520))
        assert await store.flush()
        assert store.stats().queue_bytes == 0
    async with store_on(kind, tmp_path / "store") as store:
        assert (await recall(store, ANYWHERE, range(520))).disk_tokens == 520


@KINDS
@trio_test
async def test_idle_segments_leave_memory_once_they_are_on_disk(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.store.TIDY_EVERY_S", 0.01)
    async with store_on(kind, tmp_path / "store", memory_bytes=MIB, demote_idle_s=0.02) as store:
        remember(store, ANYWHERE, range(50))
        await store.flush()
        await until(lambda: store.stats().memory_segments == 0)
        assert (await recall(store, ANYWHERE, range(50))).disk_tokens == 50
        await until(lambda: store.stats().disk is not None and store.stats().disk.segments == 1)  # type: ignore[union-attr]


@KINDS
@trio_test
async def test_idle_segments_that_were_not_written_are_written_and_leave_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.store.TIDY_EVERY_S", 0.01)
    async with store_on(kind, tmp_path / "store", memory_bytes=MIB, demote_idle_s=0.02, queue_bytes=30 * 16) as store:
        remember(store, ANYWHERE, range(20))
        remember(store, ANYWHERE, range(40))
        remember(store, ANYWHERE, [9] * 30)
        assert store.stats().dropped >= 1
        await until(lambda: store.stats().memory_segments == 0)
        assert (await recall(store, ANYWHERE, range(40))).disk_tokens == 40
        assert (await recall(store, ANYWHERE, [9] * 30)).disk_tokens == 30


@KINDS
@trio_test
async def test_a_flush_writes_what_could_not_wait_to_be_written(kind: str, tmp_path: Path) -> None:
    async with store_on(kind, tmp_path / "store", memory_bytes=MIB, queue_bytes=30 * 16) as store:
        for tokens in (range(20), range(40), [9] * 30):
            remember(store, ANYWHERE, tokens)
        assert store.stats().dropped >= 1
        assert await store.flush()
        assert store.stats().written_segments == 3
        assert store.stats().memory_segments == 3
        assert await store.flush()
        assert store.stats().written_segments == 3


@KINDS
@trio_test
async def test_what_there_was_no_room_for_in_time_is_told(kind: str, tmp_path: Path) -> None:
    """Neither in memory nor in the queue: it is gone, whatever is written after it."""
    async with store_on(kind, tmp_path / "store", memory_bytes=0, queue_bytes=30 * 16) as store:
        for tokens in ([1] * 20, [2] * 20, [3] * 20):
            remember(store, ANYWHERE, tokens)
        await store.flush()
        assert store.stats().written_segments + store.num_given_up == 3
        assert store.num_given_up >= 1
        before = store.num_given_up
        remember(store, ANYWHERE, [4] * 20)
        assert await store.flush()
        assert store.num_given_up == before


@trio_test
async def test_who_only_reads_drops_nothing_and_has_nothing_on_disk(tmp_path: Path) -> None:
    async with store_on("embedded", tmp_path / "store") as store:
        remember(store, ANYWHERE, range(50))
        assert await store.flush()
    for memory_bytes in (0, MIB):
        async with store_on("embedded", tmp_path / "store", memory_bytes=memory_bytes, read_only=True) as store:
            assert (await recall(store, ANYWHERE, range(50))).disk_tokens == 50
            remember(store, ANYWHERE, [9] * 50)
            assert (await recall(store, ANYWHERE, [9] * 50)).memory_tokens == (50 if memory_bytes else 0)
            assert not store.is_kept
            assert not await store.flush()
            stats = store.stats()
            assert (stats.dropped, stats.errors, stats.written_segments) == (0, 0, 0)


@KINDS
@trio_test
async def test_what_is_in_use_is_found_without_asking_anybody(kind: str, tmp_path: Path) -> None:
    async with store_on(kind, tmp_path / "store") as store:
        remember(store, ANYWHERE, range(50))
        await store.flush()
        assert store.find_now(range(50), "", 50).tokens == 0
        found = await store.find(range(50), "", 50)
        now = store.find_now(range(50), "", 40)
        assert (now.tokens, now.disk_tokens) == (40, 40)
        now.release()
        found.release()


@KINDS
@BOTH
@trio_test
async def test_whatever_many_do_at_once_and_over_restarts_what_is_read_is_right(
    kind: str, row: Row, tmp_path: Path
) -> None:
    """Clients of two daemons (one, where the folder is its own) with little room, in memory and on disk."""
    random.seed(7)
    folder, most = tmp_path / "store", 48
    stems = [[stem] * random.randint(1, 20) for stem in range(4)]

    async def client(store: Store, rounds: int) -> None:
        for _ in range(rounds):
            tokens = [*random.choice(stems), *(random.randint(0, 1) for _ in range(random.randint(0, most - 20)))]
            found = await store.find(tokens, "", random.randint(0, len(tokens)))
            whole = False
            if found.recall is not None:
                memory = row.memory(found.recall)
                whole = await store.fill(found, memory)
                assert not whole or row.is_right(tokens[: found.tokens], memory)
            await trio.sleep(random.choice([0, 0, 0.001]))
            remember(store, row, tokens, random.sample(range(most), 3))
            found.release()
            if random.random() < 0.1:
                await store.flush()
            store._memory.check()

    def settings() -> StoreSettings:
        return StoreSettings(FINGERPRINT, 3000, 4000, None, random.random() < 0.5, row.cut_anywhere)

    hits = 0
    for _ in range(3):
        async with AsyncExitStack() as stack:
            keeper = await stack.enter_async_context(keeper_of(kind, folder, max_bytes=400_000))
            keepers = [keeper]
            if kind == "remote":
                socket = folder.with_suffix(".sock")
                keepers.append(await stack.enter_async_context(open_remote(socket, FINGERPRINT)))
            stores = [await stack.enter_async_context(open_store(settings(), keeper)) for keeper in keepers]
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(client, stores[number % len(stores)], 15)
            for store in stores:
                await store.flush()
                store.check()
                assert store.stats().corrupt == 0
                hits += store.stats().disk_restored_bytes
    assert hits > 0
