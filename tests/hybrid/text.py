"""Makes the training text of the demonstration's hybrid model: `python -m tests.hybrid.text OUT SOURCE...`.

A SOURCE is a folder: documentation in reStructuredText (*.rst, *.txt, *.rst.txt) and Python code, whose docstrings are
taken without importing it. `stdlib` stands for the library of the Python that runs this. OUT gets text.jsonl.xz, one
section a line as [title, text], shuffled with a fixed seed, and sources.json with what each source gave.

What the model in lanes/hybrid_demo/ was trained on, with versions and licences, is told in docs/hybrid.md.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tests.hybrid.rst import Section, sections

SEED = 7
DOCUMENTS = (".rst", ".txt")
# Not prose, not English, or lists of changes, which say little of how things work.
SKIPPED = {"test", "tests", "testing", "t", "site-packages", "locale", "idle_test"}
SKIPPED_NAMES = (
    "test_", "changelog", "changes", "news", "history", "release", "announce", "license", "authors", "copyright",
)  # fmt: skip


def files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        dull = SKIPPED.intersection(parts) or any(part.lower().startswith(SKIPPED_NAMES) for part in parts)
        if path.suffix in (*DOCUMENTS, ".py") and path.is_file() and not dull:
            yield path


def documented(path: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """(title, text) of each text in a file; what cannot be read as the current Python is left out."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix in DOCUMENTS:
        yield "", text
        return
    module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    yield from docstrings(tree, module)


def docstrings(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    if found := ast.get_docstring(node):
        yield name, found
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (found := ast.get_docstring(child)):
            yield f"{name}.{child.name}", found


def gather(folder: Path, seen: set[bytes]) -> Iterator[Section]:
    """All sections of a folder, without paragraphs that were seen before."""
    for path in files(folder):
        for title, text in documented(path, folder):
            for section in sections(text, title):
                section.paragraphs = [each for each in section.paragraphs if _is_new(each, seen)]
                if section.paragraphs and section.title.isascii() and len(section.title) < 80:
                    yield section


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    digest = hashlib.sha256(paragraph.encode()).digest()[:16]
    new = digest not in seen
    seen.add(digest)
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sources", nargs="+")
    chosen = parser.parse_args()
    seen: set[bytes] = set()
    found: list[Section] = []
    told: dict[str, dict[str, int]] = {}
    for source in chosen.sources:
        folder = Path(sysconfig.get_path("stdlib") if source == "stdlib" else source)
        new = list(gather(folder, seen))
        characters = sum(len(paragraph) for section in new for paragraph in section.paragraphs)
        told[folder.name] = {"sections": len(new), "characters": characters}
        print(f"{folder.name}: {len(new)} sections, {characters} characters", flush=True)
        found += new
    random.Random(SEED).shuffle(found)
    chosen.out.mkdir(parents=True, exist_ok=True)
    with lzma.open(chosen.out / "text.jsonl.xz", "wt", encoding="utf-8") as file:
        for section in found:
            file.write(json.dumps([section.title, "\n\n".join(section.paragraphs)]) + "\n")
    (chosen.out / "sources.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
