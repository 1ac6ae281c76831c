from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from lanes import cuda_driver as module
from lanes import cuda_kernel
from lanes.cuda_driver import cuda_driver, sharing_driver
from lanes.cuda_kernel import KernelFailed
from store.checkpoint import CarrierFailed


class Library:
    """libcuda of a device of architecture 9.0."""

    def __init__(self, shares_managed_memory: bool) -> None:
        self.attributes = {75: 9, 76: 0, 89: int(shares_managed_memory)}

    def attribute(self, value: Any, number: ctypes.c_int, device: ctypes.c_int) -> int:
        value._obj.value = self.attributes[number.value]
        return 0

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("cu")
        return self.attribute if name == "cuDeviceGetAttribute" else lambda *args: 0


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test has what another has made."""
    for made in (cuda_driver, cuda_kernel._compiler):
        made.cache_clear()
    yield
    for made in (cuda_driver, cuda_kernel._compiler):
        made.cache_clear()


@pytest.mark.parametrize("shares", [False, True])
def test_kernels_need_no_managed_memory_and_moving_it_does(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Library(shares))
    assert cuda_driver().architecture == 90
    if shares:
        assert sharing_driver() is cuda_driver()
    else:
        with pytest.raises(CarrierFailed, match="cannot use managed memory at the same time"):
            sharing_driver()


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: no such file"), AttributeError("no cuInit")])
def test_without_a_driver_there_are_no_kernels(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Any:
        raise error

    monkeypatch.setattr(module.ctypes, "CDLL", none)
    monkeypatch.setattr(cuda_kernel, "loaded_library", lambda name: name)
    with pytest.raises(CarrierFailed, match=str(error)):
        cuda_driver()
    with pytest.raises(KernelFailed, match=str(error)):
        cuda_kernel._compiler()
