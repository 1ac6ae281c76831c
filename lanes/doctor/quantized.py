"""Products with quantized matrices, at every number of rows that a lane has by default, against the same product with
unpacked ones.

A kernel may be chosen by the number of rows, so each is tried: 0.31.2's for Metal, without transposing, was wrong for
2 and 3 rows only. One number beyond stands for prompts. A matrix for each head has few: the tokens of a step of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from lanes.doctor.verdict import Verdict, told
from lanes.tuning import backend

ROW_COUNTS = (*range(1, 33), 100)
ROW_COUNTS_OF_HEADS = tuple(range(1, 9))
BITS = (4, 8)
GROUP_SIZE = 64
HEADS, COLUMNS, DIM = 3, 128, 64
# Of the largest number in the product. Some kernels add up in the type itself; what is wrong is off by all of it.
TOLERANCES = {mx.float32: 0.005, mx.float16: 0.03, mx.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class Case:
    """transpose: the matrix is quantized along the dimension that is summed over. batched: a matrix for each head of
    two rows, as attention over quantized keys (transposed) and values has them; else one, as a layer has."""

    name: str
    transpose: bool
    batched: bool
    then: str

    @property
    def row_counts(self) -> tuple[int, ...]:
        return ROW_COUNTS_OF_HEADS if self.batched else ROW_COUNTS


LAYERS = Case(
    "quantized layers", True, False, "models with quantized weights are wrong here: --dtype float32 unpacks them"
)
CASES = (
    LAYERS,
    Case("quantized matrices, not transposed", False, False, "no model that laned knows takes this product"),
    Case("attention over quantized keys", True, True, "do without --kv-bits here"),
    Case("attention over quantized values", False, True, "do without --kv-bits here"),
)


def check_quantized() -> Iterator[Verdict]:
    """A verdict for each case, over all numbers of rows, widths and types."""
    for case in CASES:
        if backend() == "cuda" and case is not LAYERS:
            # MLX compiles a kernel for it, if it has one, for minutes.
            yield Verdict(case.name, "absent", "not on CUDA, where laned takes no such product", None, {})
        else:
            yield _judge(case)


def _judge(case: Case) -> Verdict:
    figures: dict[str, float] = {}
    wrong: list[str] = []
    wrong_rows: set[int] = set()
    for bits in BITS:
        for dtype, tolerance in TOLERANCES.items():
            word = str(dtype).removeprefix("mlx.core.")
            matrix = Matrix(case, bits, dtype)
            for rows in case.row_counts:
                try:
                    off = matrix.difference(rows)
                except Exception as error:
                    said = f"not on this backend: {told(error)}"
                    then = "laned unpacks keys and values first" if case.batched else None
                    return Verdict(case.name, "absent", said, then, figures)
                figures[f"{bits} bits, {word}, {rows} rows"] = off
                if not off <= tolerance:
                    wrong.append(f"{rows} rows, {bits} bits, {word}: off by {off:.1g}")
                    wrong_rows.add(rows)
    if wrong:
        # What stands in lanes.attention: on Metal columns are unpacked for so many tokens of a row.
        guarded = case.batched and backend() == "metal" and wrong_rows <= {2, 3}
        then = "laned unpacks keys and values there on Metal, so nothing is lost" if guarded else case.then
        return Verdict(case.name, "wrong", "; ".join(wrong), then, figures)
    said = f"at all of {len(case.row_counts)} numbers of rows, off by {max(figures.values()):.1g} at most"
    return Verdict(case.name, "right", said, None, figures)


class Matrix:
    """A quantized one, of random numbers."""

    def __init__(self, case: Case, bits: int, dtype: mx.Dtype) -> None:
        self.bits = bits
        self.dtype = dtype
        self.transpose = case.transpose
        self.batch: tuple[int, ...] = (2, HEADS, 2) if case.batched else ()
        shared = (2, HEADS, 1) if case.batched else ()
        self.inner, outer = (DIM, COLUMNS) if case.transpose else (COLUMNS, DIM)
        shape = (outer, self.inner) if case.transpose else (self.inner, outer)
        w = mx.random.normal((*shared, *shape), key=mx.random.key(99)).astype(dtype)
        self.packed = mx.quantize(w, group_size=GROUP_SIZE, bits=bits)
        unpacked = mx.dequantize(*self.packed, group_size=GROUP_SIZE, bits=bits).astype(mx.float32)
        self.unpacked = unpacked.swapaxes(-1, -2) if case.transpose else unpacked

    def difference(self, rows: int) -> float:
        """The largest, as a part of the largest number in the product with so many rows."""
        x = mx.random.normal((*self.batch, rows, self.inner), key=mx.random.key(rows)).astype(self.dtype)
        got = mx.quantized_matmul(x, *self.packed, transpose=self.transpose, group_size=GROUP_SIZE, bits=self.bits)
        right = x.astype(mx.float32) @ self.unpacked
        off = mx.max(mx.abs(got.astype(mx.float32) - right)) / mx.max(mx.abs(right))
        return cast(float, off.item())
