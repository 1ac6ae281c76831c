"""A request's life: only legal moves, one end, and what its client is told on the way."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.lane import RowSpec, Sampling
from scheduler.protocol import Delta, Done, Error, Reply, Usage
from scheduler.request import MOVES, IllegalMove, Request, State, Wish
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import END, ByteStream

# The way from the beginning to each state.
PATHS = {
    State.WAITING: (),
    State.RECALLING: (State.RECALLING,),
    State.PREFILLING: (State.PREFILLING,),
    State.DECODING: (State.PREFILLING, State.DECODING),
    State.ASIDE: (State.PREFILLING, State.DECODING, State.ASIDE),
    State.FINISHED: (State.FINISHED,),
}
LEGAL = {
    (State.WAITING, State.RECALLING),
    (State.WAITING, State.PREFILLING),
    (State.RECALLING, State.PREFILLING),
    (State.PREFILLING, State.DECODING),
    (State.DECODING, State.ASIDE),
    (State.ASIDE, State.DECODING),
    *((state, State.FINISHED) for state in State if state is not State.FINISHED),
}


def request_of(state: State = State.DECODING, stops: tuple[str, ...] = (), **wish: Any) -> tuple[Request, list[Reply]]:
    """A request in a state, of a prompt of three tokens that came at second 10, and what its client is told."""
    said: list[Reply] = []
    wish = {"max_tokens": 100, "stop_token_ids": frozenset({END}), **wish}
    text = Transcript(TextStream(ByteStream(), stops))
    request = Request(7, Wish("me", (1, 2, 3), sampling=Sampling(seed=4), **wish), text, said.append, arrived_s=10.0)
    for step in PATHS[state]:
        request.advance(step)
    return request, said


def feed(request: Request, *tokens: int) -> None:
    for token in tokens:
        request.take_token(token, 11.0)


def books_of(request: Request) -> tuple[Any, ...]:
    times = request.times
    return (request.state, request.outcome, request.num_generated, times.finished_s, times.admitted_s)


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("target", State)
def test_a_move_is_in_the_table_or_changes_nothing(start: State, target: State) -> None:
    request, said = request_of(start)
    before = books_of(request)
    assert (target in MOVES[start]) == ((start, target) in LEGAL)
    if (start, target) in LEGAL:
        request.advance(target)
        assert request.state is target
    else:
        with pytest.raises(IllegalMove, match=f"7 cannot go from {start.value} to {target.value}"):
            request.advance(target)
        assert books_of(request) == before
        assert said == []


@given(moves=st.lists(st.sampled_from(State), max_size=8))
def test_every_life_ends_at_most_once(moves: list[State]) -> None:
    request, _ = request_of(State.WAITING)
    lived = [request.state]
    for move in moves:
        try:
            request.advance(move)
        except IllegalMove:
            continue
        lived.append(move)
    assert lived.count(State.FINISHED) <= 1
    assert all(pair in LEGAL for pair in pairwise(lived))
    if State.FINISHED in lived:
        assert lived[-1] is State.FINISHED


@pytest.mark.parametrize("start", [State.WAITING, State.PREFILLING, State.DECODING, State.ASIDE])
@pytest.mark.parametrize("end", ["finish", "fail"])
@pytest.mark.parametrize("again", ["finish", "fail"])
def test_a_second_end_raises_and_tells_nobody(start: State, end: str, again: str) -> None:
    request, said = request_of(start)
    finish = {"finish": lambda: request.finish("cancelled", 12.0), "fail": lambda: request.fail("internal", "a", 12.0)}
    finish[end]()
    before = books_of(request)
    assert before[1] == {"finish": "cancelled", "fail": "failed"}[end]
    assert len(said) == 1
    with pytest.raises(IllegalMove):
        finish[again]()
    assert books_of(request) == before
    assert len(said) == 1


def test_what_the_engine_is_told() -> None:
    request, _ = request_of(State.WAITING)
    assert request.spec == RowSpec(7, (1, 2, 3), Sampling(seed=4))
    assert request.num_prompt_left == 2
    request.num_processed = 2
    assert request.num_prompt_left == 0


def test_tokens_become_deltas_and_max_tokens_is_an_end() -> None:
    request, said = request_of(max_tokens=3)
    feed(request, *b"abc")
    assert said[:-1] == [Delta("me", letter, (ord(letter),)) for letter in "abc"]
    done = said[-1]
    assert isinstance(done, Done)
    assert (done.id, done.finish_reason, done.stop_reason, done.text) == ("me", "length", None, None)
    assert done.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=0)
    assert (request.state, request.outcome) == (State.FINISHED, "length")


def test_a_stop_token_ends_the_answer_and_is_not_told() -> None:
    request, said = request_of()
    feed(request, *b"ab", END)
    assert said[:-1] == [Delta("me", "a", (97,)), Delta("me", "b", (98,))]
    done = said[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.stop_reason, done.usage.completion_tokens) == ("stop", END, 3)


def test_a_stop_token_that_is_also_the_last_allowed_is_a_stop() -> None:
    request, said = request_of(max_tokens=1)
    feed(request, END)
    assert [type(reply) for reply in said] == [Done]
    assert request.outcome == "stop"


def test_a_stop_string_ends_the_answer_before_it() -> None:
    request, said = request_of(stops=("<end>", "zz"))
    feed(request, *b"hi <end>")
    deltas = [reply for reply in said if isinstance(reply, Delta)]
    assert "".join(delta.text for delta in deltas) == "hi "
    assert [token for delta in deltas for token in delta.token_ids] == list(b"hi <end>")
    done = said[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.stop_reason) == ("stop", "<end>")


@pytest.mark.parametrize("last", [END, ord("!")])
def test_what_was_held_back_comes_with_the_end(last: int) -> None:
    """Half a stop string and half a character, when the answer ends otherwise."""
    request, said = request_of(stops=("<end>",), max_tokens=6)
    feed(request, *b"hi <e", last)
    text = "".join(reply.text for reply in said if isinstance(reply, Delta))
    assert text == ("hi <e" if last == END else "hi <e!")
    request, said = request_of(max_tokens=2)
    feed(request, ord("a"), 0xC3)
    assert [reply.text for reply in said if isinstance(reply, Delta)] == ["a", "\ufffd"]


def test_a_stop_string_that_only_the_end_brings_to_light_is_a_stop() -> None:
    """A detokenizer may hold more than a character back (a run of byte tokens): the cut text must not be called
    complete for its length."""

    class Late:
        def push(self, token_id: int) -> str:
            return ""

        def flush(self) -> str:
            return "hi <end> and more"

    said: list[Reply] = []
    wish = Wish("me", (1,), max_tokens=2, sampling=Sampling())
    request = Request(1, wish, Transcript(TextStream(Late(), ("<end>",))), said.append, 0.0)
    request.advance(State.PREFILLING)
    request.advance(State.DECODING)
    feed(request, 1, 2)
    assert "".join(reply.text for reply in said if isinstance(reply, Delta)) == "hi "
    done = said[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.stop_reason) == ("stop", "<end>")


def test_without_streaming_the_text_comes_at_the_end() -> None:
    request, said = request_of(stream=False, stops=("<end>",))
    feed(request, *"grüße <e".encode(), *b"nd>")
    assert len(said) == 1
    done = said[0]
    assert isinstance(done, Done)
    assert (done.text, done.finish_reason) == ("grüße ", "stop")


def test_a_cancelled_answer_without_streaming_has_the_text_so_far() -> None:
    request, said = request_of(stream=False)
    feed(request, *b"so far")
    request.finish("cancelled", 12.0)
    assert isinstance(said[0], Done)
    assert said[0].text == "so far"


def test_a_failure_is_told_with_the_clients_id() -> None:
    request, said = request_of()
    request.fail("model_failed", "out of memory", 12.0)
    assert said == [Error("model_failed", "out of memory", "me")]
    assert request.outcome == "failed"


def test_times_are_counted_from_where_they_begin() -> None:
    request, said = request_of(State.WAITING, max_tokens=3)
    request.times.admitted_s = 11.0
    request.advance(State.PREFILLING)
    request.advance(State.DECODING)
    since = [request.take_token(97, at_s) for at_s in (15.0, 15.5, 17.0)]
    assert since == [None, 0.5, 1.5]
    done = said[-1]
    assert isinstance(done, Done)
    timings = done.timings
    assert (timings.queued_s, timings.prompt_s, timings.decode_s) == (1.0, 4.0, 2.0)
    assert (timings.ttft_s, timings.total_s) == (5.0, 7.0)
    assert request.times.finished_s == 17.0


@given(admitted=st.booleans(), first=st.booleans())
def test_the_phases_add_up_wherever_a_request_ends(admitted: bool, first: bool) -> None:
    request, said = request_of(State.WAITING)
    if admitted or first:
        request.times.admitted_s = 10.5
        request.advance(State.PREFILLING)
        request.advance(State.DECODING)
    if first:
        request.take_token(97, 11.25)
    request.finish("cancelled", 13.0)
    done = said[-1]
    assert isinstance(done, Done)
    timings = done.timings
    assert timings.queued_s + timings.prompt_s + timings.decode_s == timings.total_s == 3.0
    assert min(timings.queued_s, timings.prompt_s, timings.decode_s) >= 0
    assert (timings.ttft_s is None) == (not first)
