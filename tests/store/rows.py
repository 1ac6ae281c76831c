"""Rows without a model: every byte of a row follows from its tokens, so that a wrong byte anywhere is seen."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from store.checkpoint import Destination, Part, Range, Recall, TensorSpec

HEADS = 2
DIM = 8


@dataclass(frozen=True)
class Row:
    """A model with a cache of each kind, or without rings and state: then its rows can be cut anywhere.

    window: the ring's columns, the first `sink` of which stay.
    """

    cut_anywhere: bool = True
    window: int = 6
    sink: int = 2

    def part(self, tokens: Sequence[int], start: int = 0, boundaries: Sequence[int] = ()) -> Part:
        """What a row has of its tokens from `start` on, with boundaries there and at its end."""
        stop = len(tokens)
        if self.cut_anywhere:
            columns = self._spec("0.0", ((start, stop),))
            return Part(start, stop, None, (columns,), (self._columns(tokens, columns),))
        at = tuple(sorted({*boundaries, stop}))
        held = {token for bound in at for first, last in self._ring(bound) for token in range(first, last)}
        ring = self._spec("1.0", _ranges(token for token in held if token >= start))
        columns = self._spec("0.0", ((start, stop),))
        states = [TensorSpec("2.0", "uint8", (16,), at=bound) for bound in at]
        specs = (columns, ring, *states)
        buffers = (
            self._columns(tokens, columns),
            self._columns(tokens, ring),
            *(self._state(tokens[:bound]) for bound in at),
        )
        return Part(start, stop, at, specs, buffers)

    def memory(self, recall: Recall) -> tuple[Destination, ...]:
        """Room for a recalled row, with columns to spare, full of what must not be found there."""
        found = []
        for spec in recall.specs:
            if spec.at is not None:
                found.append(Destination(spec, memoryview(bytearray(b"?" * spec.nbytes)), 0))
                continue
            wanted = self._spec(spec.name, ((0, recall.tokens),) if spec.name == "0.0" else self._ring(recall.tokens))
            head_bytes = (wanted.shape[1] + 3) * DIM
            found.append(Destination(wanted, memoryview(bytearray(b"?" * HEADS * head_bytes)), head_bytes))
        return tuple(found)

    def is_right(self, tokens: Sequence[int], memory: Sequence[Destination]) -> bool:
        """Whether that memory holds what a row of these tokens has, and nothing beside it was touched."""
        names = {destination.wanted.name for destination in memory}
        assert names == ({"0.0"} if self.cut_anywhere else {"0.0", "1.0", "2.0"})
        for destination in memory:
            wanted, buffer = destination.wanted, destination.buffer
            if wanted.at is not None:
                if wanted.at != len(tokens) or buffer != self._state(tokens):
                    return False
                continue
            right, size = self._columns(tokens, wanted), wanted.shape[1] * DIM
            for head in range(HEADS):
                begin = head * destination.head_bytes
                if buffer[begin : begin + size] != right[head * size : (head + 1) * size]:
                    return False
                if bytes(buffer[begin + size : begin + destination.head_bytes]).strip(b"?"):
                    return False
        return True

    def _spec(self, name: str, ranges: tuple[Range, ...]) -> TensorSpec:
        return TensorSpec(name, "uint8", (HEADS, sum(last - first for first, last in ranges), DIM), ranges)

    def _ring(self, tokens: int) -> tuple[Range, ...]:
        """The tokens whose columns a ring has after so many."""
        if tokens <= self.window:
            return ((0, tokens),)
        return ((0, self.sink), (tokens - self.window + self.sink, tokens))

    def _columns(self, tokens: Sequence[int], spec: TensorSpec) -> memoryview:
        digests = _digests(tokens)
        wanted = [token for first, last in spec.ranges for token in range(first, last)]
        columns = (_bytes(digests[token], spec.name, head, DIM) for head in range(HEADS) for token in wanted)
        return memoryview(bytearray().join(columns))

    def _state(self, tokens: Sequence[int]) -> memoryview:
        return memoryview(bytearray(_bytes(_digests(tokens)[-1], "2.0", 0, 16)))


def _digests(tokens: Sequence[int]) -> list[bytes]:
    """Of each beginning of the tokens: a column depends on all before it."""
    digest = blake2b(digest_size=16)
    found = []
    for token in tokens:
        digest.update(array("I", [token]).tobytes())
        found.append(digest.digest())
    return found


def _bytes(digest: bytes, name: str, head: int, size: int) -> bytes:
    return blake2b(digest + f"{name} {head}".encode(), digest_size=size).digest()


def _ranges(tokens: Iterable[int]) -> tuple[Range, ...]:
    found: list[list[int]] = []
    for token in sorted(tokens):
        if found and found[-1][1] == token:
            found[-1][1] += 1
        else:
            found.append([token, token + 1])
    return tuple((first, last) for first, last in found)
