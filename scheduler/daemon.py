"""The daemon from its start to its end: what is opened, in which order, and how it is closed again.

    store's folder -> signals -> model thread -> model -> store -> loop -> metrics over HTTP -> socket

is the nesting; leaving it goes the other way. On SIGTERM or SIGINT new requests are refused, those that run may end
within --drain-timeout, what is left then is told so, and the status is 0. Should the engine fail, all requests are told
and the status is 1, for a supervisor to start the daemon anew. The service manager is told of each of these, and may
have opened the socket itself: then clients wait in its backlog from the first moment on.
"""

from __future__ import annotations

import faulthandler
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, TypeVar

import trio

from lanes.lane import Engine, EngineFailed, ModelInfo
from lanes.thread import ModelThread, open_model_thread
from scheduler import log
from scheduler.budget import Budget
from scheduler.connection import Connection, Limits, serve_connection
from scheduler.door import Door
from scheduler.errors import Refused
from scheduler.http import Health, serve_http
from scheduler.listener import SocketUnavailable, accept
from scheduler.loading import build, examine
from scheduler.loop import Loop
from scheduler.memory import leave_out_of_collection
from scheduler.metrics import Metrics, Readings
from scheduler.notify import Notifier
from scheduler.options import Options
from scheduler.progress import LoadingStopped, LoadProgress
from scheduler.rates import make_chunk_size
from scheduler.remembering import Remembering
from scheduler.reread import reread
from scheduler.scheduler import BatchScheduler
from scheduler.service import Service
from scheduler.signals import Signals
from scheduler.storing import memory_bytes, open_folder, open_remembering
from scheduler.tokenizer import Tokenizer
from scheduler.usage import UsageError
from store.keeping import KeeperAway

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)

# After the last request has been answered, for clients to read what is still on its way to them.
GOODBYE_S = 2.0
# For what was remembered to come to disk, once the last client has gone.
FLUSH_S = 10.0
# Beyond --drain-timeout, for the goodbye and for what is closed after it, before a service manager may kill us.
STOP_EXTENSION_S = 15.0
# A model's thread that has not answered for so long makes /healthz say so. Longer than any chunk of a prompt takes
# on a machine that is of use.
SILENCE_S = 120.0


def serve(options: Options, options_again: Callable[[], Options]) -> int:
    """Run the daemon until a signal ends it; returns the exit status. Raises UsageError where an option is wrong.

    options_again: reads the options anew, on SIGHUP; may raise UsageError.
    """
    console = log.configure(options.log_format, options.log_level)
    # Stacks on standard error when MLX crashes, or when a watchdog's SIGABRT ends a hang.
    faulthandler.enable()
    notifier = Notifier.from_environment()
    door = Door.for_options(options)
    mistakes: list[UsageError] = []
    status = 0
    try:
        trio.run(_serve, options, options_again, door, LoadProgress(console, notifier), notifier)
    except* UsageError as group:
        mistakes = _leaves(group)
    except* EngineFailed as group:
        logger.critical("the engine has failed: %s", _leaves(group)[0])
        status = 1
    if mistakes:
        raise mistakes[0]
    return status


def inspect(options: Options) -> tuple[ModelInfo, Mapping[str, Any]]:
    """Load a model and tell what lanes.inspect does of it. Raises UsageError, in a group, where an option is wrong."""
    console = log.configure(options.log_format, options.log_level)
    return trio.run(_inspect, options, LoadProgress(console))


def try_out(options: Options, use: Callable[[Service], Awaitable[None]]) -> None:
    """Load a model and call use() with its service, which no client can reach. Raises in groups: UsageError where an
    option is wrong, and what use() raises."""
    console = log.configure(options.log_format, options.log_level)
    trio.run(_try_out, options, use, LoadProgress(console))


def _leaves(group: BaseExceptionGroup[E]) -> list[E]:
    """The exceptions in a group of groups."""
    found: list[E] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


async def _serve(
    options: Options, options_again: Callable[[], Options], door: Door, progress: LoadProgress, notifier: Notifier
) -> None:
    signals = Signals(progress.stop)
    async with open_folder(options) as folder, trio.open_nursery() as nursery:
        await nursery.start(signals.watch)
        async with open_model_thread() as thread:
            with progress:
                try:
                    engine, tokenizer, fingerprint = await thread.run(build, options, progress)
                except LoadingStopped:
                    logger.info("stopped while the model was loading")
                    nursery.cancel_scope.cancel()
                    return
            async with open_remembering(options, engine.info, fingerprint, folder) as remembering:
                daemon = Daemon(options, thread, engine, tokenizer, notifier, remembering)
                leave_out_of_collection()
                await daemon.run(signals, options_again, door)
        nursery.cancel_scope.cancel()


