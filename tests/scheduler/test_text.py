"""What a client sees is the text up to the first stop string, however it was cut into tokens on its way."""

import codecs
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.text import TextStream


class Pieces:
    """A decoder whose token i is the i-th piece of a text's bytes, cut anywhere, through characters too."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first; of two complete at once the one that begins first.

    One that is longer and begins earlier does not count if another was complete before it was: the answer ended there.
    """
    found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    _, begin, stop = min(found)
    return text[:begin], stop


def pieces_of(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(min(at, len(raw)) for at in cuts), len(raw)]
    return [raw[start:stop] for start, stop in pairwise(edges)]


# Few letters, so that stop strings and their beginnings occur; some of them of several bytes.
texts = st.text("ab\u00e4\U0001f600", max_size=14)
stop_lists = st.lists(st.text("ab\u00e4\U0001f600", min_size=1, max_size=4), max_size=3)
cut_lists = st.lists(st.integers(0, 40), max_size=14)


@settings(max_examples=600)
@given(text=texts, stops=stop_lists, cuts=cut_lists)
@example(text="abab\u00e4", stops=["bab\u00e4", "a"], cuts=[])
def test_what_is_released_is_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    """However it is cut: in one piece, byte by byte, in pieces of nothing."""
    expected, stop = cut(text, stops)
    raw = text.encode()
    for pieces in (pieces_of(raw, cuts), [raw], [bytes([byte]) for byte in raw]):
        stream = TextStream(Pieces(pieces), stops)
        released = ""
        for token in range(len(pieces)):
            released += stream.push(token)
            assert expected.startswith(released), f"{released!r} cannot be taken back"
            if stream.stopped_by is not None:
                break
        else:
            released += stream.flush()
        assert (released, stream.stopped_by) == (expected, stop), f"in pieces {pieces}"
        assert stream.flush() == "", "nothing follows the end"


@given(text=texts, stops=stop_lists, cuts=cut_lists)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    pieces = pieces_of(text.encode(), cuts)
    stream, decoder = TextStream(Pieces(pieces), stops), Pieces(pieces)
    released = known = ""
    for token in range(len(pieces)):
        released += stream.push(token)
        known += decoder.push(token)
        if stream.stopped_by is not None:
            return
        held = known[len(released) :]
        assert known == released + held
        assert not held or any(stop.startswith(held) for stop in stops), f"{held!r} is held back for nothing"


@given(raw=st.binary(max_size=20), cuts=cut_lists)
def test_bytes_that_are_no_text_read_as_decoding_all_at_once(raw: bytes, cuts: list[int]) -> None:
    pieces = pieces_of(raw, cuts)
    stream = TextStream(Pieces(pieces))
    assert "".join([*(stream.push(token) for token in range(len(pieces))), stream.flush()]) == raw.decode(
        errors="replace"
    )


def test_nothing_is_said_after_a_stop() -> None:
    stream = TextStream(Pieces([b"ab", b"cd", b"ef"]), ["bc"])
    assert [stream.push(0), stream.push(1), stream.push(2), stream.flush()] == ["a", "", "", ""]
    assert stream.stopped_by == "bc"


def test_of_two_stops_that_begin_together_the_shorter_has_stopped() -> None:
    for pieces in ([b"xab"], [b"x", b"a", b"b"]):
        stream = TextStream(Pieces(pieces), ["ab", "a"])
        assert stream.push(0) in ("x", "")
        if len(pieces) > 1:
            stream.push(1)
        assert stream.stopped_by == "a"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(AssertionError, match="empty"):
        TextStream(Pieces([]), ["a", ""])
