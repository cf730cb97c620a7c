"""Retention of Dagster's storages: what of runs, events, checks and ticks is past its time, and deleting it in batches.

Dagster itself purges ticks alone. The rules are here and the same for both storages; what only files need (databases of
single runs, giving room back to the disk) is in catalog_retention_sqlite.py. Read and written are the tables of the
schema revision that `REVISION` names: a test fails when Dagster's moves on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as db
import structlog
from dagster import DagsterEventType, DagsterInstance, DagsterRunStatus
from dagster._core.events import EVENT_TYPE_TO_PIPELINE_RUN_STATUS
from dagster._core.execution.backfill import BulkActionStatus
from dagster._core.storage.asset_check_execution_record import COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES
from dagster._core.storage.dagster_run import FINISHED_STATUSES
from dagster._core.storage.event_log import SqlEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    AssetKeyTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.runs.schema import BackfillTagsTable, BulkActionsTable, RunsTable, RunTagsTable
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage
from dagster._core.storage.schedules.schema import JobTickTable
from dagster._core.storage.schedules.sql_schedule_storage import SqlScheduleStorage

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from geo_assets.settings import Settings

log = structlog.get_logger()

REVISION = "29b539ebc72a"
"""Revision of Dagster's schema that these rules were written for and are tested on."""

BATCH_ROWS = 1_000
"""Rows looked at in one step, and at most deleted in one transaction: some 50 ms of SQLite's write lock."""

LEAST_AGE_S = 60.0
"""Nothing younger is ever deleted: whatever was under way when the pass listed the runs alive is younger than that."""

DAY_S = 24 * 3600.0

_EVENTS = SqlEventLogStorageTable.c
_CHECKS = AssetCheckExecutionsTable.c

OF_PARTITIONS = frozenset(
    {
        DagsterEventType.ASSET_MATERIALIZATION.value,
        DagsterEventType.ASSET_OBSERVATION.value,
        DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
    }
)
"""Of these the newest of each asset and partition stays for good: the catalog's answers stand on it."""

OF_CHECKS = frozenset(
    {DagsterEventType.ASSET_CHECK_EVALUATION.value, DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED.value}
)
OF_RUN_STATUS = frozenset(kind.value for kind in EVENT_TYPE_TO_PIPELINE_RUN_STATUS)
"""They go with their run: what watches runs reads them."""

LEFT_ALONE = frozenset(
    {DagsterEventType.FRESHNESS_STATE_CHANGE.value, DagsterEventType.ASSET_FAILED_TO_MATERIALIZE.value}
)
"""Events of assets that other rules of Dagster's read, and of which there are few."""

_COMPLETED_CHECKS = {status.value for status in COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES}
_FINISHED = [status.value for status in FINISHED_STATUSES]
_ENDED_BACKFILLS = [
    status.value
    for status in BulkActionStatus
    if status not in (BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING, BulkActionStatus.FAILING)
]


@dataclass(frozen=True, slots=True)
class Keep:
    """How long what is kept, in seconds. Each default is the setting's."""

    steps_s: float = 7 * DAY_S
    """What a run logged, after its end."""
    history_s: float = 14 * DAY_S
    """Materializations and observations that a newer one of their partition superseded, and evaluations of checks."""
    runs_s: float = 30 * DAY_S
    """Runs after their end, with their tags, and backfills."""
    ticks_s: float = 14 * DAY_S
    """Ticks of sensors and schedules."""

    @classmethod
    def of(cls, settings: Settings) -> Keep:
        """What the settings say; ticks are kept as long as other history."""
        return cls(settings.keep_steps_s, settings.keep_history_s, settings.keep_runs_s, settings.keep_history_s)


