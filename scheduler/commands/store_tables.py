"""A store's folder as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler.commands.status import duration, size_of
from scheduler.commands.store_listing import SHORT_ID, Line, Listing
from scheduler.log import printable
from store.checkpoint import TensorSpec
from store.files import FILES

# Deeper ones would push the other columns out.
MAX_INDENT = 10


def show_listing(found: Listing, limit: int, now_s: float, console: Console) -> None:
    """At most `limit` beginnings, each with what hangs on it."""
    table = Table(title=Text(str(found.folder), "bold"), title_justify="left", box=None, pad_edge=False)
    table.add_column("segment", no_wrap=True)
    for title in ("tokens", "new", "size", "used"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("model", no_wrap=True)
    for root in found.roots[:limit]:
        for line in found.tree(root):
            _add(table, line, now_s)
    if found.roots:
        console.print(table)
    for said in _below(found, limit):
        console.print(Text(said))


def _add(table: Table, line: Line, now_s: float) -> None:
    segment, file = line.segment, line.file
    indent = " " * min(line.depth - 1, MAX_INDENT) + "└ " if line.depth else ""
    table.add_row(
        Text.assemble((indent, "dim"), segment.id[:SHORT_ID]),
        f"{segment.stop:,}",
        f"{len(segment.tokens):,}",
        size_of(file.nbytes),
        ago(file.used_ns, now_s),
        Text(printable(segment.fingerprint[:8]), "dim"),
    )


def ago(used_ns: int, now_s: float) -> str:
    return f"{duration(max(0.0, now_s - used_ns / 1e9))} ago"


def _below(found: Listing, limit: int) -> list[str]:
    num = len(found.segments)
    said = [f"{num:,} segments, {size_of(found.our_bytes)} of files of ours" if num else "nothing is kept here"]
    said[0] += f", {size_of(FILES.free_bytes(found.folder))} free"
    if (more := len(found.roots) - limit) > 0:
        said.append(f"{more:,} more beginnings: --limit {len(found.roots)} lists them all")
    scanned = found.found
    for files, what in (
        (scanned.opaque, "of another version of laned, or not readable"),
        (scanned.corrupt, "damaged; the next start deletes them"),
        (scanned.temporaries, "being written, or left over; the next start deletes them"),
    ):
        if files:
            said.append(f"{len(files):,} files {what} ({size_of(sum(file.nbytes for file in files))})")
    if orphans := found.orphans:
        said.append(f"{len(orphans):,} segments that hang on nothing; the next start deletes them")
    if scanned.other_bytes:
        said.append(f"{size_of(scanned.other_bytes)} of other files, which count and stay")
    return said


def show_segment(found: Listing, id_: str, now_s: float, console: Console) -> None:
    stored = found.stored(id_)
    segment, file = stored.segment, found.files[id_]
    table = Table(title=Text(id_, "bold"), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    bounds = "at any token" if segment.boundaries is None else ", ".join(map(str, segment.boundaries)) or "nowhere"
    table.add_row("tokens", f"{segment.start:,} to {segment.stop:,}, {len(segment.tokens):,} of its own")
    table.add_row("can be cut", bounds)
    table.add_row("model", Text(printable(segment.fingerprint)))
    table.add_row("size", f"{size_of(file.nbytes)} on disk, {size_of(segment.nbytes)} of tensors")
    table.add_row("used", ago(file.used_ns, now_s))
    table.add_row("file", Text(printable(str(file.path))))
    chain = [f"{each[:SHORT_ID]}  to {found.segments[each].stop:,}" for each in found.chain(id_)]
    table.add_row("chain", Text("\n".join(chain)))
    if children := found.children.get(id_):
        table.add_row("continued by", Text("\n".join(child[:SHORT_ID] for child in children)))
    table.add_row("tensors", Text("\n".join(_tensors(segment.tensors))))
    console.print(table)


def _tensors(specs: Sequence[TensorSpec]) -> list[str]:
    """Neighbours that are alike in one line."""

    def kind(spec: TensorSpec) -> str:
        shape = "x".join(map(str, spec.shape))
        of = f"state at {spec.at:,}" if spec.at is not None else f"tokens {_spans(spec)}"
        return f"{shape} {spec.dtype}, {of}, {size_of(spec.nbytes)} each"

    lines = []
    for what, group in groupby(specs, key=kind):
        names = [spec.name for spec in group]
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, {len(names)} of"
        lines.append(f"{which}: {what}")
    return lines


def _spans(spec: TensorSpec) -> str:
    return ", ".join(f"{first:,}..{last:,}" for first, last in spec.ranges) or "none"
