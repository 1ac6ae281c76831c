"""The names that a daemon exposes, and those that an expression asks for."""

import re

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lanes.lane import EngineGauges
from scheduler.metrics import Metrics, Readings
from store.stats import StoreStats


def series() -> set[str]:
    """All sample names, with those of the process."""
    engine = EngineGauges(
        slots=1,
        slots_used=1,
        capacity_tokens=1,
        lengths=(1,),
        cache_bytes=1,
        mlx_active_bytes=1,
        mlx_cache_bytes=1,
        mlx_peak_bytes=1,
    )
    metrics = Metrics(lambda: Readings(engine=engine, store=StoreStats()))
    metrics.connection_refused("x")
    text = generate_latest(metrics.registry).decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def names_in(text: str) -> set[str]:
    """Metrics named in expressions; recorded series have a colon and are not among them."""
    return set(re.findall(r"(?<![\w:])(?:laned|process)_\w+(?![\w:])", text))
