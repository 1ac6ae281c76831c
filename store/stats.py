"""What the store tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from store.keeping import KeeperStats


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts since the start, and what is there now. dropped: segments that were to be kept and were not, wherever,
    each once. evicted: from memory. corrupt: segments in memory that were of no use. errors: files that this process
    could not write. disk: what the keeper counts, beside all this and never again; None without a keeper."""

    memory_bytes: int = 0
    memory_segments: int = 0
    queue_bytes: int = 0
    queue_segments: int = 0
    evicted: int = 0
    written_bytes: int = 0
    written_segments: int = 0
    dropped: int = 0
    errors: int = 0
    corrupt: int = 0
    memory_restored_bytes: int = 0
    memory_restored_s: float = 0.0
    disk_restored_bytes: int = 0
    disk_restored_s: float = 0.0
    disk: KeeperStats | None = None
