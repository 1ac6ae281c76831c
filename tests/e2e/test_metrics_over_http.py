"""/metrics and /healthz as Prometheus and a supervisor's probe see them."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from scheduler.client import Client
from tests.e2e.daemon import Daemon, idle

ASKED: dict[str, Any] = {"prompt": "One, two, three,", "max_tokens": 3, "ignore_eos": True}


def report_of(daemon: Daemon, ask: bool = False) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with Client(daemon.socket) as client:
            if ask:
                await client.ask(**ASKED)
            return await idle(client)

    return trio.run(main)


@pytest.fixture(scope="module")
def address(daemon: Daemon) -> str:
    return f"http://127.0.0.1:{report_of(daemon)['metrics_port']}"


def get(url: str, **headers: str) -> tuple[int, bytes, Any]:
    """Status, body and headers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def samples(address: str) -> dict[str, float]:
    """Every sample by name with its labels, as {name}{label=value,...}."""
    found = {}
    for family in text_string_to_metric_families(get(f"{address}/metrics")[1].decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_a_request_moves_what_it_should(daemon: Daemon, address: str) -> None:
    before = samples(address)
    report = report_of(daemon, ask=True)
    after = samples(address)
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    for name, by in {
        "laned_requests_received_total": 1,
        "laned_requests_total{outcome=length}": 1,
        "laned_requests_total{outcome=failed}": 0,
        "laned_generation_tokens_total": 3,
        "laned_time_to_first_token_seconds_count": 1,
        "laned_inter_token_latency_seconds_count": 2,
        "laned_e2e_request_latency_seconds_count": 1,
        "laned_request_queue_time_seconds_count": 1,
        "laned_connections_total": 1,
    }.items():
        assert moved[name] == by, name
    assert moved["laned_step_duration_seconds_count"] >= 3
    assert sum(moved[f"laned_prompt_tokens_total{{source={source}}}"] for source in ("computed", "memory", "disk")) >= 4
    for name in ("running", "waiting", "prefilling"):
        assert after[f"laned_requests_{name}"] == 0
    assert (after["laned_slots_used"], after["laned_model_loaded"]) == (0, 1)
    ended = sum(value for name, value in after.items() if name.startswith("laned_requests_total{"))
    assert ended == after["laned_requests_received_total"] == report["totals"]["requests"]


def test_a_connection_that_is_cut_is_counted_by_its_reason(daemon: Daemon, address: str) -> None:
    name = "laned_connections_refused_total{reason=frame_too_large}"
    before = samples(address).get(name, 0.0)

    async def main() -> None:
        async with await trio.open_unix_socket(str(daemon.socket)) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
            while await stream.receive_some():
                pass

    trio.run(main)
    # It is closed a moment before it is counted.
    daemon.wait_for(lambda: samples(address).get(name, 0.0) == before + 1)


def test_the_page_comes_in_the_forms_that_are_asked_for(address: str) -> None:
    status, body, headers = get(f"{address}/metrics", **{"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert b"# TYPE laned_requests_total counter" in gzip.decompress(body)
    _, body, headers = get(f"{address}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus's own linter is not installed")
def test_prometheus_has_nothing_to_say_against_it(address: str) -> None:
    page = get(f"{address}/metrics")[1]
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_healthz(address: str) -> None:
    assert get(f"{address}/healthz")[:2] == (200, b"ok\n")
    status, body, _ = get(f"{address}/healthz", Accept="application/json")
    assert (status, json.loads(body)["status"]) == (200, "ok")
    assert get(f"{address}/")[0] == 404
