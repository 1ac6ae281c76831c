from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from lanes import kept_memory
from lanes.kept_memory import release_if_full

MIB = 1 << 20


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_memory, "KEPT_BYTES", 8 * MIB)
    mx.clear_cache()
    before = mx.set_cache_limit(16 * MIB)  # so that the bound is reached on a CPU, too
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
    use_and_free(3 * MIB)
    kept = mx.get_cache_memory()
    assert kept >= 3 * MIB
    release_if_full()
    assert mx.get_cache_memory() == kept
    use_and_free(6 * MIB)
    assert mx.get_cache_memory() >= kept + 6 * MIB
    release_if_full()
    assert mx.get_cache_memory() == 0
