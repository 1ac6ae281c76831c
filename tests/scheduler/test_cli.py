"""The command `laned`: exit statuses, one sentence for a mistake, and no model's library where none is needed."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scheduler import cli
from scheduler.commands import store_commands
from scheduler.usage import CommandFailed, UsageError

# Runs the command in-process and tells on stderr's last line which of the heavy libraries it has imported.
WATCHED = """
import json, sys
from scheduler.cli import main
status = main(sys.argv[1:])
heavy = ("mlx", "mlx_lm", "transformers", "numpy", "torch", "huggingface_hub")
print(json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr)
sys.exit(status)
"""


def laned(*argv: str, input: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WATCHED, *argv]
    return subprocess.run(command, input=input, capture_output=True, text=True, timeout=60, check=False)


def said(done: "subprocess.CompletedProcess[str]") -> str:
    """What it wrote on stderr: at most one line besides the list of libraries, which must be empty."""
    *lines, heavy = done.stderr.splitlines()
    assert json.loads(heavy) == []
    assert len(lines) <= 1, done.stderr
    return "".join(lines)


@pytest.mark.parametrize("command", [*cli._COMMANDS, *(f"store {name}" for name in store_commands.COMMANDS)])
def test_help_explains_with_examples_and_loads_no_model_library(command: str) -> None:
    done = laned(*command.split(), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: laned {command}")
    assert f"examples:\n  laned {command}" in done.stdout
    assert said(done) == ""


def test_the_commands_are_listed_and_the_versions_told() -> None:
    done = laned("--help")
    assert done.returncode == 0
    for command, (summary, _) in cli._COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(summary)}$", done.stdout, re.MULTILINE)
    assert said(done) == ""
    done = laned("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("laned ")
    assert "mlx-lm " in done.stdout
    assert said(done) == ""


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], f"A command is missing: {', '.join(cli._COMMANDS)}. `laned --help` explains them."),
        (["serf"], "There is no command 'serf': did you mean `laned serve`?"),
        (["xyzzy"], "There is no command 'xyzzy': `laned --help` lists the commands."),
        (["serve", "--max-row", "3"], "laned serve has no option --max-row: did you mean --max-rows?"),
        (["serve", "--max-row=3"], "laned serve has no option --max-row: did you mean --max-rows?"),
        (["serve", "--zzzzzz"], "laned serve has no option --zzzzzz: `laned serve --help` lists them."),
        (["serve", "model"], "laned serve does not take 'model': `laned serve --help` says what it takes."),
        (["serve", "--max-rows"], "laned serve: --max-rows: expected one argument."),
        (["serve", "--model", "demo", "--max-rows", "x"], "--max-rows takes a whole number from 1 to 4096, not 'x'."),
        (
            ["serve"],
            "--model is missing: it takes a folder, a Hugging Face id, a .gguf file or one of the words demo and "
            "hybrid.",
        ),
        (["serve", "--config", "/no/such.toml"], "Cannot read --config /no/such.toml: No such file or directory."),
        (["ask"], "A prompt is missing: `laned ask PROMPT`, or `laned ask -` to read it from standard input."),
        (["ask", " "], "The prompt is empty: there is nothing to ask."),
        (["ask", "-"], "The prompt is empty: there is nothing to ask."),
        (["ask", "a", "--top-k", "1.5"], "laned ask: --top-k: invalid int value: '1.5'."),
        (
            ["ask", "a", "--raw", "--system", "b"],
            "--system goes through the chat template, which --raw leaves out: give one of them.",
        ),
        (["status", "--jsn"], "laned status has no option --jsn: did you mean --json?"),
    ],
)
def test_a_mistake_is_status_2_and_one_sentence(argv: list[str], sentence: str) -> None:
    done = laned(*argv)
    assert (done.returncode, done.stdout, said(done)) == (2, "", f"laned: {sentence}")


@pytest.mark.parametrize("command", [["ask", "hello"], ["status"]])
def test_no_daemon_is_status_1_and_names_the_socket(command: list[str], tmp_path: Path) -> None:
    socket = str(tmp_path / "none.sock")
    done = laned(*command, "--socket", socket)
    assert (done.returncode, done.stdout) == (1, "")
    assert said(done).startswith(f"laned: No daemon answers at {socket} (")
    assert "`laned serve" in said(done)


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "scheduler.cli", "xyzzy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("laned: There is no command 'xyzzy'")


@pytest.mark.parametrize(
    ("error", "status"),
    [(UsageError("no"), 2), (CommandFailed("no"), 1), (KeyboardInterrupt(), 130), (SystemExit(3), 3)],
)
def test_what_nurseries_have_wrapped_is_found(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: Sequence[str]) -> int:
        raise BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [error])])

    monkeypatch.setitem(cli._COMMANDS, "fail", ("fails", fail))
    assert cli.main(["fail"]) == status
    assert capsys.readouterr().err == ("laned: no\n" if status in (1, 2) else "")


def test_what_nobody_foresaw_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    several = BaseExceptionGroup("", [UsageError("no"), KeyError("x")])

    def fail(argv: Sequence[str]) -> int:
        raise several

    monkeypatch.setitem(cli._COMMANDS, "fail", ("fails", fail))
    with pytest.raises(BaseExceptionGroup) as caught:
        cli.main(["fail"])
    assert caught.value is several
