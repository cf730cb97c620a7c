"""What a routing run counts beside its router, as Prometheus reads it. No label ever holds a device or a fence.

docs/runbook.md lists all names. Numbers are read where they stand when somebody asks: the loop pays for none of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from geo_assets.flow.stages import Buckets
    from geo_assets.geofence.tracker import Tracker
    from geo_assets.services.position_reader import PositionReader
    from geo_assets.services.routing_result import RoutingResult

    class Run(Protocol):
        """What is looked at of a run."""

        result: RoutingResult
        tracker: Tracker
        reader: PositionReader
        seconds: Buckets
        stamp_seconds: Buckets
        last_cost: float


_OUTCOMES = {"positions", "ticks", "forgotten"}
"""Of the tracker's counts, those that are no outcome of a position."""


class RoutingMetrics(Collector):
    """One run's.

    Args:
        run: It.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._looked = time.monotonic(), run.result.positions

    def collect(self) -> Iterator[Metric]:
        """The families, as they stand."""
        run = self._run
        result, tracker = run.result, run.tracker
        yield _counter("positions", "Records of [positions] read, ticks and poison included.", result.positions)
        now, before = time.monotonic(), self._looked
        if now - before[0] >= 0.5:
            self._looked = now, result.positions
            rate = (result.positions - before[1]) / (now - before[0])
            yield _gauge("positions_per_second", "Since the look before this one.", rate)
        counts = asdict(tracker.counts)
        judged = CounterMetricFamily("geofence_routing_judged", "Positions by what became of them.", labels=["outcome"])
        for name, count in counts.items():
            if name not in _OUTCOMES:
                judged.add_metric([name], count)
        yield judged
        yield _counter("poison", "Records that are no position: dead letters.", result.dlq)
        yield _counter("shed", "Positions passed over after a long pause.", result.positions_shed)
        yield _counter("ticks", "Records appended for devices that say nothing.", result.ticks)
        yield _counter("forgotten", "Devices that fell silent.", counts["forgotten"])
        yield _counter("snapshots", "Snapshots written.", result.snapshots)
        yield _counter("adopted", "Sets of fences that came into force.", result.adopted)
        yield _gauge("snapshot_seconds", "What the last snapshot took to be written, beside the loop.", run.last_cost)
        yield _gauge("devices", "Devices remembered.", tracker.devices)
        yield _gauge("stays", "Devices in fences.", tracker.stays)
        yield _gauge("fence_revision", "Of the fences in force.", tracker.revision)
        yield _gauge("fences", "Fences in force.", len(tracker.index.fence_set))
        lag = GaugeMetricFamily("geofence_routing_lag", "Records of [positions] not read.", labels=["partition"])
        lags: Mapping[int, int] = run.reader.lag
        for partition, records in sorted(lags.items()):
            lag.add_metric([str(partition)], records)
        yield lag
        for name, meaning, buckets in (
            ("read_to_acknowledgement", "From a position read to its trigger acknowledged.", run.seconds),
            (
                "stamp_to_acknowledgement",
                "From the oldest stamp of a batch in the log to a trigger of it acknowledged: the wait counts as well.",
                run.stamp_seconds,
            ),
        ):
            histogram = HistogramMetricFamily(f"geofence_routing_{name}_seconds", meaning)
            histogram.add_metric([], buckets.running(), buckets.total)
            yield histogram


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"geofence_routing_{name}", meaning, value=value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"geofence_routing_{name}", meaning, value=value)
