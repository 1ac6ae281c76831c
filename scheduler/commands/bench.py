"""`laned bench`: how fast a model is on this machine, by the number of rows and by the length of prompts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from scheduler import configuration
from scheduler.commands.bench_run import (
    NotTogether,
    PromptFigures,
    RowsFigures,
    measure_prompt,
    measure_rows,
    obstacle,
    warm_up,
)
from scheduler.commands.inspect import OPTIONS
from scheduler.commands.status import size_of
from scheduler.commands.surroundings import load_and_cores
from scheduler.commands.top_frame import seconds
from scheduler.log import printable
from scheduler.service import Service
from scheduler.usage import CommandFailed, Parser, UsageError

# What of `laned serve` decides how fast it is; --rows says how many there are.
FLAGS = (*(name for name in OPTIONS if name != "max-rows"), "prefill-step-size", "max-stall-ms", "prompt-cache-bytes")


@dataclasses.dataclass
class Figures:
    """What was measured so far, and what is to be said of it."""

    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[RowsFigures] = dataclasses.field(default_factory=list)
    prompts: list[PromptFigures] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "bench",
        "Load a model as `laned serve` would and measure it: tokens a second and latencies by the number of rows that\n"
        "are decoded together, and how fast prompts are processed. Nothing else should run on the machine meanwhile.",
        (
            "laned bench demo",
            "laned bench mlx-community/Qwen3-4B-4bit --rows 1,8,32 --prompt-tokens 1024 --plot bench.png",
            "laned bench model.gguf --kv-bits 8 --json > bench.json",
        ),
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a Hugging Face id, a .gguf file, or one of the words demo and hybrid"
    )
    parser.add_argument(
        "--rows", metavar="N,N,...", type=_numbers, default=[1, 2, 4, 8], help="rows to try (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=_number, default=64, help="tokens of each row's prompt (default: 64)"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=_number, default=32, help="tokens of each row that are timed (default: 32)"
    )
    parser.add_argument(
        "--prompts",
        metavar="N,N,...",
        type=_numbers,
        default=[128, 512],
        help="lengths of prompts to time alone (default: 128,512)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures into a .png or .svg file")
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="read prompts that come again from this disk, not from memory; what is written there is removed",
    )
    configuration.add_flags(parser, FLAGS)
    flags = parser.parse(argv)
    flags.log_level = "warning"
    flags.max_rows = str(max(flags.rows))
    flags.num_draft_tokens = "0"  # a prompt of random words says nothing of how often guesses are right
    if flags.plot:
        _check_plot(flags.plot)
    figures = Figures()
    load, cores = load_and_cores()
    if load > cores / 2:
        figures.notes.append(f"The machine was busy before ({load:.1f} processes on {cores} cores): it can do better")
    interrupted = False
    from scheduler.daemon import try_out

    async def measure(service: Service) -> None:
        await _measure(service, figures, flags.rows, flags.prompts, flags.prompt_tokens, flags.max_tokens)

    with _store_of_its_own(flags):
        try:
            try_out(configuration.load(flags), measure)
        except* KeyboardInterrupt:
            interrupted = True
    settings = {"prompt_tokens": flags.prompt_tokens, "max_tokens": flags.max_tokens, "complete": not interrupted}
    report = {**figures.record(), "settings": settings}
    if figures.rows or figures.prompts or not interrupted:
        if flags.json:
            print(json.dumps(report))
        else:
            show(report, Console(file=sys.stdout))
        if flags.plot:
            from scheduler.commands.plot import draw

            try:
                draw(report, Path(flags.plot))
            except OSError as error:
                raise CommandFailed(f"--plot {flags.plot} cannot be written: {error.strerror or error}.") from error
    return 130 if interrupted else 0


@contextmanager
def _store_of_its_own(flags: argparse.Namespace) -> Iterator[None]:
    """In the folder of --store, for as long as the block lasts: a user's own store is left alone, and memory keeps
    nothing that should be read from the disk."""
    if flags.store is None:
        del flags.store  # as an option that is not given
        yield
        return
    try:
        made = TemporaryDirectory(prefix="laned-bench-", dir=Path(flags.store).expanduser())
    except OSError as error:
        raise UsageError(f"--store {flags.store}: {error.strerror}.") from error
    with made as folder:
        flags.store = folder
        if not hasattr(flags, "prompt_cache_bytes"):
            flags.prompt_cache_bytes = "0"
        yield


def _number(text: str) -> int:
    """For argparse, which names the type in its sentence."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


