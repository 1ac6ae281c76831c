"""When one who was refused is to come again."""

from scheduler.turnover import LATEST_S, SOONEST_S, Turnover


def test_before_anything_is_known_it_is_soon() -> None:
    assert Turnover().retry_after_s(1000, 1) == SOONEST_S


def test_it_grows_with_the_queue_and_is_less_with_more_rows_within_bounds() -> None:
    turnover = Turnover()
    turnover.observe(4.0)
    assert [turnover.retry_after_s(waiting, 2) for waiting in (0, 1, 10)] == [SOONEST_S, 2.0, 20.0]
    assert turnover.retry_after_s(10, 4) == 10.0
    assert turnover.retry_after_s(10_000, 4) == LATEST_S


def test_late_requests_count_most() -> None:
    turnover = Turnover()
    for row_s in (100.0, *[1.0] * 50):
        turnover.observe(row_s)
    assert turnover.row_s is not None
    assert 1.0 < turnover.row_s < 1.1
