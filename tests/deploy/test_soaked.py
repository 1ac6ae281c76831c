"""A daemon under its units, hardening and all, under load: LANED_SOAK_MINUTES, or four."""

import json
import os
from pathlib import Path

import pytest

from tests.bench.soak import MEMORY
from tests.deploy.boot import boot, needs_boot

pytestmark = [pytest.mark.slow, *needs_boot]

MINUTES = float(os.environ.get("LANED_SOAK_MINUTES", "4"))
# Resident memory in the last quarter, against the second.
MOST_GROWTH = 1.1


def test_it_serves_on_in_the_same_memory(tmp_path: Path) -> None:
    said = boot("soaked.sh", tmp_path, timeout_s=MINUTES * 60 + 600, arguments=f"{MINUTES:g}")
    print("\n".join(said["load"]))
    measured = {row["metric"]: row for row in json.loads((tmp_path / "trial" / "soak.json").read_text())}
    assert measured["failed"]["ours"] == 0
    assert measured[MEMORY]["ours"] <= MOST_GROWTH * measured[MEMORY]["peer"]
    assert said["state"] == ["active", "0"], "and was never started again"
    process = dict(line.split(":\t") for line in said["process"])
    assert process == {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapBnd": "0" * 16}
    assert said["stop"] == ["success"]
    assert not [line for line in said["journal"] if "Traceback" in line]
