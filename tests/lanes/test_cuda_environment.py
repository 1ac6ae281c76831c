from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
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


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build")
def test_shapes_that_are_always_new_do_not_end_the_process() -> None:
    program = """
from lanes.cuda_environment import set_variables
set_variables()
import mlx.core as mx
for size in range(1, 40):
    array = mx.ones((size,))
    for _ in range(size):
        array = mx.sin(array)
    mx.eval(array)
"""
    few = {**os.environ, "MLX_CUDA_GRAPH_CACHE_SIZE": "2"}
    assert subprocess.run([sys.executable, "-c", program], env=few).returncode == 0
