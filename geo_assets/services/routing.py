"""The routing run: positions from the log, through the tracker, to the router; snapshots, new fences, the timer.

The order of its steps is the replay protocol (geofence/replay.py). A run takes the lease, then a higher epoch, claims
the snapshot in force, marks every partition of `[triggers]` and reads their tail; from there on it tells what was told
before under the same keys, and then what is new. What it is made of can be killed at any step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter, Origin, Reason
from geo_assets.events.foreign import kept_headers
from geo_assets.events.records import MAX_PART_ID
from geo_assets.flow.stages import Buckets
from geo_assets.geofence.frames import decode
from geo_assets.geofence.positions import read_positions, tick_value
from geo_assets.geofence.replay import Replay, adopt
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.sift import named, sift
from geo_assets.geofence.tracker import TooManyDevices, TooManyStays, Tracker
from geo_assets.services import forgetting, holding, resending, routing_result
from geo_assets.services import geofence_snapshots as snapshots
from geo_assets.services.dead_letters import write_dead_letters
from geo_assets.services.fences import FenceBook, FencesLost, Standing
from geo_assets.services.gc_pauses import GcPauses
from geo_assets.services.geofence_snapshots import Replaced, Snapshots, Stored
from geo_assets.services.lost_records import remember_loss, stop_if_told
from geo_assets.services.metrics_port import serve_somewhere
from geo_assets.services.passed_over import PassedOver, rebuilt, rows_of
from geo_assets.services.position_reader import Batch, PositionReader
from geo_assets.services.position_shedding import PositionShedding
from geo_assets.services.router import Router, RouterOptions, shorter_turns
from geo_assets.services.routing_lease import TTL_S, RoutingLease
from geo_assets.services.routing_metrics import RoutingMetrics
from geo_assets.services.routing_result import RoutingResult, quantile_ms
from geo_assets.services.trigger_tail import now_ms, take_epoch
from resources.event_log.protocol import LogUnavailable, NewRecord
from resources.ledger.protocol import LedgerUnavailable
from resources.tile_store.protocol import TileStoreError

if TYPE_CHECKING:
    from geo_assets.flow.breaker import Held
    from geo_assets.geofence.index import FenceIndex
    from geo_assets.geofence.positions import Positions
    from geo_assets.geofence.sift import Fault
    from geo_assets.geofence.tracker import Counts
    from geo_assets.geofence.triggers import Trigger, Triggers
    from geo_assets.settings import Settings
    from geo_assets.stack import Stack
    from resources.event_log.protocol import OffsetOutOfRange, Record, Slice

log = structlog.get_logger()

READ_TO_ACK = "read_to_acknowledgement"
"""The stage that holds all others: from a position read to its trigger acknowledged."""

_IDLE_S = 0.01
_TICK_EVERY_S = 1.0
_AGAIN_S = 0.5
_BARRIER_AGAIN_S = 0.25
_LONG_S = 0.25
"""A piece of a batch that takes longer has the next batch be half as large; a snapshot, a stop wait for it."""
_LEAST = 50
_FULL_TOLD_S = 60.0
_JUDGED = object()
_OUTAGES = (LogUnavailable, LedgerUnavailable, TileStoreError)


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How a run behaves.

    Args:
        idle_s: It ends when no position came for as long; None: never for that.
        run_s: It ends after as long, for the next one to take over; None: never for that.
        wait_s: How long it stands by for the lease; None: as long as it takes.
        lease_s: How long the lease holds when it is not renewed.
        batch: Most positions judged at once: some 10 ms of work, which the newest position waits.
        gather_s: Between two batches, unless one was full: a batch of ten costs nearly as much as one of a hundred.
        snapshot_s: Between snapshots: what a killed run tells again. Longer where one takes long to write.
        fences_s: Between looks at `[fences]`.
        barrier_s: How long one waits for acknowledgements before a snapshot; a broker takes milliseconds.
        report_s: Between updates of the result that checks and `progress` see.
        acknowledged: Told of every acknowledgement of triggers: when the positions that they came of were read, the
            oldest of those positions' stamps in the log (ms), and when each trigger was acknowledged
            (`time.perf_counter_ns`).
        metrics_port: Where it tells its metrics while it routes; 0: on a free port, which its log and its result say;
            None: nowhere. A port that is taken is as good as 0.
        metrics_host: On which address.
        rules: How positions are judged.
        router: How triggers are routed.
        on_broker: Whether the log is a broker's.
    """

    idle_s: float | None = None
    run_s: float | None = None
    wait_s: float | None = None
    lease_s: float = TTL_S
    batch: int = 4_000
    gather_s: float = 0.005
    snapshot_s: float = 5.0
    fences_s: float = 0.5
    barrier_s: float = 0.25
    report_s: float = 15.0
    acknowledged: Callable[[int, int, Sequence[int]], None] | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    rules: Rules = field(default_factory=Rules)
    router: RouterOptions = field(default_factory=RouterOptions)
    on_broker: bool = False


