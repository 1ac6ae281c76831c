"""The table of `laned status`: all that the daemon reports is in it, and what it does not report is left out."""

import io
from typing import Any

import pytest
from rich.console import Console

from scheduler import reports
from scheduler.commands import status
from store.keeping import KeeperStats
from store.stats import StoreStats
from tests.scheduler.echo_daemon import echo_daemon, in_trio

REPORT: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 4711,
    "uptime_s": 93784.5,
    "socket": "/run/user/1000/laned.sock",
    "metrics_host": "::1",
    "metrics_port": 9100,
    "model": {
        "name": "SmolLM2",
        "model_type": "llama",
        "lane": "batch",
        "lane_reason": "all caches are kv",
        "dtype": "float32",
        "backend": "cpu",
        "blas": "OpenBLAS 0.3.34",
        "context_tokens": 8192,
        "weight_bytes": 538 * 2**20,
    },
    "adapters": {"poet": {"rank": 8, "bytes": 3 * 2**20, "requests": 2}},
    "rows": {"running": 5, "prefilling": 1, "set_aside": 2, "waiting": 31, "max": 8},
    "slots": {"total": 16, "used": 6, "capacity_tokens": 2048, "cache_bytes": 3 * 2**30 // 2},
    "totals": {
        "requests": 1234,
        "completed": 1200,
        "cancelled": 30,
        "failed": 4,
        "refused": 0,
        "prompt_tokens": 98765,
        "generated_tokens": 43210,
    },
    "memory": {
        "rss_bytes": 2**30,
        "mlx_active_bytes": 700 * 2**20,
        "mlx_cache_bytes": 10 * 2**20,
        "mlx_peak_bytes": 900 * 2**20,
    },
    "store": {
        "tiers": {
            "memory": {"bytes": 800 * 2**20, "segments": 12},
            "disk": {"bytes": 5 * 2**30 // 2, "segments": 1500},
        },
        "queue_bytes": 7 * 2**20,
        "written_bytes": 2**32,
        "dropped": 6,
        "evicted": 9,
        "corrupt": 1,
        "errors": 1100,
        "away": True,
    },
    "last_errors": [{"time": "2026-01-02T03:04:05.678Z", "level": "error", "message": "the disk is \x1bfull"}],
}


def shown(report: dict[str, Any]) -> str:
    stream = io.StringIO()
    status.show(report, Console(file=stream, width=100))
    return stream.getvalue()


def test_all_of_the_report_is_shown() -> None:
    table = shown(REPORT)
    for part in (
        "laned 0.1.0: SmolLM2",
        "up 1 d 2 h",
        "process 4711",
        r"2026-01-02 03:04:05 the disk is \x1bfull",
        "socket /run/user/1000/laned.sock",
        "metrics http://[::1]:9100/metrics",
        "type llama, float32, 538.0 MiB of weights",
        "lane batch (all caches are kv)",
        "runs on cpu, BLAS OpenBLAS 0.3.34",
        "context 8,192 tokens",
        "poet rank 8, 3.0 MiB, 2 requests now",
        "decoding 5 of 8",
        "prompt in work 1",
        "waiting 31",
        "set aside 2",
        "used 6 of 16",
        "room in each 2,048 tokens",
        "memory 1.5 GiB",
        "requests 1,234 (1,200 completed, 30 cancelled, 4 failed)",
        "tokens 98,765 in, 43,210 out",
        "process 1.0 GiB",
        "MLX's arrays 700.0 MiB",
        "kept by MLX 10.0 MiB",
        "MLX's peak 900.0 MiB",
        "memory 800.0 MiB in 12 segments",
        "disk 2.5 GiB in 1,500 segments",
        "to be written 7.0 MiB",
        "trouble 1,100 errors, 1 corrupt, 6 dropped",
        "away nothing is read from disk",
    ):
        assert part in table, part


def test_what_is_shown_is_what_a_daemon_reports() -> None:
    """So that nothing new in the report is forgotten here."""

    @in_trio
    async def reported() -> None:
        async with echo_daemon() as daemon:
            daemon.service.addresses = {"socket": "/x", "metrics_host": "::1", "metrics_port": 1}
            await daemon.loop._read_gauges()
            report = daemon.service.status().report
        assert set(report) - {"requests", "recent"} == set(REPORT) - {"store"}, "what `laned top` shows is not here"
        assert set(report["rows"]) == set(REPORT["rows"])
        assert set(report["totals"]) == set(REPORT["totals"])

    reported()
    disk = KeeperStats(bytes=1, segments=1)
    store = reports.store(StoreStats(disk=disk))
    assert set(store) == set(REPORT["store"])
    assert set(store["tiers"]) == set(REPORT["store"]["tiers"])


def test_a_store_in_order_is_two_lines() -> None:
    told = status._store(reports.store(StoreStats(memory_bytes=10, memory_segments=2, disk=KeeperStats())))
    assert list(told) == [("memory", "10 bytes in 2 segments"), ("disk", "0 bytes in 0 segments")]


@pytest.mark.parametrize("missing", [key for key in REPORT if key != "model"])
def test_a_part_that_is_not_reported_is_left_out(missing: str) -> None:
    report = {key: value for key, value in REPORT.items() if key != missing}
    assert "SmolLM2" in shown(report)
    assert shown(report) != shown(REPORT)
    assert "laned ?: ?" in shown({})


def test_zero_is_said_and_no_metrics_are_not() -> None:
    report = REPORT | {
        "rows": {"running": 0, "prefilling": 0, "set_aside": 0, "waiting": 0, "max": 8},
        "metrics_port": None,
    }
    assert "decoding 0 of 8" in shown(report)
    assert "set aside" not in shown(report)
    assert "metrics" not in shown(report)


def test_names_cannot_command_the_terminal() -> None:
    table = shown(REPORT | {"model": {"name": "a\x1b[2J[red]b", "lane": "x\x1b[2J"}})
    assert "a\\x1b[2J[red]b" in table
    assert "\x1b" not in table


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (2**40, "1024.0 GiB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert status.size_of(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3600, "1 h 0 min"), (90061, "1 d 1 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert status.duration(seconds) == text
