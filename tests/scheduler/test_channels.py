"""An answer's text taken apart, however it is cut into pieces."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.channels import REASONING, Channels, Piece, Transitions

TRANSITIONS: Transitions = {
    "normal": [("<think>", "reasoning"), ("<call>", "tool")],
    "reasoning": [("</think>", "normal"), ("<call>", "tool")],
    "tool": [("</call>", "normal")],
}
WORDS = ("<think>", "</think>", "<call>", "</call>", '{"name": "f"}', "<th", "<ca", "</", "a", " ", "<", "\n")


def take_apart(pieces: Sequence[str], start: str = "normal", parse: Any = json.loads) -> Piece:
    channels = Channels(TRANSITIONS, start, parse)
    return Piece.joined([*map(channels.push, pieces), channels.flush()])


def told(piece: Piece) -> tuple[str, str, list[tuple[str, str]]]:
    """All but the ids that are made up."""
    return piece.text, piece.reasoning, [(call.function.name, call.function.arguments) for call in piece.tool_calls]


@given(words=st.lists(st.sampled_from(WORDS), max_size=12), cuts=st.lists(st.integers(0, 80), max_size=8))
def test_it_does_not_matter_how_the_text_is_cut(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    assert told(take_apart(pieces)) == told(take_apart([text])) == told(take_apart(list(text)))


@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
def test_nothing_but_markers_is_lost(words: list[str]) -> None:
    """Without calls: markers come in turns, of 7 characters and of 8, and all the rest is told."""
    text = "".join(words)
    whole = take_apart(list(text), parse=None)
    num_lost = len(text) - len(whole.text) - len(whole.reasoning)
    assert num_lost % 15 in (0, 7)
    if "think>" not in text:
        assert (whole.text, whole.reasoning) == (text, "")
    assert whole.tool_calls == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", "", [])),
        ("<think>why</think>so", ("so", "why", [])),
        ("a<think>b</think>c<think>d", ("ac", "bd", [])),
        ('<call>{"name": "f", "arguments": {"x": 1}}</call>', ("", "", [("f", '{"x": 1}')])),
        ('hm <call>[{"name": "f"}, {"name": "g"}]</call> ok', ("hm  ok", "", [("f", "{}"), ("g", "{}")])),
        ('<think>x<call>{"name": "f", "arguments": "{}"}</call>y', ("y", "x", [("f", "{}")])),
        # A call that the end of the answer ends is one, if it is whole.
        ('<call>{"name": "f"}', ("", "", [("f", "{}")])),
        # What is no call is told as it was written.
        ('<call>{"name": "f', ('<call>{"name": "f', "", [])),
        ("<call>[1]</call>", ("<call>[1]</call>", "", [])),
        ('<call>{"name": ""}</call>', ('<call>{"name": ""}</call>', "", [])),
        ("<call>", ("<call>", "", [])),
        ("a <", ("a <", "", [])),
        ("</think>", ("</think>", "", [])),
    ],
)
def test_what_is_told(text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert told(take_apart(list(text))) == expected


def test_an_answer_may_begin_in_the_middle_of_its_thoughts() -> None:
    assert told(take_apart(["so</think>", "yes"], REASONING)) == ("yes", "so", [])


def test_what_may_become_a_marker_is_held_back_and_no_more() -> None:
    channels = Channels(TRANSITIONS, parse=json.loads)
    assert channels.push("abc<th").text == "abc"
    assert channels.push("i").text == ""
    assert channels.push("s").text == "<this"
    assert channels.flush().text == ""


def test_calls_have_ids_of_their_own_or_the_models() -> None:
    piece = take_apart(['<call>[{"name": "f"}, {"name": "g", "id": "x7"}, {"name": "h", "id": 5}]</call>'])
    ids = [call.id for call in piece.tool_calls]
    assert ids[1] == "x7"
    assert len(set(ids)) == 3
    assert all(0 < len(id) <= 128 for id in ids)


def test_without_a_table_all_is_text() -> None:
    channels = Channels()
    assert channels.push("<think>a</think>").text == "<think>a</think>"
    assert channels.flush() == Piece()
