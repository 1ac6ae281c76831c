"""How a segment lies in its file.

    offset      size    field
    0           8       magic: "lanedsg" and the version of the format, "1"
    8           4       n: length of the header in bytes, u32
    12          4       data start, u32: 24 + n rounded up to a multiple of 16 KiB
    16          8       xxh3 of the header's n bytes, u64
    24          n       the header: one JSON object
    24 + n              a hole up to data start
    data start          the tensors one after the other, each at the next multiple of 16 KiB, with holes between
    end                 of the last tensor; of the hole before data start where there is none

Numbers are little-endian, and so are the tensors. 16 KiB are the largest pages in use: each tensor can be mapped by
itself. Holes are not written, and cost no space where the file system has holes.

The header is text for `head`, in lines: what the segment is, its tokens, then each tensor. Keys, in this order:

    id root fingerprint parent start boundaries     as in store/segment.py
    data_bytes      from data start to the file's end, so that a cut file is noticed without its tensors
    tokens          list of u32
    tensors         list of {name, dtype, shape, ranges, at, offset, bytes, xxh3}: as in store/checkpoint.py, and
                    offset: from data start; bytes: of the tensor; xxh3: of them, 16 hexadecimal digits

Decoding only reads; `validate` holds every rule. What is wrong with a file is a CorruptSegment: to who looks for
tokens, a miss.
"""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xxhash import xxh3_64_intdigest

from store.checkpoint import DTYPE_BYTES, TensorSpec
from store.segment import Segment, segment_id

ALIGN_BYTES = 16 << 10
PREAMBLE = struct.Struct("<8sIIQ")
# A million tokens take 7 MB; a longer header is read by nobody.
MAX_HEADER_BYTES = 64 << 20

_KIND = b"lanedsg"
_MAGIC = _KIND + b"1"
_TENSORS = ',\n"tensors": ['
_NONE = type(None)
_SEGMENT_FIELDS = {
    "id": (str,),
    "root": (str,),
    "fingerprint": (str,),
    "parent": (str, _NONE),
    "start": (int,),
    "boundaries": (list, _NONE),
    "data_bytes": (int,),
    "tokens": (list,),
}
_TENSOR_FIELDS = {
    "name": (str,),
    "dtype": (str,),
    "shape": (list,),
    "ranges": (list,),
    "at": (int, _NONE),
    "offset": (int,),
    "bytes": (int,),
    "xxh3": (str,),
}
_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"\d+(\.\d+)*")
_XXH3 = re.compile(r"[0-9a-f]{16}")


class CorruptSegment(Exception):
    """The file is not a whole segment of this format."""


class OtherVersion(CorruptSegment):
    """It may be a whole one of another version of the format."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file's head says. offsets: where each tensor begins, from data_start; sizes: of each in bytes; xxh3: of
    each, in hexadecimal."""

    segment: Segment
    data_start: int
    data_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    xxh3: tuple[str, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Where each tensor begins in the file."""
        return tuple(self.data_start + offset for offset in self.offsets)


def aligned(nbytes: int) -> int:
    """Where the next tensor may begin, after so many bytes."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def layout(tensors: Sequence[TensorSpec]) -> tuple[tuple[int, ...], int]:
    """Where each begins, from data start, and where the last one ends."""
    offsets, end = [], 0
    for spec in tensors:
        offsets.append(aligned(end))
        end = offsets[-1] + spec.nbytes
    return tuple(offsets), end


def encode(segment: Segment, xxh3: Sequence[str]) -> bytes:
    """The file up to the end of its header. xxh3: the digest of each tensor."""
    offsets, data_bytes = layout(segment.tensors)
    said = {
        "id": segment.id,
        "root": segment.root,
        "fingerprint": segment.fingerprint,
        "parent": segment.parent,
        "start": segment.start,
        "boundaries": segment.boundaries,
        "data_bytes": data_bytes,
    }
    tensors = [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": spec.shape,
            "ranges": spec.ranges,
            "at": spec.at,
            "offset": offset,
            "bytes": spec.nbytes,
            "xxh3": hexadecimal,
        }
        for spec, offset, hexadecimal in zip(segment.tensors, offsets, xxh3, strict=True)
    ]
    lines = ",".join("\n" + json.dumps(tensor) for tensor in tensors)
    text = f'{json.dumps(said)[:-1]},\n"tokens": {json.dumps(segment.tokens.tolist())}{_TENSORS}{lines}\n]}}\n'
    header = text.encode()
    return PREAMBLE.pack(_MAGIC, len(header), _data_start(len(header)), xxh3_64_intdigest(header)) + header


