"""Kernels of our own for an NVIDIA GPU, which MLX runs among its own.

mx.fast.cuda_kernel compiles with MLX's headers, 3 to 6 s for each kernel and each set of constants, at every start:
what it has compiled so it does not keep. Compiled here, without a header, it takes 0.1 to 0.3 s.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from lanes.cuda_driver import cuda_driver
from store.checkpoint import CarrierFailed

PRELUDE: Final = """
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
#define INFINITY __int_as_float(0x7f800000)

struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    __device__ explicit bfloat16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const { return __uint_as_float((uint32_t)bits << 16); }
};
struct float16 {
    uint16_t bits;
    float16() = default;
    __device__ explicit float16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};
"""
TYPES: Final = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float",
    mx.int64: "int64_t",
    mx.int32: "int",
    mx.int16: "short",
    mx.int8: "signed char",
    mx.uint32: "uint32_t",
    mx.uint16: "uint16_t",
    mx.uint8: "uint8_t",
    mx.bool_: "bool",
}
# What a constant may be.
Constant = int | str | mx.Dtype


class KernelFailed(Exception):
    """A kernel cannot be compiled; the message says why."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """source: a function's body, in which these names are: inputs (pointers to const), outputs (pointers) and numbers
    (ints), in this order, and constants, by their values or, of types, as types."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: tuple[str, ...]
    source: str

    def __call__(
        self,
        inputs: Sequence[mx.array],
        numbers: Sequence[int],
        constants: Mapping[str, Constant],
        *,
        blocks: tuple[int, int],
        threads: int,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Lazy; inputs that do not lie row by row are copied. blocks: in x and y. shapes, dtypes: of the outputs.

        Raises KernelFailed.
        """
        types = (*(array.dtype for array in inputs), *dtypes)
        name, code = _compiled(self, types, tuple(constants.items()))
        x, y = blocks
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=code,
            inputs=list(inputs),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
            scalars=list(numbers),
            grid=(x * threads, y, 1),
            threadgroup=(threads, 1, 1),
            ensure_row_contiguous=True,
        )

    def program(self, name: str, types: Sequence[mx.Dtype], constants: Sequence[tuple[str, Constant]]) -> str:
        """All of it. types: of the inputs and the outputs."""
        names = [*(f"const {{}}* {each}" for each in self.inputs), *(f"{{}}* {each}" for each in self.outputs)]
        pointers = [each.format(TYPES[dtype]) for each, dtype in zip(names, types, strict=True)]
        parameters = ", ".join([*pointers, *(f"const int {each}" for each in self.numbers)])
        said = "".join(_said(each, value) for each, value in constants)
        return f'{PRELUDE}extern "C" __global__ void {name}({parameters}) {{\n{said}{self.source}\n}}\n'


def _said(name: str, value: Constant) -> str:
    if isinstance(value, int):
        return f"    constexpr int {name} = {value};\n"
    return f"    using {name} = {value if isinstance(value, str) else TYPES[value]};\n"


@cache
def _compiled(
    kernel: Kernel, types: tuple[mx.Dtype, ...], constants: tuple[tuple[str, Constant], ...]
) -> tuple[str, bytes]:
    """Its name, which MLX knows it by from then on, and its code."""
    digest = hashlib.blake2b(kernel.program("", types, constants).encode(), digest_size=8).hexdigest()
    name = f"laned_{kernel.name}_{digest}"
    return name, _compiler().compile(kernel.program(name, types, constants))


class Compiler:
    """NVRTC, NVIDIA's compiler at run time, which MLX has brought along."""

    def __init__(self, library: str, architecture: int) -> None:
        """architecture: of the device, 90 for 9.0."""
        self._library = ctypes.CDLL(library)
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", known)
        # What a compiler does not know yet the driver makes of what it knows.
        self._is_known = architecture in known
        nearest = max((each for each in known if each <= architecture), default=architecture)
        self._option = f"--gpu-architecture={'sm' if self._is_known else 'compute'}_{nearest}".encode()

    def compile(self, program: str) -> bytes:
        """Raises KernelFailed."""
        made = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(made), program.encode(), b"laned.cu", 0, None, None)
        try:
            options = (ctypes.c_char_p * 2)(self._option, b"--std=c++17")
            try:
                self._call("nvrtcCompileProgram", made, len(options), options)
            except KernelFailed as error:
                log = self._text("ProgramLog", made).rstrip(b"\n\0").decode(errors="replace")
                raise KernelFailed(f"{error}: {log}") from None
            return self._text("CUBIN" if self._is_known else "PTX", made)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(made))

    def _text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self._library, name)(*args):
            raise KernelFailed(f"{name}: error {status}")


@cache
def _compiler() -> Compiler:
    try:
        return Compiler(loaded_library("libnvrtc.so"), cuda_driver().architecture)
    except CarrierFailed as error:
        raise KernelFailed(str(error)) from error


def loaded_library(name: str) -> str:
    """The path of a library that this process has loaded, whatever version of it. Raises KernelFailed."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return f"/{path}"
    raise KernelFailed(f"{name} is not loaded")
