"""What the edge counts, in a Prometheus registry of its own. No label ever holds what a sender chose."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from geo_assets.services.edit_stages import StageHistograms, Stamps, now_us
from geo_assets.services.tracing import SPANS

_LATENCY = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Seconds; dense around 100 ms, the figure that p99 is held against."""


class EdgeMetrics:
    """Counters and histograms of one edge.

    Args:
        waiting: Requests whose records wait for an append.
        open_requests: Requests at work.
    """

    def __init__(self, waiting: Callable[[], float], open_requests: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._requests = Counter("edge_requests", "Requests answered.", ["endpoint", "status"], registry=r)
        self._seconds = Histogram(
            "edge_request_seconds",
            "From the first byte of a request to its answer.",
            ["endpoint"],
            buckets=_LATENCY,
            registry=r,
        )
        self.bytes_in = Counter("edge_body_bytes", "Bytes of bodies as sent.", ["endpoint"], registry=r)
        self.outcomes = Counter("edge_outcomes", "Bodies by outcome at the log.", ["endpoint", "outcome"], registry=r)
        self.records = Counter("edge_records", "Records the log acknowledged.", registry=r)
        self._append = Histogram("edge_append_seconds", "One append to the log.", buckets=_LATENCY, registry=r)
        self.guard_faults = Counter("edge_guard_faults", "Times the guard did not answer.", registry=r)
        self.bbox_disagrees = Counter(
            "edge_tile_bbox_disagrees", "Tile events whose bbox is not their tile's.", registry=r
        )
        self._stages = StageHistograms(r)
        r.register(SPANS)
        Gauge("edge_waiting", "Requests whose records wait for an append.", registry=r).set_function(waiting)
        Gauge("edge_open_requests", "Requests at work.", registry=r).set_function(open_requests)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def acknowledged(self, endpoint: str, received_us: int) -> None:
        """Note how long the log took to have it; only edits are told from other events here."""
        if endpoint == "features":
            self._stages.observe([Stamps(received=received_us, acknowledged=now_us())], "acknowledged")

    def appended(self, seconds: float, records: int) -> None:
        """Count one append."""
        self._append.observe(seconds)
        self.records.inc(records)

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
