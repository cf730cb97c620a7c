"""Positions to triggers, end to end on a real Kafka: part of `python -m benchmarks.geofence`.

A generator in a process of its own writes positions to `[positions]` by the clock, whatever becomes of them; a routing
run, as `geo-assets route` is one, reads them and writes `[triggers]`. 50,000 tiling fences with hysteresis and dwell;
one position in a hundred comes into another fence, so that two to three triggers come of a hundred positions. The run
begins from a snapshot of devices that have driven about for a while, as one that takes over does.

The naive way beside it reads one record, judges it, and waits for the acknowledgement of each trigger.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import Report
from benchmarks.tracker import EAST, WEST, Drive, naive_way, tiling
from geo_assets.events import topics
from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.positions import Positions
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.tracker import Tracker
from geo_assets.geofence.triggers import DWELL, ENTER, EXIT, Trigger, encode
from geo_assets.services import fences as fence_book
from geo_assets.services import routing
from geo_assets.services.geofence_snapshots import Snapshots, Stored
from geo_assets.services.routing_result import RoutingResult
from geo_assets.services.trigger_tail import take_epoch
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from resources.event_log.murmur2 import partition_of
from resources.event_log.protocol import NewRecord

SHARE = 0.01
"""Of the positions, how many are in another fence than the one before."""
TICK_S = 0.002
BOUND_MS = 40.0
STEP = 1.25
"""From one rate to the next."""
FIRST = 10_000


@dataclass(frozen=True, slots=True)
class Load:
    """Fences in a row, devices, and how many fixes of each come before what is measured."""

    side: int
    devices: int
    history: int = 12


FULL, QUICK = Load(224, 250_000), Load(100, 50_000)


@dataclass(frozen=True, slots=True)
class Step:
    """What was seen at one rate."""

    rate: int
    seconds: float
    offered: int
    positions: int
    triggers: int
    read_ms: npt.NDArray[np.float64]
    """From position read to acknowledgement, each trigger."""
    stamp_ms: npt.NDArray[np.float64]
    """From the oldest stamp of the batch: what waited in the broker and the client counts as well."""
    lag: tuple[int, int]
    cpu_s: float
    rss: tuple[int, int]
    late_p99_ms: float

    @property
    def p99(self) -> float:
        return float(np.percentile(self.read_ms, 99)) if len(self.read_ms) else float("inf")

    @property
    def holds(self) -> bool:
        """p99 within its bound, everything offered was judged, and no lag is left but what is on its way."""
        flat = self.lag[1] <= max(self.lag[0], self.rate * 0.1)
        return self.p99 < BOUND_MS and flat and self.positions >= 0.97 * self.rate * self.seconds


class Seen:
    """What the run tells of itself while it goes on."""

    def __init__(self) -> None:
        self.read: list[npt.NDArray[np.int64]] = []
        self.stamp: list[npt.NDArray[np.float64]] = []
        self.latest = RoutingResult()
        self.reports = 0

    def acknowledged(self, read_ns: int, stamp_ms: int, at: Sequence[int]) -> None:
        times = np.array(at, np.int64)
        self.read.append(times - read_ns)
        # The same clock on both sides; `perf_counter_ns` as wall time.
        wall_ms = (times + _WALL_NS) / 1e6
        self.stamp.append(wall_ms - stamp_ms)

    def progress(self, result: RoutingResult) -> None:
        self.latest = result
        self.reports += 1

    def report(self, seconds: float = 10.0) -> RoutingResult:
        """The next one."""
        before, deadline = self.reports, time.monotonic() + seconds
        while self.reports <= before + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.latest


_WALL_NS = time.time_ns() - time.perf_counter_ns()


def end_to_end(
    report: Report, servers: str, *, quick: bool, rates: Sequence[int] | None = None, seconds: float | None = None,
    slow_s: float = 0.025, profile: str | None = None,
) -> None:  # fmt: skip
    """Add the rows: upwards from a low rate to where it does not hold, then the highest rate that held, for longer."""
    load = QUICK if quick else FULL
    index = FenceIndex(tiling(load.side))
    drive = Drive(load.devices, load.side, SHARE)
    with _home(servers) as stack:
        _warm(stack, index, drive, load)
        with _Generator(stack.settings, drive) as generator, _Run(stack, slow_s, profile) as run:
            run.until_started()
            short = seconds or (4.0 if quick else 10.0)
            steps: list[Step] = []
            for rate in rates or _rates(quick):
                # The first seconds at a new rate are not counted. One that fails has a second chance: the machine may
                # have done something else.
                step = run.at(generator, rate, short)
                if not step.holds and rates is None and not quick:
                    step = run.at(generator, rate, short)
                steps.append(step)
                _rows(report, step)
                if not step.holds and rates is None:
                    break
            held = [step for step in steps if step.holds]
            if held and not quick and rates is None:
                best = run.at(generator, held[-1].rate, 60.0)
                _rows(report, best)
                held[-1:] = [best] if best.holds else []
    if held:
        best = held[-1]
        report.row("positions → triggers: highest rate with p99 < 40 ms", best.positions / best.seconds, "positions/s")
    with _home(servers) as stack:
        one = _naive(stack, index, drive, 2.0 if quick else 10.0)
    report.row("naive: one position, one read, one acknowledgement at a time", one, "positions/s")
    if held:
        report.row(
            "positions → triggers against it", held[-1].positions / held[-1].seconds, "positions/s", "naive",
            held[-1].positions / held[-1].seconds / one,
        )  # fmt: skip
    report.note(
        f"positions → triggers: {len(index.fence_set):,} fences, {load.devices:,} devices; from position read to the "
        "trigger's acknowledgement, each trigger timed; `since stamp` counts the wait in broker and client too."
    )


def _rates(quick: bool) -> Sequence[int]:
    if quick:
        return (10_000,)
    rates = [FIRST]
    while rates[-1] < 200_000:
        rates.append(round(rates[-1] * STEP / 1_000) * 1_000)
    return rates


def _rows(report: Report, step: Step) -> None:
    name = f"positions {step.rate:,}/s, {step.seconds:.0f} s"
    report.row(f"{name}: judged", step.positions / step.seconds, "positions/s", f"offered {step.offered:,}")
    report.row(f"{name}: acknowledged", step.triggers / step.seconds, "triggers/s")
    if len(step.read_ms):
        report.row(f"{name}: p50", float(np.percentile(step.read_ms, 50)), "ms")
        report.row(f"{name}: p99", step.p99, "ms", "40 ms", BOUND_MS / step.p99)
        report.row(f"{name}: worst", float(step.read_ms.max()), "ms")
        report.row(f"{name}: p99 since stamp", float(np.percentile(step.stamp_ms, 99)), "ms")
    report.row(f"{name}: lag at its end", step.lag[1], "positions", f"{step.lag[0]:,} at its beginning")
    report.row(f"{name}: CPU of the run", step.cpu_s / max(1, step.positions) * 1e6, "µs/position")
    report.row(f"{name}: cores at that", step.cpu_s / step.seconds, "cores")
    report.row(f"{name}: memory, first to last", (step.rss[1] - step.rss[0]) / 1e6, "MB", f"{step.rss[0] / 1e6:.0f} MB")
    report.row(f"{name}: generator's own lateness p99", step.late_p99_ms, "ms")


# The platform


@contextmanager
def _home(servers: str) -> Iterator[Stack]:
    """A stack with this Kafka and all else embedded, for itself."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        prefix = f"bench_{secrets.token_hex(4)}."
        settings = Settings(home=Path(folder), kafka_servers=servers, kafka_topic_prefix=prefix)
        with Stack(settings) as stack:
            _ = stack.log, stack.ledger, stack.tiles
            try:
                yield stack
            finally:
                remove_topics(servers, prefix)


