"""What `laned top` is told: requests as they stand, slots by row, the store by tier."""

from typing import Any

import trio

from scheduler import reports
from scheduler.commands import top_frame
from scheduler.commands.bars import BLOCKS
from store.keeping import KeeperStats
from store.stats import StoreStats
from tests.scheduler.echo_daemon import echo_daemon, in_trio


@in_trio
async def test_requests_under_way_are_told_in_numbers_and_by_slot() -> None:
    async with echo_daemon() as daemon:
        client = await daemon.submit(id="secret", prompt="private", max_tokens=10**6)
        report: dict[str, Any] = {"requests": []}
        while not report["requests"] or report["requests"][0]["generated_tokens"] < 3:
            await trio.sleep(0.001)
            report = daemon.service.status().report
        (request,) = report["requests"]
        assert (request["row"], request["state"]) == (client.row_id, "decoding")
        assert (request["prompt_tokens"], request["processed_tokens"], request["max_tokens"]) == (7, 6, 10**6)
        assert request["age_s"] > 0
        assert report["recent"]["tokens"]["generated"]["total"] >= 3
        assert "secret" not in str(report)
        assert "private" not in str(report)
        await daemon.loop._read_gauges()
        slots = daemon.service.status().report["slots"]
        assert slots["rows"] == [client.row_id]
        assert slots["lengths"][0] > 7
        daemon.cancel(client)
    assert daemon.service.status().report["requests"] == []


@in_trio
async def test_those_that_wait_are_counted_only() -> None:
    async with echo_daemon(run_loop=False) as daemon:
        await daemon.submit(prompt="x")
        report = daemon.service.status().report
        assert (report["requests"], report["rows"]["waiting"]) == ([], 1)


@in_trio
async def test_the_report_makes_a_frame() -> None:
    async with echo_daemon() as daemon:
        await daemon.ask("hello", max_tokens=5)
        lines = [line.plain for line in top_frame.frame(daemon.service.status().report, 80, 24, BLOCKS)]
        assert any(line.startswith("requests ended 1") for line in lines)


def test_the_store_is_told_by_tier() -> None:
    told = reports.store(StoreStats(memory_bytes=10, memory_segments=2, evicted=1, corrupt=1, queue_bytes=5))
    assert told["tiers"] == {"memory": {"bytes": 10, "segments": 2}}
    assert (told["evicted"], told["corrupt"], told["queue_bytes"], told["away"]) == (1, 1, 5, False)
    disk = KeeperStats(bytes=100, segments=3, evicted=4, errors=2, away=True)
    told = reports.store(StoreStats(memory_bytes=10, evicted=1, errors=1, disk=disk))
    assert told["tiers"]["disk"] == {"bytes": 100, "segments": 3}
    assert (told["evicted"], told["errors"], told["away"]) == (5, 3, True)
