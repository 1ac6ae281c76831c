"""What the daemon does for its connections: checks and tokenizes prompts, queues requests, answers for the state."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import trio

from lanes.lane import Grammar, ModelInfo
from scheduler import log, reports
from scheduler.adapters import AdapterNames, namespace_of
from scheduler.errors import Refused
from scheduler.loop import Loop
from scheduler.memory import resident_bytes
from scheduler.metrics import Metrics
from scheduler.options import Options
from scheduler.prompts import Prompts
from scheduler.protocol import (
    PROTOCOL_VERSION,
    Adapters,
    Done,
    Error,
    Hello,
    LoadAdapter,
    Reply,
    Status,
    Submit,
    UnloadAdapter,
)
from scheduler.request import Request, Wish
from scheduler.sampling import sampling_of, seed_of
from scheduler.tokenizer import Tokenizer
from scheduler.transcript import transcript_of
from store.keeping import KeeperAway
from store.store import Store

logger = logging.getLogger(__name__)


class Service:
    """One for the daemon; all connections share it."""

    def __init__(
        self, options: Options, info: ModelInfo, tokenizer: Tokenizer, loop: Loop, metrics: Metrics, version: str
    ) -> None:
        self.options = options
        self.info = info
        self.tokenizer = tokenizer
        self.loop = loop
        self.metrics = metrics
        self.version = version
        self.name = options.served_model_name or info.name
        limits = [limit for limit in (info.context_tokens, options.max_model_len) if limit is not None]
        self.context_tokens = min(limits) if limits else None
        self.adapters = AdapterNames(loop)
        loop.idle_checks.append(self.adapters.check)
        self.is_draining = False
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.addresses: dict[str, Any] = {}
        self._row_ids = count(1)
        self._prompts = Prompts(info, tokenizer, self.context_tokens)
        self._started_s = time.monotonic()

    @property
    def store(self) -> Store | None:
        remembering = self.loop.scheduler.remembering
        return remembering.store if remembering else None

    @property
    def retry_after_s(self) -> float:
        return self.loop.scheduler.retry_after_s

    def hello(self) -> Hello:
        return Hello(version=PROTOCOL_VERSION, server=f"laned {self.version}", model=self.name)

    async def submit(self, message: Submit, reply: Callable[[Reply], None]) -> int:
        """Queue a request; see scheduler.connection.Service. Raises Refused."""
        arrived_s = trio.current_time()
        self.metrics.arrived()
        try:
            self._refuse_when_ending()
            self.loop.scheduler.check_number(message.n)
            with trio.move_on_at(arrived_s + (message.timeout_s or math.inf)) as patience:
                requests = await self._prepare(message, reply, arrived_s)
            if patience.cancelled_caught:
                raise Refused("timed_out", f"it could not be queued within {message.timeout_s:g} s")
            request = requests[0]
            try:
                self._refuse_when_ending()
                self.adapters.require(request.wish.adapter)
                self.loop.scheduler.submit(*requests)
                self.adapters.hold(request.wish.adapter, len(requests))
            except Refused:
                request.forget_found()
                raise
        except trio.Cancelled:
            self._book_unqueued(message, "cancelled", "cancelled", arrived_s)
            raise
        except Refused as refused:
            self._book_unqueued(message, "refused", refused.code, arrived_s, refused.message)
            raise
        except Exception as error:
            self._book_unqueued(message, "failed", "internal", arrived_s, f"{type(error).__name__}: {error}")
            raise
        for _ in requests[1:]:
            self.metrics.arrived()
        self.loop.wake()
        return request.row_id

    async def _prepare(self, message: Submit, reply: Callable[[Reply], None], arrived_s: float) -> list[Request]:
        """What is to be queued, one for each answer; all that takes time is done. Raises Refused."""
        prompt, system_tokens = await self._prompts.tokenize(
            message, self.options.chat_template_args, is_kept=self.store is not None
        )
        wish = self._wish(message, prompt, system_tokens)
        compiled = None if wish.sampling.grammar is None else await self._compile(wish.sampling.grammar)
        requests = self._requests(message, wish, reply, arrived_s)
        for request in requests:
            request.compiled = compiled
        if self.store is not None and wish.reads_store:
            requests[0].found = found = await self.store.find(prompt, wish.namespace, len(prompt) - 1)
            self.metrics.store_asked(hit=found.tokens > 0)
        return requests

    async def _compile(self, grammar: Grammar) -> object:
        try:
            return await trio.to_thread.run_sync(self.tokenizer.compile_grammar, grammar, abandon_on_cancel=True)
        except ValueError as error:
            raise Refused("bad_request", f"structured_outputs: {error}") from error

    def _requests(self, message: Submit, wish: Wish, reply: Callable[[Reply], None], arrived_s: float) -> list[Request]:
        """One for each of the answers that are asked for; all but the first follow that one."""
        requests: list[Request] = []
        for index in range(message.n):
            own = wish
            if message.n > 1:
                sampling = replace(wish.sampling, seed=seed_of(wish.sampling.seed, index))
                own = replace(wish, sampling=sampling, index=index)
            requests.append(self._request(message, own, reply, arrived_s))
            requests[-1].first = requests[-1].leader = requests[0] if index else None
        return requests

    def _request(self, message: Submit, wish: Wish, reply: Callable[[Reply], None], arrived_s: float) -> Request:
        transcript = transcript_of(message, wish.prompt, self.tokenizer)
        request = Request(
            next(self._row_ids), wish, transcript, lambda said: self._tell(request, reply, said), arrived_s
        )
        return request

    def _refuse_when_ending(self) -> None:
        if self.is_draining or self.loop.failure is not None:
            raise Refused("shutting_down", "the daemon is shutting down: try again when it is back")

    async def change_adapters(self, message: LoadAdapter | UnloadAdapter) -> Adapters:
        """Load or unload one; see scheduler.connection.Service. Raises Refused."""
        self._refuse_when_ending()
        if isinstance(message, LoadAdapter):
            await self.adapters.load(message.name, message.path)
        else:
            self.adapters.unload(message.name)
        return Adapters(message.id, tuple(self.adapters.report()))

    @property
    def num_given_up(self) -> int:
        return 0 if self.store is None else self.store.num_given_up

    async def flush(self) -> bool:
        """See scheduler.connection.Service."""
        if self.store is None or not self.store.is_kept:
            return False
        # Who has an answer and flushes then means that one, too.
        await self.loop.wait_booked()
        try:
            return await self.store.flush()
        except KeeperAway:
            return False

    def cancel(self, row_id: int) -> None:
        scheduler = self.loop.scheduler
        following = [r.row_id for r in scheduler.requests.values() if r.first and r.first.row_id == row_id]
        for each in (row_id, *following):
            scheduler.cancel(each, trio.current_time())
        self.loop.wake()

    def _wish(self, message: Submit, prompt: tuple[int, ...], system_tokens: int | None) -> Wish:
        options, adapter = self.options, self.adapters.digest_of(message.adapter)
        max_tokens = options.max_tokens if message.max_tokens is None else message.max_tokens
        if self.context_tokens is not None:
            max_tokens = min(max_tokens, self.context_tokens - len(prompt))
        budget = self.loop.scheduler.budget
        if not budget.admits_alone(tokens := len(prompt) + max_tokens):
            raise Refused(
                "context_length_exceeded",
                f"{len(prompt)} prompt tokens and {max_tokens} new ones do not fit into the {budget.limit_bytes >> 20} "
                f"MiB for keys and values (--kv-cache-memory-bytes), even alone: {budget.most_alone(tokens)} tokens of "
                "both together would",
            )
        eos = frozenset[int]() if message.ignore_eos else self.tokenizer.eos_token_ids
        stops = eos.union(message.stop_token_ids)
        sampling = sampling_of(
            message,
            options,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            vocabulary=self.info.vocab_size,
            end_token_ids=stops,
            # mlx-lm's choice of what XTC never leaves out.
            spared=(*self.tokenizer.encode("\n"), *self.tokenizer.eos_token_ids) if message.xtc_probability else (),
        )
        return Wish(
            message.id,
            prompt,
            max_tokens,
            sampling,
            stops,
            message.stream,
            priority=message.priority,
            timeout_s=message.timeout_s,
            namespace=namespace_of(message.cache_salt, adapter),
            adapter=adapter,
            reads_store=message.cache in ("both", "read"),
            writes_store=message.cache in ("both", "write"),
            system_tokens=system_tokens,
        )

    def _tell(self, request: Request, reply: Callable[[Reply], None], said: Reply) -> None:
        if isinstance(said, Done | Error):
            self._book(request, said)
        reply(said)

    def _book_unqueued(
        self, message: Submit, outcome: str, finish: str, arrived_s: float, error: str | None = None
    ) -> None:
        """A request that has ended before it was one of the scheduler's."""
        total_s = trio.current_time() - arrived_s
        self.metrics.finished(outcome, total_s)
        self.outcomes[outcome] += 1
        log.request_finished(
            logger,
            request_id=message.id,
            finish=finish,
            queued_s=total_s,
            total_s=total_s,
            message=error,
            is_refused=outcome == "refused",
        )

    def _book(self, request: Request, end: Done | Error) -> None:
        assert request.outcome is not None
        self.adapters.release(request.wish.adapter)
        timings = request.timings(trio.current_time())
        self.metrics.finished(request.outcome, timings.total_s, request.num_generated)
        self.outcomes[request.outcome] += 1
        self.tokens["prompt"] += len(request.wish.prompt)
        self.tokens["generated"] += request.num_generated
        log.request_finished(
            logger,
            request_id=request.wish.client_id,
            finish=end.finish_reason if isinstance(end, Done) else end.code,
            prompt_tokens=len(request.wish.prompt),
            completion_tokens=request.num_generated,
            cached_tokens=request.num_recalled,
            queued_s=timings.queued_s,
            ttft_s=timings.ttft_s,
            decode_s=timings.decode_s,
            total_s=timings.total_s,
            index=request.wish.index,
            message=end.message if isinstance(end, Error) else None,
            prompt=self.tokenizer.decode(request.wish.prompt) if self.options.log_prompts else None,
            answer=self.tokenizer.decode(request.answer_token_ids) if self.options.log_prompts else None,
        )

    def status(self) -> Status:
        """The report of `laned status`: for people and dashboards, its keys are no part of the protocol."""
        scheduler, gauges = self.loop.scheduler, self.loop.gauges
        info, now_s = self.info, trio.current_time()
        report: dict[str, Any] = {
            "version": self.version,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started_s,
            **self.addresses,
            "model": {
                "name": self.name,
                "model_type": info.model_type,
                "lane": info.lane,
                "lane_reason": info.lane_reason,
                "dtype": info.dtype,
                "backend": info.backend,
                "blas": info.blas,
                "context_tokens": self.context_tokens,
                "vocab_size": info.vocab_size,
                "weight_bytes": info.weight_bytes,
                "bytes_per_token": info.geometry.column_bytes if info.geometry else None,
            },
            "adapters": self.adapters.report(),
            "rows": {
                "running": scheduler.num_decoding,
                "prefilling": scheduler.num_prefilling,
                "set_aside": scheduler.num_aside,
                "waiting": scheduler.num_waiting,
                "max": scheduler.max_rows,
            },
            "totals": {
                "requests": sum(self.outcomes.values()),
                "completed": self.outcomes["stop"] + self.outcomes["length"],
                "cancelled": self.outcomes["cancelled"],
                "failed": self.outcomes["failed"],
                "refused": self.outcomes["refused"],
                "prompt_tokens": self.tokens["prompt"],
                "generated_tokens": self.tokens["generated"],
            },
            "requests": [reports.under_way(request, now_s) for request in scheduler.under_way],
            "recent": self.metrics.recent.report(),
            "last_errors": log.last_errors(),
            "memory": {"rss_bytes": resident_bytes(), "cache_limit_bytes": scheduler.budget.limit_bytes},
        }
        if self.store is not None:
            report["store"] = reports.store(self.store.stats())
        if gauges is not None:
            report["slots"] = {
                "total": gauges.slots,
                "used": gauges.slots_used,
                "capacity_tokens": gauges.capacity_tokens,
                "cache_bytes": gauges.cache_bytes,
                "rows": list(gauges.row_ids),
                "lengths": list(gauges.lengths),
            }
            report["memory"] |= {
                "mlx_active_bytes": gauges.mlx_active_bytes,
                "mlx_cache_bytes": gauges.mlx_cache_bytes,
                "mlx_peak_bytes": gauges.mlx_peak_bytes,
            }
        return Status(report=report)
