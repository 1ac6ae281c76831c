"""One frame of `laned top`: a daemon's report as lines of a terminal's width and height. No clock, no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from scheduler.commands.bars import Glyphs, curve, two_part_bar
from scheduler.commands.status import duration, size_of
from scheduler.log import printable

Report = Mapping[str, Any]

_LABEL = 15
# Beside a slot's bar: its number, its length, and who is in it.
_BESIDE_BAR = 38
# In a grid a slot has its number, a bar and its length.
_GRID_CELL = 20


def frame(report: Report, width: int, height: int, glyphs: Glyphs, notice: Text | None = None) -> list[Text]:
    """The report in `height` lines at most, none wider than `width`. notice: what the last line says."""
    lines = [_title(report, width, glyphs), *_figures(report, width, glyphs)]
    last = [] if notice is None else [notice]
    lines += _slots(report, width, max(height - len(lines) - len(last), 1), glyphs)
    lines = lines[: height - len(last)]
    lines += [Text()] * (height - len(lines) - len(last)) if last else []
    for line in lines + last:
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(width, overflow=glyphs.overflow)
    return lines + last


def _title(report: Report, width: int, glyphs: Glyphs) -> Text:
    model = report.get("model", {})
    blas = f", {model['blas']}" if model.get("blas") else ""
    name, runs_on = printable(str(model.get("name", "?"))), printable(f"{model.get('backend', '?')}{blas}")
    up = f"up {duration(report.get('uptime_s', 0))}"
    left = Text.assemble((name, "bold"), f"  {printable(str(model.get('lane', '?')))} lane on {runs_on}")
    left.truncate(max(width - len(up) - 2, 0), overflow=glyphs.overflow)
    return Text.assemble(left, " " * max(width - left.cell_len - len(up), 1), (up, "dim"))


def _figures(report: Report, width: int, glyphs: Glyphs) -> Iterator[Text]:
    rows, recent = report.get("rows", {}), report.get("recent", {})
    if rows:
        prompts = rows.get("prefilling", 0)
        parts = [f"{rows.get('running', 0)} of {rows.get('max', '?')} decoding"]
        parts.append(f"{prompts} prompt{'' if prompts == 1 else 's'}")
        if rows.get("set_aside"):
            parts.append(f"{rows['set_aside']} set aside")
        waiting = rows.get("waiting", 0)
        yield _line("rows", *parts, (f"{waiting} waiting", "yellow" if waiting else ""))
    tokens = recent.get("tokens", {})
    for label, name in (("tokens out", "generated"), ("prompt tokens", "processed")):
        if name in tokens:
            yield _rate(label, tokens[name], width, glyphs)
    if tokens and (hits := _hits(tokens)):
        yield _line("remembered", *hits, (f"in {recent.get('seconds', 0)} s", "dim"))
    for label, name in (("first token", "first_token"), ("between tokens", "between_tokens")):
        if name in recent:
            yield _times(label, recent[name], recent.get("seconds", 0))
    if memory := report.get("memory"):
        yield _line("memory", *_memory(memory, report.get("slots", {})))
    if store := report.get("store"):
        yield _line("store", *store_parts(store))
    if totals := report.get("totals"):
        ends = [(f"{totals[end]:,} {end}", "red" if end == "failed" else "") for end in _ENDS if totals.get(end)]
        yield _line("requests ended", f"{totals.get('requests', 0):,}", *ends)


_ENDS = ("completed", "cancelled", "failed", "refused")


def _line(label: str, *parts: str | tuple[str, str]) -> Text:
    said = Text("  ").join(Text(part) if isinstance(part, str) else Text(*part) for part in parts)
    return Text.assemble((label.ljust(_LABEL), "bold"), said)


def _rate(label: str, tokens: Report, width: int, glyphs: Glyphs) -> Text:
    said = f"{tokens['per_s']:8.1f} a second  "
    history = tokens["history"]
    return Text.assemble(
        (label.ljust(_LABEL), "bold"), said, (curve(history, width - _LABEL - len(said), glyphs), "green")
    )


def _hits(tokens: Report) -> list[str]:
    """Of the prompts of the window: how much of them came from where."""
    found = {name: tokens[name]["total"] for name in ("memory", "disk") if name in tokens}
    whole = sum(found.values()) + tokens.get("processed", {}).get("total", 0)
    return [f"{count / whole:.0%} from {name} ({count:,} tokens)" for name, count in found.items() if count]


def _times(label: str, times: Report, window_s: int) -> Text:
    if not times.get("count"):
        return _line(label, (f"none in {window_s} s", "dim"))
    parts = [f"{name.removesuffix('_s')} {seconds(value)}" for name, value in times.items() if name.endswith("_s")]
    return _line(label, *(part.ljust(12) for part in parts), (f"of {times['count']:,} in {window_s} s", "dim"))


def seconds(value: float) -> str:
    """A duration with three digits: 98 ms, 1.25 s."""
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _memory(memory: Report, slots: Report) -> Iterator[str]:
    if "rss_bytes" in memory:
        yield f"{size_of(memory['rss_bytes'])} process"
    if "mlx_active_bytes" in memory:
        yield f"{size_of(memory['mlx_active_bytes'])} arrays"
    if "cache_bytes" in slots:
        limit = memory.get("cache_limit_bytes")
        yield size_of(slots["cache_bytes"]) + (f" of {size_of(limit)} rows" if limit else " rows")


def store_parts(store: Report) -> Iterator[str]:
    """What is known of a store, by tier; and whatever was counted beside."""
    for tier, held in store.get("tiers", {}).items():
        if isinstance(held, Mapping) and "bytes" in held:
            pieces = f" in {held['segments']:,}" if "segments" in held else ""
            yield f"{size_of(held['bytes'])}{pieces} {printable(str(tier))}"
    if store.get("queue_bytes"):
        yield f"{size_of(store['queue_bytes'])} to be written"
    for name in ("dropped", "evicted", "corrupt", "errors"):
        if store.get(name):
            yield f"{store[name]:,} {name}"
    if store.get("away"):
        yield "away"


def _slots(report: Report, width: int, height: int, glyphs: Glyphs) -> Iterator[Text]:
    """A bar for each slot and each prompt under way, in as many columns as it takes to show them all."""
    slots = report.get("slots", {})
    requests = {request["row"]: request for request in report.get("requests", ())}
    rows, lengths = slots.get("rows", ()), slots.get("lengths", ())
    held = list(zip(rows, lengths, strict=False))
    others = [request for row, request in requests.items() if row not in rows]
    room = slots.get("capacity_tokens", 0)
    told = f" slots: {slots.get('used', 0)} of {slots.get('total', 0)} used, {room:,} tokens in each "
    yield Text.assemble(glyphs.rule * 2, (told, "bold"), _legend(glyphs, width - len(told)))
    bar = max(width - _BESIDE_BAR, 8)
    if len(held) + len(others) < height:
        for slot, (row, length) in enumerate(held):
            yield _slot(slot, length, requests.get(row), row is None, room, bar, glyphs)
        for request in others:
            yield _without_slot(request, bar, glyphs)
        return
    cells = [_cell(slot, row, length, requests.get(row), room, glyphs) for slot, (row, length) in enumerate(held)]
    yield from _grid(cells, width, height - 1)


def _legend(glyphs: Glyphs, room: int) -> Text:
    legend = Text.assemble((glyphs.first, "cyan"), " prompt ", (glyphs.second, "green"), " answer ")
    return legend if legend.cell_len + 2 <= room else Text()


def _slot(slot: int, length: int, request: Report | None, is_free: bool, room: int, width: int, glyphs: Glyphs) -> Text:
    """A slot is as of the last reading of the engine: the request in it may have ended since."""
    number = f"{slot:>3} "
    if is_free:
        return Text.assemble((number, "bold"), (glyphs.rest * width, "dim"), ("        free", "dim"))
    prompt, answer, who = _parts(length, request)
    return Text.assemble(
        (number, "bold"), two_part_bar(prompt, answer, room, width, glyphs), f" {prompt + answer:>7,}  ", who
    )


def _parts(length: int, request: Report | None) -> tuple[int, int, Text]:
    """Tokens of the prompt and of the answer in a slot, and a word on the request."""
    if request is None:
        return length, 0, Text("ended", style="dim")
    prompt, answer = request["prompt_tokens"], request["generated_tokens"]
    who = f"#{request['row']}  {answer:,} of {request['max_tokens']:,}"
    return prompt, answer, Text(who)


def _without_slot(request: Report, width: int, glyphs: Glyphs) -> Text:
    """A prompt under way, or a row that was set aside."""
    whole, done, said = request["prompt_tokens"], request["processed_tokens"], "prompt of {:,}"
    if request["state"] == "aside":
        whole, done, said = whole + request["generated_tokens"], 0, "aside, {:,}"
    bar = two_part_bar(done, 0, whole, width, glyphs)
    return Text.assemble(("  + ", "bold"), bar, f" {done:>7,}  #{request['row']}  {said.format(whole)}")


def _cell(slot: int, row: int | None, length: int, request: Report | None, room: int, glyphs: Glyphs) -> Text:
    width = _GRID_CELL - 12
    if row is None:
        return Text.assemble((f"{slot:>3} ", "bold"), (glyphs.rest * width, "dim"), " " * 8)
    prompt, answer, _ = _parts(length, request)
    bar = two_part_bar(prompt, answer, room, width, glyphs)
    return Text.assemble((f"{slot:>3} ", "bold"), bar, f" {prompt + answer:<6,} ")


def _grid(cells: Sequence[Text], width: int, height: int) -> Iterator[Text]:
    columns = max(width // _GRID_CELL, 1)
    lines = [Text.assemble(*cells[start : start + columns]) for start in range(0, len(cells), columns)]
    if len(lines) <= height:
        yield from lines
        return
    shown = max(height - 1, 0)
    yield from lines[:shown]
    yield Text(f"    and {len(cells) - shown * columns} more", style="dim")
