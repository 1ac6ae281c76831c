"""The client on the page of the wire, as it stands there, against a daemon."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.docs.pages import example
from tests.e2e.daemon import Daemon, run


def test_the_pages_client_runs_and_prints_what_the_page_says(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(example("wire.md", "python"), encoding="utf-8")
    ran = run(sys.executable, "-I", script, str(daemon.socket), runtime=daemon.folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert without_answers(ran.stdout) == without_answers(example("wire.md", "text", "connected to"))


def without_answers(printed: str) -> list[str]:
    """Its lines: in any order, as the two requests end side by side, and without what the model wrote, which may differ
    between processors."""
    lines = [re.sub(r"(length 8) .*", r"\1", line) for line in printed.splitlines()]
    return sorted(lines)
