from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from geo_assets.events.dead_letter import DeadLetter
from geo_assets.flow.bounds import Bounds, Shed
from geo_assets.flow.dedup import DedupWindow
from geo_assets.flow.epochs import mark
from geo_assets.flow.reading import TriggerReader
from geo_assets.geofence.replay import Replay
from geo_assets.geofence.tracker import Tracker
from geo_assets.geofence.triggers import ENTER, EXIT, Trigger, decode, encode, key
from geo_assets.services.router import Router, RouterClosed, RouterOptions
from geo_assets.services.trigger_tail import Replaced, current_epoch, take_epoch
from geo_assets_tests.geofence.world import Walk, box, columns, fences
from geo_assets_tests.resources.contract_event_log import read_all
from geo_assets_tests.resources.kafka_harness import own_topics
from geo_assets_tests.waiting import patient, until
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.protocol import EventLog, LogError, LogUnavailable, NewRecord, TopicSpec
from resources.event_log.sqlite import SqliteEventLog
from resources.ledger.sqlite import SqliteLedger

TOPIC = "triggers"
START_MS = 1_777_636_800_000


def trigger(device: str, sequence: int, *, source: int = 0, fence: str = '"depot"') -> Trigger:
    state = ENTER if sequence % 2 else EXIT
    return Trigger(device, fence, state, START_MS + sequence, sequence, 3, source % 2, source)


def of(devices: Sequence[str], sequences: Sequence[int]) -> list[Trigger]:
    return [trigger(device, sequence, source=sequence) for sequence in sequences for device in devices]


def told(log: EventLog) -> list[Trigger]:
    """What a consumer of the topic sees, every repetition included."""
    return TriggerReader().read((r.partition, r.value or b"") for r in read_all(log, TOPIC))


def by_device(triggers: list[Trigger]) -> dict[str, list[int]]:
    """The sequences of each device, repetitions dropped by key as docs/triggers.md says."""
    seen: set[bytes] = set()
    found: dict[str, list[int]] = defaultdict(list)
    for one in triggers:
        if key(one) not in seen:
            seen.add(key(one))
            found[one.device_id].append(one.sequence)
    return dict(found)


