"""What one request has processed the next need not: in memory alone, turn by turn, with an engine that checks whose
tokens it is given."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.lane import Step
from scheduler.boundaries import GRID_TOKENS
from scheduler.errors import Overloaded
from scheduler.protocol import Done, Error
from scheduler.remembering import WORTH_KEEPING_TOKENS, Remembering
from scheduler.request import Request
from store.checkpoint import Destination
from store.settings import StoreSettings
from store.store import Found, Store, open_store
from tests.scheduler.fake_engine import INFO, echoed
from tests.scheduler.trio_test import trio_test
from tests.scheduler.turned_by_hand import Bench

LONG = [1 + i % 250 for i in range(3 * WORTH_KEEPING_TOKENS)]


class RememberingBench(Bench):
    """A bench whose rows are recalled between two turns."""

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(chunk_tokens=200, **options)
        self.store = store
        self.fails = self.is_slow = False
        # Cancelled while the next turn runs.
        self.cancelled_meanwhile: int | None = None
        self.to_fill: list[tuple[Request, tuple[Destination, ...]]] = []
        self.scheduler.remembering = Remembering(store, cut_anywhere=True)

    async def turn_and_fill(self) -> Step | None:
        step = self.begin()
        if step is None:
            return None
        if self.cancelled_meanwhile is not None:
            self.scheduler.cancel(self.cancelled_meanwhile, self.now_s)
            self.cancelled_meanwhile = None
        result = self.engine.step(step)
        self.now_s += 1.0
        list(self.scheduler.apply(step, result, self.now_s))
        self.to_fill.extend(self.scheduler.to_fill(result))
        if not self.is_slow:
            await self.fill()
        return step

    async def fill(self) -> None:
        for request, destinations in self.to_fill:
            assert request.found is not None
            whole = await self.store.fill(request.found, destinations)
            self.scheduler.filled(request, whole and not self.fails)
        self.to_fill.clear()

    async def run_all(self) -> None:
        for _ in range(500):
            if await self.turn_and_fill() is None:
                if not self.to_fill:
                    break
                await self.fill()
        else:
            pytest.fail("still busy")
        self.scheduler.check()
        self.engine.check()
        self.store.check()

    async def answer(self, prompt: list[int], **options: Any) -> Done:
        row_id = self.submit(prompt, **options)
        await self.run_all()
        self.assert_answered(row_id)
        end = self.heard[row_id].end
        assert isinstance(end, Done)
        return end

    def known(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the store knows."""
        found = self.store.find_now(prompt, "", len(prompt))
        found.release()
        return found.tokens

    def cached(self, row_id: int) -> int:
        end = self.heard[row_id].end
        assert isinstance(end, Done)
        return end.usage.cached_tokens


@asynccontextmanager
async def bench_of(remembers: str = "anywhere", memory_bytes: int = 1 << 20) -> AsyncIterator[RememberingBench]:
    anywhere = remembers == "anywhere"
    async with open_store(StoreSettings("a model", memory_bytes, 0, cut_anywhere=anywhere), None) as store:
        bench = RememberingBench(store)
        bench.engine.info = replace(INFO, remembers=remembers)  # type: ignore[arg-type]
        assert bench.scheduler.remembering is not None
        bench.scheduler.remembering.cut_anywhere = anywhere
        yield bench


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)
actions = st.lists(
    st.tuples(st.just("submit"), prompts, st.integers(1, 9))
    | st.tuples(st.sampled_from(["cancel", "cancel_meanwhile"]), st.integers(1, 20))
    | st.tuples(st.sampled_from(["turn", "turn", "fill", "fails", "fail_step", "fail_prompt", "fail_all"])),
    max_size=60,
)


