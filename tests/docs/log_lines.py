"""What the daemon's packages write into the log, found in their source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

LEVELS = ("info", "warning", "error", "critical", "exception")
# A process of its own.
APART = "scheduler/gateway/"


def log_lines() -> set[tuple[str, str]]:
    """(level, line) of every call from "info" on, with "..." for what differs. exception() is an error."""
    return {line for package in ("scheduler", "lanes", "store") for line in _in_package(ROOT / package)}


def _in_package(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(ROOT).as_posix().startswith(APART):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id in ("logger", "log") and node.args:
                    level = "error" if node.func.attr == "exception" else node.func.attr
                    if isinstance(node.args[0], ast.Constant):
                        yield level, re.sub(r"%[.\d]*\w", "...", str(node.args[0].value))
