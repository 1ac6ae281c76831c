"""Whatever is submitted, cancelled or fails, at whatever moment: each request ends once, and nothing is left of it."""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lanes.lane import Chunk, Step
from scheduler.errors import Overloaded
from scheduler.protocol import Done, Error
from scheduler.request import State
from tests.scheduler.turned_by_hand import MAX_QUEUE, MAX_ROWS, Bench


class SchedulerMachine(RuleBasedStateMachine):
    """Turns are cut in two: whatever may happen between two turns may happen while one runs, too."""

    early_reads = False
    tokens_a_step = 1

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(early_reads=self.early_reads, tokens_a_step=self.tokens_a_step)
        self.step: Step | None = None
        self.cancelled: set[int] = set()
        self.may_fail: set[int] = set()

    @rule(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=30), max_tokens=st.integers(1, 12))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        num_waiting = self.bench.scheduler.num_waiting
        accepted = True
        try:
            self.bench.submit(prompt, max_tokens)
        except Overloaded:
            accepted = False
        assert accepted or num_waiting >= MAX_QUEUE
        assert self.bench.scheduler.num_waiting == num_waiting + accepted

    @precondition(lambda self: self.bench.wishes)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Of whatever request: it may have ended long ago."""
        row_id = data.draw(st.integers(1, len(self.bench.wishes)))
        ended = self.bench.heard[row_id].end
        self.bench.scheduler.cancel(row_id, self.bench.now_s)
        if ended is None:
            self.cancelled.add(row_id)
            end = self.bench.heard[row_id].end
            assert isinstance(end, Done)
            assert end.finish_reason == "cancelled"
        else:
            assert self.bench.heard[row_id].end is ended

    @rule()
    def cancel_nobody(self) -> None:
        self.bench.scheduler.cancel(10_000, self.bench.now_s)

    @rule(limit=st.sampled_from([0, 30, 290, 600, 100_000]))
    def memory_changes(self, limit: int) -> None:
        self.bench.memory.limit = limit

    @precondition(lambda self: self.step is None)
    @rule()
    def begin_turn(self) -> None:
        self.step = self.bench.begin()
        if self.step is None:
            assert not self.bench.scheduler.requests
            self.bench.scheduler.check()
            self.bench.engine.check()

    @precondition(lambda self: self.step is not None)
    @rule()
    def end_turn(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        got_token = self.bench.end(step)
        counts = Counter(request.row_id for request, _ in got_token)
        most = max(2 if self.early_reads else 1, self.tokens_a_step)
        assert max(counts.values(), default=0) <= most
        for request, since_s in got_token:
            count = counts[request.row_id]
            assert since_s is not None or request.num_generated == count, "the first of its tokens, not another"
            assert since_s is None or since_s > 0 or count > 1

    @rule(what=st.sampled_from(["step", "prompt"]))
    def let_fail(self, what: str) -> None:
        """Whoever runs may be hit, now or later."""
        setattr(self.bench.engine, f"fail_{what}", True)

    @precondition(lambda self: self.step is None)
    @rule()
    def fail_all(self) -> None:
        running = list(self.bench.scheduler.requests)
        self.bench.scheduler.fail_all("shutting_down", "no more", self.bench.now_s)
        for row_id in running:
            end = self.bench.heard[row_id].end
            assert isinstance(end, Error)
            assert (end.code, end.id) == ("shutting_down", f"r{row_id}")
        assert not self.bench.scheduler.requests

    @invariant()
    def books_agree(self) -> None:
        scheduler, engine = self.bench.scheduler, self.bench.engine
        assert set(scheduler.requests) == {row for row, heard in self.bench.heard.items() if heard.end is None}
        assert scheduler.num_prefilling + scheduler.num_decoding + scheduler.num_aside <= MAX_ROWS
        for row_id, wish in self.bench.wishes.items():
            too_many = engine.num_steps_of.get(row_id, 0) - wish.max_tokens
            assert too_many < self.tokens_a_step, f"row {row_id} is stepped for nothing"
            heard = self.bench.heard[row_id]
            assert heard.tokens == self.bench.expected(row_id)[: len(heard.tokens)]
        states = [request.state for request in scheduler.requests.values()]
        assert State.FINISHED not in states

    def teardown(self) -> None:
        """All that is left ends by itself, and nothing stays behind."""
        if self.step is not None:
            self.end_turn()
        self.bench.engine.fail_step = self.bench.engine.fail_prompt = False
        self.bench.run()  # with whatever memory there is: if it is none, one row at a time
        for row_id, heard in self.bench.heard.items():
            if row_id not in self.cancelled and not isinstance(heard.end, Error):
                self.bench.assert_answered(row_id)


class EarlyReadsMachine(SchedulerMachine):
    """With an engine as it is on a CPU: a step may be read in its own turn, and a chunk fail a turn later."""

    early_reads = True


class SeveralTokensMachine(SchedulerMachine):
    """With an engine that guesses right at times: a row gets several tokens of a step, and more than it wants."""

    tokens_a_step = 4


TestScheduler = SchedulerMachine.TestCase
TestSchedulerWithEarlyReads = EarlyReadsMachine.TestCase
TestSchedulerWithSeveralTokens = SeveralTokensMachine.TestCase
for machine in (TestScheduler, TestSchedulerWithEarlyReads, TestSchedulerWithSeveralTokens):
    machine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_all_are_answered_whatever_waits() -> None:
    bench = Bench(max_queue=100)
    rows = [bench.submit([1 + i % 5] * (1 + 3 * i), 1 + i % 7) for i in range(30)]
    bench.run()
    for row_id in rows:
        bench.assert_answered(row_id)
    assert bench.engine.most_rows == MAX_ROWS


def test_a_row_leaves_when_its_last_token_is_dispatched_and_the_next_takes_its_place() -> None:
    """Its client hears the token a turn later, in the turn in which the newcomer already steps."""
    bench = Bench(max_rows=1)
    first, second = bench.submit([5], max_tokens=2), bench.submit([6], max_tokens=1)
    assert bench.turn() == Step(admit=(bench.spec(first),), merge=(first,))
    assert bench.turn() == Step()
    assert bench.heard[first].tokens == [5]
    assert bench.turn() == Step(leave=(first,), admit=(bench.spec(second),), merge=(second,))
    assert bench.heard[first].tokens == [5, 5]
    assert isinstance(bench.heard[first].end, Done)
    assert bench.turn() == Step(leave=(second,))
    assert bench.turn() is None


def test_rows_go_aside_youngest_first_and_come_back_eldest_first() -> None:
    bench = Bench()
    rows = [bench.submit([4 + i], max_tokens=20) for i in range(3)]
    bench.turn()
    bench.memory.limit = 2
    assert bench.turn() == Step(set_aside=(rows[2], rows[1]))
    late = bench.submit([9], max_tokens=1)
    assert bench.turn() == Step(), "no newcomer while an elder row is aside"
    bench.memory.limit = 100_000
    assert bench.turn() == Step(bring_back=(rows[1], rows[2]), admit=(bench.spec(late),), merge=(late,))
    bench.run()
    for row_id in (*rows, late):
        bench.assert_answered(row_id)


def test_what_rows_have_saved_takes_its_place() -> None:
    bench = Bench()
    first, second = bench.submit([5], max_tokens=9), bench.submit([6], max_tokens=9)
    bench.memory.limit = 1000
    bench.engine.saved_bytes = 997
    bench.turn()
    assert bench.turn() == Step(set_aside=(second,))
    assert bench.turn() == Step()
    bench.engine.saved_bytes = 0
    assert bench.turn() == Step(), "it is told with this turn"
    assert bench.turn() == Step(bring_back=(second,))
    bench.run()
    for row_id in (first, second):
        bench.assert_answered(row_id)


def test_a_row_aside_may_be_cancelled() -> None:
    bench = Bench()
    stays, goes = bench.submit([5], max_tokens=9), bench.submit([6], max_tokens=9)
    bench.turn()
    bench.memory.limit = 2
    assert bench.turn() == Step(set_aside=(goes,))
    bench.scheduler.cancel(goes, bench.now_s)
    assert bench.turn() == Step(leave=(goes,))
    bench.run()
    bench.assert_answered(stays)


def test_a_cancelled_row_leaves_in_the_next_turn_and_its_token_is_dropped() -> None:
    bench = Bench()
    row_id = bench.submit([5], max_tokens=10)
    bench.turn()
    step = bench.begin()
    assert step is not None
    bench.scheduler.cancel(row_id, bench.now_s)
    assert bench.end(step) == []
    assert bench.heard[row_id].tokens == []
    assert bench.turn() == Step(leave=(row_id,))
    assert bench.turn() is None


def test_a_step_that_fails_ends_its_rows_and_no_others() -> None:
    bench = Bench()
    merged, prompt, spent = bench.submit([5], 9), bench.submit([6] * 30, 3), bench.submit([4], 1)
    bench.turn()
    bench.engine.fail_step = True
    bench.turn()
    bench.run()
    end = bench.heard[merged].end
    assert isinstance(end, Error)
    assert (end.code, end.message) == ("model_failed", "the step failed")
    bench.assert_answered(prompt)
    bench.assert_answered(spent)


def test_a_prompt_that_fails_ends_alone() -> None:
    bench = Bench()
    bad, good = bench.submit([6] * 30), bench.submit([5] * 40)
    bench.engine.fail_prompt = True
    bench.run()
    end = bench.heard[bad].end
    assert isinstance(end, Error)
    assert end.message == "the prompt failed"
    bench.assert_answered(good)


def test_the_prompt_with_least_left_goes_first() -> None:
    bench = Bench()
    long, short = bench.submit([1] * 40), bench.submit([2] * 10)
    bench.run()
    assert [row for row, _, _ in bench.engine.chunks] == [short] * 2 + [long] * 5


def test_a_long_prompt_ends_although_short_ones_never_stop_coming() -> None:
    """A short one is there in every turn, as rows are free for them."""
    bench = Bench()
    long = bench.submit([1] * 60, max_tokens=1)
    for _ in range(300):
        with suppress(Overloaded):  # the long one's turns are at the expense of theirs
            bench.submit([2] * 8, max_tokens=1)
        bench.turn()
        if bench.heard[long].end:
            break
    bench.assert_answered(long)


@pytest.mark.parametrize("num_running", [0, 1, 2])
def test_the_queue_is_bounded_also_before_the_next_turn(num_running: int) -> None:
    """A turn lasts as long as a chunk; whoever comes meanwhile waits, and rows that are free now are soon not."""
    bench = Bench(max_rows=2, max_queue=3)
    for _ in range(num_running):
        bench.submit([1] * 30, 50)
    bench.turn()
    for _ in range(2 - num_running + 3):
        bench.submit([1])
    with pytest.raises(Overloaded, match="--max-queue") as refused:
        bench.submit([1])
    assert refused.value.code == "overloaded"
    assert refused.value.retry_after_s > 0
    bench.run()


def test_who_is_refused_is_told_to_come_back_when_those_who_wait_have_been_served() -> None:
    """Each holds a row for 4 s and more here, and two rows serve side by side."""
    bench = Bench(max_rows=2, max_queue=100)
    for _ in range(4):
        bench.submit([5], max_tokens=4)
    bench.run()
    told = []
    for _ in range(20):
        bench.submit([5], max_tokens=4)
        told.append(bench.scheduler.retry_after_s)
    assert told == sorted(told)
    assert 2 * told[9] == told[19]
    assert 10 * 4 / 2 <= told[9] <= 10 * 6 / 2


def test_check_sees_a_request_in_two_places() -> None:
    bench = Bench()
    bench.submit([1] * 30)
    bench.turn()
    bench.scheduler.check()
    bench.scheduler._queue.append(next(iter(bench.scheduler.requests.values())))
    with pytest.raises(AssertionError, match="two places"):
        bench.scheduler.check()


def test_with_early_reads_a_row_is_told_its_end_in_its_turn() -> None:
    bench = Bench(max_rows=1, early_reads=True)
    first, second = bench.submit([5], max_tokens=1), bench.submit([6] * 4, max_tokens=1)
    assert bench.turn() == Step(admit=(bench.spec(first),), merge=(first,))
    assert isinstance(bench.heard[first].end, Done)
    assert bench.turn() == Step(leave=(first,), admit=(bench.spec(second),), chunk=Chunk(second, 0, 3))
    assert bench.turn() == Step(merge=(second,))
    assert isinstance(bench.heard[second].end, Done)
    assert bench.turn() == Step(leave=(second,))
    assert bench.turn() is None