@given(
    actions,
    # Rows get several tokens of a step only where they can be cut anywhere.
    st.sampled_from([("anywhere", 1), ("anywhere", 4), ("boundaries", 1)]),
    st.sampled_from([0, 200, 1 << 20]),
    st.sampled_from([None, 1, 5]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_all_are_answered_from_what_is_theirs_and_nothing_is_held(
    script: list[tuple[Any, ...]],
    kind: tuple[str, int],
    memory_bytes: int,
    piece_tokens: int | None,
    freezes_late: bool,
) -> None:
    """The engine checks whose tokens it is given."""

    async def main() -> None:
        async with bench_of(kind[0], memory_bytes) as bench:
            bench.engine.tokens_a_step = kind[1]
            bench.engine.freezes_late = freezes_late
            bench.is_slow = True
            assert bench.scheduler.remembering is not None
            bench.scheduler.remembering.piece_tokens = piece_tokens if kind[0] == "anywhere" else None
            excused: set[int] = set()
            for verb, *what in script:
                match verb:
                    case "submit":
                        with suppress(Overloaded):
                            bench.submit(*what)
                    case "cancel" if what[0] in bench.heard:
                        bench.scheduler.cancel(what[0], bench.now_s)
                        excused.add(what[0])
                    case "cancel_meanwhile" if what[0] in bench.heard:
                        bench.cancelled_meanwhile = what[0]
                        await bench.turn_and_fill()
                        excused.add(what[0])
                    case "turn":
                        await bench.turn_and_fill()
                    case "fill":
                        await bench.fill()
                    case "fails":
                        bench.fails = not bench.fails
                    case "fail_step" | "fail_prompt":
                        setattr(bench.engine, verb, True)
                    case "fail_all":
                        bench.scheduler.fail_all("shutting_down", "the end", bench.now_s)
            bench.engine.fail_step = bench.engine.fail_prompt = False
            await bench.run_all()
            for row_id, heard in bench.heard.items():
                if row_id not in excused and not isinstance(heard.end, Error):
                    bench.assert_answered(row_id)

    trio.run(main)


@trio_test
async def test_the_next_turn_of_a_conversation_processes_only_what_is_new() -> None:
    async with bench_of() as bench:
        prompt = [1, 2, 3, 4, 5]
        first = await bench.answer(prompt, max_tokens=6)
        assert first.usage.cached_tokens == 0
        turn = [*prompt, *echoed(prompt, 6), 8, 9]
        second = await bench.answer(turn)
        # The last token of an answer is drawn, but fed to nobody.
        assert second.usage.cached_tokens == second.usage.cached_memory_tokens == len(prompt) + 5
        assert bench.engine.chunks[-1] == (2, 10, 12)


@trio_test
async def test_the_same_prompt_again_needs_no_processing_at_all() -> None:
    async with bench_of() as bench:
        await bench.answer(LONG)
        assert (await bench.answer(LONG)).usage.cached_tokens == len(LONG) - 1
        assert (await bench.answer(LONG[:100])).usage.cached_tokens == 99
        assert all(row == 1 for row, _, _ in bench.engine.chunks)


@trio_test
async def test_a_prompt_of_one_token_is_a_hit_of_nothing_and_of_two_of_one() -> None:
    async with bench_of() as bench:
        assert (await bench.answer([9])).usage.cached_tokens == 0
        assert (await bench.answer([9])).usage.cached_tokens == 0
        assert (await bench.answer([9, 8])).usage.cached_tokens == 1


@trio_test
async def test_a_long_prompt_is_remembered_before_its_answer_ends() -> None:
    async with bench_of() as bench:
        talker = bench.submit(LONG, max_tokens=40)
        while bench.scheduler.requests[talker].num_generated < 3:
            await bench.turn_and_fill()
        follower = bench.submit([*LONG, 7, 8], max_tokens=3)
        await bench.run_all()
        assert bench.cached(follower) == len(LONG) - 1


@trio_test
async def test_what_was_cancelled_or_told_to_end_is_remembered_as_far_as_it_was() -> None:
    async with bench_of() as bench:
        for prompt in (LONG, [3, *LONG]):
            row_id = bench.submit(prompt, max_tokens=20)
            while bench.scheduler.requests[row_id].num_processed < 400:
                await bench.turn_and_fill()
            if prompt is LONG:
                bench.scheduler.cancel(row_id, bench.now_s)
            else:
                bench.scheduler.fail_all("shutting_down", "the end", bench.now_s)
            await bench.run_all()
            assert (await bench.answer(prompt)).usage.cached_tokens >= 400


@pytest.mark.parametrize("num_turns", range(8))
def test_what_ends_in_the_middle_of_a_turn_is_remembered_with_what_that_turn_did(num_turns: int) -> None:
    """In the middle of a chunk, of the merge, of a step. State is what it is when the turn is over."""

    async def main() -> None:
        async with bench_of("boundaries") as bench:
            prompt = LONG[:700]
            row_id = bench.submit(prompt, max_tokens=20)
            for _ in range(num_turns):
                await bench.turn_and_fill()
            bench.cancelled_meanwhile = row_id
            await bench.turn_and_fill()
            await bench.run_all()
            again = await bench.answer(prompt, max_tokens=20)
            assert again.usage.cached_tokens == min(200 * (num_turns + 1), len(prompt) - 1)

    trio.run(main)


@trio_test
async def test_a_row_that_failed_is_not_remembered() -> None:
    async with bench_of() as bench:
        bench.engine.fail_step = True
        bench.submit([5, 6, 7])
        await bench.run_all()
        assert (await bench.answer([5, 6, 7])).usage.cached_tokens == 0


@trio_test
async def test_what_cannot_be_read_is_processed() -> None:
    async with bench_of() as bench:
        await bench.answer(LONG)
        bench.fails = True
        assert (await bench.answer(LONG)).usage.cached_tokens == 0


@trio_test
async def test_whoever_asks_for_it_is_not_served_and_not_remembered() -> None:
    async with bench_of() as bench:
        await bench.answer(LONG, writes_store=False)
        assert (await bench.answer(LONG)).usage.cached_tokens == 0
        assert (await bench.answer(LONG, reads_store=False)).usage.cached_tokens == 0
        assert (await bench.answer(LONG, namespace="mine")).usage.cached_tokens == 0
        assert (await bench.answer(LONG, namespace="mine")).usage.cached_tokens == len(LONG) - 1


@trio_test
async def test_a_row_may_end_while_it_is_recalled() -> None:
    async with bench_of() as bench:
        await bench.answer(LONG)
        row_id = bench.submit(LONG)
        step = bench.begin()
        assert step is not None
        result = bench.engine.step(step)
        list(bench.scheduler.apply(step, result, bench.now_s))
        ((request, destinations),) = bench.scheduler.to_fill(result)
        bench.scheduler.cancel(row_id, bench.now_s)
        assert await bench.turn_and_fill() == Step(leave=(row_id,))
        assert request.found is not None
        bench.scheduler.filled(request, await bench.store.fill(request.found, destinations))
        await bench.run_all()


@trio_test
async def test_a_beginning_that_all_have_is_processed_once() -> None:
    """Sixteen requests at once, that share all but their last tokens."""
    async with bench_of() as bench:
        bench.scheduler.max_queue = 100
        rows = [bench.submit([*LONG, *[10 + number] * 20]) for number in range(16)]
        await bench.run_all()
        for row_id in rows:
            bench.assert_answered(row_id)
        processed = sum(stop - start for _, start, stop in bench.engine.chunks)
        needed = len(LONG) + 16 * 19
        assert processed <= 1.05 * needed
        assert bench.engine.most_rows > 1


@trio_test
async def test_who_waits_is_not_compared_again_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench_of() as bench:
        looked_up: list[int] = []
        find_now = bench.store.find_now

        def watched(tokens: Sequence[int], namespace: str, limit: int) -> Found:
            looked_up.append(limit)
            return find_now(tokens, namespace, limit)

        monkeypatch.setattr(bench.store, "find_now", watched)
        bench.submit(LONG)
        follower = bench.submit([*LONG, 7])
        await bench.turn_and_fill()
        looked_up.clear()
        await bench.turn_and_fill()
        assert bench.scheduler.num_waiting == 1
        assert looked_up == []
        await bench.run_all()
        assert bench.cached(follower) >= len(LONG) - 1


@trio_test
async def test_who_waits_for_a_beginning_is_served_although_it_comes_to_nothing() -> None:
    async with bench_of() as bench:
        leader, follower = bench.submit(LONG), bench.submit([*LONG, 7])
        await bench.turn_and_fill()
        assert bench.scheduler.num_waiting == 1
        bench.scheduler.cancel(leader, bench.now_s)
        await bench.run_all()
        bench.assert_answered(follower)
        assert bench.cached(follower) > 0


@trio_test
async def test_nobody_waits_where_nothing_is_held_in_memory() -> None:
    async with bench_of(memory_bytes=0) as bench:
        rows = [bench.submit([*LONG, number]) for number in range(3)]
        step = bench.begin()
        assert step is not None
        assert [spec.row_id for spec in step.admit] == rows


@trio_test
async def test_state_is_saved_where_a_later_prompt_may_part_from_this_one() -> None:
    """The second prompt hits although nobody knew where it would part; the third, which parts there too, in full."""
    async with bench_of("boundaries") as bench:
        shared = (LONG * 2)[:1500]
        await bench.answer([*shared, *[3] * 100])
        second = await bench.answer([*shared, *[4] * 100])
        assert 1500 - 2 * GRID_TOKENS < second.usage.cached_tokens <= 1500
        third = await bench.answer([*shared, *[5] * 100])
        assert third.usage.cached_tokens == 1500


@trio_test
async def test_a_prompt_that_others_begin_with_is_known_although_they_were_there_first() -> None:
    """They are known at its very end, where parting was foreseen; it is taken up a token before that."""
    async with bench_of("boundaries") as bench:
        shared = LONG[:300]
        for end in (3, 4):
            await bench.answer([*shared, *[end] * 100])
        assert (await bench.answer([*shared, *[5] * 100])).usage.cached_tokens == 300
        assert (await bench.answer(shared)).usage.cached_tokens < 299
        assert (await bench.answer(shared)).usage.cached_tokens == 299
