"""The store in memory alone; with a disk below it, see test_server.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from store.settings import StoreSettings
from store.store import Found, Store, open_store
from tests.scheduler.trio_test import trio_test
from tests.store.rows import Row

MIB = 1 << 20
ANYWHERE = Row(cut_anywhere=True)
BOUNDARIES = Row(cut_anywhere=False)
BOTH = pytest.mark.parametrize("row", [ANYWHERE, BOUNDARIES], ids=["anywhere", "boundaries"])


@asynccontextmanager
async def store_of(row: Row, **settings: Any) -> AsyncIterator[Store]:
    chosen = {"fingerprint": "model-1", "memory_bytes": MIB, "queue_bytes": MIB, **settings}
    async with open_store(StoreSettings(cut_anywhere=row.cut_anywhere, **chosen), None) as store:
        yield store
        store.check()


def remember(store: Store, row: Row, tokens: Sequence[int], boundaries: Sequence[int] = (), namespace: str = "") -> int:
    """What a row of these tokens leaves; returns how many of them were new."""
    draft = store.draft(tokens, namespace)
    if draft is None:
        return 0
    inside = [at for at in boundaries if draft.start < at <= draft.stop]
    store.remember(draft, row.part(tokens, draft.start, inside))
    return draft.stop - draft.start


async def recall(store: Store, row: Row, tokens: Sequence[int], limit: int | None = None, namespace: str = "") -> Found:
    """What is found, read, and seen to be right."""
    found = await store.find(tokens, namespace, len(tokens) if limit is None else limit)
    assert (found.recall is None) == (found.tokens == 0)
    if found.recall is not None:
        memory = row.memory(found.recall)
        assert await store.fill(found, memory)
        assert row.is_right(tokens[: found.tokens], memory)
        assert found.memory_tokens + found.disk_tokens == found.tokens
    found.release()
    return found


@BOTH
@trio_test
async def test_what_was_remembered_is_found_and_read(row: Row) -> None:
    tokens = list(range(100))
    async with store_of(row) as store:
        assert (await recall(store, row, tokens)).tokens == 0
        assert remember(store, row, tokens) == 100
        found = await recall(store, row, [*tokens, 7, 8])
        assert (found.tokens, found.matched, found.memory_tokens) == (100, 100, 100)
        assert store.stats().memory_restored_bytes > 0
        assert store.read_rate().disk is None


@trio_test
async def test_a_row_without_boundaries_is_cut_anywhere_and_no_longer_than_asked() -> None:
    async with store_of(ANYWHERE) as store:
        remember(store, ANYWHERE, range(100))
        assert (await recall(store, ANYWHERE, [*range(50), 0])).tokens == 50
        assert (await recall(store, ANYWHERE, range(100), limit=99)).tokens == 99
        assert (await recall(store, ANYWHERE, [0])).tokens == 1


@trio_test
async def test_a_row_with_boundaries_is_taken_up_there_only() -> None:
    async with store_of(BOUNDARIES) as store:
        remember(store, BOUNDARIES, range(100), boundaries=[40, 60])
        found = await recall(store, BOUNDARIES, [*range(50), 0])
        assert (found.tokens, found.matched) == (40, 50)
        assert (await recall(store, BOUNDARIES, range(100), limit=99)).tokens == 60
        assert (await recall(store, BOUNDARIES, range(30))).tokens == 0


@BOTH
@trio_test
async def test_a_conversation_adds_only_what_is_new(row: Row) -> None:
    tokens: list[int] = []
    async with store_of(row) as store:
        for turn in range(5):
            tokens += [turn * 1000 + at for at in range(20)]
            assert remember(store, row, tokens) == 20
            assert store.draft(tokens, "") is None
            assert (await recall(store, row, tokens)).tokens == len(tokens)
        assert store.stats().memory_segments == 5


@trio_test
async def test_branches_share_their_trunk() -> None:
    async with store_of(ANYWHERE) as store:
        assert remember(store, ANYWHERE, range(100)) == 100
        assert remember(store, ANYWHERE, [*range(70), *[1] * 10]) == 10
        assert (await recall(store, ANYWHERE, [*range(70), *[1] * 10])).tokens == 80
        assert (await recall(store, ANYWHERE, range(100))).tokens == 100


@trio_test
async def test_a_branch_with_boundaries_begins_at_the_last_one_that_both_have() -> None:
    async with store_of(BOUNDARIES) as store:
        remember(store, BOUNDARIES, range(100), boundaries=[40])
        branch = [*range(70), *[1] * 10]
        assert remember(store, BOUNDARIES, branch, boundaries=[70]) == 40
        assert (await recall(store, BOUNDARIES, [*range(70), 9])).tokens == 70
        assert (await recall(store, BOUNDARIES, branch)).tokens == 80


@BOTH
@trio_test
async def test_rows_frozen_at_once_keep_their_common_beginning_once(row: Row) -> None:
    rows = [[*range(50), *[100 + client] * 10] for client in range(8)]
    async with store_of(row) as store:
        drafts = [store.draft(tokens, "") for tokens in rows]
        for tokens, draft in zip(rows, drafts, strict=True):
            assert draft is not None
            store.remember(draft, row.part(tokens, draft.start, [50]))
        tokens_bytes = store.stats().memory_bytes / row.part(rows[0], 0, [50]).nbytes
        assert tokens_bytes < (3 if row.cut_anywhere else 4)
        for tokens in rows:
            assert (await recall(store, row, tokens)).tokens == 60


@trio_test
async def test_the_same_row_frozen_twice_at_once_is_kept_once() -> None:
    async with store_of(ANYWHERE) as store:
        first, second = store.draft(range(10), ""), store.draft(range(10), "")
        assert first is not None
        assert second is not None
        store.remember(first, ANYWHERE.part(range(10)))
        store.remember(second, ANYWHERE.part(range(10)))
        assert store.stats().memory_segments == 1
        assert store.stats().dropped == 0


@trio_test
async def test_other_namespaces_and_models_find_nothing() -> None:
    async with store_of(ANYWHERE) as store:
        remember(store, ANYWHERE, range(10), namespace="alice")
        assert (await recall(store, ANYWHERE, range(10), namespace="alice")).tokens == 10
        assert (await recall(store, ANYWHERE, range(10), namespace="bob")).tokens == 0
        assert (await recall(store, ANYWHERE, range(10))).tokens == 0


@trio_test
async def test_a_full_memory_gives_up_what_was_used_least_and_suffixes_first() -> None:
    size = ANYWHERE.part(range(10)).nbytes
    async with store_of(ANYWHERE, memory_bytes=3 * size) as store:
        remember(store, ANYWHERE, range(10))
        remember(store, ANYWHERE, range(20))
        remember(store, ANYWHERE, [9] * 10)
        assert (await recall(store, ANYWHERE, range(20))).tokens == 20
        remember(store, ANYWHERE, [8] * 10)
        assert (await recall(store, ANYWHERE, [9] * 10)).tokens == 0
        remember(store, ANYWHERE, [7] * 10)
        assert (await recall(store, ANYWHERE, range(20))).tokens == 10
        assert store.stats().evicted == 2
        assert store.stats().memory_bytes == 3 * size


@trio_test
async def test_what_is_in_use_is_not_given_up_and_what_cannot_fit_evicts_nothing() -> None:
    size = ANYWHERE.part(range(10)).nbytes
    async with store_of(ANYWHERE, memory_bytes=2 * size) as store:
        remember(store, ANYWHERE, range(10))
        found = await store.find(range(10), "", 10)
        remember(store, ANYWHERE, [9] * 10)
        remember(store, ANYWHERE, [8] * 11)
        assert (await recall(store, ANYWHERE, [9] * 10)).tokens == 10
        assert store.stats().dropped == 1
        remember(store, ANYWHERE, [7] * 10)
        assert (await recall(store, ANYWHERE, [9] * 10)).tokens == 0
        assert found.recall is not None
        memory = ANYWHERE.memory(found.recall)
        assert await store.fill(found, memory)
        assert ANYWHERE.is_right(range(10), memory)
        found.release()
        found.release()


@trio_test
async def test_without_memory_or_a_keeper_nothing_is_kept() -> None:
    async with store_of(ANYWHERE, memory_bytes=0) as store:
        assert not store.holds_memory
        remember(store, ANYWHERE, range(10))
        assert (await recall(store, ANYWHERE, range(10))).tokens == 0
        assert store.stats().dropped == 1
        await store.flush()


@trio_test
async def test_a_draft_that_comes_to_nothing_leaves_nothing() -> None:
    async with store_of(ANYWHERE) as store:
        remember(store, ANYWHERE, range(10))
        draft = store.draft(range(20), "")
        assert draft is not None
        assert (draft.start, draft.stop) == (10, 20)
        with pytest.raises(AssertionError, match="still held"):
            store.check()
        draft.drop()
        draft.drop()
        assert len(store._memory) == 1


@trio_test
async def test_many_read_the_same_at_once() -> None:
    tokens = range(200)
    async with store_of(ANYWHERE) as store:
        remember(store, ANYWHERE, tokens)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(recall, store, ANYWHERE, tokens)


@trio_test
async def test_a_part_that_lacks_what_it_should_hold_is_no_answer() -> None:
    async with store_of(BOUNDARIES) as store:
        draft = store.draft(range(20), "")
        assert draft is not None
        part = BOUNDARIES.part(range(20))
        lacking = type(part)(0, 20, part.boundaries, part.tensors[:2], part.buffers[:2])
        store.remember(draft, lacking)
        found = await store.find(range(20), "", 20)
        whole = BOUNDARIES.memory(type(found.recall)(20, part.tensors)) if found.recall else ()
        assert not await store.fill(found, whole)
        found.release()
        assert (await recall(store, BOUNDARIES, range(20))).tokens == 0
        assert store.stats().corrupt == 1


rows_left = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.sets(st.integers(1, 12)), st.booleans()),
    max_size=12,
)


@given(left=rows_left, cut_anywhere=st.booleans(), memory=st.sampled_from([200, 600, MIB]))
def test_whatever_is_remembered_what_is_found_is_right(
    left: list[tuple[list[int], set[int], bool]], cut_anywhere: bool, memory: int
) -> None:
    row = Row(cut_anywhere=cut_anywhere, window=3, sink=1)
    known: list[tuple[list[int], set[int]]] = []

    def best(tokens: list[int]) -> int:
        counts = [0]
        for other, bounds in known:
            same = next((at for at, pair in enumerate(zip(other, tokens, strict=False)) if pair[0] != pair[1]), None)
            same = min(len(other), len(tokens)) if same is None else same
            counts += [same] if cut_anywhere else [at for at in bounds if at <= same]
        return max(counts)

    async def main() -> None:
        async with store_of(row, memory_bytes=memory) as store:
            for tokens, bounds, is_asked in left:
                found = await recall(store, row, tokens)
                assert found.tokens <= best(tokens)
                if memory == MIB:
                    assert found.tokens == best(tokens)
                if not is_asked:
                    inside = {at for at in bounds if at < len(tokens)}
                    start = len(tokens) - remember(store, row, tokens, sorted(inside))
                    known.append((tokens, {at for at in (*inside, len(tokens)) if at > start}))
                store.check()

    trio.run(main)
