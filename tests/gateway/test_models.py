"""What a request may call the model."""

from __future__ import annotations

import pytest

from scheduler.gateway.faults import Fault
from scheduler.gateway.models import adapter_of, listed
from scheduler.gateway.settings import Settings

OWN = Settings()
NAMED = Settings(names=("big", "org/big:8b"))


@pytest.mark.parametrize(
    ("settings", "wanted", "adapter"),
    [
        (OWN, None, None),
        (OWN, "qwen", None),
        (OWN, "default_model", None),
        (OWN, "qwen:legal", "legal"),
        (NAMED, "org/big:8b", None),
        (NAMED, "org/big:8b:legal", "legal"),
        (Settings(any_model=True), "gpt-4:x", None),
    ],
)
def test_names_and_adapters(settings: Settings, wanted: str | None, adapter: str | None) -> None:
    assert adapter_of(wanted, settings, "qwen") == adapter


@pytest.mark.parametrize(("settings", "wanted"), [(OWN, "gpt-4"), (OWN, "qwen:"), (OWN, ""), (NAMED, "qwen")])
def test_another_model(settings: Settings, wanted: str) -> None:
    with pytest.raises(Fault) as raised:
        adapter_of(wanted, settings, "qwen")
    assert (raised.value.status, raised.value.param) == (404, "model")


def test_all_names_are_listed() -> None:
    found = listed(NAMED, "qwen", 0)
    assert [model["id"] for model in found["data"]] == ["big", "org/big:8b"]
    assert (found["first_id"], found["last_id"]) == ("big", "org/big:8b")
