"""The pages of the wire and of the store's format are as their sources are, and what they show works."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from scheduler import protocol
from scheduler.commands import reference
from scheduler.commands.layout_pages import markdown, store_page, wire_page
from scheduler.protocol import ERROR_CODES
from store import format, framing, names, wire
from store.framing import encode_frame
from store.keeper import KeeperSettings, open_keeper
from store.segment_file import verify_file
from store.settings import StoreSettings
from store.store import open_store
from tests.docs.pages import DOCS, ROOT, example
from tests.scheduler.trio_test import trio_test
from tests.store.rows import Row

FINGERPRINT = "model-1"


@pytest.mark.parametrize("path", reference.MADE)
def test_what_is_made_is_up_to_date(path: str) -> None:
    again = "run `python -m scheduler.commands.reference`"
    assert (ROOT / path).read_text(encoding="utf-8") == reference.MADE[path](), again


@pytest.mark.parametrize(
    ("page", "sources"), [("wire.md", [protocol, framing, wire]), ("store-format.md", [format, names])]
)
def test_every_line_of_the_tables_is_on_the_page(page: str, sources: list[ModuleType]) -> None:
    lines = {line.strip() for line in (DOCS / page).read_text(encoding="utf-8").splitlines()}
    for source in sources:
        blocks = inspect.cleandoc(source.__doc__ or "").split("\n\n")
        tables = "\n".join(dedent(block) for block in blocks if block.startswith("    "))
        said = [line for line in tables.splitlines() if set(line.strip()) != {"-"} and "  " in line]
        assert said, f"{source.__name__} has no table"
        assert [line for line in said if line.strip() not in lines] == []


def test_a_docstring_becomes_markdown() -> None:
    docstring = """What it is.

    More of it.

        one
        ---
        a   1
          b 2

        c   3
        two
        ---
        d   4

    Of this:

        e   5

    This file is code.
    """
    assert markdown(docstring).split("\n\n") == [
        *("What it is.", "More of it.", "### One", "```text\na   1\n  b 2", "c   3\n```"),
        *("### Two", "```text\nd   4\n```", "Of this:", "```text\ne   5\n```"),
    ]


def test_the_wires_page_has_every_message_and_error() -> None:
    page = wire_page()
    for tag in (*protocol.REQUESTS, *protocol.REPLIES, *wire.REQUESTS, *wire.REPLIES):
        assert f"\n{tag}" in page, tag
    for code in ERROR_CODES:
        assert f"\n{code} " in page, code


def test_the_frame_that_is_shown_is_one() -> None:
    shown = example("wire.md", "text", "a4 type").split()
    told = b"".join(bytes.fromhex(word) if len(word) == 2 else word.encode() for word in shown)
    assert told == encode_frame({"type": "hello", "version": 1, "client": "example"})


@trio_test
async def test_a_file_that_the_store_has_written_is_read_as_the_page_says(tmp_path: Path) -> None:
    row, tokens = Row(cut_anywhere=False), list(range(100))
    async with open_keeper(KeeperSettings(tmp_path / "store")) as keeper:
        settings = StoreSettings(FINGERPRINT, 1 << 20, 1 << 20, cut_anywhere=False)
        async with open_store(settings, keeper) as store:
            draft = store.draft(tokens, "")
            assert draft is not None
            store.remember(draft, row.part(tokens, 0, [40]))
            await store.flush()
    (file,) = (tmp_path / "store").glob("*/*.segment")
    stored = verify_file(file)

    head = run("bash", "-c", example("store-format.md", "sh").replace("FILE.segment", str(file)))
    assert json.loads(head.removesuffix(",\n") + "}") == {
        "id": stored.segment.id,
        "root": stored.segment.root,
        "fingerprint": FINGERPRINT,
        "parent": None,
        "start": 0,
        "boundaries": [40, 100],
        "data_bytes": stored.data_bytes,
    }
    first, *tensors = run(sys.executable, "-c", example("store-format.md", "python"), str(file)).splitlines()
    assert first == f"{stored.segment.id} of the tokens 0 to 100"
    assert tensors == [f"{spec.name} {spec.dtype} {list(spec.shape)} whole" for spec in stored.segment.tensors]

    with file.open("r+b") as opened:
        opened.seek(stored.places[0])
        opened.write(b"?")
    _, damaged, *others = run(sys.executable, "-c", example("store-format.md", "python"), str(file)).splitlines()
    assert damaged.endswith(" damaged")
    assert all(line.endswith(" whole") for line in others)


def test_the_stores_page_names_what_is_in_a_header() -> None:
    page = store_page()
    for field in (*format._SEGMENT_FIELDS, *format._TENSOR_FIELDS):
        assert field in page


def run(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout
