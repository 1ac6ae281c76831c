"""A folder for a store: measured, left as it was, and refused where it is of no use."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from scheduler.commands import disk
from scheduler.commands.disk import check_store, rate

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
