"""What the router counts and times, as Prometheus reads it. No label ever holds a device or a fence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from geo_assets.flow.stages import DEDUP, EMIT, PUBLISH, Buckets

END_TO_END = "end_to_end"
_STAGES = (EMIT.name, DEDUP.name, PUBLISH.name, END_TO_END)

COUNTERS = {
    "routed": "Triggers that the log acknowledged.",
    "deduped": "Triggers whose key was in the window.",
    "shed": "Triggers of outside callers refused as the queue was too full.",
    "dlq": "Triggers that became dead letters.",
    "spooled": "Triggers written to the local spool.",
    "drained": "Triggers that the log acknowledged out of the spool.",
    "slow": "Publishes over their ceiling, at most one every ceiling's length.",
    "again": "Triggers sent again, as their delivery had failed.",
    "bloom_suspects": "Keys that the Bloom filter could not rule out, looked up in the exact index.",
    "bloom_false_positives": "Keys among those that were not in the window.",
}
"""Counter -> what it counts."""

_STATES = {"closed": 0, "half-open": 1, "open": 2}


class RouterMetrics(Collector):
    """Counters and histograms of one router: plain numbers that the loop adds to, a batch at a time.

    Args:
        gauges: Name -> value now.
        breakers: Name -> state now.
        before: Called before they are told: what is counted elsewhere is brought in.
    """

    def __init__(
        self,
        gauges: Mapping[str, Callable[[], float]],
        breakers: Mapping[str, Callable[[], str]],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.seconds = {stage: Buckets() for stage in _STAGES}
        self._gauges, self._breakers, self._before = gauges, breakers, before
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The families, as they stand."""
        self._before()
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"geofence_router_{name}", meaning, value=self.counts[name])
        stages = HistogramMetricFamily(
            "geofence_router_stage_seconds", "Latency of a trigger by stage; observed by batches.", labels=["stage"]
        )
        for stage, buckets in self.seconds.items():
            stages.add_metric([stage], buckets.running(), buckets.total)
        yield stages
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"geofence_router_{name}", f"The router's {name.replace('_', ' ')}.", value=value())
        breakers = GaugeMetricFamily(
            "geofence_router_breaker", "0 closed, 1 half-open, 2 open.", labels=["stage"]
        )  # fmt: skip
        for name, state in self._breakers.items():
            breakers.add_metric([name], _STATES[state()])
        yield breakers
