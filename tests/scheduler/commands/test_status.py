"""The table of `laned status`: all that the daemon reports is in it, and what it does not report is left out."""

import io
from typing import Any

import pytest
from rich.console import Console

from scheduler.commands import status

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
    "rows": {"running": 5, "prefilling": 1, "waiting": 31, "max": 8},
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
        "used 6 of 16",
        "room in each 2,048 tokens",
        "memory 1.5 GiB",
        "requests 1,234 (1,200 completed, 30 cancelled, 4 failed)",
        "tokens 98,765 in, 43,210 out",
        "process 1.0 GiB",
        "MLX's arrays 700.0 MiB",
        "kept by MLX 10.0 MiB",
        "MLX's peak 900.0 MiB",
    ):
        assert part in table, part


@pytest.mark.parametrize("missing", [key for key in REPORT if key != "model"])
def test_a_part_that_is_not_reported_is_left_out(missing: str) -> None:
    report = {key: value for key, value in REPORT.items() if key != missing}
    assert "SmolLM2" in shown(report)
    assert shown(report) != shown(REPORT)
    assert "laned ?: ?" in shown({})


def test_zero_is_said_and_no_metrics_are_not() -> None:
    report = REPORT | {"rows": {"running": 0, "prefilling": 0, "waiting": 0, "max": 8}, "metrics_port": None}
    assert "decoding 0 of 8" in shown(report)
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
