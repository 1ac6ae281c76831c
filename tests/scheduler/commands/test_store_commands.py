"""`laned store ls|show|verify|gc|rm`: on a folder with a conversation, its branch, another model's, and damage."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler import cli
from store.files import Files
from store.names import new_temporary, segment_path
from store.segment import Segment
from tests.store.keeping import files_in, keep, opened
from tests.store.segments import save, with_tensors

TRUNK = with_tensors(range(2000), layers=3)
BRANCH = with_tensors([7] * 30, TRUNK, 1500)
LEAF = with_tensors([8] * 20, BRANCH)
OTHER = with_tensors([9] * 10, fingerprint="another-model")
ALL = (TRUNK, BRANCH, LEAF, OTHER)


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        return json.loads(self.out)


class Command:
    """`laned store` on one folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, name: str, *argv: str) -> Ended:
        self._capsys.readouterr()
        status = cli.main(["store", name, "--store", str(self.folder), *argv])
        return Ended(status, *self._capsys.readouterr())

    def path(self, of: Segment) -> Path:
        return segment_path(self.folder, of.id)

    def has(self) -> set[str]:
        return {of.id for of in ALL if self.path(of).exists()}


@pytest.fixture
def store(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    async def fill() -> None:
        async with opened(tmp_path / "store") as keeper:
            for of in ALL:
                assert await keep(keeper, of) == "kept"

    trio.run(fill)
    monkeypatch.setenv("COLUMNS", "80")
    return Command(tmp_path / "store", capsys)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        was = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([was[0] ^ 1]), place)


def ids(*segments: Segment) -> set[str]:
    return {of.id for of in segments}


def test_a_conversation_is_listed_as_a_tree(store: Command) -> None:
    done = store("ls")
    assert done.status == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert [OTHER.id[:12], "10", "10"] in [line[:3] for line in lines]
    at = next(number for number, line in enumerate(lines) if line[0] == TRUNK.id[:12])
    assert lines[at][1:3] == ["2,000", "2,000"]
    assert lines[at + 1][:4] == ["└", BRANCH.id[:12], "1,530", "30"]
    assert lines[at + 2][:4] == ["└", LEAF.id[:12], "1,550", "20"]
    assert done.out.splitlines()[at + 2].index("└") == 1
    assert "4 segments" in done.out
    assert len(store("ls", "--limit", "1").out.splitlines()) < len(lines)
    assert max(map(len, done.out.splitlines())) <= 80


def test_the_listing_as_json(store: Command) -> None:
    save(new_temporary(store.folder), with_tensors([1]))
    flip(store.path(OTHER), 30)
    store.path(BRANCH).unlink()
    report = store("ls", "--json").report
    assert {segment["id"] for segment in report["segments"]} == ids(TRUNK, LEAF)
    assert report["orphans"] == [LEAF.id]
    assert report["corrupt"] == [str(store.path(OTHER))]
    assert len(report["temporaries"]) == 1
    trunk = next(segment for segment in report["segments"] if segment["id"] == TRUNK.id)
    assert trunk["path"] == str(store.path(TRUNK))
    assert (trunk["start"], trunk["stop"], trunk["parent"], trunk["fingerprint"]) == (0, 2000, None, "model-1")
    table = store("ls").out
    for said in ("1 files damaged", "1 files being written", "1 segments that hang on nothing"):
        assert said in table


def test_a_folder_with_nothing_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is kept here" in Command(tmp_path, capsys)("ls").out


def test_one_segment_is_shown_with_its_chain_and_tensors(store: Command) -> None:
    report = store("show", BRANCH.id, "--json").report
    assert report["chain"] == [TRUNK.id, BRANCH.id]
    assert report["children"] == [LEAF.id]
    assert report["tokens"] == [7] * 30
    assert [tensor["name"] for tensor in report["tensors"]] == ["0.0", "0.1", "1.0", "1.1"]
    table = store("show", BRANCH.id[:8]).out
    for said in (BRANCH.id, TRUNK.id[:12], LEAF.id[:12], "1,500 to 1,530", "4 of: 2x30x4 float16"):
        assert said in table


def test_verify_finds_damage_in_tensors_and_headers(store: Command) -> None:
    done = store("verify")
    assert (done.status, done.out.splitlines()[-1].endswith("nothing bad")) == (0, True)
    flip(store.path(TRUNK), store.path(TRUNK).stat().st_size - 1)
    flip(store.path(OTHER), 30)
    before = files_in(store.folder)
    done = store("verify", "--json")
    assert done.status == 1
    assert set(done.report["bad"]) == {str(store.path(TRUNK)), str(store.path(OTHER))}
    assert str(store.path(TRUNK)) in store("verify", TRUNK.id[:8]).out
    assert store("verify", BRANCH.id).status == 0
    assert files_in(store.folder) == before


