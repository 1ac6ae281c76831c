"""`laned completion`: a script that makes a shell complete laned's commands, options, choices and paths.

It is made of the commands' own parsers, so that it has whatever they take. A shell never starts laned to complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import shtab

from scheduler.commands import store_commands
from scheduler.options import OPTIONS
from scheduler.usage import Command, Parser, parser_of

SHELLS = ("bash", "zsh", "fish")

# By what an option's value is called in the help.
_FILES = ("FILE", "FILE.toml", "FILE|TEXT", "PATH", "auto|off|PATH", "MODEL")
_FOLDERS = ("DIR",)
_CHOICES = {option.field: option.kind.choices for option in OPTIONS if option.kind.choices}


def main(argv: Sequence[str], commands: Mapping[str, tuple[str, Command]]) -> int:
    """commands: all of laned's, by name, each with what it is for."""
    parser = Parser(
        "completion",
        "Write a script that makes a shell complete laned's commands, options and paths.",
        (
            "laned completion bash > ~/.local/share/bash-completion/completions/laned",
            "laned completion zsh > ~/.zfunc/_laned     # with fpath+=~/.zfunc before compinit",
            "laned completion fish > ~/.config/fish/completions/laned.fish",
        ),
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    chosen = parser.parse(argv)
    sys.stdout.write(shtab.complete(_laned(commands), chosen.shell))
    return 0


def _laned(commands: Mapping[str, tuple[str, Command]]) -> argparse.ArgumentParser:
    """All of the command line as one parser, which parses nothing: shtab reads it."""
    laned = argparse.ArgumentParser("laned", description="One language model, served to many clients of a socket.")
    laned.add_argument("-V", "--version", action="store_true", help="print the versions")
    _add(laned, commands, {"store": store_commands.COMMANDS})
    return laned


def _add(
    above: argparse.ArgumentParser,
    commands: Mapping[str, tuple[str, Command]],
    groups: Mapping[str, Mapping[str, tuple[str, Command]]],
) -> None:
    below = above.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, (summary, command) in commands.items():
        if name in groups:
            _add(below.add_parser(name, help=summary, description=summary), groups[name], {})
            continue
        parser = parser_of(command)
        for action in parser._actions:
            _tell_values(action)
        below.add_parser(name, help=summary, description=summary, parents=[parser], add_help=False)


def _tell_values(action: argparse.Action) -> None:
    """Say what the values of an option are, as shtab asks for it."""
    if action.metavar in _FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif action.metavar in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.choices is None and action.nargs != 0:
        action.choices = _CHOICES.get(action.dest)
