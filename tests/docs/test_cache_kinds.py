"""The page on kinds of caches: what it names exists, what it says of tables holds, and its example is a kind."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lanes import boundary, rows
from lanes.choice import choose_lane
from lanes.rows import kind_of
from lanes.rows.columns import ColumnRows
from lanes.solo import RowMaker
from tests.docs.pages import DOCS, ROOT, example
from tests.lanes.rows import test_laws as laws
from tests.lanes.tiny import tiny_llama

PAGE = (DOCS / "cache-kinds.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+\.py)(?:: ([\w., ]+))?`", PAGE)


def names_in(path: Path) -> set[str]:
    """All that is defined at the top of a file, and in its classes, with a dot."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= _defined(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _defined(inner)}
    return found


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize(("path", "names"), NAMED)
def test_files_and_names_are_there(path: str, names: str) -> None:
    assert (ROOT / path).is_file()
    assert {name for name in names.split(", ") if name} - names_in(ROOT / path) == set()


def test_the_commands_name_files_that_are_there() -> None:
    paths = re.findall(r"tests/[\w/]+(?:\.py)?", example("cache-kinds.md", "sh"))
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_verb_that_the_page_asks_for_is_one() -> None:
    for verb in ("encode", "decode", "solo_arrays", "solo_row"):
        assert f"`{verb}`" in PAGE
        assert hasattr(ColumnRows, verb)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's solo cache, registered as the page says."""
    made: dict[str, Any] = {"__name__": "half"}
    exec(compile(example("cache-kinds.md", "python"), "cache-kinds.md", "exec"), made)
    monkeypatch.setitem(rows.KINDS, made["HalfCache"], made["HalfRows"])
    monkeypatch.setitem(boundary._KINDS, "half", "anywhere")
    monkeypatch.setitem(laws.KINDS, "half", made["HalfCache"])
    return made["HalfCache"]


def test_the_example_keeps_the_laws(half: Any) -> None:
    lengths = [5, 0, laws.LONGEST]
    lane = laws.lane_of("half", lengths, chunk=3)
    assert kind_of(half()) == "half"
    assert {part.dtype for part in lane.parts} == {mx.float16}
    lane.filter(1)
    lane.put(1, lane.lift(2, lengths[2]))
    for slot, row in ((0, 0), (1, 2)):
        laws.assert_goes_on(lane.take(slot, lengths[row]), "half", row, lengths[row])


def test_the_example_is_batched_and_remembered(half: Any) -> None:
    model = tiny_llama()
    model.make_cache = lambda: [half() for _ in model.layers]
    choice = choose_lane(RowMaker(model))
    assert (choice.lane, set(choice.cache_kinds)) == ("batch", {"half"}), choice.reason
    assert boundary.remembers(choice.cache_kinds) == "anywhere"


def test_a_cache_that_is_in_no_table_is_served_in_the_serial_lane_and_not_remembered() -> None:
    class Stranger(laws.KVCache):  # type: ignore[misc]
        pass

    model = tiny_llama()
    model.make_cache = lambda: [Stranger() for _ in model.layers]
    choice = choose_lane(RowMaker(model))
    assert (choice.lane, choice.reason) == ("serial", "no rows in slots for Stranger")
    assert boundary.remembers(choice.cache_kinds) == "nothing"
