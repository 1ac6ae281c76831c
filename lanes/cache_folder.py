"""Where what is made once for this machine lies, to be used by later starts. Imports no MLX."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """May not exist. Under $XDG_CACHE_HOME, or else the home's .cache."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    base = Path(configured) if os.path.isabs(configured) else Path(os.path.expanduser("~/.cache"))
    return base / "laned" / name
