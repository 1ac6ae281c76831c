"""What the doctor sees without MLX: each thing as it is here, and what it says where something is wrong."""

import resource
import socket
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.commands import surroundings
from scheduler.commands.finding import Finding
from scheduler.commands.surroundings import (
    check_daemon,
    check_descriptors,
    check_load,
    check_memory,
    check_socket,
    free_bytes,
)
from tests.scheduler.commands.test_status import REPORT
from tests.scheduler.echo import serving


def levels(findings: object) -> list[str]:
    return [finding.level for finding in findings]  # type: ignore[attr-defined]


def test_a_busy_machine_is_warned_of() -> None:
    assert check_load(0.9, 2).level == "ok"
    assert check_load(1.5, 2) == Finding(
        "warning", "load", "1.5 processes want to run, on 2 cores", check_load(9, 2).do
    )


def test_little_memory_is_warned_of() -> None:
    assert check_memory(16 << 30, 8 << 30).said == "8.0 GiB free of 16.0 GiB"
    assert check_memory(16 << 30, 1 << 30).level == "warning"
    assert check_memory(16 << 30, None) == Finding("ok", "memory", "16.0 GiB")


def test_free_memory_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       100 kB\nMemAvailable:    42 kB\n")
    assert free_bytes(told) == 42 * 1024
    assert free_bytes(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("limits", "level", "words"),
    [((256, 10_000), "warning", "ulimit -n"), ((256, 256), "warning", "administrator"), ((4096, 4096), "ok", "None")],
)
def test_few_descriptors_are_warned_of(
    limits: tuple[int, int], level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    finding = check_descriptors()
    assert (finding.level, words in str(finding.do)) == (level, True)


def test_a_free_place_a_left_socket_and_a_file(tmp_path: Path) -> None:
    (finding,) = check_socket(tmp_path / "s")
    assert (finding.level, "can be opened" in finding.said) == ("ok", True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    (finding,) = check_socket(tmp_path / "s")
    assert (finding.level, "will be replaced" in finding.said) == ("ok", True)
    (tmp_path / "file").touch()
    (finding,) = check_socket(tmp_path / "file")
    assert (finding.level, "is no socket" in finding.said) == ("problem", True)
    (finding,) = check_socket(tmp_path / ("x" * 200))
    assert finding.level == "problem"


def test_a_daemon_is_found_and_looked_at(tmp_path: Path) -> None:
    async def run() -> list[Finding]:
        async with serving(tmp_path / "s"):
            return await trio.to_thread.run_sync(lambda: list(check_socket(tmp_path / "s")))

    found = trio.run(run)
    assert [finding.about for finding in found] == ["socket", "daemon"]
    assert "for its owner only" in found[0].said


def test_a_daemon_that_says_nothing_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "HELLO_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        (finding,) = check_socket(tmp_path / "s")
    assert (finding.level, "said nothing" in finding.said) == ("warning", True)


def daemon(**changed: Any) -> dict[str, Any]:
    report: dict[str, Any] = {**REPORT, "totals": {**REPORT["totals"], "failed": 0}}
    return {**report, **changed}


def test_a_daemon_in_order() -> None:
    (finding,) = check_daemon(daemon(), "0.1.0")
    assert finding == Finding("ok", "daemon", "SmolLM2 for 1 d 2 h, process 4711")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": "0.0.9\x1b"}, "it is laned 0.0.9\\x1b, installed is 0.1.0"),
        ({"model": {"name": "m", "lane": "serial", "lane_reason": "no rows"}}, "one request at a time: no rows"),
        ({"totals": {"failed": 4, "requests": 1234}}, "4 of 1,234 requests have failed"),
    ],
)
def test_what_is_wrong_with_a_daemon(changed: dict[str, Any], words: str) -> None:
    wrong = [finding for finding in check_daemon(daemon(**changed), "0.1.0") if finding.level == "warning"]
    assert len(wrong) == 1
    assert words in wrong[0].said
    assert wrong[0].do
