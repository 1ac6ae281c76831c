"""Equal models have equal fingerprints, whatever they are called; what makes another row makes another fingerprint."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lanes.fingerprint import Digests, fingerprint
from lanes.lane import LaneSettings
from lanes.load import load
from lanes.sources import HYBRID_FOLDER

LONG_AGO = (1e9, 1e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of one's own, its files at rest for a while."""
    target = tmp_path / "model"
    shutil.copytree(HYBRID_FOLDER, target)
    settle(target)
    return target


def settle(folder: Path) -> None:
    for file in folder.iterdir():
        os.utime(file, LONG_AGO)


def of(folder: Path, settings: LaneSettings | None = None, **options: Any) -> str:
    return fingerprint(load(str(folder), **options), settings or LaneSettings())


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return edit


def flip_a_weight(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def retokenize(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = dict(sorted(content["model"]["vocab"].items()))
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "edit",
    [
        flip_a_weight,
        retokenize,
        edit_json("config.json", rms_norm_eps=1e-4),
        lambda folder: (folder / "modeling.py").write_text("x = 1\n"),
    ],
    ids=["weights", "tokenizer", "config", "code"],
)
def test_another_model(folder: Path, edit: Callable[[Path], None]) -> None:
    before = of(folder)
    edit(folder)
    assert of(folder) != before


@pytest.mark.parametrize(
    "edit",
    [
        edit_json("tokenizer_config.json", chat_template="{{ messages }}"),
        edit_json("config.json", _name_or_path="somewhere/else", transformers_version="9"),
        lambda folder: (folder / "README.md").write_text("new"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors"),
    ],
    ids=["chat template", "names in the config", "readme", "file name"],
)
def test_the_same_model(folder: Path, edit: Callable[[Path], None]) -> None:
    before = of(folder)
    edit(folder)
    assert of(folder) == before


def test_types_and_bits_count_and_nothing_else_of_the_settings(folder: Path) -> None:
    plain = of(folder)
    assert of(folder, dtype="bfloat16") != plain
    found = [LaneSettings(kv_bits=bits, kv_group_size=size) for bits, size in ((8, 64), (4, 64), (8, 32))]
    assert len({plain, *(of(folder, each) for each in found)}) == 4
    assert of(folder, LaneSettings(max_rows=2, kv_group_size=32, compile="on")) == plain


def test_it_is_the_same_in_every_process(folder: Path) -> None:
    code = (
        "import sys; from lanes.fingerprint import fingerprint; from lanes.lane import LaneSettings; "
        "from lanes.load import load; print(fingerprint(load(sys.argv[1]), LaneSettings()))"
    )
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert ran.stdout.strip() == of(folder)


def test_a_model_of_no_files_has_none() -> None:
    loaded = replace(load("hybrid"), path=None)
    with pytest.raises(ValueError, match="not loaded from files"):
        fingerprint(loaded, LaneSettings())


def test_a_start_reads_no_weights(folder: Path, tmp_path: Path) -> None:
    """Shown by digests that are not those of the content: what was noted is believed."""
    notes, loaded = tmp_path / "digests.json", load(str(folder))
    first = fingerprint(loaded, LaneSettings(), notes)
    assert first == fingerprint(loaded, LaneSettings(), notes) == of(folder)
    noted = json.loads(notes.read_text())
    # All but tokenizer_config.json, of which only a part counts.
    assert len(noted) == 2
    notes.write_text(json.dumps(dict.fromkeys(noted, "0")))
    assert fingerprint(loaded, LaneSettings(), notes) != first
    os.utime(folder / "model.safetensors", (1e9, 1e9 + 1))
    os.utime(folder / "tokenizer.json", (1e9, 1e9 + 1))
    assert fingerprint(loaded, LaneSettings(), notes) == first


def test_a_file_that_has_just_changed_is_not_noted(folder: Path, tmp_path: Path) -> None:
    """It may change again in the same tick of the clock."""
    digests = Digests(tmp_path / "digests.json")
    file = folder / "tokenizer.json"
    os.utime(file)
    digests.of(file)
    digests.save()
    assert not (tmp_path / "digests.json").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "{", "\x00\xff"])
def test_notes_that_are_none_are_done_without(folder: Path, tmp_path: Path, content: str) -> None:
    notes, loaded = tmp_path / "digests.json", load(str(folder))
    notes.write_text(content)
    assert fingerprint(loaded, LaneSettings(), notes) == of(folder)
    assert len(json.loads(notes.read_text())) == 2


def test_where_nothing_can_be_noted_all_is_read(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fingerprint(load(str(folder)), LaneSettings(), tmp_path / "missing" / "digests.json") == of(folder)
    assert "could not be noted" in caplog.text


def test_notes_of_models_long_gone_are_dropped(folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "digests.json"
    notes.write_text(json.dumps({str(number): "x" for number in range(3000)}))
    digests = Digests(notes)
    digests.of(folder / "tokenizer.json")
    digests.save()
    noted = list(json.loads(notes.read_text()))
    assert len(noted) == 1000
    assert noted[-2] == "2999"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["digests.json"]


def test_the_file_of_a_gguf_model_is_all_of_it(folder: Path) -> None:
    """What lies beside it does not count."""
    file, loaded = folder / "model.safetensors", load(str(folder))
    before = fingerprint(replace(loaded, path=file), LaneSettings())
    retokenize(folder)
    assert fingerprint(replace(loaded, path=file), LaneSettings()) == before
    flip_a_weight(folder)
    assert fingerprint(replace(loaded, path=file), LaneSettings()) != before