def remove_topics(servers: str, prefix: str) -> None:
    """Delete every topic with a prefix."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": servers})
    names = [name for name in admin.list_topics(timeout=20).topics if name.startswith(prefix)]
    for future in admin.delete_topics(names).values() if names else ():
        future.result(timeout=20)


def _warm(stack: Stack, index: FenceIndex, drive: Drive, load: Load) -> None:
    """Put fences and a snapshot in force: devices that have been on their way, most of them past their DWELL."""
    fences = index.fence_set
    name = f"{fence_book.FOLDER}{fences.revision}-bench"
    stack.tiles.put(name, fences.to_bytes())
    topic = stack.log.topic_id(topics.FENCES)
    standing = fence_book.Standing(fences.revision, name, topic, dict.fromkeys(stack.log.extents(topics.FENCES), 0))
    stack.ledger.set_value(fence_book.VALUE, replace(standing, fences=len(fences)).to_json())
    partitions = len(stack.log.extents(topics.POSITIONS))
    place = np.array([partition_of(device, partitions) for device in drive.ids], np.int64)
    tracker = Tracker(index, Rules())
    batch = min(50_000, load.devices)
    now = time.time_ns() // 1_000_000
    shift: int | None = None
    for positions in drive.batches(batch, load.history * load.devices // batch):
        if shift is None:
            shift = now - int(positions.time_ms[0]) - load.history * 10_000 - 1_000
        where = place[drive.order[np.arange(drive.sent, drive.sent + batch) % load.devices]]
        order = np.argsort(where, kind="stable")
        seen = positions.time_ms + shift
        tracker.feed(replace(positions, time_ms=seen, received_ms=seen, partition=where).rows(order))
    if tracker.counts.accepted != tracker.counts.positions:
        raise SystemExit(f"positions were refused: {tracker.counts}")
    # As if they had been read long ago: the topic is empty.
    tracker._offsets = dict.fromkeys(range(partitions), 0)
    snapshots = Snapshots(stack.ledger, stack.tiles, take_epoch(stack.ledger))
    snapshots.claim()
    what = Stored(fences=name, revision=fences.revision, topic=stack.log.topic_id(topics.POSITIONS),
                  offsets=tracker.offsets)  # fmt: skip
    snapshots.store(tracker.snapshot(), what)


class _Run:
    """A routing run in a thread of this process: what `geo-assets route` does, with an ear to each acknowledgement."""

    def __init__(self, stack: Stack, slow_s: float, profile: str | None) -> None:
        self.seen, self.stop, self.profile = Seen(), threading.Event(), profile
        options = routing.options_of(stack.settings)
        self.options = replace(
            options, idle_s=None, run_s=None, report_s=0.5, rules=Rules(), acknowledged=self.seen.acknowledged,
            router=replace(options.router, slow_publish_s=slow_s),
        )  # fmt: skip
        self.stack = stack
        self.fault: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="routing run")

    def _work(self) -> None:
        import cProfile

        # By the thread's own CPU: what else runs on the machine, and what waits, is not in it.
        profiler = cProfile.Profile(time.thread_time) if self.profile else None
        try:
            if profiler is not None:
                profiler.enable()
            routing.route(self.stack, self.options, stop=self.stop, progress=self.seen.progress)
            if profiler is not None:
                profiler.disable()
                profiler.dump_stats(self.profile or "")
        except BaseException as fault:
            self.fault = fault

    def __enter__(self) -> _Run:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        if self.fault is not None:
            raise self.fault

    def until_started(self) -> None:
        while not self.seen.reports:
            if self.fault is not None:
                raise self.fault
            time.sleep(0.05)

    def at(self, generator: _Generator, rate: int, seconds: float) -> Step:
        """Measure a rate, once it has gone on for two seconds and what was there before is read."""
        generator.begin(rate, seconds + 2.5)
        time.sleep(2.0)
        gc.collect()
        first = self.seen.report()
        read, stamp = len(self.seen.read), len(self.seen.stamp)
        began, cpu, memory = time.perf_counter(), time.process_time(), rss()
        time.sleep(seconds - 1.0)
        last = self.seen.report()
        wall, cpu, memory_after = time.perf_counter() - began, time.process_time() - cpu, rss()
        reads, stamps = self.seen.read[read:], self.seen.stamp[stamp:]
        late = generator.end()
        span = last.seconds - first.seconds
        step = Step(
            rate, span, round(rate * span), last.positions - first.positions, sum(map(len, reads)),
            np.concatenate(reads) / 1e6 if reads else np.empty(0), np.concatenate(stamps) if stamps else np.empty(0),
            (first.lag, last.lag), cpu / wall * span, (memory, memory_after), late,
        )  # fmt: skip
        self.seen.read.clear()
        self.seen.stamp.clear()
        deadline = time.monotonic() + 60
        while self.seen.report().lag and time.monotonic() < deadline:
            pass
        return step


# The generator


class _Generator:
    """Writes positions in a process of its own."""

    def __init__(self, settings: Settings, drive: Drive) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        topic = f"{settings.kafka_topic_prefix}{topics.POSITIONS}"
        self.process = context.Process(
            target=_generate, args=(theirs, settings.kafka_servers, topic, drive), daemon=True
        )

    def __enter__(self) -> _Generator:
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(20)

    def begin(self, rate: int, seconds: float) -> None:
        self.pipe.send((rate, seconds))

    def end(self) -> float:
        """Wait for the end of what was begun: p99 of how late it was itself, ms."""
        return self.pipe.recv()


def _generate(pipe: Connection, servers: str | None, topic: str, drive: Drive) -> None:
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": servers, "acks": "all", "enable.idempotence": True, "compression.type": "lz4",
            "partitioner": "murmur2_random", "linger.ms": 3, "queue.buffering.max.messages": 1_000_000,
        }
    )  # fmt: skip
    producer.list_topics(topic, timeout=10)
    # What the edge says beside each.
    headers = [("kind", b"positions"), ("source", b"fleet"), ("event-id", b"0123456789abcdef0123456789abcdef")]
    gc.freeze()
    while (task := pipe.recv()) is not None:
        rate, seconds = task
        count = max(1, round(rate * TICK_S))
        tick_ns, ticks = count / rate * 1e9, int(seconds * rate / count)
        late: list[int] = []
        began = time.perf_counter_ns()
        wall_ms = time.time_ns() / 1e6
        for tick, positions in enumerate(drive.batches(count, ticks)):
            due = began + int(tick * tick_ns)
            while (left := due - time.perf_counter_ns()) > 0:
                if left > 200_000:
                    time.sleep((left - 100_000) / 1e9)
            late.append(-left)
            stamp = int(wall_ms + tick * tick_ns / 1e6)
            _produce(producer, topic, positions, stamp, headers)
            producer.poll(0)
        producer.flush(30)
        pipe.send(float(np.percentile(np.array(late), 99)) / 1e6)


def _produce(producer: Any, topic: str, positions: Positions, stamp: int, headers: list[tuple[str, bytes]]) -> None:
    produce = producer.produce
    rows = zip(positions.device, positions.lon.tolist(), positions.lat.tolist(), strict=True)
    for device, lon, lat in rows:
        value = (
            f'{{"device_id":"{device}","lon":{lon:.7f},"lat":{lat:.7f},"time_ms":{stamp},"accuracy_m":5.0,'
            f'"event_time_ms":{stamp}}}'
        )
        produce(topic, value, device, timestamp=stamp, headers=headers)


# The naive way


def _naive(stack: Stack, index: FenceIndex, drive: Drive, seconds: float) -> float:
    """Positions a second, one after the other: read it, judge it, append each trigger and wait for it."""
    import msgspec

    now = time.time_ns() // 1_000_000
    (positions,) = drive.batches(2_000, 1)
    rows = zip(positions.device, positions.lon.tolist(), positions.lat.tolist(), strict=True)
    stack.log.append(
        [
            NewRecord(
                topics.POSITIONS, device,
                msgspec.json.encode({"device_id": device, "lon": lon, "lat": lat, "event_time_ms": now}), {}, now,
            )
            for device, lon, lat in rows
        ]
    )  # fmt: skip
    feed, told = naive_way(index)
    # Where they were before: as many of them have come into another fence as of the others' positions.
    step = SHARE * (EAST - WEST) / round(len(index.fence_ids) ** 0.5)
    for device, lon, lat in zip(positions.device, positions.lon.tolist(), positions.lat.tolist(), strict=True):
        feed(device, lon - step, lat, now - 10_000)
    told.clear()
    states = {"ENTER": ENTER, "EXIT": EXIT, "DWELL": DWELL}
    ids = index.fence_ids
    count, deadline, began = 0, time.monotonic() + seconds, time.monotonic()
    for partition, extent in stack.log.extents(topics.POSITIONS).items():
        offset = extent.begin
        while offset < extent.end and time.monotonic() < deadline:
            (record,) = stack.log.read(topics.POSITIONS, partition, offset, max_records=1)
            said = msgspec.json.decode(record.value or b"")
            feed(said["device_id"], said["lon"], said["lat"], said["event_time_ms"])
            for device, fence, state, at in told:
                trigger = Trigger(device or "", ids[fence], states[state], at, count, 1, partition, offset)
                stack.log.append([NewRecord(topics.TRIGGERS, device, encode(trigger))])
            told.clear()
            offset = record.offset + 1
            count += 1
    return count / (time.monotonic() - began)


def rss() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
