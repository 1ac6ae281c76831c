"""`laned store`: keep a folder for several daemons, look at what is in one, check it, tidy it.

What only looks reads headers, and asks for no lock: a daemon may be keeping the folder meanwhile. What deletes has to
be the folder's keeper while it does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from scheduler.commands.store_listing import folder_of, listing
from scheduler.commands.store_tables import show_listing, show_segment
from scheduler.usage import Command, Parser, UsageError, nearest

USUAL_CHAINS = 20


def main(argv: Sequence[str]) -> int:
    names = ", ".join(COMMANDS)
    if not argv:
        raise UsageError(f"A command is missing: {names}. `laned store --help` explains them.")
    first, rest = argv[0], argv[1:]
    if first in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if first not in COMMANDS:
        guess = nearest(first, COMMANDS)
        raise UsageError(f"There is no command `store {first}`: {f'did you mean {guess}' if guess else names}?")
    return COMMANDS[first][1](rest)


def parser(command: str, description: str, examples: Sequence[str]) -> Parser:
    """One whose command takes a folder."""
    made = Parser(f"store {command}", description, examples)
    made.add_argument("--store", metavar="DIR", required=True, help="the folder")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _number(text: str) -> int:
    """For argparse, which names the type in its sentence."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_number.__name__ = "number"


def _ls(argv: Sequence[str]) -> int:
    options = parser(
        "ls",
        "List what is kept, as conversations: each segment under the one that it continues, the latest used first.",
        ("laned store ls --store ~/.cache/laned", "laned store ls --store ~/.cache/laned --json | jq .bytes"),
    )
    options.add_argument(
        "--limit", metavar="N", type=_number, help=f"list so many beginnings at most (default: {USUAL_CHAINS})"
    )
    chosen = options.parse(argv)
    found = listing(folder_of(chosen.store))
    if chosen.json:
        print(json.dumps(found.report()))
    else:
        show_listing(found, chosen.limit or USUAL_CHAINS, time.time(), Console(file=sys.stdout))
    return 0


def _show(argv: Sequence[str]) -> int:
    options = parser(
        "show",
        "Show one segment: which tokens it is of, the chain it belongs to, and its tensors.",
        ("laned store show --store ~/.cache/laned 6bbe20d6",),
    )
    add_id(options)
    chosen = options.parse(argv)
    found = listing(folder_of(chosen.store))
    id_ = found.resolve(chosen.id)
    if chosen.json:
        print(json.dumps(found.report_of(id_)))
    else:
        show_segment(found, id_, time.time(), Console(file=sys.stdout))
    return 0


def add_id(options: argparse.ArgumentParser) -> None:
    options.add_argument("id", metavar="ID", help="the segment's id, or how it begins")


def _verify(argv: Sequence[str]) -> int:
    from scheduler.commands import store_care

    return store_care.verify(argv)


def _gc(argv: Sequence[str]) -> int:
    from scheduler.commands import store_care

    return store_care.gc(argv)


def _rm(argv: Sequence[str]) -> int:
    from scheduler.commands import store_care

    return store_care.rm(argv)


def _serve(argv: Sequence[str]) -> int:
    from scheduler.commands import store_serve

    return store_serve.main(argv)


COMMANDS: dict[str, tuple[str, Command]] = {
    "serve": ("keep a folder for several daemons of this host", _serve),
    "ls": ("list what is kept, as conversations", _ls),
    "show": ("show one segment: its tokens, its chain, its tensors", _show),
    "verify": ("read everything and check it; exit status 1 if something is bad", _verify),
    "gc": ("delete what is left over, and what is above a size", _gc),
    "rm": ("delete a segment and what hangs on it, a model's segments, or all", _rm),
}

_HELP = f"""usage: laned store COMMAND --store DIR [OPTIONS]

What daemons remember in a folder.

commands:
{chr(10).join(f"  {name:<8}{summary}" for name, (summary, _) in COMMANDS.items())}

  laned store COMMAND --help explains a command.

examples:
  laned store ls --store ~/.cache/laned
  laned store verify --store ~/.cache/laned
"""
