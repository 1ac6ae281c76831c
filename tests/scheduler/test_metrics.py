"""The metrics: every name by Prometheus's rules, every method moves what it says, gauges are read when scraped."""

import re
import shutil
import subprocess

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lanes.lane import EngineGauges, ModelInfo, StepResult
from scheduler.metrics import OUTCOMES, Metrics, Readings
from store.keeping import KeeperStats
from store.stats import StoreStats

GAUGES = EngineGauges(
    slots=8,
    slots_used=2,
    capacity_tokens=256,
    lengths=(5, 7),
    cache_bytes=1000,
    mlx_active_bytes=2000,
    mlx_cache_bytes=3000,
    mlx_peak_bytes=4000,
)
INFO = ModelInfo(
    "tiny", "llama", 9, None, ("kv",), "batch", "all kv", 8, 10, 1, None, 0, 1, "anywhere", "float32", "cpu", "openblas"
)

STORE = StoreStats(
    memory_bytes=10,
    memory_segments=1,
    evicted=4,
    errors=1,
    corrupt=1,
    disk_restored_bytes=7,
    disk=KeeperStats(bytes=30, segments=2, evicted=5, errors=2, corrupt=3),
)


def used() -> Metrics:
    """Metrics in which everything has happened once, so that every series is there."""
    readings = Readings(running=1, waiting=2, prefilling=3, connections=4, engine=GAUGES, store=STORE)
    metrics = Metrics(lambda: readings)
    metrics.loaded(INFO)
    metrics.connected()
    metrics.connection_refused("hello_timeout")
    metrics.arrived()
    metrics.admitted(0.02)
    metrics.step(StepResult(seconds=0.1, rows_decoded=2, chunk_tokens=7))
    metrics.first_token(0.3, prompt_tokens=8, from_memory=3, from_disk=2)
    metrics.token(0.04)
    metrics.store_asked(hit=True)
    metrics.store_saved(1.5)
    metrics.finished("stop", 0.5, completion_tokens=2)
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Name{label=value}: value, of everything but the buckets."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_every_name_follows_the_rules() -> None:
    text = generate_latest(used().registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) > 30
    for name, family in families.items():
        assert re.fullmatch("(laned|process)(_[a-z0-9]+)+", name), name
        assert family.documentation.endswith(".") or name.startswith("process_"), name
        exposed = {sample.name for sample in family.samples}
        assert exposed, f"{name} has no sample"
        for sample in family.samples:
            assert len(set(sample.labels) - {"le"}) <= 1 or name in ("laned_build_info", "laned_model_info"), name
        if family.type == "counter":
            assert exposed == {f"{name}_total"}, "a counter ends in _total and has no _created beside it"
        elif family.type == "histogram":
            assert exposed == {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
            assert re.search("_(seconds|tokens|rows)$", name), f"{name} names no unit"
        else:
            assert family.type == "gauge", (name, family.type)
            assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
        assert not re.search("_(ms|millis|milliseconds|us|kb|mb|gb|kib|mib|minutes|percent)(_|$)", name), name


def test_the_names_that_readers_look_for_are_there() -> None:
    found = samples(used())
    for name in (
        *(f"laned_requests_{state}" for state in ("running", "waiting", "prefilling")),
        "laned_generation_tokens_total",
        *(f"laned_prompt_tokens_total{{source={source}}}" for source in ("computed", "memory", "disk")),
        "laned_time_to_first_token_seconds_count",
        "laned_inter_token_latency_seconds_count",
        "laned_e2e_request_latency_seconds_count",
        "laned_request_queue_time_seconds_count",
        "laned_step_duration_seconds_count",
        "process_start_time_seconds",
    ):
        assert name in found, name
    assert set(OUTCOMES) == {
        name.removeprefix("laned_requests_total{outcome=").rstrip("}") for name in found if "{outcome" in name
    }


def test_each_method_moves_its_own_metrics_and_nothing_else() -> None:
    def moved(act: object) -> dict[str, float]:
        metrics = Metrics()
        before = samples(metrics)
        assert callable(act)
        act(metrics)
        return {
            name: round(value - before.get(name, 0), 6)
            for name, value in samples(metrics).items()
            if value != before.get(name) and "_bucket" not in name and name.startswith("laned")
        }

    def timed(name: str, seconds: float) -> dict[str, float]:
        return {f"laned_{name}_count": 1, f"laned_{name}_sum": seconds}

    assert moved(Metrics.arrived) == {"laned_requests_received_total": 1}
    assert moved(lambda m: m.admitted(0.5)) == timed("request_queue_time_seconds", 0.5)
    assert moved(lambda m: m.first_token(0.5, 9, from_memory=3, from_disk=1)) == {
        **timed("time_to_first_token_seconds", 0.5),
        **timed("request_prompt_tokens", 9),
        "laned_prompt_tokens_total{source=computed}": 5,
        "laned_prompt_tokens_total{source=memory}": 3,
        "laned_prompt_tokens_total{source=disk}": 1,
        "laned_generation_tokens_total": 1,
    }
    assert moved(lambda m: m.token(0.1)) == {
        **timed("inter_token_latency_seconds", 0.1),
        "laned_generation_tokens_total": 1,
    }
    assert moved(lambda m: m.finished("length", 2.0, 64)) == {
        **timed("e2e_request_latency_seconds", 2.0),
        **timed("request_generation_tokens", 64),
        "laned_requests_total{outcome=length}": 1,
    }
    assert moved(lambda m: m.finished("cancelled", 2.0, 3)) == {"laned_requests_total{outcome=cancelled}": 1}
    assert moved(lambda m: m.step(StepResult(seconds=0.2, rows_decoded=3))) == {
        **timed("step_duration_seconds", 0.2),
        **timed("step_rows", 3),
    }
    assert moved(lambda m: m.step(StepResult(seconds=0.2, chunk_tokens=50))) == {
        **timed("step_duration_seconds", 0.2),
        "laned_prefill_tokens_total": 50,
    }
    assert moved(lambda m: m.step(StepResult(seconds=0.2))) == {}
    assert moved(lambda m: m.step(StepResult(drafted_tokens=7, accepted_tokens=5))) == {
        "laned_spec_decode_num_draft_tokens_total": 7,
        "laned_spec_decode_num_accepted_tokens_total": 5,
    }
    assert moved(lambda m: m.store_asked(hit=True)) == {"laned_store_queries_total{result=hit}": 1}
    assert moved(lambda m: m.store_asked(hit=False)) == {"laned_store_queries_total{result=miss}": 1}
    assert moved(lambda m: m.store_saved(2.5)) == {"laned_store_saved_seconds_total": 2.5}
    assert moved(Metrics.connected) == {"laned_connections_total": 1}
    assert moved(lambda m: m.connection_refused("x")) == {"laned_connections_refused_total{reason=x}": 1}
    with pytest.raises(KeyError):
        Metrics().finished("exploded", 1.0)


def test_gauges_are_the_owners_at_the_moment_of_the_scrape() -> None:
    now = Readings(waiting=5)
    metrics = Metrics(lambda: now)
    found = samples(metrics)
    assert (found["laned_requests_waiting"], found["laned_model_loaded"]) == (5, 0)
    assert "laned_slots" not in found, "no slots before there is a lane"
    now = Readings(running=2, connections=4, engine=GAUGES)
    metrics.loaded(INFO)
    found = samples(metrics)
    assert (found["laned_requests_waiting"], found["laned_requests_running"], found["laned_model_loaded"]) == (0, 2, 1)
    shown = [found[f"laned_{name}"] for name in ("slots", "slots_used", "cached_tokens", "cache_bytes")]
    assert shown == [8, 2, 12, 1000]
    assert [found[f"laned_mlx_{name}_bytes"] for name in ("active", "cache", "peak")] == [2000, 3000, 4000]


def test_the_store_is_shown_by_tier_and_only_where_there_is_one() -> None:
    found = samples(used())
    assert [found[f"laned_store_bytes{{tier={tier}}}"] for tier in ("memory", "disk")] == [10, 30]
    assert [found[f"laned_store_segments{{tier={tier}}}"] for tier in ("memory", "disk")] == [1, 2]
    assert [found[f"laned_store_restored_bytes_total{{tier={tier}}}"] for tier in ("memory", "disk")] == [0, 7]
    assert [found[f"laned_store_evicted_total{{tier={tier}}}"] for tier in ("memory", "disk")] == [4, 5]
    assert [found[f"laned_store_{name}_total"] for name in ("errors", "corrupt")] == [3, 4]
    assert "laned_store_bytes{tier=disk}" not in samples(Metrics())


def test_two_daemons_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.arrived()
    assert samples(one)["laned_requests_received_total"] == 1
    assert samples(other)["laned_requests_received_total"] == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_promtool_has_nothing_to_say() -> None:
    text = generate_latest(used().registry)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
