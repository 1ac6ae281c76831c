"""The OpenAPI document: whole, and true of the gateway, as Schemathesis sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from jsonschema import Draft202012Validator

from scheduler.gateway import openapi
from scheduler.gateway.app import DIALECTS, OPEN_PATHS
from scheduler.gateway.guard import Guard
from scheduler.gateway.settings import Settings
from tests.gateway.in_process import echoing

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


def references(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        if isinstance(found := document.get("$ref"), str):
            yield found
        for value in document.values():
            yield from references(value)
    elif isinstance(document, list):
        for value in document:
            yield from references(value)


def test_every_reference_leads_somewhere() -> None:
    document = openapi.document(DIALECTS, has_keys=True)
    for reference in set(references(document)):
        found: Any = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
        Draft202012Validator.check_schema(found)


def test_every_dialect_is_told() -> None:
    paths = openapi.document(DIALECTS, has_keys=False)["paths"]
    assert {each.path for each in DIALECTS} < set(paths)
    assert all("200" in operation["responses"] for path in paths.values() for operation in path.values())
    assert paths["/health"]["get"]["security"] == []
    assert "/health" in OPEN_PATHS


@pytest.mark.slow
@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="needs the dependency group gateway-test")
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """What a body may hold is more than a schema says, so that a schema's example may be refused: all else counts."""
    flags = ["--max-examples", "30", "--phases", "coverage,fuzzing", "--seed", "1", "--continue-on-failure"]
    flags += ["--exclude-checks", "positive_data_acceptance", "--header", "Authorization: Bearer k", "--no-color"]

    async def run() -> subprocess.CompletedProcess[bytes]:
        async with echoing(tmp_path, Settings(guard=Guard(keys=("k",)), drain_s=1.0)) as (url, _):
            command = [str(SCHEMATHESIS), "run", f"{url}/openapi.json", *flags]
            # Schemathesis keeps notes where it runs.
            return await trio.run_process(command, capture_stdout=True, check=False, cwd=tmp_path)

    ran = trio.run(run)
    assert ran.returncode == 0, ran.stdout.decode()
