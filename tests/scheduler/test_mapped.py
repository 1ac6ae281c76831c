"""Rows that begin with what is mapped: there is nothing to wait for, and nobody keeps it."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.protocol import Error
from store.settings import StoreSettings
from store.store import Found, open_store
from tests.scheduler.fake_engine import echoed
from tests.scheduler.test_remembering import LONG, RememberingBench
from tests.scheduler.trio_test import trio_test
from tests.store.keepers import FINGERPRINT, local

MIB = 1 << 20
KNOWN = len(LONG) - 1
# Its own last token leads into what the answer has left, which is another file.
PROMPT = [*LONG[:KNOWN], 255]


class MappingBench(RememberingBench):
    async def ask(self, prompt: list[int], **options: Any) -> tuple[int, Any]:
        """A request as the service submits it, and a reference to what is mapped for it."""
        row_id = self.submit(prompt, **options)
        found = await self.store.find(prompt, "", len(prompt) - 1)
        self.scheduler.requests[row_id].found = found
        assert found.tokens == KNOWN
        assert found.recall is not None
        assert found.recall.mapped is not None
        return row_id, weakref.ref(found.recall.mapped._buffers[0].obj)


@asynccontextmanager
async def bench_of(folder: Path, **options: Any) -> AsyncIterator[MappingBench]:
    """LONG has been processed, and is on disk alone."""
    settings = StoreSettings(FINGERPRINT, 0, 1 << 20, maps=True)
    async with local(folder) as keeper, open_store(settings, keeper) as store:
        bench = MappingBench(store, **options)
        await bench.answer(LONG)
        await store.flush()
        bench.engine.chunks.clear()
        yield bench


@pytest.mark.parametrize("early_reads", [False, True])
@pytest.mark.parametrize("more", [0, 1, 30, 300])
@trio_test
async def test_it_is_processed_from_there_at_once(early_reads: bool, more: int, tmp_path: Path) -> None:
    async with bench_of(tmp_path, early_reads=early_reads) as bench:
        prompt = [*PROMPT, *[7] * more]
        row_id, mapping = await bench.ask(prompt, max_tokens=5)
        step = await bench.turn_and_fill()
        assert step is not None
        assert step.merge == (() if more else (row_id,))
        assert (step.chunk is not None) == (more > 0)
        assert mapping() is None
        assert not bench.to_fill
        await bench.run_all()
        bench.assert_answered(row_id)
        assert bench.cached(row_id) == KNOWN
        assert sum(stop - start for _, start, stop in bench.engine.chunks) == more


@trio_test
async def test_whose_request_ends_before_or_while_it_begins(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        row_id, mapping = await bench.ask([*PROMPT, 9])
        bench.scheduler.cancel(row_id, bench.now_s)
        assert mapping() is None
        row_id, mapping = await bench.ask([*PROMPT, 9])
        bench.cancelled_meanwhile = row_id
        await bench.turn_and_fill()
        assert mapping() is None
        bench.engine.fail_prompt = True
        row_id, mapping = await bench.ask([*PROMPT, 9, 9])
        await bench.run_all()
        assert mapping() is None
        assert isinstance(bench.heard[row_id].end, Error)
        await bench.run_all()


@trio_test
async def test_what_is_computed_sooner_is_not_kept_mapped(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        bench.store._reader._disk_rate.measure(MIB, float(MIB), trio.current_time())
        row_id, mapping = await bench.ask([*PROMPT, 9])
        await bench.turn_and_fill()
        assert mapping() is None
        await bench.run_all()
        bench.assert_answered(row_id)
        assert bench.cached(row_id) == 0


@trio_test
async def test_what_the_row_adds_is_remembered_behind_it(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        prompt = [*PROMPT, 11, 12]
        row_id, _ = await bench.ask(prompt, max_tokens=6)
        await bench.run_all()
        await bench.store.flush()
        again = await bench.store.find([*prompt, *echoed(prompt, 6)], "", len(prompt) + 6)
        assert again.tokens == len(prompt) + 5
        again.release()
        assert bench.cached(row_id) == KNOWN


@trio_test
async def test_what_is_found_is_held_by_the_find_while_it_is_mapped(tmp_path: Path) -> None:
    """Nobody has left it behind, then: a daemon may rest meanwhile."""
    async with bench_of(tmp_path) as bench:
        map_found = bench.store._map

        async def watched(found: Found, path: Path) -> None:
            bench.store.check_released()
            await map_found(found, path)

        bench.store._map = watched  # type: ignore[method-assign]
        await bench.ask(PROMPT)
        with pytest.raises(AssertionError, match="still held"):
            bench.store.check_released()
        await bench.run_all()
