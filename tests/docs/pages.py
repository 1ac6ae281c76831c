"""The pages of docs/, and the examples in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def example(page: str, language: str, marker: str = "") -> str:
    """The page's one example in this language that has this in it."""
    examples = re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (str(code) for code in examples if marker in code)
    return found
