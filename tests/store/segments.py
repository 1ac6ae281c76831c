"""Segments for the tests of the store."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from store.checkpoint import TensorSpec
from store.files import FILES
from store.segment import Segment, root_id, segment_id
from store.segment_file import write_segment

FINGERPRINT = "model-1"
ROOT = root_id(FINGERPRINT, "")


def segment(
    tokens: Sequence[int],
    parent: Segment | None = None,
    start: int | None = None,
    boundaries: tuple[int, ...] | None = None,
    tensors: tuple[TensorSpec, ...] = (),
    fingerprint: str = FINGERPRINT,
    namespace: str = "",
) -> Segment:
    """Of the tokens from `start` on, which is the parent's stop where it is None."""
    begin = start if start is not None else 0 if parent is None else parent.stop
    root = root_id(fingerprint, namespace)
    own = array("I", tokens)
    above = None if parent is None else parent.id
    return Segment(
        segment_id(root, above, begin, own, boundaries), root, fingerprint, above, begin, own, boundaries, tensors
    )


@dataclass(frozen=True)
class Held:
    """The least that an index can hold."""

    segment: Segment


def with_tensors(
    tokens: Sequence[int],
    parent: Segment | None = None,
    start: int | None = None,
    layers: int = 2,
    dim: int = 4,
    namespace: str = "",
    fingerprint: str = FINGERPRINT,
) -> Segment:
    """One that can be cut anywhere, with keys and values of two heads in each layer."""
    bare = segment(tokens, parent, start, None, (), fingerprint, namespace)
    return replace(
        bare,
        tensors=tuple(
            TensorSpec(f"{layer}.{part}", "float16", (2, len(bare.tokens), dim), ((bare.start, bare.stop),))
            for layer in range(layers)
            for part in range(2)
        ),
    )


def bytes_for(segment: Segment) -> tuple[memoryview, ...]:
    """Content for its tensors, the same for the same segment."""
    random = Random(segment.id)
    return tuple(memoryview(random.randbytes(spec.nbytes)) for spec in segment.tensors)


def save(path: Path, segment: Segment) -> None:
    """Write it as a file, and nothing more."""
    fd = FILES.create(path)
    try:
        write_segment(fd, segment, bytes_for(segment))
    finally:
        FILES.close(fd)
