"""The sensor that tells people what is wrong: reads check evaluations and runs' ends, and sends what is owed.

What is wrong and who knows of it, services/alerting.py says; here is what touches Dagster's storage, the ledger and the
channels. A message is stored before it is sent, so that a tick that dies sends it again under the same id.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog
from dagster import (
    AssetCheckEvaluation,
    AssetCheckSeverity,
    DagsterEventType,
    DagsterInstance,
    DefaultSensorStatus,
    EventLogEntry,
    RunsFilter,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    TableMetadataValue,
    sensor,
)
from dagster._core.events import JobFailureData

from geo_assets.assets.stack_resource import StackResource
from geo_assets.jobs import BATCH_TAG
from geo_assets.services import alerting
from geo_assets.services.alerting import VALUE, Evaluation, Links, RunEnd, State
from geo_assets.stack import Stack
from resources.alerts.protocol import NotDelivered
from resources.ledger.protocol import LedgerUnavailable

log = structlog.get_logger()

EVALUATIONS = DagsterEventType.ASSET_CHECK_EVALUATION
FAILURES = DagsterEventType.RUN_FAILURE
SUCCESSES = DagsterEventType.RUN_SUCCESS

PAGE = 500
"""Events of one query: some 5 kB each."""

READING_S = 5.0
"""How long a tick reads; the rest is read by the next one, and nobody is told before the newest is known."""

SENT_AT_ONCE = 16
"""Channels that are told at the same time: one that hangs delays no other."""

MOST_SENT = 4 * SENT_AT_ONCE
"""Channels that one tick tells. Were all of them to hang, for five seconds each, it would take twenty: with what it
reads far below the minute that Dagster gives it."""

SETTLED_MS = 60_000
"""How long an event may be on its way: ids are given out before the event can be read, and may be read out of order."""

START_MS = 600_000
"""At the very first tick, how old a result may be: what was found before anybody asked to be told is in the UI."""

START_EVENTS = 5_000
"""Newest events looked at then."""


@dataclass(slots=True)
class Tick:
    """What a tick did."""

    told: list[str] = field(default_factory=list[str])
    """Channel and title of each message taken."""
    refused: list[str] = field(default_factory=list[str])
    behind: bool = False
    raced: bool = False
    positions: Mapping[str, int] = field(default_factory=dict[str, int])
    firing: int = 0
    owed: int = 0

    @property
    def reason(self) -> str:
        """In words."""
        if self.raced:
            return "another sensor was faster"
        parts = [f"told {each}" for each in self.told] + [f"not delivered: {each}" for each in self.refused]
        if self.behind:
            parts.append("reading on: nobody is told before the newest results are read")
        if self.owed:
            parts.append(f"{self.owed} messages are not delivered yet")
        parts.append(f"{self.firing} alerts stand" if self.firing else "nothing is wrong")
        return "; ".join(parts)


# -- reading -------------------------------------------------------------------------------------------------------


def severity_of(evaluation: AssetCheckEvaluation) -> alerting.Severity:
    """The check's own severity."""
    return "warning" if evaluation.severity is AssetCheckSeverity.WARN else "error"


def failing_of(evaluation: AssetCheckEvaluation) -> list[tuple[str, str]]:
    """Rows of the check's table of what fails: partition or name, and the problem."""
    rows: list[tuple[str, str]] = []
    for value in evaluation.metadata.values():
        if not isinstance(value, TableMetadataValue):
            continue
        for record in value.records:
            subject = record.data.get("partition") or record.data.get("subject")
            if subject:
                rows.append((str(subject), str(record.data.get("problem") or "")))
        if rows:
            break
    return rows


def evaluation_of(number: int, entry: EventLogEntry) -> Evaluation | None:
    """What a stored evaluation says; None for one of a partition: those are told by their asset's check."""
    found = entry.get_dagster_event().event_specific_data
    if not isinstance(found, AssetCheckEvaluation) or found.partition is not None:
        return None
    failing = [] if found.passed else failing_of(found)
    faults = found.metadata.get("faults")
    count = faults.value if faults is not None and isinstance(faults.value, int) else len(failing)
    return Evaluation(
        id=number,
        check=f"{found.asset_key.to_user_string()}/{found.check_name}",
        at_ms=int(entry.timestamp * 1000),
        passed=found.passed,
        severity=severity_of(found),
        summary=found.description or "",
        failing=tuple(failing),
        count=max(count, len(failing)),
    )


