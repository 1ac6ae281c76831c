from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest

from lanes.cuda_environment import VARIABLES, set_variables


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*VARIABLES, "MLX_PTX_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_kernels_are_kept_for_each_mlx(tmp_path: Path) -> None:
    set_variables()
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(tmp_path / "laned" / "ptx" / version("mlx"))
    assert all(os.environ[name] == value for name, value in VARIABLES.items())


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    set_variables()
    assert (os.environ["MLX_PTX_CACHE_DIR"], os.environ["MLX_MAX_OPS_PER_BUFFER"]) == ("/elsewhere", "7")
