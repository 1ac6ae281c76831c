"""A real Prometheus scrapes a real daemon as deploy/ configures it, and every panel of the dashboard has data."""

from __future__ import annotations

import gzip
import http.client
import json
import math
import shutil
import socket
import statistics
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.client import Client
from tests.deploy.folder import DEPLOY
from tests.deploy.test_dashboard import plain, targets
from tests.e2e.daemon import START_S, Daemon, at_once, idle, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

SCRAPE_S = 1
# A rate needs two scrapes; more of them, so that one that is late does no harm.
SCRAPES = 6
ROWS = 32
# What a scrape may take while that many rows decode, the median of so many; what else runs on the machine makes some of
# them longer.
SCRAPE_LIMIT_S = 0.02
NUM_TIMED = 101


class Prometheus:
    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._address}/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float:
        """Of the one series that it gives; nan while there is none."""
        samples = self.query(expression)
        assert len(samples) <= 1, samples
        return float(samples[0]["value"][1]) if samples else math.nan

    def wait_for(self, condition: Callable[[Prometheus], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                if condition(self):
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline_s, "it hangs"
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Prometheus]]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    scraped_port, port = free_port(), free_port()
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    assert "127.0.0.1:9100" in config
    config = config.replace("9100", str(scraped_port)).replace("15s", f"{SCRAPE_S}s")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(DEPLOY / "prometheus" / "rules.yml", folder)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    flags = ["--metrics-port", str(scraped_port), "--store", str(folder / "store")]
    with serving(folder, *flags) as daemon, (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
        try:
            yield daemon, Prometheus(port)
        finally:
            process.terminate()
            process.wait(60)


def time_scrapes(port: int) -> list[float]:
    """Seconds of each of NUM_TIMED scrapes as Prometheus makes them, on one connection: all while ROWS rows decode, by
    what each of them says itself."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    taken_s = []
    try:
        while len(taken_s) < NUM_TIMED:
            began_s = time.perf_counter()
            connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
            body = connection.getresponse().read()
            taken_s.append(time.perf_counter() - began_s)
            assert f"\nlaned_requests_running {ROWS}.0\n" in gzip.decompress(body).decode()
    finally:
        connection.close()
    return taken_s


def test_rows_are_scraped_in_time_and_every_panel_has_data(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = scraped
    prometheus.wait_for(lambda found: found.value('up{job="laned"}') == 1)
    taken_s: list[float] = []

    async def busy() -> None:
        """Rows that decode until enough scrapes have been made; then some requests of every other kind."""
        async with Client(daemon.socket) as client:

            async def keep_on(number: int) -> None:
                async with client.submit(f"Number {number}", max_tokens=4000, ignore_eos=True) as answer:
                    async for _ in answer:
                        if done.is_set():
                            return

            async def look() -> None:
                def enough() -> None:
                    running = f"(laned_requests_running == {ROWS})"
                    prometheus.wait_for(
                        lambda found: found.value(f"count_over_time({running}[2m:{SCRAPE_S}s])") >= SCRAPES
                    )

                await trio.to_thread.run_sync(enough)
                port = (await client.status())["metrics_port"]
                taken_s.extend(await trio.to_thread.run_sync(time_scrapes, port))
                done.set()

            done = trio.Event()
            await at_once(*[lambda number=number: keep_on(number) for number in range(ROWS)], look)
            await idle(client)
            for _ in range(2):
                await client.ask("One, two, three, " * 40, max_tokens=2, ignore_eos=True)
        async with await trio.open_unix_socket(str(daemon.socket)) as stranger:
            await stranger.send_all(b"GET / HTTP/1.1\r\n\r\n")
            while await stranger.receive_some():
                pass

    trio.run(busy)
    median_s, p95_s = (statistics.quantiles(taken_s, n=20)[part] for part in (9, 18))
    print(f"{NUM_TIMED} scrapes beside {ROWS} rows: median {median_s * 1e3:.1f} ms, p95 {p95_s * 1e3:.1f}")
    assert median_s < SCRAPE_LIMIT_S
    time.sleep(3 * SCRAPE_S)
    without = [
        f"{title}: {target['expr']}" for title, target in targets() if not prometheus.query(plain(target["expr"]))
    ]
    assert without == []


def test_the_rules_are_loaded_and_the_daemon_is_in_order(scraped: tuple[Daemon, Prometheus]) -> None:
    _, prometheus = scraped
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    firing = [rule["name"] for rule in group["rules"] if rule.get("state") == "firing"]
    assert firing == []
    assert prometheus.value("laned:generation_tokens:rate5m") > 0