@dataclass(slots=True)
class Pass:
    """One pass of retention over an instance: what it may do, and what it did.

    Args:
        instance: Dagster's instance; on SQLite or Postgres.
        keep: How long what is kept.
        dry: Count what is past its time, and delete nothing.
        now_s: Seconds since the epoch, UTC.
        deadline_s: `time.monotonic()` at which it ends where it is: the next pass goes on.
        pause: Called with the seconds that a transaction took: others get as long.
    """

    instance: DagsterInstance
    keep: Keep
    dry: bool = False
    now_s: float = field(default_factory=time.time)
    deadline_s: float = float("inf")
    pause: Callable[[float], None] = time.sleep
    removed: Counter[str] = field(default_factory=Counter)
    alive: frozenset[str] = frozenset()

    @property
    def events(self) -> SqlEventLogStorage:
        """The storage of events."""
        storage = self.instance.event_log_storage
        assert isinstance(storage, SqlEventLogStorage)
        return storage

    @property
    def runs(self) -> SqlRunStorage:
        """The storage of runs."""
        storage = self.instance.run_storage
        assert isinstance(storage, SqlRunStorage)
        return storage

    @property
    def ticks(self) -> SqlScheduleStorage:
        """The storage of ticks."""
        storage = self.instance.schedule_storage
        assert isinstance(storage, SqlScheduleStorage)
        return storage

    def before(self, kept_s: float) -> datetime:
        """What is older is past its time; as Dagster stores times: UTC without saying so."""
        return datetime.fromtimestamp(self.now_s - max(kept_s, LEAST_AGE_S), UTC).replace(tzinfo=None)

    @property
    def out_of_time(self) -> bool:
        """Whether the pass ends where it is."""
        return time.monotonic() >= self.deadline_s

    def delete(self, what: str, connect: Callable[[], Any], statements: Sequence[Any], count: int) -> None:
        """Delete in one short transaction, or only count; then leave the storage to others for as long."""
        self.removed[what] += count
        if self.dry or not count:
            return
        began = time.monotonic()
        with connect() as connection:
            for statement in statements:
                connection.execute(statement)
        self.pause(max(time.monotonic() - began, 0.01))


class Event(NamedTuple):
    """What of an event's row decides over it: all but its body."""

    id: int
    run_id: str
    kind: str | None
    asset_key: str | None
    partition: str | None
    timestamp: datetime


@dataclass(frozen=True, slots=True)
class Doomed:
    """What of a window of events may go."""

    past: tuple[int, ...] = ()
    """Whatever else there is."""
    if_superseded: tuple[int, ...] = ()
    """Only where a newer event of the same asset, kind and partition stands."""


def plan_events(
    window: Iterable[Event],
    *,
    alive: frozenset[str],
    steps_before: datetime,
    history_before: datetime,
    runs_before: datetime,
    newest_without_partition: Mapping[tuple[str, str], int],
    named_by_checks: frozenset[int],
) -> Doomed:
    """Decide over a window of the event log.

    Args:
        window: Rows of the log.
        alive: Runs that are not finished: no event of theirs goes.
        steps_before: What runs logged and is older may go.
        history_before: Superseded events of assets and evaluations of checks that are older may go.
        runs_before: Changes of a run's status that are older may go.
        newest_without_partition: (asset, kind) -> id of the newest event that names no partition.
        named_by_checks: Ids that rows of check executions name.
    """
    past: list[int] = []
    if_superseded: list[int] = []
    for event in window:
        if event.run_id in alive or event.kind in LEFT_ALONE:
            continue
        if event.kind in OF_PARTITIONS:
            if event.asset_key is None or event.timestamp >= history_before:
                continue
            if event.partition is not None:
                if_superseded.append(event.id)
            elif event.id < newest_without_partition.get((event.asset_key, event.kind), 0):
                past.append(event.id)
        elif event.kind in OF_CHECKS:
            if event.timestamp < history_before and event.id not in named_by_checks:
                past.append(event.id)
        elif event.kind in OF_RUN_STATUS:
            if event.timestamp < runs_before:
                past.append(event.id)
        elif event.asset_key is None and event.timestamp < steps_before:
            # An event of an asset whose kind is unknown here is left alone: not to know is no reason to delete.
            past.append(event.id)
    return Doomed(tuple(past), tuple(if_superseded))


