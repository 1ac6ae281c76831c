"""Several answers to one prompt, turn by turn: who is given a chunk, who takes over, and what if the first one goes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.lane import Sampling, Step
from scheduler.request import Request, Wish
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import ByteStream
from tests.scheduler.turned_by_hand import STOP, Bench, Heard

PROMPT = tuple(range(STOP + 1, STOP + 21))


def submit_together(bench: Bench, number: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 4) -> list[Request]:
    """As the service does; row ids follow on those that the bench gave itself."""
    requests: list[Request] = []
    for index in range(number):
        row_id = len(bench.wishes) + 1
        wish = Wish("group", prompt, max_tokens, Sampling(), frozenset({STOP}), index=index)
        heard = Heard()
        request = Request(row_id, wish, Transcript(TextStream(ByteStream())), heard.reply, bench.now_s)
        request.first = request.leader = requests[0] if requests else None
        requests.append(request)
        bench.heard[row_id], bench.wishes[row_id] = heard, wish
    bench.scheduler.submit(*requests)
    return requests


def steps_of(bench: Bench, turns: int = 30) -> list[Step]:
    found = [bench.turn() for _ in range(turns)]
    return [step for step in found if step is not None]


def test_the_first_is_processed_and_the_others_take_over() -> None:
    bench = Bench(chunk_tokens=8)
    requests = submit_together(bench, 3)
    steps = steps_of(bench)
    rows = [request.row_id for request in requests]
    assert [spec.row_id for spec in steps[0].admit] == rows
    assert [step.chunk.row_id for step in steps if step.chunk] == [rows[0]] * 3
    (merging,) = [step for step in steps if step.merge]
    assert merging.merge == tuple(rows)
    assert merging.fork == ((rows[0], rows[1]), (rows[0], rows[2]))
    for row in rows:
        bench.assert_answered(row)


def test_others_share_a_turn_with_the_group_but_no_prompt() -> None:
    bench = Bench(chunk_tokens=8)
    alone = bench.submit([5] * 9)
    rows = [request.row_id for request in submit_together(bench, 2)]
    steps = steps_of(bench)
    assert {step.chunk.row_id for step in steps if step.chunk} == {alone, rows[0]}
    assert [step.fork for step in steps if step.fork] == [((rows[0], rows[1]),)]
    for row in (alone, *rows):
        bench.assert_answered(row)


def test_when_the_first_is_cancelled_another_is_processed() -> None:
    bench = Bench(chunk_tokens=8)
    first, second = submit_together(bench, 2)
    bench.turn()
    bench.scheduler.cancel(first.row_id, bench.now_s)
    steps = steps_of(bench)
    assert [step.chunk.row_id for step in steps if step.chunk] == [second.row_id] * 3
    assert not any(step.fork for step in steps)
    bench.assert_answered(second.row_id)


def test_when_the_first_is_cancelled_one_of_the_others_is_processed_for_all() -> None:
    bench = Bench(chunk_tokens=8)
    first, second, third = submit_together(bench, 3)
    bench.turn()
    bench.scheduler.cancel(first.row_id, bench.now_s)
    steps = steps_of(bench)
    processed = [step.chunk.row_id for step in steps if step.chunk]
    assert processed in ([second.row_id] * 3, [third.row_id] * 3)
    assert len([step.fork for step in steps if step.fork]) == 1
    for request in (second, third):
        bench.assert_answered(request.row_id)


def test_those_that_find_rows_later_process_the_prompt_once_together() -> None:
    bench = Bench(max_rows=2, max_queue=10, chunk_tokens=8)
    requests = submit_together(bench, 6)
    steps = steps_of(bench, 60)
    assert [len(step.fork) for step in steps if step.fork] == [1, 1, 1]
    assert sum(step.chunk.stop - step.chunk.start for step in steps if step.chunk) == 3 * (len(PROMPT) - 1)
    for request in requests:
        bench.assert_answered(request.row_id)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=4),
    cancels=st.dictionaries(st.integers(1, 20), st.integers(0, 25), max_size=6),
)
def test_all_are_answered_whatever_is_cancelled(groups: list[tuple[int, int, int]], cancels: dict[int, int]) -> None:
    bench = Bench(max_queue=30, chunk_tokens=8)
    for turn in range(120):
        for place, (number, length, at) in enumerate(groups):
            if at == turn:
                submit_together(bench, number, tuple((place + k) % 9 for k in range(length)))
        for row, at in cancels.items():
            if at == turn:
                bench.scheduler.cancel(row, bench.now_s)
        bench.turn()
    for row in bench.wishes:
        if row not in cancels:
            bench.assert_answered(row)
    bench.scheduler.check()
    assert not bench.scheduler.requests
