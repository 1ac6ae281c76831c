"""Mistakes of the one who typed, said in one sentence: what every command's parser and the options share."""

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

# What runs with the arguments behind a command's name; returns the exit status.
Command = Callable[[Sequence[str]], int]

# Arguments that nobody can type: they are told by being this very object.
_PARSER_ALONE = ("",)


class UsageError(Exception):
    """A user's mistake: exit status 2. The message is one sentence that says what to change."""


class CommandFailed(Exception):
    """A command cannot do what it was asked to, through no mistake in how: exit status 1. The message says why."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a person most likely meant, if any comes close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


class _Made(Exception):
    """Carries a command's parser out of it."""

    def __init__(self, parser: "Parser") -> None:
        self.parser = parser


def parser_of(command: Command) -> "Parser":
    """The parser that a command makes before all else. Nothing is run."""
    try:
        command(_PARSER_ALONE)
    except _Made as made:
        return made.parser
    raise AssertionError(f"{command} parses nothing")


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError where it would print its usage and exit, and that guesses what was meant."""

    def __init__(self, command: str, description: str, examples: Sequence[str]) -> None:
        super().__init__(
            prog=f"laned {command}",
            description=description,
            epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # An abbreviation that works today is an ambiguity after the next option.
            allow_abbrev=False,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Raises UsageError."""
        if argv is _PARSER_ALONE:
            raise _Made(self)
        found, unknown = self.parse_known_args(argv)
        if not unknown:
            return found
        name = unknown[0].split("=", 1)[0]
        if not name.startswith("-"):
            raise UsageError(f"{self.prog} does not take {name!r}: `{self.prog} --help` says what it takes.")
        guess = nearest(name, self._option_string_actions)
        hint = f"did you mean {guess}?" if guess else f"`{self.prog} --help` lists them."
        raise UsageError(f"{self.prog} has no option {name}: {hint}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}.")
