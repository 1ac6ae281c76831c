"""Who is served next: plan() decides and computes nothing, apply() books what came of it. No clock, no I/O, no array.

Rows between admission and leaving, whichever their state, are never more than max_rows. A row whose last token is
already dispatched leaves at once; the token itself arrives a turn later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lanes.lane import Chunk, Step, StepResult
from scheduler.budget import HEADROOM_TOKENS, UNLIMITED, Budget
from scheduler.errors import Overloaded
from scheduler.rates import ChunkSize
from scheduler.request import Request, State

# When a row will be free is not known; a client that asks again once a second is no burden.
RETRY_AFTER_S = 1.0


class BatchScheduler:
    """All requests of a daemon that are not told their end yet, and the rows of those that the engine still holds."""

    def __init__(
        self,
        max_rows: int,
        max_queue: int,
        chunk_size: ChunkSize,
        budget: Budget = UNLIMITED,
        shared_prompt_tokens: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self.max_queue = max_queue
        self.chunk_size = chunk_size
        self.budget = budget
        self.shared_prompt_tokens = shared_prompt_tokens
        self.requests: dict[int, Request] = {}
        self._queue: deque[Request] = deque()
        self._prompts: dict[int, Request] = {}
        self._merged: dict[int, Request] = {}
        self._aside: dict[int, Request] = {}
        self._leaving: list[int] = []
        self._unread = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_prefilling(self) -> int:
        return len(self._prompts)

    @property
    def num_decoding(self) -> int:
        return len(self._merged)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        free = 0 if self._aside else self.max_rows - len(self._prompts) - len(self._merged)
        if len(self._queue) >= self.max_queue + max(free, 0):
            raise Overloaded(
                f"{len(self._queue)} requests wait already, which is the limit (--max-queue); try again later",
                RETRY_AFTER_S,
            )
        self.requests[request.row_id] = request
        self._queue.append(request)

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

    def plan(self, now_s: float) -> Step | None:
        """The next turn, or None when there is nothing to do."""
        leave = tuple(self._leaving) + tuple(self._pop_spent())
        self._leaving.clear()
        set_aside = tuple(self._set_aside())
        bring_back = () if set_aside else tuple(self._bring_back())
        admit = tuple(self._admit(now_s))
        merge = [request for request in self._prompts.values() if request.num_prompt_left == 0]
        for request in merge:
            del self._prompts[request.row_id]
            self._merged[request.row_id] = request
            request.advance(State.DECODING)
        chunk, sharing = self._next_chunk()
        if not (leave or set_aside or admit or chunk or self._merged or self._unread):
            return None
        return Step(
            leave=leave,
            set_aside=set_aside,
            admit=tuple(request.spec for request in admit),
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
        self.chunk_size.observe(result)
        for request in self._merged.values():
            request.num_dispatched += 1
        if step.chunk and step.chunk.row_id in self._prompts:
            self._prompts[step.chunk.row_id].num_processed = step.chunk.stop
        for row_id in step.sharing:
            if row_id in self._prompts:
                self._prompts[row_id].num_processed = len(self._prompts[row_id].wish.prompt) - 1
        for row_id, token in result.tokens:
            if row_id not in self.requests:
                continue  # it ended while this step ran
            request = self.requests[row_id]
            since_s = request.take_token(token, now_s)
            if request.state is State.FINISHED:
                self._retire(request)
            yield request, since_s
        for row_id, reason in result.failures:
            failed = self.requests.get(row_id)
            if failed is not None:
                failed.fail("model_failed", reason, now_s)
                self._retire(failed)

    def _retire(self, request: Request) -> None:
        """Forget a request that was told its end; its row leaves the engine with the next turn."""
        row_id = request.row_id
        del self.requests[row_id]
        places = (self._prompts, self._merged, self._aside)
        if any(place.pop(row_id, None) for place in places):
            self._leaving.append(row_id)
        elif request in self._queue:
            self._queue.remove(request)

    def _pop_spent(self) -> Iterator[int]:
        """Rows whose last token is dispatched: they need no further step."""
        spent = [request for request in self._merged.values() if request.num_dispatched >= request.wish.max_tokens]
        for request in spent:
            del self._merged[request.row_id]
            yield request.row_id

    def _set_aside(self) -> Iterator[int]:
        """The youngest rows of the lane, as long as the next step would need more than there is; one stays."""
        while len(self._merged) > 1 and not self.budget.fits(self._lane(), self._solo()):
            request = max(self._merged.values(), key=lambda request: request.row_id)
            del self._merged[request.row_id]
            self._aside[request.row_id] = request
            request.advance(State.ASIDE)
            yield request.row_id

    def _bring_back(self) -> Iterator[int]:
        """The eldest rows that were set aside, as soon as they can stay for a while."""
        for request in sorted(self._aside.values(), key=lambda request: request.row_id):
            others = [other.length for other in self._aside.values() if other is not request]
            lane = [length + HEADROOM_TOKENS for length in (*self._lane(), request.length)]
            if self._merged and not self.budget.fits(lane, [*self._prompt_lengths(), *others]):
                return
            del self._aside[request.row_id]
            self._merged[request.row_id] = request
            request.advance(State.DECODING)
            yield request.row_id

    def _admit(self, now_s: float) -> Iterator[Request]:
        """New rows in the order of their arrival, none while an elder one waits to come back."""
        while self._queue and not self._aside and len(self._prompts) + len(self._merged) < self.max_rows:
            request = self._queue[0]
            # When all prompts under way are merged and the rows have gone on for a while.
            lane = [length + HEADROOM_TOKENS for length in (*self._lane(), *self._prompt_lengths(), request.length)]
            if len(lane) > 1 and not self.budget.fits(lane, [max(self._prompt_lengths(), default=request.length)]):
                return
            self._queue.popleft()
            request.advance(State.PREFILLING)
            request.times.admitted_s = now_s
            self._prompts[request.row_id] = request
            yield request

    def _lane(self) -> list[int]:
        return [request.length for request in self._merged.values()]

    def _prompt_lengths(self) -> list[int]:
        return [request.length for request in self._prompts.values()]

    def _solo(self) -> list[int]:
        return self._prompt_lengths() + [request.length for request in self._aside.values()]

    def _next_chunk(self) -> tuple[Chunk | None, tuple[int, ...]]:
        """A part of the prompt that has least left, and the other short prompts that share its pass.

        A prompt that others have passed counts as that much shorter, so that each waits for no more than its own length
        of theirs. Of equals, the one that came first.
        """
        request = min(self._prompts.values(), key=lambda r: r.num_prompt_left - r.num_passed_tokens, default=None)
        if request is None:
            return None, ()
        most = self.chunk_size.tokens(rows_decoding=bool(self._merged))
        size = min(most, request.num_prompt_left)
        sharing = self._sharing(request, most)
        for other in self._prompts.values():
            if other is not request and other not in sharing:
                other.num_passed_tokens += size * (1 + len(sharing))
        chunk = Chunk(request.row_id, request.num_processed, request.num_processed + size)
        return chunk, tuple(other.row_id for other in sharing)

    def _sharing(self, first: Request, most_tokens: int) -> list[Request]:
        """Other prompts, whole and short like the first, that fit into one pass with it when all are padded to the
        longest."""

        def is_short(request: Request) -> bool:
            return request.num_processed == 0 and 0 < request.num_prompt_left <= self.shared_prompt_tokens

        if not is_short(first):
            return []
        others = [request for request in self._prompts.values() if request is not first and is_short(request)]
        chosen: list[Request] = []
        longest = first.num_prompt_left
        for request in sorted(others, key=lambda request: request.num_prompt_left):
            longest = max(longest, request.num_prompt_left)
            if longest * (len(chosen) + 2) > most_tokens:
                break
            chosen.append(request)
        return chosen

    def check(self) -> None:
        """Every request is in exactly one place."""
        places = [*(request.row_id for request in self._queue), *self._prompts, *self._merged, *self._aside]
        assert len(places) == len(set(places)), f"a request is in two places: {sorted(places)}"
        assert set(places) <= set(self.requests), f"rows {set(places) - set(self.requests)} have ended but have a place"
        assert len(self._prompts) + len(self._merged) <= self.max_rows
        if not self.requests:
            assert not self._unread, "no request, but a step under way"
            assert not self._leaving, f"no request, but rows {self._leaving} wait to leave"