def options_of(settings: Settings) -> RoutingOptions:
    """The options that settings say."""
    on_broker = settings.kafka_servers is not None
    return RoutingOptions(
        metrics_port=settings.geofence_metrics_port,
        metrics_host=settings.host,
        idle_s=settings.geofence_idle_s,
        run_s=settings.geofence_run_s,
        lease_s=settings.geofence_lease_s,
        snapshot_s=settings.geofence_snapshot_s,
        rules=Rules(
            lateness_ms=round(settings.geofence_lateness_s * 1000),
            crossings=settings.geofence_crossings,
            max_devices=settings.geofence_max_devices,
            max_stays=5 * settings.geofence_max_devices,
        ),
        # A disk that is shared with everything else may take a second to have a commit.
        router=RouterOptions(slow_publish_s=0.025 if on_broker else 1.0, freeze=True),
        on_broker=on_broker,
    )


def route(
    stack: Stack,
    options: RoutingOptions,
    *,
    stop: threading.Event | None = None,
    progress: Callable[[RoutingResult], None] | None = None,
) -> RoutingResult:
    """Stand by for the lease with everything warm, then route until there is nothing to do, or the time is over.

    Args:
        stack: The ports.
        options: How.
        stop: Set to end it early, in good order.
        progress: Told how it stands, now and then.

    Returns:
        What it did; with `ended` as `stopped` and no epoch where it never got the lease.

    Raises:
        LogUnavailable, LedgerUnavailable, TileStoreError: At the start; later on it waits for them.
        Exception: What cannot be waited out. Nothing is lost: the next run goes on from the snapshot in force.
    """
    stop = stop or threading.Event()
    shorter_turns()
    # Opened before threads share them.
    _ = stack.log, stack.ledger, stack.tiles
    book = FenceBook(stack)
    router = Router(stack.log, 0, options.router, dead_letters=partial(write_dead_letters, stack))
    _warm(stack, book, router)
    with RoutingLease(stack.guard, options.lease_s) as lease:
        if not lease.wait(stop, options.wait_s, meanwhile=partial(_keep_warm, stack, book, router)):
            return RoutingResult(ended="stopped", at_ms=now_ms())
        try:
            run = _Run(stack, options, book, router, lease, stop, progress)
        except Replaced as why:
            log.warning("routing run replaced at its start", reason=str(why))
            return RoutingResult(ended="replaced", at_ms=now_ms())
        return run.work()


def _warm(stack: Stack, book: FenceBook, router: Router) -> None:
    """What takes long of a start, while another run still routes: fences, their index, the tail of `[triggers]`."""
    router.read_ahead()
    try:
        book.index(book.standing().name)
        book.index(snapshots.in_force(stack.ledger).fences)
    except FencesLost:
        log.info("fences moved on while standing by")


def _keep_warm(stack: Stack, book: FenceBook, router: Router) -> None:
    """The same again and again: fences that changed since, and what was told."""
    try:
        _warm(stack, book, router)
    except _OUTAGES as fault:
        log.warning("a standby is not kept warm", error=str(fault))


class _Ended(Exception):
    """It is over, and the state at hand is none to go on from."""


