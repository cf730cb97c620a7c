"""The router: triggers to `[triggers]`, in order per device, each once in effect, none lost.

One thread works: it stamps, keys, drops what was told already, encodes, publishes, and serves the acknowledgements.
`route` takes what a routing run's tracker told; `submit` what other callers bring, whom it may shed. What happens when
the broker is away, router_outage.py says.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter
from geo_assets.flow.bounds import Bounds, Shed
from geo_assets.flow.breaker import FAILURES, OPEN_S, Breaker, Held
from geo_assets.flow.dedup import CAPACITY, DedupWindow
from geo_assets.flow.epochs import mark
from geo_assets.flow.stages import DEDUP, EMIT, LEAST, PUBLISH, STAGES, Stage, StageGuard
from geo_assets.geofence.triggers import Trigger, Triggers, encode, encode_many
from geo_assets.geofence.triggers import keys as keys_of
from geo_assets.services.poison import Undertaker, letter_of
from geo_assets.services.router_metrics import END_TO_END, RouterMetrics
from geo_assets.services.router_work import Chunk, Receipt, Sent
from geo_assets.services.spool import Spool, SpoolFull
from geo_assets.services.spooling import Batch, SpooledDevices
from geo_assets.services.trigger_tail import Replaced, Tail, TailReader, now_ms, take_over
from resources.event_log.protocol import InvalidRecord, LogError, RecordTooLarge, StaleEpoch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resources.event_log.protocol import EventLog, Publisher

log = structlog.get_logger()

_clock = time.perf_counter_ns

_SPOOL_AGAIN_S = 1.0
"""How long a spool that took no more is left alone."""


class RouterClosed(Exception):
    """The router is closed, or its thread has ended by a fault of its own, which is the cause."""


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How a router behaves.

    Args:
        topic: Where triggers go.
        bounds: Of what it holds in memory: queued, or sent and not acknowledged.
        dedup_keys: Keys of the window.
        dedup_ttl_s: How long a key is remembered. Longer than a run reads back from its snapshot.
        failures: In a row, a ceiling's length apart at least, that open the breaker.
        open_s: How long it stays open before its probe.
        slow_publish_s: Publishing that takes longer is a failure. 25 ms is a broker's; a disk of its own may take 1 s.
        interval_s: Between looks at the stages' ceilings: Prometheus' usual scrape.
        least_a_s: Triggers a second below which a stage's latency says nothing.
        batch: Most triggers sent at once.
        under_way: Triggers sent and not acknowledged at which sending waits. A backlog waits here, where it is counted
            as waiting, and not in the client library, where it would look like a slow broker: 2,500 are 25 ms of
            100,000 a second.
        spool_folder: Where outside callers' triggers wait while the broker is away; None: they wait in memory, and are
            shed when that is full.
        spool_bytes: Most that waits there.
        freeze: Move what was loaded by the start out of the garbage collector's sight (`gc.freeze`).
    """

    topic: str = topics.TRIGGERS
    bounds: Bounds = field(default_factory=Bounds)
    dedup_keys: int = CAPACITY
    dedup_ttl_s: float = 3_600.0
    failures: int = FAILURES
    open_s: float = OPEN_S
    slow_publish_s: float = 0.025
    interval_s: float = 15.0
    least_a_s: float = LEAST
    batch: int = 1_000
    under_way: int = 2_500
    spool_folder: Path | None = None
    spool_bytes: int = 512_000_000
    freeze: bool = False


