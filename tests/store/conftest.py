from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.writer_bench import Bench, Scripted


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A writer whose queue holds forty tokens."""
    return Bench(Scripted(tmp_path), queue_bytes=16 * 40)
