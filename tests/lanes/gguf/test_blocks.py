"""Blocks: each type against values of another implementation, and packed for MLX against the same weights dense.

blocks.json holds blocks of random bytes and their weights as the package gguf 0.19.0 gives them.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lanes.gguf.blocks import TYPES, UNREADABLE, decode, type_name
from lanes.gguf.families import Part, Plan
from lanes.gguf.header import read_header
from lanes.gguf.weights import quantization, read_weights
from tests.lanes.gguf import writer

GOLDEN = json.loads((Path(__file__).parent / "blocks.json").read_text())
by_type = pytest.mark.parametrize("type_id", list(TYPES), ids=[each.name for each in TYPES.values()])


@by_type
def test_equals_the_other_implementation(type_id: int) -> None:
    golden = GOLDEN[TYPES[type_id].name]
    assert golden["type"] == type_id
    expected = np.frombuffer(bytes.fromhex(golden["weights"]), "<f4")
    out = np.empty_like(expected)
    decode(TYPES[type_id], np.frombuffer(bytes.fromhex(golden["blocks"]), np.uint8), out)
    assert np.array_equal(out, expected)


def test_no_type_is_both_readable_and_not() -> None:
    assert not TYPES.keys() & UNREADABLE.keys()
    assert type_name(12) == "Q4_K"
    assert type_name(16) == "IQ2_XXS"


@by_type
@pytest.mark.parametrize("heads", [None, 2])
def test_kept_quantized_equals_dense(tmp_path: Path, type_id: int, heads: int | None) -> None:
    """A tensor read to stay quantized, then dequantized by MLX, is the tensor read dense, rows put in order in both."""
    kind = TYPES[type_id]
    raw = bytes.fromhex(GOLDEN[kind.name]["blocks"])
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, kind.block_bytes)
    columns = max(32, kind.block_weights)
    rows = 8
    needed = rows * columns // kind.block_weights
    repeated = np.resize(blocks, (needed, kind.block_bytes))
    if kind.bits is not None:
        # Another code in each row, so that an exchange of rows is seen: the last byte of every type here is a code.
        repeated[:, -1] ^= np.arange(needed, dtype=np.uint8) // (needed // rows)
    path = writer.write(tmp_path / "a.gguf", {}, {"w.weight": (repeated.tobytes(), (rows, columns), type_id)})
    plan = Plan({}, (Part("w.weight", read_header(path).tensors["w.weight"], heads),))
    told: list[int] = []
    (dense,) = read_weights(path, plan, mx.float32, False, told.append)
    (kept,) = read_weights(path, plan, mx.float32, True, told.append)
    assert told == [repeated.nbytes] * 2
    plain = np.empty(rows * columns, np.float32)
    decode(kind, repeated.reshape(-1), plain)
    plain = plain.reshape(rows, columns)
    order = np.arange(rows) if heads is None else np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    assert np.array_equal(np.array(dense["w.weight"]), plain[order])
    how = quantization(plan)
    if kind.bits is None:
        assert how == {}
        assert np.array_equal(np.array(kept["w.weight"]), plain[order])
    else:
        assert how == {"w": {"group_size": 32, "bits": kind.bits}}
        again = mx.dequantize(kept["w.weight"], kept["w.scales"], kept["w.biases"], **how["w"])
        assert np.array_equal(np.array(again), plain[order])
