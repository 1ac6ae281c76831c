"""What the daemon does for its connections: checks and tokenizes prompts, queues requests, answers for the state."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import trio

from lanes.lane import ModelInfo, Sampling
from scheduler import log
from scheduler.errors import Refused
from scheduler.loop import Loop
from scheduler.memory import resident_bytes
from scheduler.metrics import Metrics
from scheduler.options import Options
from scheduler.protocol import PROTOCOL_VERSION, Done, Error, Hello, Reply, Status, Submit
from scheduler.request import Request, Wish
from scheduler.text import Decoder, TextStream

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The model's tokenizer and chat template; see lanes.tokenizer."""

    eos_token_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, str]], /, **variables: Any) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def stream(self) -> Decoder: ...


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
        self.is_draining = False
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.addresses: dict[str, Any] = {}
        self._row_ids = count(1)
        self._started_s = time.monotonic()

    def hello(self) -> Hello:
        return Hello(version=PROTOCOL_VERSION, server=f"laned {self.version}", model=self.name)

    async def submit(self, message: Submit, reply: Callable[[Reply], None]) -> int:
        """Queue a request; see scheduler.connection.Service. Raises Refused."""
        arrived_s = trio.current_time()
        self.metrics.arrived()
        try:
            if self.is_draining or self.loop.failure is not None:
                raise Refused("shutting_down", "the daemon is shutting down: try again when it is back")
            wish = self._wish(message, self._prompt(message))
            text = TextStream(self.tokenizer.stream(), message.stop)
            row_id = next(self._row_ids)
            request = Request(row_id, wish, text, lambda said: self._tell(request, reply, said), arrived_s)
            self.loop.scheduler.submit(request)
        except Refused as refused:
            self.metrics.finished("refused", trio.current_time() - arrived_s)
            self.outcomes["refused"] += 1
            logger.info("request %s refused: %s", message.id, refused.message, extra=log.fields(code=refused.code))
            raise
        except Exception:
            self.metrics.finished("failed", trio.current_time() - arrived_s)
            self.outcomes["failed"] += 1
            raise
        self.loop.wake()
        return row_id

    def cancel(self, row_id: int) -> None:
        self.loop.scheduler.cancel(row_id, trio.current_time())
        self.loop.wake()

    def _prompt(self, message: Submit) -> tuple[int, ...]:
        if message.prompt_token_ids is not None:
            prompt = message.prompt_token_ids
            outside = next((token for token in prompt if not 0 <= token < self.info.vocab_size), None)
            if outside is not None:
                raise Refused(
                    "bad_request",
                    f"prompt_token_ids holds {outside}, but the model's ids are 0 to {self.info.vocab_size - 1}",
                )
        elif message.messages is not None:
            chat = [{"role": turn.role, "content": turn.content} for turn in message.messages]
            variables = {**self.options.chat_template_args, **(message.chat_template_kwargs or {})}
            try:
                prompt = tuple(self.tokenizer.encode_chat(chat, **variables))
            except ValueError as error:
                raise Refused("bad_request", str(error)) from error
        else:
            assert message.prompt is not None
            prompt = tuple(self.tokenizer.encode(message.prompt))
        if not prompt:
            raise Refused("bad_request", "the prompt has no tokens: send some text")
        if self.context_tokens is not None and len(prompt) >= self.context_tokens:
            raise Refused(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in the model's context of "
                f"{self.context_tokens}",
            )
        return prompt

    def _wish(self, message: Submit, prompt: tuple[int, ...]) -> Wish:
        options = self.options
        sampling = Sampling(
            temperature=_given(message.temperature, options.temperature),
            top_p=_given(message.top_p, options.top_p),
            top_k=_given(message.top_k, options.top_k),
            min_p=_given(message.min_p, options.min_p),
            seed=_given(message.seed, secrets.randbits(63)),
        )
        max_tokens = _given(message.max_tokens, options.max_tokens)
        if self.context_tokens is not None:
            max_tokens = min(max_tokens, self.context_tokens - len(prompt))
        budget = self.loop.scheduler.budget
        if not budget.admits_alone(len(prompt) + max_tokens):
            raise Refused(
                "context_length_exceeded",
                f"{len(prompt)} prompt tokens and {max_tokens} new ones do not fit into the {budget.limit_bytes >> 20} "
                "MiB for keys and values (--kv-cache-memory-bytes), even alone: ask for less",
            )
        eos = frozenset[int]() if message.ignore_eos else self.tokenizer.eos_token_ids
        stops = eos.union(message.stop_token_ids)
        return Wish(message.id, prompt, max_tokens, sampling, stops, message.stream)

    def _tell(self, request: Request, reply: Callable[[Reply], None], said: Reply) -> None:
        if isinstance(said, Done | Error):
            self._book(request, said)
        reply(said)

    def _book(self, request: Request, end: Done | Error) -> None:
        assert request.outcome is not None
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
            queued_s=timings.queued_s,
            ttft_s=timings.ttft_s,
            decode_s=timings.decode_s,
            total_s=timings.total_s,
            message=end.message if isinstance(end, Error) else None,
            prompt=self.tokenizer.decode(request.wish.prompt) if self.options.log_prompts else None,
        )

    def status(self) -> Status:
        """The report of `laned status`: for people and dashboards, its keys are no part of the protocol."""
        scheduler, gauges = self.loop.scheduler, self.loop.gauges
        info = self.info
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
            "memory": {"rss_bytes": resident_bytes()},
        }
        if gauges is not None:
            report["slots"] = {
                "total": gauges.slots,
                "used": gauges.slots_used,
                "capacity_tokens": gauges.capacity_tokens,
                "cache_bytes": gauges.cache_bytes,
            }
            report["memory"] |= {
                "mlx_active_bytes": gauges.mlx_active_bytes,
                "mlx_cache_bytes": gauges.mlx_cache_bytes,
                "mlx_peak_bytes": gauges.mlx_peak_bytes,
            }
        return Status(report=report)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