class _Run:
    def __init__(
        self,
        stack: Stack,
        options: RoutingOptions,
        book: FenceBook,
        router: Router,
        lease: RoutingLease,
        stop: threading.Event,
        progress: Callable[[RoutingResult], None] | None,
    ) -> None:
        self.stack, self.options, self.book, self.lease, self.stop = stack, options, book, lease, stop
        self.progress = progress
        self.began = time.monotonic()
        # What `perf_counter` lacks to be the time of day.
        self.clock_s = time.time() - time.perf_counter()
        self.result = RoutingResult(epoch=take_epoch(stack.ledger), on_broker=options.on_broker)
        self.router = router
        router.epoch = self.result.epoch
        self.snapshots = Snapshots(stack.ledger, stack.tiles, self.result.epoch)
        self.topic = stack.log.topic_id(topics.POSITIONS)
        self.heard: dict[int, int] = {}
        self.last_cost = self.looked = self.ticked = self.active = 0.0
        self.gathered_at = self.longest = self.full_told_at = 0.0
        self.most = options.batch
        self.batch: Batch | None = None
        self.judging: Iterator[None] | None = None
        stored = self.snapshots.claim()
        self.passed_over = PassedOver(stored.passed_over)
        self.shedding = PositionShedding(stack.settings, self.snapshots)
        anew = self._begins_anew(stored, self._ends())
        told = None if anew else self._restore(stored)
        if told is None:
            self._begin(stored)
        tail = self.router.start(thread=False)
        # An offset beyond the end was told of records that are not there any more: nothing will pass it again. The end
        # as it is now: until the take-over a run before this one may have judged and told what came meanwhile.
        ends = self._ends()
        horizon = {} if anew else {p: min(at, ends[p]) for p, at in tail.horizon.items() if p in ends}
        self.replay = Replay(horizon)
        self.read_at: dict[int, tuple[int, int]] = {}
        self.seconds, self.stamp_seconds = Buckets(), Buckets()
        self.router.on_acknowledged(self._acknowledged)
        if told is not None:
            self.router.route(told)
        self.reader = PositionReader(stack.log, self.tracker.offsets, lost=self._lost, silenced=self.shedding.silenced)
        self.keeper = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self.writing: Future[float] | None = None
        self.ending = threading.Event()
        self.to_forget = forgetting.wishes(stack.ledger)
        self.to_resend = resending.wishes(stack.ledger)
        self.held: Held | None = None
        self.pauses = GcPauses()
        self.end_metrics = self._serve_metrics()
        self.newest: tuple[str, FenceIndex] | None = None
        self.folder = threading.Thread(target=self._fold, name="fences", daemon=True)
        self.folder.start()
        log.info(
            "routing run started", epoch=self.result.epoch, fences=len(self.tracker.index.fence_set),
            revision=self.tracker.revision, devices=self.tracker.devices, replay=sum(self._left().values()),
        )  # fmt: skip

    # Starting

    def _ends(self) -> dict[int, int]:
        """Partition of `[positions]` -> offset behind its last record."""
        return {partition: extent.end for partition, extent in self.stack.log.extents(topics.POSITIONS).items()}

    def _serve_metrics(self) -> Callable[[], None]:
        if self.options.metrics_port is None:
            return lambda: None
        registry = self.router.metrics.registry
        registry.register(RoutingMetrics(self))
        registry.register(self.pauses)
        try:
            port, end = serve_somewhere(registry, self.options.metrics_host, self.options.metrics_port)
        except OSError as fault:
            log.warning("no metrics", host=self.options.metrics_host, error=fault.strerror)
            return lambda: None
        self.pauses.start()
        self.result.metrics_port = port
        log.info("metrics", address=f"http://{self.options.metrics_host}:{port}/metrics")

        def stop() -> None:
            self.pauses.close()
            end()

        return stop

    def _begins_anew(self, stored: Stored, ends: Mapping[int, int]) -> bool:
        """Whether the snapshot says nothing of this topic: it was made again, or put back to an earlier state."""
        if not stored.name:
            return False
        beyond = [p for p, offset in stored.offsets.items() if offset > ends.get(p, 0)]
        if stored.topic == self.topic and not beyond:
            return False
        log.error("[positions] is not the one that the snapshot read: routing begins anew", partitions=beyond)
        return True

    def _restore(self, stored: Stored) -> Triggers | None:
        data = self.snapshots.load()
        if data is None:
            if stored.name:
                raise snapshots.SnapshotLost(f"the snapshot {stored.name} is gone from the tile store")
            return None
        index = self.book.index(stored.fences)
        self.tracker, told = Tracker.restore(data, {stored.revision: index})
        self.fences, self.heard = stored.fences, dict(stored.heard)
        return told

    def _begin(self, stored: Stored) -> None:
        """Nothing to go on from: the newest fences, and a snapshot that names them before anything is told by them."""
        standing = self.book.fold()
        index = self.book.index(standing.name)
        self.fences = standing.name
        self.tracker = Tracker(index, self.options.rules)
        self.snapshots.store(self.tracker.snapshot(), self._what(self.tracker.revision, standing.name))
        log.info("routing begins", revision=self.tracker.revision, before=stored.name)

    def _lost(self, gone: OffsetOutOfRange) -> None:
        if gone.offset > gone.end:
            raise snapshots.PositionsChanged(f"{gone}: it was put back to an earlier state; the next run begins anew")
        stop_if_told(self.stack.settings, gone, "the routing run", "what devices did meanwhile is not told")
        log.error("positions were lost to retention", partition=gone.partition, position=gone.offset, oldest=gone.begin)
        remember_loss(self.stack.ledger, gone, now_ms())

    # Working

    def work(self) -> RoutingResult:
        """Route until there is nothing to do, the time is over, or somebody says so."""
        try:
            self.result.ended = self._loop()
            if self.result.ended != "replaced":
                self._finish()
        except Replaced as why:
            log.warning("routing run replaced", reason=str(why))
            self.result.ended = "replaced"
        except _Ended:
            self.result.ended = "replaced" if self.lease.lost else "stopped"
        finally:
            self.ending.set()
            self.end_metrics()
            self.reader.close()
            self.folder.join(timeout=30.0)
            self.router.close(1.0)
            self.keeper.shutdown()
        self._report(last=True)
        log.info("routing run ended", why=self.result.ended, summary=self.result.summary)
        return self.result

    def _loop(self) -> str:
        o = self.options
        self.active = reported = try_at = time.monotonic()
        snapshot_at = time.monotonic() + o.snapshot_s
        dirty = False
        while True:
            now = time.monotonic()
            if self.lease.lost:
                return "replaced"
            if self.stop.is_set():
                return "stopped"
            if o.run_s is not None and now - self.began >= o.run_s:
                return "time"
            if self.held != self.router.breaker.held:
                log.warning("the breaker is held" if self.held else "the breaker goes by itself", where=self.held)
                self.router.hold(self.held)
                reported = 0.0
            looked = found = False
            if self._reads(now):
                if self.judging is None and (self.batch is not None or now >= self.gathered_at):
                    looked, found = True, self._take()
                if self.judging is not None:
                    self._go_on()
                    dirty = True
            at_once = (looked or self.judging is not None) and not self.router.held
            self.router.step(0.0 if at_once else o.gather_s)
            if self.to_resend and self.router.ready():
                self._resend()
            if now >= try_at and (self._changes() or ((dirty or self.passed_over.full) and now >= snapshot_at)):
                cost = self._snapshot()
                if cost is None:
                    try_at = time.monotonic() + _BARRIER_AGAIN_S
                else:
                    dirty = False
                    snapshot_at = time.monotonic() + max(o.snapshot_s, 10 * cost)
            if looked and not found and self.reader.at_end:
                self._tick(now)
                busy = self.router.in_flight or self.router.spooled or self._changes() or self.to_resend
                # What a tick brings is read again first.
                if (
                    o.idle_s is not None
                    and not busy
                    and now - self.active >= o.idle_s
                    and now - self.ticked >= _TICK_EVERY_S
                ):
                    return "idle"
            if now - reported >= o.report_s:
                reported = now
                self._report()

    def _work(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop.is_set():
            self.router.step(0.01)

    def _reads(self, now: float) -> bool:
        """Whether positions are read now. After a long pause it is first written down what is shed of what waits."""
        if not (self.router.ready() and self._may_read()):
            self.shedding.paused(now)
            return False
        if self.shedding.below(now) is not None and not self._left():
            if self.writing is not None and not self.writing.done():
                return False
            try:
                self.shedding.shed(now, self.reader.next_offsets, self._ends())
            except (LogUnavailable, LedgerUnavailable) as fault:
                log.warning("reading waits", error=str(fault))
                self._work(_AGAIN_S)
                return False
        self.shedding.resumed()
        return True

    def _may_read(self) -> bool:
        """Whether what cannot be judged of the next batch has room beside the snapshot in force."""
        if self.passed_over.full and (self.writing is None or self.writing.done()):
            self.passed_over.drop(self.snapshots.stored.offsets)
        return not self.passed_over.full

    def _take(self) -> bool:
        """Take up the next batch, or once more the one that waits; whether there is one."""
        if self.batch is None:
            # Where no acknowledgement is to come, positions are what to wait for.
            self.batch = self.reader.take(self.most, 0.0 if self.router.held else _IDLE_S)
        if self.batch is None:
            return False
        if len(self.batch.records) < self.most:
            self.gathered_at = time.monotonic() + self.options.gather_s
        self.judging = self._judge(self.batch)
        return True

    def _go_on(self) -> None:
        """Judge a piece of the batch in hand. Batches get smaller where one takes long, as among costly fences."""
        assert self.judging is not None
        began = time.monotonic()
        try:
            done = next(self.judging, _JUDGED) is _JUDGED
        except LogUnavailable as fault:
            # Its dead letters are not written: the same batch again, of which what was judged is passed over.
            self.judging = None
            log.warning("routing waits", error=str(fault))
            self._work(_AGAIN_S)
            return
        self.longest = max(self.longest, time.monotonic() - began)
        if not done:
            return
        if self.longest > _LONG_S:
            self.most = max(_LEAST, self.most // 2)
        elif self.longest < _LONG_S / 4:
            self.most = min(self.options.batch, 2 * self.most)
        self.judging, self.batch, self.longest = None, None, 0.0

    def _judge(self, batch: Batch) -> Iterator[None]:
        """Judge a batch piece by piece, and hand over what follows; to be gone on with when the router takes more."""
        records = batch.records
        positions, poison = read_positions(records.values, records.partitions, records.offsets, records.timestamps_ms)
        if poison:
            write_dead_letters(self.stack, [_letter(records.record(row)) for row in poison])
            self.result.dlq += len(poison)
        positions = self.passed_over.silenced(positions)
        if any(device is not None for device in positions.device):
            self.active = time.monotonic()
        received = int(positions.received_ms.min())
        for told in self._fed(positions, records):
            if len(told):
                emitted = time.perf_counter_ns()
                self.read_at[emitted] = batch.read_ns, received
                self.router.route(told, emitted=emitted)
            yield
        self.result.positions += len(records)
        # Partition after partition: where each begins, and the highest stamp from there on.
        starts = np.flatnonzero(np.diff(positions.partition, prepend=-1))
        highest = np.maximum.reduceat(positions.received_ms, starts)
        for partition, heard in zip(positions.partition[starts].tolist(), highest.tolist(), strict=True):
            self.heard[partition] = max(heard, self.heard.get(partition, 0))

    def _fed(self, positions: Positions, records: Slice) -> Iterator[Triggers | list[Trigger]]:
        """What follows from positions; records that cannot be judged are dead letters, and cost no others."""
        while True:
            offsets, counts = self.tracker.offsets, replace(self.tracker.counts)
            try:
                for told in self.tracker.pieces(positions, partial(self._refuse, positions, records)):
                    yield told
                    offsets, counts = self.tracker.offsets, replace(self.tracker.counts)
            except TooManyDevices as fault:
                positions = self._without(fault, positions, records)
            except _OUTAGES:
                raise
            except Exception as fault:
                log.error("a batch cannot be judged: it is searched", error=named(fault), records=len(positions))
                yield self._sifted(positions, records, offsets, counts)
                return
            else:
                return

    def _refuse(self, positions: Positions, records: Slice, partition: int, offset: int) -> None:
        """A position brings more stays than there is room for: its record is a dead letter."""
        now = time.monotonic()
        if now >= self.full_told_at:
            self.full_told_at = now + _FULL_TOLD_S
            limit = self.options.rules.max_stays
            log.error("too many devices in fences", limit=limit, fullest=self.tracker.fullest())
        (row,) = np.flatnonzero((positions.partition == partition) & (positions.offset == offset)).tolist()
        write_dead_letters(self.stack, [_crowded(records.record(row), "max_stays", self.options.rules.max_stays)])
        self.result.dlq += 1

    def _without(self, fault: TooManyDevices, positions: Positions, records: Slice) -> Positions:
        """The batch without the devices for which there is no room: their records are dead letters."""
        rows = rows_of(fault, positions)
        log.error("too many devices", error=str(fault), devices=len(fault.devices), records=len(rows))
        limit = self.options.rules.max_devices
        write_dead_letters(self.stack, [_crowded(records.record(row), "max_devices", limit) for row in rows])
        self.result.dlq += len(rows)
        return positions.silenced(rows)

    def _sifted(
        self, positions: Positions, records: Slice, offsets: Mapping[int, int], counts: Counts
    ) -> list[Trigger]:
        """Find the records at fault, from the state before the batch on.

        They are dead letters first; then the ledger says that they are passed over; and only then is told what the
        others bring. So whoever reads the batch again tells the same, even where the fault does not come again.

        Raises:
            _Ended: It was told to end meanwhile, and nothing of the batch was told.
        """
        before = self._before(offsets)
        before.counts = counts
        found = sift(before, positions, self._or_end)
        if found.faults:
            letters = [_at_fault(records.record(fault.row), fault) for fault in found.faults]
            self._until_done(lambda: write_dead_letters(self.stack, letters))
            self.result.dlq += len(letters)
            self.passed_over.add(positions, [fault.row for fault in found.faults])
            kept = self.passed_over.from_(self.snapshots.stored.offsets)
            self._until_done(lambda: self.snapshots.pass_over(kept))
        log.error("a batch was searched", at_fault=len(found.faults), records=len(positions))
        self.tracker = found.tracker
        now = time.time_ns()
        return [row for told in found.triggers for row in told.rows(epoch=self.router.epoch, emitted_ns=now)]

    def _before(self, offsets: Mapping[int, int]) -> Tracker:
        if self.writing is not None:
            wait_for([self.writing])
        while True:
            try:
                data = self.snapshots.load()
                if data is None:
                    raise snapshots.SnapshotLost(f"the snapshot {self.snapshots.stored.name} is gone")
                return rebuilt(
                    self.stack.log, data, self.tracker.index, offsets, self.passed_over, self._or_end,
                    shed=self.shedding.without,
                )  # fmt: skip
            except snapshots.SnapshotLost:
                raise
            except _OUTAGES as fault:
                self._wait_for(fault)

    def _until_done(self, do: Callable[[], None]) -> None:
        while True:
            try:
                return do()
            except _OUTAGES as fault:
                self._wait_for(fault)

    def _wait_for(self, fault: Exception) -> None:
        log.warning("the search of a batch waits", error=str(fault))
        self._work(_AGAIN_S)
        self._or_end()

    def _or_end(self) -> None:
        self.router.step(0.0)
        if self.stop.is_set() or self.lease.lost:
            raise _Ended

    def _acknowledged(self, emitted: int, at: Sequence[int]) -> None:
        of = self.read_at.get(emitted)
        if of is None or not len(at):
            return
        read, stamp_ms = of
        times = np.array(at, np.int64)
        self.seconds.observe_all((times - read) / 1e9)
        # Stamps are by the clock of whoever appended: one that goes ahead is no wait.
        since = times / 1e9 + (self.clock_s - stamp_ms / 1e3)
        self.stamp_seconds.observe_all(np.maximum(since, 0.0))
        if self.options.acknowledged is not None:
            self.options.acknowledged(read, stamp_ms, at)

    # Snapshots and fences

    def _left(self) -> dict[int, int]:
        return self.replay.left(self.tracker.offsets)

    def _what(self, revision: int, fences: str) -> Stored:
        watermarks = self.tracker.watermarks
        due = [
            self.heard[p] + at - watermarks.get(p, 0) for p, at in self.tracker.next_due().items() if p in self.heard
        ]
        return Stored(
            fences=fences, revision=revision, topic=self.topic, offsets=self.tracker.offsets, heard=dict(self.heard),
            due_ms=min(due, default=None),
            passed_over=self.passed_over.from_(self.tracker.offsets),
        )  # fmt: skip

    def _to_adopt(self) -> bool:
        newer = self.newest is not None and self.newest[1].fence_set.revision > self.tracker.revision
        return (newer or self.tracker.rules != self.options.rules) and not self._left()

    def _changes(self) -> bool:
        """Whether something waits for a snapshot of its own."""
        return self._to_adopt() or (bool(self.to_forget) and not self._left())

    def _snapshot(self) -> float | None:
        """Write a snapshot, adopt what is to be adopted; the seconds the last one took, or None where it must wait."""
        if self.writing is not None:
            if not self.writing.done():
                return None
            writing, self.writing = self.writing, None
            try:
                self.last_cost = writing.result()
            except _OUTAGES as fault:
                log.warning("the snapshot waits", error=str(fault))
        self.passed_over.drop(self.snapshots.stored.offsets)
        if not self.router.settle(self.options.barrier_s):
            return None
        self.read_at.clear()
        if self.to_forget and not self._left():
            self._forget()
            return self.last_cost
        if self._to_adopt():
            return self._adopt()
        frozen, what = self.tracker.freeze(), self._what(self.tracker.revision, self.fences)
        self.writing = self.keeper.submit(self._write, frozen.to_bytes, what)
        return self.last_cost

    def _write(self, data: Callable[[], bytes], what: Stored) -> float:
        began = time.monotonic()
        pruned = self.snapshots.stored.revision < what.revision
        self.snapshots.store(data(), what)
        self.result.snapshots += 1
        if pruned or self.result.snapshots == 1:
            self._prune(what.revision)
        return time.monotonic() - began

    def _prune(self, revision: int) -> None:
        """Old sets and old runs' snapshots are not needed any more; what stays behind goes the next time."""
        try:
            self.book.prune(revision)
            self.snapshots.sweep()
        except TileStoreError as fault:
            log.warning("old fences stay behind", error=str(fault))

    def _adopt(self) -> float | None:
        assert self.router.in_flight == 0
        name, index = self.newest or (self.fences, self.tracker.index)
        if index.fence_set.revision <= self.tracker.revision:
            name, index = self.fences, self.tracker.index
        revision = index.fence_set.revision

        def store(data: bytes) -> None:
            while True:
                try:
                    self._write(lambda: data, self._what(revision, name))
                except LedgerUnavailable as fault:
                    # It may be in force or not. Nothing is judged, by the old fences or the new, until that is known.
                    log.warning("new fences wait for the ledger", error=str(fault))
                    self._work(_AGAIN_S)
                    if self.stop.is_set() or self.lease.lost:
                        raise
                else:
                    return

        try:
            told = adopt(self.tracker, index, store, self.options.rules)
        except TileStoreError as fault:
            log.warning("new fences wait for the tile store", error=str(fault))
            self._work(_AGAIN_S)
            return None
        self.fences = name
        self.result.adopted += 1
        self.router.route(told)
        log.info("fences adopted", revision=revision, fences=len(index.fence_set), ended=len(told))
        return self.last_cost

    def _forget(self) -> None:
        """Forget devices, and only then go on: until a snapshot says so, a killed run would know them again."""
        try:
            # The thread that looks for wishes may have looked before the last ones were fulfilled.
            devices = forgetting.wishes(self.stack.ledger)
        except LedgerUnavailable as fault:
            log.warning("devices to be forgotten wait", error=str(fault))
            return
        self.to_forget = ()
        if not devices:
            return
        known = sum(self.tracker.erase(device) for device in devices)
        data = self.tracker.snapshot()
        while True:
            try:
                self._write(lambda: data, self._what(self.tracker.revision, self.fences))
                forgetting.fulfilled(self.stack.ledger, devices)
                break
            except _OUTAGES as fault:
                log.warning("devices to be forgotten wait", error=str(fault))
                self._work(_AGAIN_S)
                if self.stop.is_set() or self.lease.lost:
                    raise
        log.info("devices forgotten", devices=known)

    def _resend(self) -> None:
        """Send triggers that died before once more, under this run's epoch; those that are in the log are known."""
        try:
            frames = resending.wishes(self.stack.ledger)
            self.to_resend = []
            triggers = [decode(frame) for frame in frames]
            for trigger in triggers:
                trigger.epoch = self.router.epoch
            self.router.route(triggers)
            if triggers and self.router.settle(5.0):
                resending.fulfilled(self.stack.ledger, frames)
                log.info("triggers sent again", triggers=len(frames))
        except LedgerUnavailable as fault:
            log.warning("triggers to be sent again wait", error=str(fault))

    def _fold(self) -> None:
        """In a thread of its own: read `[fences]`, build the index of what is new, look for devices to be forgotten."""
        while not self.ending.is_set():
            try:
                standing: Standing = self.book.fold()
                if standing.name and (self.newest is None or self.newest[0] != standing.name):
                    self.newest = (standing.name, self.book.index(standing.name))
                self.to_forget = forgetting.wishes(self.stack.ledger)
                self.to_resend = resending.wishes(self.stack.ledger)
                self.held = holding.held(self.stack.ledger)
            except Exception as fault:
                log.warning("fences wait", error=f"{type(fault).__name__}: {fault}")
            self.ending.wait(self.options.fences_s)

    # The timer

    def _tick(self, now: float) -> None:
        """Move the watermark where something is due of devices that say nothing: by a record, as all is told.

        Event time goes on from the newest position as the clock does from its receipt: what is read again years later
        is judged as it was.
        """
        if self.tracker.stays == 0 or now - self.looked < _TICK_EVERY_S:
            return
        self.looked = now
        watermarks, clock = self.tracker.watermarks, now_ms()
        records: list[NewRecord] = []
        for partition, due in self.tracker.next_due().items():
            reached = watermarks.get(partition, 0) + clock - self.heard.get(partition, clock)
            if reached >= due:
                records.append(NewRecord(topics.POSITIONS, None, tick_value(reached), {}, clock, partition))
        if not records:
            return
        self.ticked = now
        try:
            self.stack.log.append(records)
            self.result.ticks += len(records)
        except LogUnavailable as fault:
            log.warning("the timer waits", error=str(fault))

    # Ending and telling

    def _finish(self) -> None:
        """A last snapshot, so that the next run has nothing to tell again."""
        if self.writing is not None:
            try:
                self.writing.result()
            except _OUTAGES as fault:
                log.warning("the snapshot waits", error=str(fault))
            self.writing = None
        if not self.router.settle(5.0):
            log.warning("routing run ends with triggers under way: they are told again")
            return
        try:
            self._write(self.tracker.snapshot, self._what(self.tracker.revision, self.fences))
        except _OUTAGES as fault:
            log.warning("no last snapshot: the next run reads again", error=str(fault))

    def _report(self, *, last: bool = False) -> None:
        counts, result, seconds = self.router.counts, self.result, self.router.metrics.seconds
        result.seconds = time.monotonic() - self.began
        result.judged = {name: int(number) for name, number in asdict(self.tracker.counts).items()}
        result.routed, result.deduped, result.shed = counts["routed"], counts["deduped"], counts["shed"]
        result.drained, result.positions_shed = counts["drained"], self.shedding.passed_over
        result.fence_revision, result.devices = self.tracker.revision, self.tracker.devices
        result.stays, result.at_ms = self.tracker.stays, now_ms()
        breaker = self.router.breaker if not self.router.breaker.closed else self.router.dedup_breaker
        result.breaker = breaker.state if breaker.closed else f"{breaker.state}: {breaker.reason}"
        result.longest_gc_ms = self.pauses.longest_s * 1000
        stages = {**seconds, READ_TO_ACK: self.seconds}
        result.p50_ms = {name: quantile_ms(buckets, 0.5) for name, buckets in stages.items()}
        result.p99_ms = {name: quantile_ms(buckets, 0.99) for name, buckets in stages.items()}
        told = replace(result, dlq=result.dlq + counts["dlq"])
        if last:
            result.dlq = told.dlq
        if last:
            try:
                result.lag = told.lag = lag_of(self.stack, self.tracker.offsets)
            except LogUnavailable as fault:
                log.warning("the run's lag is not known", error=str(fault))
            self._keep(told)
        else:
            # The log is not asked for this, and the ledger not waited for: triggers under way would wait with it.
            result.lag = told.lag = sum(self.reader.lag.values())
            self.keeper.submit(self._keep, told)
        if self.progress is not None:
            self.progress(told)

    def _keep(self, told: RoutingResult) -> None:
        try:
            self.stack.ledger.set_value(routing_result.VALUE, json.dumps(told.members()))
        except _OUTAGES as fault:
            log.warning("the run's result is not kept", error=str(fault))


def lag_of(stack: Stack, offsets: Mapping[int, int]) -> int:
    """Records of `[positions]` from offsets on."""
    extents = stack.log.extents(topics.POSITIONS)
    return sum(max(0, extent.end - offsets.get(p, extent.begin)) for p, extent in extents.items())


def _letter(record: Record) -> DeadLetter:
    """The dead letter of a record that is no position. What it says of a place is in its payload alone."""
    return _dead(record, "null_value" if record.value is None else "schema", "the value is no position")


def _crowded(record: Record, rule: str, limit: int) -> DeadLetter:
    what = "devices" if rule == "max_devices" else "devices in fences"
    return _dead(record, "too_large", f"{rule}: {limit:,} {what} are remembered, and there is no room for more")


def _at_fault(record: Record, fault: Fault) -> DeadLetter:
    if isinstance(fault.error, TooManyDevices | TooManyStays):
        return _dead(record, "too_large", str(fault.error))
    return _dead(record, "internal", f"cannot be judged: {named(fault.error)}")


def _dead(record: Record, reason: Reason, explanation: str) -> DeadLetter:
    headers = kept_headers(record.headers)
    return DeadLetter.make(
        reason=reason,
        stage="route",
        explanation=explanation,
        source=headers.get(topics.HEADER_SOURCE, "")[:80] or "geofence",
        at_ms=now_ms(),
        event_id=headers.get(topics.HEADER_EVENT_ID, "")[:MAX_PART_ID] or None,
        origin=Origin(record.topic, record.partition, record.offset),
        payload=record.value or b"",
        headers={**headers, topics.HEADER_KIND: "positions"},
    )
