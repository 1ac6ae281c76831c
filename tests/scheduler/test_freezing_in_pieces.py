"""A long prompt is frozen piece by piece, so that nobody waits for all of it."""

import pytest

from lanes.lane import Step
from scheduler.remembering import PIECE_BYTES, Remembering
from tests.scheduler.test_remembering import LONG, bench_of
from tests.scheduler.trio_test import trio_test


def frozen_in(step: Step | None) -> list[tuple[int, int]]:
    return [(each.start, each.stop) for each in step.freeze] if step else []


@pytest.mark.parametrize("freezes_late", [False, True])
@trio_test
async def test_a_long_prompt_is_frozen_in_pieces_while_its_answer_goes_on(freezes_late: bool) -> None:
    async with bench_of() as bench:
        bench.engine.freezes_late = freezes_late
        bench.scheduler.remembering = Remembering(bench.store, cut_anywhere=True, token_bytes=PIECE_BYTES // 257)
        talker = bench.submit(LONG, max_tokens=40)
        frozen: list[tuple[int, int]] = []
        while len(frozen) < 3:
            frozen += (now := frozen_in(await bench.turn_and_fill()))
            assert len(now) <= 1
        assert frozen == [(0, 256), (256, 512), (512, len(LONG) - 1)]
        if freezes_late:
            await bench.turn_and_fill()
        assert bench.heard[talker].end is None
        newcomer = bench.submit(LONG)
        await bench.run_all()
        assert bench.cached(newcomer) == len(LONG) - 1


@pytest.mark.parametrize("freezes_late", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@trio_test
async def test_who_leaves_before_is_frozen_to_the_end(max_tokens: int, freezes_late: bool) -> None:
    async with bench_of() as bench:
        bench.engine.freezes_late = freezes_late
        bench.scheduler.remembering = Remembering(bench.store, cut_anywhere=True, token_bytes=PIECE_BYTES // 257)
        await bench.answer(LONG, max_tokens=max_tokens)
        assert bench.known(LONG) == len(LONG)


@trio_test
async def test_whoever_waits_for_a_prompt_waits_for_no_pieces() -> None:
    async with bench_of() as bench:
        bench.scheduler.remembering = Remembering(bench.store, cut_anywhere=True, token_bytes=PIECE_BYTES // 257)
        first, second = bench.submit(LONG, max_tokens=4), bench.submit([*LONG, 7], max_tokens=4)
        await bench.run_all()
        assert (bench.cached(first), bench.cached(second)) == (0, len(LONG) - 1)


@trio_test
async def test_where_there_is_no_room_for_the_pieces_none_is_frozen_again_and_again() -> None:
    async with bench_of(memory_bytes=300) as bench:
        bench.scheduler.remembering = Remembering(bench.store, cut_anywhere=True, token_bytes=PIECE_BYTES // 257)
        bench.submit(LONG, max_tokens=40)
        frozen: list[tuple[int, int]] = []
        while (step := await bench.turn_and_fill()) is not None:
            frozen += frozen_in(step)
        assert len(frozen) <= 4
        await bench.run_all()
