"""`laned store serve` from outside; what it does for daemons is in tests/store/test_server.py."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler.cli import main
from store.names import lock_path

PATIENCE_S = 60.0


@contextmanager
def serving(folder: Path, socket: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "scheduler.cli", "store", "serve", "--store-min-free", "0", "--log-format", "json"]
    running = subprocess.Popen(
        [*command, "--store", str(folder), "--socket", str(socket)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert running.stderr is not None
        for line in running.stderr:
            if "keeping" in line:
                break
        yield running
    finally:
        running.kill()
        running.wait(PATIENCE_S)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_it_is_told_to_and_leaves_no_socket(how: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "s") as running:
        assert (tmp_path / "s").is_socket()
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        running.send_signal(how)
        assert running.wait(PATIENCE_S) == 0
    assert not (tmp_path / "s").exists()


def test_a_folder_or_a_socket_that_is_taken_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "store", tmp_path / "s"):
        assert lock_path(tmp_path / "store").exists()
        given = ["store", "serve", "--store-min-free", "0"]
        assert main([*given, "--store", str(tmp_path / "store"), "--socket", str(tmp_path / "other")]) == 2
        assert "laned: --store: another laned keeps" in capsys.readouterr().err
        assert main([*given, "--store", str(tmp_path / "other"), "--socket", str(tmp_path / "s")]) == 2
        assert "laned: --socket: a daemon already answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve"], "--store, --socket"),
        (["serve", "--store", "a", "--socket", "b", "--store-max", "much"], "--store-max takes a size"),
        (["serve", "--store", "a", "--socket", "b", "--stroe", "c"], "did you mean --store"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", *argv]) == 2
    assert said in capsys.readouterr().err
