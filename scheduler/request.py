"""A request: what a client asked, where it stands, and what it has been told.

    WAITING     in the queue, the engine does not know it
    PREFILLING  admitted; its prompt is processed chunk by chunk
    DECODING    merged; every step gives it a token
    ASIDE       out of the lane for want of memory, kept as it is; goes on where it was
    FINISHED    told its end; it may leave the engine a step later

Only advance() changes the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lanes.lane import RowSpec, Sampling
from scheduler.protocol import Delta, Done, Error, Reply, Timings, Usage
from scheduler.text import TextStream


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ASIDE = "aside"
    FINISHED = "finished"


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.ASIDE, State.FINISHED}),
    State.ASIDE: frozenset({State.DECODING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class IllegalMove(Exception):
    """A request was told to go where its state does not lead; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asked, validated: the prompt as token ids (at least one) and how to answer it.

    stop_token_ids end the answer and are not part of its text. max_tokens is at least 1.
    """

    client_id: str | int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: frozenset[int] = frozenset()
    stream: bool = True


@dataclass(slots=True)
class Times:
    """When things happened to a request, in seconds of the loop's clock; None: not yet."""

    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None


class Request:
    """One request on its way. It tells its client through reply(), which never blocks."""

    def __init__(
        self, row_id: int, wish: Wish, text: TextStream, reply: Callable[[Reply], None], arrived_s: float
    ) -> None:
        self.row_id = row_id
        self.wish = wish
        self.state = State.WAITING
        self.times = Times(arrived_s)
        self.outcome: str | None = None
        self.num_processed = 0
        self.num_passed_tokens = 0
        self.num_dispatched = 0
        self.num_generated = 0
        self._text = text
        self._reply = reply
        self._whole_text: list[str] = []

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.row_id, self.wish.prompt, self.wish.sampling)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens to process before the row can be merged; its last one is the first step's input."""
        return len(self.wish.prompt) - 1 - self.num_processed

    @property
    def length(self) -> int:
        """Tokens that the row's caches hold in the lane, the next step's included."""
        return len(self.wish.prompt) + self.num_dispatched

    def advance(self, state: State) -> None:
        if state not in MOVES[self.state]:
            raise IllegalMove(f"request {self.row_id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def take_token(self, token: int, now_s: float) -> float | None:
        """Book a token that was drawn; ends the request where it ends the text.

        Returns the seconds since the token before it, None for the first.
        """
        times = self.times
        since_s = None if times.last_token_s is None else now_s - times.last_token_s
        times.last_token_s = now_s
        if times.first_token_s is None:
            times.first_token_s = now_s
        self.num_generated += 1
        is_end = token in self.wish.stop_token_ids
        is_last = is_end or self.num_generated == self.wish.max_tokens
        piece = "" if is_end else self._text.push(token)
        # What was held back may turn out to be, or to hold, a stop string.
        piece += self._text.flush() if is_last else ""
        self._tell(piece, *(() if is_end else (token,)))
        if self._text.stopped_by is not None:
            self.finish("stop", now_s, stop_reason=self._text.stopped_by)
        elif is_end:
            self.finish("stop", now_s, stop_reason=token)
        elif is_last:
            self.finish("length", now_s)
        return since_s

    def finish(self, reason: str, now_s: float, stop_reason: str | int | None = None) -> None:
        """The end of an answer: reason is stop, length or cancelled."""
        self._end(reason, now_s)
        self._reply(
            Done(
                id=self.wish.client_id,
                finish_reason=reason,
                stop_reason=stop_reason,
                text=None if self.wish.stream else "".join(self._whole_text),
                usage=Usage(prompt_tokens=len(self.wish.prompt), completion_tokens=self.num_generated, cached_tokens=0),
                timings=self.timings(now_s),
            )
        )

    def fail(self, code: str, message: str, now_s: float) -> None:
        """The end of a request that could not be answered."""
        self._end("failed", now_s)
        self._reply(Error(id=self.wish.client_id, code=code, message=message))

    def timings(self, now_s: float) -> Timings:
        """Where the time went; a phase that was not reached took none."""
        times = self.times
        admitted_s = now_s if times.admitted_s is None else times.admitted_s
        first_s = times.first_token_s
        return Timings(
            queued_s=admitted_s - times.arrived_s,
            prompt_s=(now_s if first_s is None else first_s) - admitted_s,
            ttft_s=None if first_s is None else first_s - times.arrived_s,
            decode_s=0.0 if first_s is None else now_s - first_s,
            total_s=now_s - times.arrived_s,
        )

    def _end(self, outcome: str, now_s: float) -> None:
        self.advance(State.FINISHED)
        self.outcome = outcome
        self.times.finished_s = now_s

    def _tell(self, text: str, *tokens: int) -> None:
        if not self.wish.stream:
            self._whole_text.append(text)
        elif text or tokens:
            self._reply(Delta(id=self.wish.client_id, text=text, token_ids=tokens))
