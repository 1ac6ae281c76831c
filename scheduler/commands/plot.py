"""The figures of `laned bench` as a picture. Needs matplotlib, which only this command uses: the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from scheduler.log import printable

Points = Sequence[Mapping[str, Any]]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the report's figures to a .png or .svg file, by its ending: a panel for each thing that was measured."""
    model, settings = report["model"], report["settings"]
    panels = [
        (report["rows"], _throughput),
        (report["rows"], _latency),
        (report["prompts"], _prompts),
    ]
    shown = [(points, panel) for points, panel in panels if points]
    figure = Figure(figsize=(4.2 * max(len(shown), 1), 3.6), layout="constrained")
    for index, (points, panel) in enumerate(shown, 1):
        panel(figure.add_subplot(1, len(shown), index), points)
    # A dollar would begin a formula.
    name = printable(str(model["name"])).replace("$", r"\$")
    figure.suptitle(
        f"{name}, {model['dtype']}, {model['backend']}; prompts of {settings['prompt_tokens']} tokens, "
        f"{settings['max_tokens']} new ones",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, title: str, x: str, ticks: Sequence[int]) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    if len(ticks) > 1:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _throughput(axes: Axes, points: Points) -> None:
    rows = [point["rows"] for point in points]
    rates = [point["tokens_per_s"] for point in points]
    axes.plot(rows, rates, marker="o", label="all rows")
    axes.plot(rows, [rate / number for rate, number in zip(rates, rows, strict=True)], marker="o", label="each row")
    axes.legend()
    _panel(axes, "tokens a second", "rows", rows)


def _latency(axes: Axes, points: Points) -> None:
    rows = [point["rows"] for point in points]
    for name, label in (("between_p50_s", "median"), ("between_p99_s", "99%")):
        axes.plot(rows, [point[name] * 1000 for point in points], marker="o", label=label)
    axes.legend()
    _panel(axes, "milliseconds between tokens", "rows", rows)


def _prompts(axes: Axes, points: Points) -> None:
    tokens = [point["tokens"] for point in points]
    axes.plot(tokens, [point["first_s"] for point in points], marker="o", label="computed")
    again = [(point["tokens"], point["again_s"]) for point in points if point["again_s"] is not None]
    if again:
        axes.plot(*zip(*again, strict=True), marker="o", label="remembered")
        axes.legend()
    _panel(axes, "seconds to the first token", "tokens of the prompt", tokens)
