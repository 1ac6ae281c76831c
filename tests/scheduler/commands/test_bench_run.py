"""What the bench measures, over the fake engine: all rows at once, no prompt in work; and why some cannot be."""

from dataclasses import replace

import pytest
import trio

from lanes.geometry import RowGeometry
from scheduler.budget import Budget
from scheduler.commands import bench_run
from scheduler.commands.bench_run import (
    ENDLESS_TOKENS,
    NotTogether,
    measure_prompt,
    measure_rows,
    most_tokens,
    obstacle,
    random_prompt,
    warm_up,
)
from scheduler.usage import CommandFailed
from tests.scheduler.echo_daemon import echo_daemon, in_trio
from tests.scheduler.fake_engine import INFO

MANY = replace(INFO, max_rows=16)


@pytest.mark.parametrize(("rows", "prompt_tokens"), [(1, 1), (1, 300), (4, 50), (16, 20)])
@in_trio
async def test_rows_are_measured_together_and_leave_nothing_behind(rows: int, prompt_tokens: int) -> None:
    async with echo_daemon(MANY) as daemon:
        parts: list[float] = []
        figures = await measure_rows(daemon.service, rows, prompt_tokens, 10, parts.append)
        assert figures.rows == rows
        assert figures.tokens_per_s > 0
        assert 0 < figures.between_p50_s <= figures.between_p99_s
        assert 0 < figures.first_p50_s <= figures.first_last_s
        assert daemon.engine.most_rows == rows
        assert not daemon.loop.scheduler.requests
        assert parts == sorted(parts)
        assert parts[-1] >= 1
        assert daemon.service.outcomes == {"cancelled": rows}


@in_trio
async def test_prompts_differ_so_that_none_is_remembered_of_another() -> None:
    async with echo_daemon(MANY) as daemon:
        await measure_rows(daemon.service, 4, 40, 2)
        await measure_rows(daemon.service, 8, 40, 2)
        prompts = {spec.prompt for spec in daemon.engine.specs.values()}
        assert len(prompts) == 12
        assert all(0 <= token < INFO.vocab_size for prompt in prompts for token in prompt)
        assert random_prompt(daemon.service, 5, 1) == random_prompt(daemon.service, 5, 1)


@in_trio
async def test_a_prompt_alone_is_asked_again_only_where_something_is_remembered() -> None:
    async with echo_daemon(replace(INFO, remembers="nothing")) as daemon:
        await warm_up(daemon.service)
        figures = await measure_prompt(daemon.service, 100)
        assert (figures.tokens, figures.again_s, figures.cached_tokens) == (100, None, 0)
        assert figures.tokens_per_s == pytest.approx(100 / figures.first_s)
    async with echo_daemon(replace(INFO, remembers="anywhere")) as daemon:
        figures = await measure_prompt(daemon.service, 100)
        assert figures.again_s is not None
        first, second = daemon.engine.specs.values()
        assert first.prompt == second.prompt


@in_trio
async def test_what_cannot_be_measured_is_said_before() -> None:
    async with echo_daemon(replace(MANY, context_tokens=200)) as daemon:
        service = daemon.service
        assert obstacle(service, 16, 10, 10) is None
        assert "16 at most (it is a fake)" in str(obstacle(service, 17, 10, 10))
        assert "context is 200" in str(obstacle(service, 1, 190, 10))
        daemon.loop.scheduler.budget = Budget(600_000, RowGeometry(column_bytes=1000))
        assert obstacle(service, 1, 10, 10) is None
        assert "do not fit" in str(obstacle(service, 16, 10, 10))


@in_trio
async def test_rows_that_are_never_all_there_are_told_of() -> None:
    """The first one's context is full before the last one's long prompt is processed."""
    async with echo_daemon(replace(MANY, context_tokens=100)) as daemon:
        with pytest.raises(NotTogether):
            await measure_rows(daemon.service, 16, 80, 4)
        assert not daemon.loop.scheduler.requests


@in_trio
async def test_answers_are_as_long_as_memory_allows() -> None:
    async with echo_daemon(MANY) as daemon:
        assert most_tokens(daemon.service, 10) == ENDLESS_TOKENS - 10
        daemon.loop.scheduler.budget = Budget(3_000_000, RowGeometry(column_bytes=1000))
        most = most_tokens(daemon.service, 10)
        assert daemon.loop.scheduler.budget.admits_alone(10 + most)
        assert most > 500


@in_trio
async def test_a_request_that_fails_ends_the_measurement() -> None:
    async with echo_daemon(MANY) as daemon:

        async def measure() -> None:
            with pytest.raises(CommandFailed, match="A request failed"):
                await measure_rows(daemon.service, 4, 10, 10**6)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure)
            while daemon.loop.scheduler.num_decoding < 4:  # noqa: ASYNC110 (nobody would set an event for a test)
                await trio.sleep(0.001)
            daemon.engine.fail_step = True


@in_trio
async def test_a_prompt_that_is_refused_is_told() -> None:
    async with echo_daemon(replace(MANY, context_tokens=10)) as daemon:
        with pytest.raises(CommandFailed, match="refused"):
            await measure_rows(daemon.service, 1, 50, bench_run.WARM_STEPS)
