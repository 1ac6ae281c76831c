"""What `laned gateway` was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.gateway.guard import Guard


@dataclass(frozen=True, slots=True)
class Settings:
    """socket: the daemon's, None for its default. names: that the model goes by here; none: the daemon's name for it.
    any_model: whatever a request calls it."""

    host: str = "127.0.0.1"
    port: int = 8080
    socket: str | None = None
    names: tuple[str, ...] = ()
    any_model: bool = False
    guard: Guard = field(default_factory=Guard)
    keep_alive_s: float = 10.0
    drain_s: float = 30.0
