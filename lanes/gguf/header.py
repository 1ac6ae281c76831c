"""The header of a GGUF file: metadata, and where each tensor lies. Everything is checked against the file's length, so
that nobody behind this file reads past its end. Imports no MLX.

    offset  size
    0       4     "GGUF"
    4       4     version, u32; 2 and 3 are laid out alike. All numbers are little-endian
    8       8     number of tensors, u64
    16      8     number of metadata entries, u64
    24            entries: key (string), value type (u32), value
                  tensor infos: name (string), number of dimensions (u32), dimensions (u64 each, the fastest first),
                  tensor type (u32), offset in the data (u64)
                  padding to a multiple of general.alignment (u32, 32 if absent), from where the data runs to the end

A string is its length in bytes (u64) and UTF-8. An array is its elements' type (u32), their number (u64), the elements.

MLX has a reader, mx.load. It is not used: it opens the file for writing, so that a user cannot load what an
administrator has installed; it knows neither the 5-bit types nor Q3_K, of which most files have some; it rounds the
other K-quants and bfloat16 to float16; and it holds every tensor at once in both forms.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from lanes.gguf.blocks import TYPES, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NESTING = 4  # arrays in arrays: the format allows them, no known key has them
READ_AHEAD_BYTES = 1 << 22  # headers are some megabytes, nearly all of it the vocabulary

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(Exception):
    """The file cannot be used; the message names the file's trouble in a sentence."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the file: shape with the slowest axis first, the number of its type, and the bytes
    [start, start + num_bytes) of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the file says of itself. Metadata values are int, float, bool, str or lists of these."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Read and check the header. Raises GgufError."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from None


class _Reader:
    """A position in the file's first bytes, of which more are fetched as they are needed."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.file_bytes = file.seek(0, 2)
        self.buffer = bytearray()
        self.at = 0
        file.seek(0)

    def header(self) -> Header:
        if self.file_bytes < 24:
            raise GgufError(f"{self.path} is too short for a GGUF file ({self.file_bytes} bytes)")
        if (magic := bytes(self.take(4))) != MAGIC:
            raise GgufError(f"{self.path} is no GGUF file: it begins with {magic!r} (encrypted or another format?)")
        version = self.number("I")
        if version not in VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0]
            what = "big-endian" if swapped in VERSIONS else f"of GGUF version {version}"
            raise GgufError(f"{self.path} is {what}; versions 2 and 3, little-endian, can be read: convert it again")
        num_tensors, num_entries = self.number("Q"), self.number("Q")
        metadata = dict(self.entry() for _ in range(num_entries))
        split = metadata.get("split.count", 0)
        if isinstance(split, int) and split > 1:
            raise GgufError(f"{self.path} is one of {split} parts of a model: join them with llama-gguf-split --merge")
        infos = [self.tensor() for _ in range(num_tensors)]
        return Header(self.path, metadata, self.placed(infos, metadata))

    def placed(self, infos: list[TensorInfo], metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
        """The tensors by name, their offsets counted from the start of the file."""
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise GgufError(f"{self.path} has an alignment of {alignment!r}, which is no multiple of 8")
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            start = data_start + info.start
            if info.start % alignment:
                raise GgufError(f"{self.path}: tensor {info.name} is not aligned to {alignment} bytes")
            if start + info.num_bytes > self.file_bytes:
                raise GgufError(
                    f"{self.path} is truncated: tensor {info.name} ends at byte {start + info.num_bytes}, the file at "
                    f"{self.file_bytes}; fetch it again"
                )
            if info.name in tensors:
                raise GgufError(f"{self.path} has two tensors of the name {info.name}")
            tensors[info.name] = TensorInfo(info.name, info.shape, info.type_id, start, info.num_bytes)
        return tensors

    def tensor(self) -> TensorInfo:
        name = self.string()
        num_dimensions = self.number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"{self.path}: tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
        type_id, offset = self.number("I"), self.number("Q")
        known = TYPES.get(type_id)
        if known is None:
            readable = ", ".join(each.name for each in TYPES.values())
            raise GgufError(
                f"{self.path}: tensor {name} has the type {type_name(type_id)}, which cannot be read here; "
                f"quantize the model to one of {readable}"
            )
        if shape[-1] % known.block_weights or 0 in shape:
            raise GgufError(f"{self.path}: tensor {name} of type {known.name} has the impossible shape {shape}")
        return TensorInfo(name, shape, type_id, offset, prod(shape) // known.block_weights * known.block_bytes)

    def entry(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.number("I"), 0)

    def value(self, type_id: int, depth: int) -> Any:
        if type_id in _NUMBERS:
            return self.number(_NUMBERS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY or depth >= MAX_NESTING:
            raise GgufError(f"{self.path} has metadata of the unknown type {type_id}; the header is damaged")
        element, length = self.number("I"), self.number("Q")
        if element in _NUMBERS:
            size = struct.calcsize(f"<{_NUMBERS[element]}")
            return list(struct.unpack(f"<{length}{_NUMBERS[element]}", self.take(length * size)))
        return [self.value(element, depth + 1) for _ in range(length)]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"{self.path} has metadata that is not UTF-8; the header is damaged") from None

    def take(self, num_bytes: int) -> memoryview:
        end = self.at + num_bytes
        if end > len(self.buffer):
            if end > self.file_bytes:
                raise self.cut_short()
            self.buffer = self.buffer + self.file.read(max(READ_AHEAD_BYTES, end - len(self.buffer)))
            if end > len(self.buffer):
                raise self.cut_short()
        taken = memoryview(self.buffer)[self.at : end]
        self.at = end
        return taken

    def cut_short(self) -> GgufError:
        return GgufError(
            f"{self.path} is truncated or damaged: the header does not end within its {self.file_bytes} bytes"
        )
