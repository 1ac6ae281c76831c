"""The names of all files under a store's folder: built here, parsed here. Only what parses may be deleted.

    laned.lock                      locked by the one keeper that writes here
    digests.json                    digests of models' weights, so that no start reads a model for its fingerprint
    digests.json.writing            the next one of these
    <16 hex digits>.writing         a segment that is being written; the digits are random
    <2 hex digits>/                 segments whose ids begin so: 256 folders, as large ones may be slow
    <2 hex digits>/<id>.segment     a segment, its id being 32 hex digits

Temporaries carry no process id: whoever holds the lock may delete all that it did not hand out itself, since a writer
from before can commit nothing.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

LOCK = "laned.lock"
DIGESTS = "digests.json"

_TEMPORARY = re.compile(r"(?:[0-9a-f]{16}|digests\.json)\.writing")
_FAN = re.compile(r"[0-9a-f]{2}")
_SEGMENT = re.compile(r"([0-9a-f]{32})\.segment")


def lock_path(folder: Path) -> Path:
    return folder / LOCK


def digests_path(folder: Path) -> Path:
    return folder / DIGESTS


def new_temporary(folder: Path) -> Path:
    return folder / f"{secrets.token_hex(8)}.writing"


def segment_path(folder: Path, id_: str) -> Path:
    return folder / id_[:2] / f"{id_}.segment"


def segment_in(fan: str, name: str) -> str | None:
    """The id of the segment of this name in this folder; None: it is none of ours."""
    found = _SEGMENT.fullmatch(name)
    return found[1] if found is not None and found[1][:2] == fan else None


def is_fan(name: str) -> bool:
    """Whether a folder of this name holds segments."""
    return _FAN.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Of a file in the store's folder itself; so are the next two."""
    return _TEMPORARY.fullmatch(name) is not None


def is_sidecar(name: str) -> bool:
    return name in (LOCK, DIGESTS)


def may_delete(folder: Path, path: Path) -> bool:
    """Whether it is a segment or a temporary of the store in this folder."""
    if path.parent == folder:
        return is_temporary(path.name)
    return path.parent.parent == folder and segment_in(path.parent.name, path.name) is not None
