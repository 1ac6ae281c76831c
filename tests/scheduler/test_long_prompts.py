"""A long text takes long to be cut into tokens: nobody else waits for that."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from scheduler.errors import Refused
from scheduler.prompts import LONG_TEXT_CHARS
from scheduler.protocol import Message
from tests.scheduler.bytes_tokenizer import ByteTokenizer
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon, in_trio
from tests.scheduler.test_service_options import Answers, ask, submit
from tests.scheduler.trio_test import until

LONG = "abc" * (LONG_TEXT_CHARS // 3 + 1)


class Slow:
    """The daemon's tokenizer, which cuts long texts only when it is allowed to."""

    def __init__(self, daemon: EchoDaemon) -> None:
        self.begun: list[str] = []
        self.allowed = threading.Event()
        self._encode = daemon.service.tokenizer.encode

    def encode(self, text: str) -> list[int]:
        if len(text) >= LONG_TEXT_CHARS:
            self.begun.append(threading.current_thread().name)
            assert self.allowed.wait(10)
        return self._encode(text)


@contextmanager
def slow(daemon: EchoDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    tokenizer = Slow(daemon)
    monkeypatch.setattr(daemon.service.tokenizer, "encode", tokenizer.encode)
    try:
        yield tokenizer
    finally:
        tokenizer.allowed.set()


@pytest.mark.parametrize("as_chat", [False, True])
def test_others_are_answered_meanwhile(as_chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"messages": (Message("user", LONG),)} if as_chat else {"prompt": LONG}

    async def main() -> None:
        async with echo_daemon(tokenizer=ByteTokenizer()) as daemon:
            with slow(daemon, monkeypatch) as tokenizer:
                long: list[Answers] = []

                async def submit_long() -> None:
                    long.append(await ask(daemon, max_tokens=3, **fields))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(submit_long)
                    await until(lambda: bool(tokenizer.begun))
                    assert (await ask(daemon, prompt="short", max_tokens=5)).texts() == ["short"]
                    assert not long
                    tokenizer.allowed.set()
                assert long[0].texts() == ["use" if as_chat else "abc"]
                assert tokenizer.begun != [threading.main_thread().name]

    trio.run(main)


def test_a_client_that_goes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with echo_daemon() as daemon:
            with slow(daemon, monkeypatch) as tokenizer:
                with trio.move_on_after(0.1) as gone:
                    await submit(daemon, prompt=LONG)
                assert gone.cancelled_caught
                assert len(tokenizer.begun) == 1
                assert not daemon.loop.scheduler.requests
                assert daemon.counted("laned_requests_total", outcome="cancelled") == 1

    trio.run(main)


@in_trio
async def test_what_is_wrong_with_a_long_prompt_is_said() -> None:
    async with echo_daemon() as daemon:
        with pytest.raises(Refused, match="model's ids"):
            await submit(daemon, prompt_token_ids=(1,) * LONG_TEXT_CHARS + (99_999_999,))
