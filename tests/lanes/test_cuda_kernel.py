from __future__ import annotations

import ctypes
import sys

import mlx.core as mx
import pytest

from lanes.cuda_kernel import TYPES, Kernel, KernelFailed, loaded_library
from lanes.tuning import backend

on_cuda = pytest.mark.skipif(backend() != "cuda", reason="this machine has no NVIDIA GPU")

SCALED = Kernel(
    "scaled",
    ("x", "by"),
    ("y",),
    ("count", "above"),
    """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = T(float(x[i]) * FACTOR * float(by[0]) + above);
    """,
)


def test_a_program_names_what_it_is_given() -> None:
    program = SCALED.program("f", (mx.bfloat16, mx.float32, mx.bfloat16), (("T", mx.bfloat16), ("FACTOR", 3)))
    said = "void f(const bfloat16* x, const float* by, bfloat16* y, const int count, const int above) {"
    assert f'extern "C" __global__ {said}' in program
    assert "    using T = bfloat16;\n    constexpr int FACTOR = 3;\n" in program


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells, and only there is CUDA")
def test_a_library_is_found_where_it_is_loaded_from() -> None:
    ctypes.CDLL(loaded_library("libc.so"))
    with pytest.raises(KernelFailed, match=r"libnone\.so is not loaded"):
        loaded_library("libnone.so")


@on_cuda
@pytest.mark.parametrize("dtype", [each for each in TYPES if each != mx.bool_])
def test_every_type(dtype: mx.Dtype) -> None:
    x = mx.arange(10).astype(dtype)
    (y,) = SCALED(
        [x, mx.array([2.0])],
        (10, 1),
        {"T": dtype, "FACTOR": 3},
        blocks=(1, 1),
        threads=32,
        shapes=[(10,)],
        dtypes=[dtype],
    )
    assert y.astype(mx.float32).tolist() == [6 * i + 1 for i in range(10)]


@on_cuda
def test_one_that_is_wrong_says_where() -> None:
    wrong = Kernel("wrong", (), ("y",), (), "y[0] = nothing;")
    with pytest.raises(KernelFailed, match=r'"nothing" is undefined[^\0]*compilation of "laned.cu"\.$'):
        wrong([], (), {}, blocks=(1, 1), threads=1, shapes=[(1,)], dtypes=[mx.int32])
