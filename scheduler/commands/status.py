"""`laned status`: what a running daemon reports of itself, as a table for people or as JSON."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler import dial
from scheduler.client import Client
from scheduler.log import printable
from scheduler.usage import Parser

Line = tuple[str, str]


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "status",
        "Show what a running daemon is doing: its model, rows, slots, totals, memory, store and troubles.",
        ("laned status", "laned status --json | jq .rows", "laned status --socket /run/user/1000/llama.sock"),
    )
    parser.add_argument("--json", action="store_true", help="print the daemon's report as one JSON object")
    dial.add_flag(parser)
    chosen = parser.parse(argv)

    async def ask(client: Client) -> Mapping[str, Any]:
        return await client.status()

    report = dial.call(chosen.socket, ask)
    if chosen.json:
        print(json.dumps(report))
    else:
        show(report, Console(file=sys.stdout))
    return 0


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report as a table. Parts that the daemon does not report are left out."""
    model = report.get("model", {})
    name = printable(str(model.get("name", "?")))
    table = Table(title=Text(f"laned {report.get('version', '?')}: {name}"), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, part in (
        ("daemon", _daemon(report)),
        ("model", _model(model)),
        ("adapters", _adapters(report.get("adapters", {}))),
        ("rows", _rows(report.get("rows", {}))),
        ("slots", _slots(report.get("slots", {}))),
        ("totals", _totals(report.get("totals", {}))),
        ("memory", _memory(report.get("memory", {}))),
        ("store", _store(report.get("store", {}))),
        ("errors", _errors(report.get("last_errors", ()))),
    ):
        lines = [Text.assemble((f"{what} ", "dim"), printable(said)) for what, said in part]
        if lines:
            table.add_row(title, Text("\n").join(lines))
    console.print(table)


def _daemon(report: Mapping[str, Any]) -> Iterator[Line]:
    if "uptime_s" in report:
        yield "up", duration(report["uptime_s"])
    if "pid" in report:
        yield "process", str(report["pid"])
    if "socket" in report:
        yield "socket", str(report["socket"])
    if report.get("metrics_port"):
        host = str(report.get("metrics_host", "127.0.0.1"))
        yield "metrics", f"http://{f'[{host}]' if ':' in host else host}:{report['metrics_port']}/metrics"


def _model(model: Mapping[str, Any]) -> Iterator[Line]:
    if "model_type" in model:
        size = f", {size_of(model['weight_bytes'])} of weights" if "weight_bytes" in model else ""
        yield "type", f"{model['model_type']}, {model.get('dtype', '?')}{size}"
    if "lane" in model:
        reason = f" ({model['lane_reason']})" if model.get("lane_reason") else ""
        yield "lane", f"{model['lane']}{reason}"
    if "backend" in model:
        blas = f", BLAS {model['blas']}" if model.get("blas") else ""
        yield "runs on", f"{model['backend']}{blas}"
    if "context_tokens" in model:
        limit = model["context_tokens"]
        yield "context", "no limit" if limit is None else f"{limit:,} tokens"


def _adapters(adapters: Mapping[str, Any]) -> Iterator[Line]:
    for name, adapter in adapters.items():
        size = size_of(adapter.get("bytes", 0))
        yield name, f"rank {adapter.get('rank', '?')}, {size}, {adapter.get('requests', 0)} requests now"


def _rows(rows: Mapping[str, Any]) -> Iterator[Line]:
    if rows:
        most = f" of {rows['max']}" if "max" in rows else ""
        yield "decoding", f"{rows.get('running', 0)}{most}"
        yield "prompt in work", str(rows.get("prefilling", 0))
        if rows.get("set_aside"):
            yield "set aside", f"{rows['set_aside']}, until memory has room"
        yield "waiting", str(rows.get("waiting", 0))


def _slots(slots: Mapping[str, Any]) -> Iterator[Line]:
    if slots:
        yield "used", f"{slots.get('used', 0)} of {slots.get('total', 0)}"
        yield "room in each", f"{slots.get('capacity_tokens', 0):,} tokens"
        yield "memory", size_of(slots.get("cache_bytes", 0))


def _totals(totals: Mapping[str, Any]) -> Iterator[Line]:
    if totals:
        ends = [f"{totals[end]:,} {end}" for end in ("completed", "cancelled", "failed", "refused") if totals.get(end)]
        yield "requests", f"{totals.get('requests', 0):,}" + (f" ({', '.join(ends)})" if ends else "")
        yield "tokens", f"{totals.get('prompt_tokens', 0):,} in, {totals.get('generated_tokens', 0):,} out"


def _memory(memory: Mapping[str, Any]) -> Iterator[Line]:
    for key, what in (
        ("rss_bytes", "process"),
        ("mlx_active_bytes", "MLX's arrays"),
        ("mlx_cache_bytes", "kept by MLX"),
        ("mlx_peak_bytes", "MLX's peak"),
    ):
        if memory.get(key) is not None:
            yield what, size_of(memory[key])


def _store(store: Mapping[str, Any]) -> Iterator[Line]:
    """What is remembered, by tier; and what went wrong, where something has."""
    for tier, held in store.get("tiers", {}).items():
        yield str(tier), f"{size_of(held.get('bytes', 0))} in {held.get('segments', 0):,} segments"
    if store.get("queue_bytes"):
        yield "to be written", size_of(store["queue_bytes"])
    if troubles := [f"{store[name]:,} {name}" for name in ("errors", "corrupt", "dropped") if store.get(name)]:
        yield "trouble", ", ".join(troubles)
    if store.get("away"):
        yield "away", "nothing is read from disk or written to it"


def _errors(errors: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    """The last ones, with the second in which they were."""
    for error in errors:
        yield str(error.get("time", "?"))[:19].replace("T", " "), str(error.get("message", "?"))


def size_of(num_bytes: float) -> str:
    """Bytes as a person reads them: 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds as a person reads them: the two largest units."""
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])
