"""What every event log must do, adapter by adapter: subclass `EventLogContract` and give it a `harness` fixture."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from geo_assets_tests.resources.log_processes import (
    after,
    append_batches_until_killed,
    append_in_another_process,
    consume_in_another_process,
    hold_partitions_until_killed,
)
from geo_assets_tests.waiting import patient, until
from resources.event_log.protocol import (
    Consumer,
    EventLog,
    Extent,
    Follower,
    InvalidRecord,
    LogError,
    NewRecord,
    OffsetOutOfRange,
    Position,
    Publisher,
    Record,
    RecordTooLarge,
    StaleEpoch,
    TopicSpec,
    UnknownPartition,
    UnknownTopic,
)

spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class LogHarness:
    """How the suite gets at an adapter. `open` is pickled, so that other processes open the same log."""

    open: Callable[[], EventLog]
    delete_topic: Callable[[EventLog, str], None]
    session_s: float
    """The session timeout of the consumers it opens."""
    expire: Callable[[EventLog, str], None]
    """Have retention take all that a topic holds."""
    open_hasty: Callable[[], EventLog]
    """One whose members count as stuck when they have not polled for as long as a session."""
    deletes_by_itself: bool = False
    """A broker that enforces retention on its own schedule."""
    appends_whole_batches: bool = True
    """All records of an append or none, even when its process is killed; a broker acknowledges each by itself."""
    checks_epochs: bool = True
    """An append of a lower epoch than a partition has seen is refused; a broker takes it, and readers pass it over."""


def drain(consumer: Consumer, count: int, *, seconds: float = 60.0) -> list[Record]:
    found: list[Record] = []
    deadline = time.monotonic() + patient(seconds)
    while len(found) < count and time.monotonic() < deadline:
        found += consumer.poll(timeout_s=0.2)
    return found


def offsets_of(records: Iterable[Record]) -> dict[int, list[int]]:
    """Partition -> offsets in the order in which they came."""
    found: dict[int, list[int]] = {}
    for record in records:
        found.setdefault(record.partition, []).append(record.offset)
    return found


def followed(follower: Follower, count: int, *, seconds: float = 60.0) -> list[Record]:
    found: list[Record] = []
    deadline = time.monotonic() + patient(seconds)
    while len(found) < count and time.monotonic() < deadline:
        some = follower.take(count - len(found), 0.2)
        found += [some.record(place) for place in range(len(some))]
    return found


def read_all(log: EventLog, topic: str) -> list[Record]:
    found: list[Record] = []
    for partition, extent in log.extents(topic).items():
        offset = extent.begin
        while records := log.read(topic, partition, offset):
            found += records
            offset = records[-1].offset + 1
    return found


class EventLogContract:
    """The promises of resources/event_log/protocol.py, one test each."""

    @pytest.fixture
    def harness(self) -> LogHarness:
        raise AssertionError("a subclass names its adapter")

    @pytest.fixture
    def log(self, harness: LogHarness) -> Iterator[EventLog]:
        log = harness.open()
        yield log
        log.close()

    @pytest.fixture
    def topic(self, log: EventLog) -> str:
        name = f"topic-{uuid.uuid4().hex[:8]}"
        log.ensure_topics([TopicSpec(name, partitions=4)])
        return name

    def test_it_is_an_event_log(self, log: EventLog, topic: str) -> None:
        assert isinstance(log, EventLog)
        consumer = log.consumer("g", [topic])
        assert isinstance(consumer, Consumer)
        consumer.close()

    # Topics

    def test_a_declared_topic_is_listed_as_declared(self, log: EventLog) -> None:
        spec = TopicSpec(
            f"declared-{uuid.uuid4().hex[:8]}", partitions=3, retention_ms=3_600_000, max_record_bytes=5_000
        )
        log.ensure_topics([spec])
        assert log.topics()[spec.name] == spec

    def test_declaring_again_grows_partitions_and_never_takes_one(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, "k", b"kept")])
        log.ensure_topics([TopicSpec(topic, partitions=6, retention_ms=60_000)])
        assert (log.topics()[topic].partitions, log.topics()[topic].retention_ms) == (6, 60_000)
        log.ensure_topics([TopicSpec(topic, partitions=2, retention_ms=60_000)])
        assert log.topics()[topic].partitions == 6
        assert [r.value for r in read_all(log, topic)] == [b"kept"]

    def test_another_process_or_client_sees_a_new_topic_at_once(self, harness: LogHarness, log: EventLog) -> None:
        other = harness.open()
        name = f"late-{uuid.uuid4().hex[:8]}"
        with pytest.raises(UnknownTopic):
            other.append([NewRecord(name, None, b"")])
        log.ensure_topics([TopicSpec(name)])
        other.append([NewRecord(name, None, b"now")])
        assert [r.value for r in read_all(log, name)] == [b"now"]
        other.close()

    def test_an_unknown_topic_is_named_by_every_call(self, log: EventLog) -> None:
        calls: list[Callable[[], object]] = [
            lambda: log.append([NewRecord("nobody", "k", b"")]),
            lambda: log.read("nobody", 0, 0),
            lambda: log.extents("nobody"),
            lambda: log.topic_id("nobody"),
            lambda: log.commit("g", "nobody", {0: 1}),
            lambda: log.consumer("g", ["nobody"]),
        ]
        for call in calls:
            with pytest.raises(UnknownTopic, match="nobody"):
                call()

    def test_a_deleted_and_created_topic_has_another_id_and_starts_empty(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, "k", b"old")])
        log.commit("g", topic, {0: 1})
        identity = log.topic_id(topic)
        assert log.topic_id(topic) == identity
        harness.delete_topic(log, topic)
        with pytest.raises(UnknownTopic):
            log.topic_id(topic)
        log.ensure_topics([TopicSpec(topic)])
        assert log.topic_id(topic) != identity
        assert set(log.extents(topic).values()) == {Extent(0, 0)}
        assert log.committed("g", topic) == {}

    # Append

    def test_a_record_comes_back_as_it_was_given(self, log: EventLog, topic: str) -> None:
        headers = {"event-id": "e1", "naïve ü 漢字 🗺": 'quote " and \\ and \n', "empty": ""}
        given = [
            NewRecord(topic, "key ü 漢字 🗺", bytes(range(256)), headers, timestamp_ms=1_700_000_000_123),
            NewRecord(topic, "", b""),
            NewRecord(topic, "gone", None),
            NewRecord(topic, None, b"no key"),
        ]
        positions = log.append(given)
        for record, position in zip(given, positions, strict=True):
            (found,) = log.read(topic, position.partition, position.offset, max_records=1)
            assert (found.topic, found.partition, found.offset) == (topic, *position)
            assert (found.key, found.value, dict(found.headers)) == (record.key, record.value, dict(record.headers))
        assert log.read(topic, *positions[0])[0].timestamp_ms == 1_700_000_000_123

    def test_a_record_without_a_timestamp_is_stamped_when_it_is_appended(self, log: EventLog, topic: str) -> None:
        before = time.time() * 1000
        (position,) = log.append([NewRecord(topic, "k", b"")])
        assert before - 1_000 <= log.read(topic, *position)[0].timestamp_ms <= time.time() * 1000 + 1_000

    def test_nothing_to_append_is_no_error(self, log: EventLog) -> None:
        assert log.append([]) == []

    def test_records_of_one_key_stand_in_one_partition_in_the_order_given(self, log: EventLog, topic: str) -> None:
        for start in range(0, 60, 20):
            log.append([NewRecord(topic, f"k{n % 5}", str(n).encode()) for n in range(start, start + 20)])
        records = read_all(log, topic)
        assert len(records) == 60
        for key in {r.key for r in records}:
            of_key = [r for r in records if r.key == key]
            assert len({r.partition for r in of_key}) == 1
            values = [int(r.value or b"") for r in of_key]
            assert values == sorted(values)

    @pytest.mark.parametrize(("key", "partition"), [("21", 0), ("foobar", 2), ("a-little-bit-long-string", 0)])
    def test_a_key_lands_where_every_kafka_client_puts_it(
        self, log: EventLog, topic: str, key: str, partition: int
    ) -> None:
        # Java: (Utils.murmur2(key) & 0x7fffffff) % 4, of -973932308, -790332482 and -985981536.
        assert log.append([NewRecord(topic, key, b"")])[0].partition == partition

    def test_records_without_a_key_are_spread(self, log: EventLog, topic: str) -> None:
        positions = [log.append([NewRecord(topic, None, b"")])[0] for _ in range(60)]
        assert len({p.partition for p in positions}) == 4

    def test_a_record_may_name_its_partition(self, log: EventLog, topic: str) -> None:
        assert [p.partition for p in log.append([NewRecord(topic, "k", b"", partition=n) for n in (3, 0, 2)])] == [
            3,
            0,
            2,
        ]

    def test_one_unknown_partition_or_topic_leaves_nothing_of_the_batch(self, log: EventLog, topic: str) -> None:
        good = NewRecord(topic, "k", b"")
        for bad, error in (
            (NewRecord(topic, "k", b"", partition=4), UnknownPartition),
            (NewRecord(topic, "k", b"", partition=-1), UnknownPartition),
            (NewRecord("nobody", "k", b""), UnknownTopic),
        ):
            with pytest.raises(error):
                log.append([good, bad])
        assert read_all(log, topic) == []

    def test_a_record_over_the_limit_is_refused_with_both_numbers_and_nothing_is_appended(self, log: EventLog) -> None:
        name = f"small-{uuid.uuid4().hex[:8]}"
        log.ensure_topics([TopicSpec(name, max_record_bytes=2_000)])
        log.append([NewRecord(name, "k", b"x" * 1_900)])
        with pytest.raises(RecordTooLarge, match=r"2[,_]?\d{3}.*2[,_]?000"):
            log.append([NewRecord(name, "k", b"fits"), NewRecord(name, "k", b"x" * 2_100)])
        with pytest.raises(RecordTooLarge):
            log.append([NewRecord(name, "k", b"", headers={"h": "x" * 2_100})])
        assert len(read_all(log, name)) == 1

    @pytest.mark.parametrize(
        "bad",
        [
            NewRecord("", "\ud800", b""),
            NewRecord("", "k", b"", headers={"h": "\udfff"}),
            NewRecord("", "k", b"", headers={"\ud800": ""}),
            NewRecord("", "k", b"", timestamp_ms=1 << 63),
        ],
        ids=["key", "header", "header name", "timestamp"],
    )
    def test_what_no_log_can_hold_is_an_invalid_record_and_costs_no_other_caller(
        self, log: EventLog, topic: str, bad: NewRecord
    ) -> None:
        with pytest.raises(InvalidRecord):
            log.append(
                [NewRecord(topic, "k", b""), NewRecord(topic, bad.key, bad.value, bad.headers, bad.timestamp_ms)]
            )
        assert read_all(log, topic) == []

    def test_offsets_are_dense_under_many_threads_and_each_caller_gets_its_own(self, log: EventLog, topic: str) -> None:
        given: dict[Position, bytes] = {}
        lock = threading.Lock()

        def work(name: int) -> None:
            for n in range(30):
                records = [NewRecord(topic, f"{name}", f"{name} {n} {i}".encode()) for i in range(1 + n % 3)]
                positions = log.append(records)
                with lock:
                    given.update(zip(positions, (r.value or b"" for r in records), strict=True))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = {Position(r.partition, r.offset): r.value for r in read_all(log, topic)}
        assert found == given
        for partition, extent in log.extents(topic).items():
            assert sorted(o for p, o in found if p == partition) == list(range(extent.begin, extent.end))

    def test_one_caller_s_fault_is_not_another_s(self, log: EventLog, topic: str) -> None:
        outcomes: list[str] = []

        def work(name: int) -> None:
            for n in range(20):
                try:
                    log.append([NewRecord(topic if (name + n) % 2 else "nobody", "k", b"")])
                    outcomes.append("stored")
                except UnknownTopic:
                    outcomes.append("refused")

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (outcomes.count("stored"), outcomes.count("refused")) == (80, 80)
        assert len(read_all(log, topic)) == 80

    def test_processes_append_at_once_and_keep_the_order_of_each_key(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        processes = [
            spawn.Process(target=append_in_another_process, args=(harness.open, topic, f"p{n}", 60)) for n in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(patient(60))
            assert process.exitcode == 0
        records = read_all(log, topic)
        assert sorted(tuple(json.loads(r.value or b"")) for r in records) == [
            (f"p{p}", n) for p in range(3) for n in range(60)
        ]
        for key in {r.key for r in records}:
            numbers = [json.loads(r.value or b"")[1] for r in records if r.key == key]
            assert numbers == sorted(numbers)

    def test_rule_2_what_was_acknowledged_survives_kill_9_and_no_batch_is_half_there(
        self, harness: LogHarness, log: EventLog, topic: str, tmp_path: Any
    ) -> None:
        acknowledged = tmp_path / "acknowledged"
        for attempt in range(4):
            process = spawn.Process(
                target=append_batches_until_killed, args=(harness.open, topic, f"a{attempt}", str(acknowledged))
            )
            process.start()
            assert process.pid is not None
            until(
                lambda n=attempt: acknowledged.exists() and f"a{n} 3\n" in acknowledged.read_text(),
                why="the appender gets going",
            )
            time.sleep(0.02 * attempt + 0.013)
            os.kill(process.pid, signal.SIGKILL)
            process.join(patient(30))
        batches: dict[tuple[str, int], list[int]] = {}
        for record in read_all(log, topic):
            name, batch, n = json.loads(record.value or b"")
            batches.setdefault((name, batch), []).append(n)
        acked = {(name, int(batch)) for name, batch in (line.split() for line in acknowledged.read_text().splitlines())}
        assert len(acked) > 15
        assert acked <= batches.keys()
        whole = batches.keys() if harness.appends_whole_batches else acked
        assert all(sorted(batches[batch]) == list(range(7)) for batch in whole)
        for partition, extent in log.extents(topic).items():
            assert [r.offset for r in read_all(log, topic) if r.partition == partition] == list(range(*extent))

    # Read

    def test_a_read_is_bounded_by_records_and_by_bytes_and_gives_at_least_one(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, b"x" * 1_000, partition=1) for _ in range(20)])
        assert [r.offset for r in log.read(topic, 1, 5, max_records=3)] == [5, 6, 7]
        assert 1 <= len(log.read(topic, 1, 0, max_bytes=3_500)) <= 3
        assert [r.offset for r in log.read(topic, 1, 7, max_bytes=1)] == [7]

    def test_a_read_at_the_end_is_empty_and_does_not_wait(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, b"", partition=0)])
        began = time.monotonic()
        assert log.read(topic, 0, 1) == []
        assert log.read(topic, 1, 0) == []
        assert time.monotonic() - began < patient(5)

    @pytest.mark.parametrize("offset", [-1, 3, 1 << 40, 1 << 62])
    def test_an_offset_beyond_the_end_or_below_zero_is_out_of_range(
        self, log: EventLog, topic: str, offset: int
    ) -> None:
        log.append([NewRecord(topic, None, b"", partition=0) for _ in range(2)])
        with pytest.raises(OffsetOutOfRange) as raised:
            log.read(topic, 0, offset)
        assert (raised.value.begin, raised.value.end, raised.value.offset) == (0, 2, offset)

    def test_an_unknown_partition_is_no_empty_one(self, log: EventLog, topic: str) -> None:
        with pytest.raises(UnknownPartition):
            log.read(topic, 4, 0)

    def test_extents_name_every_partition(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, b"", partition=2) for _ in range(3)])
        assert log.extents(topic) == {0: Extent(0, 0), 1: Extent(0, 0), 2: Extent(0, 3), 3: Extent(0, 0)}

    # Following

    def test_a_follower_gives_everything_from_its_offsets_on_and_what_comes_later(
        self, log: EventLog, topic: str
    ) -> None:
        log.append(
            [NewRecord(topic, f"k{n}", str(n).encode(), {"n": str(n)}, 1_700_000_000_000 + n) for n in range(99)]
        )
        extents = log.extents(topic)
        begin = {partition: extent.end // 2 for partition, extent in extents.items()}
        follower = log.follow(topic, begin)
        assert isinstance(follower, Follower)
        assert follower.next_offsets == begin
        assert not follower.at_end
        wanted = [r for r in read_all(log, topic) if r.offset >= begin[r.partition]]
        assert sorted(followed(follower, len(wanted))) == sorted(wanted)
        until(lambda: not follower.take(10, 0.05) and follower.at_end)
        ends = {partition: extent.end for partition, extent in extents.items()}
        assert follower.next_offsets == follower.ends == ends
        log.append([NewRecord(topic, "k1", b"later")])
        (later,) = followed(follower, 1)
        assert later.value == b"later"
        until(lambda: not follower.take(10, 0.05) and follower.at_end)
        assert sum(follower.ends.values()) == 100
        follower.close()
        follower.close()
        with pytest.raises(LogError):
            follower.take(1)

    def test_a_slice_holds_partition_after_partition_and_no_more_than_was_asked_for(
        self, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, str(n).encode(), partition=n % 4) for n in range(400)])
        follower = log.follow(topic, dict.fromkeys(range(4), 0))
        ahead = dict.fromkeys(range(4), 0)
        deadline = time.monotonic() + patient(60)
        while sum(ahead.values()) < 400 and time.monotonic() < deadline:
            some = follower.take(70, 0.5)
            assert len(some) <= 70
            assert list(some.partitions) == sorted(some.partitions)
            for place in range(len(some)):
                partition, offset = some.partitions[place], some.offsets[place]
                assert offset == ahead[partition]
                assert some.values[place] == str(4 * offset + partition).encode()
                ahead[partition] += 1
        assert ahead == dict.fromkeys(range(4), 100)
        follower.close()

    def test_a_follower_does_not_wait_where_nothing_is_and_no_longer_than_it_may(
        self, log: EventLog, topic: str
    ) -> None:
        follower = log.follow(topic, {0: 0})
        began = time.monotonic()
        assert [len(follower.take(10)) for _ in range(20)] == [0] * 20
        assert time.monotonic() - began < patient(5)
        began = time.monotonic()
        timer = threading.Timer(0.3, lambda: log.append([NewRecord(topic, None, b"", partition=0)]))
        timer.start()
        until(lambda: follower.take(10, patient(30)))
        # Woken by the record, and not at the end of its wait.
        assert time.monotonic() - began < patient(20)
        follower.close()

    def test_a_follower_reads_the_partitions_it_was_given_and_one_more_from_where_it_is_told(
        self, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, str(n).encode(), partition=n % 2) for n in range(20)])
        follower = log.follow(topic, {0: 8})
        assert [r.offset for r in followed(follower, 2)] == [8, 9]
        follower.seek(1, 7)
        assert [(r.partition, r.offset) for r in followed(follower, 3)] == [(1, 7), (1, 8), (1, 9)]
        follower.seek(0, 5)
        assert [(r.partition, r.offset) for r in followed(follower, 5)] == [(0, n) for n in range(5, 10)]
        with pytest.raises(UnknownPartition):
            follower.seek(4, 0)
        with pytest.raises(UnknownPartition):
            log.follow(topic, {4: 0})
        with pytest.raises(UnknownTopic):
            log.follow("nobody", {0: 0})
        follower.close()

    def test_rule_1_a_follower_whose_next_record_retention_took_says_so_until_it_is_told_where_to_go_on(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, b"", partition=p) for p in (0, 0, 0, 0, 0, 1)])
        harness.expire(log, topic)
        log.append([NewRecord(topic, None, b"new", partition=0)])
        follower = log.follow(topic, {0: 2, 1: 1})
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange) as raised:
                until(lambda: follower.take(10, 0.5), why="it says what is gone")
            gone = raised.value
            assert (gone.partition, gone.offset, gone.begin, gone.end) == (0, 2, 5, 6)
        follower.seek(0, gone.begin)
        assert [r.value for r in followed(follower, 1)] == [b"new"]
        follower.seek(0, 50)
        with pytest.raises(OffsetOutOfRange) as raised:
            until(lambda: follower.take(10, 0.5), why="it says what is gone")
        assert (raised.value.offset, raised.value.end) == (50, 6)
        follower.close()

    def test_what_is_not_taken_waits(self, log: EventLog, topic: str) -> None:
        follower = log.follow(topic, dict.fromkeys(range(4), 0))
        for start in range(0, 3_000, 1_000):
            log.append([NewRecord(topic, None, b"x" * 1_000, partition=n % 4) for n in range(start, start + 1_000)])
        time.sleep(0.3)
        assert len(followed(follower, 3_000)) == 3_000
        follower.close()

    # Groups

    def test_a_group_has_committed_nothing_until_it_does(self, log: EventLog, topic: str) -> None:
        assert log.committed("g", topic) == {}
        log.commit("g", topic, {0: 3, 2: 5})
        log.commit("g", topic, {2: 4})
        log.commit("other", topic, {1: 1})
        assert log.committed("g", topic) == {0: 3, 2: 4}

    def test_a_consumer_starts_at_the_oldest_record(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, f"k{n}", str(n).encode()) for n in range(20)])
        consumer = log.consumer("g", [topic])
        assert sorted(int(r.value or b"") for r in drain(consumer, 20)) == list(range(20))
        assert consumer.poll(timeout_s=0) == []
        consumer.close()

    def test_from_the_end_a_consumer_gets_what_is_appended_after_it_joined(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, f"k{n}", b"old") for n in range(20)])
        consumer = log.consumer("g", [topic], from_end=True)
        log.append([NewRecord(topic, f"k{n}", b"new") for n in range(20)])
        assert [r.value for r in drain(consumer, 20)] == [b"new"] * 20
        consumer.close()

    def test_from_the_end_counts_only_where_nothing_was_committed(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, str(n).encode(), partition=0) for n in range(5)])
        log.commit("g", topic, {0: 2})
        consumer = log.consumer("g", [topic], from_end=True)
        assert [r.offset for r in drain(consumer, 3)] == [2, 3, 4]
        consumer.close()

    def test_what_was_polled_and_not_committed_comes_again_to_the_next_member(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, "k", str(n).encode()) for n in range(10)])
        first = log.consumer("g", [topic])
        records = drain(first, 10)
        first.commit(after(records[:4]))
        first.close()
        second = log.consumer("g", [topic])
        assert [r.offset for r in drain(second, 6)] == [r.offset for r in records[4:]]
        second.close()

    def test_groups_do_not_share_anything(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, "k", b"")])
        for group in ("g1", "g2"):
            consumer = log.consumer(group, [topic])
            assert len(drain(consumer, 1)) == 1
            consumer.close()

    def test_seek_to_committed_gives_again_what_was_not_committed(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, str(n).encode(), partition=n % 2) for n in range(10)])
        consumer = log.consumer("g", [topic])
        records = drain(consumer, 10)
        consumer.commit({(topic, 0): 3})
        consumer.seek_to_committed()
        again = drain(consumer, 7)
        assert sorted(again) == sorted(r for r in records if r.partition == 1 or r.offset >= 3)
        consumer.close()

    def test_a_poll_gives_at_most_what_was_asked_for_and_every_partition_its_turn(
        self, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, b"", partition=n % 4) for n in range(400)])
        consumer = log.consumer("g", [topic])
        found = consumer.poll(max_records=1, timeout_s=patient(30))
        time.sleep(patient(0.5))  # A broker sends each partition's on its own: now all of them are there.
        while len(found) < 41:
            records = consumer.poll(max_records=10, timeout_s=patient(30))
            assert 1 <= len(records) <= 10
            found += records
        assert {r.partition for r in found} == {0, 1, 2, 3}
        consumer.close()

    def test_a_poll_with_nothing_to_give_ends_in_time(self, log: EventLog, topic: str) -> None:
        consumer = log.consumer("g", [topic])
        consumer.poll(timeout_s=0)
        began = time.monotonic()
        assert consumer.poll(timeout_s=0.3) == []
        assert 0.25 < time.monotonic() - began < patient(10)
        consumer.close()

    def test_a_waiting_poll_is_woken_by_another_process_soon(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        consumer = log.consumer("g", [topic])
        consumer.poll(timeout_s=0)
        process = spawn.Process(target=append_in_another_process, args=(harness.open, topic, "p", 10))
        process.start()
        late: list[float] = []
        while len(late) < 10:
            records = consumer.poll(timeout_s=patient(30))
            assert records, "nothing came"
            late += [time.time() * 1000 - r.timestamp_ms for r in records]
        process.join(patient(30))
        # 5 ms on a quiet machine; whoever is woken by nothing gets them at the end of its wait.
        assert sorted(late)[5] < 1_000 * patient(10)
        consumer.close()

    def test_members_share_the_partitions_and_none_is_held_twice(self, log: EventLog, topic: str) -> None:
        first, second = log.consumer("g", [topic]), log.consumer("g", [topic])

        def shared() -> bool:
            first.poll(timeout_s=0.05)
            second.poll(timeout_s=0.05)
            assert not first.assignment() & second.assignment()
            return len(first.assignment()) == len(second.assignment()) == 2

        until(shared)
        assert first.assignment() | second.assignment() == {(topic, n) for n in range(4)}
        second.close()
        assert second.assignment() == frozenset()
        until(lambda: first.poll(timeout_s=0.05) == [] and len(first.assignment()) == 4)
        first.close()

    def test_a_member_without_a_partition_waits_for_one(self, log: EventLog) -> None:
        name = f"single-{uuid.uuid4().hex[:8]}"
        log.ensure_topics([TopicSpec(name, partitions=1)])
        first, second = log.consumer("g", [name]), log.consumer("g", [name])
        log.append([NewRecord(name, "k", b"1")])
        found = {id(c): c.poll(timeout_s=0.3) for c in (first, second, first, second)}
        holder, other = (first, second) if first.assignment() else (second, first)
        assert not other.assignment()
        assert found[id(other)] == []
        holder.close()
        assert [r.value for r in drain(other, 1)] == [b"1"]
        other.close()

    def test_a_commit_of_a_partition_no_longer_held_is_ignored(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, b"", partition=n) for n in range(4)])
        first = log.consumer("g", [topic])
        records = drain(first, 4)
        second = log.consumer("g", [topic])
        until(lambda: (first.poll(timeout_s=0.05), second.poll(timeout_s=0.05), len(second.assignment()) == 2)[-1])
        first.commit(after(records))
        kept = {partition for _, partition in first.assignment()}
        assert log.committed("g", topic) == dict.fromkeys(sorted(kept), 1)
        first.close()
        first.commit(after(records))
        assert log.committed("g", topic) == dict.fromkeys(sorted(kept), 1)
        second.close()

    def test_a_member_that_was_killed_loses_its_partitions_within_its_session(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, b"", partition=n) for n in range(4)])
        ready = spawn.Event()
        process = spawn.Process(target=hold_partitions_until_killed, args=(harness.open, "g", topic, ready))
        process.start()
        assert ready.wait(patient(30))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(patient(30))
        consumer = log.consumer("g", [topic])
        assert len(drain(consumer, 4, seconds=harness.session_s * 3 + 10)) == 4
        assert len(consumer.assignment()) == 4
        consumer.close()

    def test_a_member_that_works_longer_than_its_session_keeps_its_partitions(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, b"", partition=n) for n in range(4)])
        first = log.consumer("g", [topic])
        records = drain(first, 4)
        time.sleep(harness.session_s * 1.5)
        second = log.consumer("g", [topic])
        assert second.poll(timeout_s=0.3) == []
        first.commit(after(records))
        assert log.committed("g", topic) == {0: 1, 1: 1, 2: 1, 3: 1}
        first.close()
        second.close()

    def test_members_in_other_processes_get_every_record_and_commit_it_once(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        done, results = spawn.Event(), spawn.Queue()
        members = [
            spawn.Process(target=consume_in_another_process, args=(harness.open, "g", topic, done, results))
            for _ in range(2)
        ]
        for member in members:
            member.start()
        for n in range(200):
            log.append([NewRecord(topic, f"k{n % 17}", str(n).encode())])
        until(
            lambda: sum(log.committed("g", topic).values()) == 200,
            why="all is committed",
            every=0.1,
        )
        done.set()
        found = [value for _ in members for value in results.get(timeout=patient(30))]
        for member in members:
            member.join(patient(30))
        # At least once: a rebalance may give a record twice, and loses none.
        assert {int(value) for value in found} == set(range(200))

    def test_a_partition_that_is_added_is_read_from_its_first_record(self, log: EventLog, topic: str) -> None:
        consumer = log.consumer("g", [topic], from_end=True)
        consumer.poll(timeout_s=0)
        log.ensure_topics([TopicSpec(topic, partitions=5)])
        log.append([NewRecord(topic, None, b"added", partition=4)])
        assert [r.value for r in drain(consumer, 1)] == [b"added"]
        consumer.close()

    def test_a_consumer_of_several_topics_gets_them_all(self, log: EventLog, topic: str) -> None:
        other = f"other-{uuid.uuid4().hex[:8]}"
        log.ensure_topics([TopicSpec(other, partitions=1)])
        consumer = log.consumer("g", [topic, other])
        log.append([NewRecord(topic, "k", b"1"), NewRecord(other, "k", b"2")])
        records = drain(consumer, 2)
        assert {r.topic for r in records} == {topic, other}
        consumer.commit(after(records))
        assert (sum(log.committed("g", topic).values()), log.committed("g", other)) == (1, {0: 1})
        consumer.close()

    # Members that have enough for now

    def test_a_poll_for_no_records_gives_none_and_passes_none_over(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, b"", partition=n % 4) for n in range(40)])
        consumer = log.consumer("g", [topic])
        found = consumer.poll(max_records=3, timeout_s=patient(30))
        for _ in range(50):
            assert consumer.poll(max_records=0, timeout_s=0.005) == []
        found += drain(consumer, 40 - len(found))
        assert offsets_of(found) == {n: list(range(10)) for n in range(4)}
        consumer.close()

    def test_a_member_that_polls_for_no_records_is_no_stuck_one(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        hasty = harness.open_hasty()
        stuck = hasty.consumer("g", [topic])
        until(lambda: (stuck.poll(0, 0.05), len(stuck.assignment()) == 4)[-1])
        other, full = log.consumer("g", [topic]), hasty.consumer("g", [topic])

        def held() -> tuple[int, int]:
            full.poll(0, 0.02)
            other.poll(0, 0.02)
            return len(full.assignment()), len(other.assignment())

        until(lambda: held() == (2, 2), why="the stuck one loses its partitions")
        deadline = time.monotonic() + harness.session_s * 1.2
        while time.monotonic() < deadline:
            assert held() == (2, 2)
        log.append([NewRecord(topic, None, b"", partition=n) for n in range(4)])
        full.commit(after(drain(full, 2)))
        assert len(log.committed("g", topic)) == 2
        for one in (stuck, other, full):
            one.close()
        hasty.close()

    def test_a_member_that_polls_for_no_records_gives_partitions_up_however_much_it_has_not_read(
        self, log: EventLog, topic: str
    ) -> None:
        each = 4_000
        for number in range(4):
            log.append([NewRecord(topic, None, b"x" * 100, partition=number) for _ in range(each)])
        first = log.consumer("g", [topic])
        found = first.poll(max_records=10, timeout_s=patient(30))
        assert found
        first.commit(after(found))
        second = log.consumer("g", [topic])

        def shared() -> bool:
            # In the pace of somebody who works between two polls: no word of the group waits behind records.
            time.sleep(0.02)
            first.poll(0, 0.0)
            second.poll(0, 0.0)
            return len(first.assignment()) == len(second.assignment()) == 2

        until(shared, why="the group is shared")
        kept = first.assignment()
        mine = [record for record in found if (record.topic, record.partition) in kept]
        found += drain(first, 2 * each - len(mine)) + drain(second, 2 * each - len(found) + len(mine))
        assert offsets_of(found) == {n: list(range(each)) for n in range(4)}
        first.close()
        second.close()

    def test_a_paused_partition_gives_nothing_and_the_others_go_on(self, log: EventLog, topic: str) -> None:
        def append() -> None:
            log.append([NewRecord(topic, None, b"", partition=n % 4) for n in range(1_200)])

        append()
        consumer = log.consumer("g", [topic])
        until(lambda: (consumer.poll(0, 0.05), all(h.behind for h in consumer.holdings().values()))[-1])
        before = consumer.poll(max_records=30, timeout_s=patient(30))
        consumer.pause([(topic, 0), (topic, 1), (topic, 99)])
        append()
        others = [record for record in before if record.partition > 1]
        others += drain(consumer, 1_200 - len(others))
        assert {number: len(offsets) for number, offsets in offsets_of(others).items()} == {2: 600, 3: 600}
        assert consumer.poll(timeout_s=0.5) == []
        assert {n for (_, n), held in consumer.holdings().items() if held.paused} == {0, 1}
        consumer.resume([(topic, 0), (topic, 1), (topic, 3)])
        paused = [record for record in before if record.partition < 2]
        paused += drain(consumer, 1_200 - len(paused))
        assert offsets_of([*paused, *others]) == {n: list(range(600)) for n in range(4)}
        assert not any(held.paused for held in consumer.holdings().values())
        consumer.close()

    def test_what_was_not_committed_of_a_paused_partition_comes_again_when_it_is_resumed(
        self, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, b"", partition=n % 2) for n in range(20)])
        consumer = log.consumer("g", [topic])
        records = drain(consumer, 20)
        consumer.commit({(topic, 0): 4, (topic, 1): 10})
        consumer.pause([(topic, 0)])
        consumer.seek_to_committed()
        assert consumer.poll(timeout_s=0.3) == []
        consumer.resume([(topic, 0)])
        assert drain(consumer, 6) == [r for r in records if r.partition == 0 and r.offset >= 4]
        consumer.close()

    def test_a_partition_that_was_paused_given_up_and_came_back_is_not_paused(self, log: EventLog, topic: str) -> None:
        first = log.consumer("g", [topic])
        until(lambda: (first.poll(0, 0.05), len(first.assignment()) == 4)[-1])
        first.pause(first.assignment())
        second = log.consumer("g", [topic])
        until(lambda: (first.poll(0, 0.05), second.poll(0, 0.05), len(second.assignment()) == 2)[-1])
        kept = first.holdings()
        assert len(kept) == 2
        assert all(held.paused for held in kept.values())
        second.close()
        until(lambda: (first.poll(0, 0.05), len(first.assignment()) == 4)[-1])
        log.append([NewRecord(topic, None, b"", partition=n) for n in range(4)])
        came_back = {number for _, number in first.assignment() - kept.keys()}
        assert {record.partition for record in drain(first, 2)} == came_back
        assert first.poll(timeout_s=0.3) == []
        assert {n for (_, n), held in first.holdings().items() if not held.paused} == came_back
        first.resume(first.assignment())
        assert len(drain(first, 2)) == 2
        first.close()

    def test_a_member_knows_who_leads_its_partitions_and_how_far_it_is_behind(self, log: EventLog, topic: str) -> None:
        log.append([NewRecord(topic, None, b"", partition=n) for n in (0, 0, 0, 2)])
        consumer = log.consumer("g", [topic])
        (record,) = consumer.poll(max_records=1, timeout_s=patient(30))
        until(lambda: (consumer.poll(0, 0.05), sum(h.behind or 0 for h in consumer.holdings().values()) == 3)[-1])
        held = consumer.holdings()
        assert set(held) == {(topic, n) for n in range(4)}
        assert len({one.broker for one in held.values() if one.broker}) == 1
        assert (held[topic, 0].behind, held[topic, 2].behind) == ((2, 1) if record.partition == 0 else (3, 0))
        drain(consumer, 3)
        assert {number for (_, number), one in consumer.holdings().items() if not one.behind} == set(range(4))
        consumer.close()
        assert consumer.holdings() == {}

    def test_closing_from_another_thread_ends_a_waiting_poll(self, log: EventLog, topic: str) -> None:
        consumer = log.consumer("g", [topic])
        timer = threading.Timer(0.3, consumer.close)
        timer.start()
        began = time.monotonic()
        assert consumer.poll(timeout_s=patient(30)) == []
        assert time.monotonic() - began < patient(10)
        consumer.close()
        with pytest.raises(LogError):
            consumer.poll()

    # Retention

    def test_retention_takes_what_is_old_and_keeps_offsets(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        if harness.deletes_by_itself:
            assert log.enforce_retention() == {}
            return
        keeps = log.topics()[topic].retention_ms
        log.append([NewRecord(topic, None, b"old", partition=0) for _ in range(5)])
        assert log.enforce_retention() == {}
        later_ms = int(time.time() * 1000) + keeps + 60_000
        assert log.enforce_retention(later_ms) == {topic: 5}
        assert log.extents(topic)[0] == Extent(5, 5)
        assert log.append([NewRecord(topic, None, b"new", partition=0)]) == [Position(0, 5)]
        with pytest.raises(OffsetOutOfRange) as raised:
            log.read(topic, 0, 4)
        assert (raised.value.begin, raised.value.end) == (5, 6)
        assert [r.value for r in log.read(topic, 0, 5)] == [b"new"]

    def test_rule_1_a_group_whose_unread_records_retention_took_is_told_until_it_is_set_right(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        log.append([NewRecord(topic, None, b"", partition=0) for _ in range(5)])
        consumer = log.consumer("g", [topic])
        consumer.commit(after(drain(consumer, 5)[:2]))
        consumer.seek_to_committed()
        harness.expire(log, topic)
        log.append([NewRecord(topic, None, b"new", partition=0)])
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange) as raised:
                consumer.poll(timeout_s=patient(30))
        assert (raised.value.offset, raised.value.begin) == (2, 5)
        log.commit("g", topic, {0: raised.value.begin})
        consumer.seek_to_committed()
        assert [r.value for r in drain(consumer, 1)] == [b"new"]
        consumer.close()

    # All of it, in any order

    def test_offsets_commits_and_redelivery_agree_with_a_model_in_any_order(
        self, harness: LogHarness, log: EventLog
    ) -> None:
        class Machine(LogMachine):
            def opened(self) -> EventLog:
                return log

        run_state_machine_as_test(Machine, settings=settings(max_examples=15, stateful_step_count=25, deadline=None))

    # Epochs

    def test_a_writer_that_was_replaced_is_refused_in_each_partition_that_the_next_one_has_written_to(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        def append(epoch: int | None, *partitions: int) -> str:
            """Why it was refused; empty where it was not."""
            try:
                log.append([NewRecord(topic, None, b"%d" % (epoch or 0), {}, None, p) for p in partitions], epoch=epoch)
            except StaleEpoch as fault:
                return str(fault)
            return ""

        assert not append(7, 0, 1)
        assert not append(7, 0)
        assert not append(8, 0)
        refused = append(7, 1, 0)
        assert refused == (f"epoch 7 is below 8, which has taken over {topic}/0" if harness.checks_epochs else "")
        assert not append(7, 1)
        assert not append(None, 0)
        assert not append(8, 0, 1)
        written = [r.value for p in (0, 1) for r in log.read(topic, p, 0)]
        late = [] if refused else [b"7"]
        assert written == [b"7", b"7", b"8", *late, b"0", b"8", b"7", *late, b"7", b"8"]

    def test_epochs_outlive_whoever_wrote_them_and_cost_no_other_topic_or_caller(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        other = f"{topic}-b"
        log.ensure_topics([TopicSpec(other, partitions=1)])
        with contextlib.closing(harness.open()) as another:
            another.append([NewRecord(topic, None, b"", {}, None, 0)], epoch=3)
        outcomes: list[bool] = []

        def append(epoch: int | None) -> None:
            try:
                log.append([NewRecord(topic, None, b"", {}, None, 0)], epoch=epoch)
            except StaleEpoch:
                outcomes.append(False)
            else:
                outcomes.append(True)

        # Several callers share a commit: each has its own epoch.
        threads = [threading.Thread(target=append, args=(epoch,)) for epoch in (2, 3, None, 2, 3, None)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count(False) == (2 if harness.checks_epochs else 0)
        log.append([NewRecord(other, None, b"", {}, None, 0)], epoch=1)

    def test_a_publisher_of_an_epoch_breaks_when_another_has_taken_over(
        self, harness: LogHarness, log: EventLog, topic: str
    ) -> None:
        faults: list[LogError] = []

        def done(failed: Any, at: Any) -> None:
            faults.extend(failed.values())

        with (
            contextlib.closing(log.publisher(topic, epoch=1)) as old,
            contextlib.closing(log.publisher(topic, epoch=2)) as new,
        ):
            old.send([None], [b"1"], done, partition=0)
            assert old.flush(patient(30))
            new.send([None], [b"2"], done, partition=0)
            assert new.flush(patient(30))
            assert faults == []
            old.send([None], [b"1"], done, partition=0)
            old.send([None], [b"1"], done, partition=1)
            assert old.flush(patient(30))
            if not harness.checks_epochs:
                assert old.broken is None
                return
            assert isinstance(old.broken, StaleEpoch)
            assert faults
            assert all(isinstance(fault, StaleEpoch) for fault in faults)
            with pytest.raises(StaleEpoch):
                old.send([None], [b"1"], done, partition=0)
            assert [r.value for r in log.read(topic, 0, 0)] == [b"1", b"2"]

    # Publishing

    def test_a_publisher_sends_without_waiting_and_says_when_each_record_was_acknowledged(
        self, log: EventLog, topic: str
    ) -> None:
        publisher = log.publisher(topic)
        assert isinstance(publisher, Publisher)
        outcomes: list[tuple[dict[int, LogError], list[int]]] = []
        began = time.perf_counter_ns()
        for start in range(0, 1_000, 100):
            numbers = range(start, start + 100)
            publisher.send(
                [f"device-{n % 7}" for n in numbers],
                [str(n).encode() for n in numbers],
                lambda failed, at: outcomes.append((dict(failed), list(at))),
            )
        assert not outcomes
        assert publisher.under_way == 1_000
        assert publisher.flush(patient(30))
        assert publisher.under_way == 0
        assert [failed for failed, _ in outcomes] == [{}] * 10
        assert all(began < at <= time.perf_counter_ns() for _, ats in outcomes for at in ats)
        assert sum(len(ats) for _, ats in outcomes) == 1_000
        for key in {f"device-{n}" for n in range(7)}:
            mine = [int(r.value or b"") for r in read_all(log, topic) if r.key == key]
            assert mine == sorted(mine)
        assert sorted(int(r.value or b"") for r in read_all(log, topic)) == list(range(1_000))
        publisher.close()
        publisher.close()
        with pytest.raises(LogError):
            publisher.send(["k"], [b""], lambda failed, at: None)

    def test_a_publisher_places_keys_where_append_does_and_takes_a_partition_by_number(
        self, log: EventLog, topic: str
    ) -> None:
        publisher = log.publisher(topic)
        keys = [f"clé-{n}" for n in range(50)]
        publisher.send(keys, [b"published"] * 50, lambda failed, at: None)
        publisher.send([None, None], [b"named", None], lambda failed, at: None, partition=3)
        assert publisher.flush(patient(30))
        publisher.close()
        positions = log.append([NewRecord(topic, key, b"appended") for key in keys])
        where = {key: position.partition for key, position in zip(keys, positions, strict=True)}
        records = read_all(log, topic)
        assert {r.key: r.partition for r in records if r.value == b"published"} == where
        assert [r.value for r in records if r.key is None and r.partition == 3] == [b"named", None]

    def test_a_record_that_cannot_be_published_costs_no_other(self, log: EventLog) -> None:
        topic = f"small-{uuid.uuid4().hex[:8]}"
        log.ensure_topics([TopicSpec(topic, partitions=4, max_record_bytes=1_000)])
        publisher = log.publisher(topic)
        failed: dict[int, LogError] = {}
        acknowledged: list[int] = []

        def done(faults: Any, at: Any) -> None:
            failed.update(faults)
            acknowledged.extend(at)

        values = [b"a", b"x" * 1_001, b"b", b"lone surrogate", b"c"]
        publisher.send(["1", "2", "3", "\ud800", "4"], values, done)
        assert publisher.flush(patient(30))
        assert {place: type(fault) for place, fault in failed.items()} == {1: RecordTooLarge, 3: InvalidRecord}
        assert len(acknowledged) == 3
        assert publisher.broken is None
        publisher.send(["1"], [b"x" * 1_001], done)
        assert publisher.flush(patient(30))
        assert len(acknowledged) == 3
        publisher.send(["1"], [b"d"], done)
        assert publisher.flush(patient(30))
        assert sorted(r.value or b"" for r in read_all(log, topic)) == [b"a", b"b", b"c", b"d"]
        publisher.close()

    def test_a_publisher_of_an_unknown_topic_is_refused(self, log: EventLog) -> None:
        with pytest.raises(UnknownTopic):
            log.publisher("never-declared")


class LogMachine(RuleBasedStateMachine):
    """A topic of two partitions, one member that comes and goes, and lists that say what must be so."""

    def opened(self) -> EventLog:
        raise AssertionError("a subclass names its log")

    @initialize()
    def start(self) -> None:
        self.log = self.opened()
        self.topic, self.group = f"m-{uuid.uuid4().hex[:8]}", f"g-{uuid.uuid4().hex[:8]}"
        self.log.ensure_topics([TopicSpec(self.topic, partitions=2)])
        self.stored: list[list[bytes]] = [[], []]
        self.position = [0, 0]
        self.committed: dict[int, int] = {}
        self.member: Consumer | None = None

    @rule(partitions=st.lists(st.integers(0, 1), min_size=1, max_size=6), value=st.binary(max_size=8))
    def append(self, partitions: list[int], value: bytes) -> None:
        positions = self.log.append([NewRecord(self.topic, None, value, partition=p) for p in partitions])
        for partition, position in zip(partitions, positions, strict=True):
            assert position == Position(partition, len(self.stored[partition]))
            self.stored[partition].append(value)

    @precondition(lambda self: self.member is None)
    @rule()
    def join(self) -> None:
        self.member = self.log.consumer(self.group, [self.topic])
        self.position = [self.committed.get(p, 0) for p in (0, 1)]

    @precondition(lambda self: self.member is not None)
    @rule(most=st.integers(1, 10))
    def poll(self, most: int) -> None:
        assert self.member is not None
        left = sum(len(self.stored[p]) - self.position[p] for p in (0, 1))
        records = self.member.poll(most, timeout_s=2 if left else 0)
        # A broker gives what it has fetched, which on a busy machine may be less than there is.
        deadline = time.monotonic() + patient(60)
        while len(records) < min(most, left) and time.monotonic() < deadline:
            records += self.member.poll(most - len(records), timeout_s=2)
        assert len(records) == min(most, left)
        for record in records:
            assert record.offset == self.position[record.partition]
            assert record.value == self.stored[record.partition][record.offset]
            self.position[record.partition] += 1

    @precondition(lambda self: self.member is not None)
    @rule(partition=st.integers(0, 1))
    def commit(self, partition: int) -> None:
        assert self.member is not None
        self.member.commit({(self.topic, partition): self.position[partition]})
        self.committed[partition] = self.position[partition]

    @precondition(lambda self: self.member is not None)
    @rule()
    def seek(self) -> None:
        assert self.member is not None
        self.member.seek_to_committed()
        self.position = [self.committed.get(p, 0) for p in (0, 1)]

    @precondition(lambda self: self.member is not None)
    @rule()
    def leave(self) -> None:
        assert self.member is not None
        self.member.close()
        self.member = None

    @rule(partition=st.integers(0, 1), most=st.integers(1, 4), data=st.data())
    def read(self, partition: int, most: int, data: st.DataObject) -> None:
        offset = data.draw(st.integers(0, len(self.stored[partition])))
        records = self.log.read(self.topic, partition, offset, max_records=most)
        assert [r.value for r in records] == self.stored[partition][offset : offset + most]

    @invariant()
    def the_log_says_what_the_model_says(self) -> None:
        if hasattr(self, "log"):
            assert self.log.extents(self.topic) == {p: Extent(0, len(self.stored[p])) for p in (0, 1)}
            assert self.log.committed(self.group, self.topic) == self.committed

    def teardown(self) -> None:
        if getattr(self, "member", None) is not None:
            with contextlib.suppress(LogError):
                self.member.close()  # pyright: ignore[reportOptionalMemberAccess]
