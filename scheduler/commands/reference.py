"""The reference of `laned serve`'s options, made from their one table: a file to start from, and a page to read.

python -m scheduler.commands.reference       in a clone, writes both, and what layout_pages.py makes
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from scheduler.commands.layout_pages import store_page, wire_page
from scheduler.option import Option
from scheduler.options import OPTIONS

_HEAD = """\
# All options of `laned serve --config FILE`, with their defaults; what is commented out is as it stands there.
# A flag of the same name goes first. A running daemon rereads the file on SIGHUP and takes what is marked [reload].
# Made by `python -m scheduler.commands.reference`.
"""

_PAGE = """\
# Options of `laned serve`

Each is a flag and a key of the file given with `--config`; a flag goes first, then the file, then the default. A
running daemon rereads the file on SIGHUP and takes what is marked *reload*. An example with all of them:
[deploy/config.example.toml](../deploy/config.example.toml). This page is made by
`python -m scheduler.commands.reference`.
"""


def example() -> str:
    """A TOML file with every option: those without a default with what they take."""
    parts = [_HEAD]
    for group, options in _groups():
        parts.append(f"\n## {group}\n")
        for option in options:
            said = option.help + (" [reload]" if option.reloads else "")
            parts.append("\n" + textwrap.fill(said, 118, initial_indent="# ", subsequent_indent="#   ") + "\n")
            parts.append('model = "demo"\n' if option.required else f"#{option.field} = {_default(option)}\n")
    return "".join(parts)


def page() -> str:
    """The same as a page in Markdown."""
    parts = [_PAGE]
    for group, options in _groups():
        parts.append(f"\n## {group.capitalize()}\n\n| option | what it is |\n| --- | --- |\n")
        for option in options:
            said = option.described.replace("|", "\\|") + (" *(reload)*" if option.reloads else "")
            metavar = option.metavar.replace("|", "\\|")
            parts.append(f"| `--{option.name}`{f' {metavar}' if metavar else ''} | {said} |\n")
    return "".join(parts)


def _groups() -> Iterator[tuple[str, Iterator[Option]]]:
    order = {option.group: place for place, option in reversed(list(enumerate(OPTIONS)))}
    return groupby(sorted(OPTIONS, key=lambda option: order[option.group]), key=lambda option: option.group)


def _default(option: Option) -> str:
    value: Any = option.default
    if value is None:
        return f"<{option.metavar}>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, tuple):
        return json.dumps(list(value))
    shown = option.kind.show(value)
    return shown if isinstance(value, int | float) and shown.replace(".", "").isdecimal() else json.dumps(shown)


# What is made, by its path in a clone.
MADE: dict[str, Callable[[], str]] = {
    "deploy/config.example.toml": example,
    "docs/options.md": page,
    "docs/wire.md": wire_page,
    "docs/store-format.md": store_page,
}


def main() -> None:
    for path, make in MADE.items():
        (Path(__file__).parents[2] / path).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
