"""How long the garbage collector stops this process: told by the interpreter itself, as a histogram by generation."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from geo_assets.flow.stages import Buckets


class GcPauses(Collector):
    """Counts from `start` to `close`."""

    def __init__(self) -> None:
        self.seconds = {generation: Buckets() for generation in range(3)}
        self.longest_s = 0.0
        self._began = 0

    def start(self) -> None:
        """Have the interpreter tell."""
        gc.callbacks.append(self._told)

    def close(self) -> None:
        """Have it tell no more."""
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def _told(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
        elif self._began:
            pause = (time.perf_counter_ns() - self._began) / 1e9
            self._began = 0
            self.seconds[info["generation"]].observe(pause)
            self.longest_s = max(self.longest_s, pause)

    def collect(self) -> Iterator[Metric]:
        """The family, as it stands."""
        pauses = HistogramMetricFamily(
            "geofence_gc_pause_seconds", "Pauses of the process by its garbage collector.", labels=["generation"]
        )
        for generation, buckets in self.seconds.items():
            pauses.add_metric([str(generation)], buckets.running(), buckets.total)
        yield pauses
