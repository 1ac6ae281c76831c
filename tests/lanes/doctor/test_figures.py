"""What the doctor measures of a device: all of it is there, and none of it is nothing."""

from typing import Any

import pytest

from lanes.attention import forms_for
from lanes.doctor import costs, device
from lanes.tuning import backend


def numbers(told: Any) -> list[float]:
    if isinstance(told, dict):
        return [number for part in told.values() for number in numbers(part)]
    return [told] if isinstance(told, int | float) else []


def test_the_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ROW_COUNTS", (1, 8))
    told = device.describe()
    assert told["backend"] == backend()
    assert set(told["product_gflops"]["float32"]) == {"1 rows", "8 rows"}
    assert all(number > 0 for number in numbers(told))


def test_costs_of_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    monkeypatch.setattr(costs, "CPU_SHAPE", tiny)
    monkeypatch.setattr(costs, "GPU_SHAPE", tiny)
    monkeypatch.setattr(costs, "ATTENTION_COLUMNS", (16,))
    told = costs.measure_costs()
    assert set(told["steps"]["8 rows"]) == {"eager", "compiled", "eager, joined", "compiled, joined"}
    shape = (costs.ATTENTION_HEADS, costs.ATTENTION_KV_HEADS, costs.ATTENTION_DIM)
    assert set(told["attention"]["8 rows of 16 columns"]) == set(forms_for(*shape, costs.mx.float32))
    assert 0 < told["dispatch_part"] <= 1
    assert all(number > 0 for number in numbers(told))
