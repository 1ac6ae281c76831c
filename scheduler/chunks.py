"""Whose prompt is processed next, and how much of it, so that all get on: those that decode and those that do not yet.

Each request under way is to have the same share of the device's time, decoding or being processed, a prompt a little
less, as it costs the others more than its chunks. So with n rows decoding, a prompt earns SHARE seconds for every n
that steps take, and spends what its chunks take, at first by an estimate; of one that takes oddly long, twice that. It
may begin a chunk as long as it owes nothing: a short prompt is processed at once, and a long one takes no more from the
rows than one more row would. Once it has spent what ON_CREDIT chunks may take, it earns each further one before it
begins it, so that it owes nothing for the last. Where nothing decodes nothing is owed. What is earned while others are
processed is kept, up to a chunk.

What a prompt owes when it is done is forgiven as fast as steps go by: prompts that have not waited for their share may
take as much as the steps do, beside that share and the LENT_S that come first. Where less were forgiven, rows would
come late in the usual traffic of short prompts, and steps of few rows cost nearly what those of many do. Where all
were, one short prompt after another would leave the rows hardly any time.

Of those that owe nothing, the prompt with the least left goes first. One that others have passed counts as that much
shorter, so that each waits for no more than its own length of theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from lanes.lane import Chunk, StepResult
from scheduler.rates import ODD, ChunkSize
from scheduler.request import Request

# What a step takes is measured where no chunk is beside it: one of so many is left alone, whatever is owed.
STEPS_BESIDE_CHUNKS = 16
# Turns after which a chunk is told, its own among them, or never.
TOLD_WITHIN = 3
# Of a row's share, what a prompt gets. It costs the rows more than its chunks: behind each the host's caches are cold,
# so that on an H200 six steps take a tenth longer; and it is merged in the end.
SHARE = 0.9
# Chunks, each as long as it may be, that a prompt pays for afterwards.
ON_CREDIT = 3
# So much may be owed by prompts that are done before others wait: some come at the same moment, and are served at once.
LENT_S = 1.0


@dataclass(frozen=True, slots=True)
class Spent:
    """A chunk that was planned, of one prompt or of several that share it: what each of them has paid for it, and
    whether it is their last."""

    prompts: tuple[Request, ...]
    tokens: int
    paid_s: float
    is_last: bool


class ChunkPlan:
    """shared_prompt_tokens: see lanes.lane.ModelInfo."""

    def __init__(self, chunk_size: ChunkSize, shared_prompt_tokens: int) -> None:
        self.chunk_size = chunk_size
        self.shared_prompt_tokens = shared_prompt_tokens
        self._steps_beside = 0
        self._owed_s = 0.0  # by prompts that are done
        # Told two turns later; one of a row that leaves meanwhile may never be.
        self._untold: deque[Spent] = deque(maxlen=4)
        self._turns_since_chunk = 0
        self._turns_since_step_alone = STEPS_BESIDE_CHUNKS
        self._held_up_s = 0.0

    def observe(self, result: StepResult) -> None:
        """Learn from a turn. What a chunk has taken is known now: what was paid for it is made that, with the time by
        which it held up the step before the one that it is told with."""
        self._turns_since_chunk += 1
        self._turns_since_step_alone += 1
        held_up_s, self._held_up_s = self._held_up_s, 0.0
        is_awaited = self._untold and not result.chunk_tokens and self._turns_since_chunk <= TOLD_WITHIN
        if is_awaited and self.chunk_size.decode_s:
            self._held_up_s = held_up_s + self.chunk_size.chunk_s(result)
        # A step that waits for a part of a chunk tells what steps take only where no other has for long.
        if not is_awaited or self._turns_since_step_alone > STEPS_BESIDE_CHUNKS:
            self.chunk_size.observe(result)
            if not result.chunk_tokens:
                self._turns_since_step_alone = 0
        told: list[Spent] = []
        while self._untold and sum(spent.tokens for spent in told) < result.chunk_tokens:
            told.append(self._untold.popleft())
        if not result.rows_decoded or sum(spent.tokens for spent in told) != result.chunk_tokens:
            return  # nobody waited for it, or one of them came to nothing
        for spent in told:
            of_all = spent.tokens / result.chunk_tokens / len(spent.prompts)
            took_s = (self.chunk_size.chunk_s(result) + held_up_s) * of_all
            # A kernel that was compiled for seconds is no prompt's fault, and comes once.
            took_s = min(took_s, max(ODD * spent.paid_s, self.chunk_size.stall_s))
            for prompt in spent.prompts:
                prompt.pay(took_s - spent.paid_s)
                if spent.is_last:
                    self._owed_s += max(-prompt.credit_s, 0.0)

    def next(self, prompts: Collection[Request], num_decoding: int) -> tuple[Chunk | None, tuple[int, ...]]:
        """The next chunk beside a step of so many rows, and the other short prompts that share its pass."""
        self._earn(prompts, num_decoding)
        most = self.chunk_size.tokens(rows_decoding=num_decoding > 0)
        ready = [each for each in prompts if not num_decoding or each.credit_s >= self._needed_s(each, most)]
        request = min(ready, key=lambda r: r.num_prompt_left - r.num_passed_tokens, default=None)
        if num_decoding and (request is None or self._steps_beside >= STEPS_BESIDE_CHUNKS):
            self._steps_beside = 0
            return None, ()
        if request is None:
            return None, ()
        self._steps_beside += num_decoding > 0
        sharing = self._sharing(request, ready, most)
        size = request.num_prompt_left if sharing else self._length(request, most)
        for other in prompts:
            if other is not request and other not in sharing:
                other.num_passed_tokens += size * (1 + len(sharing))
        served = (request, *sharing)
        paid_s = self.chunk_size.seconds(size) if num_decoding else 0.0
        for prompt in served:
            prompt.pay(paid_s)
        tokens = sum(prompt.num_prompt_left for prompt in served) if sharing else size
        self._turns_since_chunk = 0
        self._untold.append(Spent(served, tokens, paid_s, size == request.num_prompt_left))
        stop = request.num_processed + size
        save = stop in request.boundaries and not sharing
        return Chunk(request.row_id, request.num_processed, stop, save), tuple(other.row_id for other in sharing)

    def _needed_s(self, prompt: Request, most_tokens: int) -> float:
        """What a prompt is to have earned before its next chunk."""
        needed_s = max(self._owed_s - LENT_S, 0.0)
        if prompt.spent_s >= ON_CREDIT * self.chunk_size.stall_s:
            needed_s = max(needed_s, self.chunk_size.seconds(self._length(prompt, most_tokens)))
        return min(needed_s, self.chunk_size.stall_s)

    def _earn(self, prompts: Collection[Request], num_decoding: int) -> None:
        """A step of so many rows goes by."""
        if not num_decoding:
            self._owed_s = 0.0
            return
        step_s = self.chunk_size.decode_s
        self._owed_s = max(self._owed_s - step_s, 0.0)
        for prompt in prompts:
            prompt.credit_s = min(prompt.credit_s + SHARE * step_s / num_decoding, self.chunk_size.stall_s)

    def _length(self, request: Request, most_tokens: int) -> int:
        """To where the prompt has to be stopped at, or as far as it may go in one turn."""
        start = request.num_processed
        if request.next_stop - start <= most_tokens:
            return request.next_stop - start
        return self.chunk_size.stop(start, most_tokens) - start

    def _sharing(self, first: Request, prompts: Collection[Request], most_tokens: int) -> list[Request]:
        """Other prompts, whole and short like the first, that fit into one pass with it when all are padded to the
        longest."""

        def is_short(request: Request) -> bool:
            alike = request.num_processed == 0 and request.wish.adapter == first.wish.adapter
            return alike and 0 < request.num_prompt_left <= self.shared_prompt_tokens

        if not is_short(first):
            return []
        others = [request for request in prompts if request is not first and is_short(request)]
        chosen: list[Request] = []
        longest = first.num_prompt_left
        for request in sorted(others, key=lambda request: request.num_prompt_left):
            longest = max(longest, request.num_prompt_left)
            if longest * (len(chosen) + 2) > most_tokens:
                break
            chosen.append(request)
        return chosen
