"""The process's own metrics, where /proc has processes only, where there is no /proc, and against the truth."""

import builtins
import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from scheduler import process_metrics
from scheduler.metrics import Metrics
from scheduler.process_metrics import ProcessMetrics, open_fds

NAMES = {
    "process_cpu_seconds_total",
    "process_start_time_seconds",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def samples() -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(ProcessMetrics())
    return {sample.name: sample.value for family in registry.collect() for sample in family.samples}


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    """Files and folders whose path begins so are not there."""

    def guarded(real: Any) -> Any:
        def ask(path: Any, *args: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(hidden):
                raise FileNotFoundError(2, "No such file or directory", path)
            return real(path, *args, **more)

        return ask

    monkeypatch.setattr(builtins, "open", guarded(builtins.open))
    monkeypatch.setattr(pathlib.io, "open", guarded(pathlib.io.open))  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "listdir", guarded(os.listdir))


@linux_only
def test_all_is_told_where_proc_has_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "/proc/stat", "/proc/meminfo", "/proc/uptime")
    with pytest.raises(FileNotFoundError):
        pathlib.Path("/proc/stat").read_bytes()
    assert set(samples()) == NAMES | {"process_virtual_memory_bytes"}


def test_what_needs_no_proc_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    hide(monkeypatch, "/proc")
    before_s = time.time()
    found = samples()
    assert set(found) == NAMES
    assert before_s <= found["process_start_time_seconds"] <= time.time()


def test_without_a_list_of_descriptors_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_metrics, "_DESCRIPTORS", ("/no/such",))
    assert "process_open_fds" not in samples()
    assert "process_max_fds" in samples()


def test_descriptors_are_counted() -> None:
    before = open_fds()
    assert before is not None
    reading, writing = os.pipe()
    try:
        assert open_fds() == before + 2
    finally:
        os.close(reading)
        os.close(writing)
    assert open_fds() == before


def test_the_figures_are_the_systems() -> None:
    low = resource.getrusage(resource.RUSAGE_SELF)
    found = samples()
    high = resource.getrusage(resource.RUSAGE_SELF)
    assert low.ru_utime + low.ru_stime <= found["process_cpu_seconds_total"] <= high.ru_utime + high.ru_stime
    assert found["process_max_fds"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = high.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert 1 << 20 < found["process_resident_memory_bytes"] <= 2 * most
    assert found.get("process_virtual_memory_bytes", most) >= found["process_resident_memory_bytes"] // 2


@linux_only
def test_the_start_is_that_of_the_process_and_not_of_its_metrics() -> None:
    program = "import sys; sys.stdin.read(1); from scheduler.process_metrics import *; print(start_unix_s())"
    before_s = time.time()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        started_s = time.time()
        said, _ = process.communicate(b"x")
    # A tick is a hundredth of a second, and the clocks are not read at one moment.
    assert before_s - 0.1 <= float(said) <= started_s + 0.1


def test_the_daemon_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "/proc/stat")
    names = {sample.name for family in Metrics().registry.collect() for sample in family.samples}
    assert names >= NAMES
