"""What all benchmarks share: flags, a head that tells the machine, interleaved measuring, a table, JSON.

A benchmark measures ours and the peer in turns within one run, because machines change their speed while one looks
on; the ratio is the median of the ratios of neighbours, and above 1 means that we are better.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

PACKAGES = ("laned", "mlx", "mlx-lm", "trio")

# Width of a table that goes to a file, where there is no terminal to tell it.
FILE_COLUMNS = 160

T = TypeVar("T")
# Told how much of a measurement is done, from 0 to 1.
Report = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. peer and ratio are None where there is nothing to compare with."""

    bench: str
    case: str
    metric: str
    unit: str
    ours: float
    peer: float | None = None
    ratio: float | None = None
    spread: str = ""


@dataclass
class Bench:
    """One benchmark's run: collects rows while it shows its progress, prints and writes them at the end."""

    name: str
    quick: bool
    json_path: Path | None
    rows: list[Row] = field(default_factory=list)
    blas: str = "not used"
    only: tuple[str, ...] = ()
    flags: Mapping[str, str | None] = field(default_factory=dict)

    def add(
        self,
        case: str,
        metric: str,
        unit: str,
        ours: Sequence[float],
        peer: Sequence[float] = (),
        *,
        more_is_better: bool = True,
    ) -> Row:
        """Book measurements; those of ours and peer with one index were made beside each other."""
        ratio = None
        if peer:
            ratios = [(a / b if more_is_better else b / a) for a, b in zip(ours, peer, strict=True) if a > 0 and b > 0]
            ratio = statistics.median(ratios) if ratios else None
        row = Row(
            self.name,
            case,
            metric,
            unit,
            statistics.median(ours),
            statistics.median(peer) if peer else None,
            ratio,
            f"{_spread(ours)}" + (f" / {_spread(peer)}" if peer else ""),
        )
        self.rows.append(row)
        return row

    def head(self) -> str:
        found = []
        for package in PACKAGES:
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                found.append(f"{package} not installed")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return (
            f"{self.name}{' (quick)' if self.quick else ''}: {platform.system()} {platform.machine()}, {_processor()}, "
            f"{cores} cores, Python {platform.python_version()}, {', '.join(found)}; BLAS: {self.blas}"
        )

    def table(self) -> Table:
        table = Table(title=self.head(), title_justify="left")
        for name in ("case", "metric"):
            table.add_column(name)
        for name in ("ours", "peer", "ratio", "min..max (ours / peer)"):
            table.add_column(name, justify="right")
        said = ""
        for row in self.rows:
            table.add_row(
                row.case if row.case != said else "",
                f"{row.metric} [{row.unit}]" if row.unit else row.metric,
                _figure(row.ours),
                "" if row.peer is None else _figure(row.peer),
                "" if row.ratio is None else f"{row.ratio:.2f}",
                row.spread,
            )
            said = row.case
        return table

    def write(self) -> None:
        Console(width=None if sys.stdout.isatty() else FILE_COLUMNS).print(self.table())
        if self.json_path:
            rows = [{key: value for key, value in asdict(row).items() if key != "spread"} for row in self.rows]
            self.json_path.write_text(json.dumps(rows, indent=1) + "\n")


@contextmanager
def bench(
    name: str, description: str, parts: Sequence[str] = (), flags: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Bench]:
    """Parse --quick, --json and, where a benchmark has parts, --only; run the block, print the table.

    flags: further ones that take a value, and their help; Bench.flags has what was given.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions, under 45 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as a JSON list")
    if parts:
        said = "leave out the other parts (default: all; with --quick, the first)"
        parser.add_argument("--only", choices=parts, nargs="+", help=said)
    for flag, said in flags.items():
        parser.add_argument(f"--{flag}", metavar="VALUE", help=said)
    chosen = parser.parse_args()
    only = getattr(chosen, "only", None) or (parts[:1] if chosen.quick else parts)
    given = {flag: getattr(chosen, flag) for flag in flags}
    run = Bench(name, chosen.quick, chosen.json, only=tuple(only), flags=given)
    try:
        yield run
    finally:  # what was measured before an interrupt is worth its table
        run.write()


def interleave(rounds: int, label: str, *measures: Callable[[], T]) -> list[list[T]]:
    """Call the measures in turn, `rounds` times each; returns the values of each. The order alternates, so that none
    always runs in the other's wake."""
    return interleave_long(rounds, label, *(lambda report, measure=measure: measure() for measure in measures))


def interleave_long(rounds: int, label: str, *measures: Callable[[Report], T]) -> list[list[T]]:
    """As interleave(), for measures that take long: each is given a function to tell how much of it is done."""
    values: list[list[T]] = [[] for _ in measures]
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(label, total=rounds * len(measures))
        for turn in range(rounds):
            order = list(enumerate(measures))
            for index, measure in order if turn % 2 == 0 else order[::-1]:
                done = sum(map(len, values))

                def report(part: float, done: int = done) -> None:
                    progress.update(task, completed=done + min(part, 1.0))

                values[index].append(measure(report))
                progress.update(task, completed=done + 1)
    return values


def _spread(values: Sequence[float]) -> str:
    return f"{_figure(min(values))}..{_figure(max(values))}"


def _figure(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
