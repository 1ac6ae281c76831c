"""Which bytes of a chain's segments go where in a row's memory. Pure: it reads nothing.

Each segment of a chain answers for the tokens from its own start to the start of the next, the last one for those up to
the token count that the row is taken up at:

    segment 0    [0, a)           and may know more, which the next was not made from
    segment 1    [a, b)
    last         [b, tokens)      and the state at `tokens`

Columns wanted of a token come from the one that answers for it, so a ring's window may come from several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from store.checkpoint import Carrier, Destination, TensorSpec
from store.segment import Segment


class Missing(Exception):
    """A segment does not hold what it answers for. link: its place in the chain."""

    def __init__(self, link: int, what: str) -> None:
        super().__init__(what)
        self.link = link


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of one tensor, from `offset` on, and where they go, one after the other.

    link: the segment's place in the chain; tensor: its place in segment.tensors. carrier: the destination's.
    """

    link: int
    tensor: int
    offset: int
    into: tuple[memoryview, ...]
    carrier: Carrier | None = None

    @property
    def nbytes(self) -> int:
        return sum(into.nbytes for into in self.into)


def pieces(chain: Sequence[Segment], tokens: int, destinations: Sequence[Destination]) -> Iterator[Piece]:
    """All pieces that fill the destinations of a row of `tokens` tokens. Raises Missing."""
    tables = [{(spec.name, spec.at): at for at, spec in enumerate(segment.tensors)} for segment in chain]
    starts = [segment.start for segment in chain]
    for destination in destinations:
        wanted = destination.wanted
        if wanted.at is None:
            yield from _columns(chain, tables, starts, tokens, destination)
            continue
        last = len(chain) - 1
        tensor = tables[last].get((wanted.name, wanted.at))
        if tensor is None or not _alike(chain[last].tensors[tensor], wanted):
            raise Missing(last, f"{wanted.name} after {wanted.at} tokens")
        yield Piece(last, tensor, 0, (destination.buffer.cast("B"),), destination.carrier)


def _columns(
    chain: Sequence[Segment],
    tables: Sequence[dict[tuple[str, int | None], int]],
    starts: Sequence[int],
    tokens: int,
    destination: Destination,
) -> Iterator[Piece]:
    wanted = destination.wanted
    column = 0
    for first, last in wanted.ranges:
        assert last <= tokens, f"columns of {wanted.ranges} are wanted of a row of {tokens} tokens"
        while first < last:
            link = bisect_right(starts, first) - 1
            end = min(last, starts[link + 1] if link + 1 < len(chain) else tokens)
            tensor = tables[link].get((wanted.name, None))
            if tensor is None or not _alike(chain[link].tensors[tensor], wanted):
                raise Missing(link, f"{wanted.name} of token {first}")
            spec = chain[link].tensors[tensor]
            source, run = _find(spec, first)
            num = min(end - first, run)
            if num <= 0:
                raise Missing(link, f"{wanted.name} of token {first}")
            yield from _copies(link, tensor, spec, source, destination, column, num)
            first += num
            column += num


def _find(spec: TensorSpec, token: int) -> tuple[int, int]:
    """The column of a token, and how many tokens in a row follow from there; (0, 0) where it has none."""
    column = 0
    for first, last in spec.ranges:
        if first <= token < last:
            return column + token - first, last - token
        column += last - first
    return 0, 0


def _copies(
    link: int, tensor: int, spec: TensorSpec, source: int, destination: Destination, column: int, num: int
) -> Iterator[Piece]:
    """Columns [source, source + num) of every head, to columns [column, column + num)."""
    heads, columns, _ = spec.shape
    size = spec.column_bytes
    buffer = destination.buffer.cast("B")
    into = [buffer[head * destination.head_bytes + column * size :][: num * size] for head in range(heads)]
    if num == columns:
        yield Piece(link, tensor, 0, tuple(into), destination.carrier)
    else:
        for head in range(heads):
            yield Piece(link, tensor, (head * columns + source) * size, (into[head],), destination.carrier)


def _alike(spec: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether the bytes of one are the other's: whole state, or single columns."""
    if spec.dtype != wanted.dtype:
        return False
    if wanted.at is not None:
        return spec.shape == wanted.shape
    return (spec.shape[0], spec.shape[2:]) == (wanted.shape[0], wanted.shape[2:])


def recalled_specs(chain: Sequence[Segment], tokens: int) -> tuple[TensorSpec, ...]:
    """What a row of `tokens` tokens has: one spec for each name of columns, and the state at `tokens`."""
    columns: dict[str, TensorSpec] = {}
    for segment in chain:
        for spec in segment.tensors:
            if spec.at is None:
                columns.setdefault(spec.name, spec)
    state = [spec for spec in chain[-1].tensors if spec.at == tokens] if chain else []
    return (*columns.values(), *state)


def used_bytes(chain: Sequence[Segment], tokens: int) -> list[int]:
    """Of each segment, the bytes of the columns and the state that a row of `tokens` tokens may take from it."""
    ends = [*(segment.start for segment in chain[1:]), tokens]
    found = []
    for segment, end in zip(chain, ends, strict=True):
        total = 0
        for spec in segment.tensors:
            if spec.at is None:
                num = sum(max(min(last, end) - max(first, segment.start), 0) for first, last in spec.ranges)
                total += num * spec.shape[0] * spec.column_bytes
            elif spec.at == tokens:
                total += spec.nbytes
        found.append(total)
    return found
