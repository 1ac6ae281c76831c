from __future__ import annotations

import ctypes
from collections.abc import Iterator

import mlx.core as mx
import pytest

from lanes import kept_memory
from lanes.kept_memory import TRIM_BUSY_S, TRIM_IDLE_S, KeptMemory, trim
from scheduler.memory import resident_bytes

MIB = 1 << 20


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_memory, "KEPT_BYTES", 8 * MIB)
    mx.clear_cache()
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)
    mx.clear_cache()


def use_and_free(size: int) -> None:
    array = mx.ones((size,), mx.uint8)
    mx.eval(array)
    del array
    mx.synchronize()


@pytest.mark.usefixtures("bounded")
def test_kept_until_it_is_full() -> None:
    kept_memory = KeptMemory()
    mx.set_cache_limit(16 * MIB)  # so that the bound is reached on a CPU, too
    use_and_free(3 * MIB)
    kept = mx.get_cache_memory()
    assert kept >= 3 * MIB
    kept_memory.let_go(is_idle=False)
    assert mx.get_cache_memory() == kept
    use_and_free(6 * MIB)
    assert mx.get_cache_memory() >= kept + 6 * MIB
    kept_memory.let_go(is_idle=False)
    assert mx.get_cache_memory() == 0


@pytest.mark.usefixtures("bounded")
def test_the_c_library_is_trimmed_where_nobody_waits_or_else_by_the_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, trims = 1000.0, list[float]()
    monkeypatch.setattr(kept_memory, "trim", lambda: trims.append(now_s))
    kept = KeptMemory(lambda: now_s)
    for second in range(int(3 * TRIM_BUSY_S)):
        now_s = 1000.0 + second
        kept.let_go(is_idle=second >= 2 * TRIM_BUSY_S)
    idle = [1000 + 2 * TRIM_BUSY_S + TRIM_IDLE_S * number for number in range(int(TRIM_BUSY_S / TRIM_IDLE_S))]
    assert trims == [1000 + TRIM_BUSY_S, *idle]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_free_pages_between_used_ones_are_given_back() -> None:
    blocks = [b"x" * (64 << 10) for _ in range(4000)]  # 250 MiB, each too small for a mapping of its own
    del blocks[1::2]
    before = resident_bytes()
    trim()
    assert before - resident_bytes() > 80 * MIB