class Gate:
    """A log whose broker can be made unreachable: what a publisher sends then stays under way, as with a real one."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.reachable = True
        self.fails = False
        self.sends = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def publisher(self, topic: str, *, epoch: int | None = None) -> Any:
        if self.fails:
            raise LogUnavailable("unreachable")
        return _GatedPublisher(self, self._log.publisher(topic, epoch=epoch))


class _GatedPublisher:
    """Holds back what is sent while the gate is shut; hands it on, in order, when it is open again."""

    def __init__(self, gate: Gate, inner: Any) -> None:
        self._gate, self._inner = gate, inner
        self._kept: list[Any] = []
        self.broken: LogError | None = None
        self.max_record_bytes = inner.max_record_bytes

    @property
    def under_way(self) -> int:
        return self._inner.under_way + sum(len(each[0]) for each in self._kept)

    def send(self, keys: Any, values: Any, done: Any, *, partition: int | None = None) -> None:
        if self.broken is not None:
            raise self.broken
        self._gate.sends += 1
        self._kept.append((keys, values, done, partition))
        self.serve()

    def serve(self, timeout_s: float = 0.0) -> None:
        if self._gate.fails and self.broken is None:
            self.broken = LogUnavailable("unreachable")
        if self.broken is not None:
            kept, self._kept = self._kept, []
            for keys, _, done, _ in kept:
                done(dict.fromkeys(range(len(keys)), self.broken), ())
        elif self._gate.reachable:
            kept, self._kept = self._kept, []
            for keys, values, done, partition in kept:
                self._inner.send(keys, values, done, partition=partition)
        self._inner.serve(0.0 if self._kept else timeout_s)
        if self._kept:
            time.sleep(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        return self._inner.flush(timeout_s)

    def close(self) -> None:
        self.broken = self.broken or LogUnavailable("closed")
        self.serve()
        self._inner.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteEventLog]:
    log = SqliteEventLog(tmp_path / "log.db")
    log.ensure_topics([TopicSpec(TOPIC, partitions=4)])
    yield log
    log.close()


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.service("kafka"))])
def either_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    if request.param == "embedded":
        log: EventLog = SqliteEventLog(tmp_path / "log.db")
        log.ensure_topics([TopicSpec(TOPIC, partitions=4, max_record_bytes=2_000)])
        yield log
        log.close()
        return
    with own_topics() as options:
        log = KafkaEventLog(options)
        log.ensure_topics([TopicSpec(TOPIC, partitions=4, max_record_bytes=2_000)])
        yield log
        log.close()


class Letters(list[DeadLetter]):
    def write(self, letters: Sequence[DeadLetter]) -> None:
        self.extend(letters)


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture
def routers() -> Iterator[list[Router]]:
    """Closed at the end, whatever the test did."""
    made: list[Router] = []
    yield made
    for router in made:
        router.close(1.0)


@pytest.fixture
def start(letters: Letters, routers: list[Router]) -> Callable[..., Router]:
    epochs = itertools.count(1)

    def started(log: Any, *, thread: bool = True, epoch: int = 0, **changes: Any) -> Router:
        options = RouterOptions(**({"slow_publish_s": 2.0, "open_s": 0.3} | changes))
        router = Router(log, epoch or next(epochs), options, dead_letters=letters.write)
        router.start(thread=thread)
        routers.append(router)
        return router

    return started


# Both logs


def test_triggers_of_all_callers_arrive_once_and_in_order_per_device(
    either_log: EventLog, start: Callable[..., Router]
) -> None:
    router = start(either_log)
    devices = [f"device-{n}" for n in range(40)]

    def caller(mine: list[str]) -> None:
        for sequence in range(1, 51):
            router.submit(of(mine, [sequence]))

    threads = [threading.Thread(target=caller, args=(devices[n::4],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for sequence in range(1, 51):
        router.route(of(devices[3::4], [sequence]))
    for thread in threads:
        thread.join()
    assert router.settle(patient(30))
    until(lambda: router.held == 0)
    found = told(either_log)
    assert len(found) == 2_000
    assert by_device(found) == {device: list(range(1, 51)) for device in devices}
    assert router.counts["routed"] == 2_000
    assert all(one.epoch == 1 and one.emitted_ns > 0 for one in found)
    for record in read_all(either_log, TOPIC):
        assert record.key == (decode(record.value or b"").device_id if record.key else None)


def test_what_was_told_already_is_not_told_again_by_the_next_run(
    either_log: EventLog, start: Callable[..., Router]
) -> None:
    first = start(either_log)
    first.route(of(["a", "b", "c"], range(1, 101)))
    assert first.settle(patient(30))
    assert first.close()

    second = Router(either_log, 7, RouterOptions(slow_publish_s=2.0), dead_letters=lambda _: None)
    tail = second.start(thread=False)
    assert tail.triggers == 300
    assert tail.horizon == {0: 100, 1: 99}
    second.route(of(["a", "b", "c"], range(51, 131)))
    assert second.settle(patient(30))
    assert second.counts["deduped"] == 150
    assert second.close()
    assert len(told(either_log)) == 390
    assert by_device(told(either_log)) == {device: list(range(1, 131)) for device in "abc"}


def test_a_run_that_stands_by_reads_ahead_and_misses_nothing_told_meanwhile(
    either_log: EventLog, start: Callable[..., Router]
) -> None:
    first = start(either_log, epoch=1)
    first.route(of(["a", "b"], range(1, 101)))
    assert first.settle(patient(30))
    second = Router(either_log, 2, RouterOptions(slow_publish_s=2.0), dead_letters=lambda _: None)
    assert second.read_ahead().triggers == 200
    first.route(of(["a", "b"], range(101, 151)))
    assert first.settle(patient(30))
    assert second.read_ahead().triggers == 300
    first.route(of(["a", "b"], range(151, 161)))
    assert first.settle(patient(30))
    tail = second.start(thread=False)
    assert (tail.triggers, tail.void, tail.horizon) == (320, 0, {0: 160, 1: 159})
    goes_on(first, of(["a", "b"], range(161, 171)), refused=isinstance(either_log, SqliteEventLog))
    second.route(of(["a", "b"], range(1, 181)))
    assert second.settle(patient(30))
    assert second.counts["deduped"] == 320
    second.close()
    assert by_device(told(either_log)) == {device: list(range(1, 181)) for device in "ab"}


def goes_on(replaced: Router, rows: list[Trigger], *, refused: bool) -> None:
    """Paused while another took over, it goes on as if nothing had happened."""
    replaced.route(rows)
    if not refused:
        assert replaced.settle(patient(30))
        return
    with pytest.raises(RouterClosed) as raised:
        replaced.settle(patient(30))
    assert isinstance(raised.value.__cause__, Replaced)


def test_a_run_that_was_replaced_writes_nothing_that_counts(either_log: EventLog, start: Callable[..., Router]) -> None:
    old = start(either_log, epoch=1)
    old.route(of(["a"], range(1, 11)))
    assert old.settle(patient(30))
    new = start(either_log, epoch=2)
    refused = isinstance(either_log, SqliteEventLog)
    goes_on(old, of(["a"], range(11, 21)), refused=refused)
    new.route(of(["a"], range(11, 16)))
    assert new.settle(patient(30))
    assert [(one.sequence, one.epoch) for one in told(either_log)] == [(n, 1) for n in range(1, 11)] + [
        (n, 2) for n in range(11, 16)
    ]
    # A third run looks at the tail: what is void there was told by nobody.
    third = Router(either_log, 3, RouterOptions(slow_publish_s=2.0), dead_letters=lambda _: None)
    tail = third.start(thread=False)
    assert (tail.triggers, tail.void, tail.highest_epoch) == ((15, 0, 3) if refused else (25, 10, 3))
    assert max(tail.horizon.values()) == (15 if refused else 20)
    third.route(of(["a"], range(1, 21)))
    assert third.settle(patient(30))
    assert third.counts["deduped"] == 15
    third.close()
    assert by_device(told(either_log)) == {"a": list(range(1, 21))}


def test_poison_becomes_a_dead_letter_at_once_and_costs_no_other(
    either_log: EventLog, start: Callable[..., Router], letters: Letters
) -> None:
    router = start(either_log)
    rows = of(["a", "b"], range(1, 6))
    rows[2:2] = [
        trigger("\ud800", 1),
        trigger("a", 1, fence='"' + "x" * 5_000 + '"'),
        trigger("a", 1 << 70),
        trigger(17, 1),  # type: ignore[arg-type]
    ]
    receipt = router.submit(rows)
    assert router.wait(receipt, patient(30))
    assert by_device(told(either_log)) == {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 5]}
    assert sorted(letter.reason for letter in letters) == ["schema", "schema", "schema", "too_large"]
    assert {letter.stage for letter in letters} == {"route"}
    assert router.counts["dlq"] == 4
    assert router.held == 0
    assert router.breaker.closed


def test_pulled_poison_holds_a_snapshot_back_until_its_letter_is_durable(
    log: SqliteEventLog, routers: list[Router]
) -> None:
    open_ = threading.Event()

    def write(letters: Sequence[DeadLetter]) -> None:
        if not open_.is_set():
            raise LogUnavailable("not now")

    router = Router(log, 1, RouterOptions(slow_publish_s=2.0), dead_letters=write)
    router.start()
    routers.append(router)
    router.route([trigger("\ud800", 1), trigger("a", 1)])
    assert not router.settle(0.5)
    assert router.in_flight == 1
    open_.set()
    assert router.settle(patient(30))


# Bounds


def test_a_burst_over_capacity_pauses_pulling_sheds_outside_callers_and_holds_no_more_than_it_may(
    log: SqliteEventLog, start: Callable[..., Router]
) -> None:
    gate = Gate(log)
    router = start(gate, bounds=Bounds(1_000), slow_publish_s=30.0)
    gate.reachable = False
    sequences = itertools.count(1)
    while router.ready():
        router.route(of(["pulled"], [next(sequences) for _ in range(50)]))
    assert router.held == 700
    outside = itertools.count(1)
    taken = 0
    with pytest.raises(Shed, match="900"):
        while True:
            router.submit(of(["outside"], [next(outside) for _ in range(30)]))
            taken += 30
    assert taken == 180
    assert router.held == 880
    for _ in range(100):
        with pytest.raises(Shed):
            router.submit(of(["outside"], range(1_000, 1_030)))
    assert router.held == 880
    assert router.counts["shed"] == 101 * 30
    assert not router.ready(0.1)
    gate.reachable = True
    assert router.ready(10)
    assert router.held < 500
    assert router.settle(patient(30))
    until(lambda: router.held == 0)
    assert by_device(told(log)) == {"pulled": list(range(1, 701)), "outside": list(range(1, 181))}


def test_route_refuses_what_was_pulled_without_asking(log: SqliteEventLog, start: Callable[..., Router]) -> None:
    gate = Gate(log)
    router = start(gate, bounds=Bounds(100), slow_publish_s=30.0)
    gate.reachable = False
    router.route(of(["a"], range(1, 101)))
    with pytest.raises(Shed):
        router.route(of(["a"], [101]))
    gate.reachable = True
    assert router.settle(patient(30))


# The broker away


def test_rule_1_while_the_broker_is_away_outside_callers_divert_within_the_threshold_and_nothing_blocks(
    log: SqliteEventLog, start: Callable[..., Router], tmp_path: Path
) -> None:
    gate = Gate(log)
    router = start(gate, spool_folder=tmp_path / "spool", slow_publish_s=0.025, open_s=0.5)
    devices = [f"device-{n}" for n in range(10)]
    assert router.wait(router.submit(of(devices, range(1, 11))), patient(30))
    until(lambda: router.breaker.closed)

    gate.reachable = False
    began = time.monotonic()
    longest, receipts, sequence = 0.0, [], 10
    while router.breaker.closed:
        sequence += 1
        before = time.monotonic()
        receipts.append(router.submit(of(devices, [sequence])))
        longest = max(longest, time.monotonic() - before)
        time.sleep(0.01)
        assert time.monotonic() - began < patient(30)
    opened = time.monotonic() - began
    # 20 failures of 25 ms each; the rest is a busy machine's.
    assert 0.45 < opened < patient(10)
    for _ in range(20):
        sequence += 1
        before = time.monotonic()
        receipts.append(router.submit(of(devices, [sequence])))
        longest = max(longest, time.monotonic() - before)
    # Nothing is acknowledged all the while: who waited for it would wait for ever.
    assert longest < patient(5)
    assert all(router.wait(receipt, patient(30)) for receipt in receipts)
    assert router.counts["spooled"] == (sequence - 10) * 10
    assert not router.ready(0.1)

    # Probes while it is away: one at a time, and none sends anything but a mark.
    time.sleep(1.2)
    assert len(told(log)) == 100
    gate.reachable = True
    until(lambda: router.breaker.closed)
    # The four of the start, and one probe.
    assert sum(record.key is None for record in read_all(log, TOPIC)) == 5
    receipt = router.submit(of(devices, [sequence + 1]))
    assert router.wait(receipt, patient(30))
    until(lambda: router.spool is not None and not router.spool.waiting and router.held == 0)
    found = told(log)
    assert by_device(found) == {device: list(range(1, sequence + 2)) for device in devices}
    # What was under way all the time arrived after all, and was not sent again out of the spool.
    assert len(found) == (sequence + 1) * 10


def test_a_delivery_that_failed_goes_again_under_its_key_and_before_what_came_later(
    log: SqliteEventLog, start: Callable[..., Router], tmp_path: Path
) -> None:
    gate = Gate(log)
    router = start(gate, spool_folder=tmp_path / "spool")
    gate.reachable = False
    router.route(of(["pulled"], range(1, 51)))
    receipt = router.submit(of(["outside"], range(1, 51)))
    until(lambda: gate.sends >= 2)
    gate.fails = True
    until(lambda: not router.breaker.closed)
    router.route(of(["pulled"], range(51, 101)))
    later = router.submit(of(["outside"], range(51, 101)))
    assert router.wait(receipt, patient(30))
    assert router.wait(later, patient(30))
    gate.fails, gate.reachable = False, True
    assert router.settle(patient(30))
    until(lambda: router.spool is not None and not router.spool.waiting)
    found = told(log)
    assert by_device(found) == {"pulled": list(range(1, 101)), "outside": list(range(1, 101))}
    assert len(found) == 200
    assert router.counts["again"] >= 50


def test_a_device_with_spooled_triggers_is_parked_and_others_are_not(
    log: SqliteEventLog, start: Callable[..., Router], tmp_path: Path
) -> None:
    gate = Gate(log)
    router = start(gate, thread=False, spool_folder=tmp_path / "spool", batch=10)
    gate.fails = True
    router.submit(of(["parked"], range(1, 101)))
    until(lambda: (router.step(0.0), router.spool is not None and router.spool.waiting == 100)[1])
    gate.fails = False
    until(lambda: (router.step(0.0), router.breaker.closed)[1])
    assert router.spool is not None
    assert router.spool.waiting > 0
    router.submit(of(["parked", "free"], [101]))
    until(lambda: (router.step(0.0), any(one.device_id == "free" for one in told(log)))[1])
    assert 101 not in by_device(told(log)).get("parked", [])
    until(lambda: (router.step(0.0), router.spool is not None and not router.spool.waiting)[1])
    assert router.spool.parked == 0
    assert by_device(told(log)) == {"parked": list(range(1, 102)), "free": [101]}
    router.submit(of(["parked"], [102]))
    until(lambda: (router.step(0.0), router.held == 0)[1])
    assert router.counts["spooled"] == 101


def test_rule_2_a_spool_left_by_a_dead_process_drains_in_order_under_the_new_epoch_and_tells_nothing_twice(
    log: SqliteEventLog, start: Callable[..., Router], tmp_path: Path
) -> None:
    gate = Gate(log)
    router = start(gate, epoch=1, spool_folder=tmp_path / "spool")
    assert router.wait(router.submit(of(["a"], range(1, 11))), patient(30))
    gate.fails = True
    assert router.wait(router.submit(of(["a", "b"], range(11, 21))), patient(30))
    assert router.close(1)
    # Some of it had arrived, and the acknowledgement had not.
    log.append([NewRecord(TOPIC, "a", encode(t)) for t in of(["a"], range(11, 14)) if not setattr(t, "epoch", 1)])

    router = start(log, epoch=2, spool_folder=tmp_path / "spool")
    receipt = router.submit(of(["a", "b"], range(19, 31)))
    assert router.wait(receipt, patient(30))
    until(lambda: router.spool is not None and not router.spool.waiting and router.held == 0)
    found = told(log)
    assert by_device(found) == {"a": list(range(1, 31)), "b": list(range(11, 31))}
    assert len(found) == 50
    assert router.counts["deduped"] == 4


def test_without_a_spool_outside_callers_wait_in_memory_and_are_shed_when_it_is_full(
    log: SqliteEventLog, start: Callable[..., Router]
) -> None:
    gate = Gate(log)
    router = start(gate, bounds=Bounds(100))
    gate.fails = True
    router.submit(of(["a"], range(1, 51)))
    until(lambda: not router.breaker.closed)
    router.submit(of(["a"], range(51, 91)))
    with pytest.raises(Shed):
        router.submit(of(["a"], [91]))
    gate.fails = False
    until(lambda: router.held == 0)
    assert by_device(told(log)) == {"a": list(range(1, 91))}


def test_a_full_spool_keeps_the_rest_in_memory_in_order(
    log: SqliteEventLog, start: Callable[..., Router], tmp_path: Path
) -> None:
    gate = Gate(log)
    router = start(gate, spool_folder=tmp_path / "spool", spool_bytes=10_000)
    gate.fails = True
    router.submit(of(["a"], [1]))
    until(lambda: not router.breaker.closed)
    for sequence in range(2, 201):
        router.submit(of(["a"], [sequence]))
    until(lambda: router.spool is not None and router.spool.waiting > 50)
    time.sleep(0.3)
    assert router.spool is not None
    assert router.spool.waiting < 200
    gate.fails = False
    until(lambda: router.held == 0 and not router.spool.waiting)  # type: ignore[union-attr]
    assert by_device(told(log)) == {"a": list(range(1, 201))}


def test_a_stage_in_breach_for_three_intervals_stops_pulling_until_the_breaker_of_the_next_closes(
    log: SqliteEventLog, start: Callable[..., Router]
) -> None:
    router = start(log, interval_s=0.05, open_s=1.0, least_a_s=1)
    sequences = itertools.count(1)

    def opens() -> bool:
        # Handed over 20 ms after they were made, again and again.
        router.route(of(["a"], [next(sequences)]), emitted=time.perf_counter_ns() - 20_000_000)
        return router.dedup_breaker.state == "open"

    until(opens, why="the breaker opens", every=0.01)
    assert not router.ready()
    assert router.ready(patient(30))
    assert router.settle(patient(30))
    assert by_device(told(log))["a"] == list(range(1, next(sequences)))


# Around it


def test_it_says_in_prometheus_what_it_counts_and_how_long_each_stage_took(
    log: SqliteEventLog, start: Callable[..., Router]
) -> None:
    from prometheus_client import generate_latest

    router = start(log)
    assert router.wait(router.submit(of(["secret-device"], range(1, 101)) * 2), patient(30))
    text = generate_latest(router.metrics.registry).decode()
    assert "geofence_router_routed_total 100.0" in text
    assert "geofence_router_deduped_total 100.0" in text
    for stage in ("emit", "dedup", "publish", "end_to_end"):
        count = 200.0 if stage in ("emit", "dedup") else 100.0
        assert f'geofence_router_stage_seconds_count{{stage="{stage}"}} {count}' in text
    for name in ("shed", "dlq", "spooled"):
        assert f"geofence_router_{name}_total 0.0" in text
    assert 'geofence_router_breaker{stage="publish"} 0.0' in text
    assert "secret" not in text


def test_epochs_rise_by_compare_and_set(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db")
    assert current_epoch(ledger) == 0
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.append(take_epoch(ledger))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [1, 2, 3, 4, 5, 6]
    assert current_epoch(ledger) == 6
    ledger.close()


def test_a_foreign_record_on_the_topic_is_passed_over_at_the_start(
    log: SqliteEventLog, start: Callable[..., Router]
) -> None:
    log.append([NewRecord(TOPIC, "x", b"\x07?"), NewRecord(TOPIC, "x", None), NewRecord(TOPIC, None, mark(9))])
    router = start(log, epoch=10)
    assert router.wait(router.submit(of(["a"], [1])), patient(30))


def test_a_closed_router_says_so(log: SqliteEventLog, start: Callable[..., Router]) -> None:
    router = start(log)
    router.route(of(["a"], range(1, 101)))
    assert router.close()
    assert by_device(told(log)) == {"a": list(range(1, 101))}
    for hand_over in (router.submit, router.route):
        with pytest.raises(RouterClosed):
            functools.partial(hand_over, of(["a"], [101]))()


# With the tracker


def test_rule_2_routing_that_dies_at_any_step_tells_the_same_triggers_as_one_that_never_does(
    either_log: EventLog,
) -> None:
    rng = random.Random(5)
    walk, records = Walk(), list[Any]()
    for second in range(60):
        for device in range(20):
            records.append(walk.at(f"bus-{device}", second * 30, rng.choice([-5e-4, 5e-4, 15e-4]), 5e-4))
    city = fences(box('"west"', -1e-3, 0, 0, 1e-3, dwell_ms=45_000), box('"east"', 0, 0, 1e-3, 1e-3))
    batches = [columns(records[start : start + 37]) for start in range(0, len(records), 37)]
    alone = Tracker(city)
    expected = [one for batch in batches for one in alone.feed(batch).rows()]
    assert len(expected) > 500

    snapshot, epoch, finished = Tracker(city).snapshot(), 0, False
    deaths = 0
    while not finished:
        epoch += 1
        router = Router(either_log, epoch, RouterOptions(slow_publish_s=2.0), dead_letters=lambda _: None)
        replay = Replay(router.start(thread=False).horizon)
        tracker, adopted = Tracker.restore(snapshot, {1: city})
        router.route(adopted)
        for batch in batches:
            if int(batch.offset[-1]) < tracker.offsets.get(0, 0):
                continue
            assert router.ready(10)
            router.route(tracker.feed(batch))
            for _ in range(rng.randrange(3)):
                router.step(0.0)
            if rng.random() < 0.1 and deaths < 8:
                # What it sent may arrive or not; nobody hears of it.
                deaths += 1
                break
            if rng.random() < 0.3 and router.settle(patient(30)) and replay.may_snapshot(in_flight=router.in_flight):
                snapshot = tracker.snapshot()
        else:
            assert router.settle(patient(30))
            finished = True
        router.close(0.0)
    assert deaths >= 3

    found: dict[str, list[bytes]] = defaultdict(list)
    values = ((r.partition, r.value or b"") for r in read_all(either_log, TOPIC))
    for one in TriggerReader(DedupWindow(10_000)).read(values):
        found[one.device_id].append(key(one))
    wanted: dict[str, list[bytes]] = defaultdict(list)
    for one in expected:
        wanted[one.device_id].append(key(one))
    assert found == wanted
