"""The sensor that turns hints into dirty tiles and dirty tiles into runs: pure planning functions under a thin shell.

It is level triggered: what decides is which tiles the ledger calls dirty, never which record just came. So a killed
run, a failed launch or a lost tick needs no memory of its own: the tile is still dirty and is asked for again.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import structlog
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunRecord,
    RunRequest,
    RunsFilter,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from geo_assets import catalog
from geo_assets.assets.features import observe_if_moved
from geo_assets.assets.repair import REPAIR_TAG, REPAIR_VALUE, repair_coverage
from geo_assets.assets.stack_resource import StackResource
from geo_assets.events import topics
from geo_assets.jobs import AUDIT_TAG, BATCH_TAG, ROUTING_TAG, audit, build_tiles, tags_of
from geo_assets.kubernetes.pods import Load, run_tags, size_of
from geo_assets.services import throughput
from geo_assets.services.announce import sweep_announcements
from geo_assets.services.build import tile_dead_letter, weigh
from geo_assets.services.dead_letters import write_dead_letters
from geo_assets.services.hints import hint_dead_letter, read_slice
from geo_assets.services.lane import health as lane
from geo_assets.services.lost_records import remember_loss, stop_if_told
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile, TileError
from resources.event_log.protocol import LogUnavailable, OffsetOutOfRange
from resources.ledger.protocol import Batch, Failure, LedgerUnavailable, MarkKind, Settle, TileState
from sensors.launch_pauses import pause_of
from sensors.pool_waits import end_waiting, has_waited_too_long

log = structlog.get_logger()

NAME = "tile_updates"

GROUP = "tile-updates"
"""Consumer group under which the positions are shown; they are kept in the ledger."""

SLICE_RECORDS = 10_000
"""Records of one partition in one tick: about a second of reading and marking on SQLite."""

DIRTY_LOOKED_AT = 10_000
"""Most dirty tiles weighed in one tick: settling them in bulk takes a few seconds of a tick's sixty."""

BATCH_VERTICES = 20_000_000
"""Vertices of one run: about half a minute of encoding on two cores, after a start that costs three seconds."""

TILE_VERTICES = 500
"""What a tile costs before its first vertex, in vertices: half a millisecond."""

UNSEEN_MS = 20_000
"""How long a batch may be without a run. A tick's requests are submitted before the next tick begins, which comes
after five seconds; a batch older than this one's run was never submitted."""

CATALOG_AGE_MS = 30_000
"""How old an unpaid catalog row is before the sensor reports it: a run reports its own every few seconds."""

CATALOG_ROWS = 5_000
"""Catalog rows paid in one tick: two seconds of writing."""

REPAIR_TRIES = 5
"""Runs that may fail to plan a repair before a person has to look."""

AUDIT_QUIET_MS = 30_000
"""How long nothing may have been committed before the checks are evaluated: one more edit would void them in the UI,
which shows a check's result beside the newest materialization alone."""

AUDIT_EVERY_MS = 120_000
"""Least time between two audits the sensor asks for: each starts a process and reads hundreds of tiles."""

AUDIT_VALUE = "audit-asked"
"""The ledger's named value: the commits seen last and since when, and those at the last audit asked for."""

ALIVE = frozenset(
    {
        DagsterRunStatus.QUEUED,
        DagsterRunStatus.NOT_STARTED,
        DagsterRunStatus.MANAGED,
        DagsterRunStatus.STARTING,
        DagsterRunStatus.STARTED,
        DagsterRunStatus.CANCELING,
    }
)

LOST = "its run ended without a word: killed, evicted or out of memory"


# -- looking after batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Care:
    """What becomes of the open batches."""

    renew: tuple[Batch, ...] = ()
    """Their run is queued or alive, or not seen yet."""
    end: tuple[Batch, ...] = ()
    """Their run ended, was cancelled or never began: what is dirty of them is taken anew."""
    lost: tuple[Batch, ...] = ()
    """Their run died over them: asked for again in halves, or charged when it is a single tile."""


def care_for(batches: Iterable[Batch], runs: Mapping[str, DagsterRunStatus], now_ms: int) -> Care:
    """Decide what becomes of each open batch.

    Args:
        batches: Open batches, oldest first.
        runs: Status of the newest run of each batch that has one.
        now_ms: Milliseconds since the epoch, UTC.
    """
    renew: list[Batch] = []
    end: list[Batch] = []
    lost: list[Batch] = []
    for batch in batches:
        status = runs.get(batch.id)
        if status in ALIVE or (status is None and now_ms - batch.created_ms < UNSEEN_MS):
            renew.append(batch)
        elif status is DagsterRunStatus.FAILURE and batch.state == "running":
            # A run that ends in good order, even in failure, closes its batch itself: this one could not.
            lost.append(batch)
        else:
            end.append(batch)
    return Care(tuple(renew), tuple(end), tuple(lost))


