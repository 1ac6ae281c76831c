"""`laned store verify`, `gc` and `rm`: check what is kept in full, and delete."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from scheduler.commands.status import size_of
from scheduler.commands.store_commands import parser
from scheduler.commands.store_listing import folder_of, listing
from scheduler.usage import CommandFailed, UsageError
from scheduler.values import size
from store.format import CorruptSegment, OtherVersion
from store.keeper import FolderUnavailable, KeeperSettings, LocalKeeper, open_keeper
from store.keeping import KeeperAway
from store.scan import File
from store.segment_file import verify_file

_SIZE = size(1 << 60, least_bytes=0)


def verify(argv: Sequence[str]) -> int:
    options = parser(
        "verify",
        "Read all that is kept, or some of it, and compare it with its digests. Nothing is changed. The exit status\n"
        "is 1 if something is damaged or cannot be read; `laned store rm` deletes what is damaged, and so does a\n"
        "daemon that meets it. Files in another version's format are told, and not checked.",
        ("laned store verify --store ~/.cache/laned", "laned store verify --store ~/.cache/laned 6bbe20d6"),
    )
    options.add_argument("id", metavar="ID", nargs="*", help="segments' ids, or how they begin (default: all)")
    chosen = options.parse(argv)
    found = listing(folder_of(chosen.store))
    ids = [found.resolve(id_) for id_ in chosen.id] or list(found.segments)
    bad: dict[str, str] = {}
    files = [found.files[id_] for id_ in ids]
    if not chosen.id:
        bad.update((str(file.path), "its header is damaged") for file in found.found.corrupt)
        files += found.found.opaque
    other_versions: dict[str, str] = {}
    num_bytes = _check(files, bad, other_versions)
    if chosen.json:
        report = {"segments": len(ids), "bytes": num_bytes, "bad": bad, "other_versions": other_versions}
        print(json.dumps(report))
    else:
        console = Console(file=sys.stdout, soft_wrap=True)
        for path, why in bad.items():
            console.print(Text.assemble(("bad ", "bold red"), f"{path}: {why}"))
        for path, why in other_versions.items():
            console.print(Text.assemble(("not checked ", "bold"), f"{path}: {why}"))
        said = f"{len(ids):,} segments, {size_of(num_bytes)}: {len(bad) or 'nothing'} bad"
        if other_versions:
            said += f", {len(other_versions)} of another version not checked"
        console.print(Text(said))
    return 1 if bad else 0


def _check(files: Sequence[File], bad: dict[str, str], other_versions: dict[str, str]) -> int:
    """Add what is damaged or cannot be read to bad, and what has another format to other_versions, with the reason;
    returns the bytes of what was read. What has gone meanwhile is not missed."""
    num_bytes = 0
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=sum(file.nbytes for file in files))
        for file in files:
            try:
                verify_file(file.path)
            except FileNotFoundError:
                continue
            except OtherVersion as error:
                other_versions[str(file.path)] = str(error)
                continue
            except CorruptSegment as error:
                bad[str(file.path)] = str(error)
            except OSError as error:
                bad[str(file.path)] = f"it cannot be read: {error.strerror or error}"
            num_bytes += file.nbytes
            progress.advance(task, file.nbytes)
    return num_bytes


def gc(argv: Sequence[str]) -> int:
    options = parser(
        "gc",
        "Delete what is left over: files that were being written, damaged ones, segments that hang on nothing. With\n"
        "--store-max, then the least recently used, until all files in the folder take no more than that. No daemon\n"
        "may be keeping the folder: it does all this itself.",
        ("laned store gc --store ~/.cache/laned", "laned store gc --store ~/.cache/laned --store-max 10GiB"),
    )
    options.add_argument("--store-max", metavar="SIZE", help="what the folder may take (default: all that is whole)")
    chosen = options.parse(argv)
    max_bytes = None if chosen.store_max is None else _size("--store-max", chosen.store_max)
    return _tidied(folder_of(chosen.store), max_bytes, (), chosen.json)


def rm(argv: Sequence[str]) -> int:
    options = parser(
        "rm",
        "Delete segments, each with all that hangs on it. No daemon may be keeping the folder.",
        (
            "laned store rm --store ~/.cache/laned 6bbe20d6",
            "laned store rm --store ~/.cache/laned --model 1f0c22ab",
            "laned store rm --store ~/.cache/laned --all",
        ),
    )
    options.add_argument("id", metavar="ID", nargs="*", help="segments' ids, or how they begin")
    options.add_argument("--model", metavar="FINGERPRINT", help="all of the model whose fingerprint begins so")
    options.add_argument("--all", action="store_true", help="everything that the store has written")
    chosen = options.parse(argv)
    if bool(chosen.id) + (chosen.model is not None) + chosen.all != 1:
        raise UsageError("`laned store rm` takes ids of segments, or --model, or --all.")
    folder = folder_of(chosen.store)
    if chosen.all:
        return _tidied(folder, 0, (), chosen.json)
    found = listing(folder)
    ids = [found.resolve(id_) for id_ in chosen.id]
    if chosen.model is not None:
        ids = [segment.id for segment in found.segments.values() if segment.fingerprint.startswith(chosen.model)]
        if not ids or not chosen.model:
            raise UsageError(f"{folder} holds nothing of a model {chosen.model!r}: see `laned store ls`.")
    return _tidied(folder, None, ids, chosen.json)


def _size(flag: str, text: str) -> int:
    try:
        found: int = _SIZE.check(text)
    except ValueError:
        raise UsageError(f"{flag} takes {_SIZE.noun}, not {text[:80]!r}.") from None
    return found


def _tidied(folder: Path, max_bytes: int | None, ids: Sequence[str], as_json: bool) -> int:
    """Be the folder's keeper for a moment, with a budget, and delete some. Tells what there was and is."""
    before = listing(folder)
    settings = KeeperSettings(folder, max_bytes, scrub_every_s=None)
    failures: list[BaseException] = []
    try:
        trio.run(_keep, settings, ids)
    except* (FolderUnavailable, KeeperAway) as failed:
        failures = list(_leaves(failed))
    if failures:
        busy = isinstance(failures[0].__cause__, BlockingIOError)
        raise CommandFailed(f"another laned keeps {folder}: stop it first." if busy else f"{failures[0]}.")
    after = listing(folder)
    report: dict[str, Any] = {
        "deleted_segments": len(before.segments) - len(after.segments),
        "deleted_bytes": before.our_bytes - after.our_bytes,
        "segments": len(after.segments),
        "bytes": after.our_bytes,
    }
    if as_json:
        print(json.dumps(report))
    else:
        gone = f"{report['deleted_segments']:,} segments, {size_of(report['deleted_bytes'])}"
        print(f"deleted: {gone}; left: {report['segments']:,} segments, {size_of(report['bytes'])}")
    return 0


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """What Trio's nurseries have wrapped."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


async def _keep(settings: KeeperSettings, ids: Sequence[str]) -> None:
    keeper: LocalKeeper
    async with open_keeper(settings) as keeper:
        for id_ in ids:
            await keeper.remove(id_)