async def _inspect(options: Options, progress: LoadProgress) -> tuple[ModelInfo, Mapping[str, Any]]:
    async with open_model_thread() as thread:
        with progress:
            try:
                return await thread.run(examine, options, progress)
            except KeyboardInterrupt:
                progress.stop()
                raise


async def _try_out(options: Options, use: Callable[[Service], Awaitable[None]], progress: LoadProgress) -> None:
    async with open_folder(options) as folder, open_model_thread() as thread:
        with progress:
            try:
                engine, tokenizer, fingerprint = await thread.run(build, options, progress)
            except KeyboardInterrupt:
                progress.stop()
                raise
        async with (
            open_remembering(options, engine.info, fingerprint, folder) as remembering,
            Daemon(options, thread, engine, tokenizer, Notifier(), remembering).without_socket() as service,
        ):
            await use(service)


def _limits(options: Options) -> Limits:
    return Limits(
        hello_s=options.hello_timeout,
        outbox_bytes=options.outbox_bytes,
        stalled_s=options.client_timeout,
        requests=options.max_requests_per_connection,
    )


class Daemon:
    """What runs once the model is loaded."""

    def __init__(
        self,
        options: Options,
        thread: ModelThread,
        engine: Engine,
        tokenizer: Tokenizer,
        notifier: Notifier,
        remembering: Remembering | None = None,
    ) -> None:
        self.options = options
        self._remembering = remembering
        self._notifier = notifier
        info = engine.info
        self.metrics = Metrics(self._readings)
        self.metrics.loaded(engine.info)
        budget = Budget.for_model(info, options.kv_cache_memory_bytes, memory_bytes(options, info))
        chunk_size = make_chunk_size(options.prefill_step_size, options.max_stall_ms / 1000, info.chunk_multiple)
        scheduler = BatchScheduler(
            info.max_rows, options.max_queue, chunk_size, budget, info.shared_prompt_tokens, remembering
        )
        self.loop = Loop(scheduler, engine, thread, self.metrics, notifier)
        self.service = Service(options, engine.info, tokenizer, self.loop, self.metrics, version("laned"))
        self._limits = _limits(options)
        self._connections: set[Connection] = set()
        self.loop.idle_checks.append(self._check_connections)
        self._goodbye = trio.Event()

    async def run(self, signals: Signals, options_again: Callable[[], Options], door: Door) -> None:
        """Serve until a signal says stop, then drain. Raises EngineFailed, at the end, if the engine cannot go on."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_loop, signals.stop)
            self._start_recalls(nursery)
            if self.options.metrics_port is not None:
                await self._open_metrics(nursery, self.options.metrics_host, self.options.metrics_port)
            await self._load_adapters()
            self.service.addresses["socket"] = door.name
            async with trio.open_nursery() as clients:
                await self._accept(signals, options_again, door, clients)
                await self._drain()
                clients.cancel_scope.deadline = trio.current_time() + GOODBYE_S
            await self._flush()
            nursery.cancel_scope.cancel()
        if self.loop.failure is not None:
            raise EngineFailed(self.loop.failure)

    @asynccontextmanager
    async def without_socket(self) -> AsyncIterator[Service]:
        """The service, which no client can reach, for as long as the block lasts."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.loop.run)
            self._start_recalls(nursery)
            await self._load_adapters()
            yield self.service
            nursery.cancel_scope.cancel()

    def _start_recalls(self, nursery: trio.Nursery) -> None:
        if self._remembering is not None:
            nursery.start_soon(self.loop.run_recalls, self._remembering.store)

    async def _load_adapters(self) -> None:
        """Those of the options. Raises UsageError."""
        try:
            await self.service.adapters.load_all(self.options.adapter)
        except Refused as refused:
            raise UsageError(f"--adapter: {refused.message}") from None

    async def _run_loop(self, stop: trio.Event) -> None:
        """The loop has told every request of the engine's failure; what is left to do is what a signal asks for."""
        try:
            await self.loop.run()
        except EngineFailed:
            stop.set()

    async def _accept(
        self, signals: Signals, options_again: Callable[[], Options], door: Door, clients: trio.Nursery
    ) -> None:
        """Until the end is asked for."""
        try:
            async with door.open() as listener, trio.open_nursery() as accepting:
                accepting.start_soon(
                    accept, listener, self._serve_client, clients, door.access, lambda: self.service.retry_after_s
                )
                logger.info("serving %s on %s", self.service.name, door.name)
                self._notifier.ready(self._state())
                # One that came while the model was loading is answered now, and none once we are going down.
                accepting.start_soon(self._reload_when_asked, signals, options_again)
                await signals.stop.wait()
                accepting.cancel_scope.cancel()
        except SocketUnavailable as unavailable:
            raise UsageError(f"--socket: {unavailable}") from None

    async def _open_metrics(self, nursery: trio.Nursery, host: str, port: int) -> None:
        try:
            port = await nursery.start(serve_http, host, port, self.metrics, self.health)
        except OSError as error:
            raise UsageError(f"--metrics-port {port}: {error.strerror or error}") from error
        self.service.addresses |= {"metrics_host": host, "metrics_port": port}
        logger.info("metrics on http://%s:%d/metrics", host, port)

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        self.metrics.connected()
        cut_by = await serve_connection(stream, self.service, self._limits, self._goodbye, self._connections)
        if cut_by is not None:
            self.metrics.connection_refused(cut_by)

    def _check_connections(self) -> None:
        for connection in self._connections:
            connection.check()

    async def _drain(self) -> None:
        """Let what runs end, within the time that is allowed, and say so to the rest."""
        self.service.is_draining = True
        running = len(self.loop.scheduler.requests)
        patience_s = 0.0 if self.loop.failure else self.options.drain_timeout
        self._notifier.stopping(f"Finishing {running} requests", patience_s + STOP_EXTENSION_S)
        with trio.move_on_after(patience_s) as patience:
            await self.loop.wait_idle()
        if patience.cancelled_caught:
            left = len(self.loop.scheduler.requests)
            logger.warning("%d of %d requests have not ended within %g s", left, running, self.options.drain_timeout)
            self.loop.scheduler.fail_all(
                "shutting_down", "the daemon has shut down before the answer was complete", trio.current_time()
            )
            self.loop.wake()
        self._goodbye.set()

    async def _flush(self) -> None:
        """Get on disk what the requests have left, those too that were told to end."""
        if self._remembering is None:
            return
        with trio.move_on_after(FLUSH_S) as patience:
            await self.loop.wait_idle()
            with suppress(KeeperAway):
                await self._remembering.store.flush()
        if patience.cancelled_caught:
            logger.warning("not all that was remembered is on disk after %g s", FLUSH_S)

    async def _reload_when_asked(self, signals: Signals, options_again: Callable[[], Options]) -> None:
        while True:
            await signals.reload_asked()
            self._notifier.reloading()
            try:
                self.reload(options_again())
            except UsageError as mistake:
                logger.error("SIGHUP: all stays as it was: %s", mistake)
            self._notifier.ready(self._state())

    def reload(self, told: Options) -> None:
        """Take of other options what a running daemon can, and say what it cannot."""
        before, change = self.options, reread(self.options, told)
        options = self.options = self.service.options = change.options
        if (options.log_format, options.log_level) != (before.log_format, before.log_level):
            log.configure(options.log_format, options.log_level)
        self._limits = _limits(options)
        scheduler = self.loop.scheduler
        scheduler.max_queue = options.max_queue
        scheduler.chunk_size.largest_tokens = options.prefill_step_size
        scheduler.chunk_size.max_stall_s = options.max_stall_ms / 1000
        for sentence in change.taken:
            logger.info("SIGHUP: %s", sentence)
        for sentence in change.refused:
            logger.warning("SIGHUP: %s", sentence)
        if not change.taken and not change.refused:
            logger.info("SIGHUP: the options are as they were")

    def _state(self) -> str:
        return f"Serving {self.service.name} on {self.service.addresses['socket']}"

    def health(self) -> Health:
        """For /healthz: the engine's health, not the web server's."""
        if self.loop.failure is not None:
            return Health(False, f"the engine has failed: {self.loop.failure}")
        if self.service.is_draining:
            return Health(False, "the daemon is shutting down")
        if self.loop.silent_s > SILENCE_S:
            return Health(False, f"the model's thread has not answered for {self.loop.silent_s:.0f} s")
        return Health(True)

    def _readings(self) -> Readings:
        scheduler = self.loop.scheduler
        return Readings(
            running=scheduler.num_decoding,
            waiting=scheduler.num_waiting,
            prefilling=scheduler.num_prefilling,
            aside=scheduler.num_aside,
            max_rows=scheduler.max_rows,
            connections=len(self._connections),
            heartbeat_unix_s=time.time() - self.loop.silent_s,
            engine=self.loop.gauges,
            store=self._remembering.store.stats() if self._remembering else None,
        )
