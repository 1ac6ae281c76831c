"""Ten thousand requests that are cancelled, in whatever state, many between two turns: nothing is left of them."""

from collections import Counter
from contextlib import suppress
from random import Random

from scheduler.errors import Overloaded
from scheduler.protocol import Done
from scheduler.request import State
from tests.scheduler.test_answers_of_one_prompt import submit_together
from tests.scheduler.test_remembering import LONG, RememberingBench, bench_of
from tests.scheduler.trio_test import trio_test

NUM_CANCELS = 10_000
KNOWN = LONG[:300]


def submit_some(bench: RememberingBench, random: Random) -> list[int]:
    """What is remembered, what is not, what begins like another, and several answers to one prompt; returns the rows of
    what was queued."""
    queued: list[int] = []
    for _ in range(random.randrange(40)):
        tail = [random.randrange(10, 250) for _ in range(random.choice([0, 1, 20]))]
        with suppress(Overloaded):
            match random.randrange(4):
                case 0:
                    queued.append(bench.submit([*KNOWN, *tail], max_tokens=9))
                case 1:
                    queued.append(bench.submit([random.randrange(10, 250), *KNOWN[:100], *tail], max_tokens=9))
                case 2:
                    queued.append(bench.submit([9, *tail], max_tokens=random.choice([1, 200])))
                case _:
                    queued += [request.row_id for request in submit_together(bench, random.choice([2, 5]), (8, *tail))]
    return queued


@trio_test
async def test_ten_thousand_cancels_in_every_state_leave_nothing() -> None:
    random, met, queued = Random(1), Counter[State](), list[int]()
    async with bench_of() as bench:
        scheduler = bench.scheduler
        await bench.answer(KNOWN)
        bench.is_slow = True
        scheduler.max_queue = 60
        while met.total() < NUM_CANCELS:
            queued += submit_some(bench, random)
            bench.memory.limit = random.choice([30, 1000, 100_000])
            for _ in range(random.randrange(5)):
                await bench.turn_and_fill()
            if random.random() < 0.3:
                await bench.fill()
            there = list(scheduler.requests.values())
            for request in random.sample(there, random.choice([0, len(there) // 2, len(there)])):
                met[request.state] += 1
                for _ in range(2):  # the second time it has ended
                    scheduler.cancel(request.row_id, bench.now_s)
                end = bench.heard[request.row_id].end
                assert isinstance(end, Done)
                assert end.finish_reason == "cancelled"
            if scheduler.requests:
                scheduler.check()
        assert set(met) == {state for state in State if state is not State.FINISHED}, met
        await bench.run_all()
        assert len(queued) >= NUM_CANCELS
        assert all(bench.heard[row_id].end for row_id in queued)
        for left in (scheduler.requests, scheduler._filling, scheduler._filled, bench.engine.rows):
            assert not left
