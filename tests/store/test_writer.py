"""The writer: what is queued, written, dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from store.keeping import KeeperAway, Outcome
from store.presence import Presence
from tests.scheduler.trio_test import trio_test, until
from tests.store.writer_bench import Bench, Scripted, ids


@trio_test
async def test_segments_are_written_in_order_whole_and_then_known_to_be_on_disk(bench: Bench) -> None:
    root = bench.put([1, 2, 3])
    leaf = bench.put([4], root)
    async with bench.running():
        await bench.writer.wait_written()
    assert bench.keeper.committed == ids(root, leaf)
    assert leaf.kept is not None
    assert leaf.kept.path.name == f"{leaf.segment.id}.segment"
    assert (leaf.queued, leaf.buffers is not None) == (False, True)
    assert (bench.writer.counts.written_segments, bench.writer.counts.written_bytes) == (2, 64)
    bench.check()


@trio_test
async def test_a_full_queue_drops_the_oldest_that_nothing_hangs_on(bench: Bench) -> None:
    root = bench.put([1] * 10)
    leaf = bench.put([2] * 10, root)
    other = bench.put([3] * 10)
    last = bench.put([4] * 20)
    assert [entry.queued for entry in (root, leaf, other, last)] == [True, False, True, True]
    assert bench.writer.num_bytes <= 16 * 40
    async with bench.running():
        await bench.writer.wait_written()
    assert bench.keeper.committed == ids(root, other, last)
    assert bench.writer.counts.dropped == 1
    assert leaf.buffers is not None


@trio_test
async def test_what_new_segments_hang_on_is_not_dropped_for_them(bench: Bench) -> None:
    root = bench.put([1] * 30)
    leaf = bench.put([2] * 20, root)
    assert (root.queued, leaf.queued) == (True, False)
    assert bench.writer.counts.dropped == 1


@trio_test
async def test_a_dropped_parent_is_queued_again_before_its_child(bench: Bench) -> None:
    root = bench.put([1] * 30)
    bench.put([9] * 30)
    assert not root.queued
    leaf = bench.put([2] * 5, root)
    async with bench.running():
        await bench.writer.wait_written()
    assert bench.keeper.committed[-2:] == ids(root, leaf)


@trio_test
async def test_what_has_vanished_is_not_written(bench: Bench) -> None:
    entry = bench.put([1, 2])
    bench.memory.forget(entry)
    async with bench.running():
        await bench.writer.wait_written()
    assert bench.keeper.committed == []
    bench.check()


@pytest.mark.parametrize("outcome", ["bad", "full", "failed"])
@trio_test
async def test_what_the_disk_refuses_is_counted_and_stays_in_memory(
    bench: Bench, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    bench.keeper.outcomes = [outcome, outcome]
    entry, other, third = bench.put([1]), bench.put([2]), bench.put([3])
    async with bench.running():
        await bench.writer.wait_written()
    # What the disk refuses the keeper is its count.
    assert (bench.writer.counts.errors, bench.writer.counts.dropped) == (2 if outcome == "bad" else 0, 2)
    assert [found.kept is None for found in (entry, other, third)] == [True, True, False]
    assert entry.buffers is not None
    assert len(caplog.records) == 1


@trio_test
async def test_what_is_known_is_on_disk_and_was_not_written(bench: Bench) -> None:
    bench.keeper.outcomes = ["known"]
    entry = bench.put([1])
    async with bench.running():
        await bench.writer.wait_written()
    assert entry.kept is not None
    assert bench.writer.counts.written_segments == 0


@trio_test
async def test_without_room_nothing_is_written(bench: Bench) -> None:
    bench.keeper.has_room = False
    bench.put([1])
    async with bench.running():
        await bench.writer.wait_written()
    assert bench.keeper.committed == []
    assert (bench.writer.counts.errors, bench.writer.counts.dropped) == (0, 1)


@trio_test
async def test_a_folder_that_went_away_under_the_writer_is_the_keepers_trouble(tmp_path: Path) -> None:
    """And what was to be written there is written when it is back."""
    bench = Bench(Scripted(tmp_path / "gone"), queue_bytes=1000)
    entry = bench.put([1])

    def goes() -> None:
        bench.keeper.away_when_abandoned = True

    bench.keeper.on_reserve = goes
    async with bench.running():
        with pytest.raises(KeeperAway):
            await bench.writer.wait_written()
        assert (bench.writer.counts.errors, bench.writer.counts.dropped) == (0, 0)
        bench.keeper.folder.mkdir()
        await until(lambda: entry.kept is not None)


@trio_test
async def test_an_orphan_and_its_parent_are_written_once_more(bench: Bench) -> None:
    root = bench.put([1, 2])
    async with bench.running():
        await bench.writer.wait_written()
        bench.keeper.outcomes = ["orphan"]
        leaf = bench.put([3], root)
        await bench.writer.wait_written()
    assert bench.keeper.committed == ids(root, leaf, root, leaf)
    assert leaf.kept is not None
    assert bench.writer.counts.dropped == 0
    bench.check()


@trio_test
async def test_an_orphan_that_stays_one_is_given_up(bench: Bench) -> None:
    root = bench.put([1, 2])
    bench.keeper.outcomes = ["kept", "orphan", "kept", "orphan"]
    leaf = bench.put([3], root)
    async with bench.running():
        await bench.writer.wait_written()
    assert bench.keeper.committed == ids(root, leaf, root, leaf)
    assert leaf.kept is None
    assert bench.writer.counts.dropped == 1
    assert not bench.writer._orphans
    bench.check()


@trio_test
async def test_an_orphan_whose_parent_finds_no_room_is_given_up(bench: Bench) -> None:
    root = bench.put([1] * 30)
    async with bench.running():
        await bench.writer.wait_written()
        bench.keeper.outcomes = ["orphan"]
        leaf = bench.put([3] * 20, root)
        bench.writer._limit_bytes = 16 * 25
        await bench.writer.wait_written()
    assert leaf.kept is None
    assert bench.writer.counts.dropped == 1
    assert not bench.writer._orphans
    bench.check()


@trio_test
async def test_an_orphan_whose_parent_is_nowhere_vanishes(bench: Bench) -> None:
    root = bench.put([1, 2])
    async with bench.running():
        await bench.writer.wait_written()
        leaf = bench.put([3], root)
        bench.memory._evict(root)
        bench.keeper.outcomes = ["orphan"]
        await bench.writer.wait_written()
    assert leaf not in bench.memory
    assert bench.writer.counts.dropped == 1
    bench.check()


@trio_test
async def test_a_keeper_that_is_away_is_waited_for(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.keeper.away = True
    caplog.set_level("INFO")
    watched = Presence(bench.keeper)
    bench.writer._keeper = watched
    entry = bench.put([1, 2])
    async with bench.running():
        with pytest.raises(KeeperAway):
            await bench.writer.wait_written()
        await until(lambda: watched.away)
        assert watched.last.away
        assert entry.queued
        bench.keeper.away = False
        await until(lambda: entry.kept is not None)
        await bench.writer.wait_written()
    assert bench.keeper.committed == ids(entry)
    assert not watched.away
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "it goes, and comes back"


@trio_test
async def test_a_folder_that_takes_no_file_is_an_error(tmp_path: Path) -> None:
    bench = Bench(Scripted(tmp_path / "gone"), queue_bytes=1000)
    bench.put([1])
    async with bench.running():
        await bench.writer.wait_written()
    assert bench.writer.counts.errors == 1
    assert len(bench.keeper.abandoned) == 1


@trio_test
async def test_where_something_is_always_read_something_is_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.reader.MAX_WAIT_S", 0.01)
    bench.put([1, 2])
    async with bench.running():
        with bench.precedence.reading():
            await bench.writer.wait_written()
    assert len(bench.keeper.committed) == 1


@trio_test
async def test_one_that_ends_in_the_middle_leaves_no_file(bench: Bench) -> None:
    entry = bench.put([1, 2])
    async with trio.open_nursery() as nursery:
        bench.keeper.on_reserve = nursery.cancel_scope.cancel
        nursery.start_soon(bench.writer.run)
    assert len(bench.keeper.abandoned) == 1
    assert entry.queued


@trio_test
async def test_nothing_is_written_while_something_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.reader.MAX_WAIT_S", 3600.0)
    bench.put([1, 2])
    async with bench.running():
        with bench.precedence.reading():
            await until(lambda: bench.keeper.reserved == 1)
            await trio.sleep(0.05)
            assert bench.keeper.committed == []
        await bench.writer.wait_written()
    assert len(bench.keeper.committed) == 1
