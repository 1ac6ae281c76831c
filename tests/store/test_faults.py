"""A disk that fails: less is kept, a counter moves, the log says it once, and nothing is raised but KeeperAway."""

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import trio

from store.files import Files
from store.keeping import Keeper, KeeperAway, Outcome
from store.names import segment_path
from store.segment import Segment
from store.segment_file import verify_file
from tests.scheduler.trio_test import trio_test
from tests.store.keeping import files_in, found, keep, opened, reserved, write
from tests.store.segments import ROOT, with_tensors


def nothing(*arguments: Any) -> None:
    pass


class Failing(Files):
    """Calls from number `first` on fail, `num` of them."""

    CALLS = (
        *("create", "open", "read", "write", "truncate", "stat", "is_same"),
        *("sync", "sync_folder", "rename", "unlink", "make_folder", "free_bytes"),
    )

    def __init__(self, error: int) -> None:
        self.error = error
        self.first: int | None = None
        self.num = 1
        self.calls: list[str] = []
        for name in self.CALLS:
            # No machine stops here.
            real = nothing if name.startswith("sync") else getattr(super(), name)
            setattr(self, name, self._wrapped(name, real))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            place = len(self.calls)
            self.calls.append(name)
            if self.first is not None and self.first <= place < self.first + self.num:
                raise OSError(self.error, os.strerror(self.error))
            return real(*arguments, **options)

        return call


async def attempt(keeper: Keeper, segment: Segment, files: Files) -> str:
    """Write a segment as a daemon does: "none", "unwritten", "away", or the outcome."""
    try:
        temporary = await keeper.reserve(segment.nbytes)
        if temporary is None:
            return "none"
        try:
            write(temporary, segment, files)
        except OSError:
            await keeper.abandon(temporary)
            return "unwritten"
        return await keeper.commit(temporary)
    except KeeperAway:
        return "away"


async def ask(keeper: Keeper, tokens: list[int]) -> bool:
    try:
        return await found(keeper, tokens) != ()
    except KeeperAway:
        return False


TRUNK = with_tensors(range(10))
BRANCH = with_tensors([11, 12], TRUNK)
OTHERS = [with_tensors([100 + num]) for num in range(3)]


async def visit(folder: Path, files: Failing, first: int | None = None, num: int = 1) -> tuple[set[str], int]:
    """Write, ask and evict while some calls fail; then all works again. Returns what was promised and how many calls
    there were. A failure while the folder is opened the first time is not meant here."""
    kept: set[str] = set()
    async with opened(folder, files, max_bytes=3 * 36_000, scrub_every_s=None) as keeper:
        begin = len(files.calls)
        files.first, files.num = None if first is None else begin + first, num
        for segment in (TRUNK, BRANCH, *OTHERS):
            outcome = await attempt(keeper, segment, files)
            assert outcome in (*get_args(Outcome), "none", "unwritten", "away")
            if outcome in ("kept", "known"):
                kept.add(segment.id)
            keeper._shelf._recent.clear()
            await ask(keeper, [*range(10), 11, 12])
            try:
                stats = await keeper.stat()
            except KeeperAway:
                continue
            keeper.check()
            assert stats.bytes <= 3 * 36_000
        await ask(keeper, [*range(10), 11, 12])
        num_calls = len(files.calls) - begin
        files.first = None
        # By then a folder that was away has been looked for again.
        keeper._reach._retry_s = 0.0
        assert await attempt(keeper, with_tensors([7]), files) == "kept"
        assert await ask(keeper, [7])
        promised = {id_ for id_ in kept if keeper._shelf.get(id_) is not None}
    return promised, num_calls


async def survivors(folder: Path) -> set[str]:
    """Ids of what a start serves, all of it checked in full. No other file is left."""
    async with opened(folder) as keeper:
        ids = {entry.segment.id for entry in keeper._shelf.entries()}
    for id_ in ids:
        verify_file(segment_path(folder, id_))
    assert files_in(folder) == {f"{id_}.segment" for id_ in ids}
    return ids


def fail_each(tmp_path: Path, error: int, num: int) -> None:
    """One visit for each call, in which that call and the next ones fail."""
    promised, num_calls = trio.run(visit, tmp_path / "whole", Failing(error))
    assert len(promised) >= 2
    for first in range(num_calls):
        promised, _ = trio.run(visit, tmp_path / str(first), Failing(error), first, num)
        assert promised <= trio.run(survivors, tmp_path / str(first))


def test_whichever_call_fails_the_keeper_serves_on(tmp_path: Path) -> None:
    fail_each(tmp_path, errno.EIO, 1)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 4, 30])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_however_many_calls_fail_the_keeper_serves_on(tmp_path: Path, error: int, num: int) -> None:
    fail_each(tmp_path, error, num)


