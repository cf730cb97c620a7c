"""What a routing run did: counts, pace and latencies, as its metadata, the checks and the command line show them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geo_assets.flow.stages import Buckets

VALUE = "geofence.last-run"
"""The ledger's named value: the newest result, kept up to date while a run goes on."""

DELIVERY_MS = 40.0
"""p99 of a trigger from its emission to the log's acknowledgement, on a broker."""


@dataclass(slots=True)
class RoutingResult:
    """The result of a run, or how it stands.

    Args:
        epoch: Of the run.
        seconds: Since it took the lease.
        ended: `idle`, `time`, `stopped`, `replaced`; empty while it goes on.
        positions: Records read, ticks and poison included.
        judged: What the tracker's counts say, by name.
        routed: Triggers that the log acknowledged.
        deduped: Triggers told before.
        drained: Triggers that a router before this one had left on disk.
        shed: Triggers of outside callers refused.
        positions_shed: Positions passed over after a long pause, where that is declared.
        dlq: Dead letters: triggers, and positions that are none.
        ticks: Records appended for devices that say nothing.
        snapshots: Written.
        adopted: New sets of fences that came into force.
        fence_revision: In force.
        devices: Remembered.
        stays: Of devices in fences.
        lag: Records not read.
        p50_ms: Stage -> median.
        p99_ms: Stage -> 99th percentile.
        on_broker: Whether the log is a broker's.
        breaker: `closed`, or its state and why.
        longest_gc_ms: The longest pause of the garbage collector, where metrics are served.
        metrics_port: Where they are; 0 for nowhere.
        at_ms: When, milliseconds since the epoch, UTC.
    """

    epoch: int = 0
    seconds: float = 0.0
    ended: str = ""
    positions: int = 0
    judged: dict[str, int] = field(default_factory=dict[str, int])
    routed: int = 0
    deduped: int = 0
    drained: int = 0
    shed: int = 0
    positions_shed: int = 0
    dlq: int = 0
    ticks: int = 0
    snapshots: int = 0
    adopted: int = 0
    fence_revision: int = 0
    devices: int = 0
    stays: int = 0
    lag: int = 0
    p50_ms: dict[str, float] = field(default_factory=dict[str, float])
    p99_ms: dict[str, float] = field(default_factory=dict[str, float])
    on_broker: bool = False
    breaker: str = "closed"
    longest_gc_ms: float = 0.0
    metrics_port: int = 0
    at_ms: int = 0

    @property
    def positions_per_second(self) -> float:
        """Over the whole run."""
        return self.positions / self.seconds if self.seconds else 0.0

    def members(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """One line."""
        return (
            f"{self.positions:,} positions, {self.routed:,} triggers routed, {self.deduped:,} told before, "
            f"{f'{self.drained:,} drained from disk, ' if self.drained else ''}"
            f"{self.dlq:,} dead letters, {self.judged.get('late', 0):,} late, {self.judged.get('jumped', 0):,} jumps; "
            f"fences of revision {self.fence_revision}, {self.devices:,} devices"
        )


def quantile_ms(buckets: Buckets, share: float) -> float:
    """The upper bound of the bucket in which a quantile lies, milliseconds; 0 where nothing was observed."""
    wanted = share * buckets.count
    running = 0
    for bound, count in zip(buckets.bounds, buckets.counts, strict=False):
        running += count
        if running >= wanted:
            return bound * 1000 if buckets.count else 0.0
    return buckets.bounds[-1] * 1000
