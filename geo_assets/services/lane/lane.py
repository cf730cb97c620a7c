"""One worker of the fast lane: poll, mark, take, build, commit, announce, over and over, in one thread.

Light tiles are built here, a few milliseconds at a time, heavy ones in worker processes beside it, so that the consumer
is polled throughout. Whatever goes wrong, the mark in the ledger stands, and the sensor's runs answer it.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from geo_assets.events import topics
from geo_assets.flow import pausing
from geo_assets.flow.budget import Ticket, VertexBudget
from geo_assets.flow.retries import Backoff, Retries
from geo_assets.logs import tells_debug
from geo_assets.services import build_worker, encoding, engines, tracing
from geo_assets.services.build import Prepared, TileBuilder, TileResult
from geo_assets.services.build_worker import BuildTask, Built
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.edit_stages import NONE, Stamps, details_with, earliest, now_us, stamps_of
from geo_assets.services.event_ids import DETAIL
from geo_assets.services.lane import health, metrics
from geo_assets.services.lane.health import Beat
from geo_assets.services.lane.reading import POLL_RECORDS, HintReader
from geo_assets.services.metrics_port import Readiness
from geo_assets.services.outages import OUTAGES
from geo_assets.services.pool import TaskFailed, WorkerPool
from geo_assets.services.recipe import current_recipe
from geo_assets.tiles.encode import assembly
from geo_assets.tiles.encode.cache import EncodedCache
from geo_assets.tiles.tile import Tile, TileError
from resources.ledger.protocol import TileState

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

TURN_TILES = 64
"""Most tiles of one turn: taken in one transaction, weighed in one query."""

CHUNK_VERTICES = 30_000
"""Vertices built between two polls."""

FILL = 0.5
"""Share of the places for those who wait for the budget from which nothing more is taken."""

LARGEST_KEPT, MOST_KEPT = 1_000, 150_000
"""Vertices of the largest feature, and of all, of a tile that is built in the lane's own process when nothing is kept
of it: a fifth of a second, once."""

TOLD_EVENTS = 8
"""Ids of events that are remembered of a tile, for the log and the details of its commit."""

LEASE_S = 5.0
"""How long a tile is the lane's: a killed worker's tiles are free for the sensor within one of its ticks."""

IDLE_POLL_S = 0.25
BUSY_POLL_S = 0.005
"""Longest wait for records, without and with tiles that are being built in other processes."""

ALONE_S = 0.001
"""Longest that hints gather when the turn before had nothing to build: those of one edit may come from several
partitions, and nothing else is about to."""

SWEEP_S = 1.0
"""Between two looks for what is dirty and in nobody's hands: marks that others raised, and what a killed worker had."""

SWEEP_AGE_MS = 500
"""What is younger is about to come as a record."""

SWEEP_TILES = 256

ELSEWHERE_S = 0.5
"""When a tile is looked at again that somebody else had leased."""

QUEUE_FULL = 5_000
"""Tiles that fill the queue: some ten seconds of work. What the lane does as it fills is in flow/pausing.py."""

_LIMITS = pausing.Limits()


@dataclass(slots=True)
class Job:
    """A tile to encode, as it was when it was taken."""

    task: BuildTask
    state: TileState
    future: Future[Sequence[Built]] | None = None
    """Where a worker process builds it."""


