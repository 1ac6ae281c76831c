"""`laned doctor`: what of this machine keeps laned from working or from working well, and what to do about it.

With --self-test the machine's backend is checked, too (lanes.doctor), which makes a report that can be sent: no test of
ours has run on most machines.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler import dial
from scheduler.commands import disk, packages, surroundings
from scheduler.commands.finding import Finding
from scheduler.commands.status import size_of
from scheduler.commands.top_frame import seconds
from scheduler.listener import default_socket_path
from scheduler.log import printable
from scheduler.usage import CommandFailed, Parser

STYLES = {
    "ok": "green",
    "right": "green",
    "warning": "yellow",
    "absent": "dim",
    "problem": "bold red",
    "wrong": "bold red",
}
# GFLOP/s of a product of 512 rows in float32 that each core does on processors of the last ten years, and more.
SLOW_CORE_GFLOPS = 8.0
REPORT_COLUMNS = 100


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "doctor",
        "Look at this machine as laned will find it, and say what to do about what is wrong: packages, MLX and its\n"
        "BLAS, memory, disk, limits, socket, a running daemon. Exit status 1 if something is broken.",
        (
            "laned doctor",
            "laned doctor --store /ssd/laned",
            "laned doctor --self-test --output report.txt",
            "laned doctor --self-test --json > report.json",
        ),
    )
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="check that what laned computes is right on this machine's backend, and what it costs: under a minute, "
        "on a GPU some minutes the first time, while its kernels are compiled",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output", metavar="FILE", help="write the report into a file, too")
    parser.add_argument("--store", metavar="DIR", help="look at a folder that is to hold a store, and at its speed")
    parser.add_argument("--blas", metavar="auto|off|PATH", default="auto", help="as in laned serve (default: auto)")
    dial.add_flag(parser)
    chosen = parser.parse(argv)
    report = _Report(chosen.json, chosen.output)
    try:
        _examine(report, chosen.socket, chosen.store, chosen.blas, chosen.self_test)
    finally:
        report.finish()
    return 1 if report.is_broken else 0


class _Report:
    """What was found so far: shown as it comes, so that a check that kills the process is known by the last line."""

    def __init__(self, as_json: bool, path: str | None) -> None:
        self.as_json = as_json
        self.path = path
        self.findings: list[Finding] = []
        self.device: Mapping[str, Any] | None = None
        self.verdicts: list[Mapping[str, Any]] = []
        self.costs: Mapping[str, Any] | None = None
        self._running: str | None = None
        self._progress = Console(stderr=True)
        self._began_s = time.monotonic()
        self.save()

    @property
    def is_broken(self) -> bool:
        wrong = any(verdict["outcome"] == "wrong" for verdict in self.verdicts)
        return wrong or any(finding.level == "problem" for finding in self.findings)

    def begin(self, what: str) -> None:
        self._running = what
        self.save()
        self._say(f"{what} ...")

    def record(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "broken": self.is_broken,
            "findings": [asdict(finding) for finding in self.findings],
            "device": self.device,
            "verdicts": self.verdicts,
            "costs": self.costs,
            "running": self._running,
        }

    def save(self) -> None:
        """Write what is known; after each part, so that nothing of it is lost."""
        if self.path is None:
            return
        try:
            with open(self.path, "w", encoding="utf-8") as file:
                self._write(file, REPORT_COLUMNS)
        except OSError as error:
            raise CommandFailed(f"--output {self.path} cannot be written: {error.strerror}.") from error

    def _say(self, what: str) -> None:
        """On a terminal on one line that is written over by the next; elsewhere a line for each, with the time."""
        if self._progress.is_terminal:
            width = self._progress.width - 1
            self._progress.print(Text(what[:width].ljust(width), style="dim"), end="\r")
        elif what:
            self._progress.print(f"{time.monotonic() - self._began_s:5.1f} s  {what}", highlight=False)

    def finish(self) -> None:
        self._say("")
        if sys.exc_info()[0] is None:
            self._running = None
        self.save()
        self._write(sys.stdout, None)

    def _write(self, file: TextIO, columns: int | None) -> None:
        if self.as_json:
            print(json.dumps(self.record()), file=file)
        else:
            show(self.record(), Console(file=file, width=columns, highlight=False))


def machine() -> dict[str, str]:
    """What anybody who reads the report has to know first."""
    return {
        "laned": version("laned"),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{platform.machine()} {platform.processor()}".strip(),
    }


def _examine(report: _Report, socket: str | None, store: str | None, blas: str, self_test: bool) -> None:
    from scheduler.commands.diagnosis import diagnose
    from scheduler.loading import cache_place

    found = report.findings
    report.begin("packages")
    found.extend(packages.check_packages())
    load, cores = surroundings.load_and_cores()
    found.append(surroundings.check_load(load, cores))
    found.append(surroundings.check_descriptors())
    report.begin("socket")
    found.extend(surroundings.check_socket(Path(socket) if socket else default_socket_path()))
    report.begin("disk")
    if store is not None:
        found.extend(disk.check_store(Path(store).expanduser()))
    else:
        found.append(disk.check_place(cache_place()))

    def take(part: str, told: Any) -> None:
        if part == "device":
            report.device = told
            found.extend(device_findings(told, cores, load))
        elif part == "costs":
            report.costs = told
        else:
            report.verdicts.extend(told)

    diagnose(blas, self_test, report.begin, take)


def device_findings(device: Mapping[str, Any], cores: int, load: float) -> list[Finding]:
    """What the model's thread has found of MLX, or why it has found nothing."""
    if "error" in device:
        do = "install the build of MLX that fits this machine: the README tells which"
        return [Finding("problem", "MLX", f"cannot be used: {printable(device['error'])}", do)]
    found = [surroundings.check_memory(device["memory_bytes"], surroundings.free_bytes())]
    backend = device["backend"]
    name = f" ({device['device']})" if device["device"] else ""
    said = f"computes on {backend}{name}, {size_of(device['device_memory_bytes'])}"
    if backend != "cpu":
        return [*found, Finding("ok", "MLX", said)]
    if sys.platform == "darwin":
        do = "use a Python for arm64, outside of virtual machines: MLX found no Metal here"
        found.append(Finding("problem", "MLX", said, do))
    elif has_nvidia():
        do = "uv run --no-group cpu --extra cuda13 (or cuda12): this MLX is the build for processors"
        found.append(Finding("warning", "MLX", f"{said}, but there is an NVIDIA GPU", do))
    else:
        found.append(Finding("ok", "MLX", said))
    return [*found, *_blas_findings(device, cores, load)]


