"""Router: triggers to a real Kafka at a given rate, every one timed from its emission to the broker's acknowledgement.

An open-loop generator in the router's process emits by the clock, whatever the router does: where it comes late, or
the router falls behind, the wait counts. Keys, dedup window (full), encoding and delivery reports are included; half of
the rows goes through `submit`, as outside callers do, at the same bounds. The naive way beside it sends one record at a
time and waits for each acknowledgement.

CPU seconds a trigger (this process, client library included) stand beside the wall clock's figures: on a busy machine
the latter say more of its other work.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import structlog

from benchmarks.positions import end_to_end, remove_topics, rss
from benchmarks.report import Report, parser
from geo_assets.events import topics
from geo_assets.flow.bounds import Shed
from geo_assets.geofence.triggers import Trigger, encode
from geo_assets.ports import TRIGGER_PARTITIONS
from geo_assets.services.router import Router, RouterOptions, shorter_turns
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_options import KafkaOptions
from resources.event_log.protocol import NewRecord, TopicSpec

DEVICES, FENCES = 200_000, 50_000
TICK_S = 0.002
"""What a tracker tells comes in batches: one every two milliseconds."""
START_MS = 1_777_636_800_000
RATES = (50_000, 60_000, 70_000, 80_000, 100_000, 120_000)


class Times:
    """When triggers were emitted and acknowledged, in arrays that are there from the beginning."""

    def __init__(self, most: int) -> None:
        self.emitted, self.acknowledged = np.ones(most, np.int64), np.ones(most, np.int64)
        self.count = 0

    def take(self, emitted: int, at: Sequence[int]) -> None:
        start, self.count = self.count, self.count + len(at)
        self.emitted[start : self.count] = emitted
        self.acknowledged[start : self.count] = at

    def milliseconds(self) -> npt.NDArray[np.float64]:
        """From emission to acknowledgement, each trigger."""
        return (self.acknowledged[: self.count] - self.emitted[: self.count]) / 1e6


def main() -> None:
    command = parser("Triggers through the router to a real Kafka.")
    command.add_argument("--servers", help="bootstrap servers; default: those that scripts/services started")
    command.add_argument("--rate", type=int, action="append", help="triggers a second; several times for several")
    command.add_argument("--seconds", type=float, help="of each rate; 60, or 10 with --quick")
    command.add_argument(
        "--slow-ms", type=float, default=25.0, help="ceiling of a publish; higher where the machine has other work"
    )
    command.add_argument("--profile", metavar="FILE", help="write a cProfile of the thread that routes")
    command.add_argument("--only", choices=("router", "positions"), help="one half of the table")
    command.add_argument("--positions", type=int, action="append", help="positions a second; several times for several")
    arguments = command.parse_args()
    report = Report("geofence", quick=arguments.quick)
    seconds = arguments.seconds or (10.0 if arguments.quick else 60.0)
    servers = arguments.servers or _servers()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    shorter_turns()
    if arguments.only != "positions":
        for rate in arguments.rate or (RATES[:1] if arguments.quick else RATES):
            if not one_rate(report, servers, rate, seconds, arguments.slow_ms / 1e3, arguments.profile):
                break
        naive(report, servers, 2.0 if arguments.quick else 10.0)
    if arguments.only != "router":
        end_to_end(
            report, servers, quick=arguments.quick, rates=arguments.positions, seconds=arguments.seconds,
            slow_s=arguments.slow_ms / 1e3, profile=arguments.profile,
        )  # fmt: skip
    report.note("Latency: emission (when it was due) to acknowledgement, each trigger timed. CPU: this process alone.")
    report.note(f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")
    report.finish(arguments.json)


def _servers() -> str:
    from geo_assets_tests.real_services import found

    servers = found().get("GEO_ASSETS_KAFKA_SERVERS")
    if servers is None:
        raise SystemExit("no Kafka: start one by `scripts/services start kafka`, or name it by --servers")
    return servers


def opened(servers: str) -> KafkaEventLog:
    log = KafkaEventLog(KafkaOptions(servers, topic_prefix=f"bench_{secrets.token_hex(4)}."))
    log.ensure_topics([TopicSpec(topics.TRIGGERS, TRIGGER_PARTITIONS)])
    return log


def one_rate(report: Report, servers: str, rate: int, seconds: float, slow_s: float, profile: str | None) -> bool:
    """Measure one rate; whether the router kept up with it."""
    log = opened(servers)
    router = Router(log, 1, RouterOptions(freeze=True, slow_publish_s=slow_s), dead_letters=lambda letters: None)
    times = Times(round(rate * seconds * 1.01) + 1_000)
    _fill(router)
    router.start(thread=False)
    stop = threading.Event()
    worker = threading.Thread(target=_work, args=(router, stop, profile))
    worker.start()
    generator = Generator(router, rate)
    # Warm: connections, the first batches of every partition, the allocator.
    generator.run(2.0)
    while router.held:
        time.sleep(0.001)
    router.on_acknowledged(times.take)
    before = dict(router.counts)
    gc.collect()
    gc.freeze()
    first_rss, cpu, began = rss(), time.process_time(), time.perf_counter()
    generator.run(seconds)
    offered = generator.sent - generator.shed
    while router.held:
        time.sleep(0.001)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    last_rss = rss()
    waits = times.milliseconds()
    shed = generator.shed
    routed = router.counts["routed"] - before["routed"]
    p50, p99, worst = np.percentile(waits, 50), np.percentile(waits, 99), waits.max()
    keeps_up = shed == 0 and routed == offered and wall < seconds * 1.1
    name = f"{rate:,}/s for {seconds:g} s"
    report.row(f"{name}: acknowledged", routed / wall, "triggers/s", f"offered {generator.sent / seconds:,.0f}")
    report.row(f"{name}: p50", p50, "ms")
    report.row(f"{name}: p99", p99, "ms", "40 ms", 40 / p99)
    report.row(f"{name}: worst", worst, "ms")
    report.row(f"{name}: CPU of this process", cpu / routed * 1e6, "µs/trigger")
    report.row(f"{name}: cores at that", cpu / wall, "cores")
    report.row(f"{name}: shed", shed, "triggers")
    report.row(f"{name}: publishes over their ceiling", router.counts["slow"] - before["slow"], "late stretches")
    report.row(f"{name}: memory, first to last", (last_rss - first_rss) / 1e6, "MB", f"{first_rss / 1e6:.0f} MB")
    report.row(f"{name}: generator's own lateness p99", generator.late_p99_ms(), "ms")
    stop.set()
    worker.join()
    router.close()
    remove(log)
    gc.unfreeze()
    return keeps_up


class Generator:
    """Emits by the clock. Rows are made as they fall due, as a tracker makes them."""

    def __init__(self, router: Router, rate: int) -> None:
        self.router, self.count = router, max(1, round(rate * TICK_S))
        self.tick_s = self.count / rate
        rng = np.random.default_rng(3)
        self.devices = [f"device-{number:08}" for number in rng.integers(0, DEVICES, 100_000).tolist()]
        self.fences = [f'"area-{number:06}"' for number in rng.integers(0, FENCES, 100_000).tolist()]
        self.made = self.sent = self.shed = 0
        self.late: list[int] = []

    def run(self, seconds: float) -> None:
        self.sent, self.shed, self.late = 0, 0, []
        router, count = self.router, self.count
        began = time.perf_counter_ns()
        tick_ns, ticks = self.tick_s * 1e9, int(seconds / self.tick_s)
        for tick in range(ticks):
            due = began + int(tick * tick_ns)
            while (left := due - time.perf_counter_ns()) > 0:
                if left > 200_000:
                    time.sleep((left - 100_000) / 1e9)
            self.late.append(-left)
            rows = self._rows(count)
            self.sent += count
            try:
                if tick % 2:
                    router.route(rows, emitted=due)
                else:
                    router.submit(rows, emitted=due)
            except Shed:
                self.shed += count

    def _rows(self, count: int) -> list[Trigger]:
        made, self.made = self.made, self.made + count
        place = made % (len(self.devices) - count)
        at, wall = START_MS + made // 50, time.time_ns()
        devices, fences = self.devices[place : place + count], self.fences[place : place + count]
        return [
            Trigger(device, fence, number & 1, at, number, 3, number & 3, number, 7, 1, wall)
            for number, device, fence in zip(range(made, made + count), devices, fences, strict=True)
        ]

    def late_p99_ms(self) -> float:
        return float(np.percentile(np.array(self.late), 99)) / 1e6


def _fill(router: Router) -> None:
    """A full window, as after an hour's work."""
    rng = np.random.default_rng(4)
    for _ in range(router.window.capacity // 8_000):
        data = rng.bytes(16 * 8_000)
        router.window.admit([data[place : place + 16] for place in range(0, len(data), 16)], 0)


def _work(router: Router, stop: threading.Event, profile: str | None) -> None:
    """What the router's own thread does, where a profiler can be put around it."""
    import cProfile

    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    while not stop.is_set():
        router.step(0.05)
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(profile or "")


def naive(report: Report, servers: str, seconds: float) -> None:
    """One record at a time, each waited for."""
    log = opened(servers)
    row = Trigger("device-00000000", '"area-000000"', 1, START_MS, 1, 3, 0, 1)
    log.append([NewRecord(topics.TRIGGERS, row.device_id, encode(row))])
    waits: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        at = time.perf_counter()
        row.sequence += 1
        log.append([NewRecord(topics.TRIGGERS, row.device_id, encode(row))])
        waits.append((time.perf_counter() - at) * 1e3)
    wall = time.perf_counter() - began
    report.row("naive: one at a time", len(waits) / wall, "triggers/s")
    report.row("naive: p99", float(np.percentile(waits, 99)), "ms")
    report.row("naive: CPU of this process", (time.process_time() - cpu) / len(waits) * 1e6, "µs/trigger")
    remove(log)


def remove(log: KafkaEventLog) -> None:
    remove_topics(log.options.servers, log.options.topic_prefix)
    log.close()


if __name__ == "__main__":
    main()
