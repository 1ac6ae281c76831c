"""What a store is told when it is opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """fingerprint: of the model, by content. memory_bytes: what may stay in memory. queue_bytes: what may wait to be
    written, beside that. demote_idle_s: unused for so long, what is on disk leaves memory. verify: tensors' hashes are
    checked whenever they are read. cut_anywhere: rows of this model can be taken up again at any token. maps: one file
    that is most of what a row begins with is mapped instead of read. read_only: the keeper is asked for what it has,
    and given nothing."""

    fingerprint: str
    memory_bytes: int
    queue_bytes: int
    demote_idle_s: float | None = None
    verify: bool = False
    cut_anywhere: bool = True
    maps: bool = False
    read_only: bool = False
