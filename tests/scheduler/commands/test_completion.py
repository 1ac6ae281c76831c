"""The scripts in the shells that they are for."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler import cli
from scheduler.commands import store_commands
from scheduler.commands.completion import SHELLS

# What was typed, the word that is completed last, and all that is to be offered.
CASES = [
    ("laned se", ["serve"]),
    ("laned serve --max-q", ["--max-queue"]),
    ("laned serve --no-tr", ["--no-trust-remote-code"]),
    ("laned serve --lora", []),
    ("laned serve --log-format ", ["json", "text"]),
    ("laned inspect demo --kv-bits ", ["4", "8"]),
    ("laned gateway --log-level w", ["warning"]),
    ("laned store ver", ["verify"]),
    ("laned store verify --st", ["--store"]),
    ("laned completion ", sorted(SHELLS)),
    ("laned ask hello --te", ["--temp", "--temperature"]),
    ("laned serve --model mod", ["model.gguf", "models"]),
    ("laned serve --store mod", ["models"]),
]
_ASK_BASH = """
source "$1"
complete -p laned | grep -q _shtab_laned || exit
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_laned
printf '%s\\n' "${COMPREPLY[@]}"
"""
_ASK_ZSH = """
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'PS1=; fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; print rea""dy'
zpty -r z out '*ready*'
zpty -w -n z $'laned serve --max-q\\t'
zpty -r z out '*--max-queue*'
zpty -w -n z $'\\C-ulaned sto\\tver\\t'
zpty -r z out '*verify*'
print done
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    return told.out


def run(*command: str, cwd: Path) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "models").mkdir()
    return tmp_path


@needs("bash")
def test_bash_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "laned.bash").write_text(script("bash", capsys), encoding="utf-8")
    for typed, offered in CASES:
        words = [*shlex.split(typed), *([""] if typed.endswith(" ") else [])]
        told = run("bash", "--norc", "-c", _ASK_BASH, "bash", "laned.bash", *words, cwd=folder)
        assert sorted(told.split()) == offered, typed


@needs("fish")
def test_fish_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "laned.fish").write_text(script("fish", capsys), encoding="utf-8")
    for typed, offered in CASES:
        asked = f"source laned.fish; complete -C {shlex.quote(typed)}"
        told = run("fish", "--no-config", "-c", asked, cwd=folder)
        words = {line.split("\t")[0].rstrip("/") for line in told.splitlines()}
        assert set(offered) <= words, typed


@needs("zsh")
def test_zsh_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "_laned").write_text(script("zsh", capsys), encoding="utf-8")
    assert run("zsh", "-f", "-c", _ASK_ZSH, cwd=folder) == "done\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_in_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = script(shell, capsys)
    for name in (*cli._COMMANDS, *store_commands.COMMANDS):
        assert name in made


@pytest.mark.parametrize("argv", [["serve", "--help"], ["status", "--help"], ["store", "ls", "--help"], ["--help"]])
def test_nothing_else_waits_for_what_it_uses(argv: list[str]) -> None:
    code = f"import sys; from scheduler import cli; cli.main({argv}); sys.exit('shtab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["completion"], "laned: laned completion: the following arguments are required: SHELL.\n"),
        (["completion", "csh"], "invalid choice: 'csh'"),
    ],
)
def test_a_mistake_is_told(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert sentence in capsys.readouterr().err
