"""The last minute in figures: rates and percentiles by a clock of the test's own, and nothing older than the window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.lane import StepResult
from scheduler.metrics import Metrics
from scheduler.recent import MOST_TIMES, RATE_S, WINDOW_S, Recent, percentile


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def test_nothing_has_happened() -> None:
    report = Recent(Clock()).report()
    assert report["first_token"] == {"count": 0, "p50_s": None, "p90_s": None, "p99_s": None}
    assert report["tokens"]["generated"] == {"per_s": 0.0, "total": 0, "history": [0] * WINDOW_S}


def test_rates_are_of_the_last_seconds_and_what_is_older_than_the_window_is_gone() -> None:
    clock = Clock()
    recent = Recent(clock)
    for _ in range(200):
        recent.token(0.1)
        clock.now_s += 0.1
    recent.first_token(0.5, from_memory=30, from_disk=12)
    recent.step(StepResult(chunk_tokens=64))
    report = recent.report()
    tokens = report["tokens"]
    assert tokens["generated"]["total"] == 201
    assert tokens["generated"]["per_s"] == pytest.approx(10, rel=0.1)
    assert tokens["generated"]["history"][-5:] == [10] * 5
    assert [tokens[name]["total"] for name in ("processed", "memory", "disk")] == [64, 30, 12]
    clock.now_s += RATE_S + 1
    assert recent.report()["tokens"]["generated"]["per_s"] == 0
    assert recent.report()["between_tokens"]["count"] == 200
    clock.now_s += WINDOW_S
    assert recent.report() == Recent(clock).report()


def test_a_daemon_that_has_just_begun_is_not_measured_by_seconds_before_it_was() -> None:
    clock = Clock()
    recent = Recent(clock)
    for _ in range(20):
        clock.now_s += 0.1
        recent.token(0.1)
    assert recent.report()["tokens"]["generated"]["per_s"] == pytest.approx(10)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.sampled_from([50, 90, 99]))
def test_so_many_do_not_exceed_a_percentile(values: list[float], part: int) -> None:
    values.sort()
    found = percentile(values, part)
    assert found is not None
    assert found in values
    assert sum(value <= found for value in values) * 100 >= part * len(values)
    assert sum(value < found for value in values) * 100 < part * len(values)


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


def test_times_are_bounded_in_number() -> None:
    recent = Recent(Clock())
    for _ in range(MOST_TIMES + 5):
        recent.token(0.1)
    assert recent.report()["between_tokens"]["count"] == MOST_TIMES


def test_metrics_tell_it_of_all_that_happens() -> None:
    metrics = Metrics()
    metrics.first_token(0.5, 10)
    metrics.token(0.02)
    metrics.step(StepResult(rows_decoded=1, chunk_tokens=9))
    report = metrics.recent.report()
    assert (report["first_token"]["p99_s"], report["between_tokens"]["p50_s"]) == (0.5, 0.02)
    assert [report["tokens"][name]["total"] for name in ("generated", "processed")] == [2, 9]
