"""Stage latency: one in breach of its ceiling for three intervals in a row trips the next stage's breaker.

The p95 of each interval is held against the ceiling, from counts in buckets: nothing is kept of a single value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BREACHES = 3
SHARE = 0.95
LEAST = 1_000
"""Things a second that pass a stage before its latency says something of its capacity: below, what is slow is a machine
that is busy with something else, and an open breaker would help nobody."""

BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.1,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds, seconds. Every ceiling below is one of them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the router and its ceiling.

    Args:
        name: As in metrics.
        ceiling_s: p95 that it keeps, seconds.
    """

    name: str
    ceiling_s: float


EMIT = Stage("emit", 0.002)
DEDUP = Stage("dedup", 0.002)
PUBLISH = Stage("publish", 0.006)
STAGES = (EMIT, DEDUP, PUBLISH)


class Buckets:
    """A histogram by counts. `observe` takes many at once. For one thread; others may read it meanwhile."""

    __slots__ = ("_edges", "bounds", "count", "counts", "total")

    def __init__(self, bounds: Sequence[float] = BUCKETS_S) -> None:
        self.bounds = tuple(bounds)
        self._edges = np.array(self.bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a value that `times` things share."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.count += times
        self.total += seconds * times

    def observe_all(self, seconds: npt.NDArray[np.float64]) -> None:
        """Count many values."""
        found = np.bincount(np.searchsorted(self._edges, seconds), minlength=len(self.counts)).tolist()
        for place, times in enumerate(found):
            if times:
                self.counts[place] += times
        self.count += len(seconds)
        self.total += float(seconds.sum())

    def running(self) -> list[tuple[str, float]]:
        """Upper bound, as Prometheus writes it, and how many values are at or below it."""
        total, found = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, self.bounds), "+Inf"), list(self.counts), strict=True):
            total += count
            found.append((bound, total))
        return found

    def exceeds(self, ceiling: float, share: float = SHARE, since: Sequence[int] | None = None) -> bool:
        """Whether more than `1 - share` of the values lie above a bound.

        Args:
            ceiling: One of the bounds.
            share: As 0.95 for p95.
            since: Counts of earlier that do not count.
        """
        counts = self.counts if since is None else [now - then for now, then in zip(self.counts, since, strict=True)]
        above = sum(counts[self.bounds.index(ceiling) + 1 :])
        return above > (1 - share) * sum(counts)


class StageGuard:
    """Watches stages interval by interval.

    Args:
        stages: In their order.
        buckets: Stage name -> its latencies, which others fill.
        trip: Called with a stage and a reason when the stage before it has been in breach for too long. The last stage
            has none behind it: what it does too slowly counts against its own breaker, one by one.
        breaches: Intervals in a row.
        least: Values of an interval below which it says nothing.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        buckets: dict[str, Buckets],
        trip: Callable[[Stage, str], None],
        breaches: int = BREACHES,
        least: int = 0,
    ) -> None:
        self._least = least
        self._stages, self._buckets, self._trip, self._limit = tuple(stages), buckets, trip, breaches
        self._seen = {stage.name: list(buckets[stage.name].counts) for stage in stages}
        self.breaches = {stage.name: 0 for stage in stages}
        """Stage name -> intervals in a row in breach."""

    def interval(self) -> None:
        """An interval is over. One in which nothing, or too little, passed a stage ends its row of breaches."""
        for number, stage in enumerate(self._stages):
            buckets, since = self._buckets[stage.name], self._seen[stage.name]
            enough = sum(buckets.counts) - sum(since) >= self._least
            in_breach = enough and buckets.exceeds(stage.ceiling_s, since=since)
            self._seen[stage.name] = list(buckets.counts)
            self.breaches[stage.name] = self.breaches[stage.name] + 1 if in_breach else 0
            if self.breaches[stage.name] >= self._limit and number + 1 < len(self._stages):
                self.breaches[stage.name] = 0
                self._trip(
                    self._stages[number + 1],
                    f"p95 of {stage.name} above {stage.ceiling_s * 1000:g} ms in {self._limit} intervals in a row",
                )
