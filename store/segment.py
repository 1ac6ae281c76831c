"""A segment: what is kept of a row beyond what its parent has, and which tokens stand for it.

A segment covers the tokens [start, stop) of a sequence; its parent covers those before start, or more of them: it is
then used up to start only. So a chain of segments, from one whose start is 0, gives a row. Its id is a hash of all that
it means, the ids of its parent and of its root included: equal ids, equal content, whoever wrote it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from store.checkpoint import TensorSpec


def root_id(fingerprint: str, namespace: str) -> str:
    """What must be equal for one row to be taken up as another: the model, by content, and whose tokens they are."""
    digest = xxhash.xxh3_128()
    for text in (fingerprint, namespace):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    return digest.hexdigest()


def segment_id(
    root: str, parent: str | None, start: int, tokens: Sequence[int], boundaries: tuple[int, ...] | None
) -> str:
    digest = xxhash.xxh3_128()
    digest.update(f"{root} {parent} {start} {boundaries} ".encode())
    digest.update(array("I", tokens).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Segment:
    """All of a segment but its bytes. tokens: those of [start, stop). boundaries None: it can be cut at any token;
    otherwise the token counts in (start, stop], ascending, at which a row can be taken up again."""

    id: str
    root: str
    fingerprint: str
    parent: str | None
    start: int
    tokens: array[int]
    boundaries: tuple[int, ...] | None
    tensors: tuple[TensorSpec, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    def last_boundary(self, tokens: int) -> int | None:
        """The highest token count up to `tokens` at which a row can be taken up with this segment; None: there is none
        beyond its start."""
        if self.boundaries is None:
            found = min(tokens, self.stop)
            return found if found > self.start else None
        return max((at for at in self.boundaries if at <= tokens), default=None)
