"""What happened in the last minute, for people who look now; Prometheus has the counters and histograms of all time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lanes.lane import StepResult

WINDOW_S = 60
# A rate "now" is the mean of so long: on a CPU a step or a piece of a prompt may take a good part of a second.
RATE_S = 5
# 64 rows at 100 steps a second are this many in a second and a half; sorting them takes a millisecond.
MOST_TIMES = 10_000
PERCENTILES = (50, 90, 99)
COUNTED = ("generated", "processed", "memory", "disk")


class _Times:
    """The latest durations, in seconds, each with when it was seen; none older than WINDOW_S is told."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=MOST_TIMES)

    def add(self, now_s: float, seconds: float) -> None:
        self._seen.append((now_s, seconds))

    def report(self, now_s: float) -> dict[str, Any]:
        while self._seen and self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()
        values = sorted(seconds for _, seconds in self._seen)
        return {"count": len(values), **{f"p{part}_s": percentile(values, part) for part in PERCENTILES}}


class Recent:
    """Told of every token and turn, in Trio's thread; a microsecond each.

    Tokens are counted by whole seconds: generated, processed (of prompts), and those of prompts that came back from
    memory or disk and needed no processing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._seconds: deque[tuple[int, dict[str, int]]] = deque()
        self._first_s = _Times()
        self._interval_s = _Times()

    def first_token(self, ttft_s: float, from_memory: int = 0, from_disk: int = 0) -> None:
        now_s = self._clock()
        self._first_s.add(now_s, ttft_s)
        counts = self._counts(now_s)
        counts["generated"] += 1
        counts["memory"] += from_memory
        counts["disk"] += from_disk

    def token(self, interval_s: float) -> None:
        """One more token, so long after the one before it."""
        now_s = self._clock()
        self._interval_s.add(now_s, interval_s)
        self._counts(now_s)["generated"] += 1

    def step(self, result: StepResult) -> None:
        if result.chunk_tokens:
            self._counts(self._clock())["processed"] += result.chunk_tokens

    def report(self) -> dict[str, Any]:
        """For the report of `laned status`.

        seconds: how long "recent" is. first_token, between_tokens: count, p50_s, p90_s and p99_s, None where there was
        none. tokens: for each of COUNTED per_s, the rate now, total, of the window, and history, by seconds, the oldest
        first; the second that has just begun is not in it.
        """
        now_s = self._clock()
        second = math.floor(now_s)
        self._forget(second)
        by_second = dict(self._seconds)
        # The second under way and RATE_S whole ones before it, or what there has been so far.
        rate_s = min(now_s - (second - RATE_S), max(now_s - self._began_s, 1.0))
        tokens = {}
        for name in COUNTED:
            history = [by_second[at][name] if at in by_second else 0 for at in range(second - WINDOW_S, second)]
            current = by_second[second][name] if second in by_second else 0
            per_s = (sum(history[-RATE_S:]) + current) / rate_s
            tokens[name] = {"per_s": round(per_s, 2), "total": sum(history) + current, "history": history}
        return {
            "seconds": WINDOW_S,
            "first_token": self._first_s.report(now_s),
            "between_tokens": self._interval_s.report(now_s),
            "tokens": tokens,
        }

    def _counts(self, now_s: float) -> dict[str, int]:
        second = math.floor(now_s)
        if not self._seconds or self._seconds[-1][0] != second:
            self._forget(second)
            self._seconds.append((second, dict.fromkeys(COUNTED, 0)))
        return self._seconds[-1][1]

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - WINDOW_S:
            self._seconds.popleft()


def percentile(values: Sequence[float], part: int) -> float | None:
    """The smallest of the sorted values that `part` percent of them do not exceed; None of none."""
    return values[max(math.ceil(len(values) * part / 100), 1) - 1] if values else None
