from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from scheduler.progress import LoadingStopped, LoadProgress


@pytest.mark.parametrize(("done", "total", "shown"), [(0, 0, False), (5 << 20, 10 << 20, True)])
def test_bytes_are_shown_where_they_are_counted(done: int, total: int, shown: bool) -> None:
    out = StringIO()
    with LoadProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress(done, total, "warming up")
        assert progress._bar is not None
        progress._bar.refresh()
    assert "warming up" in out.getvalue()
    assert ("5.0/10.0 MiB" in out.getvalue()) == shown
    assert ("bytes" in out.getvalue()) is False


def test_a_stop_is_told_with_the_next_report() -> None:
    progress = LoadProgress(None)
    progress(1, 2, "reading weights")
    progress.stop()
    with pytest.raises(LoadingStopped):
        progress(2, 2, "reading weights")
