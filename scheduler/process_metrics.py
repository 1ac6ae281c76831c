"""The process's own metrics, under the names that Prometheus gives them everywhere.

prometheus_client's collector reads /proc/stat for the time of the boot, and without it tells nothing. A hardened
service has no such file (systemd's ProcSubset=pid), and macOS no /proc; what is read here is there.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.memory import resident_bytes, virtual_bytes

# Each has an entry for each open descriptor: Linux's, and macOS's.
_DESCRIPTORS = ("/proc/self/fd", "/dev/fd")


class ProcessMetrics(Collector):
    """Reads at each scrape; what the system does not tell is left out."""

    def __init__(self) -> None:
        # Once: a clock that is set later must not look like a restart.
        self._start_unix_s = start_unix_s()

    def collect(self) -> Iterable[Metric]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield CounterMetricFamily(
            "process_cpu_seconds", "Time on processors, user's and system's.", value=usage.ru_utime + usage.ru_stime
        )
        max_fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        gauges: tuple[tuple[str, str, float | None], ...] = (
            ("process_start_time_seconds", "When the process was started, in Unix time.", self._start_unix_s),
            ("process_resident_memory_bytes", "Memory of the process that is in RAM.", resident_bytes()),
            ("process_virtual_memory_bytes", "Addresses that the process has mapped.", virtual_bytes()),
            ("process_open_fds", "Open file descriptors.", open_fds()),
            (
                "process_max_fds",
                "File descriptors that may be open.",
                math.inf if max_fds == resource.RLIM_INFINITY else max_fds,
            ),
        )
        for name, said, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(name, said, value=value)


def start_unix_s() -> float:
    """When the process was started, in Unix time; where the system does not tell, now."""
    try:
        # Field 22, counted from behind the name, which may hold anything: ticks since the boot (proc(5)).
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return time.time()
    # The clock of those ticks, which goes on while the machine sleeps.
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def open_fds() -> int | None:
    """Open file descriptors; None where no folder lists them."""
    for folder in _DESCRIPTORS:
        try:
            # Less the one that lists.
            return len(os.listdir(folder)) - 1
        except OSError:
            continue
    return None
