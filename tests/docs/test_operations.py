"""What the page for whoever runs the daemon names is there, and what there is to name it has."""

from __future__ import annotations

import errno
import os
import re

import pytest

from scheduler.options import OPTIONS
from tests.deploy.exposed import series
from tests.docs.log_lines import log_lines
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "operations.md").read_text(encoding="utf-8")
# Options of other commands that it tells of.
OTHERS = {"--config", "--wait", "--self-test", "--length", "--all", "--user", "--sparse"}


def test_every_line_of_the_log_is_explained_and_no_other() -> None:
    told = re.findall(r"^\| (info|warning|error|critical) \| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(told) == len(set(told))
    assert set(told) == log_lines()


def test_every_metric_that_it_names_is_one() -> None:
    exposed = {re.sub(r"_(bucket|count|sum)$", "", name) for name in series()}
    named = set(re.findall(r"`(laned_\w+|process_\w+)`", PAGE))
    assert len(named) > 20
    assert named - exposed == set()


def test_every_option_that_it_names_is_one() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert named - OTHERS - {f"--{option.name}" for option in OPTIONS} == set()
    assert named >= OTHERS - {"--user"}


@pytest.mark.parametrize("status", ["0", "1", "2"])
def test_every_exit_status_is_told(status: str) -> None:
    assert re.search(rf"^\| {status} \| ", PAGE, re.MULTILINE)


def test_what_it_quotes_is_said_somewhere() -> None:
    source = "".join(
        path.read_text(encoding="utf-8").lower()
        for package in ("scheduler", "store")
        for path in (ROOT / package).rglob("*.py")
    )
    symptoms = PAGE.partition("## When something is wrong")[2]
    quoted = [said for said in re.findall(r"^\| `([^`]+)` \|", symptoms, re.MULTILINE) if "..." in said]
    assert len(quoted) > 4
    system = {f"({os.strerror(number)})" for number in (errno.ENOENT, errno.ECONNREFUSED)}
    parts = {part.strip() for said in quoted for part in said.split("...")} - system
    assert [part for part in parts if part.lower() not in source] == []
