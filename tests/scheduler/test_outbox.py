from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.codec import decode_reply
from scheduler.outbox import GROWN_BYTES, TAKE_BYTES, Outbox
from scheduler.protocol import (
    Delta,
    Done,
    Error,
    FunctionCall,
    Pong,
    Reply,
    Timings,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from store.framing import FrameDecoder

LAW = settings(deadline=None)

ids = st.sampled_from(["a", "b", 1])
indices = st.integers(0, 2)
texts = st.text(max_size=5)
calls = st.builds(lambda name, said: ToolCall("c" * 128, FunctionCall(name, said)), texts.map("f".__add__), texts)
tops = st.builds(TopLogprob, st.integers(0, 2**31 - 1), texts, st.floats(-99, 0)).map(lambda top: (top,))
logprobs = st.builds(TokenLogprob, st.integers(0, 2**31 - 1), texts, st.floats(-99, 0), st.just(()) | tops)
plain = st.builds(Delta, ids, texts, st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple), indices)
rich = st.builds(
    Delta, ids, texts, st.just((7,)), indices, texts, calls.map(lambda call: (call,)), logprobs.map(lambda one: (one,))
)
deltas = plain | rich
ends = st.builds(
    lambda id, index: Done(id, "stop", Usage(1, 1, 0), Timings(0, 0, 0, 0), index=index),
    ids,
    indices,
)
others = st.builds(Pong, st.integers(0, 9)) | st.builds(Error, st.just("bad_request"), st.text(max_size=9), ids)


def decoded(data: bytes) -> list[Reply]:
    decoder = FrameDecoder()
    decoder.feed(data)
    return [decode_reply(message) for message in decoder]


def joined(replies: list[Reply]) -> dict[object, list[object]]:
    """What a client can rely on: per answer, its replies in order, the deltas between two others added up."""
    seen: dict[object, list[object]] = {}
    for reply in replies:
        said = seen.setdefault((getattr(reply, "id", "no request"), getattr(reply, "index", None) or 0), [])
        if not isinstance(reply, Delta):
            said.append(reply)
            continue
        last = said[-1] if said else None
        if isinstance(last, Delta):
            said[-1] = Delta(
                reply.id,
                last.text + reply.text,
                last.token_ids + reply.token_ids,
                reply.index,
                last.reasoning + reply.reasoning,
                last.tool_calls + reply.tool_calls,
                last.logprobs + reply.logprobs,
            )
        else:
            said.append(reply)
    return seen


@LAW
@given(st.lists(st.none() | deltas | ends | others))
def test_what_is_taken_is_what_was_put(script: list[Reply | None]) -> None:
    """None in the script: the sender takes."""
    outbox = Outbox(1 << 20)
    sent = b""
    for reply in script:
        if reply is None:
            sent += outbox.take()
            assert not outbox
            assert outbox.num_bytes == 0
        else:
            outbox.put(reply)
            assert outbox
        outbox.check()
    sent += outbox.take()
    assert joined(decoded(sent)) == joined([reply for reply in script if reply is not None])


@LAW
@given(st.lists(deltas, min_size=1))
def test_unsent_deltas_of_an_answer_are_one_frame(script: list[Delta]) -> None:
    outbox = Outbox(1 << 20)
    for delta in script:
        outbox.put(delta)
    frames = decoded(outbox.take())
    assert len(frames) == len({(delta.id, delta.index) for delta in script})


@LAW
@given(st.lists(deltas | ends | others))
def test_the_count_is_never_less_than_what_is_sent(script: list[Reply]) -> None:
    outbox = Outbox(1 << 20)
    for reply in script:
        outbox.put(reply)
    counted = outbox.num_bytes
    assert len(outbox.take()) <= counted


def test_a_delta_after_the_end_is_another_requests() -> None:
    outbox = Outbox(1 << 20)
    done = Done("a", "stop", Usage(1, 1, 0), Timings(0, 0, 0, 0))
    for reply in (first := Delta("a", "x", (1,)), done, second := Delta("a", "y", (2,))):
        outbox.put(reply)
    assert decoded(outbox.take()) == [first, done, second]


def test_it_is_full_beyond_its_limit_until_it_is_taken_from() -> None:
    outbox = Outbox(1000)
    for _ in range(9):
        outbox.put(Delta("a", "x" * 100, ()))
        assert not outbox.full
    outbox.put(Delta("a", "x" * 100, ()))
    assert outbox.full
    outbox.take()
    assert not outbox.full


def test_a_long_delta_is_cut_and_taken_in_parts() -> None:
    outbox = Outbox(1 << 24)
    text = "x" * 1000
    num_deltas = 3 * GROWN_BYTES // len(text)
    for _ in range(num_deltas):
        outbox.put(Delta("a", text, (7,)))
    parts = []
    while data := outbox.take():
        outbox.check()
        assert TAKE_BYTES < len(data) < 2 * GROWN_BYTES or not outbox
        parts += decoded(data)
    assert joined(parts) == {("a", 0): [Delta("a", text * num_deltas, (7,) * num_deltas)]}
    assert len(parts) > 2
