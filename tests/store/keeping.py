"""Writing to a keeper and asking it, as a daemon does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from store.files import FILES, Files, disk_bytes
from store.keeper import KeeperSettings, LocalKeeper, open_keeper
from store.keeping import Keeper, Kept, Outcome
from store.names import segment_path
from store.segment import Segment
from store.segment_file import write_segment
from tests.store.segments import ROOT, bytes_for


def write(path: Path, segment: Segment, files: Files = FILES) -> None:
    """A whole segment, to a file that is there."""
    fd = files.open(path, writable=True)
    try:
        write_segment(fd, segment, bytes_for(segment), files)
    finally:
        files.close(fd)


async def reserved(keeper: Keeper, segment: Segment, files: Files = FILES) -> Path | None:
    """A temporary with the whole segment in it."""
    temporary = await keeper.reserve(segment.nbytes)
    if temporary is not None:
        write(temporary, segment, files)
    return temporary


async def keep(keeper: Keeper, segment: Segment, files: Files = FILES) -> Outcome | None:
    """None: no room was made for it."""
    temporary = await reserved(keeper, segment, files)
    return None if temporary is None else await keeper.commit(temporary)


async def found(keeper: Keeper, tokens: Sequence[int], limit: int | None = None, root: str = ROOT) -> tuple[Kept, ...]:
    """What serves these tokens, not pinned any more."""
    chain = await keeper.find(root, tokens, len(tokens) if limit is None else limit)
    await keeper.release(chain.pin)
    return chain.kept


@asynccontextmanager
async def opened(folder: Path, files: Files = FILES, **settings: object) -> AsyncIterator[LocalKeeper]:
    """A keeper that is right before and after."""
    async with open_keeper(KeeperSettings(folder, **settings), files) as keeper:  # type: ignore[arg-type]
        keeper.check()
        yield keeper
        keeper.check()


def files_in(folder: Path) -> set[str]:
    """Of segments and temporaries."""
    return {path.name for path in folder.rglob("*") if path.suffix in (".segment", ".writing")}


def on_disk(folder: Path, of: Segment) -> int:
    """What the file of a kept segment takes."""
    return disk_bytes(segment_path(folder, of.id).stat())
