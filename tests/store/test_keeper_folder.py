"""What may lie in a kept folder, who may open it, and what becomes of files that go bad."""

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import trio

from store.files import disk_bytes
from store.format import aligned, encode, layout
from store.keeper import FolderUnavailable, KeeperSettings, open_keeper
from store.keeping import KeeperAway
from store.names import new_temporary, segment_path
from tests.scheduler.trio_test import trio_test, until
from tests.store.keeping import files_in, found, keep, on_disk, opened, reserved
from tests.store.segments import FINGERPRINT, ROOT, save, with_tensors

MINE = frozenset([FINGERPRINT])


@trio_test
async def test_a_start_reaps_what_is_ours_and_serves_nobody_and_nothing_else(tmp_path: Path) -> None:
    trunk, branch = with_tensors(range(10)), with_tensors([1], with_tensors(range(10)))
    leaf, other = with_tensors([2], branch), with_tensors([3])
    async with opened(tmp_path) as keeper:
        for each in (trunk, branch, leaf, other):
            assert await keep(keeper, each) == "kept"
    segment_path(tmp_path, branch.id).unlink()
    path = segment_path(tmp_path, other.id)
    path.write_bytes(path.read_bytes()[:-1])
    save(new_temporary(tmp_path), with_tensors([4]))
    (tmp_path / "digests.json.writing").touch()
    ours = ["laned.lock", "digests.json"]
    strange = [
        "notes.txt",
        "0123.writing",
        "ab/0.segment",
        "zz/" + "0" * 32 + ".segment",
        "ab/" + "c" * 32 + ".segment",
    ]
    for name in [*strange, "ab/deep/file", ours[1]]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(5000))
    (tmp_path / "ab" / ("a" * 32 + ".segment")).symlink_to(tmp_path / "notes.txt")
    async with opened(tmp_path) as keeper:
        assert await found(keeper, [3]) == ()
        assert [kept.segment for kept in await found(keeper, [*range(10), 1, 2])] == [trunk]
        stats = await keeper.stat()
        assert (stats.segments, stats.corrupt) == (1, 1)
        assert stats.bytes == on_disk(tmp_path, trunk) + 8192
        assert keeper._shelf.budget.other_bytes >= 6 * 8192
    assert segment_path(tmp_path, trunk.id).exists()
    assert not any(segment_path(tmp_path, each.id).exists() for each in (branch, leaf, other))
    assert not (tmp_path / "digests.json.writing").exists()
    assert all((tmp_path / name).exists() for name in [*strange, *ours])


@trio_test
async def test_a_folder_has_one_keeper_and_any_number_of_readers(tmp_path: Path) -> None:
    kept = with_tensors([1])
    async with opened(tmp_path) as keeper:
        await keep(keeper, kept)
        with pytest.raises(FolderUnavailable, match="another laned keeps"):
            async with open_keeper(KeeperSettings(tmp_path)):
                pass
        async with opened(tmp_path, read_only=True) as reader, opened(tmp_path, read_only=True):
            assert [each.segment for each in await found(reader, [1])] == [kept]
            assert await reader.reserve(1) is None
            temporary = await reserved(keeper, with_tensors([2]))
            assert temporary is not None
            assert await reader.commit(temporary) == "failed"
            await reader.abandon(temporary)
            assert await keeper.commit(temporary) == "kept"
            await keeper.condemn(kept.id)
            reader._shelf._recent.clear()
            assert await found(reader, [1]) == ()
    async with opened(tmp_path):
        pass


@trio_test
async def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for settings in (KeeperSettings(tmp_path / "file"), KeeperSettings(tmp_path / "none", read_only=True)):
        with pytest.raises(FolderUnavailable, match=str(settings.folder)):
            async with open_keeper(settings):
                pass


@trio_test
async def test_a_file_that_went_bad_or_away_is_a_miss_with_all_that_hangs_on_it(tmp_path: Path) -> None:
    trunk, side = with_tensors(range(10)), with_tensors([50], with_tensors(range(10)), 5)
    middle = with_tensors([11], trunk)
    leaf = with_tensors([12], middle)
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"laned")):
        async with opened(tmp_path) as keeper:
            for each in (trunk, side, middle, leaf):
                await keep(keeper, each)
            keeper._shelf._recent.clear()
            spoil(segment_path(tmp_path, middle.id))
            assert [kept.segment for kept in await found(keeper, [*range(10), 11, 12])] == [trunk]
            assert files_in(tmp_path) == {f"{trunk.id}.segment", f"{side.id}.segment"}
    async with opened(tmp_path) as keeper:
        chain = await keeper.find(ROOT, [*range(5), 50], 6)
        await keeper.condemn(trunk.id)
        await keeper.condemn(trunk.id)
        await keeper.release(chain.pin)
        assert files_in(tmp_path) == set()
        # The reader did not like it; it was whole.
        assert (await keeper.stat()).corrupt == 0
        assert await keep(keeper, trunk) == "kept"