class Lane:
    """A worker. One thread calls it.

    Args:
        stack: The ports.
        worker: Its name among the workers: the owner of its leases.
        coalesce_s: How long records gather after the first one before they are built.
        step: Called before each step of the build protocol (see `TileBuilder`); tests crash there.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        stack: Stack,
        worker: str,
        *,
        coalesce_s: float | None = None,
        step: build_worker.Step | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack, self.worker = stack, worker
        settings = stack.settings
        self._coalesce_s = settings.live_coalesce_ms / 1000 if coalesce_s is None else coalesce_s
        self._clock, self._step = clock, step or build_worker.no_step
        self._reader = HintReader(stack, topics.TILE_HINTS)
        self._cache = EncodedCache(settings.encoded_cache_mb * 1_000_000) if settings.engine == "numpy" else None
        self._traces = tracing.tile_traces("lane")
        self._builder = TileBuilder(
            stack,
            worker,
            step=step,
            inline=True,
            details_of=self._details,
            stages=metrics.STAGES,
            lease_s=LEASE_S,
            cache=self._cache,
            traces=self._traces,
        )
        self._pool = WorkerPool(
            settings.live_build_workers, settings.build_timeout_s, build_worker.start, (settings, stack.scoped)
        )
        self._queue: dict[str, None] = {}
        """Tiles to look at, in the order in which they were asked for."""
        self._budget: VertexBudget[Job] = VertexBudget(
            settings.vertex_budget, small=settings.small_vertices, workers=settings.live_build_workers + 1
        )
        self._jobs: dict[str, Ticket[Job]] = {}
        """Tiles in hand: waiting for the budget, or being built."""
        self._again: set[str] = set()
        """Asked for while they were in hand: one more build afterwards."""
        self._stamps: dict[str, Stamps] = {}
        """Of the edit behind each tile that waits longest for it; and of those that are in hand."""
        self._taken: dict[str, Stamps] = {}
        self._events: dict[str, dict[str, None]] = {}
        """Ids of events whose hints for a tile wait; and of those in hand, in `_building`. For the log."""
        self._building: dict[str, list[str]] = {}
        self._later: list[tuple[float, str]] = []
        self._retries: Retries[str] = Retries()
        self._tries: dict[str, int] = {}
        """Number of the next try of each tile that failed."""
        self._given_up = False
        self._built = 0
        self._progress_ms = now_ms()
        self._beaten = self._swept = self._renewed = float("-inf")
        self._polled = clock()
        self._flow = pausing.Flow()
        """Whether records are asked for, and since when partitions are paused."""
        self._paused = 0
        self._busy = False
        """Whether the last turn had something to build."""
        self._gaps: list[tuple[float, float]] = []

    @property
    def built(self) -> int:
        """Tiles that came to an end since it began."""
        return self._built

    def warm(self) -> None:
        """Load what the first build would wait for."""
        self._pool.warm()
        if self._cache is not None:
            assembly.warm()
        current_recipe(self.stack.layers, engines.version(self.stack))
        self._polled = self._clock()  # What it took to start is no gap between two polls.

    # -- the loop ----------------------------------------------------------------------------------------------------
    def run(self, stop: threading.Event, ready: Readiness | None = None) -> None:
        """Work until asked to stop; then finish what is in hand, as far as it takes no other process.

        Args:
            stop: Set to end it.
            ready: Told whether it works, and what it waits for.
        """
        backoff, chance, failed = Backoff(), random.Random(), 0
        ready = ready or Readiness()
        while not stop.is_set():
            try:
                self.turn()
                failed, ready.waits_for = 0, None
            except OUTAGES as fault:
                failed += 1
                ready.waits_for = str(fault)
                wait_s = backoff.wait_s(failed, chance)
                metrics.OUTAGES_SEEN.inc()
                log.warning("the lane waits", error=str(fault), kind=type(fault).__name__, seconds=round(wait_s, 1))
                self.give_up_turn()
                stop.wait(wait_s)
        try:
            left = len(self._queue) + 1
            while len(self._queue) < left and not self._given_up:
                left = len(self._queue)
                self._work()
            self._reader.commit()
        except OUTAGES as fault:
            log.warning("what was in hand stays dirty", error=str(fault), tiles=len(self._queue))

    def turn(self, timeout_s: float | None = None) -> int:
        """One round: poll, build, look after what is under way; how many tiles came to an end.

        Args:
            timeout_s: Longest wait for records; default: as busy as it is.

        Raises:
            LogUnavailable, LedgerUnavailable, FeatureStoreUnavailable, TileStoreUnavailable, WorkersUnavailable: Not
                now. What was marked stays marked.
        """
        before = self._built
        self._due()
        if timeout_s is None:
            timeout_s = self._until_due()
            if self._queue or self._jobs:
                timeout_s = 0.0 if self._queue and not self._crowded() else BUSY_POLL_S
        gather_s = self._coalesce_s if self._busy else min(self._coalesce_s, ALONE_S)
        if self._listen(timeout_s) and gather_s:
            until = self._clock() + gather_s
            while (left := until - self._clock()) > 0:
                if not self._listen(left):
                    break
        self._busy = bool(self._queue)
        if self._queue:
            started = self._clock()
            self._work()
            metrics.TURN_SECONDS.observe(self._clock() - started)
        self._collect()
        self._reader.commit()
        self._sweep()
        self._beat()
        return self._built - before

    def give_up(self) -> None:
        """Let go of what waits, from another thread: it stays dirty, and `close` frees it for others."""
        self._given_up = True
        self._pool.give_up()

    def close(self) -> None:
        """Free what is leased, leave the group, end the worker processes."""
        try:
            self.stack.ledger.free(self.worker)
            health.beat(self.stack.ledger, self.worker, None)
        except OUTAGES:
            log.warning("leases end by themselves", seconds=LEASE_S)
        self._reader.close()
        self._pool.close()
        self._builder.close()

    def _listen(self, timeout_s: float) -> int:
        """Poll once and note the tiles; how many records came. With enough in hand it polls for none."""
        self._regulate()
        now = self._clock()
        self._gaps.append((now, now - self._polled))
        records = self._reader.poll(timeout_s, POLL_RECORDS if self._flow.asks else 0)
        self._polled = self._clock()
        keys: set[str] = set()
        for record in records:
            key = tile_key(record.key)
            if key is None:
                # It was marked all the same, for the tile that its value names: the next sweep finds that.
                self._swept = min(self._swept, self._polled - SWEEP_S + SWEEP_AGE_MS / 1000)
            else:
                keys.add(key)
                waiting = self._events.setdefault(key, {})
                if len(waiting) < TOLD_EVENTS and (event_id := record.headers.get(topics.HEADER_EVENT_ID)):
                    waiting[event_id] = None
                if self._traces is not None:
                    self._traces.hinted(key, record.headers)
                self._stamps[key] = earliest((stamps_of(record), self._stamps.get(key, NONE)))
        metrics.RECORDS.inc(len(records))
        for key in sorted(keys, key=lambda key: key.partition(":")[2]):
            self._note(key)
        return len(records)

    def _regulate(self) -> None:
        """Decide whether records are asked for, and pause and resume partitions."""
        now, stopped_s = self._clock(), self._flow.stopped_since_s
        late = stopped_s is not None and now - stopped_s >= _LIMITS.pause_after_s
        held = self._reader.holdings() if late or self._flow.paused_since_s is not None else {}
        brokers: dict[str, list[tuple[str, int]]] = {}
        for pair, holding in held.items():
            brokers.setdefault(holding.broker, []).append(pair)
        paused = {pair for pair, holding in held.items() if holding.paused}
        behind = {pair: holding.behind for pair, holding in held.items() if holding.behind is not None}
        decided = pausing.decide(self._flow, self._saturation(now), brokers, paused, behind, now, _LIMITS)
        if decided.pause or decided.resume:
            self._reader.pause(decided.pause)
            self._reader.resume(decided.resume)
            log.info("partitions wait", paused=len(decided.pause), resumed=len(decided.resume), held=len(held))
        if decided.flow.asks != self._flow.asks:
            log.info("hints are asked for" if decided.flow.asks else "enough in hand", tiles=len(self._queue))
        self._flow = decided.flow
        self._paused = len((paused | decided.pause) - decided.resume)

    def _saturation(self, now: float) -> float:
        """Share of the room for what waits that is taken."""
        return max(len(self._queue) / QUEUE_FULL, self._budget.gauges(now).fill)

    def _crowded(self) -> bool:
        """Whether what is in hand comes first: it goes on as worker processes end."""
        return self._budget.gauges(self._clock()).fill > FILL

    def _note(self, key: str) -> None:
        if key in self._jobs:
            self._again.add(key)
        else:
            self._queue.setdefault(key)

    def give_up_turn(self) -> None:
        """After an outage: nothing is in hand but what other processes build; what was read comes again."""
        self._queue.clear()
        self._stamps.clear()
        self._taken.clear()
        self._events.clear()
        self._building.clear()
        if self._traces is not None:
            self._traces.clear()
        try:
            self._reader.again()
            if not self._jobs:
                self.stack.ledger.free(self.worker)
        except OUTAGES:
            log.debug("still away")

    # -- building ----------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        """Take what waits, as much as fits into one turn, and build what is light of it."""
        if self._crowded():
            return
        keys = [key for key, _ in zip(self._queue, range(TURN_TILES), strict=False)]
        prepared = self._builder.prepare(keys, free_only=True)
        taken_us = now_us()
        for key in keys:
            del self._queue[key]
            if key not in prepared.states:
                self._at(ELSEWHERE_S, key)
        self._account(prepared.settled)
        for key in prepared.lost:
            self._note(key)
        for task in prepared.tasks:
            if events := self._events.get(task.key):
                self._building[task.key] = list(events)
            if task.key in self._stamps:
                self._taken[task.key] = self._stamps[task.key].at("taken", taken_us)
            task = self._matched(task)
            self._jobs[task.key] = self._budget.ask(
                task.key, Job(task, prepared.states[task.key]), self._cost(task), self._clock()
            )
        for key in prepared.states:
            # What comes from here on is another edit's, which another build answers.
            self._stamps.pop(key, None)
            self._events.pop(key, None)
        self._pump()

    def _matched(self, task: BuildTask) -> BuildTask:
        """The same with what is kept of the tile held against what it shows: for its cost, and for its build."""
        if self._cache is None or task.shown is None or task.fresh:
            return task
        return replace(task, match=encoding.match(self.stack, task.key, task.shown, self._cache))

    def _cost(self, task: BuildTask) -> int:
        """Vertices that a build costs: of what changed since the last one; an empty tile costs what a feature does.

        A tile of many small features is built here although it is large, that once: the next time most of it is kept.
        """
        if task.match is not None:
            return max(1, task.match.vertices)
        if self._cache is None or task.shown is None:
            return max(1, task.vertices)
        largest = int(task.shown.vertices_each.max(initial=0))
        many = largest <= LARGEST_KEPT and task.vertices <= MOST_KEPT
        return max(1, min(task.vertices, self._budget.small) if many else task.vertices)

    def _pump(self) -> None:
        """Start what the budget grants: large work in worker processes, small work here, until none of it is left."""
        polled = True
        while granted := self._budget.grants():
            small = [ticket for ticket in granted if ticket.small]
            try:
                for ticket in granted:
                    if not ticket.small:
                        # What it shows is for whoever keeps encoded features, as only this process does.
                        task = replace(ticket.work.task, shown=None, match=None)
                        ticket.work.future = self._pool.start(build_worker.build_unless_away, task)
                for chunk in _chunks(small):
                    if not polled:
                        # Long work is cut up, so that the consumer is polled and worker processes are served.
                        self._listen(0.0)
                        self._beat()
                    polled = False
                    self._build_here(chunk)
            finally:
                # After an outage in the middle; the marks of these tiles stand.
                for ticket in granted:
                    if ticket.state == "granted" and ticket.work.future is None:
                        self._done(ticket)

    def _build_here(self, tickets: Sequence[Ticket[Job]]) -> None:
        tasks = [ticket.work.task for ticket in tickets]
        try:
            results = build_worker.build_in(self.stack, tasks, self._step, passing=OUTAGES, cache=self._cache)
            self._finish(tickets, results)
        finally:
            for ticket in tickets:
                self._done(ticket)

    def _finish(self, tickets: Sequence[Ticket[Job]], results: Sequence[Built | TaskFailed]) -> None:
        tasks = [ticket.work.task for ticket in tickets]
        prepared = Prepared({ticket.work.task.key: ticket.work.state for ticket in tickets}, [], [], [])
        self._account(self._builder.finish(prepared, tasks, results))
        self._again.update(prepared.lost)

    def _done(self, ticket: Ticket[Job]) -> None:
        """Its tile is out of our hands; whoever asked for it meanwhile is answered by one more build."""
        ticket.refund()
        key = ticket.work.task.key
        self._jobs.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self._note(key)

    def _collect(self) -> None:
        """Commit what worker processes have finished, and start what that makes room for."""
        ended = [one for one in self._jobs.values() if one.work.future is not None and one.work.future.done()]
        for ticket in ended:
            future = ticket.work.future
            assert future is not None
            try:
                self._finish([ticket], [self._pool.outcome(future, OUTAGES)])
            except OUTAGES:
                self._at(ELSEWHERE_S, ticket.work.task.key)
                raise
            finally:
                self._done(ticket)
        if ended:
            self._pump()
        if self._jobs and self._clock() - self._renewed > LEASE_S / 3:
            self._renewed = self._clock()
            self.stack.ledger.renew(self.worker, LEASE_S)

    def _details(self, key: str, details: dict[str, Any]) -> dict[str, Any]:
        stamps = self._taken.get(key)
        if events := self._building.get(key):
            details = {**details, DETAIL: events}
        return details_with(NONE if stamps is None else stamps.at("built"), {**details, "by": "lane"})

    def _account(self, results: Iterable[TileResult]) -> None:
        debugs = tells_debug(log)
        for result in results:
            self._built += 1
            self._taken.pop(result.key, None)
            events = self._building.pop(result.key, None)
            if self._traces is not None:
                self._traces.ended(result.key, result.outcome)
            if debugs:
                log.debug("looked at", tile=result.key, outcome=result.outcome, event_ids=events or [])
            self._progress_ms = now_ms()
            metrics.TILES.labels(result.outcome).inc()
            if result.outcome == "failed":
                self._failed(result.key)
            else:
                self._tries.pop(result.key, None)

    def _failed(self, key: str) -> None:
        """The ledger has charged the tile; until it gives it up, which makes a dead letter, it is tried again here."""
        verdict = self._retries.failed(key, self._tries.get(key, 1), "transient", self._clock())
        if verdict != "again":
            self._tries.pop(key, None)  # The sensor takes it up after its grace.

    # -- what comes later ----------------------------------------------------------------------------------------------
    def _at(self, delay_s: float, key: str) -> None:
        heapq.heappush(self._later, (self._clock() + delay_s, key))

    def _due(self) -> None:
        now = self._clock()
        while self._later and self._later[0][0] <= now:
            self._note(heapq.heappop(self._later)[1])
        for key, attempt in self._retries.due(now, self._saturation(now)):
            self._tries[key] = attempt
            self._note(key)

    def _until_due(self) -> float:
        due = [at for at in (self._later[0][0] if self._later else None, self._retries.next_s()) if at is not None]
        return min(IDLE_POLL_S, max(0.001, min(due) - self._clock())) if due else IDLE_POLL_S

    def _sweep(self) -> None:
        """Take up what is dirty and in nobody's hands."""
        if self._clock() - self._swept < SWEEP_S or not self._flow.asks:
            return
        self._swept = self._clock()
        for state in self.stack.ledger.dirty(SWEEP_TILES, kind="live", min_age_ms=SWEEP_AGE_MS):
            if state.key not in self._tries and tile_key(state.key):
                self._note(state.key)

    def _beat(self) -> None:
        now = self._clock()
        if now - self._beaten < health.BEAT_S:
            return
        self._beaten = now
        waiting = len(self._queue) + len(self._jobs)
        if not waiting:
            self._progress_ms = now_ms()
        health.beat(self.stack.ledger, self.worker, Beat(now_ms(), self._progress_ms, waiting, self._built))
        metrics.WAITING.set(waiting)
        gauges = self._budget.gauges(now)
        metrics.BUDGET_IN_USE.set(gauges.in_use)
        metrics.BUDGET_WAITING.set(gauges.waiting)
        metrics.BUDGET_OLDEST.set(gauges.oldest_wait_s)
        stopped_s = self._flow.stopped_since_s
        metrics.NOT_ASKING.set(0.0 if stopped_s is None else now - stopped_s)
        metrics.PAUSED.set(self._paused)
        self._gaps = [(at, gap) for at, gap in self._gaps if now - at < 60]
        metrics.POLL_GAP.set(max((gap for _, gap in self._gaps), default=0.0))


def _chunks(tickets: Sequence[Ticket[Job]]) -> Iterator[list[Ticket[Job]]]:
    """Cut by what they cost: one transaction and one announcement each."""
    chunk: list[Ticket[Job]] = []
    cost = 0
    for ticket in tickets:
        if chunk and cost + ticket.cost > CHUNK_VERTICES:
            yield chunk
            chunk, cost = [], 0
        chunk.append(ticket)
        cost += ticket.cost
    if chunk:
        yield chunk


def tile_key(key: str | None) -> str | None:
    """The canonical key of the tile that a record's key names; None where it names none."""
    try:
        return Tile.from_key(key or "").key
    except TileError:
        return None
