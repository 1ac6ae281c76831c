"""What keeps segments on disk, as the daemon sees it: in its own process, or in another behind a socket.

The bytes never pass through here. To keep a segment the daemon asks for a place (reserve), writes the file there
itself, and commits it; the keeper syncs, validates, renames, accounts. To use what is kept it finds a chain, which is
pinned until it is released, and reads the files itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from store.segment import Segment


class KeeperAway(Exception):
    """The keeper cannot be asked now: its process is away, or its folder is. The daemon serves on without it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A segment on disk. offsets: where each of segment.tensors begins in the file, in bytes."""

    segment: Segment
    path: Path
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Segments from the first token on, each the parent of the next, pinned under `pin`.

    matched: how many of the tokens that were asked for are kept in a row, boundary or not. tokens: the token count up
    to which the chain serves, at most the limit that was asked; 0 where it is empty, with nothing pinned.
    """

    pin: int
    matched: int
    tokens: int
    kept: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class KeeperStats:
    """bytes: of all files of ours under the folder, as the disk counts them. foreign: those of other models. corrupt:
    files that were found damaged, whoever found them; one that is gone is none. errors: what the disk refused the
    keeper."""

    bytes: int = 0
    segments: int = 0
    foreign_bytes: int = 0
    free_bytes: int = 0
    evicted: int = 0
    corrupt: int = 0
    errors: int = 0
    away: bool = field(default=False)


Outcome = Literal["kept", "known", "orphan", "bad", "full", "failed"]


class Keeper(Protocol):
    """All methods may raise KeeperAway; none raises anything else for what a disk or a file does."""

    @property
    def folder(self) -> Path: ...

    async def find(self, root: str, tokens: Sequence[int], limit: int) -> Chain:
        """The longest chain for a sequence that serves at most `limit` of its tokens. Counts as use of all of it."""
        ...

    async def release(self, pin: int) -> None:
        """Nothing happens where nothing is pinned by this number, or not any more."""
        ...

    async def condemn(self, id_: str) -> None:
        """A reader found a segment's file bad or gone: delete it, and what hangs on it. Which it is the keeper finds
        out itself."""
        ...

    async def reserve(self, nbytes: int) -> Path | None:
        """A temporary file to write a segment of about so many bytes to, room having been made for it; None where
        there is no room, or writing is off."""
        ...

    async def commit(self, temporary: Path) -> Outcome:
        """Make a written file a kept segment; the temporary file is gone afterwards, whatever the outcome.

        "kept": from now on it is found. "known": it was there already. "orphan": its parent is not kept. "bad": the
        file is not a whole segment. "full" or "failed": the disk refused.
        """
        ...

    async def abandon(self, temporary: Path) -> None:
        """Delete a temporary file that will not be committed."""
        ...

    async def flush(self) -> None:
        """Return when all that was committed before is on disk."""
        ...

    async def stat(self) -> KeeperStats: ...