def enforce(
    instance: DagsterInstance,
    keep: Keep,
    *,
    dry: bool = False,
    now_s: float | None = None,
    budget_s: float = float("inf"),
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, int]:
    """Delete what is past its time from Dagster's storages; how much of each.

    It may run beside everything else, and beside itself: each transaction is short, and what is deleted is nobody's
    newest. What it did not get to within its budget, the next one does.

    Args:
        instance: Dagster's instance, on SQLite or Postgres.
        keep: How long what is kept.
        dry: Only count.
        now_s: Seconds since the epoch, UTC; default now.
        budget_s: Seconds after which it ends where it is.
        pause: How to wait between transactions, given the seconds that the last one took.
    """
    from geo_assets import catalog_retention_sqlite as sqlite

    this = Pass(
        instance,
        keep,
        dry,
        time.time() if now_s is None else now_s,
        time.monotonic() + budget_s,
        pause,
    )
    this.alive = _alive(this)
    _check_executions(this)
    _events(this)
    if sqlite.is_sharded(instance):
        sqlite.clean_shards(this)
    _runs(this)
    _backfills(this)
    _ticks(this)
    if not dry:
        if sqlite.is_sharded(instance):
            this.removed["bytes given back"] += sqlite.shrink(this)
        elif any(this.removed.values()):
            _vacuum(this)
    return {name: count for name, count in this.removed.items() if count}


def _alive(this: Pass) -> frozenset[str]:
    with this.runs.connect() as connection:
        rows = connection.execute(db.select(RunsTable.c.run_id).where(RunsTable.c.status.not_in(_FINISHED)))
        return frozenset(row[0] for row in rows)


# -- checks --------------------------------------------------------------------------------------------------------


def _check_executions(this: Pass) -> None:
    """Old evaluations go; of each check and partition the newest stays, and the newest that came to an end."""
    of = (_CHECKS.asset_key, _CHECKS.check_name, _CHECKS.partition)
    newest = db.select(db.func.max(_CHECKS.id)).group_by(*of)
    with this.events.index_connection() as connection:
        kept = {row[0] for row in connection.execute(newest)}
        completed = newest.where(_CHECKS.execution_status.in_(_COMPLETED_CHECKS))
        kept |= {row[0] for row in connection.execute(completed)}
    before = this.before(this.keep.history_s)
    columns = (_CHECKS.id, _CHECKS.run_id, _CHECKS.evaluation_event_timestamp, _CHECKS.create_timestamp)
    for rows in windows(this, this.events.index_connection, columns, _CHECKS.id):
        doomed = [
            row[0]
            for row in rows
            if row[0] not in kept and row[1] not in this.alive and (row[2] or row[3] or before) < before
        ]
        statement = AssetCheckExecutionsTable.delete().where(_CHECKS.id.in_(doomed))
        this.delete("check evaluations", this.events.index_connection, [statement], len(doomed))
        if all((row[2] or row[3] or before) >= before for row in rows):
            break


# -- events --------------------------------------------------------------------------------------------------------


def _events(this: Pass) -> None:
    connect = this.events.index_connection
    steps, history, runs = (this.before(s) for s in (this.keep.steps_s, this.keep.history_s, this.keep.runs_s))
    newest = max(steps, history, runs)
    with connect() as connection:
        named = frozenset(
            row[0] for row in connection.execute(db.select(_CHECKS.evaluation_event_storage_id)) if row[0] is not None
        )
        without_partition = _newest_without_partition(connection)
    columns = (
        _EVENTS.id, _EVENTS.run_id, _EVENTS.dagster_event_type, _EVENTS.asset_key, _EVENTS.partition, _EVENTS.timestamp,
    )  # fmt: skip
    for rows in windows(this, connect, columns, _EVENTS.id):
        window = [Event(*row) for row in rows]
        plan = plan_events(
            window,
            alive=this.alive,
            steps_before=steps,
            history_before=history,
            runs_before=runs,
            newest_without_partition=without_partition,
            named_by_checks=named,
        )
        kinds = {event.id: _named(event.kind) for event in window}
        doomed = [*plan.past, *_superseded(this, plan.if_superseded)]
        for what, ids in _grouped(doomed, kinds).items():
            statements = [
                SqlEventLogStorageTable.delete().where(_EVENTS.id.in_(ids)),
                AssetEventTagsTable.delete().where(AssetEventTagsTable.c.event_id.in_(ids)),
            ]
            this.delete(what, connect, statements, len(ids))
        if all(event.timestamp >= newest for event in window):
            break


