"""`laned top` and `laned doctor` beside a daemon with the real model."""

from __future__ import annotations

from pathlib import Path

import trio

from scheduler.client import Client
from tests.e2e.daemon import Daemon, reports


def test_a_frame_shows_the_rows_under_way(daemon: Daemon) -> None:
    async def look() -> tuple[str, str]:
        async with Client(daemon.socket) as client:
            async with client.submit("Once upon a time", max_tokens=4000, ignore_eos=True):
                await reports(client, lambda report: any(row for row in report["slots"]["rows"]))
                frame = await trio.to_thread.run_sync(lambda: daemon.run("top", "--once").stdout)
            await reports(client, lambda report: not report["requests"])
            return frame, (await trio.to_thread.run_sync(lambda: daemon.run("top", "--once"))).stdout

    busy, idle = trio.run(look)
    assert "1 of 32 decoding" in busy
    assert any(line.startswith("  0 ") and line.endswith(" of 4,000") for line in busy.splitlines())
    assert "0 of 32 decoding" in idle
    assert "SmolLM2-135M-Instruct  batch lane on" in idle
    assert "p50" in idle


def test_a_picture_is_written(daemon: Daemon, tmp_path: Path) -> None:
    picture = tmp_path / "top.svg"
    assert daemon.run("top", "--once", "--svg", str(picture)).returncode == 0
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert daemon.run("top", "--once", "--svg", "/no/such/top.svg").returncode == 1


def test_the_doctor_finds_the_daemon(daemon: Daemon) -> None:
    told = daemon.run("doctor")
    said = " ".join(told.stdout.split())
    assert told.returncode == 0, told.stdout
    assert f"process {daemon.process.pid}" in said
    assert "for its owner only" in said
