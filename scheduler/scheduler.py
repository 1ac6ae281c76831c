"""Who is served next: plan() decides and computes nothing, apply() books what came of it. No clock, no I/O, no array.

Rows between admission and leaving, whichever their state, are never more than max_rows. A row whose last token is
already dispatched leaves at once; the token itself arrives a turn later.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator

from lanes.lane import Freeze, Logprob, Step, StepResult
from scheduler.budget import HEADROOM_TOKENS, UNLIMITED, Budget
from scheduler.chunks import ChunkPlan
from scheduler.errors import Overloaded, Refused
from scheduler.rates import ChunkSize, PromptRate
from scheduler.remembering import Remembering
from scheduler.request import Request, State
from scheduler.turnover import Turnover
from store.checkpoint import Destination


class BatchScheduler:
    """All requests of a daemon that are not told their end yet, and the rows of those that the engine still holds."""

    def __init__(
        self,
        max_rows: int,
        max_queue: int,
        chunk_size: ChunkSize,
        budget: Budget = UNLIMITED,
        shared_prompt_tokens: int = 0,
        remembering: Remembering | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.max_queue = max_queue
        self.chunk_size = chunk_size
        self.budget = budget
        self._chunks = ChunkPlan(chunk_size, shared_prompt_tokens)
        self.remembering = remembering
        self.prompt_rate = PromptRate()
        self._turnover = Turnover()
        self.requests: dict[int, Request] = {}
        self._queue: list[Request] = []
        self._recalling: dict[int, Request] = {}
        self._prompts: dict[int, Request] = {}
        self._merged: dict[int, Request] = {}
        self._aside: dict[int, Request] = {}
        self._leaving: list[Request] = []
        # Of the turn that is under way, the rows that its step feeds; they may have ended meanwhile.
        self._stepped: list[Request] = []
        # Rows whose memory is being read into; they may have ended meanwhile.
        self._filling: dict[int, Request] = {}
        self._filled: list[tuple[Request, bool]] = []
        self._unread = False
        self._saved_bytes = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_prefilling(self) -> int:
        return len(self._prompts) + len(self._recalling)

    @property
    def num_decoding(self) -> int:
        return len(self._merged)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    @property
    def first_deadline_s(self) -> float:
        """When plan() has to be asked at the latest, whatever else happens; infinite where nobody is in a hurry."""
        return min((request.deadline_s for request in self.requests.values()), default=math.inf)

    @property
    def under_way(self) -> list[Request]:
        """Requests beyond the queue, in the order of their arrival."""
        return [request for request in self.requests.values() if request.state is not State.WAITING]

    @property
    def retry_after_s(self) -> float:
        """When one who is refused now had better come again; see Turnover."""
        return self._turnover.retry_after_s(len(self._queue), self.max_rows)

    def check_number(self, n: int) -> None:
        """Raises Refused where so many answers to one prompt could not be queued even if nobody else were here."""
        most = self.max_queue + self.max_rows
        if n > most:
            raise Refused(
                "bad_request",
                f"n is {n}, but no more than {most} answers can wait and run together (--max-queue and --max-rows): "
                f"ask for {most} or fewer",
            )

    def submit(self, *requests: Request) -> None:
        """Queue a request, or several answers' to one prompt. Raises Overloaded when the queue is too full for all."""
        free = 0 if self._aside else self.max_rows - self.num_prefilling - len(self._merged)
        if len(self._queue) + len(requests) > self.max_queue + max(free, 0):
            raise Overloaded(
                f"{len(self._queue)} requests wait already, which is the limit (--max-queue); try again later",
                self.retry_after_s,
            )
        for request in requests:
            self.requests[request.row_id] = request
            insort(self._queue, request, key=lambda request: request.rank)

    def cancel(self, row_id: int, now_s: float) -> None:
        """End a request, in whatever state. One that has ended already is left as it is."""
        request = self.requests.get(row_id)
        if request is not None:
            request.finish("cancelled", now_s)
            self._retire(request)

    def fail_all(self, code: str, message: str, now_s: float) -> None:
        """End every request, as when the engine has failed or the time to drain is over."""
        for request in list(self.requests.values()):
            request.fail(code, message, now_s)
            self._retire(request)

    def _end_late(self, now_s: float) -> None:
        for request in [request for request in self.requests.values() if request.is_late(now_s)]:
            request.fail("timed_out", f"there is no whole answer within {request.wish.timeout_s:g} s", now_s)
            self._retire(request)

    def plan(self, now_s: float) -> Step | None:
        """The next turn, or None when there is nothing to do."""
        self._end_late(now_s)
        leave = [*self._leaving, *self._pop_spent()]
        self._leaving.clear()
        freeze = [*self._freeze_leaving(leave), *self._freeze_prompts()]
        set_aside = tuple(self._set_aside())
        bring_back = () if set_aside else tuple(self._bring_back())
        recalled = tuple(self._begin_recalled())
        for request in self._prompts.values():
            self._find_leader(request)
        admit = tuple(self._admit(now_s, leave))
        merge = [request for request in self._prompts.values() if request.num_prompt_left == 0]
        fork = [request for request in self._prompts.values() if request.leader in merge and request not in merge]
        for request in fork:
            request.take_over()
        merge += fork
        for request in merge:
            del self._prompts[request.row_id]
            self._merged[request.row_id] = request
            request.advance(State.DECODING)
        self._stepped = list(self._merged.values())
        chunk, sharing = self._chunks.next(self._leaders(), len(self._merged))
        if not (leave or set_aside or admit or recalled or chunk or self._merged or self._unread):
            return None
        return Step(
            freeze=tuple(freeze),
            leave=tuple(request.row_id for request in leave),
            set_aside=set_aside,
            admit=tuple(request.spec for request in admit),
            recalled=recalled,
            fork=tuple((request.leader.row_id, request.row_id) for request in fork if request.leader),
            merge=tuple(request.row_id for request in merge),
            bring_back=bring_back,
            chunk=chunk,
            sharing=sharing,
        )

    def apply(self, step: Step, result: StepResult, now_s: float) -> Iterator[tuple[Request, float | None]]:
        """Book a turn. Yields each request that got a token, with the seconds since its last (None: its first).

        It must be run to its end.
        """
        self._unread = result.in_flight
        self._saved_bytes = result.saved_bytes
        self._chunks.observe(result)
        self.prompt_rate.observe(result)
        if self.remembering:
            self.remembering.book(result)
        for request in self._stepped:
            request.num_dispatched += 1
        # These ended while the turn ran, and are told nothing of it; what their rows hold is still to be known.
        ended = {request.row_id: request for request in self._leaving}
        prompts = {**self._prompts, **ended}
        if step.chunk and step.chunk.row_id in prompts:
            prompts[step.chunk.row_id].process(step.chunk.stop, step.chunk.save)
        for row_id in step.sharing:
            if row_id in prompts:
                prompts[row_id].process(len(prompts[row_id].wish.prompt) - 1)
        for row_id, token, logprob in _drawn(result):
            if row_id not in self.requests:
                if row_id in ended:
                    ended[row_id].generated.append(token)
                continue
            request = self.requests[row_id]
            since_s = request.take_token(token, now_s, logprob)
            if request.state is State.FINISHED:
                self._retire(request)
            yield request, since_s
        for row_id, reason in result.failures:
            failed = self.requests.get(row_id)
            if failed is not None:
                failed.fail("model_failed", reason, now_s)
                self._retire(failed)

    def turn_failed(self) -> None:
        """The turn that was planned is not carried out, and none will be any more."""
        if self.remembering:
            self.remembering.drop()

    def to_fill(self, result: StepResult) -> Iterator[tuple[Request, tuple[Destination, ...]]]:
        """Rows that the engine has made memory for, to be read into it; filled() is to be told how that went."""
        for row_id, destinations in result.destinations:
            if row_id in self._recalling:
                self._filling[row_id] = self._recalling[row_id]
                yield self._recalling[row_id], destinations

    def filled(self, request: Request, whole: bool) -> None:
        """What was known of a row has been read, or could not be."""
        del self._filling[request.row_id]
        if request.row_id in self._recalling:
            self._filled.append((request, whole))
        else:
            request.forget_found()

    def _begin_recall(self, request: Request) -> None:
        """What is mapped is there; all else is to be read first."""
        assert request.recall is not None
        if request.recall.mapped is not None:
            self._begin_prompt(request, is_recalled=True)
        else:
            request.advance(State.RECALLING)
            self._recalling[request.row_id] = request

    def _begin_recalled(self) -> Iterator[tuple[int, bool]]:
        for request, whole in self._filled:
            if self._recalling.pop(request.row_id, None) is None:
                continue  # it has ended since
            self._begin_prompt(request, whole)
            yield request.row_id, whole
        self._filled.clear()

    def _begin_prompt(self, request: Request, is_recalled: bool) -> None:
        self._prompts[request.row_id] = request
        request.begin_prompt(is_recalled)
        if self.remembering:
            self.remembering.plan_boundaries(request)

    def _retire(self, request: Request) -> None:
        """Forget a request that was told its end; its row leaves the engine with the next turn."""
        row_id = request.row_id
        del self.requests[row_id]
        if request.held_row_s is not None:
            self._turnover.observe(request.held_row_s)
        places = (self._recalling, self._prompts, self._merged, self._aside)
        if any(place.pop(row_id, None) for place in places):
            self._leaving.append(request)
        elif request in self._queue:
            self._queue.remove(request)
            request.forget_found()

    def _pop_spent(self) -> Iterator[Request]:
        """Rows whose last token is dispatched: they need no further step."""
        spent = [request for request in self._merged.values() if request.num_dispatched >= request.wish.max_tokens]
        for request in spent:
            del self._merged[request.row_id]
            yield request

    def _freeze_leaving(self, leave: Iterable[Request]) -> tuple[Freeze, ...]:
        """What rows that leave have computed and nobody knows yet. What was found for them is of use until then."""
        frozen = tuple(self.remembering.freeze(leave)) if self.remembering else ()
        for request in leave:
            if request.row_id not in self._filling:
                request.forget_found()
        return frozen

    def _freeze_prompts(self) -> tuple[Freeze, ...]:
        return tuple(self.remembering.freeze_prompts(self._prompts.values())) if self.remembering else ()

    def _set_aside(self) -> Iterator[int]:
        """The last in rank of the lane, as long as the next step would need more than there is; one stays."""
        while len(self._merged) > 1 and not self._fits(self._lane(), self._solo()):
            request = max(self._merged.values(), key=lambda request: request.rank)
            del self._merged[request.row_id]
            self._aside[request.row_id] = request
            request.advance(State.ASIDE)
            yield request.row_id

    def _bring_back(self) -> Iterator[int]:
        """The first in rank of those set aside, as soon as they can stay for a while."""
        for request in sorted(self._aside.values(), key=lambda request: request.rank):
            others = [other.length for other in self._aside.values() if other is not request]
            lane = [length + HEADROOM_TOKENS for length in (*self._lane(), request.length)]
            if self._merged and not self._fits(lane, [*self._prompt_lengths(), *others]):
                return
            del self._aside[request.row_id]
            self._merged[request.row_id] = request
            request.advance(State.DECODING)
            yield request.row_id

    def _admit(self, now_s: float, leaving: Iterable[Request]) -> Iterator[Request]:
        """New rows in the order of their rank, none while one waits to come back. Others pass a prompt that waits for
        the same beginning of one that is under way, or of one that leaves now and is frozen."""
        if self._aside:
            return
        for request in list(self._queue):
            if not self._has_room_for(request):
                return
            # One that follows another takes over what that one has.
            self._find_leader(request)
            remembering = None if request.follows else self.remembering
            under_way = (*self._recalling.values(), *self._leaders(), *leaving)
            if remembering and remembering.waits(request, under_way):
                continue
            self._queue.remove(request)
            request.times.admitted_s = now_s
            if remembering and remembering.recalls(request, self.prompt_rate.tokens_per_s):
                self._begin_recall(request)
            else:
                self._begin_prompt(request, is_recalled=False)
            yield request

    def _find_leader(self, request: Request) -> None:
        """One whose leader has gone on, or away, follows another answer to the same prompt that is still before its
        first token, if there is one: so those that find rows together process the prompt once."""
        if request.first is None or request.follows or request.num_processed:
            return
        for other in (*self._recalling.values(), *self._prompts.values()):
            if other is not request and other.first is request.first and not other.follows:
                request.leader = other
                return

    def _has_room_for(self, request: Request) -> bool:
        """A row is free, and memory enough for when all prompts under way are merged and have gone on for a while."""
        if self.num_prefilling + len(self._merged) >= self.max_rows:
            return False
        lane = [length + HEADROOM_TOKENS for length in (*self._lane(), *self._prompt_lengths(), request.length)]
        return len(lane) == 1 or self._fits(lane, [max(self._prompt_lengths(), default=request.length)])

    def _fits(self, lane: Iterable[int], solo: Iterable[int]) -> bool:
        return self.budget.fits(lane, solo, self._saved_bytes)

    def _leaders(self) -> list[Request]:
        """Those whose prompts have to be processed."""
        return [request for request in self._prompts.values() if not request.follows]

    def _lane(self) -> list[int]:
        return [request.length for request in self._merged.values()]

    def _prompt_lengths(self) -> list[int]:
        return [request.length for place in (self._prompts, self._recalling) for request in place.values()]

    def _solo(self) -> list[int]:
        return self._prompt_lengths() + [request.length for request in self._aside.values()]

    def check(self) -> None:
        """Every request is in exactly one place."""
        held = (self._recalling, self._prompts, self._merged, self._aside)
        places = [*(request.row_id for request in self._queue), *(row_id for place in held for row_id in place)]
        assert len(places) == len(set(places)), f"a request is in two places: {sorted(places)}"
        assert set(places) <= set(self.requests), f"rows {set(places) - set(self.requests)} have ended but have a place"
        assert self.num_prefilling + len(self._merged) <= self.max_rows
        if self.remembering:
            self.remembering.check()
        if not self.requests:
            assert not self._unread, "no request, but a step under way"
            assert not self._leaving, f"no request, but {len(self._leaving)} rows wait to leave"
            if self.remembering and not self._filling:
                self.remembering.store.check_released()


def _drawn(result: StepResult) -> Iterator[tuple[int, int, Logprob | None]]:
    """(row id, token, what is told of it) in their order; a row may be in a result twice."""
    told: dict[int, list[Logprob]] = {}
    for row_id, logprob in result.logprobs:
        told.setdefault(row_id, []).append(logprob)
    for row_id, token in result.tokens:
        of_row = told.get(row_id)
        yield row_id, token, of_row.pop(0) if of_row else None