def still_dirty(batch: Batch, states: Mapping[str, TileState], now_ms: int) -> list[str]:
    """The tiles of a batch that nobody built since, gave up, or holds under another lease."""
    return [
        key
        for key in batch.keys
        if (state := states[key]).dirty
        and state.given_up < state.wanted
        and (state.lease in (None, batch.id) or state.lease_until_ms <= now_ms)
    ]


def halves(keys: Sequence[str]) -> list[list[str]]:
    """Two halves of two or more tiles; the culprit is in one of them."""
    middle = (len(keys) + 1) // 2
    return [list(keys[:middle]), list(keys[middle:])]


# -- cutting work into batches -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """A dirty tile with what a build of it would find."""

    state: TileState
    work_key: str
    vertices: int

    @property
    def key(self) -> str:
        """The partition key."""
        return self.state.key

    @property
    def weight(self) -> int:
        """What it costs, in vertices."""
        return self.vertices + TILE_VERTICES


def settleable(work: Iterable[Work]) -> list[Settle]:
    """Live tiles that already are what a build would make of them. A backfill's go to a run, which reports them."""
    return [
        Settle(one.key, one.state.revision, one.state.wanted, one.work_key)
        for one in work
        if one.state.work_key == one.work_key
        and one.state.wanted_backfill <= one.state.built
        and one.state.forced <= one.state.built
    ]


