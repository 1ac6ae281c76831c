"""The wire between a daemon and the process that keeps segments, version 1: every message and every field.

Messages are msgpack maps in frames (store/framing.py), each with a "type". The bytes of segments never come this way:
files are written and read by the daemon, in the folder that hello names. The daemon says hello first and waits for the
answer. Its requests carry a number, n, unlike those that are not answered yet; answers bear it, and may overtake each
other. count: an integer of 0 and more; id: 32 hexadecimal digits; file: the name of a temporary file in the folder.

    daemon to store                              answered by
    ---------------                              -----------
    hello     version: count                     hello
              fingerprint: text (1..256 chars)   of the model that the daemon serves
    find      n, root: id, limit: count          found
              tokens: binary                     u32 little-endian, each
    release   pin: count                         nothing
    condemn   n, id: id                          done
    reserve   n, nbytes: count                   reserved
    commit    n, file: file                      committed
    abandon   n, file: file                      done
    flush     n                                  done
    stat      n                                  stats

    store to daemon
    ---------------
    hello     version: count, folder: text       the folder's absolute path
    found     n, pin, matched, tokens: count     as store.keeping.Chain has them
              ids: [id]                          of the chain's segments, pinned until release
    reserved  n, file?: file                     none where there is no room
    committed n, outcome: text                   as store.keeping.Outcome has it
    done      n
    stats     n, bytes, segments, foreign_bytes, free_bytes, evicted, corrupt, errors: count
    away      n, message: text                   the folder cannot be used now
    error     code, message: text                the connection ends: bad_frame, bad_request, unsupported_version

A chain comes as ids alone, which say where the files are; the daemon reads their headers itself. It would check them
anyway before it reads on, a header in another form would be one more to keep right, and a chain of any length fits into
a frame. A message that is wrong ends the connection, as both ends are ours.

What a connection has pinned or reserved is its own: nobody else may release or commit it, and it is given up with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar, get_args

from store.framing import FRAME_BYTES, ProtocolError
from store.keeping import KeeperStats, Outcome
from store.names import is_temporary

VERSION = 1

# Longer sequences are asked for by their beginning: no context is nearly as long.
MAX_TOKENS = (FRAME_BYTES - 4096) // 4


@dataclass(frozen=True, slots=True)
class Hello:
    version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Find:
    n: int
    root: str
    limit: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Release:
    pin: int


@dataclass(frozen=True, slots=True)
class Condemn:
    n: int
    id: str


@dataclass(frozen=True, slots=True)
class Reserve:
    n: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    n: int
    file: str


@dataclass(frozen=True, slots=True)
class Abandon:
    n: int
    file: str


@dataclass(frozen=True, slots=True)
class Flush:
    n: int


@dataclass(frozen=True, slots=True)
class Stat:
    n: int


@dataclass(frozen=True, slots=True)
class Welcome:
    version: int
    folder: str


@dataclass(frozen=True, slots=True)
class FoundChain:
    n: int
    pin: int
    matched: int
    tokens: int
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    n: int
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    n: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Finished:
    n: int


@dataclass(frozen=True, slots=True)
class Stats:
    n: int
    bytes: int
    segments: int
    foreign_bytes: int
    free_bytes: int
    evicted: int
    corrupt: int
    errors: int

    @classmethod
    def of(cls, n: int, stats: KeeperStats) -> Stats:
        return cls(n, **{name: getattr(stats, name) for name in FIGURES})

    def stats(self) -> KeeperStats:
        return KeeperStats(**{name: getattr(self, name) for name in FIGURES})


# Of the keeper's figures those that cross: whether it is away, only the one who asks can tell.
FIGURES = tuple(field.name for field in fields(Stats) if field.name != "n")


@dataclass(frozen=True, slots=True)
class Away:
    n: int
    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    code: str
    message: str


Question = Find | Condemn | Reserve | Commit | Abandon | Flush | Stat
Request = Hello | Release | Question
Answer = FoundChain | Reserved | Committed | Finished | Stats | Away
Reply = Welcome | Answer | Failure

REQUESTS: dict[str, type[Request]] = {
    "hello": Hello,
    "find": Find,
    "release": Release,
    "condemn": Condemn,
    "reserve": Reserve,
    "commit": Commit,
    "abandon": Abandon,
    "flush": Flush,
    "stat": Stat,
}
REPLIES: dict[str, type[Reply]] = {
    "hello": Welcome,
    "found": FoundChain,
    "reserved": Reserved,
    "committed": Committed,
    "done": Finished,
    "stats": Stats,
    "away": Away,
    "error": Failure,
}

_TAGS: dict[type, str] = {cls: tag for table in (REQUESTS, REPLIES) for tag, cls in table.items()}

T = TypeVar("T")
Check = Callable[[Any], bool]

_ID = re.compile(r"[0-9a-f]{32}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_id(value: Any) -> bool:
    return type(value) is str and _ID.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return type(value) is str


_COUNTS = (
    *("n", "version", "limit", "pin", "nbytes", "matched", "tokens"),
    *FIGURES,
)
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(_COUNTS, _is_count),
    "fingerprint": lambda value: _is_text(value) and 1 <= len(value) <= 256,
    "root": _is_id,
    "id": _is_id,
    "ids": lambda value: type(value) is list and all(map(_is_id, value)),
    "file": lambda value: _is_text(value) and is_temporary(value),
    "outcome": lambda value: value in get_args(Outcome),
    "folder": _is_text,
    "code": _is_text,
    "message": _is_text,
}
# Where a field's name means something else in one message.
_ALSO: dict[tuple[type, str], Check] = {(Find, "tokens"): lambda value: type(value) is bytes and len(value) % 4 == 0}


def encode(message: Request | Reply) -> dict[str, Any]:
    """The map of a message; fields that are None are left out."""
    said = {name: value for name, value in asdict(message).items() if value is not None}
    return {"type": _TAGS[type(message)], **said}


def decode(said: Mapping[str, Any], table: Mapping[str, type[T]]) -> T:
    """The message of a map. Raises ProtocolError. Fields that are in no table are left out."""
    tag = said.get("type")
    cls = table.get(tag) if type(tag) is str else None
    if cls is None:
        raise ProtocolError("bad_request", f"there is no type {tag!r:.100}: it must be one of {', '.join(table)}")
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        value = said.get(field.name)
        if value is None and field.default is not MISSING:
            continue
        if not _ALSO.get((cls, field.name), _CHECKS[field.name])(value):
            raise ProtocolError("bad_request", f"{tag}.{field.name} cannot be {value!r:.100}")
        values[field.name] = tuple(value) if type(value) is list else value
    return cls(**values)
