"""Links between the pages lead somewhere: files, and headings in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "deploy" / "README.md", *sorted(DOCS.glob("*.md"))]


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor or "") of each link that stays in the repository."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target for target, _ in links(ROOT / "README.md")}
    assert [page.name for page in DOCS.glob("*.md") if page not in linked] == []
