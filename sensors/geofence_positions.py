"""The sensor that keeps a routing run alive while there is work for one: a pure plan under a thin shell.

It is level triggered: what decides is what waits in the log and which runs are alive. A run that was killed is simply
not there at the next tick.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from geo_assets.assets.stack_resource import StackResource
from geo_assets.events import topics
from geo_assets.jobs import ROUTING_TAG, route_geofence_triggers
from geo_assets.services import forgetting, resending
from geo_assets.services.fences import FenceBook
from geo_assets.services.geofence_snapshots import in_force
from geo_assets.services.routing import lag_of
from geo_assets.stack import Stack
from sensors.tile_updates import ALIVE

STANDBY_S = 60.0
"""How long before the end of a run the next one is asked for: it starts within seconds, or waits in a full queue."""

PATIENCE_S = (10.0, 300.0)
"""After a run that failed, how long the next one waits: twice as long with each in a row, between these."""

SOON_S = 60.0
"""Only a run that failed so soon counts as failed. One that went on for longer could work, and was killed or evicted:
the next one is asked for at once, however often that happens."""

LOOKED_AT = 8
"""Newest runs looked at."""

FAILED = frozenset({DagsterRunStatus.FAILURE})


@dataclass(frozen=True, slots=True)
class Routing:
    """A run that routes, or did.

    Args:
        status: Its status.
        started_s: When it began, seconds since the epoch; None: not yet.
        ended_s: When it ended.
    """

    status: DagsterRunStatus
    started_s: float | None
    ended_s: float | None

    @property
    def useless(self) -> bool:
        """Whether it failed, and soon: the next one may fail as well."""
        if self.status not in FAILED:
            return False
        return self.started_s is None or self.ended_s is None or self.ended_s - self.started_s < SOON_S


@dataclass(frozen=True, slots=True)
class Waiting:
    """What there is to do.

    Args:
        positions: Records not routed.
        fences: Whether fences changed that are not in force.
        due_ms: When something comes of devices that say nothing, milliseconds since the epoch, UTC; None for nothing.
        wishes: Whether devices are to be forgotten, or triggers to be sent again.
    """

    positions: int
    fences: bool
    due_ms: int | None
    wishes: bool = False

    def why(self, now_s: float) -> str:
        """The reason to route, in words; empty for none."""
        if self.positions:
            return f"{self.positions:,} positions wait"
        if self.fences:
            return "fences changed"
        if self.wishes:
            return "devices are to be forgotten, or triggers to be sent again"
        if self.due_ms is not None and self.due_ms <= now_s * 1000:
            return "something is due of a device that says nothing"
        return ""


def plan(runs: Sequence[Routing], waiting: Waiting, run_s: float, now_s: float) -> tuple[bool, str]:
    """Whether to ask for a run, and why or why not.

    Args:
        runs: Newest first.
        waiting: What there is to do.
        run_s: How long a run goes on.
        now_s: Seconds since the epoch.
    """
    alive = [run for run in runs if run.status in ALIVE]
    if len(alive) > 1:
        return False, "one run routes, the next one stands by"
    if alive:
        started_s = alive[0].started_s
        # A run of a minute has its standby from half of it on.
        if started_s is None or now_s < started_s + run_s - min(STANDBY_S, run_s / 2):
            return False, "a run routes"
        return True, "a standby for the run whose time is over soon"
    why = waiting.why(now_s)
    if not why:
        return False, "nothing waits"
    failed = 0
    while failed < len(runs) and runs[failed].useless:
        failed += 1
    if failed:
        patience_s = min(PATIENCE_S[1], PATIENCE_S[0] * 2 ** (failed - 1))
        left_s = (runs[0].ended_s or now_s) + patience_s - now_s
        if left_s > 0:
            return False, f"{why}; {failed} runs failed in a row: the next one in {left_s:.0f} s"
    return True, why


def runs_of(instance: DagsterInstance) -> list[Routing]:
    """The newest runs that routed, newest first."""
    records = instance.get_run_records(RunsFilter(tags={ROUTING_TAG: "yes"}), limit=LOOKED_AT)
    return [Routing(record.dagster_run.status, record.start_time, record.end_time) for record in records]


def waiting_in(stack: Stack) -> Waiting:
    """What there is to do: two looks at the log, three at the ledger."""
    stored, standing = in_force(stack.ledger), FenceBook(stack).standing()
    fences = standing.revision > stored.revision or any(
        extent.end > standing.offsets.get(partition, extent.begin)
        for partition, extent in stack.log.extents(topics.FENCES).items()
    )
    # Before there was a position nothing is open that a fence could end.
    wishes = bool(forgetting.wishes(stack.ledger) or resending.wishes(stack.ledger))
    return Waiting(lag_of(stack, stored.offsets), fences and bool(stored.offsets), stored.due_ms, wishes)


@sensor(
    job=route_geofence_triggers,
    name="geofence_positions",
    minimum_interval_seconds=1,
    default_status=DefaultSensorStatus.RUNNING,
    description=(
        "Keeps one run that routes geofence triggers alive while positions come, fences change or a DWELL of a silent "
        "device is due; asks for the next one before its time is over, which stands by and takes over within a second."
    ),
)
def geofence_positions(context: SensorEvaluationContext, stack: StackResource) -> SensorResult:
    """Evaluate one tick."""
    with stack.opened() as ports:
        ask, why = plan(runs_of(context.instance), waiting_in(ports), ports.settings.geofence_run_s, time.time())
    if ask:
        context.log.info(why)
        return SensorResult(run_requests=[RunRequest(tags={ROUTING_TAG: "yes"})])
    return SensorResult(skip_reason=SkipReason(why))
