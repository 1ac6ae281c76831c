"""The gateway's own metrics; those of the model are the daemon's, at its --metrics-port."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class Metrics:
    """Called in Trio's thread. is_up: whether the daemon is there, asked at each scrape."""

    def __init__(self, is_up: Callable[[], bool]) -> None:
        registry = self._registry = CollectorRegistry(auto_describe=True)
        said = "Requests that have ended, by route and status; 499 is a client that went away."
        self._requests = Counter("laned_gateway_requests_total", said, ("route", "status"), registry=registry)
        self._running = Gauge("laned_gateway_requests_running", "Requests that are being answered.", registry=registry)
        said = "From a request's head to the end of its answer, by route."
        self._seconds = Histogram(
            "laned_gateway_request_duration_seconds", said, ("route",), buckets=_WAIT_S, registry=registry
        )
        up = Gauge("laned_gateway_daemon_up", "Whether the daemon answers.", registry=registry)
        up.set_function(is_up)

    def began(self) -> None:
        self._running.inc()

    def ended(self, route: str, status: int, seconds: float) -> None:
        """route: one of the app's, never what a client sent."""
        self._running.dec()
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