def error_of(entry: EventLogEntry) -> str:
    """The first line of what a run died of: of the cause, not of what wraps it."""
    event = entry.get_dagster_event()
    data = event.event_specific_data
    if not isinstance(data, JobFailureData):
        return event.message or ""
    step = data.first_step_failure_event
    error = getattr(step.event_specific_data, "error", None) if step is not None else None
    error = error or data.error
    if error is None:
        return event.message or ""
    while error.cause is not None:
        error = error.cause
    lines = [text.strip() for text in error.message.splitlines() if text.strip()]
    return lines[0] if lines else error.cls_name or ""


@dataclass(slots=True)
class Read:
    """What was new in Dagster's storage."""

    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    ends: list[RunEnd] = field(default_factory=list[RunEnd])
    behind: bool = False
    """Whether there is more."""


def read(instance: DagsterInstance, state: State, now_ms: int, known: Collection[str]) -> Read:
    """Read on in Dagster's event log, ascending, and move the positions past what nobody can still be writing.

    Args:
        instance: Dagster's instance.
        state: Its positions move.
        now_ms: Milliseconds since the epoch, UTC.
        known: Checks that are listened to.
    """
    newest = instance.event_log_storage.get_maximum_record_id() or 0
    since_ms = 0
    kinds = (EVALUATIONS, FAILURES, SUCCESSES)
    if not state.ahead_ms or newest < state.ahead:
        # The first tick, or a storage that was made anew.
        state.positions = {kind.value: max(0, newest - START_EVENTS) for kind in kinds}
        state.ahead, state.ahead_ms, state.checks, state.runs = newest, now_ms, {}, []
        since_ms = now_ms - START_MS
    for kind in kinds:
        state.positions.setdefault(kind.value, state.ahead)
    found = Read()
    until = time.monotonic() + READING_S
    settled = now_ms - state.ahead_ms >= SETTLED_MS
    waiting = {condition.alert.name for condition in state.firing.values() if condition.alert.kind == "run"}
    for kind in kinds:
        if kind is SUCCESSES and not waiting and not any(end.failed for end in found.ends):
            events, full = {}, False  # Nobody waits for one.
        else:
            events, full = _pages(instance, kind, state.positions[kind.value], until)
        fresh = {number: entry for number, entry in events.items() if entry.timestamp * 1000 >= since_ms}
        if kind is EVALUATIONS:
            made = [evaluation_of(number, entry) for number, entry in fresh.items()]
            found.evaluations += [one for one in made if one is not None and one.check in known]
        else:
            found.ends += _ends(instance, fresh, state, failed=kind is FAILURES)
        if full:
            found.behind = True
            last, entry = next(reversed(events.items()))
            if entry.timestamp * 1000 < now_ms - SETTLED_MS:
                state.positions[kind.value] = last
        elif settled:
            state.positions[kind.value] = max(state.positions[kind.value], state.ahead)
    if settled:
        state.ahead, state.ahead_ms = newest, now_ms
    return found


def _pages(
    instance: DagsterInstance, kind: DagsterEventType, after: int, until: float
) -> tuple[dict[int, EventLogEntry], bool]:
    """Events after an id, oldest first, and whether there may be more."""
    events: dict[int, EventLogEntry] = {}
    while True:
        page = instance.event_log_storage.get_logs_for_all_runs_by_log_id(
            after_cursor=after, dagster_event_type=kind, limit=PAGE
        )
        events.update(page)
        if len(page) < PAGE:
            return events, False
        after = max(page)
        if time.monotonic() >= until:
            return events, True


def _ends(
    instance: DagsterInstance, events: Mapping[int, EventLogEntry], state: State, *, failed: bool
) -> list[RunEnd]:
    counted = set(state.runs)
    fresh = {number: entry for number, entry in events.items() if number not in counted}
    tags: dict[str, Mapping[str, str]] = {}
    if failed:
        run_ids = sorted({entry.run_id for entry in fresh.values()})
        for start in range(0, len(run_ids), PAGE):
            runs = instance.get_runs(RunsFilter(run_ids=run_ids[start : start + PAGE]))
            tags |= {run.run_id: run.tags for run in runs}
    ends: list[RunEnd] = []
    for number, entry in fresh.items():
        of_run = tags.get(entry.run_id, {})
        ends.append(
            RunEnd(
                id=number,
                at_ms=int(entry.timestamp * 1000),
                run_id=entry.run_id,
                job=entry.job_name or entry.get_dagster_event().job_name,
                failed=failed,
                error=error_of(entry) if failed else "",
                batch=of_run.get(BATCH_TAG, ""),
                partition=of_run.get("dagster/partition", ""),
                region=of_run.get("geo_assets/region", ""),
            )
        )
    return ends


