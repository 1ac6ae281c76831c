"""What the writer has dropped, and memory has still."""

from __future__ import annotations

import pytest

from store.keeping import Outcome
from tests.scheduler.trio_test import trio_test
from tests.store.writer_bench import Bench, ids


@trio_test
async def test_all_is_written_where_what_was_queued_is_on_disk(bench: Bench) -> None:
    root = bench.put([1, 2, 3])
    bench.put([4], root)
    async with bench.running():
        assert await bench.writer.write_all()
        bench.keeper.outcomes = ["known"]
        bench.put([5])
        assert await bench.writer.write_all()


@pytest.mark.parametrize("outcome", ["bad", "full", "failed", None])
@trio_test
async def test_what_was_dropped_is_not_written_until_it_is_tried_again(bench: Bench, outcome: Outcome | None) -> None:
    """None: no place is given for it."""
    root = bench.put([1, 2, 3])
    leaf = bench.put([4], root)
    bench.keeper.outcomes = [outcome] * 9 if outcome is not None else []
    bench.keeper.has_room = outcome is not None
    async with bench.running():
        for _ in range(2):
            assert not await bench.writer.write_all()
            bench.check()
        assert bench.writer.counts.dropped == 2, "each once"
        bench.keeper.outcomes, bench.keeper.has_room = [], True
        assert await bench.writer.write_all()
    assert bench.keeper.committed[-2:] == ids(root, leaf)
    assert [entry.dropped for entry in (root, leaf)] == [False, False]
    bench.check()


@trio_test
async def test_where_memory_has_nothing_of_what_was_refused_not_all_is_written(bench: Bench) -> None:
    bench.keeper.has_room = False
    async with bench.running():
        entry = bench.put([3])
        await bench.writer.wait_written()
        bench.memory.forget(entry)
        assert not await bench.writer.write_all()
        bench.keeper.has_room = True
        bench.put([4])
        assert await bench.writer.write_all()


@trio_test
async def test_all_that_memory_has_is_written_through_a_small_queue(bench: Bench) -> None:
    root = bench.put([1] * 20)
    entries = [root, *(bench.put([2 + num] * 20, root) for num in range(3))]
    huge = bench.put([9] * 41)
    assert bench.writer.num_bytes <= 16 * 40
    async with bench.running():
        assert await bench.writer.write_all()
        assert all(entry.kept is not None for entry in (*entries, huge))
    bench.check()


@trio_test
async def test_what_is_queued_again_takes_nobodys_place_and_comes_after_what_it_hangs_on(bench: Bench) -> None:
    root = bench.put([1] * 10)
    leaf = bench.put([2] * 10, root)
    new = bench.put([3] * 40)
    assert [entry.queued for entry in (root, leaf, new)] == [False, False, True]
    bench.writer.put_again(bench.memory.unwritten())
    assert [entry.queued for entry in (root, leaf, new)] == [False, False, True]
    async with bench.running():
        await bench.writer.wait_written()
        bench.writer.put_again(bench.memory.unwritten())
        await bench.writer.wait_written()
    assert bench.keeper.committed == ids(new, root, leaf)
    assert not bench.memory.unwritten()


@trio_test
async def test_the_smallest_is_queued_again_where_nothing_was_written_since_and_not_often(
    bench: Bench,
) -> None:
    bench.keeper.has_room = False
    entries = [bench.put([num] * size) for num, size in enumerate((3, 1, 2))]
    async with bench.running():
        await bench.writer.wait_written()
        bench.writer.put_again(bench.memory.unwritten())
        assert [entry.queued for entry in entries] == [False, True, False]
        await bench.writer.wait_written()
        bench.writer.put_again(bench.memory.unwritten())
        assert not any(entry.queued for entry in entries)
        bench.writer._probe_s = 0.0
        bench.keeper.has_room = True
        bench.writer.put_again(bench.memory.unwritten())
        await bench.writer.wait_written()
        bench.writer.put_again(bench.memory.unwritten())
        assert [entry.queued for entry in entries] == [True, False, True]
        await bench.writer.wait_written()
    assert bench.writer.counts.dropped == 3