def _blas_findings(device: Mapping[str, Any], cores: int, load: float) -> list[Finding]:
    rates = device["product_gflops"]["float32"]
    speed = f"{rates['8 rows']:.0f} GFLOP/s at 8 rows, {rates['512 rows']:.0f} at 512"
    said = f"{printable(device['blas'])}: {speed}"
    if device["blas_kind"] == "stock":
        return [Finding("warning", "BLAS", f"{said}. {printable(device['blas_sentence'])}", "install OpenBLAS as told")]
    if rates["512 rows"] < SLOW_CORE_GFLOPS:
        do = "end what else runs" if load > cores / 2 else "an old processor, or one that is shared with others"
        return [Finding("warning", "BLAS", f"{said}, which is slow", do)]
    return [Finding("ok", "BLAS", said)]


def has_nvidia() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")


def show(record: Mapping[str, Any], console: Console) -> None:
    """Print a report."""
    told = record["machine"]
    console.print(
        Text(f"laned {told['laned']}, MLX {told['mlx']}, mlx-lm {told['mlx_lm']}, Python {told['python']}", "bold"),
        Text(f"{told['system']}, {told['processor']}"),
        "",
        _rows((finding["level"], finding["about"], finding["said"], finding["do"]) for finding in record["findings"]),
        sep="\n",
    )
    if record["verdicts"]:
        console.print("\nSelf-test", style="bold")
        verdicts = record["verdicts"]
        console.print(_rows((each["outcome"], each["name"], each["said"], each["then"]) for each in verdicts))
    if record["costs"]:
        _show_costs(record["costs"], console)
    if record["running"]:
        console.print(Text(f"\nIt ended while it was at: {record['running']}.", style="bold red"))
    console.print(f"\n{_summary(record)}")


def _rows(rows: Any) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=2)
    table.add_column(ratio=5)
    for level, about, said, do in rows:
        text = Text(printable(said))
        if do is not None:
            text.append(f"\n-> {printable(do)}", style="bold")
        table.add_row(Text(level, style=STYLES[level]), printable(about), text)
    return table


def _show_costs(costs: Mapping[str, Any], console: Console) -> None:
    shape = costs["shape"]
    named = f"{shape['num_hidden_layers']} layers of {shape['hidden_size']}"
    for title, part in (
        (f"A decode step of {named}", costs["steps"]),
        ("One call of attention, 32 heads of 128", costs["attention"]),
    ):
        table = Table(show_edge=False)
        table.add_column(title)
        for form in next(iter(part.values())):
            table.add_column(form, justify="right")
        for case, times in part.items():
            table.add_row(case, *map(seconds, times.values()))
        console.print("", table, sep="\n")
    part = costs["dispatch_part"]
    console.print(f"\nDispatching a step returns after {part:.0%} of its time.")


def _summary(record: Mapping[str, Any]) -> Text:
    counts = {"problem": 0, "warning": 0}
    for finding in record["findings"]:
        if finding["level"] in counts:
            counts[finding["level"]] += 1
    counts["problem"] += sum(verdict["outcome"] == "wrong" for verdict in record["verdicts"])
    if not any(counts.values()):
        return Text("All is well.", style="green")
    said = [f"{number} {level}{'s' * (number > 1)}" for level, number in counts.items() if number]
    return Text(" and ".join(said) + ".", style="bold red" if counts["problem"] else "yellow")
