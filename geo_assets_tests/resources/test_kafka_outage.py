"""A broker of its own: rights, TLS, and a kill under load. One broker and one kill, as each costs many seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from geo_assets_tests.resources.contract_event_log import drain, read_all
from geo_assets_tests.resources.kafka_broker import GuardedKafka, started
from geo_assets_tests.resources.kafka_harness import admin_of
from geo_assets_tests.resources.log_processes import after
from geo_assets_tests.waiting import patient, until
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_options import KafkaOptions, options_from
from resources.event_log.protocol import LogError, LogUnavailable, NewRecord, Position, TopicSpec

pytestmark = pytest.mark.service("kafka")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    broker = started(tmp_path_factory.mktemp("broker") / "kafka")
    yield broker
    broker.remove()


def user_s(broker: GuardedKafka) -> KafkaOptions:
    """Options of the user with a password."""
    return options_from(
        broker.setting("TEST_KAFKA_SASL_SERVERS"),
        topic_prefix="theirs.",
        security_protocol="SASL_PLAINTEXT",
        sasl_username=broker.setting("TEST_KAFKA_SASL_USERNAME"),
        sasl_password=broker.setting("TEST_KAFKA_SASL_PASSWORD"),
    )


def allow(broker: GuardedKafka, user: str, *operations: str) -> None:
    """Give rights on everything that begins with `theirs.`, as whoever runs the cluster does it."""
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        ResourcePatternType,
        ResourceType,
    )

    admin = admin_of(broker.setting("GEO_ASSETS_KAFKA_SERVERS"))
    bindings = [
        AclBinding(
            kind, "theirs.", ResourcePatternType.PREFIXED, f"User:{user}", "*", AclOperation[operation],
            AclPermissionType.ALLOW,
        )
        for kind in (ResourceType.TOPIC, ResourceType.GROUP)
        for operation in operations
    ]  # fmt: skip
    for future in admin.create_acls(bindings).values():
        future.result(timeout=patient(30))


def test_a_user_without_the_right_to_create_topics_is_told_which_are_missing_and_works_with_those_that_are_there(
    broker: GuardedKafka,
) -> None:
    options = user_s(broker)
    user = options.security["sasl.username"]
    log = KafkaEventLog(options)
    with pytest.raises(LogError, match=r"does not let user 'geo_assets' .*SASL_USERNAME.* describe topic theirs\.a"):
        log.ensure_topics([TopicSpec("a")])

    owner = KafkaEventLog(KafkaOptions(broker.setting("GEO_ASSETS_KAFKA_SERVERS"), topic_prefix="theirs."))
    owner.ensure_topics([TopicSpec("a", partitions=2, retention_ms=60_000)])
    allow(broker, user, "DESCRIBE", "READ")
    until(lambda: may(lambda: log.topic_id("a")), why="the rights arrive")
    began = time.monotonic()
    with pytest.raises(LogError, match=r"topics theirs\.b, theirs\.c are missing.*_SASL_USERNAME.*may not") as raised:
        log.ensure_topics([TopicSpec("a"), TopicSpec("b"), TopicSpec("c")])
    assert time.monotonic() - began < patient(10)
    assert "\n" not in str(raised.value)
    # Neither grown nor changed, and good enough: nothing is waited for.
    waits_long = KafkaEventLog(replace(options, request_timeout_s=300.0))
    began = time.monotonic()
    waits_long.ensure_topics([TopicSpec("a", partitions=4)])
    assert time.monotonic() - began < patient(60)
    waits_long.close()
    assert log.topics()["a"].partitions == 2
    with pytest.raises(LogError, match=r"does not let user .* append to theirs\.a") as raised:
        log.append([NewRecord("a", "k", b"")])
    assert not isinstance(raised.value, LogUnavailable)

    allow(broker, user, "WRITE")
    until(lambda: may(lambda: log.append([NewRecord("a", "k", b"1")])), why="the rights arrive")
    consumer = log.consumer("g", ["a"])
    consumer.commit(after(drain(consumer, 1)))
    assert sum(log.committed("g", "a").values()) == 1
    log.close()
    owner.close()


def may(call: Callable[[], Any]) -> bool:
    try:
        call()
    except LogError:
        return False
    return True


def test_tls_is_trusted_by_the_authority_that_is_named(broker: GuardedKafka) -> None:
    servers = broker.setting("ssl")
    log = KafkaEventLog(options_from(servers, security_protocol="SSL", ssl_ca=broker.certificate))
    log.ensure_topics([TopicSpec("over-tls")])
    log.append([NewRecord("over-tls", "k", b"1")])
    assert [r.value for r in read_all(log, "over-tls")] == [b"1"]
    log.close()

    log = KafkaEventLog(options_from(servers, security_protocol="SSL"))
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="GEO_ASSETS_KAFKA_SSL_CA") as raised:
        log.ensure_topics([TopicSpec("over-tls")])
    assert time.monotonic() - began < patient(10)
    assert "\n" not in str(raised.value)
    log.close()


def test_rule_2_a_broker_killed_under_load_loses_nothing_acknowledged_and_needs_no_hand(broker: GuardedKafka) -> None:
    options = KafkaOptions(broker.setting("GEO_ASSETS_KAFKA_SERVERS"), request_timeout_s=4.0)
    log = KafkaEventLog(options)
    log.ensure_topics([TopicSpec("t")])
    # The first question of all about a group, while its coordinator is only being made.
    assert log.committed("g", "t") == {}

    stop, ended = threading.Event(), threading.Event()
    lock = threading.Lock()
    acknowledged: dict[Position, bytes] = {}
    refused: list[LogUnavailable] = []
    polled: set[tuple[int, int]] = set()
    followed: list[tuple[int, int]] = []
    faults: list[BaseException] = []

    def append(name: int) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            value = f"{name} {n}".encode()
            try:
                (position,) = log.append([NewRecord("t", f"k{name}", value)])
            except LogUnavailable as error:
                refused.append(error)
                continue
            with lock:
                acknowledged[position] = value

    def consume() -> None:
        consumer = log.consumer("g", ["t"])
        while not (ended.is_set() and len(polled) >= len(acknowledged)) and time.monotonic() < deadline:
            try:
                records = consumer.poll(timeout_s=0.5)
                consumer.commit(after(records))
            except LogUnavailable:
                consumer.seek_to_committed()
                continue
            polled.update((r.partition, r.offset) for r in records)
        consumer.close()

    def follow() -> None:
        follower = log.follow("t", dict.fromkeys(log.extents("t"), 0))
        # Refused ones may be there too: what counts is that each acknowledged one came.
        while not (ended.is_set() and acknowledged.keys() <= set(followed)) and time.monotonic() < deadline:
            try:
                some = follower.take(500, 0.2)
            except LogUnavailable as away:
                refused.append(away)
                continue
            followed.extend(zip(some.partitions, some.offsets, strict=True))
        follower.close()

    def look() -> None:
        while not stop.is_set():
            try:
                for partition, extent in log.extents("t").items():
                    log.read("t", partition, extent.begin, max_records=10)
            except LogUnavailable:
                pass
            stop.wait(0.5)

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as fault:
            faults.append(fault)

    deadline = time.monotonic() + patient(200)
    threads = [threading.Thread(target=guarded, args=(append, name)) for name in range(4)]
    threads += [threading.Thread(target=guarded, args=(work,)) for work in (consume, follow, look)]
    for thread in threads:
        thread.start()
    while len(polled) < 100 and not faults and time.monotonic() < deadline:
        time.sleep(0.05)

    broker.kill()
    time.sleep(1.0)
    began = time.monotonic()
    broker.start({})
    before = len(acknowledged)
    while len(acknowledged) < before + 200 and not faults and time.monotonic() < deadline:
        time.sleep(0.05)
    recovery_s = time.monotonic() - began
    stop.set()
    for thread in threads[:4]:
        thread.join(patient(60))
    ended.set()  # Nothing more is acknowledged from here on.
    for thread in threads:
        thread.join(patient(60))

    assert faults == []
    assert len(acknowledged) >= before + 200
    assert recovery_s < patient(60)
    found = {Position(r.partition, r.offset): r.value for r in read_all(log, "t")}
    assert acknowledged.items() <= found.items()
    # What was refused may stand there too, but nothing stands there twice.
    assert len(set(found.values())) == len(found)
    assert {tuple(position) for position in acknowledged} <= polled
    assert {tuple(position) for position in acknowledged} <= set(followed)
    assert len(set(followed)) == len(followed)
    assert sum(log.committed("g", "t").values()) >= len(acknowledged)
    for error in refused:
        assert "GEO_ASSETS_KAFKA_SERVERS" in str(error)
    log.close()
