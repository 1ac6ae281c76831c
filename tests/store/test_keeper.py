"""A folder kept: found again after a restart, within its budget, and whatever lies in it. What a keeper promises is the
same in this process and behind a socket."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from store.keeping import Keeper
from store.names import new_temporary, segment_path
from store.remote import open_remote
from store.segment_file import verify_file, write_segment
from tests.scheduler.trio_test import trio_test
from tests.store.keepers import serving
from tests.store.keeping import files_in, found, keep, on_disk, reserved
from tests.store.keeping import opened as embedded
from tests.store.segments import FINGERPRINT, ROOT, save, segment, with_tensors

MINE = frozenset([FINGERPRINT])
Opened = Callable[..., AbstractAsyncContextManager[Keeper]]


@pytest.fixture(params=["embedded", "remote"])
def opened(request: pytest.FixtureRequest) -> Opened:
    """As tests.store.keeping.opened."""

    @asynccontextmanager
    async def opened_so(folder: Path, **settings: object) -> AsyncIterator[Keeper]:
        async with embedded(folder, **settings) as keeper:
            if request.param == "embedded":
                yield keeper
                return
            # Beside the folder, in which it would count as a file of somebody else.
            socket = folder.with_suffix(".sock")
            async with serving(keeper, socket), open_remote(socket, FINGERPRINT) as remote:
                yield remote

    return opened_so


@trio_test
async def test_what_was_kept_is_found_now_and_after_a_restart(tmp_path: Path, opened: Opened) -> None:
    trunk = with_tensors(range(100))
    branch = with_tensors([7, 8], trunk, 60)
    asked = [*range(60), 7, 8, 9]
    async with opened(tmp_path / "store") as keeper:
        assert await keep(keeper, trunk) == "kept"
        assert await keep(keeper, branch) == "kept"
        before = await found(keeper, asked)
    async with opened(tmp_path / "store") as keeper:
        chain = await keeper.find(ROOT, asked, 61)
        assert (chain.matched, chain.tokens) == (62, 61)
        assert [kept.segment for kept in chain.kept] == [trunk, branch]
        assert await found(keeper, asked) == before == chain.kept
        for kept in chain.kept:
            stored = verify_file(kept.path)
            assert (stored.segment, stored.places) == (kept.segment, kept.offsets)
        assert await found(keeper, [1, 2]) == ()
        assert await found(keeper, asked, root="0" * 32) == ()
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


@trio_test
async def test_how_a_commit_ends(tmp_path: Path, opened: Opened) -> None:
    trunk, branch = with_tensors(range(10)), with_tensors([11], with_tensors(range(10)))
    async with opened(tmp_path) as keeper:
        assert await keep(keeper, branch) == "orphan"
        assert await keep(keeper, trunk) == "kept"
        assert await keep(keeper, trunk) == "known"
        assert await keep(keeper, branch) == "kept"
        empty = await keeper.reserve(1)
        assert empty is not None
        assert await keeper.commit(empty) == "bad"
        gone = await keeper.reserve(1)
        assert gone is not None
        gone.unlink()
        assert await keeper.commit(gone) == "failed"
        left = await reserved(keeper, with_tensors([5]))
        assert left is not None
        await keeper.abandon(left)
        assert files_in(tmp_path) == {f"{trunk.id}.segment", f"{branch.id}.segment"}
        assert (await keeper.stat()).segments == 2


@trio_test
async def test_what_is_no_temporary_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    """A client of a socket cannot name it; see tests/store/test_server.py."""
    not_ours = tmp_path / "letter.txt"
    not_ours.write_text("dear")
    async with embedded(tmp_path) as keeper:
        assert await keeper.commit(not_ours) == "failed"
        assert await keeper.commit(tmp_path.parent / new_temporary(tmp_path).name) == "failed"
        await keeper.abandon(not_ours)
    assert not_ours.exists()


@trio_test
async def test_a_child_of_another_model_does_not_hang_on_its_parent(tmp_path: Path, opened: Opened) -> None:
    """Forged: a root is made of the fingerprint."""
    trunk = with_tensors(range(10))
    async with opened(tmp_path) as keeper:
        await keep(keeper, trunk)
        assert await keep(keeper, replace(with_tensors([1], trunk), fingerprint="other")) == "orphan"


@trio_test
async def test_the_least_recently_used_goes_first_and_suffixes_before_prefixes(tmp_path: Path, opened: Opened) -> None:
    first, second = with_tensors([1] * 9), with_tensors([2] * 9)
    ends = [with_tensors([3] * 9, first), with_tensors([4] * 9, second)]
    async with opened(tmp_path, fingerprints=MINE) as keeper:
        for each in (first, ends[0], second, ends[1]):
            await keep(keeper, each)
        size = on_disk(tmp_path, first)
        await found(keeper, [1] * 9)
    async with opened(tmp_path, fingerprints=MINE, max_bytes=4 * size) as keeper:
        order = [ends[0], ends[1], second, first]
        for num, new in enumerate(with_tensors([10 + num] * 9) for num in range(4)):
            assert await keep(keeper, new) == "kept"
            assert [each for each in order if not segment_path(tmp_path, each.id).exists()] == order[: num + 1]
        stats = await keeper.stat()
        assert (stats.evicted, stats.segments, stats.bytes) == (4, 4, 4 * size)


@trio_test
async def test_use_is_known_after_a_restart(tmp_path: Path, opened: Opened) -> None:
    many = [with_tensors([num] * 9) for num in range(4)]
    async with opened(tmp_path, fingerprints=MINE) as keeper:
        for each in many:
            await keep(keeper, each)
    async with opened(tmp_path, fingerprints=MINE) as keeper:
        for num in (2, 0):
            await found(keeper, [num] * 9)
    async with opened(tmp_path, fingerprints=MINE, max_bytes=2 * on_disk(tmp_path, many[0])) as keeper:
        assert (await keeper.stat()).segments == 2
    assert [segment_path(tmp_path, each.id).exists() for each in many] == [True, False, True, False]


@trio_test
async def test_foreign_models_and_formats_go_first_and_belong_to_whom_uses_them(tmp_path: Path) -> None:
    theirs = [with_tensors([num], fingerprint=name) for num, name in enumerate(("model-2", "model-3"))]
    mine = with_tensors([5])
    async with embedded(tmp_path, fingerprints=MINE) as keeper:
        await keep(keeper, mine)
        for each in theirs:
            assert await keep(keeper, each) == "kept"
        size = on_disk(tmp_path, mine)
        assert (await keeper.stat()).foreign_bytes == 2 * size
        assert [kept.segment for kept in await found(keeper, [0], root=theirs[0].root)] == [theirs[0]]
    newer = segment_path(tmp_path, "f" * 32)
    newer.parent.mkdir(exist_ok=True)
    save(newer, mine)
    with newer.open("r+b") as file:
        os.pwrite(file.fileno(), b"2", 7)
        # What it takes is known when it is on disk.
        os.fsync(file.fileno())
    async with embedded(tmp_path, fingerprints=MINE, max_bytes=4 * size) as keeper:
        assert (await keeper.stat()).foreign_bytes == 3 * size
        keeper.use("model-2")
        keeper.check()
        assert (await keeper.stat()).foreign_bytes == 2 * size
        going = [newer, segment_path(tmp_path, theirs[1].id), segment_path(tmp_path, mine.id)]
        for num in range(3):
            await keep(keeper, with_tensors([100 + num]))
            assert [path for path in going if not path.exists()] == going[: num + 1]
        assert segment_path(tmp_path, theirs[0].id).exists()


@trio_test
async def test_what_is_pinned_stays_until_it_is_released(tmp_path: Path, opened: Opened) -> None:
    trunk, branch = with_tensors([1] * 9), with_tensors([2] * 9, with_tensors([1] * 9))
    async with opened(tmp_path, fingerprints=MINE) as keeper:
        await keep(keeper, trunk)
        await keep(keeper, branch)
        size = on_disk(tmp_path, trunk)
    async with opened(tmp_path, fingerprints=MINE, max_bytes=2 * size) as keeper:
        chain = await keeper.find(ROOT, [1] * 9 + [2] * 9, 18)
        again = await keeper.find(ROOT, [1] * 9 + [2] * 9, 10)
        assert await keep(keeper, with_tensors([3])) is None
        await keeper.release(chain.pin)
        assert await keep(keeper, with_tensors([3])) is None
        await keeper.release(again.pin)
        await keeper.release(again.pin)
        await keeper.release(12345)
        assert await keep(keeper, with_tensors([3])) == "kept"
        assert files_in(tmp_path) == {f"{trunk.id}.segment", f"{with_tensors([3]).id}.segment"}
        assert (await keeper.stat()).errors == 2


@trio_test
async def test_what_can_never_fit_costs_nothing(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, max_bytes=1 << 20) as keeper:
        await keep(keeper, with_tensors([1]))
        assert await keeper.reserve(2 << 20) is None
        free = (await keeper.stat()).free_bytes
        assert (await keeper.stat()).segments == 1
    async with opened(tmp_path, min_free_bytes=10 * free) as keeper:
        assert await keeper.reserve(1) is None
        assert (await keeper.stat()).segments == 1


@trio_test
async def test_room_is_promised_once(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, max_bytes=1 << 20) as keeper:
        first = await keeper.reserve(600_000)
        assert first is not None
        assert await keeper.reserve(600_000) is None
        await keeper.abandon(first)
        assert await keeper.reserve(600_000) is not None


@trio_test
async def test_a_segment_larger_than_it_said_stays_within_the_budget(tmp_path: Path, opened: Opened) -> None:
    big = with_tensors(range(5000), dim=64)
    async with opened(tmp_path, max_bytes=1 << 20) as keeper:
        await keep(keeper, with_tensors([1]))
        temporary = await keeper.reserve(1)
        assert temporary is not None
        with temporary.open("r+b") as file:
            write_segment(file.fileno(), big, [memoryview(bytes(spec.nbytes)) for spec in big.tensors])
        assert await keeper.commit(temporary) == "full"
        assert (await keeper.stat()).segments == 1
        assert len(files_in(tmp_path)) == 1


@trio_test
async def test_a_budget_below_what_is_there_is_met_at_the_start(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, fingerprints=MINE) as keeper:
        for num in range(10):
            await keep(keeper, with_tensors([num]))
        size = on_disk(tmp_path, with_tensors([0]))
    (tmp_path / "letter").write_bytes(bytes(size))
    async with opened(tmp_path, fingerprints=MINE, max_bytes=4 * size) as keeper:
        assert (await keeper.stat()).segments == 3
        assert await found(keeper, [9]) != ()
    async with opened(tmp_path, fingerprints=MINE, max_bytes=1) as keeper:
        assert (await keeper.stat()).segments == 0
    assert (tmp_path / "letter").exists()


@trio_test
async def test_many_at_once_leave_a_keeper_right(tmp_path: Path, opened: Opened) -> None:
    """Conversations that are written, read and dropped at the same time, in a budget of half of them."""
    size = 33 * 1024

    async def converse(number: int) -> None:
        last = None
        for turn in range(8):
            new = with_tensors([number, turn], last)
            outcome = await keep(keeper, new)
            assert outcome in ("kept", "orphan", None)
            last = new if outcome == "kept" else None
            if last is None:
                return
            asked = [token for each in range(turn + 1) for token in (number, each)]
            chain = await keeper.find(ROOT, asked, len(asked))
            for kept in chain.kept:
                verify_file(kept.path)
            if number == 3:
                await keeper.condemn(last.id)
            await keeper.release(chain.pin)

    async with opened(tmp_path, max_bytes=32 * size) as keeper:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(converse, number)
        stats = await keeper.stat()
        assert stats.bytes <= 32 * size
        assert len(files_in(tmp_path)) == stats.segments


@trio_test
async def test_a_cancelled_commit_is_whole_or_nothing(tmp_path: Path) -> None:
    async with embedded(tmp_path) as keeper:
        for num in range(20):
            temporary = await reserved(keeper, with_tensors([num]))
            assert temporary is not None
            with trio.move_on_after(num / 10_000):
                await keeper.commit(temporary)
            keeper.check()
        await keeper.flush()
        kept = [num for num in range(20) if await found(keeper, [num])]
        assert {f"{with_tensors([num]).id}.segment" for num in kept} == {
            name for name in files_in(tmp_path) if name.endswith(".segment")
        }


@trio_test
async def test_an_answer_is_never_more_than_was_asked(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path) as keeper:
        await keep(keeper, segment(range(10), boundaries=(4, 8)))
        for limit, tokens in ((10, 8), (8, 8), (7, 4), (3, 0), (0, 0)):
            chain = await keeper.find(ROOT, range(10), limit)
            assert (chain.matched, chain.tokens, len(chain.kept)) == (10, tokens, bool(tokens))
            assert (chain.pin == 0) == (tokens == 0)
            await keeper.release(chain.pin)
