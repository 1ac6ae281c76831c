"""A writer of GGUF files for the tests, written from the format's description and not from the reader."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32, F16, BF16 = 0, 1, 30


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(what: Any) -> bytes:
    """Type and value of a metadata entry: bool, int (u32, or i64 if that is too small), float32, str, list of one of
    them."""
    if isinstance(what, bool):
        return struct.pack("<I?", 7, what)
    if isinstance(what, int):
        return struct.pack("<II", 4, what) if 0 <= what < 2**32 else struct.pack("<Iq", 11, what)
    if isinstance(what, float):
        return struct.pack("<If", 6, what)
    if isinstance(what, str):
        return struct.pack("<I", 8) + string(what)
    elements = [value(element) for element in what]
    kind = elements[0][:4] if elements else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(elements)) + b"".join(each[4:] for each in elements)


def tensor_bytes(array: npt.NDArray[np.float32], kind: int) -> bytes:
    if kind == F16:
        return array.astype(np.float16).tobytes()
    if kind == BF16:
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return array.astype(np.float32).tobytes()


def header(
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, Sequence[int], int, int]],
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The header with its padding. tensors: name, shape (slowest axis first), type, offset in the data."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, what in metadata.items():
        out += string(key) + value(what)
    for name, shape, kind, offset in tensors:
        out += string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % alignment)


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[np.float32] | tuple[bytes, Sequence[int], int]],
    kind: int = F32,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a file. A tensor is an array, stored in the given type if it is a matrix and in float32 if not, or raw
    bytes with shape and type."""
    infos, data = [], b""
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            raw, shape, its_kind = tensor
        else:
            its_kind = kind if tensor.ndim > 1 else F32
            raw, shape = tensor_bytes(tensor, its_kind), tensor.shape
        infos.append((name, shape, its_kind, len(data)))
        data += raw + bytes(-len(raw) % alignment)
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    path.write_bytes(header(metadata, infos, version, alignment) + data)
    return path
