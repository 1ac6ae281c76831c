"""What MLX does not offer of CUDA, asked of its driver, libcuda, which MLX's CUDA build needs in any case."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final

from store.checkpoint import CarrierFailed

# Of the driver's interface: cuda.h.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _CONCURRENT_MANAGED_ACCESS = 75, 76, 89

# What is locked is pages, each by itself: 1.6 ms for 4 MiB of small ones.
HUGE_PAGE_BYTES: Final = 2 << 20


class CudaDriver:
    """Of the first device, in the context that MLX uses. May be used by any thread that has called enter()."""

    def __init__(self) -> None:
        """Raises OSError, AttributeError or CarrierFailed where there is no driver."""
        self._library = ctypes.CDLL("libcuda.so.1")
        self.device = ctypes.c_int()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(self.device), ctypes.c_int(0))
        self._context = self.made("cuDevicePrimaryCtxRetain", self.device)
        self._locked: list[mmap.mmap] = []

    @property
    def architecture(self) -> int:
        """90 for 9.0."""
        return 10 * self._attribute(_CAPABILITY_MAJOR) + self._attribute(_CAPABILITY_MINOR)

    @property
    def shares_managed_memory(self) -> bool:
        """Whether host and device can use managed memory at the same time."""
        return bool(self._attribute(_CONCURRENT_MANAGED_ACCESS))

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), self.device)
        return value.value

    def enter(self) -> None:
        """The context is the thread's own affair."""
        self.call("cuCtxSetCurrent", self._context)

    def page_locked(self, nbytes: int) -> int:
        """The address of so much new memory of the host, which the device reads and writes at the same address. It is
        never given back. Raises CarrierFailed."""
        try:
            memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CarrierFailed(f"no memory of {nbytes:,} bytes: {error}") from error
        with suppress(OSError):  # the system has small pages only
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = -(-address_of(memoryview(memory)) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        ctypes.memset(address, 0, nbytes)
        self.enter()
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))
        self._locked.append(memory)
        return address

    def made(self, name: str, *args: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *args)
        return made

    def call(self, name: str, *args: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        if status := function(*args):
            raise CarrierFailed(f"{name}: error {status} of the CUDA driver")


@cache
def cuda_driver() -> CudaDriver:
    """The only one, made when somebody first asks. Raises CarrierFailed where there is none."""
    try:
        return CudaDriver()
    except (OSError, AttributeError) as error:
        raise CarrierFailed(str(error)) from error


def sharing_driver() -> CudaDriver:
    """The same, for who moves memory that MLX manages. Raises CarrierFailed where that cannot be done."""
    driver = cuda_driver()
    if not driver.shares_managed_memory:
        raise CarrierFailed("host and device cannot use managed memory at the same time")
    return driver


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
