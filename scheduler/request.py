"""A request: what a client asked, where it stands, and what it has been told.

    WAITING     in the queue, the engine does not know it
    RECALLING   admitted; what is known of its prompt is read into its caches
    PREFILLING  admitted; its prompt is processed chunk by chunk
    DECODING    merged; every step gives it a token
    ASIDE       out of the lane for want of memory, kept as it is; goes on where it was
    FINISHED    told its end; it may leave the engine a step later

Only advance() changes the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lanes.lane import Logprob, RowSpec, Sampling
from scheduler.channels import Piece
from scheduler.protocol import Delta, Done, Error, Reply, Timings, Usage
from scheduler.transcript import Transcript
from store.checkpoint import Recall
from store.store import Found


class State(Enum):
    WAITING = "waiting"
    RECALLING = "recalling"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ASIDE = "aside"
    FINISHED = "finished"


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RECALLING, State.PREFILLING, State.FINISHED}),
    State.RECALLING: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.ASIDE, State.FINISHED}),
    State.ASIDE: frozenset({State.DECODING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


# A request that has waited for so long goes before one that comes now with a priority one step higher.
WAIT_PER_PRIORITY_S = 30.0


class IllegalMove(Exception):
    """A request was told to go where its state does not lead; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asked, validated: the prompt as token ids (at least one) and how to answer it.

    index: which of several answers to the prompt; None if there is one. stop_token_ids end the answer and are not part
    of its text. max_tokens is at least 1. priority: lower is sooner.
    timeout_s: from its arrival to its end at the latest. namespace: what is remembered
    of this prompt serves only requests of the same. adapter: the digest of the one that it is answered with.
    reads_store, writes_store: whether it may be served from what is remembered, and be remembered. system_tokens: how
    many of the prompt are the system's, where that is known.
    """

    client_id: str | int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: frozenset[int] = frozenset()
    stream: bool = True
    index: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    namespace: str = ""
    adapter: str | None = None
    reads_store: bool = True
    writes_store: bool = True
    system_tokens: int | None = None


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
        self, row_id: int, wish: Wish, transcript: Transcript, reply: Callable[[Reply], None], arrived_s: float
    ) -> None:
        self.row_id = row_id
        self.wish = wish
        self.state = State.WAITING
        self.times = Times(arrived_s)
        self.outcome: str | None = None
        self.failed_with: str | None = None
        self.found: Found | None = None
        self.recall: Recall | None = None
        # Its grammar's: as long as it is here, admitting the row compiles nothing.
        self.compiled: object | None = None
        self.num_recalled = 0
        self.num_recalled_memory = 0
        self.boundaries: tuple[int, ...] = ()
        self.end_is_saved = False
        # Token counts at which others wait for what this prompt has processed.
        self.awaited: set[int] = set()
        # The same for this prompt: it waits for so many tokens of another's.
        self.waits_for: tuple[int, Request] | None = None
        self.num_processed = 0
        self.num_passed_tokens = 0
        # Device time that its prompt may take, or owes the rows that decode, and what it has taken beside them; see
        # scheduler/chunks.py.
        self.credit_s = 0.0
        self.spent_s = 0.0
        self.num_dispatched = 0
        self.generated: list[int] = []
        # The first of several answers to one prompt, and the one of them that this one follows: see follows.
        self.first: Request | None = None
        self.leader: Request | None = None
        self._transcript = transcript
        self._reply = reply
        # The whole answer, where it is told at the end only.
        self._untold: list[Piece] = []

    def pay(self, seconds: float) -> None:
        """Its prompt has taken so much of the device from the rows that decode."""
        self.credit_s -= seconds
        self.spent_s += seconds

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.row_id, self.wish.prompt, self.wish.sampling, self.recall, self.wish.adapter)

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    @property
    def answer_token_ids(self) -> list[int]:
        """What was generated, less the token that ends the text."""
        ends = bool(self.generated) and self.generated[-1] in self.wish.stop_token_ids
        return self.generated[:-1] if ends else self.generated

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens to process before the row can be merged; its last one is the first step's input."""
        return len(self.wish.prompt) - 1 - self.num_processed

    @property
    def rank(self) -> tuple[float, int]:
        """Who goes first: the lowest. Waiting counts as much as priority does, so that nobody waits for ever."""
        return self.times.arrived_s + self.wish.priority * WAIT_PER_PRIORITY_S, self.row_id

    @property
    def deadline_s(self) -> float:
        """When it has to have ended; infinite where that does not matter."""
        return math.inf if self.wish.timeout_s is None else self.times.arrived_s + self.wish.timeout_s

    def is_late(self, now_s: float) -> bool:
        return now_s >= self.deadline_s

    @property
    def is_kept(self) -> bool:
        """Whether what its row holds may be remembered: it is allowed, and the model has not failed on it."""
        return self.wish.writes_store and self.failed_with != "model_failed"

    @property
    def num_held(self) -> int:
        """Tokens that the row's caches hold, once the step that is dispatched is done."""
        return self.num_processed + self.num_dispatched

    @property
    def length(self) -> int:
        """Tokens that the row's caches hold in the lane, the next step's included."""
        return len(self.wish.prompt) + self.num_dispatched

    @property
    def held_row_s(self) -> float | None:
        """From its admission to its end; None where one of these has not been."""
        admitted_s, finished_s = self.times.admitted_s, self.times.finished_s
        return None if admitted_s is None or finished_s is None else finished_s - admitted_s

    def advance(self, state: State) -> None:
        if state not in MOVES[self.state]:
            raise IllegalMove(f"request {self.row_id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def is_waiting_for_beginning(self) -> bool:
        """Whether what it waits for is still to come: many may wait for long, and comparing prompts takes time."""
        if self.waits_for is None:
            return False
        tokens, other = self.waits_for
        return other.state in (State.RECALLING, State.PREFILLING) and other.num_processed < tokens

    @property
    def next_stop(self) -> int:
        """Where the next chunk has to end at the latest: at a boundary, where somebody waits for it, or before the
        prompt's last token."""
        stops = (*self.boundaries, *self.awaited, len(self.wish.prompt) - 1)
        return min(at for at in stops if at > self.num_processed)

    def process(self, stop: int, saved: bool = False) -> None:
        """The prompt has been processed up to here, and its rings and state saved there or not."""
        self.num_processed = stop
        self.end_is_saved = saved and self.num_prompt_left == 0

    def begin_prompt(self, is_recalled: bool) -> None:
        """Its prompt's turn has come; what was found of it needs no processing, if it was recalled."""
        self.advance(State.PREFILLING)
        if is_recalled and self.found:
            self.num_processed = self.num_recalled = self.found.tokens
            self.num_recalled_memory = self.found.memory_tokens

    def forget_found(self) -> None:
        """What was found for it is of no use any more."""
        if self.found is not None:
            self.found.release()
            self.found = None

    @property
    def follows(self) -> bool:
        """Whether its prompt need not be processed, as another request's, the same, is on its way."""
        return self.leader is not None and self.leader.state in (State.RECALLING, State.PREFILLING)

    def take_over(self) -> None:
        """Its leader's prompt has been processed, and the row with it copied."""
        assert self.leader is not None
        self.num_processed = self.num_recalled = self.num_recalled_memory = self.leader.num_processed

    def take_token(self, token: int, now_s: float, logprob: Logprob | None = None) -> float | None:
        """Book a token that was drawn; ends the request where it ends the text.

        Returns the seconds since the token before it, None for the first.
        """
        times = self.times
        since_s = None if times.last_token_s is None else now_s - times.last_token_s
        times.last_token_s = now_s
        if times.first_token_s is None:
            times.first_token_s = now_s
        self.generated.append(token)
        # A step may give several; what comes behind the end of the text is not the request's any more.
        self.num_dispatched = max(self.num_dispatched, self.num_generated)
        is_end = token in self.wish.stop_token_ids
        is_last = is_end or self.num_generated == self.wish.max_tokens
        piece = self._transcript.take(token, logprob, is_end=is_end, is_last=is_last)
        if not self.wish.stream:
            self._untold.append(piece)
        elif piece:
            self._reply(self._delta(piece))
        if self._transcript.stopped_by is not None:
            self.finish("stop", now_s, stop_reason=self._transcript.stopped_by)
        elif is_end:
            self.finish("stop", now_s, stop_reason=token)
        elif is_last:
            self.finish("length", now_s)
        return since_s

    def finish(self, reason: str, now_s: float, stop_reason: str | int | None = None) -> None:
        """The end of an answer: reason is stop, length or cancelled."""
        self._end(reason, now_s)
        whole = Piece.joined(self._untold)
        self._reply(
            Done(
                id=self.wish.client_id,
                finish_reason="tool_calls" if reason == "stop" and self._transcript.has_called else reason,
                stop_reason=stop_reason,
                text=None if self.wish.stream else whole.text,
                usage=self.usage(),
                timings=self.timings(now_s),
                index=self.wish.index or 0,
                reasoning=whole.reasoning,
                tool_calls=tuple(whole.tool_calls),
                logprobs=tuple(whole.logprobs),
            )
        )

    def fail(self, code: str, message: str, now_s: float) -> None:
        """The end of a request that could not be answered."""
        self._end("failed", now_s)
        self.failed_with = code
        self._reply(Error(id=self.wish.client_id, code=code, message=message, index=self.wish.index))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.wish.prompt),
            completion_tokens=self.num_generated,
            cached_tokens=self.num_recalled,
            cached_memory_tokens=self.num_recalled_memory,
            cached_disk_tokens=self.num_recalled - self.num_recalled_memory,
        )

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

    def _delta(self, piece: Piece) -> Delta:
        return Delta(
            id=self.wish.client_id,
            text=piece.text,
            token_ids=tuple(piece.token_ids),
            index=self.wish.index or 0,
            reasoning=piece.reasoning,
            tool_calls=tuple(piece.tool_calls),
            logprobs=tuple(piece.logprobs),
        )
