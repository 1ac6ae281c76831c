"""What of a part is new, where the store has learnt its beginning since it was asked for.

Rows that end in the same turn are frozen at the same time, and often begin alike: the first of them is remembered in
full, of the others only what comes after.
"""

from __future__ import annotations

from store.checkpoint import Part, TensorSpec, columns_of


def trim(part: Part, start: int) -> Part:
    """The part from `start` on, which is a boundary of it where it has any. Columns are copied, so that the memory of
    those left out can be freed."""
    assert part.start < start < part.stop, f"[{part.start}, {part.stop}) cannot begin at {start}"
    kept: list[tuple[TensorSpec, memoryview]] = []
    for spec, buffer in zip(part.tensors, part.buffers, strict=True):
        if spec.at is None:
            kept.append(_trim_columns(spec, buffer, start))
        elif spec.at > start:
            kept.append((spec, buffer))
    boundaries = None if part.boundaries is None else tuple(at for at in part.boundaries if at > start)
    return Part(start, part.stop, boundaries, tuple(spec for spec, _ in kept), tuple(buffer for _, buffer in kept))


def _trim_columns(spec: TensorSpec, buffer: memoryview, start: int) -> tuple[TensorSpec, memoryview]:
    new = columns_of(spec, tuple((max(first, start), last) for first, last in spec.ranges if last > start))
    head_bytes = spec.shape[1] * spec.column_bytes
    new_bytes = new.shape[1] * spec.column_bytes
    source = buffer.cast("B")
    # Tokens ascend, so what stays is the end of each head's columns.
    copied = b"".join(
        source[(head + 1) * head_bytes - new_bytes : (head + 1) * head_bytes] for head in range(spec.shape[0])
    )
    return new, memoryview(copied)
