"""Runs over batches that wait in Dagster's queue and get no slot of their pool: they end with an error that says why.

A pool's limit is changed while everything runs (docs/backfill.md), and nothing reminds whoever set it to 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunRecord, RunsFilter

log = structlog.get_logger()

HOLDING = (DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)
"""Runs that hold slots: all of a run's pools from its start to its end (`granularity: run` in dagster.yaml)."""

SHOWN = 5
"""Runs named in an error."""


def queued_ms(record: RunRecord) -> int:
    """When a run was created, which is when it was queued: milliseconds since the epoch, UTC."""
    return round(record.create_timestamp.timestamp() * 1000)


def has_waited_too_long(record: RunRecord, now_ms: int, limit_s: float) -> bool:
    """Whether a run has been in the queue for longer than it may."""
    return record.dagster_run.status is DagsterRunStatus.QUEUED and now_ms - queued_ms(record) > limit_s * 1000


@dataclass(frozen=True, slots=True)
class Taken:
    """A pool that a run needs.

    Args:
        name: Of the pool.
        limit: Its slots.
        runs: Ids of the runs that hold one.
    """

    name: str
    limit: int
    runs: tuple[str, ...]

    @property
    def full(self) -> bool:
        """Whether no slot is left."""
        return len(self.runs) >= self.limit

    def __str__(self) -> str:
        if self.limit < 1:
            return f"the limit of pool {self.name} is {self.limit}"
        shown = ", ".join(run[:8] for run in self.runs[:SHOWN]) + (" and more" if len(self.runs) > SHOWN else "")
        return f"pool {self.name}: {len(self.runs)} of {self.limit} slots are taken by {shown or 'no run'}"


def problem(pools: Sequence[Taken], waited_s: float, limit_s: float) -> str:
    """What a run is told that waited too long; empty where none of its pools is full."""
    full = [pool for pool in pools if pool.full]
    if not full:
        return ""
    return (
        f"The run waited {waited_s:,.0f} s in Dagster's queue for a slot of its pool, longer than "
        f"GEO_ASSETS_POOL_WAIT_S ({limit_s:,g} s): {'; '.join(map(str, full))}. Raise the limit under Deployment > "
        "Concurrency, or end what holds the slots. Its tiles are asked for again."
    )


def end_waiting(instance: DagsterInstance, record: RunRecord, now_ms: int, limit_s: float) -> DagsterRunStatus:
    """End a queued run with an error if its pool is full; nothing was built of it, and nobody is charged.

    One whose pools have room is left alone: it waits for a place among the runs, or the daemon was away and starts it
    now.

    Args:
        instance: Dagster's.
        record: The run, as it was found in the queue.
        now_ms: Milliseconds since the epoch, UTC.
        limit_s: How long it may wait.

    Returns:
        Its status now.
    """
    # Read anew, as Dagster's own cancelling from the queue does: it may just have got its slot. A run that gets it now,
    # before the next line, finds that it has failed and builds nothing.
    run = instance.get_run_by_id(record.dagster_run.run_id)
    if run is None:
        return DagsterRunStatus.FAILURE
    if run.status is not DagsterRunStatus.QUEUED:
        return run.status
    text = problem(pools_of(instance, run), (now_ms - queued_ms(record)) / 1000, limit_s)
    if not text:
        return run.status
    log.warning("run ended in the queue", run=run.run_id, problem=text)
    instance.report_run_failed(run, text)
    return DagsterRunStatus.FAILURE


def pools_of(instance: DagsterInstance, run: DagsterRun) -> list[Taken]:
    """The pools that a run needs, as they stand."""
    needed = sorted((run.run_op_concurrency.all_pools or ()) if run.run_op_concurrency else ())
    if not needed:
        return []
    limits = {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}
    default = instance.get_concurrency_config().pool_config.default_pool_limit
    holders: dict[str, list[str]] = {name: [] for name in needed}
    for other in instance.get_runs(RunsFilter(statuses=list(HOLDING))):
        for name in (other.run_op_concurrency.all_pools or ()) if other.run_op_concurrency else ():
            if name in holders:
                holders[name].append(other.run_id)
    found: list[Taken] = []
    for name in needed:
        limit = limits.get(name, default)
        if limit is not None:  # Without a limit there is nothing to wait for.
            found.append(Taken(name, limit, tuple(holders[name])))
    return found
