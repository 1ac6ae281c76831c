"""What a check of the backend has found. Imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["right", "wrong", "absent"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """name: what was checked. said: a clause about it. then: what laned does about it, or what its user should.

    absent: this backend has no such operation, and laned has another way. figures: numbers for a report, plain data.
    """

    name: str
    outcome: Outcome
    said: str
    then: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def off_by(difference: float) -> str:
    return "to the bit" if difference == 0 else f"off by {difference:.1g} of the range at most"


def told(error: Exception) -> str:
    """The first line of what went wrong."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
