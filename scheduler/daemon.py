"""The daemon from its start to its end: what is opened, in which order, and how it is closed again.

    signals -> model thread -> model -> loop -> metrics over HTTP -> socket

is the nesting; leaving it goes the other way. On SIGTERM or SIGINT new requests are refused, those that run may end
within --drain-timeout, what is left then is told so, and the status is 0. Should the engine fail, all requests are told
and the status is 1, for a supervisor to start the daemon anew.

This is the only file that imports concrete lanes, and it does so on the model's thread, after the BLAS is in place.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from lanes.lane import Engine, EngineFailed, LaneSettings, ModelInfo
from lanes.thread import ModelThread, open_model_thread
from scheduler import log
from scheduler.budget import Budget
from scheduler.connection import Limits, serve_connection
from scheduler.http import Health, serve_http
from scheduler.listener import SocketUnavailable, accept, check_path, default_socket_path, listen
from scheduler.loop import Loop
from scheduler.metrics import Metrics, Readings
from scheduler.options import Options
from scheduler.progress import LoadingStopped, LoadProgress
from scheduler.rates import ChunkSize
from scheduler.scheduler import BatchScheduler
from scheduler.service import Service, Tokenizer
from scheduler.usage import UsageError

if TYPE_CHECKING:
    from lanes.load import LoadedModel

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)

# After the last request has been answered, for clients to read what is still on its way to them.
GOODBYE_S = 2.0


def serve(options: Options) -> int:
    """Run the daemon until a signal ends it; returns the exit status. Raises UsageError where an option is wrong."""
    console = log.configure(options.log_format, options.log_level)
    mistakes: list[UsageError] = []
    status = 0
    try:
        trio.run(_serve, options, LoadProgress(console))
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


def _leaves(group: BaseExceptionGroup[E]) -> list[E]:
    """The exceptions in a group of groups."""
    found: list[E] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


async def _serve(options: Options, progress: LoadProgress) -> None:
    stop = trio.Event()
    try:
        check_path(_socket_path(options))
    except SocketUnavailable as unavailable:
        raise UsageError(f"--socket: {unavailable}") from None
    async with trio.open_nursery() as nursery:
        await nursery.start(_watch_signals, stop, progress)
        async with open_model_thread() as thread:
            with progress:
                try:
                    engine, tokenizer = await thread.run(_build, options, progress)
                except LoadingStopped:
                    logger.info("stopped while the model was loading")
                    nursery.cancel_scope.cancel()
                    return
            await Daemon(options, thread, engine, tokenizer).run(stop)
        nursery.cancel_scope.cancel()


def _socket_path(options: Options) -> Path:
    return Path(options.socket) if options.socket else default_socket_path()


async def _watch_signals(
    stop: trio.Event, progress: LoadProgress, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            logger.info("%s: draining", signal.Signals(number).name)
            progress.stop()
            stop.set()


async def _inspect(options: Options, progress: LoadProgress) -> tuple[ModelInfo, Mapping[str, Any]]:
    async with open_model_thread() as thread:
        with progress:
            try:
                return await thread.run(_examine, options, progress)
            except KeyboardInterrupt:
                progress.stop()
                raise


def _load(options: Options, progress: LoadProgress) -> tuple[LoadedModel, str]:
    """The model and what is told of its BLAS. On the model's thread: everything that imports MLX."""
    from lanes import cuda_environment
    from lanes.blas import BlasError, preload

    cuda_environment.set_variables()
    try:
        blas = preload(options.blas, options.threads)
    except BlasError as error:
        raise UsageError(f"--blas {options.blas}: {error}") from error
    logger.info(blas.sentence)
    from lanes.load import load
    from lanes.sources import LoadError

    try:
        loaded = load(
            options.model,
            trust_remote_code=options.trust_remote_code,
            dtype=options.dtype,
            chat_template=options.chat_template,
            progress=progress,
        )
    except LoadError as error:
        raise UsageError(f"--model {options.model}: {error}") from error
    logger.info("%s: %s", loaded.name, loaded.note)
    return loaded, blas.label


def _build(options: Options, progress: LoadProgress) -> tuple[Engine, Tokenizer]:
    loaded, blas = _load(options, progress)
    from lanes.build import build_engine
    from lanes.solo import CannotQuantize

    try:
        engine = build_engine(loaded, _settings(options), blas)
    except CannotQuantize as error:
        raise UsageError(f"--kv-bits {options.kv_bits}: {error}") from error
    return engine, loaded.tokenizer


