"""How long requests have held their rows lately, and from that, when one who was refused had better come again."""

from __future__ import annotations

# What a request counts for beside those before it.
WEIGHT = 0.2
# To ask once a second is no burden; and one who waits for a minute does not see that a row is free sooner.
SOONEST_S, LATEST_S = 1.0, 60.0


class Turnover:
    """row_s: a running mean of seconds from admission to end; None before the first request has ended."""

    def __init__(self) -> None:
        self.row_s: float | None = None

    def observe(self, row_s: float) -> None:
        """A request has held a row for so long."""
        self.row_s = row_s if self.row_s is None else self.row_s + WEIGHT * (row_s - self.row_s)

    def retry_after_s(self, num_waiting: int, max_rows: int) -> float:
        """Seconds until all that wait now have had rows: their number times row_s, over max_rows that serve them side
        by side. From SOONEST_S, also where nothing was measured yet, to LATEST_S."""
        served_s = num_waiting * (self.row_s or 0.0) / max_rows
        return round(min(max(served_s, SOONEST_S), LATEST_S), 1)
