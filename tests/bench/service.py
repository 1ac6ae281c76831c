"""The daemon's service in this process, without its socket: scheduler, loop, store and an engine of one's own, which
may be of random weights. Import tests.bench.drive before: it puts the BLAS in place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import trio

from lanes.lane import Engine, Grammar
from lanes.parts import AnswerParts
from lanes.thread import ModelThread
from scheduler.daemon import Daemon
from scheduler.notify import Notifier
from scheduler.options import Options
from scheduler.protocol import Delta, Done, Error, Reply, Submit, Usage
from scheduler.service import Service
from scheduler.storing import open_folder, open_remembering
from tests.bench.harness import Report, interleave_long

T = TypeVar("T")


class NoText:
    """A tokenizer for prompts of token ids whose answers' text nobody reads; see scheduler.tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()
    parts = AnswerParts(None)

    def encode(self, text: str) -> list[int]:
        return []

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> list[int]:
        return []

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def token_text(self, token: int) -> str:
        return ""

    def compile_grammar(self, grammar: Grammar) -> object:
        raise ValueError("there is no text to match")

    def stream(self, marked: bool = False) -> NoText:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@asynccontextmanager
async def open_service(options: Options, thread: ModelThread, engine: Engine) -> AsyncIterator[Service]:
    """What scheduler.daemon.try_out gives, of an engine that is there already. One engine may have several services, of
    which one at a time has requests."""
    async with (
        open_folder(options) as folder,
        open_remembering(options, engine.info, f"{engine.info.name}, for a benchmark", folder) as remembering,
        Daemon(options, thread, engine, NoText(), Notifier(), remembering).without_socket() as service,
    ):
        yield service


@dataclass(slots=True)
class Answer:
    """token_s: when each token came, in seconds from asking."""

    asked_s: float = field(default_factory=trio.current_time)
    tokens: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    end: Done | Error | None = None
    told: trio.Event = field(default_factory=trio.Event)

    def reply(self, said: Reply) -> None:
        if isinstance(said, Delta):
            self.tokens += said.token_ids
            self.token_s += [trio.current_time() - self.asked_s] * len(said.token_ids)
        elif isinstance(said, Done | Error):
            self.end = said
            self.told.set()

    @property
    def first_s(self) -> float:
        return self.token_s[0]

    @property
    def usage(self) -> Usage:
        assert isinstance(self.end, Done), f"a request failed: {self.end}"
        return self.end.usage


async def ask(service: Service, prompt: Sequence[int], max_tokens: int, cache: str = "both") -> Answer:
    """An answer to its end, of exactly so many tokens, the likeliest ones."""
    answer = Answer()
    message = Submit(
        id=1, prompt_token_ids=tuple(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, cache=cache
    )
    await service.submit(message, answer.reply)
    await answer.told.wait()
    assert answer.usage.completion_tokens == max_tokens == len(answer.tokens), f"an answer of {answer.usage}"
    return answer


async def interleave_async(
    rounds: int, label: str, *measures: Callable[[Report], Coroutine[Any, Any, T]]
) -> list[list[T]]:
    """As harness.interleave_long(), of what is measured on Trio's thread."""

    def on_trio(measure: Callable[[Report], Coroutine[Any, Any, T]]) -> Callable[[Report], T]:
        return lambda report: trio.from_thread.run(measure, report)

    in_thread = map(on_trio, measures)
    return await trio.to_thread.run_sync(partial(interleave_long, rounds, label, *in_thread))
