"""The longest common beginning is what comparing token by token finds."""

from itertools import takewhile
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lanes.lane import Sampling
from scheduler.beginnings import WORTH_WAITING_TOKENS, longest_beginning, shared_tokens
from scheduler.request import Request, State, Wish
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import ByteStream

tokens = st.lists(st.integers(0, 1), max_size=40).map(tuple)
COMMON = tuple(range(100))


def request_of(*ends: int, processed: int = 0, **wish: Any) -> Request:
    request = Request(
        1,
        Wish("a", (*COMMON, *ends), 4, Sampling(), **wish),
        Transcript(TextStream(ByteStream())),
        lambda said: None,
        0.0,
    )
    request.advance(State.PREFILLING)
    request.num_processed = processed
    return request


@given(tokens, tokens, tokens)
def test_shared_tokens(common: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> None:
    a, b = (*common, *one), (*common, *other)
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))
    assert shared_tokens(a, b) == expected


def test_one_that_shares_most_is_waited_for() -> None:
    near, far = request_of(1, 2, 3, 4), request_of(9)
    assert longest_beginning(request_of(1, 2, 3, 5), [far, near], True) == (103, near)


def test_a_prompt_is_never_waited_for_to_its_last_token() -> None:
    """The last one is the first step's input, of either prompt."""
    assert longest_beginning(request_of(1), [other := request_of(1)], True) == (100, other)
    assert longest_beginning(request_of(), [other := request_of(1)], True) == (99, other)


def test_nobody_waits_for_little_or_for_what_is_not_his_to_know() -> None:
    short = request_of()
    short.wish = Wish("a", COMMON[: WORTH_WAITING_TOKENS - 1], 4, Sampling())
    others = [short, request_of(1, namespace="his"), request_of(1, writes_store=False)]
    assert longest_beginning(request_of(1), others, True) is None


def test_state_that_was_passed_cannot_be_saved_any_more() -> None:
    passed = request_of(1, 2, processed=101)
    assert longest_beginning(request_of(2), [passed], cut_anywhere=False) is None
    assert longest_beginning(request_of(2), [passed], cut_anywhere=True) == (100, passed)