def header_bytes(head: bytes) -> int:
    """How long the header is. head: the first bytes of a file. Raises CorruptSegment if they are not a segment's."""
    if len(head) < PREAMBLE.size or not head.startswith(_KIND):
        raise CorruptSegment("it does not begin like a segment")
    magic, length, data_start, _ = PREAMBLE.unpack_from(head)
    if magic != _MAGIC:
        raise OtherVersion(f"format {magic[len(_KIND) :]!r} is not the one that is read here")
    if length > MAX_HEADER_BYTES or data_start != _data_start(length):
        raise CorruptSegment(f"its header of {length} bytes cannot end at {data_start}")
    return int(length)


def decode(head: bytes) -> Stored:
    """What a file's head says, in its types, valid or not. head: at least all of the header. Raises CorruptSegment."""
    header = _header(head)
    said = _object(header, {**_SEGMENT_FIELDS, "tensors": (list,)})
    tensors = [_fields(tensor, _TENSOR_FIELDS) for tensor in said["tensors"]]
    return Stored(
        _segment(said, tuple(_spec(tensor) for tensor in tensors)),
        _data_start(len(header)),
        said["data_bytes"],
        tuple(tensor["offset"] for tensor in tensors),
        tuple(tensor["bytes"] for tensor in tensors),
        tuple(tensor["xxh3"] for tensor in tensors),
    )


def decode_identity(head: bytes) -> tuple[Segment, int]:
    """The segment without its tensors, and how long its file has to be. For what reads very many: tensors are most of
    a header, and its digest says that they are as they were when they were found valid."""
    header = _header(head)
    what, found, _ = header.partition(_TENSORS.encode())
    if not found:
        raise CorruptSegment("its header names no tensors")
    said = _object(what + b"}", _SEGMENT_FIELDS)
    return _segment(said, ()), _data_start(len(header)) + said["data_bytes"]


def validate(stored: Stored, file_bytes: int) -> None:
    """Raises CorruptSegment with the first rule that does not hold. file_bytes: how long the file is."""
    validate_identity(stored.segment)
    for problem in _wrong_with_tensors(stored):
        raise CorruptSegment(problem)
    validate_length(stored.data_start + stored.data_bytes, file_bytes)


def validate_identity(segment: Segment) -> None:
    """As validate, of all but the tensors."""
    for problem in _wrong_with_identity(segment):
        raise CorruptSegment(problem)


def validate_length(said_bytes: int, file_bytes: int) -> None:
    if said_bytes != file_bytes:
        raise CorruptSegment(f"its file has {file_bytes} bytes, not {said_bytes}")


def _wrong_with_identity(segment: Segment) -> Iterator[str]:
    if not _ID.fullmatch(segment.root) or not _ID.fullmatch(segment.parent or segment.root):
        yield "its root or its parent is no id"
    if not segment.tokens:
        yield "it covers no token"
    if segment.start < 0 or (segment.start == 0) != (segment.parent is None):
        yield f"it starts at {segment.start} with parent {segment.parent}"
    bounds = segment.boundaries or ()
    if not all(low < high for low, high in pairwise((segment.start, *bounds))) or max(bounds, default=0) > segment.stop:
        yield f"its boundaries {bounds} do not ascend within {segment.start}..{segment.stop}"
    if segment.id != segment_id(segment.root, segment.parent, segment.start, segment.tokens, segment.boundaries):
        yield f"{segment.id} is not the id of what it holds"


