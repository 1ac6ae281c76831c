"""All metrics of the daemon, on a registry of its own.

Names follow Prometheus's rules (base units, _total, few labels) and resemble vLLM's, so that its readers find theirs:
vllm:num_requests_running is laned_requests_running, vllm:time_to_first_token_seconds is
laned_time_to_first_token_seconds, and so on. Counters and histograms move when the loop books what happened; gauges
are not kept here: they are read from their owner when somebody scrapes.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lanes.lane import EngineGauges, ModelInfo, StepResult
from scheduler.process_metrics import ProcessMetrics
from scheduler.recent import Recent
from scheduler.store_metrics import store_metrics
from store.stats import StoreStats

# How a request ends: its finish reason, or what kept it from one. Every request that arrived ends in one of them.
OUTCOMES = ("stop", "length", "cancelled", "failed", "refused")

# From a small model on a fast device to a laptop that swaps; fine around 50 ms, the longest stall we allow.
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
# What a person waits for: from "at once" to minutes of a long answer on a CPU.
_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


# Where what a prompt needs came from.
SOURCES = ("computed", "memory", "disk")


@dataclass(frozen=True, slots=True)
class Readings:
    """What is read from its owner at one moment. engine is None until the model is loaded, store where there is none.

    heartbeat_unix_s: when the model's thread last answered.
    """

    running: int = 0
    waiting: int = 0
    prefilling: int = 0
    aside: int = 0
    max_rows: int = 0
    connections: int = 0
    heartbeat_unix_s: float = 0.0
    engine: EngineGauges | None = None
    store: StoreStats | None = None


_GAUGES: tuple[tuple[str, str, Callable[[Readings], float]], ...] = (
    ("laned_requests_running", "Requests that are being decoded.", lambda now: now.running),
    ("laned_requests_waiting", "Requests in the queue.", lambda now: now.waiting),
    ("laned_requests_prefilling", "Requests whose prompt is being processed.", lambda now: now.prefilling),
    ("laned_requests_set_aside", "Requests taken out of the lane until memory has room.", lambda now: now.aside),
    ("laned_rows_limit", "Requests that are decoded together at most.", lambda now: now.max_rows),
    ("laned_connections_open", "Connections to the socket.", lambda now: now.connections),
    (
        "laned_heartbeat_timestamp_seconds",
        "When the model's thread last answered, in Unix time.",
        lambda now: now.heartbeat_unix_s,
    ),
)
_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineGauges], int]], ...] = (
    ("laned_slots", "Slots that the lane's arrays have room for.", lambda now: now.slots),
    ("laned_slots_used", "Slots that hold a row.", lambda now: now.slots_used),
    ("laned_slot_capacity_tokens", "Tokens that fit into one slot before it grows.", lambda now: now.capacity_tokens),
    ("laned_cached_tokens", "Tokens in all rows.", lambda now: sum(now.lengths)),
    ("laned_cache_bytes", "Memory of the lanes' caches.", lambda now: now.cache_bytes),
    ("laned_mlx_active_bytes", "Memory of MLX's live arrays.", lambda now: now.mlx_active_bytes),
    ("laned_mlx_cache_bytes", "Freed memory that MLX keeps for its next arrays.", lambda now: now.mlx_cache_bytes),
    ("laned_mlx_peak_bytes", "Highest memory of MLX's live arrays so far.", lambda now: now.mlx_peak_bytes),
)


class _Gauges(Collector):
    """Asks the owner once a scrape, so that all gauges of one scrape belong together."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        yield from (GaugeMetricFamily(name, said) for name, said, _ in (*_GAUGES, *_ENGINE_GAUGES))
        yield from store_metrics(StoreStats())

    def collect(self) -> Iterable[Metric]:
        now = self._read()
        yield from (GaugeMetricFamily(name, said, value=value(now)) for name, said, value in _GAUGES)
        if now.engine is not None:
            for name, said, gauge in _ENGINE_GAUGES:
                yield GaugeMetricFamily(name, said, value=gauge(now.engine))
        if now.store is not None:
            yield from store_metrics(now.store)