_number.__name__, _numbers.__name__ = "number", "list of numbers"


def _check_plot(path: str) -> None:
    """Before minutes are spent on what then cannot be drawn."""
    if Path(path).suffix not in (".png", ".svg"):
        raise UsageError(f"--plot takes a file that ends in .png or .svg, not {path!r}.")
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no such folder.")
    existed = Path(path).exists()
    try:
        with open(path, "ab"):
            pass
        if not existed:
            os.unlink(path)
    except OSError as error:
        raise UsageError(f"--plot {path} cannot be written: {error.strerror or error}.") from None
    try:
        import scheduler.commands.plot  # noqa: F401 (whether it can be imported)
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib: install laned[plot], or `uv run --extra plot laned bench`."
        ) from None


async def _measure(
    service: Service, figures: Figures, rows: list[int], prompts: list[int], prompt_tokens: int, steps: int
) -> None:
    info = service.info
    figures.model = {
        "name": info.name,
        "model_type": info.model_type,
        "dtype": info.dtype,
        "weight_bytes": info.weight_bytes,
        "lane": info.lane,
        "backend": info.backend,
        "blas": info.blas,
        "laned": service.version,
    }
    context = service.context_tokens
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("warming up", total=len(rows) + len(prompts))
        await warm_up(service)
        for done, number in enumerate(rows):
            progress.update(task, description=f"{number} row{'s' * (number > 1)}", completed=done)
            if (reason := obstacle(service, number, prompt_tokens, steps)) is not None:
                figures.notes.append(f"{number} rows were left out: {reason}")
                continue

            def partly(part: float, done: int = done) -> None:
                progress.update(task, completed=done + part)

            try:
                figures.rows.append(await measure_rows(service, number, prompt_tokens, steps, partly))
            except NotTogether:
                figures.notes.append(
                    f"{number} rows were left out: the first one's context was full before the last began"
                )
        for done, tokens in enumerate(prompts, len(rows)):
            progress.update(task, description=f"a prompt of {tokens:,}", completed=done)
            if context is not None and tokens >= context:
                figures.notes.append(f"A prompt of {tokens:,} tokens was left out: the model's context is {context:,}")
            else:
                figures.prompts.append(await measure_prompt(service, tokens))


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report as tables of 80 columns at most."""
    model, settings = report["model"], report["settings"]
    name = Text.assemble((printable(model["name"]), "bold"), f"  {model['dtype']}, {size_of(model['weight_bytes'])}")
    console.print(name + Text(printable(f", {model['lane']} lane on {model['backend']}")))
    if model["blas"]:
        console.print(Text(printable(model["blas"]), "dim"))
    if report["rows"]:
        said = f"\nRows decoded together, each with a prompt of {settings['prompt_tokens']:,} tokens"
        console.print(said, _rows_table(report["rows"]), sep="\n", highlight=False)
    if report["prompts"]:
        console.print("\nA prompt alone", _prompts_table(report["prompts"]), sep="\n", highlight=False)
    for sentence in report["notes"]:
        console.print(Text(f"{printable(sentence)}.", style="yellow"))
    if not settings["complete"]:
        console.print(Text("Interrupted: the rest was not measured.", style="yellow"))


def _table(*names: str) -> Table:
    table = Table(show_edge=False, pad_edge=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("rows", "tokens/s", "each", "between tokens", "p99", "first token", "slowest")
    for row in rows:
        each = row["tokens_per_s"] / row["rows"]
        times = [row[name] for name in ("between_p50_s", "between_p99_s", "first_p50_s", "first_last_s")]
        table.add_row(str(row["rows"]), f"{row['tokens_per_s']:.1f}", f"{each:.1f}", *map(seconds, times))
    return table


def _prompts_table(prompts: Sequence[Mapping[str, Any]]) -> Table:
    remembers = any(prompt["again_s"] is not None for prompt in prompts)
    table = _table(
        "tokens", "first token", "tokens/s", *(("again", "remembered", "times as fast") if remembers else ())
    )
    for prompt in prompts:
        cells = [f"{prompt['tokens']:,}", seconds(prompt["first_s"]), f"{prompt['tokens_per_s']:,.0f}"]
        if remembers and prompt["again_s"] is not None:
            gain = prompt["first_s"] / prompt["again_s"]
            cells += [seconds(prompt["again_s"]), f"{prompt['cached_tokens']:,} tokens", f"{gain:.1f}"]
        table.add_row(*cells)
    return table
