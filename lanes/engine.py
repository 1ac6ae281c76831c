"""The engine: one model, the prompts on their way and the lane of merged rows. It computes and decides nothing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

from lanes.adapters import Adapters
from lanes.adopt import adopt
from lanes.cuda_carrier import device_carrier
from lanes.cuda_fetch import device_fetch
from lanes.decoder import NOTHING, Decoder, Dispatched, Queued
from lanes.grammar import GrammarError, Grammars
from lanes.kept_memory import KeptMemory
from lanes.lane import (
    Adapter,
    Chunk,
    EngineFailed,
    EngineGauges,
    LoadedAdapter,
    Logprob,
    ModelInfo,
    RowSpec,
    Sampling,
    Step,
    StepResult,
)
from lanes.prefill import Prefill, dispatch_together
from lanes.remember import Holding, RowMemory
from lanes.rows import held_alone
from lanes.solo import RowMaker
from lanes.speculation import Speculation

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Aside:
    """A row that was set aside: its caches of `length` tokens, the last of these (see Decoder.recent_of), and the step
    that drew its next input."""

    row: list[Any]
    length: int
    sampling: Sampling
    recent: mx.array | None
    drawn_by: Dispatched


class MlxEngine:
    """Runs turns on the model's thread; see lanes.lane.Engine.

    A step is read in the next turn, when that turn's own step is under way, and a chunk is queued behind its turn's
    step, so that the device has work while Python has none for it. early_reads is for devices where dispatching waits
    for most of the work, as MLX does on the CPU, so that tokens would be a step and a chunk late for nothing: there, a
    turn with a chunk or with rows that come reads its own step too, and its chunk is held back until the next turn. The
    device does the same work in the same order either way.
    """

    def __init__(
        self,
        make_row: RowMaker,
        info: ModelInfo,
        decoder: Decoder,
        *,
        early_reads: bool = False,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """adapters: those of the decoder's forward pass. speculation: None where no row has drafts."""
        self.make_row = make_row
        self.info = info
        self.decoder = decoder
        self.early_reads = early_reads
        self.grammars = grammars
        self.adapters = adapters or Adapters(make_row.model)
        self.speculation = speculation
        self.memory = RowMemory(make_row, info.remembers, device_carrier(), device_fetch())
        self._prompts: dict[int, Prefill] = {}
        self._aside: dict[int, Aside] = {}
        self._unread: Dispatched | None = None
        self._held_back: tuple[Chunk, tuple[int, ...]] | None = None
        self._failures: list[tuple[int, str]] = []
        self._step_failed_before = False
        self._queued = NOTHING
        self._untold_since_s: float | None = None
        self._queueing_s = 0.0  # since then
        self._kept_memory = KeptMemory()

    def step(self, step: Step) -> StepResult:
        """Carry out a turn; see lanes.lane.Step for the order."""
        started_s = time.perf_counter()
        self._failures = []
        if self._held_back:  # the scheduler counts it as processed
            self._begin_chunk(*self._held_back)
            self._held_back = None
        for wanted in step.freeze:
            self.memory.begin_freeze(wanted, self._holding)
        for row_id in step.leave:
            self._drop(row_id)
        for row_id in step.set_aside:
            self._set_aside(row_id)
        if step.set_aside:
            self._decode(self.decoder.caches.shrink)
        for spec in step.admit:
            self._admit(spec)
        known = [spec for spec in step.admit if spec.recall and not spec.recall.mapped and spec.row_id in self._prompts]
        destinations = tuple((spec.row_id, self.memory.admit(spec)) for spec in known)
        for row_id, was_read in step.recalled:
            self._recalled(row_id, was_read)
        for source, target in step.fork:
            self._fork(source, target)
        for row_id in step.merge:
            self._merge(row_id)
        for row_id in step.bring_back:
            self._bring_back(row_id)
        begun, num_drafted, num_accepted = None, 0, 0
        if len(self.decoder):
            begun = self._dispatch()
        reads_own = self.early_reads and bool(step.chunk or step.merge or step.bring_back)
        if self.speculation and begun:
            num_drafted, num_accepted = self.speculation.book(begun)
            reads_own = reads_own or self.speculation.wants_tokens
        ended = [each for each in (self._unread, begun if reads_own else None) if each]
        # Work that no turn has told of yet began with the turn that dispatched it, or when the one before it was told.
        began_s = started_s if self._untold_since_s is None else self._untold_since_s
        self._unread = None if reads_own else begun
        waiting_for: list[mx.array] = []
        if step.chunk and ended and reads_own:
            self._held_back = (step.chunk, step.sharing)
        elif step.chunk:
            waiting_for = self._begin_chunk(step.chunk, step.sharing)
        tokens: list[tuple[int, int]] = []
        logprobs: list[tuple[int, Logprob]] = []
        chunks: list[Queued] = []
        if ended:
            tokens, logprobs = self._read(ended)
            chunks = [each.behind for each in ended]
        elif step.chunk and not begun:
            self._prompt((step.chunk.row_id, *step.sharing), lambda: mx.eval(waiting_for))
            chunks, self._queued = [self._queued], NOTHING
        now_s = time.perf_counter()
        # What queueing a chunk took the host is told with the chunk, not with a step that it was queued behind.
        seconds = now_s - began_s - self._queueing_s + sum(each.seconds for each in chunks)
        is_told = bool(ended or (step.chunk and not begun))
        is_left = self._unread is not None or self._held_back is not None
        self._untold_since_s = (now_s if is_told else began_s) if is_left else None
        if is_told or not is_left:
            self._queueing_s = 0.0
        for row_id, _ in self._failures:
            self._forget(row_id)
        self._kept_memory.let_go(is_idle=not (len(self.decoder) or self._prompts or self._aside))
        return StepResult(
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            failures=tuple(self._failures),
            seconds=seconds,
            steps=len(ended),
            rows_decoded=ended[-1].num_rows if ended else 0,
            chunk_tokens=sum(each.tokens for each in chunks),
            rows=len(self.decoder),
            in_flight=self._unread is not None,
            frozen=self.memory.take_frozen(is_step_behind=self._unread is not None),
            destinations=destinations,
            saved_bytes=self.memory.saved_bytes,
            drafted_tokens=num_drafted,
            accepted_tokens=num_accepted,
        )

    def _holding(self, row_id: int) -> Holding | None:
        """What a row holds; None where it is gone: its chunk that was held back may have failed in this very turn."""
        caches = self.decoder.caches
        if row_id in self._prompts:
            prompt = self._prompts[row_id]
            return Holding(held_alone(prompt.caches, prompt.processed), prompt.processed)
        if row_id in self._aside:
            aside = self._aside[row_id]
            return Holding(held_alone(aside.row, aside.length), aside.length)
        if row_id in caches.table:
            return Holding(caches.held(row_id), caches.table.length_of(row_id), caches.may_be_held)
        return None

    def _drop(self, row_id: int) -> None:
        self._prompts.pop(row_id, None)
        self._aside.pop(row_id, None)
        self._forget(row_id)
        if self.grammars:
            self.grammars.leave(row_id)
        if row_id in self.decoder.caches.table:
            self.decoder.leave(row_id)

    def _forget(self, row_id: int) -> None:
        self.memory.forget(row_id)
        self.adapters.leave(row_id)
        if self.speculation:
            self.speculation.leave(row_id)

    def _admit(self, spec: RowSpec) -> None:
        if spec.sampling.grammar is not None:
            assert self.grammars is not None, f"row {spec.row_id} has a grammar, but there is nothing to match it"
            try:
                self.grammars.admit(spec.row_id, spec.sampling.grammar)
            except GrammarError as error:
                self._failures.append((spec.row_id, f"the grammar is none: {error}"))
                return
        if spec.adapter is not None:
            self.adapters.admit(spec.row_id, spec.adapter)
        prompt, recall = Prefill(self.make_row, spec, self._multiple_for(spec)), spec.recall
        self._prompts[spec.row_id] = prompt
        if recall is not None and recall.mapped is not None:
            self._prompt((spec.row_id,), lambda: prompt.take_up(adopt(self.make_row(), recall), recall.tokens))

    def _multiple_for(self, spec: RowSpec) -> int:
        """A model that looks positions up has none beyond its context."""
        multiple, context_tokens = self.info.chunk_multiple, self.info.context_tokens or math.inf
        return multiple if len(spec.prompt) + multiple <= context_tokens else 1

    def _recalled(self, row_id: int, was_read: bool) -> None:
        prompt, thaw = self._prompts.get(row_id), self.memory.recalled(row_id)
        if prompt is None or not was_read:
            return

        def take_up() -> None:
            assert thaw is not None, "no memory was made for what is known of it"
            prompt.take_up(thaw.caches(), thaw.tokens)

        self._prompt((row_id,), take_up)

    def _fork(self, source: int, target: int) -> None:
        """The caches are shared until both are merged in this turn, which copies them."""
        prompt = self._prompts.get(source)
        if prompt is not None:
            self._prompts[target].take_up(prompt.caches, prompt.processed)
            self.memory.fork(source, target)
        elif self._prompts.pop(target, None) is not None:
            self._failures.append((target, "the prompt that it shares with another row has failed"))

    def _merge(self, row_id: int) -> None:
        prompt = self._prompts.pop(row_id, None)
        if prompt is None:  # its last chunk, held back, has failed in this very turn
            return
        assert prompt.is_complete, f"row {row_id} has {prompt.processed} of {len(prompt.spec.prompt)} tokens processed"
        spec, window = prompt.spec, prompt.spec.sampling.window
        recent = mx.array(spec.prompt[:-1][-window:], dtype=mx.int32) if window else None
        self._decode(
            lambda: self.decoder.merge(row_id, prompt.caches, prompt.processed, spec.prompt[-1], spec.sampling, recent),
            concerned=(row_id,),
        )
        if self.speculation and row_id in self.decoder.caches.table:
            self.speculation.enter(row_id, spec.prompt, spec.sampling)

    def _set_aside(self, row_id: int) -> None:
        """The step under way still is the row's: what it draws is the input when the row comes back."""
        table = self.decoder.caches.table
        if row_id not in table:  # a failure has ended all rows of the lane, in this very turn
            return
        length, sampling, drawn_by = table.length_of(row_id), self.decoder.sampling_of(row_id), self.decoder.last
        assert drawn_by is not None, f"row {row_id} is set aside before its first step"
        taken = self._decode(lambda: (self.decoder.recent_of(row_id), self.decoder.set_aside(row_id)))
        if taken is not None:
            recent, row = taken
            self._aside[row_id] = Aside(row, length, sampling, recent, drawn_by)

    def _bring_back(self, row_id: int) -> None:
        aside = self._aside.pop(row_id)

        def merge() -> None:
            token = dict(aside.drawn_by.read())[row_id]
            self.decoder.merge(row_id, aside.row, aside.length, token, aside.sampling, aside.recent)
            if self.grammars:
                self.grammars.accept({row_id: token})

        self._decode(merge, concerned=(row_id,))

    def _dispatch(self) -> Dispatched | None:
        """Begin a step of the merged rows."""
        queued, self._queued = self._queued, NOTHING
        grammars = self.grammars
        drafts = self.speculation.draft(self.decoder.caches.table) if self.speculation else {}
        if grammars is None or not grammars.concern(self.decoder.caches.table.rows):
            return self._decode(lambda: self.decoder.dispatch(queued, drafts=drafts))
        # The step before is read in here: should that fail, the rows that it was the last step of are concerned.
        unread = self._unread.rows if self._unread else ()
        begun = self._decode(
            lambda: self.decoder.dispatch(queued, grammars.allow, drafts),
            concerned=tuple(row for row in unread if row is not None),
        )
        if begun is None:
            self._unread = None
        for row_id, reason in grammars.take_failures():
            if row_id in self.decoder.caches.table:
                self.decoder.leave(row_id)
                self._failures.append((row_id, reason))
        return begun

    def _read(self, steps: list[Dispatched]) -> tuple[list[tuple[int, int]], list[tuple[int, Logprob]]]:
        # Rows that have left since are waiting for this last token of theirs.
        concerned = tuple(row for each in steps for row in each.rows if row is not None)
        read = self._decode(lambda: [(each.read(), each.read_logprobs()) for each in steps], concerned)
        if read is None:
            self._unread = None  # it stands on the step that failed
            return [], []
        self._step_failed_before = False
        tokens = [drawn for drawn_in_step, _ in read for drawn in drawn_in_step]
        if self.speculation:
            self.speculation.take(tokens)
        return tokens, [said for _, logprobs in read for said in logprobs]

    def _begin_chunk(self, chunk: Chunk, sharing: tuple[int, ...]) -> list[mx.array]:
        """Queue a chunk behind the step that is dispatched; returns what to wait for."""
        row_ids = (chunk.row_id, *sharing)
        prompts = [self._prompts[row_id] for row_id in row_ids if row_id in self._prompts]
        if not prompts:
            return []
        began_s, before = time.perf_counter(), sum(prompt.processed for prompt in prompts)
        with self.adapters.of_rows([prompt.spec.row_id for prompt in prompts]):
            if sharing:
                begun = self._prompt(row_ids, lambda: dispatch_together(self.make_row, prompts))
            else:
                begun = self._prompt(row_ids, lambda: prompts[0].dispatch(chunk))
        if begun and chunk.save and prompts[0].spec.row_id == chunk.row_id:
            begun += self.memory.save(chunk.row_id, prompts[0].caches, chunk.stop)
        tokens, seconds = sum(prompt.processed for prompt in prompts) - before, time.perf_counter() - began_s
        self._queued = Queued(self._queued.tokens + tokens, self._queued.seconds + seconds)
        self._queueing_s += seconds
        return begun or []

    def _prompt(self, row_ids: tuple[int, ...], work: Callable[[], T]) -> T | None:
        """Do prompts' work; should it fail, these rows end alone."""
        try:
            return work()
        except Exception as error:
            for row_id in row_ids:
                self._prompts.pop(row_id, None)
                self._failures.append((row_id, f"processing the prompt failed: {error}"))
            return None

    def _decode(self, work: Callable[[], T], concerned: tuple[int, ...] = ()) -> T | None:
        """Do work of the lane. Should it fail, its rows and those concerned end; a second time in a row, all ends."""
        rows = {row for row in self.decoder.caches.table.rows if row is not None}.union(concerned)
        try:
            return work()
        except Exception as error:
            if self._step_failed_before:
                raise EngineFailed(f"two steps in a row failed, the last with: {error}") from error
            self._step_failed_before = True
            self.decoder.clear()
            self._failures.extend((row, f"the model's step failed: {error}") for row in sorted(rows))
            return None

    def load_adapter(self, adapter: Adapter) -> LoadedAdapter:
        return self.adapters.load(adapter)

    def unload_adapter(self, digest: str) -> None:
        self.adapters.unload(digest)

    def gauges(self) -> EngineGauges:
        caches = self.decoder.caches
        if not (caches.table or self._prompts or self._aside):
            mx.synchronize()  # the chunk of a prompt that was cancelled may still hold memory
        prompts = sum(prompt.nbytes for prompt in self._prompts.values())
        aside = sum(cache.nbytes for row in self._aside.values() for cache in row.row if not cache.empty())
        return EngineGauges(
            slots=caches.slots,
            slots_used=len(caches.table),
            capacity_tokens=caches.capacity_tokens,
            lengths=tuple(caches.table.lengths),
            cache_bytes=caches.nbytes + prompts + aside + self.memory.nbytes,
            mlx_active_bytes=mx.get_active_memory(),
            mlx_cache_bytes=mx.get_cache_memory(),
            mlx_peak_bytes=mx.get_peak_memory(),
            row_ids=tuple(caches.table.rows),
        )

    def check(self) -> None:
        self.decoder.check()
        assert self._held_back is None or self._prompts, f"{self._held_back} of no prompt"
        places = [*self._prompts, *self._aside, *(row for row in self.decoder.caches.table.rows if row is not None)]
        assert len(places) == len(set(places)), f"a row is in two places: {sorted(places)}"
        assert self.memory.rows <= set(places), f"rows {self.memory.rows} are remembered, {sorted(places)} are there"
        assert self.adapters.rows <= set(places), f"rows {self.adapters.rows} have adapters, {sorted(places)} are there"
        bound = self.grammars.rows if self.grammars else set()
        assert bound <= set(places), f"rows {sorted(bound)} have grammars, {sorted(places)} are there"
        drafting = self.speculation.rows if self.speculation else set()
        assert drafting <= set(places), f"rows {sorted(drafting)} have drafts, {sorted(places)} are there"
