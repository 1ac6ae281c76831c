"""What became of one request, as a benchmark tells it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Story:
    """When a request arrived and when each of its tokens came, in seconds of one clock, and how it ended."""

    arrived_s: float
    token_s: list[float] = field(default_factory=list)
    outcome: str = "running"

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]