def test_verify_tells_what_cannot_be_read(store: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real, path = Files.open, store.path(OTHER)

    def refuse(files: Files, asked: Path, writable: bool = False) -> int:
        if asked == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(asked))
        return real(files, asked, writable)

    monkeypatch.setattr(Files, "open", refuse)
    done = store("verify")
    assert (done.status, f"bad {path}: it cannot be read: Permission denied" in done.out) == (1, True)
    assert done.out.splitlines()[-1].endswith("1 bad")
    report = store("verify", "--json").report
    assert (list(report["bad"]), report["other_versions"], report["segments"]) == ([str(path)], {}, 3)


def test_verify_tells_what_another_version_has_written_and_does_not_call_it_bad(store: Command) -> None:
    path = store.path(OTHER)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"2", 7)
    done = store("verify")
    assert (done.status, f"not checked {path}: format b'2' is not the one" in done.out) == (0, True)
    assert done.out.splitlines()[-1].endswith("nothing bad, 1 of another version not checked")
    report = store("verify", "--json").report
    assert (report["bad"], list(report["other_versions"]), report["segments"]) == ({}, [str(path)], 3)


def test_gc_deletes_what_is_left_over_and_what_is_too_much(store: Command) -> None:
    save(new_temporary(store.folder), with_tensors([1]))
    (store.folder / "letter").write_text("dear")
    flip(store.path(OTHER), 30)
    report = store("gc", "--json").report
    assert (report["segments"], report["deleted_segments"]) == (3, 0)
    assert files_in(store.folder) == {f"{id_}.segment" for id_ in ids(TRUNK, BRANCH, LEAF)}
    size = sum(store.path(of).stat().st_blocks * 512 for of in (TRUNK, BRANCH))
    other = (store.folder / "letter").stat().st_blocks * 512
    done = store("gc", "--store-max", str(size + other))
    assert (done.status, "deleted: 1 segments" in done.out) == (0, True)
    assert store.has() == ids(TRUNK, BRANCH)
    assert (store.folder / "letter").exists()


def test_rm_takes_segments_with_what_hangs_on_them_or_a_model_or_all(store: Command) -> None:
    assert "deleted: 2 segments" in store("rm", BRANCH.id[:10]).out
    assert store.has() == ids(TRUNK, OTHER)
    assert store("rm", "--model", "another", "--json").report["deleted_segments"] == 1
    assert store.has() == ids(TRUNK)
    assert store("rm", "--all").status == 0
    assert files_in(store.folder) == set()


def test_a_folder_that_is_kept_may_be_looked_at_and_not_changed(store: Command) -> None:
    async def meanwhile() -> None:
        async with opened(store.folder):
            for name in ("ls", "verify"):
                assert (await trio.to_thread.run_sync(store, name)).status == 0
            for argv in (("gc",), ("rm", "--all"), ("rm", TRUNK.id)):
                done = await trio.to_thread.run_sync(store, *argv)
                assert (done.status, "another laned keeps" in done.err) == (1, True)

    trio.run(meanwhile)
    assert store.has() == ids(*ALL)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("rm",), "takes ids"),
        (("rm", "--all", "--model", "m"), "takes ids"),
        (("rm", "--model", ""), "holds nothing of a model"),
        (("rm", "--model", "unknown"), "holds nothing of a model"),
        (("show", "zz"), "no segment whose id begins with 'zz'"),
        (("show", ""), "4 segments whose id begins"),
        (("gc", "--store-max", "much"), "--store-max takes a size"),
        (("ls", "--limit", "0"), "--limit"),
        (("verfy",), "did you mean verify?"),
    ],
)
def test_mistakes_are_said_in_one_sentence(store: Command, argv: tuple[str, ...], said: str) -> None:
    done = store(*argv)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert store.has() == ids(*ALL)


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ls", "show", "verify", "gc", "rm"):
        done = Command(tmp_path / "none", capsys)(
            name, *(("--all",) if name == "rm" else ()), *(("x",) * (name == "show"))
        )
        assert (done.status, "there is no such folder" in done.err) == (2, True)
    assert not (tmp_path / "none").exists()
