"""A request ends at its time, whatever it waits for: the clock is a fake one that jumps when nothing else happens."""

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from lanes.lane import Grammar
from scheduler.errors import Refused
from scheduler.loop import Loop
from scheduler.metrics import Metrics
from scheduler.prompts import LONG_TEXT_CHARS
from scheduler.protocol import Error, StructuredOutputs
from scheduler.remembering import Remembering
from scheduler.request import State
from store.settings import StoreSettings
from store.store import Found, open_store
from tests.scheduler.bytes_tokenizer import ByteTokenizer
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon
from tests.scheduler.test_remembering import LONG, bench_of
from tests.scheduler.turned_by_hand import AtOnce


def jumping(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run() -> None:
        trio.run(test, clock=MockClock(autojump_threshold=0))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@jumping
async def test_while_all_wait_for_what_is_read_for_them() -> None:
    """One is recalled, and that never ends; another waits for what that one is to process, without a row. Whoever waits
    for the end of it all sleeps meanwhile: else the clock would stand still."""
    async with bench_of() as bench, trio.open_nursery() as nursery:
        await bench.answer(LONG)
        loop = Loop(bench.scheduler, bench.engine, AtOnce(), Metrics())
        began_s = bench.now_s = trio.current_time()
        recalled = bench.submit([*LONG, *[9] * 100], timeout_s=5.0)
        waiting = bench.submit([*LONG, *[9] * 100, 8], timeout_s=3.0)
        nursery.start_soon(loop.run)
        nursery.start_soon(loop.wait_idle)
        await trio.sleep(2.0)
        states = [bench.scheduler.requests[row_id].state for row_id in (recalled, waiting)]
        assert states == [State.RECALLING, State.WAITING]
        await loop.wait_idle()
        assert trio.current_time() == began_s + 5.0
        for row_id in (recalled, waiting):
            end = bench.heard[row_id].end
            assert isinstance(end, Error)
            assert end.code == "timed_out"
        request, _ = loop._recalls[1].receive_nowait()
        assert not bench.engine.rows, "what is read for it is no row any more"
        bench.scheduler.filled(request, True)
        bench.scheduler.check()
        bench.store.check()
        nursery.cancel_scope.cancel()


class Slow(ByteTokenizer):
    """Does nothing before `may_go_on` is set."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def encode(self, text: str) -> list[int]:
        if len(text) >= LONG_TEXT_CHARS:
            self.may_go_on.wait(60)
        return super().encode(text)

    def compile_grammar(self, grammar: Grammar) -> object:
        self.may_go_on.wait(60)
        return super().compile_grammar(grammar)


async def assert_timed_out(daemon: EchoDaemon, **fields: Any) -> None:
    began_s = trio.current_time()
    with pytest.raises(Refused) as refused:
        await daemon.submit(timeout_s=5.0, **fields)
    assert refused.value.code == "timed_out"
    assert "within 5 s" in refused.value.message
    assert trio.current_time() == began_s + 5.0
    assert not daemon.loop.scheduler.requests


@jumping
async def test_while_its_text_is_cut_into_tokens() -> None:
    tokenizer = Slow()
    async with echo_daemon(run_loop=False, tokenizer=tokenizer) as daemon:
        await assert_timed_out(daemon, prompt="x" * LONG_TEXT_CHARS)
        assert daemon.service.outcomes["refused"] == 1
        tokenizer.may_go_on.set()


@jumping
async def test_while_its_grammar_is_compiled() -> None:
    tokenizer = Slow()
    async with echo_daemon(run_loop=False, tokenizer=tokenizer) as daemon:
        await assert_timed_out(daemon, prompt="x", structured_outputs=StructuredOutputs(regex="a"))
        tokenizer.may_go_on.set()


@jumping
async def test_while_it_is_looked_up() -> None:
    async def find(*args: Any) -> Found:
        await trio.sleep_forever()
        raise AssertionError

    async with open_store(StoreSettings("a model", 1 << 20, 0), None) as store, echo_daemon(run_loop=False) as daemon:
        daemon.loop.scheduler.remembering = Remembering(store, cut_anywhere=True)
        store.find = find  # type: ignore[method-assign]
        await assert_timed_out(daemon, prompt="x")