def _examine(options: Options, progress: LoadProgress) -> tuple[ModelInfo, Mapping[str, Any]]:
    loaded, blas = _load(options, progress)
    from lanes.inspect import inspect
    from lanes.solo import CannotQuantize

    try:
        return inspect(loaded, _settings(options), blas)
    except CannotQuantize as error:
        raise UsageError(f"--kv-bits {options.kv_bits}: {error}") from error


def _settings(options: Options) -> LaneSettings:
    return LaneSettings(options.max_rows, options.kv_bits, options.kv_group_size, options.compile)


class Daemon:
    """What runs once the model is loaded."""

    def __init__(self, options: Options, thread: ModelThread, engine: Engine, tokenizer: Tokenizer) -> None:
        self.options = options
        info = engine.info
        self.metrics = Metrics(self._readings)
        self.metrics.loaded(engine.info)
        budget = Budget.for_model(info, options.kv_cache_memory_bytes)
        chunk_size = ChunkSize(options.prefill_step_size, options.max_stall_ms / 1000)
        scheduler = BatchScheduler(info.max_rows, options.max_queue, chunk_size, budget, info.shared_prompt_tokens)
        self.loop = Loop(scheduler, engine, thread, self.metrics)
        self.service = Service(options, engine.info, tokenizer, self.loop, self.metrics, version("laned"))
        self._limits = Limits(
            hello_s=options.hello_timeout,
            outbox_bytes=options.outbox_bytes,
            stalled_s=options.client_timeout,
            requests=options.max_requests_per_connection,
        )
        self._connections = 0
        self._goodbye = trio.Event()

    async def run(self, stop: trio.Event) -> None:
        """Serve until stop is set, then drain. Raises EngineFailed, at the end, if the engine could not go on."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_loop, stop)
            if self.options.metrics_port is not None:
                await self._open_metrics(nursery, self.options.metrics_host, self.options.metrics_port)
            path = _socket_path(self.options)
            self.service.addresses["socket"] = str(path)
            async with trio.open_nursery() as clients:
                await self._accept_until(stop, path, clients)
                await self._drain()
                clients.cancel_scope.deadline = trio.current_time() + GOODBYE_S
            nursery.cancel_scope.cancel()
        if self.loop.failure is not None:
            raise EngineFailed(self.loop.failure)

    async def _run_loop(self, stop: trio.Event) -> None:
        """The loop has told every request of the engine's failure; what is left to do is what a signal asks for."""
        try:
            await self.loop.run()
        except EngineFailed:
            stop.set()

    async def _accept_until(self, stop: trio.Event, path: Path, clients: trio.Nursery) -> None:
        try:
            async with listen(path) as listener, trio.open_nursery() as accepting:
                accepting.start_soon(accept, listener, self._serve_client, clients)
                logger.info("serving %s on %s", self.service.name, path)
                await stop.wait()
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
        self._connections += 1
        try:
            cut_by = await serve_connection(stream, self.service, self._limits, self._goodbye)
            if cut_by is not None:
                self.metrics.connection_refused(cut_by)
        finally:
            self._connections -= 1

    async def _drain(self) -> None:
        """Let what runs end, within the time that is allowed, and say so to the rest."""
        self.service.is_draining = True
        running = len(self.loop.scheduler.requests)
        with trio.move_on_after(0 if self.loop.failure else self.options.drain_timeout) as patience:
            await self.loop.wait_idle()
        if patience.cancelled_caught:
            left = len(self.loop.scheduler.requests)
            logger.warning("%d of %d requests have not ended within %g s", left, running, self.options.drain_timeout)
            self.loop.scheduler.fail_all(
                "shutting_down", "the daemon has shut down before the answer was complete", trio.current_time()
            )
        self._goodbye.set()

    def health(self) -> Health:
        """For /healthz: the engine's health, not the web server's."""
        if self.loop.failure is not None:
            return Health(False, f"the engine has failed: {self.loop.failure}")
        if self.service.is_draining:
            return Health(False, "the daemon is shutting down")
        return Health(True)

    def _readings(self) -> Readings:
        scheduler = self.loop.scheduler
        return Readings(
            running=scheduler.num_decoding,
            waiting=scheduler.num_waiting,
            prefilling=scheduler.num_prefilling,
            connections=self._connections,
            engine=self.loop.gauges,
        )