@pytest.mark.parametrize(
    ("spoil", "num_corrupt"),
    [(os.unlink, 0), (lambda path: flip_last_bit(path), 1), (lambda path: path.write_bytes(b"laned"), 1)],
    ids=["gone", "damaged", "no segment"],
)
@trio_test
async def test_what_a_reader_condemns_counts_once_if_it_is_damaged(
    spoil: Callable[[Path], None], num_corrupt: int, tmp_path: Path
) -> None:
    kept = with_tensors([1] * 50)
    async with opened(tmp_path) as keeper:
        await keep(keeper, kept)
        spoil(segment_path(tmp_path, kept.id))
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(keeper.condemn, kept.id)
        assert ((await keeper.stat()).corrupt, (await keeper.stat()).errors) == (num_corrupt, 0)
        assert await found(keeper, [1] * 50) == ()
        assert files_in(tmp_path) == set()


@trio_test
async def test_damage_is_found_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.keeper.ROUND_S", 0.01)
    good, bad = with_tensors([1] * 50), with_tensors([2] * 50)
    async with opened(tmp_path, scrub_every_s=0.0) as keeper:
        await keep(keeper, good)
        await keep(keeper, bad)
        flip_last_bit(segment_path(tmp_path, bad.id))
        await until(lambda: keeper._num_corrupt == 1)
        assert files_in(tmp_path) == {f"{good.id}.segment"}
        assert await found(keeper, [1] * 50) != ()


@trio_test
async def test_a_sparse_leftover_of_another_model_is_neither_read_nor_in_the_way(tmp_path: Path) -> None:
    """10 GB long; it takes as much of the budget as of the disk, and goes before anything of ours."""
    huge = with_tensors(range(20_000), layers=8, dim=16384, fingerprint="model-2")
    assert huge.nbytes > 10e9
    path = segment_path(tmp_path, huge.id)
    path.parent.mkdir()
    head = encode(huge, ["0" * 16] * len(huge.tensors))
    path.write_bytes(head)
    os.truncate(path, aligned(len(head)) + layout(huge.tensors)[1])
    mine = with_tensors([1])
    with trio.fail_after(20):
        async with opened(tmp_path, fingerprints=MINE) as keeper:
            await keep(keeper, mine)
            assert [kept.segment.nbytes for kept in await found(keeper, range(20_000), root=huge.root)] == [huge.nbytes]
            stats = await keeper.stat()
            assert stats.foreign_bytes == disk_bytes(path.stat()) < 1 << 20
        async with opened(tmp_path, fingerprints=MINE, max_bytes=on_disk(tmp_path, mine)) as keeper:
            assert await found(keeper, [1]) != ()
    assert files_in(tmp_path) == {f"{mine.id}.segment"}


@trio_test
async def test_a_folder_for_segments_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    first = with_tensors([1])
    async with opened(tmp_path) as keeper:
        await keep(keeper, first)
        inner = segment_path(tmp_path, first.id).parent
        other = next(each for num in count(2) if (each := with_tensors([num])).id[:2] == inner.name)
        shutil.rmtree(inner)
        assert await keep(keeper, other) == "kept"
        assert [kept.segment for kept in await found(keeper, other.tokens)] == [other]


@trio_test
async def test_a_segment_whose_file_is_gone_is_written_when_it_comes_again(tmp_path: Path) -> None:
    trunk, leaf = with_tensors(range(10)), with_tensors([11], with_tensors(range(10)))
    async with opened(tmp_path) as keeper:
        for each in (trunk, leaf):
            await keep(keeper, each)
        segment_path(tmp_path, trunk.id).unlink()
        for each in (trunk, leaf):
            assert await keep(keeper, each) == "kept"
            assert await keep(keeper, each) == "known"
        assert files_in(tmp_path) == {f"{trunk.id}.segment", f"{leaf.id}.segment"}


@trio_test
async def test_a_folder_whose_files_were_all_deleted_is_begun_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as keeper:
        await keep(keeper, with_tensors([1]))
        delete_all_in(tmp_path)
        with pytest.raises(KeeperAway, match=r"laned\.lock is gone"):
            await keeper.reserve(1)
        assert await keep(keeper, with_tensors([1])) == "kept"
        assert (await keeper.stat()).segments == 1
        with pytest.raises(FolderUnavailable, match="another laned keeps"):
            async with open_keeper(KeeperSettings(tmp_path)):
                pass


@trio_test
async def test_who_has_lost_the_lock_to_another_keeper_is_away_until_that_one_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as keeper:
        await keep(keeper, with_tensors([1]))
        pending = await reserved(keeper, with_tensors([2]))
        assert pending is not None
        delete_all_in(tmp_path)
        async with opened(tmp_path) as other:
            for _ in range(2):
                keeper._reach._retry_s = 0.0
                with pytest.raises(KeeperAway, match=r"laned\.lock is another|another laned keeps"):
                    await keeper.commit(pending)
            assert await keep(other, with_tensors([3])) == "kept"
        keeper._reach._retry_s = 0.0
        assert await found(keeper, [3]) != ()
        assert await keep(keeper, with_tensors([2])) == "kept"


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def delete_all_in(folder: Path) -> None:
    """As a shell does it: `rm -rf FOLDER/*`."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
