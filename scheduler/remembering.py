"""What the scheduler has remembered of its rows: which part of a row is frozen when, and where it goes.

A row is frozen when its prompt has been processed, if there is much that nobody knew, so that the next request with the
same beginning need not wait for the end of this answer, and when it leaves, whatever the reason but a failure. Frozen
is what the store does not have yet; of a long prompt a piece in each turn, as others wait while it is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lanes.lane import Freeze, StepResult
from scheduler.beginnings import WORTH_WAITING_TOKENS, longest_beginning
from scheduler.boundaries import GRID_TOKENS, boundaries
from scheduler.request import Request, State
from store.store import Draft, Found, Store

# New tokens of a prompt from which on it is kept before its answer ends: fewer are soon computed again.
WORTH_KEEPING_TOKENS = 256
# What one turn copies of a prompt, about: as long as a step or less.
PIECE_BYTES = 64 << 20


class Remembering:
    """The scheduler's side of the store."""

    def __init__(self, store: Store, cut_anywhere: bool, token_bytes: int = 0) -> None:
        """cut_anywhere: see lanes.lane.ModelInfo.remembers. token_bytes: what a token takes; 0: that is not known, and
        nothing is frozen in pieces."""
        self.store = store
        self.cut_anywhere = cut_anywhere
        self.piece_tokens = _piece_tokens(token_bytes) if cut_anywhere and token_bytes else None
        # Rows that decode, and how much of their prompts is frozen, where there is more.
        self._in_pieces: dict[int, tuple[Request, int]] = {}
        # What is being frozen, for which draft, and the row if it goes on. Its part is then held until it leaves: else,
        # where memory has no room, the end of the row would hang on nothing, and all of it would be frozen once more.
        self._freezing: dict[Freeze, tuple[Draft, Request | None]] = {}
        self._held: dict[int, Found] = {}

    def waits(self, request: Request, under_way: Iterable[Request]) -> bool:
        """Whether a request had better wait for the same beginning of a prompt that is under way, which is then frozen
        there."""
        if not request.wish.reads_store or not self.store.holds_memory:
            return False
        if request.is_waiting_for_beginning:
            return True
        longest = longest_beginning(request, under_way, self.cut_anywhere)
        if longest is None:
            return False
        shared, other = longest
        self._look_up(request)
        if request.found and request.found.tokens + WORTH_WAITING_TOKENS > shared:
            return False
        other.awaited.add(shared)
        request.waits_for = longest
        return True

    def recalls(self, request: Request, prompt_tokens_per_s: float | None) -> bool:
        """Whether a row that is admitted now begins with what is known of its prompt: the request's `recall` is set.

        That was looked up when the request came; more may be known by now.
        """
        if not request.wish.reads_store:
            return False
        found = self._look_up(request)
        if self._is_sooner(found, prompt_tokens_per_s):
            request.recall = found.recall
        else:
            found.unmap()
        return request.recall is not None

    def _look_up(self, request: Request) -> Found:
        """The best that is known of a request's prompt."""
        wish = request.wish
        now = self.store.find_now(wish.prompt, wish.namespace, len(wish.prompt) - 1)
        if request.found is not None and request.found.tokens >= now.tokens:
            now.release()
            return request.found
        request.forget_found()
        request.found = now
        return now

    def _is_sooner(self, found: Found, prompt_tokens_per_s: float | None) -> bool:
        """Whether reading takes less time than computing, as far as both have been measured."""
        rates = self.store.read_rate()
        if prompt_tokens_per_s is None:
            return True
        read_s = sum(
            num_bytes / rate
            for num_bytes, rate in ((found.memory_bytes, rates.memory), (found.disk_bytes, rates.disk))
            if rate is not None
        )
        return read_s < found.tokens / prompt_tokens_per_s

    def plan_boundaries(self, request: Request) -> None:
        """Where the prompt's chunks have to end, once it is known how much of it is recalled."""
        if self.cut_anywhere or not request.wish.writes_store:
            return
        matched = request.found.matched if request.found else 0
        wish = request.wish
        request.boundaries = boundaries(len(wish.prompt), request.num_processed, matched, wish.system_tokens)

    def freeze_prompts(self, requests: Iterable[Request]) -> Iterator[Freeze]:
        """Called for all prompts under way, before those are merged that are processed, and after freeze(). A short one
        waits for the end of its answer, if it can be cut out then and nobody waits for it."""
        being_frozen = {wanted.row_id for wanted in self._freezing}
        for request, frozen_tokens in list(self._in_pieces.values()):
            if request.state is State.DECODING and request.row_id not in being_frozen:
                yield from self._freeze_prompt(request, 1, self.piece_tokens, frozen_tokens)
        for request in requests:
            is_awaited = any(tokens <= request.num_processed for tokens in request.awaited)
            request.awaited = {tokens for tokens in request.awaited if tokens > request.num_processed}
            if is_awaited or request.num_prompt_left == 0:
                at_once = is_awaited or not (self.cut_anywhere or request.end_is_saved)
                most_tokens = None if is_awaited else self.piece_tokens
                yield from self._freeze_prompt(request, 1 if at_once else WORTH_KEEPING_TOKENS, most_tokens)

    def freeze(self, leaving: Iterable[Request]) -> Iterator[Freeze]:
        """Called for rows that leave."""
        for request in leaving:
            self._in_pieces.pop(request.row_id, None)
            for earlier, (draft, _) in self._freezing.items():
                if earlier.row_id == request.row_id:
                    self._freezing[earlier] = draft, None
            wanted = self._freeze(request, request.num_held, 1, goes_on=False)
            self._let_go(request.row_id)
            if wanted:
                yield wanted

    def _freeze_prompt(
        self, request: Request, least_tokens: int, most_tokens: int | None, frozen_tokens: int = 0
    ) -> Iterator[Freeze]:
        """Of what has been processed of a prompt, most_tokens at most, the rest in turns to come. frozen_tokens: what
        has been frozen of it so; where that is not known any more there is no room for it, and no more is frozen."""
        wanted = self._freeze(request, request.num_processed, least_tokens, most_tokens, frozen_tokens)
        self._in_pieces.pop(request.row_id, None)
        if wanted:
            if wanted.stop < request.num_processed:
                self._in_pieces[request.row_id] = request, wanted.stop
            yield wanted

    def _freeze(
        self,
        request: Request,
        held: int,
        least_tokens: int,
        most_tokens: int | None = None,
        known_tokens: int = 0,
        goes_on: bool = True,
    ) -> Freeze | None:
        """What is not known of the first `held` tokens of a row, if that is enough, and known_tokens are."""
        if not request.is_kept or held - request.num_recalled < least_tokens:
            return None
        tokens = (*request.wish.prompt, *request.generated)[:held]
        assert len(tokens) == held, f"row {request.row_id} holds {held} tokens, of which {len(tokens)} are known"
        passed = [at for at in request.boundaries if at < held]
        draft = self.store.draft(tokens, request.wish.namespace, passed)
        if draft is None:
            return None
        stop = draft.stop if most_tokens is None else min(draft.stop, draft.start + most_tokens)
        wanted = Freeze(request.row_id, draft.start, stop)
        if held - draft.start < least_tokens or draft.start < known_tokens or wanted in self._freezing:
            draft.drop()
            return None
        self._freezing[wanted] = draft, request if goes_on else None
        return wanted

    def book(self, result: StepResult) -> None:
        """Keep what has been frozen."""
        for wanted, part in result.frozen:
            draft, going_on = self._freezing.pop(wanted)
            if part is None:
                draft.drop()
                continue
            self.store.remember(draft, part)
            if going_on is not None:
                self._hold(going_on)

    def _hold(self, request: Request) -> None:
        wish = request.wish
        now = self.store.find_now(wish.prompt, wish.namespace, len(wish.prompt))
        self._let_go(request.row_id)
        self._held[request.row_id] = now

    def _let_go(self, row_id: int) -> None:
        if (held := self._held.pop(row_id, None)) is not None:
            held.release()

    def drop(self) -> None:
        """The engine has failed: nothing of what was to be frozen is, and no row leaves any more."""
        for draft, _ in self._freezing.values():
            draft.drop()
        self._freezing.clear()
        self._in_pieces.clear()
        for row_id in list(self._held):
            self._let_go(row_id)

    def check(self) -> None:
        assert not self._in_pieces, f"of rows {sorted(self._in_pieces)} more is to be frozen"
        assert not self._freezing, f"{list(self._freezing)} were to be frozen, and nothing is said of them"


def _piece_tokens(token_bytes: int) -> int:
    """A multiple of the grid, on which others' prompts find it."""
    return max(PIECE_BYTES // token_bytes // GRID_TOKENS, 1) * GRID_TOKENS