# -- one tick ------------------------------------------------------------------------------------------------------


def tick(stack: Stack, instance: DagsterInstance, known: Collection[str], now_ms: int) -> Tick:
    """Read, judge, and tell each channel what it is owed.

    Args:
        stack: Ledger and channels.
        instance: Dagster's instance.
        known: Checks that are listened to, `asset/check`: those that exist.
        now_ms: Milliseconds since the epoch, UTC.
    """
    ledger, channels = stack.ledger, stack.alerts
    before = ledger.get_value(VALUE)
    state = State.from_json(before)
    links = Links(stack.settings.dagster_url, stack.settings.tiles_url)
    alerting.follow_channels(state, channels.channels)
    found = read(instance, state, now_ms, known)
    alerting.judge_checks(state, found.evaluations, links)
    alerting.judge_runs(state, found.ends, links, now_ms)
    alerting.drop_checks(state, known, now_ms)
    oldest = min(state.positions[FAILURES.value], state.positions[SUCCESSES.value])
    state.runs = [number for number in state.runs if number > oldest]
    if not found.behind:
        alerting.compose(state, now_ms)
    done = Tick(behind=found.behind, positions=state.positions)
    # A message is durable before it is sent: whoever sends it again sends the same.
    stored = state.to_json()
    if stored != before and not ledger.set_value(VALUE, stored, expect=before):
        done.raced = True
        return done
    owed = alerting.due(state, now_ms)[:MOST_SENT]
    with ThreadPoolExecutor(SENT_AT_ONCE, thread_name_prefix="alerts") as pool:
        sent = [(name, message, pool.submit(channels.send, name, message)) for name, message in owed]
    for name, message, sending in sent:
        try:
            sending.result()
        except NotDelivered as fault:
            _refused(state, name, fault.problem, fault.retry_after_s, now_ms, done)
        except Exception as fault:
            # Whatever a channel's client raises is the channel's trouble, not the sensor's.
            _refused(state, name, type(fault).__name__, 0.0, now_ms, done)
        else:
            alerting.taken(state, name)
            done.told.append(f"{name}: {', '.join(sorted({alert.name for alert in message.alerts})[:5])}")
    after = state.to_json()
    if after != stored:
        ledger.set_value(VALUE, after, expect=stored)
    summary = alerting.summary_of(state)
    done.firing, done.owed = summary["firing"], summary["undelivered"]
    return done


def _refused(state: State, name: str, problem: str, retry_after_s: float, now_ms: int, done: Tick) -> None:
    alerting.refused(state, name, problem, retry_after_s, now_ms)
    attempts = state.channels[name].attempts
    log.warning("alert not delivered, will try again", channel=name, attempts=attempts, error=problem)
    done.refused.append(f"{name}, {problem}")


def checks_of(context: SensorEvaluationContext) -> Sequence[str]:
    """The checks that this code location defines."""
    assert context.repository_def is not None
    keys = context.repository_def.asset_graph.asset_check_keys
    return sorted(f"{key.asset_key.to_user_string()}/{key.name}" for key in keys)


@sensor(
    name="check_alerts",
    minimum_interval_seconds=1,
    default_status=DefaultSensorStatus.RUNNING,
    description=(
        "Tells people when a check fails, changes or recovers and when runs fail: one message a tick, grouped by check "
        "and region, to the webhooks of GEO_ASSETS_ALERT_WEBHOOK_URLS or to the log. What a webhook does not take is "
        "sent again. The ledger keeps the state; the cursor only shows how far the event log was read."
    ),
)
def check_alerts(context: SensorEvaluationContext, stack: StackResource) -> SensorResult:
    """Evaluate one tick."""
    try:
        with stack.opened() as ports:
            done = tick(ports, context.instance, checks_of(context), time.time_ns() // 1_000_000)
    except LedgerUnavailable as away:
        log.warning("tick skipped", error=str(away), kind=type(away).__name__)
        return SensorResult(skip_reason=SkipReason(f"{away}; the next tick tries again"))
    return SensorResult(skip_reason=SkipReason(done.reason), cursor=json.dumps(done.positions, sort_keys=True))