def _named(kind: str | None) -> str:
    if kind == DagsterEventType.ASSET_MATERIALIZATION.value:
        return "superseded materializations"
    if kind in OF_PARTITIONS:
        return "superseded observations and plans"
    if kind in OF_CHECKS:
        return "events of checks"
    return "events of runs"


def _grouped(ids: Iterable[int], kinds: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in ids:
        found.setdefault(kinds[one], []).append(one)
    return found


def _newest_without_partition(connection: Connection) -> dict[tuple[str, str], int]:
    """(asset, kind) -> id of the newest event of an asset that names no partition."""
    found: dict[tuple[str, str], int] = {}
    keys = [row[0] for row in connection.execute(db.select(AssetKeyTable.c.asset_key))]
    for key in keys:
        for kind in sorted(OF_PARTITIONS):
            newest = connection.execute(
                db.select(db.func.max(_EVENTS.id)).where(
                    _EVENTS.asset_key == key, _EVENTS.dagster_event_type == kind, _EVENTS.partition.is_(None)
                )
            ).scalar()
            if newest is not None:
                found[key, kind] = newest
    return found


def _superseded(this: Pass, ids: Sequence[int]) -> list[int]:
    """Those of these events that a newer one of the same asset, kind and partition stands behind."""
    if not ids:
        return []
    newer = SqlEventLogStorageTable.alias("newer")
    query = db.select(_EVENTS.id).where(
        _EVENTS.id.in_(ids),
        db.exists().where(
            newer.c.asset_key == _EVENTS.asset_key,
            newer.c.dagster_event_type == _EVENTS.dagster_event_type,
            newer.c.partition == _EVENTS.partition,
            newer.c.id > _EVENTS.id,
        ),
    )
    with this.events.index_connection() as connection:
        return [row[0] for row in connection.execute(query)]


# -- runs, backfills, ticks ----------------------------------------------------------------------------------------


def _runs(this: Pass) -> None:
    """Runs that ended long ago, but for those that something of the catalog still stands on."""
    before = this.before(this.keep.runs_s)
    end_before = before.replace(tzinfo=UTC).timestamp()
    with this.events.index_connection() as connection:
        last = {row[0] for row in connection.execute(db.select(AssetKeyTable.c.last_run_id))}
    with this.runs.connect() as connection:
        backfills = {
            row[0]
            for row in connection.execute(
                db.select(BulkActionsTable.c.key).where(BulkActionsTable.c.status.not_in(_ENDED_BACKFILLS))
            )
        }
    columns = (
        RunsTable.c.id, RunsTable.c.run_id, RunsTable.c.status, RunsTable.c.end_time, RunsTable.c.update_timestamp,
        RunsTable.c.backfill_id,
    )  # fmt: skip
    for rows in windows(this, this.runs.connect, columns, RunsTable.c.id, RunsTable.c.status.in_(_FINISHED)):
        ended = [
            (run_id, status)
            for _, run_id, status, end_time, updated, backfill in rows
            if (end_time < end_before if end_time is not None else updated is not None and updated < before)
            and run_id not in last
            and backfill not in backfills
        ]
        failed = [run_id for run_id, status in ended if status == DagsterRunStatus.FAILURE.value]
        stood_on = _failed_partitions(this, failed)
        doomed = [run_id for run_id, _ in ended if run_id not in stood_on]
        if not this.dry and not _what_they_printed(this, doomed):
            return
        statements = [
            RunTagsTable.delete().where(RunTagsTable.c.run_id.in_(doomed)),
            RunsTable.delete().where(RunsTable.c.run_id.in_(doomed)),
        ]
        this.delete("runs", this.runs.connect, statements, len(doomed))


def _what_they_printed(this: Pass, run_ids: Sequence[str]) -> bool:
    """Delete what runs printed, before the runs: without them nobody would find it. Whether that was possible."""
    try:
        for run_id in run_ids:
            this.instance.compute_log_manager.delete_logs(prefix=[run_id])
    except Exception as fault:  # The object store's client has errors of its own.
        log.warning("what old runs printed cannot be deleted now: they stay", error=f"{type(fault).__name__}: {fault}")
        return False
    return True


def _failed_partitions(this: Pass, run_ids: Sequence[str]) -> set[str]:
    """The runs by which a partition is shown as failed: nothing of it was planned or materialized since."""
    if not run_ids:
        return set()
    newer = SqlEventLogStorageTable.alias("newer")
    query = (
        db.select(_EVENTS.run_id)
        .distinct()
        .where(
            _EVENTS.run_id.in_(run_ids),
            _EVENTS.dagster_event_type == DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
            _EVENTS.partition.is_not(None),
            ~db.exists().where(
                newer.c.asset_key == _EVENTS.asset_key,
                newer.c.dagster_event_type.in_(
                    [
                        DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
                        DagsterEventType.ASSET_MATERIALIZATION.value,
                    ]
                ),
                newer.c.partition == _EVENTS.partition,
                newer.c.id > _EVENTS.id,
            ),
        )
    )
    with this.events.index_connection() as connection:
        return {row[0] for row in connection.execute(query)}


def _backfills(this: Pass) -> None:
    before = this.before(this.keep.runs_s)
    columns = (BulkActionsTable.c.id, BulkActionsTable.c.key, BulkActionsTable.c.timestamp)
    ended = BulkActionsTable.c.status.in_(_ENDED_BACKFILLS)
    for rows in windows(this, this.runs.connect, columns, BulkActionsTable.c.id, ended):
        doomed = [key for _, key, timestamp in rows if timestamp < before]
        statements = [
            BackfillTagsTable.delete().where(BackfillTagsTable.c.backfill_id.in_(doomed)),
            BulkActionsTable.delete().where(BulkActionsTable.c.key.in_(doomed)),
        ]
        this.delete("backfills", this.runs.connect, statements, len(doomed))


def _ticks(this: Pass) -> None:
    """Old ticks, those of sensors that are no more included; of each the newest stays, from which it goes on."""
    ticks = JobTickTable.c
    before = this.before(this.keep.ticks_s)
    with this.ticks.connect() as connection:
        newest = db.select(db.func.max(ticks.id)).group_by(ticks.job_origin_id, ticks.selector_id)
        kept = {row[0] for row in connection.execute(newest)}
    for rows in windows(this, this.ticks.connect, (ticks.id, ticks.timestamp), ticks.id):
        doomed = [tick for tick, timestamp in rows if tick not in kept and timestamp < before]
        statement = JobTickTable.delete().where(ticks.id.in_(doomed))
        this.delete("ticks", this.ticks.connect, [statement], len(doomed))
        if all(timestamp >= before for _, timestamp in rows):
            break


# -- how -----------------------------------------------------------------------------------------------------------


def windows(
    this: Pass, connect: Callable[[], Any], columns: Sequence[Any], key: Any, where: Any = None
) -> Iterator[Sequence[Any]]:
    """Rows in the order of their ids, a window at a time; no lock and no cursor is held in between."""
    last = -1
    while not this.out_of_time:
        query = db.select(*columns).where(key > last).order_by(key).limit(BATCH_ROWS)
        with connect() as connection:
            rows = connection.execute(query if where is None else query.where(where)).fetchall()
        if not rows:
            return
        last = rows[-1][0]
        yield rows
        if len(rows) < BATCH_ROWS:
            return


def _vacuum(this: Pass) -> None:
    """Let Postgres use the room again now: at a high rate its own vacuum comes late. Nobody is locked out."""
    with this.events.index_connection() as connection:
        connection.execute(db.text("VACUUM event_logs"))
        connection.execute(db.text("VACUUM asset_check_executions"))
    with this.runs.connect() as connection:
        connection.execute(db.text("VACUUM runs"))
        connection.execute(db.text("VACUUM run_tags"))
    with this.ticks.connect() as connection:
        connection.execute(db.text("VACUUM job_ticks"))
