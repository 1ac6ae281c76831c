"""The tensors of a GGUF file as MLX arrays, one after another, so that no two are in memory in both of their forms.

Dense weights are decoded a piece at a time straight into the array's memory. Weights that stay quantized are MLX's
affine kind in groups of 32: `weight = code * scale + bias`, as the blocks have it, with the factors rounded to 16 bits.
"""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from lanes.gguf.blocks import TYPES, Codes, TensorType, decode
from lanes.gguf.families import Part, Plan
from lanes.gguf.header import GgufError, TensorInfo

PIECE_WEIGHTS = 1 << 18  # a piece and what it is unpacked to stay in the processor's cache
GROUP_SIZE = 32

Weights = dict[str, mx.array]


def read_weights(
    path: Path, plan: Plan, dtype: mx.Dtype, keep_quantized: bool, on_bytes: Callable[[int], None]
) -> Iterator[Weights]:
    """For each tensor its parameters, evaluated: the weight, or, of one that stays quantized, also scales and biases.

    dtype: of everything that is not a packed weight. on_bytes is told of each tensor's bytes of the file once it is
    read. Raises GgufError if the file has changed meanwhile or cannot be read.
    """
    try:
        with path.open("rb") as file:
            for part in plan.parts:
                if keep_quantized and bits_kept(part) is not None:
                    weights = _affine(file, part, dtype)
                else:
                    weights = {part.name: _dense(file, part, dtype)}
                mx.eval(weights)
                on_bytes(part.info.num_bytes)
                yield weights
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from None


def bits_kept(part: Part) -> int | None:
    """Bits of a weight that can stay quantized in MLX; None for one that cannot."""
    is_matrix = len(part.info.shape) == 2 and part.name.endswith(".weight")
    return TYPES[part.info.type_id].bits if is_matrix else None


def quantization(plan: Plan) -> dict[str, dict[str, int]]:
    """How each module that can stay quantized is quantized, by module."""
    kept = ((part.name.removesuffix(".weight"), bits_kept(part)) for part in plan.parts)
    return {name: {"group_size": GROUP_SIZE, "bits": bits} for name, bits in kept if bits is not None}


def read_values(path: Path, info: TensorInfo) -> list[float]:
    """The values of a small tensor."""
    out = np.empty(prod(info.shape), np.float32)
    with path.open("rb") as file:
        _decode_into(file, info, out)
    return [float(value) for value in out]


def _dense(file: BinaryIO, part: Part, dtype: mx.Dtype) -> mx.array:
    shape = part.info.shape
    if part.heads is None and dtype == mx.float32 and mx.default_device() == mx.cpu:
        weight = mx.zeros(shape, mx.float32)
        mx.eval(weight)
        # The CPU's arrays are written through their buffer; a view that outlived this call would pin the array.
        with memoryview(cast(Any, weight)) as view:
            _read(file, part, np.asarray(view).reshape(-1))
        return weight
    out = np.empty(prod(shape), np.float32)
    _read(file, part, out)
    return mx.array(_in_order(out.reshape(shape), part)).astype(dtype)


def _read(file: BinaryIO, part: Part, out: npt.NDArray[np.float32]) -> None:
    """The tensor's values as mlx-lm wants them, in the file's order."""
    _decode_into(file, part.info, out)
    if part.excess:
        out -= np.float32(part.excess)


def _decode_into(file: BinaryIO, info: TensorInfo, out: npt.NDArray[np.float32]) -> None:
    for at, raw, tensor_type in _pieces(file, info):
        count = len(raw) // tensor_type.block_bytes * tensor_type.block_weights
        decode(tensor_type, raw, out[at : at + count])


def _affine(file: BinaryIO, part: Part, dtype: mx.Dtype) -> Weights:
    packed, scales, biases = [], [], []
    for _, raw, tensor_type in _pieces(file, part.info):
        codes, scale, offset = tensor_type.unpack(raw.reshape(-1, tensor_type.block_bytes))
        assert tensor_type.bits is not None, tensor_type
        assert offset is not None, tensor_type
        packed.append(_pack(codes.reshape(-1, GROUP_SIZE), tensor_type.bits))
        scales.append(scale.reshape(-1))
        biases.append(offset.reshape(-1))
    rows = part.info.shape[0]
    module = part.name.removesuffix(".weight")
    words = np.concatenate(packed).reshape(rows, -1).view(np.uint32)
    return {
        part.name: mx.array(_in_order(words, part)),
        f"{module}.scales": mx.array(_in_order(np.concatenate(scales).reshape(rows, -1), part)).astype(dtype),
        f"{module}.biases": mx.array(_in_order(np.concatenate(biases).reshape(rows, -1), part)).astype(dtype),
    }


def _pack(codes: Codes, bits: int) -> npt.NDArray[np.uint8]:
    """Codes [groups, 32] as MLX packs them, one after another from the lowest bit up: [groups, 4 * bits] bytes."""
    small = codes.astype(np.uint8, copy=False)
    if bits == 8:
        return small
    if bits == 4:
        return small[:, ::2] | small[:, 1::2] << np.uint8(4)
    each = np.unpackbits(small[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(each.reshape(len(codes), -1), axis=1, bitorder="little")


def _pieces(file: BinaryIO, info: TensorInfo) -> Iterator[tuple[int, npt.NDArray[np.uint8], TensorType]]:
    """The tensor's bytes in pieces of whole blocks: the first weight's index, the bytes (valid until the next piece),
    and the tensor's type."""
    tensor_type = TYPES[info.type_id]
    blocks = info.num_bytes // tensor_type.block_bytes
    piece_blocks = max(1, PIECE_WEIGHTS // tensor_type.block_weights)
    buffer = bytearray(min(blocks, piece_blocks) * tensor_type.block_bytes)
    file.seek(info.start)
    for first in range(0, blocks, piece_blocks):
        num_bytes = min(piece_blocks, blocks - first) * tensor_type.block_bytes
        piece = memoryview(buffer)[:num_bytes]
        if file.readinto(piece) != num_bytes:  # type: ignore[attr-defined]
            raise GgufError(f"{file.name} became shorter while it was read, at tensor {info.name}")
        yield first * tensor_type.block_weights, np.frombuffer(piece, np.uint8), tensor_type


def _in_order(rows: npt.NDArray[np.generic], part: Part) -> npt.NDArray[np.generic]:
    """The rows as mlx-lm wants them: of each head first the first of every rotated pair, then the second."""
    if part.heads is None:
        return rows
    return rows.reshape(part.heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