class Metrics:
    """The registry, and one method for each thing that happens. Called in Trio's thread."""

    def __init__(self, read: Callable[[], Readings] = Readings) -> None:
        """read is called at each scrape and must be quick; it runs in the thread that scrapes, which is Trio's."""
        # A _created series beside every series is noise; it can only be switched off for the whole process.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry(auto_describe=False)
        registry.register(_Gauges(read))
        registry.register(ProcessMetrics())

        def counter(name: str, said: str, *labels: str) -> Counter:
            return Counter(name, said, labels, registry=registry)

        def histogram(name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, said, registry=registry, buckets=buckets)

        requests = counter("laned_requests_total", "Requests that have ended.", "outcome")
        self._ended = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self._received = counter("laned_requests_received_total", "Requests that have come in.")
        prompts = counter("laned_prompt_tokens_total", "Tokens of prompts whose answer has begun, by source.", "source")
        self._prompt_tokens = {source: prompts.labels(source) for source in SOURCES}
        self._generated = counter("laned_generation_tokens_total", "Tokens generated.")
        self._first_s = histogram("laned_time_to_first_token_seconds", "From arrival to the first token.", _WAIT_S)
        self._interval_s = histogram("laned_inter_token_latency_seconds", "Between two tokens of a request.", _STEP_S)
        self._total_s = histogram("laned_e2e_request_latency_seconds", "From arrival to the end of a request.", _WAIT_S)
        self._queue_s = histogram("laned_request_queue_time_seconds", "From arrival to the first work on it.", _WAIT_S)
        self._prompt_len = histogram("laned_request_prompt_tokens", "Tokens in the prompt of a request.", _TOKENS)
        self._answer_len = histogram("laned_request_generation_tokens", "Tokens in a request's answer.", _TOKENS)
        self._step_s = histogram("laned_step_duration_seconds", "Duration of a step that did work.", _STEP_S)
        self._step_rows = histogram("laned_step_rows", "Rows that a step decoded, where it decoded any.", _ROWS)
        self._step_prompt = counter("laned_prefill_tokens_total", "Tokens of prompts that steps have processed.")
        self._drafted = counter("laned_spec_decode_num_draft_tokens_total", "Tokens guessed for steps.")
        self._accepted = counter("laned_spec_decode_num_accepted_tokens_total", "Tokens guessed that were drawn.")
        self._connections = counter("laned_connections_total", "Connections that were accepted.")
        self._refused = counter("laned_connections_refused_total", "Connections that were cut, by reason.", "reason")
        queries = counter("laned_store_queries_total", "Prompts looked up in the store, by result.", "result")
        self._queries = {result: queries.labels(result) for result in ("hit", "miss")}
        self._saved_s = counter("laned_store_saved_seconds_total", "Processing that restored prompts did not take.")
        self.recent = Recent()
        self._model = Info("laned_model", "The model being served.", registry=registry)
        self._device = Gauge("laned_device_memory_bytes", "Memory of the device, for everything.", registry=registry)
        self._weights = Gauge("laned_weight_bytes", "Memory of the model's weights.", registry=registry)
        self._ready = Gauge("laned_model_loaded", "Whether the model is loaded.", registry=registry)
        Info("laned_build", "Versions of the daemon and of what it stands on.", registry=registry).info(_versions())

    def arrived(self) -> None:
        """A request has come in."""
        self._received.inc()

    def admitted(self, queued_s: float) -> None:
        """It has left the queue."""
        self._queue_s.observe(queued_s)

    def first_token(self, ttft_s: float, prompt_tokens: int, from_memory: int = 0, from_disk: int = 0) -> None:
        """Its first token is there. from_memory, from_disk: tokens of its prompt that were remembered there."""
        self._generated.inc()
        self._first_s.observe(ttft_s)
        self._prompt_len.observe(prompt_tokens)
        self._prompt_tokens["computed"].inc(prompt_tokens - from_memory - from_disk)
        self._prompt_tokens["memory"].inc(from_memory)
        self._prompt_tokens["disk"].inc(from_disk)
        self.recent.first_token(ttft_s, from_memory, from_disk)

    def token(self, interval_s: float) -> None:
        """One more token, so long after the one before it. Called for every row and step: a few microseconds."""
        self._generated.inc()
        self._interval_s.observe(interval_s)
        self.recent.token(interval_s)

    def finished(self, outcome: str, total_s: float, completion_tokens: int = 0) -> None:
        """It has ended, in one of OUTCOMES. Its latency counts only where it was answered to the end."""
        self._ended[outcome].inc()
        if outcome in ("stop", "length"):
            self._total_s.observe(total_s)
            self._answer_len.observe(completion_tokens)

    def step(self, result: StepResult) -> None:
        """A step was carried out. One that found nothing to do is not counted."""
        if result.rows_decoded or result.chunk_tokens:
            self._step_s.observe(result.seconds)
        if result.rows_decoded:
            self._step_rows.observe(result.rows_decoded)
        if result.chunk_tokens:
            self._step_prompt.inc(result.chunk_tokens)
        if result.drafted_tokens:
            self._drafted.inc(result.drafted_tokens)
            self._accepted.inc(result.accepted_tokens)
        self.recent.step(result)

    def store_asked(self, *, hit: bool) -> None:
        """A prompt was looked up in the store; hit: some of it is known, whether that is read or sooner computed."""
        self._queries["hit" if hit else "miss"].inc()

    def store_saved(self, seconds: float) -> None:
        """A prompt was recalled that would have taken so long to process."""
        self._saved_s.inc(seconds)

    def loaded(self, info: ModelInfo) -> None:
        """The model is there."""
        names = ("name", "model_type", "lane", "dtype", "backend", "blas")
        self._model.info({name: str(getattr(info, name)) for name in names})
        self._device.set(info.memory_bytes)
        self._weights.set(info.weight_bytes)
        self._ready.set(1)

    def connected(self) -> None:
        """A connection was accepted."""
        self._connections.inc()

    def connection_refused(self, reason: str) -> None:
        """A connection was turned away or cut. reason: one of few fixed words, never a client's text."""
        self._refused.labels(reason).inc()


def _versions() -> dict[str, str]:
    """Versions as installed; importing mlx for its own would cost a second and open the device."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for label, package in (("version", "laned"), ("mlx", "mlx"), ("mlx_lm", "mlx-lm")):
        try:
            found[label] = version(package)
        except PackageNotFoundError:
            found[label] = "unknown"
    return found