class Router:
    """Routes triggers. `start` before anything else; then `submit` from any thread, `route` from one.

    Args:
        log_: The event log.
        epoch: Of this run: higher than any before it (`trigger_tail.take_epoch`).
        options: How it behaves.
        dead_letters: Writes dead letters durably, or raises; called in a thread of its own until it succeeds.
    """

    def __init__(
        self,
        log_: EventLog,
        epoch: int,
        options: RouterOptions | None = None,
        *,
        dead_letters: Callable[[Sequence[DeadLetter]], None],
    ) -> None:
        self.options = options or RouterOptions()
        self.epoch = epoch
        self._log = log_
        o = self.options
        self.window = DedupWindow(o.dedup_keys, int(o.dedup_ttl_s * 1_000))
        self._tail = TailReader(log_, o.topic, self.window)
        self.breaker = Breaker(o.failures, o.open_s)
        """Of publishing."""
        self.dedup_breaker = Breaker(o.failures, o.open_s)
        """Of the stage before it; tripped when handing over is in breach."""
        self.spool = SpooledDevices(Spool(o.spool_folder, limit_bytes=o.spool_bytes)) if o.spool_folder else None
        self.metrics = RouterMetrics(
            {
                "held": lambda: self._held,
                "spool_bytes": lambda: 0 if self.spool is None else self.spool.bytes_waiting,
                "parked_devices": lambda: 0 if self.spool is None else self.spool.parked,
                "under_way": lambda: 0 if self._publisher is None else self._publisher.under_way,
                "capacity": lambda: o.bounds.capacity,
                "window_keys": lambda: len(self.window),
                "window_capacity": lambda: self.window.capacity,
                "epoch": lambda: self.epoch,
            },
            {"dedup": lambda: self.dedup_breaker.state, "publish": lambda: self.breaker.state},
            self._count_bloom,
        )
        self.counts = self.metrics.counts
        self._stages = StageGuard(
            STAGES,
            self.metrics.seconds,
            self._stage_in_breach,
            least=round(self.options.least_a_s * self.options.interval_s),
        )
        self._undertaker = Undertaker(dead_letters)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._sleeping = False
        self._pulled: deque[Chunk] = deque()
        self._outside: deque[Chunk] = deque()
        self._held = self._held_pulled = 0
        self._paused = False
        self._sent: dict[int, Sent] = {}
        self._number = 0
        self._failed: list[tuple[Sent, list[int]]] = []
        self._publisher: Publisher | None = None
        self._partitions = 0
        self._slow_ns = int(o.slow_publish_s * 1e9)
        self._last_failure_ns = 0
        self._was_open = False
        self._probe: int | None = None
        self._probe_under_way = False
        self._draining = False
        self._next_interval = self._spool_again = 0.0
        self._clock_ms = 0
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._closed = False
        self._acknowledged: Callable[[int, Sequence[int]], None] | None = None

    # Starting and ending

    def read_ahead(self) -> Tail:
        """Read the tail before it is this run's turn, as often as it stands by: `start` has little left to read."""
        return self._tail.read(now_ms())

    def start(self, *, thread: bool = True) -> Tail:
        """Take over the topic, read its tail, take up the spool, and begin.

        Args:
            thread: Whether a thread of the router's works. Otherwise the caller does, by `step`: a loop that keeps the
                interpreter busy would make the other thread wait for it at every acknowledgement.

        Returns:
            What the tail said; its horizon is how far a replay goes.

        Raises:
            Replaced: A router of a higher epoch has taken over, and the log checks.
            LogUnavailable: The log does not answer; start again.
        """
        self._clock_ms = now_ms()
        partitions = sorted(self._log.extents(self.options.topic))
        self._partitions = len(partitions)
        self._publisher = self._log.publisher(self.options.topic, epoch=self.epoch)
        take_over(self._publisher, partitions, self.epoch)
        tail = self._tail.read(self._clock_ms)
        if self.spool is not None:
            self.spool.take_up(self.window, self._clock_ms)
        self._next_interval = time.monotonic() + self.options.interval_s
        if self.options.freeze:
            # What lives as long as the process is not worth looking at in every collection: p99 halved by this.
            gc.collect()
            gc.freeze()
        if thread:
            self._thread = threading.Thread(target=self._run, name="router", daemon=True)
            self._thread.start()
        log.info(
            "router started", epoch=self.epoch, tail=tail.triggers, void=tail.void, window=len(self.window),
            spooled=0 if self.spool is None else self.spool.waiting,
        )  # fmt: skip
        return tail

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait for acknowledgements, spool outside callers' that have none, and end.

        Returns:
            Whether everything handed over is durable. Pulled triggers that are not come again from their positions.
        """
        if self._closed:
            return self._held == 0
        deadline = time.monotonic() + timeout_s
        # What was pulled is the next run's where this one was replaced; outside callers' triggers go to the spool.
        with suppress(Replaced):
            while self._held and time.monotonic() < deadline and self.breaker.closed and self._fault is None:
                self._work_or_wait(0.01)
        self._closed = True
        with self._idle:
            self._idle.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._publisher is not None:
            self._publisher.close()
        self._gather_failed()
        self._spool_outside(everything=True)
        self._undertaker.close(max(0.1, deadline - time.monotonic()))
        self._buried()
        if self.spool is not None:
            self.spool.close()
        return self._held == 0

    # Handing over

    def submit(self, triggers: Sequence[Trigger], *, emitted: int | None = None) -> Receipt:
        """Hand over triggers from outside a routing run. Never waits.

        Args:
            triggers: In order per device. Taken over: their epoch is set, and their time where they have none.
            emitted: `time.perf_counter_ns` when they were made; now by default.

        Returns:
            Says when all of them are durable: in the log, in the spool, known already, or dead letters.

        Raises:
            Shed: The queue is too full; none was taken.
            RouterClosed: It takes no more.
        """
        receipt = Receipt()
        chunk = Chunk(list(triggers), emitted or _clock(), True, receipt)
        self._hand_over([chunk], chunk.count)
        return receipt

    def route(self, triggers: Triggers | Sequence[Trigger], *, emitted: int | None = None) -> None:
        """Hand over what the tracker told. Ask `ready` before the positions it came of are pulled.

        Args:
            triggers: In order per device.
            emitted: `time.perf_counter_ns` when they were made; now by default.

        Raises:
            Shed: The queue holds all it may: `ready` was not asked. None was taken.
            RouterClosed: It takes no more.
        """
        count, most = len(triggers), self.options.batch
        if not count:
            return
        emitted, made = emitted or _clock(), time.time_ns()
        starts = range(0, count, most)
        parts = (
            [triggers.part(start, start + most) for start in starts]
            if isinstance(triggers, Triggers)
            else [list(triggers[start : start + most]) for start in starts]
        )
        chunks = [Chunk(part, emitted, False, None, made_ns=made) for part in parts]
        self._hand_over(chunks, count)

    def _hand_over(self, chunks: Sequence[Chunk], count: int) -> None:
        chunk = chunks[0]
        with self._lock:
            if self._closed or self._fault is not None:
                raise RouterClosed("the router takes no more") from self._fault
            bounds = self.options.bounds
            if chunk.outside:
                if bounds.sheds(self._held, count):
                    self.counts["shed"] += count
                    raise Shed("trigger queue", self._held, count, bounds.shed_limit)
                self._outside += chunks
            else:
                if self._held >= bounds.capacity:
                    raise Shed("trigger queue", self._held, count, bounds.capacity)
                self._pulled += chunks
                self._held_pulled += count
            self._held += count
            self.metrics.seconds[EMIT.name].observe((_clock() - chunk.emitted) / 1e9, count)
            if self._sleeping:
                self._idle.notify_all()

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Whether more may be pulled: the queue is below its marks, and the broker takes triggers.

        Args:
            timeout_s: How long to wait for it.
        """
        return self._wait_for(self._ready, timeout_s)

    def _ready(self) -> bool:
        self._paused = self.options.bounds.pauses(self._held, self._paused)
        return not self._paused and self._passes

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything that `route` took is durable: then a snapshot may be written."""
        return self._wait_for(lambda: self._held_pulled == 0, timeout_s)

    def wait(self, receipt: Receipt, timeout_s: float) -> bool:
        """Wait until what `submit` took is durable."""
        return self._wait_for(lambda: receipt.done, timeout_s)

    @property
    def in_flight(self) -> int:
        """Triggers that `route` took and that are not durable yet (see `replay.Replay.may_snapshot`)."""
        return self._held_pulled

    @property
    def held(self) -> int:
        """Triggers in memory: queued, or sent and not acknowledged."""
        return self._held

    def on_acknowledged(self, listener: Callable[[int, Sequence[int]], None]) -> None:
        """Have every acknowledgement told, in the working thread: `emitted`, and when each was acknowledged (ns)."""
        self._acknowledged = listener

    def _wait_for(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not reached():
            if self._fault is not None:
                raise RouterClosed("the router's thread has ended") from self._fault
            if time.monotonic() >= deadline:
                return False
            self._work_or_wait(0.005)
        return True

    def _work_or_wait(self, seconds: float) -> None:
        if self._thread is None:
            self.step(seconds)
        else:
            time.sleep(min(seconds, 0.002))

    # Working

    def _run(self) -> None:
        try:
            while not self._closed:
                self.step(0.05)
        except Replaced as why:
            log.warning("router replaced", reason=str(why))
        except BaseException as fault:
            self._fault = fault
            log.exception("router ended")

    def step(self, timeout_s: float = 0.0) -> None:
        """Do what there is to do: acknowledgements, one batch of each kind, the breakers. One thread at a time.

        Args:
            timeout_s: How long to wait when there is nothing to do.
        """
        publisher = self._publisher
        waiting = self._work_waits()
        if publisher is not None and publisher.under_way:
            # Woken by an acknowledgement; what is handed over meanwhile waits a millisecond at most.
            publisher.serve(0.0 if waiting else min(timeout_s, 0.001))
        elif not waiting:
            if publisher is not None:
                publisher.serve(0.0)
            with self._idle:
                if not self._work_waits() and not self._closed:
                    self._sleeping = True
                    self._idle.wait(timeout_s)
                    self._sleeping = False
        self._look()
        if self._passes:
            if self._room:
                self._drain()
                self._send_next(self._outside)
            if self._room:
                self._send_next(self._pulled)
        elif self._outside:
            self._spool_outside()

    @property
    def _room(self) -> bool:
        return self._publisher is not None and self._publisher.under_way < self.options.under_way

    def _work_waits(self) -> bool:
        if self._passes:
            if not self._room:
                return False
            spooled = self.spool is not None and self.spool.waiting and not self._draining
            return bool(self._outside or self._pulled or spooled)
        return bool(self._outside) and self.spool is not None and time.monotonic() >= self._spool_again

    @property
    def _passes(self) -> bool:
        return self.breaker.closed and self.dedup_breaker.closed

    def _send_next(self, queue: deque[Chunk]) -> None:
        if not queue:
            return
        chunk = queue.popleft()
        if chunk.frames is None:
            chunk.load()
            if chunk.count > self.options.batch:
                chunk, rest = chunk.split(self.options.batch)
                queue.appendleft(rest)
            parts = [chunk]
            size = chunk.count
            # Single triggers of many callers share what a batch costs.
            while queue and queue[0].frames is None and size + queue[0].count <= self.options.batch // 8:
                parts.append(queue.popleft())
                parts[-1].load()
                size += parts[-1].count
            chunk = parts[0] if len(parts) == 1 else Chunk.merged(parts)
            self._prepare(chunk)
        if chunk.outside and self.spool is not None and self.spool.parked:
            self._park(chunk)
        if chunk.triggers:
            self._send(chunk)

    def _prepare(self, chunk: Chunk) -> None:
        """Stamp, key, dedup, encode. What is poison or known leaves the chunk."""
        began = _clock()
        count = len(chunk.triggers)
        epoch, made = self.epoch, time.time_ns()
        for trigger in chunk.triggers:
            trigger.epoch = epoch
            if not trigger.emitted_ns:
                trigger.emitted_ns = made
        self._clock_ms = max(self._clock_ms, made // 1_000_000)
        try:
            chunk.devices = [trigger.device_id for trigger in chunk.triggers]
            if any(map(_not_text, set(map(type, chunk.devices)))):
                raise TypeError
            keys = keys_of(chunk.triggers)
            frames = encode_many(chunk.triggers)
        except (TypeError, ValueError, OverflowError):
            keys, frames = self._one_by_one(chunk)
        new = self.window.admit(keys, self._clock_ms)
        if len(new) == len(keys):
            chunk.frames, chunk.keys = frames, keys
        else:
            self.counts["deduped"] += len(keys) - len(new)
            self._let_go(chunk, len(keys) - len(new))
            chunk.keep(new, frames, keys)
        self.metrics.seconds[DEDUP.name].observe((_clock() - began) / 1e9, count)

    def _one_by_one(self, chunk: Chunk) -> tuple[list[bytes], list[bytes]]:
        """Keys and frames where some trigger cannot be encoded: it alone becomes a dead letter."""
        keys: list[bytes] = []
        frames: list[bytes] = []
        good: list[int] = []
        letters: list[DeadLetter] = []
        for number, trigger in enumerate(chunk.triggers):
            try:
                if not isinstance(trigger.device_id, str):
                    raise TypeError(f"device_id is {type(trigger.device_id).__name__}, not text")
                trigger.device_id.encode()
                key, frame = keys_of([trigger])[0], encode(trigger)
            except (TypeError, ValueError, OverflowError) as fault:
                letters.append(letter_of(trigger, None, fault))
            else:
                keys.append(key)
                frames.append(frame)
                good.append(number)
        chunk.triggers = [chunk.triggers[number] for number in good]
        chunk.devices = [trigger.device_id for trigger in chunk.triggers]
        self._bury(chunk, letters)
        return keys, frames

    def _send(self, chunk: Chunk) -> None:
        assert self._publisher is not None
        assert chunk.frames is not None
        self._number += 1
        sent = Sent(self._number, chunk, _clock())
        self._sent[self._number] = sent
        try:
            self._publisher.send(chunk.devices, chunk.frames, partial(self._done, sent))
        except LogError as fault:
            self._done(sent, dict.fromkeys(range(len(chunk.frames)), fault), ())

    def _done(self, sent: Sent, failed: Mapping[int, LogError], at: Sequence[int]) -> None:
        """All records of a batch have their outcome."""
        del self._sent[sent.number]
        chunk = sent.chunk
        if at:
            seconds = self.metrics.seconds
            times = np.array(at, np.int64)
            seconds[PUBLISH.name].observe_all((times - sent.at) / 1e9)
            seconds[END_TO_END].observe_all((times - chunk.emitted) / 1e9)
            self.counts["drained" if chunk.drained else "routed"] += len(at)
            if self._acknowledged is not None:
                self._acknowledged(chunk.emitted, at)
            if max(at) - sent.at > self._slow_ns:
                self._slow("a publish took longer than its ceiling")
            else:
                self.breaker.succeeded()
        if not failed:
            if sent.spooled:
                assert self.spool is not None
                self.spool.delivered(chunk.keys)
            self._let_go(chunk, len(at))
            return
        poison = [place for place, why in failed.items() if isinstance(why, RecordTooLarge | InvalidRecord)]
        assert chunk.frames is not None
        if poison:
            self._bury(chunk, [letter_of(chunk.triggers[p], chunk.frames[p], failed[p]) for p in poison])
        if sent.spooled:
            # What failed otherwise is sent again out of the spool.
            assert self.spool is not None
            again = failed.keys() - set(poison)
            self.spool.delivered([key for place, key in enumerate(chunk.keys) if place not in again])
            self._let_go(chunk, len(at) + len(again))
            return
        self._let_go(chunk, len(at))
        again = sorted(failed.keys() - set(poison))
        if again:
            self._failed.append((sent, again))
            self.breaker.trip(time.monotonic(), str(failed[again[0]]))

    def _let_go(self, chunk: Chunk, count: int) -> None:
        """So many of a chunk's triggers are durable, or need not be."""
        if not count:
            return
        if not chunk.drained:
            with self._lock:
                self._held -= count
                if not chunk.outside:
                    self._held_pulled -= count
        chunk.settled(count)

    # Poison

    def _bury(self, chunk: Chunk, letters: list[DeadLetter]) -> None:
        if letters:
            self._undertaker.take(chunk, letters)

    def _buried(self) -> None:
        for chunk, count in self._undertaker.buried():
            self.counts["dlq"] += count
            self._let_go(chunk, count)

    # The breakers

    def _look(self) -> None:
        """Lateness, the stages' ceilings, failed deliveries, the breakers."""
        self._buried()
        if self._sent and self.breaker.closed:
            oldest = next(iter(self._sent.values()))
            if _clock() - oldest.at > self._slow_ns:
                self._slow("the broker does not acknowledge")
        now = time.monotonic()
        if now >= self._next_interval:
            self._next_interval = now + self.options.interval_s
            self._stages.interval()
        publisher = self._publisher
        if publisher is not None and isinstance(publisher.broken, StaleEpoch) and self._fault is None:
            self._fault = Replaced(str(publisher.broken))
            raise self._fault
        if publisher is not None and publisher.broken is not None and self._passes:
            self.breaker.trip(now, str(publisher.broken))
        if self._failed and (publisher is None or not publisher.under_way):
            self._gather_failed()
        if self._passes:
            if self._was_open:
                self._was_open = False
                log.info("router: triggers pass again", spooled=0 if self.spool is None else self.spool.waiting)
            return
        if not self._was_open:
            self._was_open = True
            reason = self.breaker.reason or self.dedup_breaker.reason
            log.warning("router: breaker open", reason=reason, held=self._held)
            self._spool_outside()
        self._try(now)

    def _slow(self, why: str) -> None:
        """A failure, at most one every ceiling's length: so that one stall of many batches is not twenty."""
        now = _clock()
        if now - self._last_failure_ns < self._slow_ns:
            return
        self._last_failure_ns = now
        self.counts["slow"] += 1
        self.breaker.failed(time.monotonic(), reason=f"{why} ({self.options.slow_publish_s * 1000:g} ms)")

    def _count_bloom(self) -> None:
        self.counts["bloom_suspects"] = self.window.suspects
        self.counts["bloom_false_positives"] = self.window.false_positives

    def _stage_in_breach(self, stage: Stage, reason: str) -> None:
        breaker = self.breaker if stage is PUBLISH else self.dedup_breaker
        if breaker.held != "closed":
            breaker.trip(time.monotonic(), reason)

    def hold(self, where: Held | None) -> None:
        """Hold the breakers open or closed, or let them go (see `Breaker.hold`). For the working thread.

        Held closed they still open where the broker refuses deliveries: nothing could go on then.
        """
        for breaker in (self.breaker, self.dedup_breaker):
            breaker.hold(where, time.monotonic())

    @property
    def spooled(self) -> int:
        """Triggers that wait on disk."""
        return 0 if self.spool is None else self.spool.waiting

    def _try(self, now: float) -> None:
        """Let one probe through where it is time for it: a mark of this epoch, which means nothing new to anybody."""
        number = self.dedup_breaker.probe(now)
        if number is not None:
            self.dedup_breaker.succeeded(number)
        number = self.breaker.probe(now)
        if number is None:
            return
        self._probe = number
        try:
            if self._publisher is None or self._publisher.broken is not None:
                if self._publisher is not None and self._publisher.under_way:
                    return
                if self._publisher is not None:
                    self._publisher.close()
                self._publisher = None
                self._publisher = self._log.publisher(self.options.topic, epoch=self.epoch)
                self._probe_under_way = False
            if not self._probe_under_way:
                self._probe_under_way = True
                where = number % self._partitions
                self._publisher.send([None], [mark(self.epoch)], self._probed, partition=where)
        except LogError as fault:
            self._probe_under_way = False
            self.breaker.failed(now, number, str(fault))

    def _probed(self, failed: Mapping[int, LogError], at: Sequence[int]) -> None:
        del at
        self._probe_under_way = False
        if failed:
            self.breaker.failed(time.monotonic(), self._probe, str(failed[0]))
        else:
            self.breaker.succeeded(self._probe)

    def _gather_failed(self) -> None:
        """Deliveries failed: what was pulled goes to the front of its queue, in its order, under its keys."""
        failed, self._failed = sorted(self._failed, key=lambda each: each[0].number), []
        pulled: list[Chunk] = []
        outside: list[Chunk] = []
        for sent, places in failed:
            chunk = sent.chunk
            if chunk.drained:
                self._draining = False
                if self.spool is not None:
                    self.spool.delivered([key for n, key in enumerate(chunk.keys) if n not in set(places)])
                continue
            self.counts["again"] += len(places)
            (outside if chunk.outside else pulled).append(chunk.part(places))
        self._pulled.extendleft(reversed(pulled))
        self._outside.extendleft(reversed(outside))

    # The spool

    def _park(self, chunk: Chunk) -> None:
        """Take out of a chunk what must wait behind spooled triggers of its device, into the spool."""
        assert self.spool is not None
        behind = self.spool.behind(chunk.devices)
        if not behind:
            return
        try:
            self._into_spool(chunk.part(behind))
        except (SpoolFull, OSError) as fault:
            # Not overtaken, not lost: all of it waits in memory, and its callers are shed once that is full.
            self._spool_fails(fault)
            self._outside.appendleft(chunk.part(range(len(chunk.triggers))))
            chunk.empty()
            return
        chunk.keep(*chunk.without(behind))

    def _into_spool(self, chunk: Chunk) -> None:
        assert self.spool is not None
        assert chunk.frames is not None
        self.spool.append(chunk.devices, chunk.keys, chunk.frames)
        self.counts["spooled"] += len(chunk.frames)
        self._let_go(chunk, len(chunk.frames))

    def _spool_outside(self, *, everything: bool = False) -> None:
        """Outside callers' triggers go to disk: first what is under way and may fail, then what waits."""
        if self.spool is None or (time.monotonic() < self._spool_again and not everything):
            return
        # In the order in which they were sent, whether they have failed by now or may still arrive.
        under_way: list[tuple[Sent, list[int] | None]] = [(sent, None) for sent in self._sent.values()]
        under_way += self._failed
        try:
            for sent, places in sorted(under_way, key=lambda each: each[0].number):
                chunk = sent.chunk
                if not chunk.outside or chunk.drained or sent.spooled:
                    continue
                assert chunk.frames is not None
                if places is not None:
                    self._into_spool(chunk.part(places))
                    self._failed.remove((sent, places))
                    continue
                self.spool.append(chunk.devices, chunk.keys, chunk.frames)
                sent.spooled = True
                self.counts["spooled"] += len(chunk.frames)
                if chunk.unsettled[0] == len(chunk.frames):
                    chunk.durable()
            while self._outside:
                chunk = self._outside[0]
                if chunk.frames is None:
                    self._prepare(chunk)
                if chunk.triggers:
                    self._into_spool(chunk)
                self._outside.popleft()
                if not everything and self._publisher is not None:
                    self._publisher.serve(0.0)
        except (SpoolFull, OSError) as fault:
            self._spool_fails(fault)

    def _spool_fails(self, fault: Exception) -> None:
        if time.monotonic() >= self._spool_again:
            log.warning("router: the spool takes no more", error=str(fault), held=self._held)
        self._spool_again = time.monotonic() + _SPOOL_AGAIN_S

    def _drain(self) -> None:
        """Send what is spooled, in its order, once what was under way has its outcome."""
        spool = self.spool
        if spool is None or self._draining or not spool.waiting:
            return
        if any(sent.spooled for sent in self._sent.values()):
            return
        devices, keys, frames, triggers, batch = spool.next(self.epoch, self.options.batch)
        if not frames:
            spool.drained(batch)
            return
        self._draining = True
        chunk = Chunk(triggers, _clock(), True, None, drained=True)
        chunk.devices, chunk.keys, chunk.frames = devices, keys, frames
        chunk.whole = partial(self._drained, batch)
        self._send(chunk)

    def _drained(self, batch: Batch) -> None:
        assert self.spool is not None
        self.spool.drained(batch)
        self._draining = False


def _not_text(kind: type) -> bool:
    return kind is not str


def shorter_turns() -> None:
    """Have threads take turns at the interpreter every half millisecond: five, and each acknowledgement may wait so."""
    sys.setswitchinterval(0.0005)
