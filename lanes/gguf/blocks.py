"""The tensor types of a GGUF file: how their blocks become weights. NumPy only.

A quantized tensor is a row of blocks; a block holds 32 or 256 weights, of which groups of 16 or 32 share a scale.
Whatever the type, a block unpacks to the same three things, `weight = code * scale + offset`:

    codes    [blocks, groups, group size], small integers
    scales   [blocks, groups, 1] float32
    offsets  [blocks, groups, 1] float32, or None for 0

Arithmetic is in float32 from the stored 16-bit factors on, so dense weights are exact to the last rounding. The usual
packing is in halves: byte i holds weight i in its low bits and weight i + n/2 in its high bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float32]
Unpacked = tuple[Codes, Floats, Floats | None]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type: its name, weights and bytes per block, and how to unpack blocks [n, block_bytes].

    bits: of an unsigned code, where MLX's affine quantization can hold the type as it is (groups of 32); else None.
    """

    name: str
    block_weights: int
    block_bytes: int
    unpack: Callable[[Bytes], Unpacked]
    bits: int | None = None


def decode(tensor_type: TensorType, raw: Bytes, out: Floats) -> None:
    """Write the weights of whole blocks to out. raw: [bytes] of the blocks, out: [weights], contiguous."""
    codes, scales, offsets = tensor_type.unpack(raw.reshape(-1, tensor_type.block_bytes))
    weights = out.reshape(codes.shape)
    np.multiply(codes, scales, out=weights)
    if offsets is not None:
        weights += offsets


def type_name(type_id: int) -> str:
    """The name of a tensor type, whether it can be read or not."""
    known = TYPES.get(type_id)
    return known.name if known is not None else UNREADABLE.get(type_id, f"number {type_id}")


def _f16(blocks: Bytes, at: int) -> Floats:
    """The 16-bit float at this byte of each block, as [blocks, 1, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)[:, :, None]


def _fields(packed: Bytes, bits: int, run: int) -> Bytes:
    """Codes [blocks, n * 8 / bits] from bytes [blocks, n], run bytes at a time: of each run first the lowest bits of
    all its bytes, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _f32(blocks: Bytes) -> Unpacked:
    return _plain(blocks.view(np.float32))


def _half(blocks: Bytes) -> Unpacked:
    return _plain(blocks.view(np.float16).astype(np.float32))


def _bf16(blocks: Bytes) -> Unpacked:
    return _plain((blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32))


def _plain(values: Floats) -> Unpacked:
    """Unquantized: the value is the scale of a code of 1."""
    return np.ones((1, 1, 1), np.uint8).repeat(len(values), 0), values[:, :, None], None


def _q4_0(blocks: Bytes) -> Unpacked:
    scale = _f16(blocks, 0)
    return _fields(blocks[:, 2:], 4, 16)[:, None], scale, -8 * scale


def _q4_1(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, 4:], 4, 16)[:, None], _f16(blocks, 0), _f16(blocks, 2)


def _q5(blocks: Bytes, at: int) -> Bytes:
    """Codes of 5 bits: the fifth bits of the 32 weights are together in 4 bytes, before the halves."""
    fifth = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return (_fields(blocks[:, at + 4 :], 4, 16) | fifth << np.uint8(4))[:, None]


def _q5_0(blocks: Bytes) -> Unpacked:
    scale = _f16(blocks, 0)
    return _q5(blocks, 2), scale, -16 * scale


def _q5_1(blocks: Bytes) -> Unpacked:
    return _q5(blocks, 4), _f16(blocks, 0), _f16(blocks, 2)


def _q8_0(blocks: Bytes) -> Unpacked:
    # The signed codes, moved by 128 to be unsigned: the way MLX keeps them.
    scale = _f16(blocks, 0)
    return (blocks[:, 2:] ^ np.uint8(128))[:, None, :], scale, -128 * scale


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of Q4_K and Q5_K, as [blocks, 8, 1]: two 16-bit factors, then 8 scales and 8 minima of 6 bits in 12 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)[:, :, None]
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)[:, :, None]
    return _f16(blocks, 0) * scales, -(_f16(blocks, 2) * minima)


def _q4_k(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, 16:], 4, 32).reshape(-1, 8, 32), *_scales_and_minima(blocks)


def _q5_k(blocks: Bytes) -> Unpacked:
    codes = (_fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4).reshape(-1, 8, 32)
    return codes, *_scales_and_minima(blocks)


def _q6_k(blocks: Bytes) -> Unpacked:
    """Each 128 weights: the low 4 bits as halves of 64 bytes, the high 2 bits as quarters of 32 bytes; minus 32."""
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    signed = (codes.view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    return signed, _f16(blocks, 208) * blocks[:, 192:208].view(np.int8)[:, :, None], None


def _q2_k(blocks: Bytes) -> Unpacked:
    packed = blocks[:, :16, None]
    codes = _fields(blocks[:, 16:80], 2, 32).reshape(-1, 16, 16)
    return codes, _f16(blocks, 80) * (packed & 15), -(_f16(blocks, 82) * (packed >> 4))


def _q3_k(blocks: Bytes) -> Unpacked:
    """2 bits as in Q2_K; a third bit, of which the absence takes away 4; 16 scales of 6 bits, minus 32."""
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    signed = (codes.view(np.int8) - np.int8(4)).reshape(-1, 16, 16)
    scales = (_fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4).view(np.int8) - np.int8(32)
    return signed, _f16(blocks, 108) * scales[:, :, None], None


# The 16 values of the non-linear 4-bit types, from the format's definition.
_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: Bytes) -> Unpacked:
    return _LEVELS[_fields(blocks[:, 2:], 4, 16)[:, None]], _f16(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Unpacked:
    """8 scales of 6 bits, minus 32: the high 2 bits in a 16-bit number, the low 4 in 4 bytes, two in each."""
    tops = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_fields(blocks[:, 4:8], 4, 1) | tops.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    return _LEVELS[_fields(blocks[:, 8:], 4, 16).reshape(-1, 8, 32)], _f16(blocks, 0) * scales[:, :, None], None


TYPES = {
    0: TensorType("F32", 1, 4, _f32),
    1: TensorType("F16", 1, 2, _half),
    2: TensorType("Q4_0", 32, 18, _q4_0, bits=4),
    3: TensorType("Q4_1", 32, 20, _q4_1, bits=4),
    6: TensorType("Q5_0", 32, 22, _q5_0, bits=5),
    7: TensorType("Q5_1", 32, 24, _q5_1, bits=5),
    8: TensorType("Q8_0", 32, 34, _q8_0, bits=8),
    10: TensorType("Q2_K", 256, 84, _q2_k),
    11: TensorType("Q3_K", 256, 110, _q3_k),
    12: TensorType("Q4_K", 256, 144, _q4_k, bits=4),
    13: TensorType("Q5_K", 256, 176, _q5_k, bits=5),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    20: TensorType("IQ4_NL", 32, 18, _iq4_nl),
    23: TensorType("IQ4_XS", 256, 136, _iq4_xs),
    30: TensorType("BF16", 1, 2, _bf16),
}

# Types that the format has and this file does not: named, so that a refusal can say what it met.
UNREADABLE = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
