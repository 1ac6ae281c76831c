"""Who is admitted first, and who has waited too long."""

from scheduler.protocol import Error
from scheduler.request import WAIT_PER_PRIORITY_S
from tests.scheduler.turned_by_hand import Bench


def test_rows_are_admitted_in_the_order_of_arrival() -> None:
    bench = Bench(max_queue=100)
    rows = [bench.submit([1] * 5) for _ in range(10)]
    assert admitted_by(bench) == rows


def admitted_by(bench: Bench) -> list[int]:
    admitted: list[int] = []
    while (step := bench.turn()) is not None:
        admitted += [spec.row_id for spec in step.admit]
    return admitted


def test_a_lower_priority_goes_first_until_the_other_has_waited_long_enough() -> None:
    """Each step of it is worth so many seconds of waiting."""
    bench = Bench(max_rows=1, max_queue=100)
    running, usual, late = bench.submit([1] * 5), bench.submit([2], priority=0), bench.submit([3], priority=1)
    urgent = bench.submit([4], priority=-1)
    bench.now_s += WAIT_PER_PRIORITY_S + 0.5
    last = bench.submit([5], priority=0)
    latest = bench.submit([6], priority=-1)
    assert admitted_by(bench) == [urgent, running, usual, latest, late, last]


def test_a_request_ends_when_its_time_is_over_wherever_it_is() -> None:
    bench = Bench(max_rows=1, max_queue=100)
    running, waiting = bench.submit([5], max_tokens=50, timeout_s=4.5), bench.submit([6], timeout_s=2.5)
    patient = bench.submit([4], timeout_s=1000.0)
    bench.run()
    for row_id, tokens in ((running, 4), (waiting, 0)):
        end = bench.heard[row_id].end
        assert isinstance(end, Error)
        assert end.code == "timed_out"
        assert len(bench.heard[row_id].tokens) == tokens
    bench.assert_answered(patient)
