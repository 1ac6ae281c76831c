"""The engine: one model, the prompts on their way and the lane of merged rows. It computes and decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

from lanes.decoder import Decoder, Dispatched
from lanes.lane import Chunk, EngineFailed, EngineGauges, ModelInfo, Sampling, Step, StepResult
from lanes.prefill import Prefill, dispatch_together
from lanes.solo import RowMaker

T = TypeVar("T")

# Memory that MLX keeps for reuse. A prompt's chunks allocate and free the same few shapes over and over, but without
# a bound every shape ever used stays.
MLX_CACHE_LIMIT_BYTES = 1 << 30


@dataclass(slots=True)
class Aside:
    """A row that was set aside: its caches of `length` tokens, and the token that comes next once it is read."""

    row: list[Any]
    length: int
    sampling: Sampling
    next_token: int | None = None


class MlxEngine:
    """Runs turns on the model's thread; see lanes.lane.Engine."""

    def __init__(self, make_row: RowMaker, info: ModelInfo, decoder: Decoder) -> None:
        self.make_row = make_row
        self.info = info
        self.decoder = decoder
        self._prompts: dict[int, Prefill] = {}
        self._aside: dict[int, Aside] = {}
        self._unread: Dispatched | None = None
        self._failures: list[tuple[int, str]] = []
        self._step_failed_before = False
        self._queued_tokens = 0
        self._turn_ended_s = time.perf_counter()
        mx.set_cache_limit(MLX_CACHE_LIMIT_BYTES)

    def step(self, step: Step) -> StepResult:
        """Carry out a turn; see lanes.lane.Step for the order."""
        started_s = time.perf_counter()
        self._failures = []
        for row_id in step.leave:
            self._drop(row_id)
        for row_id in step.set_aside:
            self._set_aside(row_id)
        if step.set_aside:
            self._decode(self.decoder.caches.shrink)
        for spec in step.admit:
            self._prompts[spec.row_id] = Prefill(self.make_row, spec)
        for row_id in step.merge:
            self._merge(row_id)
        for row_id in step.bring_back:
            self._bring_back(row_id)
        previous, self._unread = self._unread, None
        if len(self.decoder):
            self._unread = self._decode(lambda: self.decoder.dispatch(self._queued_tokens))
            self._queued_tokens = 0
        waiting_for = self._begin_chunk(step.chunk, step.sharing) if step.chunk else []
        tokens: list[tuple[int, int]] = []
        chunk_tokens = 0
        if previous:
            tokens, chunk_tokens = self._read(previous), previous.behind_tokens
        elif step.chunk and not self._unread:
            self._prompt((step.chunk.row_id, *step.sharing), lambda: mx.eval(waiting_for))
            chunk_tokens, self._queued_tokens = self._queued_tokens, 0
        now_s = time.perf_counter()
        # A step dispatched by the last turn began when that turn ended; other work begins with this one.
        seconds = now_s - (self._turn_ended_s if previous else started_s)
        self._turn_ended_s = now_s
        return StepResult(
            tokens=tuple(tokens),
            failures=tuple(self._failures),
            seconds=seconds,
            rows_decoded=previous.num_rows if previous else 0,
            chunk_tokens=chunk_tokens,
            rows=len(self.decoder),
            in_flight=self._unread is not None,
        )

    def _drop(self, row_id: int) -> None:
        self._prompts.pop(row_id, None)
        self._aside.pop(row_id, None)
        if row_id in self.decoder.caches.table:
            self.decoder.leave(row_id)

    def _merge(self, row_id: int) -> None:
        prompt = self._prompts.pop(row_id)
        assert prompt.is_complete, f"row {row_id} has {prompt.processed} of {len(prompt.spec.prompt)} tokens processed"
        spec = prompt.spec
        self._decode(
            lambda: self.decoder.merge(row_id, prompt.caches, prompt.processed, spec.prompt[-1], spec.sampling),
            concerned=(row_id,),
        )

    def _set_aside(self, row_id: int) -> None:
        """The step under way still is the row's: what it draws is the input when the row comes back."""
        table = self.decoder.caches.table
        if row_id not in table:  # a failure has ended all rows of the lane, in this very turn
            return
        length, sampling = table.length_of(row_id), self.decoder.sampling_of(row_id)
        row = self._decode(lambda: self.decoder.set_aside(row_id))
        if row is not None:
            self._aside[row_id] = Aside(row, length, sampling)

    def _bring_back(self, row_id: int) -> None:
        aside = self._aside.pop(row_id)
        token = aside.next_token
        assert token is not None, f"row {row_id} comes back before its last token is read"
        self._decode(
            lambda: self.decoder.merge(row_id, aside.row, aside.length, token, aside.sampling),
            concerned=(row_id,),
        )

    def _read(self, dispatched: Dispatched) -> list[tuple[int, int]]:
        # Rows that have left since are waiting for this last token of theirs.
        tokens = self._decode(dispatched.read, concerned=tuple(row for row in dispatched.rows if row is not None))
        if tokens is None:
            self._unread = None  # it stands on the step that failed
            return []
        self._step_failed_before = False
        for row_id, token in tokens:
            if row_id in self._aside and self._aside[row_id].next_token is None:
                self._aside[row_id].next_token = token
        return tokens

    def _begin_chunk(self, chunk: Chunk, sharing: tuple[int, ...]) -> list[mx.array]:
        """Queue a chunk behind the step that is dispatched; returns what to wait for."""
        row_ids = (chunk.row_id, *sharing)
        prompts = [self._prompts[row_id] for row_id in row_ids if row_id in self._prompts]
        if not prompts:
            return []
        before = sum(prompt.processed for prompt in prompts)
        if sharing:
            begun = self._prompt(row_ids, lambda: dispatch_together(self.make_row, prompts))
        else:
            begun = self._prompt(row_ids, lambda: prompts[0].dispatch(chunk))
        self._queued_tokens += sum(prompt.processed for prompt in prompts) - before
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
            cache_bytes=caches.nbytes + prompts + aside,
            mlx_active_bytes=mx.get_active_memory(),
            mlx_cache_bytes=mx.get_cache_memory(),
            mlx_peak_bytes=mx.get_peak_memory(),
        )

    def check(self) -> None:
        self.decoder.check()
        places = [*self._prompts, *self._aside, *(row for row in self.decoder.caches.table.rows if row is not None)]
        assert len(places) == len(set(places)), f"a row is in two places: {sorted(places)}"
