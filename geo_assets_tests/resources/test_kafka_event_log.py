from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_assets_tests.real_services import settings_of
from geo_assets_tests.resources.contract_event_log import (
    EventLogContract,
    LogHarness,
    drain,
    offsets_of,
    read_all,
    spawn,
)
from geo_assets_tests.resources.kafka_harness import (
    SESSION_S,
    add_partitions,
    admin_of,
    delete_topic,
    expire,
    own_topics,
)
from geo_assets_tests.resources.log_processes import after, hold_partitions_until_killed
from geo_assets_tests.waiting import patient, until
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_consumer import _AT_ONCE, _HELD_RECORDS
from resources.event_log.kafka_options import KafkaOptions, options_from, security_of
from resources.event_log.kafka_producer import KafkaAppender
from resources.event_log.protocol import (
    InvalidRecord,
    LogError,
    LogUnavailable,
    NewRecord,
    OffsetOutOfRange,
    Record,
    TopicSpec,
    UnknownTopic,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def options() -> Iterator[KafkaOptions]:
    with own_topics() as options:
        yield options


@pytest.fixture
def log(options: KafkaOptions) -> Iterator[KafkaEventLog]:
    log = KafkaEventLog(options)
    log.ensure_topics([TopicSpec("t")])
    yield log
    log.close()


class TestKafkaEventLog(EventLogContract):
    @pytest.fixture
    def harness(self, options: KafkaOptions) -> LogHarness:
        return LogHarness(
            open=functools.partial(KafkaEventLog, options),
            delete_topic=delete_topic,
            session_s=SESSION_S,
            expire=expire,
            open_hasty=functools.partial(KafkaEventLog, replace(options, max_poll_interval_s=SESSION_S)),
            deletes_by_itself=True,
            appends_whole_batches=False,
            checks_epochs=False,
        )


# Settings


def test_options_are_plain_values_that_load_without_a_client_library() -> None:
    code = (
        "import sys, resources.event_log.kafka_options\n"
        "heavy = {'confluent_kafka', 'numpy', 'dagster', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import resources.event_log.kafka\n"
        "heavy = {'numpy', 'dagster', 'pydantic', 'shapely', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_settings_become_the_client_library_s(tmp_path: Path) -> None:
    assert security_of() == {"security.protocol": "PLAINTEXT"}
    pem = tmp_path / "ca.pem"
    pem.write_text("")
    options = options_from(
        "a:1,b:2",
        topic_prefix="p.",
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username="me",
        sasl_password="secret-word",
        ssl_ca=pem,
        ssl_certificate=str(pem),
        ssl_key=pem,
        replication_factor=3,
        min_insync_replicas=2,
    )
    assert options.security == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "me",
        "sasl.password": "secret-word",
        "ssl.ca.location": str(pem),
        "ssl.certificate.location": str(pem),
        "ssl.key.location": str(pem),
    }
    assert (options.topic_prefix, options.replication_factor, options.min_insync_replicas) == ("p.", 3, 2)
    assert "secret-word" not in repr(options)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"security_protocol": "SASL_SSL", "sasl_password": "x"}, "GEO_ASSETS_KAFKA_SASL_USERNAME"),
        ({"security_protocol": "SASL_PLAINTEXT", "sasl_username": "x"}, "GEO_ASSETS_KAFKA_SASL_PASSWORD"),
        ({"security_protocol": "SSL", "ssl_ca": "/no/such.pem"}, "GEO_ASSETS_KAFKA_SSL_CA=/no/such.pem"),
        ({"security_protocol": "SSL", "ssl_certificate": "/no/such.pem"}, "GEO_ASSETS_KAFKA_SSL_KEY"),
        ({"replication_factor": 1, "min_insync_replicas": 2}, "GEO_ASSETS_KAFKA_MIN_INSYNC_REPLICAS=2"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(LogError, match=named) as raised:
        options_from("a:1", **values)
    assert "\n" not in str(raised.value)


# Reaching a cluster


def sasl(**changes: str) -> KafkaOptions:
    found = settings_of("kafka")
    if "TEST_KAFKA_SASL_SERVERS" not in found:
        pytest.skip("this Kafka asks for no password anywhere")
    values = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": found["TEST_KAFKA_SASL_USERNAME"],
        "sasl_password": found["TEST_KAFKA_SASL_PASSWORD"],
    }
    return options_from(found["TEST_KAFKA_SASL_SERVERS"], **{**values, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_a_right_password_opens_everything(options: KafkaOptions, mechanism: str) -> None:
    log = KafkaEventLog(replace(sasl(sasl_mechanism=mechanism), topic_prefix=options.topic_prefix))
    log.ensure_topics([TopicSpec("t")])
    log.append([NewRecord("t", "k", b"1")])
    assert [r.value for r in read_all(log, "t")] == [b"1"]
    consumer = log.consumer("g", ["t"])
    consumer.commit(after(drain(consumer, 1)))
    assert sum(log.committed("g", "t").values()) == 1
    log.close()


CALLS: dict[str, Any] = {
    "ensure_topics": lambda log: log.ensure_topics([TopicSpec("t")]),
    "topics": lambda log: log.topics(),
    "append": lambda log: log.append([NewRecord("t", "k", b"")]),
    "read": lambda log: log.read("t", 0, 0),
    "committed": lambda log: log.committed("g", "t"),
    "consumer": lambda log: log.consumer("g", ["t"]),
}


@pytest.mark.parametrize("wrong", [{"sasl_password": "not-the-word"}, {"sasl_username": "nobody"}], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_password_is_one_line_that_names_the_setting_and_not_the_word(call: str, wrong: dict[str, str]) -> None:
    log = KafkaEventLog(sasl(**wrong))
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="GEO_ASSETS_KAFKA_SASL_PASSWORD") as raised:
        CALLS[call](log)
    assert time.monotonic() - began < patient(10)
    assert "\n" not in str(raised.value)
    assert "not-the-word" not in str(raised.value)
    log.close()


@pytest.mark.parametrize("call", ["ensure_topics", "topics"])
def test_a_broker_that_cannot_be_reached_is_named_within_seconds(call: str) -> None:
    log = KafkaEventLog(KafkaOptions("127.0.0.1:9", request_timeout_s=3.0))
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match=r"127\.0\.0\.1:9 \(GEO_ASSETS_KAFKA_SERVERS\).*refused") as raised:
        CALLS[call](log)
    assert 1 < time.monotonic() - began < patient(10)
    assert "\n" not in str(raised.value)
    log.close()


def test_the_wait_for_a_broker_is_ten_seconds_at_most() -> None:
    assert KafkaOptions("a:1").request_timeout_s < 10


def test_a_protocol_that_the_listener_does_not_speak_names_the_setting() -> None:
    servers = sasl().servers
    log = KafkaEventLog(KafkaOptions(servers, request_timeout_s=3.0))
    with pytest.raises(LogUnavailable, match="GEO_ASSETS_KAFKA_SECURITY_PROTOCOL"):
        log.topics()
    log.close()


def test_the_client_library_writes_nothing_to_standard_error() -> None:
    code = (
        "from resources.event_log.kafka import KafkaEventLog\n"
        "from resources.event_log.kafka_options import KafkaOptions\n"
        "log = KafkaEventLog(KafkaOptions('127.0.0.1:9', request_timeout_s=1.5))\n"
        "for call in (log.topics, lambda: log.append([]), lambda: log.topic_id('t')):\n"
        "    try:\n        call()\n    except Exception as error:\n        print(error)\n"
        "log.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2


def test_what_the_client_library_says_is_there_for_who_debugs(
    caplog: pytest.LogCaptureFixture, log: KafkaEventLog
) -> None:
    caplog.set_level(logging.DEBUG, "librdkafka")
    bad = KafkaEventLog(KafkaOptions("127.0.0.1:9", request_timeout_s=1.5))
    with pytest.raises(LogUnavailable):
        bad.topics()
    bad.close()
    assert any("127.0.0.1:9" in record.getMessage() for record in caplog.records)


def test_a_closed_log_says_so(log: KafkaEventLog) -> None:
    log.close()
    for call in CALLS.values():
        with pytest.raises(LogUnavailable, match="closed"):
            call(log)


# Topics


def test_a_topic_is_made_as_declared(log: KafkaEventLog, options: KafkaOptions) -> None:
    from confluent_kafka.admin import ConfigResource, ResourceType

    log.ensure_topics([TopicSpec("d", partitions=3, retention_ms=3_600_000, max_record_bytes=50_000)])
    resource = ConfigResource(ResourceType.TOPIC, options.topic_prefix + "d")
    admin = admin_of(options.servers)
    (future,) = admin.describe_configs([resource]).values()
    found = {name: entry.value for name, entry in future.result(timeout=patient(30)).items()}
    assert (found["retention.ms"], found["min.insync.replicas"], found["cleanup.policy"]) == ("3600000", "1", "delete")
    # The broker's limit is on batches: it must leave room for several records within theirs.
    assert int(found["max.message.bytes"]) >= 50_000 + 200_000


def test_records_at_the_limit_go_together_and_alone(log: KafkaEventLog) -> None:
    log.ensure_topics([TopicSpec("small", max_record_bytes=1_000), TopicSpec("large", max_record_bytes=3_000_000)])
    log.append([NewRecord("small", "k", os.urandom(999)) for _ in range(1_000)])
    log.append([NewRecord("large", "k", os.urandom(2_999_999)) for _ in range(3)])
    assert [len(r.value or b"") for r in read_all(log, "large")] == [2_999_999] * 3
    assert len(read_all(log, "small")) == 1_000


def test_more_copies_than_brokers_is_one_line_that_names_the_setting(options: KafkaOptions) -> None:
    log = KafkaEventLog(replace(options, replication_factor=3))
    with pytest.raises(LogError, match="GEO_ASSETS_KAFKA_REPLICATION_FACTOR") as raised:
        log.ensure_topics([TopicSpec("t")])
    assert "\n" not in str(raised.value)
    log.close()


def test_a_missing_topic_is_told_at_once_and_not_by_a_producer_that_times_out(log: KafkaEventLog) -> None:
    began = time.monotonic()
    with pytest.raises(UnknownTopic, match="gone"):
        log.append([NewRecord("gone", "k", b"")])
    assert time.monotonic() - began < patient(5)


def test_only_topics_with_the_prefix_are_listed(log: KafkaEventLog, options: KafkaOptions) -> None:
    other = KafkaEventLog(replace(options, topic_prefix=options.topic_prefix + "other."))
    other.ensure_topics([TopicSpec("mine")])
    assert set(other.topics()) == {"mine"}
    assert set(log.topics()) == {"t", "other.mine"}
    other.close()


def test_a_topic_made_anew_is_written_and_read_by_clients_of_the_old_one(log: KafkaEventLog) -> None:
    log.append([NewRecord("t", "k", b"old") for _ in range(5)])
    assert len(read_all(log, "t")) == 5
    delete_topic(log, "t")
    with pytest.raises(UnknownTopic):
        log.topic_id("t")
    log.ensure_topics([TopicSpec("t")])
    positions = log.append([NewRecord("t", "k", b"new") for _ in range(2)])
    assert [p.offset for p in positions] == [0, 1]
    assert [r.value for r in read_all(log, "t")] == [b"new", b"new"]


def test_partitions_that_somebody_else_added_are_written_and_read(log: KafkaEventLog, options: KafkaOptions) -> None:
    log.append([NewRecord("t", None, b"", partition=n) for n in range(4)])
    consumer = log.consumer("g", ["t"])
    consumer.commit(after(drain(consumer, 4)))
    add_partitions(options, "t", 6)
    until(lambda: set(log.extents("t")) == set(range(6)), why="the new partitions are seen")
    until(lambda: len(log.append([NewRecord("t", None, b"new", partition=5)])) == 1)
    assert [r.value for r in log.read("t", 5, 0)] == [b"new"]
    assert [r.value for r in drain(consumer, 1)] == [b"new"]
    assert len(consumer.assignment()) == 6
    consumer.close()


def test_what_nobody_asks_for_is_held_up_to_a_bound_and_none_of_it_is_lost(log: KafkaEventLog) -> None:
    for number in range(4):
        log.append([NewRecord("t", None, b"", partition=number) for _ in range(2_500)])
    consumer = log.consumer("g", ["t"])
    found: list[Record] = []
    until(lambda: (consumer.poll(0, 0.01), consumer._ready_records >= _HELD_RECORDS)[-1])
    found += consumer.poll(10, 0.0)
    for _ in range(2_000):
        consumer.poll(0, 0.0)
        assert consumer._ready_records < _HELD_RECORDS + _AT_ONCE
    found += drain(consumer, 10_000 - len(found))
    assert offsets_of(found) == {n: list(range(2_500)) for n in range(4)}
    consumer.close()


# Other writers


def foreign(options: KafkaOptions, **settings: Any) -> Any:
    from confluent_kafka import Producer

    return Producer({"bootstrap.servers": options.servers, **settings})


def test_whatever_a_foreign_producer_wrote_is_readable(log: KafkaEventLog, options: KafkaOptions) -> None:
    producer, topic = foreign(options), options.topic_prefix + "t"
    messages: list[dict[str, Any]] = [
        {"key": b"\xff\xfe\x00key", "value": b"\x00\xff", "headers": [("bin", b"\x80\x81"), ("none", None)]},
        {"key": None, "value": None},
        {"key": b"", "value": b""},
        {"key": "naïve".encode("latin-1"), "value": b"{}", "headers": [("twice", b"1"), ("twice", b"2"), ("", b"")]},
        {"key": b"k" * 5_000, "value": b"v", "timestamp": 1},
    ]
    for message in messages:
        producer.produce(topic, partition=0, **message)
    assert producer.flush(patient(30)) == 0
    consumer = log.consumer("g", ["t"])
    polled = drain(consumer, len(messages))
    consumer.close()
    read = log.read("t", 0, 0)
    assert read == polled
    assert [(r.key, r.value) for r in read] == [
        ("\\xff\\xfe\x00key", b"\x00\xff"),
        (None, None),
        ("", b""),
        ("na\\xefve", b"{}"),
        ("k" * 5_000, b"v"),
    ]
    assert [dict(r.headers) for r in read] == [{"bin": "\\x80\\x81", "none": ""}, {}, {}, {"twice": "2", "": ""}, {}]
    # Whatever it was, it is text now: it can be written again, into a dead letter for one.
    log.append([NewRecord("t", r.key, r.value, r.headers) for r in read])


def test_marks_of_transactions_are_no_records_and_a_read_does_not_wait_for_them(
    log: KafkaEventLog, options: KafkaOptions
) -> None:
    producer, topic = foreign(options, **{"transactional.id": options.topic_prefix}), options.topic_prefix + "t"
    producer.init_transactions(patient(30))
    for n, end in enumerate((producer.commit_transaction, producer.abort_transaction, producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic, str(n).encode(), partition=0)
        producer.flush(patient(30))
        end(patient(30))
    # The mark of the last one is written after its caller was answered.
    until(lambda: log.extents("t")[0].end >= 6, why="the mark is written")
    assert log.extents("t")[0].end == 6
    records = log.read("t", 0, 0)
    assert [(r.offset, r.value) for r in records] == [(0, b"0"), (4, b"2")]
    began = time.monotonic()
    assert log.read("t", 0, 5) == []
    assert time.monotonic() - began < patient(5)
    consumer = log.consumer("g", ["t"])
    assert [r.value for r in drain(consumer, 2)] == [b"0", b"2"]
    consumer.close()


@pytest.mark.parametrize("stamp", [0, -1, 4_102_444_800_000], ids=["the epoch", "before it", "the year 2100"])
def test_a_timestamp_that_no_broker_takes_is_an_invalid_record(log: KafkaEventLog, stamp: int) -> None:
    with pytest.raises(InvalidRecord, match=r"timestamp|Timestamp|future"):
        log.append([NewRecord("t", "k", b"", timestamp_ms=stamp)])


# Load


def test_what_threads_append_at_once_is_all_there_in_each_one_s_order(log: KafkaEventLog) -> None:
    def work(name: int) -> None:
        for number in range(50):
            log.append([NewRecord("t", f"k{name}", f"{number}".encode())])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told: dict[str | None, list[int]] = {}
    for partition, extent in log.extents("t").items():
        for record in log.read("t", partition, extent.begin):
            told.setdefault(record.key, []).append(int(record.value or b""))
    assert told == {f"k{name}": list(range(50)) for name in range(16)}


@pytest.mark.parametrize("offset", [None, -1, -1001])
def test_rule_1_an_acknowledgement_that_names_no_offset_is_none(
    log: KafkaEventLog, monkeypatch: pytest.MonkeyPatch, offset: int | None
) -> None:
    # The client gives it for what the broker calls a duplicate, wherever the first one is.
    class Duplicate:
        def partition(self) -> int:
            return 0

        def offset(self) -> int | None:
            return offset

    def sent(self: KafkaAppender, client: Any, arguments: Any, report: Any, deadline: float) -> None:
        report(None, Duplicate())

    monkeypatch.setattr(KafkaAppender, "_send", sent)
    with pytest.raises(LogUnavailable, match="acknowledged without an offset"):
        log.append([NewRecord("t", "k", b"")])


def test_more_records_than_the_client_queues_wait_for_room(log: KafkaEventLog) -> None:
    positions = log.append([NewRecord("t", None, b"", partition=n % 4) for n in range(110_000)])
    assert len(set(positions)) == 110_000
    assert {p: e.end for p, e in log.extents("t").items()} == dict.fromkeys(range(4), 27_500)


def test_a_sensor_s_tick_reads_ten_thousand_records_in_one_go_a_partition(log: KafkaEventLog) -> None:
    log.append([NewRecord("t", f"14:{n:014d}", b"{}" * 60) for n in range(10_000)])
    began = time.monotonic()
    log.topic_id("t")
    positions: dict[int, int] = {}
    count = 0
    for partition in log.extents("t"):
        records = log.read("t", partition, 0, max_records=10_000)
        count += len(records)
        positions[partition] = records[-1].offset + 1
    log.commit("sensor", "t", positions)
    assert count == 10_000
    assert time.monotonic() - began < patient(20)
    assert log.committed("sensor", "t") == positions


# Groups


def test_offsets_of_a_group_that_others_read_in_are_theirs(log: KafkaEventLog, options: KafkaOptions) -> None:
    log.append([NewRecord("t", None, b"", partition=n) for n in range(4)])
    ready = spawn.Event()
    process = spawn.Process(
        target=hold_partitions_until_killed, args=(functools.partial(KafkaEventLog, options), "g", "t", ready)
    )
    process.start()
    assert ready.wait(patient(30))
    with pytest.raises(LogError, match="other processes") as raised:
        log.commit("g", "t", {0: 1})
    assert not isinstance(raised.value, LogUnavailable)
    process.kill()
    process.join(patient(30))


def test_a_member_whose_topic_is_deleted_is_told(log: KafkaEventLog) -> None:
    consumer = log.consumer("g", ["t"])
    delete_topic(log, "t")
    deadline = time.monotonic() + patient(60)
    with pytest.raises(UnknownTopic, match=r"'.*t'"):
        while time.monotonic() < deadline:
            consumer.poll(timeout_s=0.5)
    consumer.close()


def test_a_read_of_what_retention_took_says_what_is_left(log: KafkaEventLog) -> None:
    log.append([NewRecord("t", None, b"", partition=0) for _ in range(5)])
    expire(log, "t")
    with pytest.raises(OffsetOutOfRange) as raised:
        log.read("t", 0, 3)
    assert (raised.value.begin, raised.value.end) == (5, 5)
    assert log.read("t", 0, 5) == []


def test_what_was_read_before_a_loss_is_given_before_it_is_told(log: KafkaEventLog) -> None:
    log.append([NewRecord("t", None, str(n).encode(), partition=0) for n in range(10)])
    consumer = log.consumer("g", ["t"])
    (first,) = consumer.poll(max_records=1, timeout_s=patient(30))
    assert first.offset == 0
    expire(log, "t")
    log.append([NewRecord("t", None, b"later", partition=0)])
    assert [r.value for r in drain(consumer, 10)] == [*(str(n).encode() for n in range(1, 10)), b"later"]
    consumer.close()


def test_a_forked_child_opens_clients_of_its_own(log: KafkaEventLog) -> None:
    log.append([NewRecord("t", "k", b"parent")])
    consumer = log.consumer("g", ["t"])
    ended = -signal.SIGSEGV
    tries = 0
    # The client library promises nothing to forked children, and at times one of its threads crashes in one.
    while ended == -signal.SIGSEGV and tries < 4:
        tries += 1
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log.append([NewRecord("t", "k", b"child")])
                try:
                    consumer.poll(timeout_s=0)
                except LogError:
                    code = 0
            finally:
                os._exit(code)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == 0
    log.append([NewRecord("t", "k", b"parent again")])
    values: list[bytes | None] = []
    deadline = time.monotonic() + patient(60)
    while b"parent again" not in values and time.monotonic() < deadline:
        values += [r.value for r in consumer.poll(timeout_s=0.5)]
    assert [*dict.fromkeys(values)] == [b"parent", b"child", b"parent again"]
    consumer.close()
