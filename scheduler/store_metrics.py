"""The store's metrics: all of them are its own counts and sizes, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from store.keeping import KeeperStats
from store.stats import StoreStats

_NO_DISK = KeeperStats()

# Where a figure has parts of both, the keeper has not counted what the store has: no event is in it twice.

# A figure of the whole store, or one for each tier: memory, disk.
Count = Callable[[StoreStats, KeeperStats], float]
_COUNTERS: tuple[tuple[str, str, Count], ...] = (
    ("laned_store_written_bytes", "Bytes written to the store.", lambda store, disk: store.written_bytes),
    (
        "laned_store_dropped",
        "Segments that were not kept, as too much waited for the disk or had no place.",
        lambda store, disk: store.dropped,
    ),
    (
        "laned_store_corrupt",
        "Segments that failed a check and were dropped.",
        lambda store, disk: store.corrupt + disk.corrupt,
    ),
    (
        "laned_store_errors",
        "Reads and writes that the disk or the store's process refused.",
        lambda store, disk: store.errors + disk.errors,
    ),
)
_GAUGES: tuple[tuple[str, str, Count], ...] = (
    ("laned_store_queue_bytes", "What waits to be written to the store.", lambda store, disk: store.queue_bytes),
    (
        "laned_store_foreign_bytes",
        "What the store's folder holds of other models.",
        lambda store, disk: disk.foreign_bytes,
    ),
    ("laned_store_disk_free_bytes", "Free space on the store's disk.", lambda store, disk: disk.free_bytes),
    ("laned_store_away", "Whether the store's folder or process is away.", lambda store, disk: disk.away),
)
_TIER_GAUGES: tuple[tuple[str, str, Count, Count], ...] = (
    (
        "laned_store_bytes",
        "What is remembered of prompts and answers, by tier.",
        lambda store, disk: store.memory_bytes,
        lambda store, disk: disk.bytes,
    ),
    (
        "laned_store_segments",
        "Pieces that it is kept in, by tier.",
        lambda store, disk: store.memory_segments,
        lambda store, disk: disk.segments,
    ),
)
_TIER_COUNTERS: tuple[tuple[str, str, Count, Count], ...] = (
    (
        "laned_store_evicted",
        "Segments given up for space, by tier.",
        lambda store, disk: store.evicted,
        lambda store, disk: disk.evicted,
    ),
    (
        "laned_store_restored_bytes",
        "Bytes read back for prompts, by tier.",
        lambda store, disk: store.memory_restored_bytes,
        lambda store, disk: store.disk_restored_bytes,
    ),
    (
        "laned_store_restore_seconds",
        "Time spent on reading them, by tier.",
        lambda store, disk: store.memory_restored_s,
        lambda store, disk: store.disk_restored_s,
    ),
)


def store_metrics(store: StoreStats) -> Iterable[Metric]:
    """A family for each; with a store in memory alone, those of the disk are 0."""
    disk = store.disk or _NO_DISK
    for name, said, count in _COUNTERS:
        yield CounterMetricFamily(name, said, value=count(store, disk))
    for name, said, count in _GAUGES:
        yield GaugeMetricFamily(name, said, value=count(store, disk))
    for kind, table in ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS)):
        for name, said, in_memory, on_disk in table:
            family = kind(name, said, labels=("tier",))
            family.add_metric(("memory",), in_memory(store, disk))
            family.add_metric(("disk",), on_disk(store, disk))
            yield family
