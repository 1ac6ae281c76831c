"""What fits into memory alone."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.geometry import RowGeometry
from scheduler.budget import Budget
from scheduler.errors import Refused
from scheduler.options import Options
from scheduler.storing import memory_bytes
from tests.scheduler.echo_daemon import echo_daemon, in_trio
from tests.scheduler.fake_engine import INFO

GEOMETRY = RowGeometry(state_bytes=1000, column_bytes=512, rings=((64, 256),))

geometries = st.builds(
    RowGeometry,
    st.integers(0, 5000),
    st.integers(1, 3000),
    st.sampled_from([(), ((64, 100),), ((10, 700), (1000, 3))]),
)


@given(geometry=geometries, limit_bytes=st.integers(0, 1 << 22), beyond=st.integers(0, 5000))
def test_the_most_tokens_that_fit_alone_fit_and_one_more_does_not(
    geometry: RowGeometry, limit_bytes: int, beyond: int
) -> None:
    budget = Budget(limit_bytes, geometry)
    too_many = 1 + beyond
    while budget.admits_alone(too_many):
        too_many *= 2
    most = budget.most_alone(too_many)
    assert most == 0 or budget.admits_alone(most)
    assert not budget.admits_alone(most + 1)


@pytest.mark.parametrize("prompt_tokens", [1, 500, 100_000])
@in_trio
async def test_who_asks_for_more_is_told_how_many_tokens_would_fit(prompt_tokens: int) -> None:
    async with echo_daemon(replace(INFO, geometry=GEOMETRY), run_loop=False) as daemon:
        scheduler = daemon.loop.scheduler
        scheduler.budget = Budget(1 << 20, GEOMETRY)
        with pytest.raises(Refused, match="of both together would") as refused:
            await daemon.submit(prompt="x" * prompt_tokens, max_tokens=100_000)
        assert refused.value.code == "context_length_exceeded"
        (most,) = map(int, re.findall(r"alone: (\d+) tokens", refused.value.message))
        await daemon.submit(prompt="x", max_tokens=most - 1)
        with pytest.raises(Refused, match=f"alone: {most} tokens"):
            await daemon.submit(prompt="x", max_tokens=most)
        scheduler.fail_all("internal", "the test is over", 0.0)


def test_what_is_remembered_takes_of_the_memory_that_it_is_in() -> None:
    device = replace(INFO, memory_bytes=1000 << 20, weight_bytes=100 << 20)
    host = replace(device, host_memory_bytes=50 << 20)
    options = Options(model="m")
    assert memory_bytes(options, device) == 100 << 20
    assert memory_bytes(options, host) == 5 << 20
    asked = replace(options, prompt_cache_bytes=7)
    assert memory_bytes(asked, device) == memory_bytes(asked, host) == 7
    limits = [Budget.for_model(info, None, 100 << 20).limit_bytes for info in (device, host)]
    assert limits == [600 << 20, 700 << 20]