def cut(work: Sequence[Work], slots: int, most_tiles: int, most_weight: int = BATCH_VERTICES) -> list[list[Work]]:
    """Cut work into at most `slots` batches of similar weight; what does not fit waits.

    Args:
        work: In order of work: the first fit first.
        slots: Most batches.
        most_tiles: Most tiles of a batch.
        most_weight: Most weight of a batch; a tile heavier than it is a batch of its own.

    Returns:
        Batches in quadkey order, so that neighbours, which share features, are built together.
    """
    chosen: list[Work] = []
    weight = 0
    for one in work:
        if len(chosen) >= slots * most_tiles or (chosen and weight + one.weight > slots * most_weight):
            break
        chosen.append(one)
        weight += one.weight
    if not chosen or slots < 1:
        return []
    chosen.sort(key=lambda one: (one.key.partition(":")[2], one.key))
    count = min(slots, max(-(-len(chosen) // most_tiles), -(-weight // most_weight)))
    pieces: list[list[Work]] = [[]]
    filled = 0
    for index, one in enumerate(chosen):
        left = count - len(pieces)
        # A batch ends when it has its share of the weight, unless the rest would then be too many tiles for the others.
        has_share = filled * count >= weight * len(pieces) and len(chosen) - index <= left * most_tiles
        if left and pieces[-1] and (has_share or len(pieces[-1]) == most_tiles):
            pieces.append([])
        pieces[-1].append(one)
        filled += one.weight
    return pieces


def run_key(batch: Batch, work: Mapping[str, Work]) -> str:
    """Hash of the batch's work keys, marks and try: the same request twice is one run, a new try is another one.

    The content alone would suppress the way back to an earlier state, and the marks alone every retry. The batch's id
    is part of the try: a batch is opened anew for each.
    """
    digest = hashlib.sha256(f"{batch.id}|{batch.attempt}".encode())
    for key in sorted(batch.keys):
        one = work[key]
        digest.update(f"\n{key}|{one.work_key}|{one.state.wanted}|{one.state.attempts}".encode())
    return digest.hexdigest()[:32]


# -- when to audit -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audits:
    """What the sensor remembers for audits. `commits` are the ledger's `revision_sum`, which only grows."""

    commits: int = 0
    """Commits at the last look."""
    since_ms: int = 0
    """Since when there were no others, as far as the looks tell."""
    asked_commits: int = 0
    """Commits at the last audit asked for: 0 before the first, when there is nothing to audit either."""
    asked_ms: int = 0

    @classmethod
    def from_json(cls, text: str | None) -> Self:
        """Read the named value; one that cannot be read counts as none."""
        try:
            body = json.loads(text or "{}")
            return cls(**{name: int(body.get(name, 0)) for name in cls.__slots__})
        except (AttributeError, TypeError, ValueError):
            return cls()

    def to_json(self) -> str:
        """The named value."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def plan_audit(seen: Audits, commits: int, *, busy: bool, now_ms: int) -> tuple[Audits, bool]:
    """Decide whether the checks are to be evaluated now, and what is to be remembered.

    An audit commits no tile. So it is followed by another one only if it found a fault that a build then repaired, and
    never sooner than `AUDIT_EVERY_MS`.

    Args:
        seen: What was remembered.
        commits: The ledger's `revision_sum`.
        busy: Something is dirty, owed to the catalog or running: materializations are still to come.
        now_ms: Milliseconds since the epoch, UTC.
    """
    if commits != seen.commits:
        seen = replace(seen, commits=commits, since_ms=now_ms)
    quiet = not busy and now_ms - seen.since_ms >= AUDIT_QUIET_MS
    if commits == seen.asked_commits or not quiet or now_ms - seen.asked_ms < AUDIT_EVERY_MS:
        return seen, False
    return replace(seen, asked_commits=commits, asked_ms=now_ms), True


# -- the shell -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tick:
    """What one tick did, for its log line, its cursor and its reason to skip."""

    read: int = 0
    marked: int = 0
    dead: int = 0
    settled: int = 0
    announced: int = 0
    reported: int = 0
    in_flight: int = 0
    waiting: int = 0
    grace_ms: int = 0
    """How young a live mark was left to the fast lane."""
    ended: int = 0
    """Batches that were ended: their runs are over, or never began."""
    refused: int = 0
    """Launches that failed in a row."""
    pause_s: float = 0.0
    """For how long no run is asked for, seconds."""
    positions: dict[str, dict[int, int]] = field(default_factory=dict)
    """Topic -> partition -> next offset."""
    requests: list[RunRequest] = field(default_factory=list)

    def skip_reason(self, limit: int) -> str:
        """Why no run was asked for, in words."""
        done = ", ".join(
            f"{count:,} {name}"
            for name, count in (
                ("records read", self.read),
                ("tiles marked", self.marked),
                ("dead letters", self.dead),
                ("settled without a run", self.settled),
                ("reported to the catalog", self.reported),
            )
            if count
        )
        if self.pause_s:
            reason = f"{self.refused} launches failed in a row: the next run is asked for in {self.pause_s:.0f} s"
        elif self.waiting:
            reason = f"{self.in_flight} runs in flight of {limit}: {self.waiting:,} dirty tiles wait"
        elif self.in_flight:
            reason = f"{self.in_flight} runs in flight, nothing else is dirty"
        elif self.grace_ms:
            reason = f"the fast lane builds what has been dirty for less than {self.grace_ms // 1000} s"
        else:
            reason = "nothing is dirty"
        return f"{reason} ({done})" if done else reason


def tick(stack: Stack, instance: DagsterInstance, now_ms: int | None = None) -> Tick:
    """One evaluation: look after batches, pay what is owed, mark what is hinted at, ask for what is dirty."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    done = Tick()
    opened = _look_after(stack, instance, now_ms, done)
    done.announced = sweep_announcements(stack)
    done.reported = catalog.pay_owed(
        stack.ledger, instance, stack.settings, limit=CATALOG_ROWS, min_age_ms=CATALOG_AGE_MS
    )
    _mark(stack, now_ms, done)
    if stack.settings.run_pods:
        done.refused, done.pause_s = pause_of(instance, NAME, now_ms / 1000)
    if done.pause_s and done.ended:
        log.warning("runs cannot be launched", failed_in_a_row=done.refused, pause_s=round(done.pause_s, 1))
    if not done.pause_s:
        _request_repair(stack, instance, done)
        opened += _take(stack, now_ms, done)
    if opened:
        _request(stack, instance, opened, done)
    if not done.pause_s:
        _request_audit(stack, instance, now_ms, done)
    observe_if_moved(stack, instance, now_ms)
    return done


def _runs_of(instance: DagsterInstance, batches: Sequence[Batch]) -> dict[str, RunRecord]:
    """Each batch's run; of several (someone launched it again) the one that is alive, else the newest."""
    found: dict[str, RunRecord] = {}
    if not batches:
        return found
    tags: dict[str, Any] = {BATCH_TAG: [batch.id for batch in batches]}
    for record in instance.get_run_records(RunsFilter(tags=tags)):  # Newest first.
        run = record.dagster_run
        known = found.get(run.tags[BATCH_TAG])
        if known is None or (run.status in ALIVE and known.dagster_run.status not in ALIVE):
            found[run.tags[BATCH_TAG]] = record
    return found


def _look_after(stack: Stack, instance: DagsterInstance, now_ms: int, done: Tick) -> list[Batch]:
    ledger, settings = stack.ledger, stack.settings
    batches = ledger.batches()
    runs = _runs_of(instance, batches)
    statuses = {
        batch_id: end_waiting(instance, record, now_ms, settings.pool_wait_s)
        if has_waited_too_long(record, now_ms, settings.pool_wait_s)
        else record.dagster_run.status
        for batch_id, record in runs.items()
    }
    care = care_for(batches, statuses, now_ms)
    for batch in care.end:
        ledger.end_batch(batch.id)
    done.ended = len(care.end)
    done.in_flight = len(care.renew)
    opened: list[Batch] = []
    waiting: list[Batch] = []
    for batch in care.lost:
        if done.in_flight + len(opened) >= settings.runs_in_flight:
            waiting.append(batch)  # Its halves come when there is room; until then nobody else takes its tiles.
            continue
        dirty = still_dirty(batch, ledger.read(batch.keys), now_ms)
        log.warning("run lost", batch=batch.id, attempt=batch.attempt, tiles=len(batch.keys), dirty=len(dirty))
        if len(dirty) > 1:
            groups = halves(dirty)
        elif dirty and not _charge(stack, dirty[0]):
            groups = [dirty]  # Alone again, or it would take its neighbours with it.
        else:
            groups = []
        ledger.end_batch(batch.id)
        opened += ledger.open_batches(
            groups,
            kind=batch.kind,
            ttl_s=settings.lease_s,
            attempt=batch.attempt + 1,
            manifest=batch.manifest,
        )
    held = [batch.id for batch in (*care.renew, *waiting)]
    if held:
        ledger.renew_batches(held, settings.lease_s)
    done.waiting += sum(len(batch.keys) for batch in waiting)
    return opened


def _charge(stack: Stack, key: str) -> bool:
    """A tile that was alone with its run when that died is what killed it. Whether it is given up with this."""
    state = stack.ledger.read([key])[key]
    limit = stack.settings.max_attempts
    log.warning("tile charged with its lost run", tile=key, attempt=state.attempts + 1, limit=limit)
    if state.attempts + 1 >= limit:
        # Written before the ledger gives it up: a crash in between writes it twice, under the same id.
        write_dead_letters(stack, [tile_dead_letter(key, LOST, limit, state.wanted)])
    return key in stack.ledger.fail([Failure(key, state.wanted, LOST)], max_attempts=limit)


def _mark(stack: Stack, now_ms: int, done: Tick) -> None:
    for topic in topics.TILE_HINTS:
        _mark_of(topic, stack, now_ms, done)


def _mark_of(topic: str, stack: Stack, now_ms: int, done: Tick) -> None:
    topic_id = stack.log.topic_id(topic)
    positions, read = stack.ledger.positions(topic_id), done.read
    reached = done.positions.setdefault(topic, {})
    for partition in sorted(stack.log.extents(topic)):
        position = positions.get(partition, 0)
        try:
            records = stack.log.read(topic, partition, position, max_records=SLICE_RECORDS)
        except OffsetOutOfRange as gone:
            position = gone.begin
            _repair(stack, topic_id, gone, now_ms)
            records = stack.log.read(topic, partition, position, max_records=SLICE_RECORDS)
        reached[partition] = position
        if not records:
            continue
        part = read_slice(records, position)
        # What no tile can be made of is durable as a dead letter before the position moves past it.
        write_dead_letters(stack, [hint_dead_letter(record, fault, now_ms) for record, fault in part.unreadable])
        done.marked += stack.ledger.mark_from_log(topic_id, partition, part.hints, part.next_offset)
        done.read += len(records)
        done.dead += len(part.unreadable)
        reached[partition] = part.next_offset
    if done.read > read:
        stack.log.commit(GROUP, topic, reached)


def _repair(stack: Stack, topic_id: str, gone: OffsetOutOfRange, now_ms: int) -> None:
    """Records were deleted before they were read: the whole map is looked at again, and this is said loudly.

    The wish comes before the position: a crash in between repairs twice, and never not at all.

    Raises:
        RecordsLost: The settings say to stop. Nothing moves: each tick fails so until somebody decides.
    """
    stop_if_told(stack.settings, gone, "sensor tile_updates", "the whole map is then looked at again")
    name = f"repair-{topic_id[:8]}-{gone.partition}-{gone.offset}-{gone.begin}"
    log.error(
        "hints were lost to retention: the whole map is looked at again",
        topic=gone.topic, partition=gone.partition, position=gone.offset, oldest=gone.begin, newest=gone.end,
        repair=name,
    )  # fmt: skip
    remember_loss(stack.ledger, gone, now_ms)
    stack.ledger.set_value(REPAIR_VALUE, name)
    stack.ledger.reset_position(topic_id, gone.partition, gone.begin)


def _request_repair(stack: Stack, instance: DagsterInstance, done: Tick) -> None:
    name = stack.ledger.get_value(REPAIR_VALUE)
    if name is None:
        return
    runs = instance.get_runs(RunsFilter(tags={REPAIR_TAG: name}))
    if any(run.status in ALIVE for run in runs):
        return
    if len(runs) >= REPAIR_TRIES:
        log.error("repair failed too often: start the job repair_coverage by hand", repair=name, tries=len(runs))
        return
    done.requests.append(
        RunRequest(
            job_name=repair_coverage.name,
            run_key=f"{name}-{len(runs)}",
            run_config={"ops": {"plan_repair": {"config": {"name": name}}}},
            tags={REPAIR_TAG: name},
        )
    )


def _weighed(stack: Stack, states: Sequence[TileState]) -> list[Work]:
    """What a build of each would find. Read after the ledger's rows: a mark raised meanwhile leaves the tile dirty."""
    states = _real(stack, states)
    if not states:
        return []
    work_keys, vertices = weigh(stack, [state.key for state in states])
    return [Work(s, k, int(v)) for s, k, v in zip(states, work_keys, vertices, strict=True)]


def _real(stack: Stack, states: Sequence[TileState]) -> list[TileState]:
    """Those that are tiles. A mark on anything else is a dead letter at once: no build will ever answer it."""
    real: list[TileState] = []
    for state in states:
        try:
            Tile.from_key(state.key)
            real.append(state)
        except TileError as fault:
            write_dead_letters(stack, [tile_dead_letter(state.key, str(fault), 1, state.wanted)])
            stack.ledger.fail([Failure(state.key, state.wanted, str(fault))], max_attempts=1)
    return real


def _take(stack: Stack, now_ms: int, done: Tick) -> list[Batch]:
    """Lease dirty tiles as batches: live ones first, then each manifest's.

    While the fast lane makes progress, young live marks are left to it.
    """
    ledger, settings = stack.ledger, stack.settings
    in_flight = ledger.batches()
    done.in_flight = len(in_flight)
    done.grace_ms = lane.grace_ms(lane.read_beats(ledger.get_value(lane.VALUE)).values(), now_ms)
    live = _weighed(stack, ledger.dirty(DIRTY_LOOKED_AT, kind="live", min_age_ms=done.grace_ms))
    settles = settleable(live)
    settled = ledger.settle(settles) if settles else set()
    done.settled += len(settled)
    live = [one for one in live if one.key not in settled]

    slots = settings.runs_in_flight - len(in_flight)
    # Backfills may hold every slot; one edit's run goes beside them, so that a map under backfill stays live.
    live_slots = max(slots, 0 if any(batch.kind == "live" for batch in in_flight) else 1)
    opened = _open(stack, live, "live", None, live_slots)
    done.waiting += len(live) - sum(len(batch.keys) for batch in opened)
    slots -= len(opened)

    # One more than can be taken, so that the tick can say that some wait.
    states = ledger.dirty(max(slots, 0) * settings.batch_tiles + 1, kind="backfill")
    if slots > 0 and states:
        by_manifest: dict[str | None, list[TileState]] = defaultdict(list)
        for state in states:
            by_manifest[state.manifest].append(state)
        for manifest, group in by_manifest.items():
            if slots > 0:
                batches = _open(stack, _weighed(stack, group), "backfill", manifest, slots)
                slots -= len(batches)
                opened += batches
    taken = {key for batch in opened for key in batch.keys}
    done.waiting += sum(state.key not in taken for state in states)
    done.in_flight += len(opened)
    return opened


def _open(stack: Stack, work: Sequence[Work], kind: MarkKind, manifest: str | None, slots: int) -> list[Batch]:
    groups = [[one.key for one in piece] for piece in cut(work, slots, stack.settings.batch_tiles)]
    if not groups:
        return []
    return stack.ledger.open_batches(groups, kind=kind, ttl_s=stack.settings.lease_s, manifest=manifest)


def _request(stack: Stack, instance: DagsterInstance, opened: Sequence[Batch], done: Tick) -> None:
    keys = [key for batch in opened for key in batch.keys]
    states = stack.ledger.read(keys)
    work = {one.key: one for one in _weighed(stack, [states[key] for key in keys])}
    catalog.register_partitions(instance, keys, stack.settings.partitions)
    for batch in opened:
        vertices = [work[key].vertices for key in batch.keys]
        done.requests.append(
            RunRequest(
                job_name=build_tiles.name,
                run_key=run_key(batch, work),
                run_config={"ops": {"tiles": {"config": {"batch": batch.id}}}},
                tags=tags_of(batch, sum(vertices)) | _pod_tags(stack, vertices),
            )
        )


def _pod_tags(stack: Stack, vertices: Sequence[int]) -> dict[str, str]:
    """How large the pod of a run over tiles of so many vertices is, where runs are pods."""
    settings = stack.settings
    if not settings.run_pods:
        return {}
    size = size_of(
        Load(len(vertices), sum(vertices), max(vertices, default=0)),
        workers=settings.build_workers,
        worker_megabytes=throughput.worker_megabytes(stack.ledger),
        most_megabytes=settings.run_pod_most_mb,
    )
    return run_tags(size, settings.run_pod_account)


def _request_audit(stack: Stack, instance: DagsterInstance, now_ms: int, done: Tick) -> None:
    """Ask for the checks once the map has come to rest. Live runs never wait for it: whoever has work has no audit."""
    if done.requests or done.in_flight or done.waiting or done.read:
        return
    ledger = stack.ledger
    text = ledger.get_value(AUDIT_VALUE)
    seen = Audits.from_json(text)
    if now_ms - seen.asked_ms < AUDIT_EVERY_MS:
        return
    counts = ledger.counts()
    busy = bool(counts.dirty_live or counts.dirty_backfill or counts.leased or counts.owed.get("catalog"))
    planned, wanted = plan_audit(seen, counts.revision_sum, busy=busy, now_ms=now_ms)
    # The last look, as it asks Dagster: a backfill started in the UI has no batch, and an audit may still be going on.
    # Runs that route triggers go on for hours and change no tile.
    alive = instance.get_runs(RunsFilter(statuses=list(ALIVE)), limit=4) if wanted else []
    if any(ROUTING_TAG not in run.tags for run in alive):
        return
    if planned != seen and not ledger.set_value(AUDIT_VALUE, planned.to_json(), expect=text):
        return  # Another sensor was faster.
    if wanted:
        commits = str(planned.asked_commits)
        done.requests.append(
            RunRequest(job_name=audit.name, run_key=f"audit-{commits}-{now_ms}", tags={AUDIT_TAG: commits})
        )


@sensor(
    jobs=[build_tiles, repair_coverage, audit],
    name=NAME,
    minimum_interval_seconds=1,
    default_status=DefaultSensorStatus.RUNNING,
    description=(
        "Reads hints from `[tiles]` and `[tiles-hot]`, marks tiles dirty in the ledger and asks for a run over what is "
        "dirty: edits first, then backfills. A run that was killed is asked for again in halves, until a tile that "
        "kills its run stands alone. A run that waits too long for its pool's slot is ended, and its tiles are asked "
        "for again. When the map has come to rest after a change, it asks for an audit."
    ),
)
def tile_updates(context: SensorEvaluationContext, stack: StackResource) -> SensorResult:
    """Evaluate one tick; the cursor only shows the positions, which the ledger keeps.

    A port that is away skips the tick: what it did until then stands, and the next one goes on from there.
    """
    try:
        with stack.opened() as ports:
            done = tick(ports, context.instance)
            limit = ports.settings.runs_in_flight
    except (LogUnavailable, LedgerUnavailable) as away:
        log.warning("tick skipped", error=str(away), kind=type(away).__name__)
        return SensorResult(skip_reason=SkipReason(f"{away}; the next tick tries again"))
    cursor = json.dumps(done.positions, sort_keys=True)
    if done.requests:
        return SensorResult(run_requests=done.requests, cursor=cursor)
    return SensorResult(skip_reason=SkipReason(done.skip_reason(limit)), cursor=cursor)
