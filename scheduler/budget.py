"""Who may be in memory: rows are admitted, set aside and brought back by the bytes that their caches will take.

A lane's arrays have as many columns in every slot as its longest row needs, so what a row costs depends on the others:
the budget is asked about whole sets of rows, never about one. All lengths are in tokens, with the next step's included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from lanes.geometry import RowGeometry
from lanes.lane import ModelInfo

# A row that comes back, or comes new, should not have to leave a few steps later.
HEADROOM_TOKENS = 256
# The rest is for activations, MLX's buffers and other programs.
MEMORY_PART = 0.8


@dataclass(frozen=True, slots=True)
class Budget:
    """geometry None: nothing is known of the caches, and nothing is limited."""

    limit_bytes: int
    geometry: RowGeometry | None

    @classmethod
    def for_model(cls, info: ModelInfo, limit_bytes: int | None, remembered_bytes: int = 0) -> Budget:
        """limit_bytes None: what the device's memory leaves beside the weights, what is remembered in it, and a part
        for everything else."""
        if limit_bytes is None:
            taken_bytes = info.weight_bytes + (remembered_bytes if info.host_memory_bytes is None else 0)
            limit_bytes = max(int(info.memory_bytes * MEMORY_PART) - taken_bytes, info.memory_bytes // 16)
        return cls(limit_bytes, info.geometry)

    def used_bytes(self, lane: Iterable[int], solo: Iterable[int]) -> int:
        """What rows of these lengths take: those in the lane together, those alone (prompts, rows set aside) each."""
        if self.geometry is None:
            return 0
        lengths = list(lane)
        together = self.geometry.lane_bytes(len(lengths), max(lengths, default=0))
        return together + sum(map(self.geometry.row_bytes, solo))

    def fits(self, lane: Iterable[int], solo: Iterable[int], beside_bytes: int = 0) -> bool:
        """beside_bytes: what the rows have saved on their way."""
        return self.used_bytes(lane, solo) + beside_bytes <= self.limit_bytes

    def admits_alone(self, tokens: int) -> bool:
        """Whether a row of so many tokens fits if it is alone, while it is merged: its own caches and a slot."""
        return self.fits([tokens], [tokens])

    def most_alone(self, tokens: int) -> int:
        """The largest number of tokens that fits alone, of those up to `tokens`, which is more than fits. What a row
        takes grows with its length."""
        return bisect_left(range(1, tokens), True, key=lambda number: not self.admits_alone(number))


UNLIMITED = Budget(0, None)
