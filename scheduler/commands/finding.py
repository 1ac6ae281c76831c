"""What `laned doctor` has to say of one thing, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """about: a word or two. said: a clause. do: what mends it, where there is something to mend.

    A warning costs speed or comfort; with a problem laned does not work, or not rightly.
    """

    level: Level
    about: str
    said: str
    do: str | None = None
