"""Where the options of `laned serve` come from: the flag, else the file given with --config, else the default.

Keys of the file are the flags' names, with - or _. Flags, file and documentation are all made from the table
in scheduler.options.
"""

import argparse
import json
import tomllib
from collections.abc import Collection
from typing import Any

from scheduler.option import Option
from scheduler.options import OPTIONS, Options
from scheduler.usage import UsageError, nearest

_BY_NAME = {name: option for option in OPTIONS for name in (option.name, *option.aliases)}


def add_flags(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add --config and a flag for every option, or flags for the options of these names and no --config.

    What is not given is absent from the namespace; load() converts.
    """
    if names is None:
        parser.add_argument("--config", metavar="FILE.toml", help="read options from a TOML file; flags win over it")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if names is not None and option.name not in names:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group, absent = groups[option.group], argparse.SUPPRESS
        said = option.described.replace("%", "%%")
        if isinstance(option.default, bool):
            switch = argparse.BooleanOptionalAction
            group.add_argument(f"--{option.name}", dest=option.field, action=switch, default=absent, help=said)
            continue
        common = {"dest": option.field, "metavar": option.metavar, "default": absent}
        if option.kind.is_list:
            common |= {"action": "extend", "nargs": "+"}
        group.add_argument(f"--{option.name}", help=said, **common)
        for alias in option.aliases:
            group.add_argument(f"--{alias}", help=absent, **common)


def _convert(option: Option, label: str, value: object, is_text: bool) -> Any:
    try:
        return option.kind.check(option.kind.read(value) if is_text and isinstance(value, str) else value)
    except (ValueError, TypeError, KeyError):
        shown = value if isinstance(value, str) else json.dumps(value, default=str)
        raise UsageError(f"{label} takes {option.kind.noun}, not {str(shown)[:80]!r}.") from None


def read_config(path: str) -> dict[str, Any]:
    """Read the TOML file at path: field names of Options and their values. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"Cannot read --config {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not valid TOML: {error}.") from None
    found: dict[str, Any] = {}
    for key, value in raw.items():
        option = _BY_NAME.get(key.replace("_", "-"))
        if option is None:
            guess = nearest(key.replace("_", "-"), _BY_NAME)
            hint = f"; did you mean {guess!r}?" if guess else ": `laned serve --help` lists the options."
            raise UsageError(f"Unknown key {key!r} in {path}{hint}")
        if option.field in found:
            raise UsageError(f"{option.name!r} stands twice in {path} (once as {key!r}): keep one.")
        found[option.field] = _convert(option, f"{key!r} in {path}", value, is_text=False)
    return found


def load(flags: argparse.Namespace) -> Options:
    """Make Options of parsed flags (see add_flags) and of the file that they name. Raises UsageError."""
    path = getattr(flags, "config", None)
    found = read_config(path) if path is not None else {}
    for option in OPTIONS:
        if hasattr(flags, option.field):
            given = getattr(flags, option.field)
            found[option.field] = _convert(option, f"--{option.name}", given, is_text=True)
    for option in OPTIONS:
        if option.required and option.field not in found:
            raise UsageError(f"--{option.name} is missing: it takes {option.kind.noun}.")
    return Options(**found)
