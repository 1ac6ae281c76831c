from pathlib import Path

import pytest

from scheduler.loading import digests_file
from scheduler.options import Options


def test_digests_are_noted_in_the_folder_or_in_this_machines_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert digests_file(Options(model="m", store=str(tmp_path / "store"))) == tmp_path / "store" / "digests.json"
    assert list(tmp_path.iterdir()) == []
    shared = digests_file(Options(model="m", store_socket="/run/laned/store.sock"))
    assert shared == tmp_path / "cache" / "laned" / "digests.json"
    assert shared.parent.is_dir()


def test_a_cache_that_cannot_be_made_is_told_by_who_wants_to_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = digests_file(Options(model="m", store_socket="/run/laned/store.sock"))
    assert found == tmp_path / "file" / "laned" / "digests.json"
