"""`laned inspect`: how a model would run on this machine, and how many rows of it memory has room for."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lanes.geometry import RowGeometry
from lanes.lane import ModelInfo
from scheduler import configuration
from scheduler.budget import Budget
from scheduler.commands.status import size_of
from scheduler.log import printable
from scheduler.usage import Parser, UsageError

Line = tuple[str, str]

USUAL_TOKENS = 4096
# What of `laned serve` changes how a model is loaded or runs.
OPTIONS = (
    "trust-remote-code",
    "dtype",
    "max-rows",
    "kv-bits",
    "kv-group-size",
    "kv-cache-memory-bytes",
    "prompt-cache-bytes",
    "compile",
    "blas",
    "threads",
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "inspect",
        "Load a model as `laned serve` would, and tell how it runs on this machine: its caches one by one, its lane\n"
        "and why, what a row takes, and how many rows memory has room for.",
        (
            "laned inspect demo",
            "laned inspect mlx-community/Qwen3-4B-4bit --kv-bits 8 --length 16384",
            "laned inspect model.gguf --json | jq .lane",
        ),
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a Hugging Face id, a .gguf file, or one of the words demo and hybrid"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--length",
        metavar="TOKENS",
        action="append",
        type=_tokens,
        help=f"tokens of the rows to fit into memory; may be given several times (default: {USUAL_TOKENS}, and the "
        "model's context)",
    )
    configuration.add_flags(parser, OPTIONS)
    flags = parser.parse(argv)
    flags.log_level = "warning"
    chosen = configuration.load(flags)
    from scheduler.daemon import inspect
    from scheduler.storing import memory_bytes

    info, found = inspect(chosen)
    remembered_bytes = memory_bytes(chosen, info)
    budget = Budget.for_model(info, chosen.kv_cache_memory_bytes, remembered_bytes)
    memory = _memory(info, budget, remembered_bytes)
    report = {**found, "memory": memory, "rows": rows(info, budget, flags.length)}
    if flags.json:
        print(json.dumps(report))
    else:
        show(report, Console(file=sys.stdout))
    return 0


def _tokens(text: str) -> int:
    """For argparse, which names the type in its sentence."""
    tokens = int(text)
    if tokens < 1:
        raise ValueError
    return tokens


_tokens.__name__ = "number of tokens"


def _memory(info: ModelInfo, budget: Budget, remembered_bytes: int) -> dict[str, int]:
    return {
        "device_bytes": info.memory_bytes,
        "weight_bytes": info.weight_bytes,
        "remembered_bytes": remembered_bytes,
        "cache_limit_bytes": budget.limit_bytes,
    }


def rows(info: ModelInfo, budget: Budget, lengths: Sequence[int] | None) -> list[dict[str, int | None]]:
    """For each length: the bytes of a row and the rows that fit the daemon's budget, None where caches are not known.

    Raises UsageError for a length beyond the model's context.
    """
    context = info.context_tokens
    if lengths is None:
        lengths = [USUAL_TOKENS] if context is None else sorted({min(USUAL_TOKENS, context), context})
    for tokens in lengths:
        if context is not None and tokens > context:
            raise UsageError(f"--length {tokens}: the model's context is {context} tokens.")
    geometry = budget.geometry
    return [
        {
            "tokens": tokens,
            "row_bytes": None if geometry is None else geometry.row_bytes(tokens),
            "rows": 1 if info.lane == "serial" else rows_that_fit(geometry, budget.limit_bytes, tokens),
        }
        for tokens in lengths
    ]


def rows_that_fit(geometry: RowGeometry | None, limit_bytes: int, tokens: int) -> int | None:
    """The most rows of so many tokens whose lane fits the limit; None if a row takes nothing, or nobody knows what."""
    if geometry is None or not geometry.lane_bytes(1, tokens):
        return None
    found = limit_bytes // geometry.lane_bytes(1, tokens)
    while geometry.lane_bytes(found, tokens) > limit_bytes:  # a lane's slots are rounded up
        found -= 1
    return found


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report as a table."""
    name = printable(str(report["model"]["name"]))
    table = Table(title=Text(name), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, part in (
        ("model", _model(report["model"])),
        ("runs on", _device(report["device"])),
        ("lane", _lane(report["lane"])),
        ("forms", _forms(report["forms"])),
        ("caches", _caches(report["caches"])),
        ("a row", _row(report["row"])),
        ("memory", _sizes(report["memory"])),
        ("rows that fit", _rows(report["rows"])),
    ):
        lines = [Text.assemble((f"{what} ", "dim"), printable(said)) for what, said in part]
        table.add_row(title, Text("\n").join(lines))
    console.print(table)


def _model(model: Mapping[str, Any]) -> Iterator[Line]:
    yield "type", f"{model['model_type']}, {model['dtype']}, {size_of(model['weight_bytes'])} of weights"
    yield "weights", model["weights"].removeprefix("weights ")
    limit = model["context_tokens"]
    yield "context", "no limit" if limit is None else f"{limit:,} tokens"
    yield "vocabulary", f"{model['vocab_size']:,} tokens"


def _device(device: Mapping[str, Any]) -> Iterator[Line]:
    yield device["backend"], f"(BLAS {device['blas']})" if device["blas"] else ""


def _lane(lane: Mapping[str, Any]) -> Iterator[Line]:
    yield lane["name"], f"({lane['reason']})"
    yield "rows", "one after another" if lane["max_rows"] == 1 else f"{lane['max_rows']} together at most (--max-rows)"


def _forms(forms: Mapping[str, Any]) -> Iterator[Line]:
    yield "attention", forms["attention"] or "as the model has it"
    yield "projections", f"{forms['joined']} groups joined" if forms["joined"] else "each by itself"
    yield "steps", "compiled" if forms["compiled"] else "eager"
    if shared := forms["shared_prompt_tokens"]:
        yield "prompts", f"of up to {shared:,} tokens share a pass"


def _caches(caches: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    for run in caches:
        which = str(run["first"]) if run["first"] == run["last"] else f"{run['first']}-{run['last']}"
        sizes = []
        if run["state_bytes"]:
            sizes.append(f"{size_of(run['state_bytes'])} of state")
        if run["column_bytes"]:
            sizes.append(f"{size_of(run['column_bytes'])} a token")
        rings = run["rings"] or ()
        sizes += [f"{size_of(ring['column_bytes'])} for each of {ring['columns']:,} tokens" for ring in rings]
        yield which, f"{run['kind']}: {', '.join(sizes) or ('size not known' if run['rings'] is None else 'not used')}"


def _row(row: Mapping[str, Any] | None) -> Iterator[Line]:
    if row is None:
        yield "size", "not known, for a cache of a kind that is not"
        return
    growth = row["bytes_per_token"]
    yield ("grows by", f"{size_of(growth)} a token") if growth else ("does not", "grow")
    if row["fixed_bytes"]:
        yield "and has", f"{size_of(row['fixed_bytes'])} of state and full rings"


def _sizes(memory: Mapping[str, Any]) -> Iterator[Line]:
    yield "device", size_of(memory["device_bytes"])
    yield "weights", size_of(memory["weight_bytes"])
    yield "what is remembered", size_of(memory["remembered_bytes"])
    yield "for rows", size_of(memory["cache_limit_bytes"])


def _rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    for each in rows:
        number = "not known" if each["rows"] is None else f"{each['rows']:,}"
        size = "" if each["row_bytes"] is None else f", {size_of(each['row_bytes'])} each"
        yield f"{each['tokens']:,} tokens:", f"{number}{size}"
