"""`laned bench`: as a process with a small model, its tables, its picture."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from scheduler.commands import plot
from scheduler.commands.bench import _check_plot, _store_of_its_own, main, show
from scheduler.options import Options
from scheduler.service import Service
from scheduler.usage import CommandFailed, UsageError
from tests.scheduler.echo_daemon import echo_daemon

COMMAND = (sys.executable, "-m", "scheduler.cli", "bench")
ROW = {
    "rows": 8,
    "tokens_per_s": 80.0,
    "between_p50_s": 0.1,
    "between_p99_s": 0.2,
    "first_p50_s": 1.5,
    "first_last_s": 3.0,
}
PROMPT = {"tokens": 1024, "first_s": 4.0, "tokens_per_s": 256.0, "again_s": None, "cached_tokens": 0}


def report(**changed: Any) -> dict[str, Any]:
    model = {
        "name": "a $x$ \x1b",
        "model_type": "llama",
        "dtype": "float32",
        "weight_bytes": 1 << 30,
        "lane": "batch",
        "backend": "cpu",
        "blas": "OpenBLAS",
        "laned": "0.1",
    }
    settings = {"prompt_tokens": 64, "max_tokens": 32, "complete": True}
    found = {"model": model, "rows": [ROW], "prompts": [PROMPT], "notes": [], "settings": settings}
    return {**found, **changed}


def shown(told: dict[str, Any]) -> str:
    out = StringIO()
    show(told, Console(file=out, width=80))
    return out.getvalue()


def bench(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=120, check=False)


def test_a_model_is_measured(tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"
    flags = ["--rows", "1,3", "--prompts", "20,5000", "--max-tokens", "4", "--blas", "off", "--plot", str(picture)]
    done = bench("hybrid", "--json", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["name"] == "hybrid-3M"
    assert [row["rows"] for row in found["rows"]] == [1, 3]
    assert [prompt["tokens"] for prompt in found["prompts"]] == [20]
    assert any("5,000 tokens was left out: the model's context" in note for note in found["notes"])
    assert found["settings"] == {"prompt_tokens": 64, "max_tokens": 4, "complete": True}
    assert picture.read_text().startswith("<?xml")


def test_the_tables_fit_a_terminal() -> None:
    text = shown(report(notes=["The machine was busy"]))
    assert max(map(len, text.splitlines())) <= 80
    for said in ("a $x$ \\x1b", "80.0", "10.0", "100 ms", "200 ms", "1.5 s", "3 s", "1,024", "256", "was busy."):
        assert said in text, said
    assert "remembered" not in text


def test_what_came_back_is_set_against_what_was_computed() -> None:
    text = shown(report(prompts=[{**PROMPT, "again_s": 0.5, "cached_tokens": 1000}, PROMPT]))
    assert "1,000 tokens" in text
    assert "8.0" in text


def test_an_interrupted_run_says_so_and_shows_what_it_has() -> None:
    text = shown(report(prompts=[], settings={"prompt_tokens": 64, "max_tokens": 32, "complete": False}))
    assert "Interrupted" in text
    assert "80.0" in text


@pytest.mark.parametrize("told", [report(), report(rows=[]), report(prompts=[{**PROMPT, "again_s": 0.5}])])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_whatever_was_measured_is_drawn(told: dict[str, Any], ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{ending}"
    plot.draw(told, path)
    assert path.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "MODEL"),
        (["hybrid", "--rows", "1,0"], "--rows: invalid list of numbers"),
        (["hybrid", "--max-tokens", "none"], "--max-tokens: invalid number"),
        (["hybrid", "--plot", "x.gif"], "ends in .png or .svg"),
        (["hybrid", "--plot", "/no/such/x.png"], "no such folder"),
        (["hybrid", "--plot", "/proc/x.png"], "--plot /proc/x.png cannot be written"),
        (["hybrid", "--store", "/no/such"], "--store /no/such: No such file"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(argv: list[str], words: str) -> None:
    done = bench("--blas", "off", *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_interrupted_it_shows_what_it_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def try_out(options: Options, use: Callable[[Service], Awaitable[None]]) -> None:
        async def run() -> None:
            async with echo_daemon() as daemon:
                await use(daemon.service)

        trio.run(run)
        raise BaseExceptionGroup("as Trio does", [KeyboardInterrupt()])

    monkeypatch.setattr("scheduler.daemon.try_out", try_out)
    assert main(["echo", "--rows", "1,2", "--prompts", "9", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert [row["rows"] for row in found["rows"]] == [1, 2]
    assert found["settings"]["complete"] is False


def test_whether_a_picture_can_be_written_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    _check_plot(str(tmp_path / "new.png"))
    (tmp_path / "old.svg").write_text("a picture")
    _check_plot(str(tmp_path / "old.svg"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.svg", "a picture")]
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        _check_plot(str(tmp_path / "folder.png"))


def test_a_disk_that_is_full_in_the_end_costs_the_picture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(report: dict[str, Any], path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scheduler.daemon.try_out", lambda options, use: None)
    monkeypatch.setattr(plot, "draw", refuse)
    with pytest.raises(CommandFailed, match=r"x.png cannot be written: No space left on device\."):
        main(["echo", "--plot", str(tmp_path / "x.png"), "--json"])
    assert json.loads(capsys.readouterr().out)["settings"]["complete"]


def test_a_store_of_its_own_is_gone_afterwards(tmp_path: Path) -> None:
    flags = argparse.Namespace(store=str(tmp_path))
    with _store_of_its_own(flags):
        assert os.path.dirname(flags.store) == str(tmp_path)
        assert os.path.isdir(flags.store)
        assert flags.prompt_cache_bytes == "0"
    assert os.listdir(tmp_path) == []
    flags = argparse.Namespace(store=None)
    with _store_of_its_own(flags):
        assert not hasattr(flags, "store")
    with pytest.raises(UsageError), _store_of_its_own(argparse.Namespace(store=str(tmp_path / "none"))):
        raise AssertionError("not reached")