@trio_test
async def test_a_trouble_is_said_once_and_so_is_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    files = Failing(errno.EROFS)
    async with opened(tmp_path, files) as keeper:
        await keep(keeper, TRUNK)
        files.first, files.num = len(files.calls), 10**6
        real, files.free_bytes = files.free_bytes, lambda path: 10**9  # type: ignore[method-assign]
        files.is_same = lambda fd, path: True  # type: ignore[method-assign]
        for _ in range(5):
            assert await keeper.reserve(1) is None
        assert (await keeper.stat()).errors == 5
        assert await found(keeper, range(10)) != ()
        files.first, files.free_bytes = None, real  # type: ignore[method-assign]
        assert await attempt(keeper, BRANCH, files) == "kept"
    said = [record.getMessage() for record in caplog.records if "write to" in record.getMessage()]
    assert said == [
        f"cannot write to {tmp_path}: [Errno {errno.EROFS}] Read-only file system",
        f"can write to {tmp_path} again",
    ]


@trio_test
async def test_a_folder_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    async with opened(folder) as keeper:
        await keep(keeper, TRUNK)
        pending = await reserved(keeper, BRANCH)
        assert pending is not None
        folder.rename(elsewhere)
        for question in (keeper.stat, keeper.flush, lambda: keeper.reserve(1), lambda: keeper.commit(pending)):
            with pytest.raises(KeeperAway, match=r"is gone|cannot be used"):
                await question()
        assert not folder.exists()
        elsewhere.rename(folder)
        keeper._reach._retry_s = 0.0
        assert [kept.segment for kept in await found(keeper, range(10))] == [TRUNK]
        # What was promised before is reaped like any temporary; it is written anew.
        assert await keeper.commit(pending) == "failed"
        assert await keep(keeper, BRANCH) == "kept"
        assert (await keeper.stat()).errors >= 1


@trio_test
async def test_a_folder_that_was_emptied_is_begun_anew(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with opened(folder) as keeper:
        await keep(keeper, TRUNK)
        chain = await keeper.find(ROOT, range(10), 10)
        shutil.rmtree(folder)
        folder.mkdir()
        with pytest.raises(KeeperAway):
            await keeper.reserve(1)
        await keeper.release(chain.pin)
        assert await keep(keeper, TRUNK) == "kept"
        assert (await keeper.stat()).segments == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of our own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system, and not everywhere")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@trio_test
async def test_a_small_disk_holds_what_was_used_last(small_disk: Path) -> None:
    async with opened(small_disk / "store") as keeper:
        for num in range(60):
            assert await attempt(keeper, with_tensors([num] * 100, dim=64), Files()) == "kept"
        stats = await keeper.stat()
        assert stats.segments > 20
        assert stats.evicted > 0
        assert await found(keeper, [59] * 100) != ()
        big = with_tensors(range(5000), dim=64)
        assert await attempt(keeper, big, Files()) == "none"
        assert (await keeper.stat()).segments == stats.segments
    assert len(await survivors(small_disk / "store")) == stats.segments


@trio_test
async def test_a_disk_that_others_fill(small_disk: Path) -> None:
    async with opened(small_disk / "store", min_free_bytes=100_000) as keeper:
        await keep(keeper, TRUNK)
        (small_disk / "others").write_bytes(bytes((await keeper.stat()).free_bytes - (2 << 20)))
        assert await attempt(keeper, with_tensors([1]), Files()) == "kept"
        with (small_disk / "others").open("ab") as file:
            file.write(bytes(3 << 19))
        # Nothing of ours would make room enough, so nothing of ours goes.
        assert await attempt(keeper, with_tensors([2]), Files()) == "none"
        assert (await keeper.stat()).segments == 2
        (small_disk / "others").unlink()
        assert await attempt(keeper, with_tensors([2]), Files()) == "kept"


@trio_test
async def test_a_disk_that_becomes_read_only_is_read(small_disk: Path) -> None:
    folder = small_disk / "store"
    async with opened(folder) as keeper:
        await keep(keeper, TRUNK)
    mount("-o", "remount,ro", str(small_disk))
    async with opened(folder) as keeper:
        assert await attempt(keeper, BRANCH, Files()) == "none"
        assert await found(keeper, range(10)) != ()
        mount("-o", "remount,rw", str(small_disk))
        keeper._reach._retry_s = 0.0
        assert await attempt(keeper, BRANCH, Files()) == "kept"


@trio_test
async def test_a_disk_that_is_taken_away_is_not_written_past(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where it was mounted there is an empty folder then, on another disk."""
    async with opened(small_disk) as keeper:
        await keep(keeper, TRUNK)
        mount("--bind", str(tmp_path_factory.mktemp("empty")), str(small_disk))
        try:
            for _ in range(3):
                keeper._reach._retry_s = 0.0
                with pytest.raises(KeeperAway, match="another"):
                    await keeper.reserve(1)
            assert files_in(small_disk) == set()
        finally:
            subprocess.run(["umount", str(small_disk)], check=True)  # noqa: ASYNC221
        keeper._reach._retry_s = 0.0
        assert await attempt(keeper, BRANCH, Files()) == "kept"