def _wrong_with_tensors(stored: Stored) -> Iterator[str]:
    segment = stored.segment
    names = {(spec.name, spec.at) for spec in segment.tensors}
    if len(names) < len(segment.tensors):
        yield "a tensor is there twice"
    for spec, size, hexadecimal in zip(segment.tensors, stored.sizes, stored.xxh3, strict=True):
        if not _NAME.fullmatch(spec.name) or not _XXH3.fullmatch(hexadecimal):
            yield f"{spec.name!r} is no tensor's name, or {hexadecimal!r} no digest"
        if spec.dtype not in DTYPE_BYTES or min(spec.shape, default=0) < 0:
            yield f"{spec.name} is of {spec.shape} {spec.dtype}"
            return
        if spec.nbytes != size:
            yield f"{spec.name} has {size} bytes, its shape {spec.nbytes}"
        if spec.at is not None:
            if spec.ranges or spec.at not in (segment.boundaries or ()):
                yield f"{spec.name} is state at {spec.at}, where no boundary is"
            continue
        ends = [0, *(end for span in spec.ranges for end in span), segment.stop]
        empty = any(first == last for first, last in spec.ranges)
        if empty or any(low > high for low, high in pairwise(ends)):
            yield f"{spec.name} has columns of {spec.ranges}, in a segment that stops at {segment.stop}"
        if segment.boundaries is None and spec.ranges != ((segment.start, segment.stop),):
            yield f"{spec.name} has not all columns of a segment without boundaries"
        if len(spec.shape) != 3 or spec.shape[1] != sum(last - first for first, last in spec.ranges):
            yield f"{spec.name} has the shape {spec.shape}, with columns of {spec.ranges}"
    if (stored.offsets, stored.data_bytes) != layout(segment.tensors):
        yield "its tensors do not lie one after the other"


def _data_start(length: int) -> int:
    return aligned(PREAMBLE.size + length)


def _header(head: bytes) -> bytes:
    """The header's own bytes, its digest checked."""
    header = head[PREAMBLE.size : PREAMBLE.size + header_bytes(head)]
    *_, xxh3 = PREAMBLE.unpack_from(head)
    if xxh3_64_intdigest(header) != xxh3:
        raise CorruptSegment("its header is not what was written")
    return header


def _object(text: bytes, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptSegment(f"its header is not JSON: {error}") from error
    return _fields(said, fields)


def _fields(said: Any, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    if type(said) is not dict or said.keys() != fields.keys():
        raise CorruptSegment(f"its header does not have the fields {', '.join(fields)}")
    for name, types in fields.items():
        if type(said[name]) not in types:
            raise CorruptSegment(f"its header has {type(said[name]).__name__} for {name}")
    return said


def _segment(said: dict[str, Any], tensors: tuple[TensorSpec, ...]) -> Segment:
    try:
        tokens = array("I", said["tokens"])
    except (TypeError, OverflowError) as error:
        raise CorruptSegment(f"its tokens are no ids: {error}") from error
    return Segment(
        said["id"],
        said["root"],
        said["fingerprint"],
        said["parent"],
        said["start"],
        tokens,
        None if said["boundaries"] is None else _ints(said["boundaries"]),
        tensors,
    )


def _spec(said: dict[str, Any]) -> TensorSpec:
    ranges = []
    for span in said["ranges"]:
        first, last = _ints(span, 2)
        ranges.append((first, last))
    return TensorSpec(said["name"], said["dtype"], _ints(said["shape"]), tuple(ranges), said["at"])


def _ints(said: Any, num: int | None = None) -> tuple[int, ...]:
    if type(said) is not list or any(type(item) is not int for item in said) or num not in (None, len(said)):
        raise CorruptSegment(f"its header has {said!r} where integers belong")
    return tuple(said)
