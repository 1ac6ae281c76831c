"""From reStructuredText to sections of plain English: a title and the paragraphs under it.

Only prose is kept. Code, tables, field lists, links' targets and directives that hold none of it are left out, and so
is a sentence that announces code which is not there. What a function or class is documented with becomes a section of
its own, titled by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# Directives whose body documents the name after them.
NAMED = re.compile(
    r"(?:\w+:)?(?:autofunction|attribute|c?function|c?macro|class|classmethod|data|decorator|decoratormethod|exception|"
    r"fixture|member|method|module|opcode|option|setting|signal|staticmethod|templatefilter|templatetag|type|"
    r"django-admin|confval|describe|object)$"
)
# Directives whose body is prose that belongs where it stands.
PROSE = {"note", "warning", "tip", "important", "hint", "attention", "caution", "topic", "admonition", "highlights"}
# What a docstring in NumPy's style lists under these is no prose.
NUMPY_LISTS = {
    "attributes", "examples", "example", "methods", "other parameters", "parameters", "raises", "receives",
    "references", "returns", "see also", "warns", "yields", "keyword arguments", "arguments", "args",
}  # fmt: skip

_DIRECTIVE = re.compile(r"\.\.\s+([\w:-]+)::\s*(.*)")
_ITEM = re.compile(r"(?:[-*•]|\d{1,2}[.)]|#\.)\s+(?=\S)")
_UNDERLINE = re.compile(r"([=\-`:'\"~^_*+#<>.])\1{2,}$")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_INLINE = [
    (re.compile(r"\b[A-Z]\{([^{}]*)\}"), r"\1"),
    (re.compile(r":(?:\w+:)?(?:pep|PEP):`(\d+)[^`]*`"), r"PEP \1"),
    (re.compile(r":rfc:`(\d+)[^`]*`"), r"RFC \1"),
    (re.compile(r":[\w:.+-]+:`([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":[\w:.+-]+:`[!~]?(?:[\w.]*\.)?([^`]*)`"), r"\1"),
    (re.compile(r"``(.+?)``"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"\*\*(\S.*?)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*(\w[^*]*?)\*(?![\w*])"), r"\1"),
    (re.compile(r"\s*\[[#\w.-]*\]_"), ""),
    (re.compile(r"\|(\w[\w -]*)\|_?"), r"\1"),
    (re.compile(r"(\w)_(?=[\s.,;:)]|$)"), r"\1"),
    (re.compile(r"\\(.)"), r"\1"),
    (re.compile(r"\s+"), " "),
]
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})


@dataclass(slots=True)
class Section:
    title: str
    paragraphs: list[str] = field(default_factory=list)


def sections(text: str, title: str) -> Iterator[Section]:
    """The sections of a document, those without prose left out. title: of what comes before the first heading. Names
    are given without the modules they are in."""
    for section in _Reader(text.expandtabs().splitlines(), title).read():
        section.title = ".".join(section.title.split(".")[-2:]) if " " not in section.title else section.title
        if section.paragraphs and section.title:
            yield section


def plain(text: str) -> str:
    """A paragraph's text without markup, in one line."""
    text = text.translate(_QUOTES)
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return text.strip()


def prose(text: str) -> str | None:
    """The paragraph without a last sentence that announces what is not there, or None if it is no English prose."""
    item = "- " if text.startswith("- ") else ""
    sentences = _SENTENCE.split(plain(text.removeprefix("- ")))
    if sentences[-1].endswith(":"):
        sentences.pop()
    found = " ".join(sentences)
    # So little, or so many signs that are not of words, that it is code, a table or a heading.
    letters = sum(char.isalpha() or char == " " for char in found)
    if len(found) < 30 or letters < 0.88 * len(found) or found.count(" ") < len(found) / 12:
        return None
    if not found.isascii() or found[-1] not in '.!?)"' or not (found[0].isupper() or found[0] in '"('):
        return None
    return None if re.search(r">>>|::|\{\{|https?:|__\w+__\W*$|[=<>|]{2}", found) else item + found


class _Reader:
    def __init__(self, lines: list[str], title: str) -> None:
        self.lines = lines
        self.open: list[tuple[int, Section]] = [(-1, Section(title))]
        self.skip_from: int | None = None  # lines indented deeper than this are no prose
        self.held: list[str] = []
        self.indent = 0

    def read(self) -> Iterable[Section]:
        done: list[Section] = []
        for number, line in enumerate(self.lines):
            if not line.strip():
                self._flush()
                continue
            indent, line = len(line) - len(line.lstrip()), line.strip()
            after = self.lines[number + 1].strip() if number + 1 < len(self.lines) else ""
            heading = _UNDERLINE.match(after) and len(after) >= len(line) and not _UNDERLINE.match(line)
            if self.skip_from is not None and indent > self.skip_from and not (heading and self.skip_from < 0):
                continue
            self.skip_from = None
            if self.held and indent < self.indent:
                self._flush()
            while indent <= self.open[-1][0]:
                self._flush()
                done.append(self.open.pop()[1])
            if heading and not self.held:
                self._heading(plain(line), indent, done)
            elif line.startswith(".. "):
                self._directive(line, indent)
            elif line.startswith((":", "+-", "| ", ">>>", "$ ", "__ ")) or _UNDERLINE.match(line):
                self._flush()
            else:
                self._text(line, indent)
        self._flush()
        return done + [section for _, section in self.open]

    def _heading(self, title: str, indent: int, done: list[Section]) -> None:
        if title.lower() in NUMPY_LISTS:
            self.skip_from = -1
            return
        if title.lower() in ("notes", "note"):
            return
        while len(self.open) > 1:
            done.append(self.open.pop()[1])
        done.append(self.open.pop()[1])
        self.open.append((-1, Section(title)))

    def _directive(self, line: str, indent: int) -> None:
        self._flush()
        found = _DIRECTIVE.match(line)
        name, argument = found.groups() if found else ("", "")
        if NAMED.match(name):
            # The name of a C function stands after its type, every other before its arguments.
            words = re.sub(r"[(\[].*", "", argument).replace("*", "").split() or [""]
            self.open.append((indent, Section(plain(words[-1] if name.startswith("c:") else words[0]))))
        elif name in PROSE:
            if name not in ("topic", "admonition") and argument:
                self._text(argument, indent + 3)
        else:
            self.skip_from = indent

    def _text(self, line: str, indent: int) -> None:
        if item := _ITEM.match(line):
            self._flush()
            line, indent = "- " + line[item.end() :], indent + item.end()
        if not self.held:
            self.indent = indent
        self.held.append(line)

    def _flush(self) -> None:
        if not self.held:
            return
        text, self.held = " ".join(self.held), []
        if text.endswith("::"):
            self.skip_from = self.indent
        if found := prose(text):
            self.open[-1][1].paragraphs.append(found)
