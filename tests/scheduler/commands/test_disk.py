"""A folder for a store: measured, left as it was, and refused where it is of no use."""

import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from lanes.cache_folder import cache_folder
from scheduler.commands import disk
from scheduler.commands.disk import check_place, check_store, rate
from scheduler.loading import cache_place

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def small_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "TRIAL_BYTES", disk.BLOCK_BYTES + 1000)
    # Tests may run on any disk.
    monkeypatch.setattr(disk, "SLOW_READ_BYTES_PER_S", 0)
    monkeypatch.setattr(disk, "SLOW_WRITE_BYTES_PER_S", 0)


@pytest.mark.parametrize("name", [".", "to/be/made"])
def test_a_folder_is_measured_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    (finding,) = check_store(tmp_path / name)
    assert finding.level == "ok"
    assert "B/s" in finding.said
    assert ("will be made" in finding.said) == (name != ".")
    assert os.listdir(tmp_path) == []


def test_all_that_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(disk, "_forget_cached", lambda handle: written.append(os.fstat(handle).st_size))
    disk._trial(tmp_path, 2 * disk.BLOCK_BYTES + 7)
    assert written == [2 * disk.BLOCK_BYTES + 7]


def test_a_slow_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SLOW_READ_BYTES_PER_S", float("inf"))
    (finding,) = check_store(tmp_path)
    assert (finding.level, "SSD" in str(finding.do)) == ("warning", True)


def test_a_full_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1 << 40, 1 << 40, 100 << 20))
    assert [finding.level for finding in check_store(tmp_path)] == ["warning", "ok"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = check_store(tmp_path / "file" / "below")
    assert finding.level == "problem"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_others_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    (finding,) = check_store(tmp_path)
    assert finding.level == "problem"


def test_a_disk_that_refuses_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    (finding,) = check_store(tmp_path)
    assert (finding.level, "No space left on device" in finding.said) == ("problem", True)


def test_rates() -> None:
    assert [rate(2.5e9), rate(80e6)] == ["2.50 GB/s", "80 MB/s"]


def test_without_a_store_the_cache_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_place() == tmp_path / "cache" / "laned" == cache_folder("x").parent, "where the lanes keep theirs"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1 << 40, 0, 1 << 39))
    finding = check_place(cache_place())
    assert (finding.level, finding.said.startswith(f"512.0 GiB free in {tmp_path}")) == ("ok", True)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1 << 40, 1 << 40, 1 << 30))
    assert check_place(cache_place()).level == "warning"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_place() == tmp_path / ".cache" / "laned" == cache_folder("x").parent


def test_a_cache_that_may_not_be_written_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    finding = check_place(tmp_path / "laned")
    assert (finding.level, finding.said) == ("warning", f"{tmp_path} cannot be written: Read-only file system")
    (tmp_path / "file").touch()
    monkeypatch.undo()
    assert check_place(tmp_path / "file" / "laned").level == "warning"
