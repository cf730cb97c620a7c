"""Where the tests find Kafka, and what they do to it behind the adapter's back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.waiting import patient, until
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_options import KafkaOptions
from resources.event_log.protocol import EventLog

SESSION_S = 6.0
"""The least that a broker takes unless told otherwise."""


@contextmanager
def own_topics(**changes: Any) -> Iterator[KafkaOptions]:
    """Options whose topics and groups no other test has; the topics are deleted afterwards."""
    servers = settings_of("kafka")["GEO_ASSETS_KAFKA_SERVERS"]
    values: dict[str, Any] = {"session_timeout_s": SESSION_S, "metadata_refresh_s": 1.0} | changes
    options = KafkaOptions(servers, topic_prefix=f"{room()}.", **values)
    yield options
    delete_topics(servers, prefix=options.topic_prefix)


def admin_of(servers: str) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": servers})


def delete_topics(servers: str, *, prefix: str = "", name: str = "") -> None:
    admin = admin_of(servers)
    found = [t for t in admin.list_topics(timeout=patient(30)).topics if t == name or (prefix and t.startswith(prefix))]
    for future in admin.delete_topics(found).values() if found else ():
        future.result(timeout=patient(30))
    until(lambda: not set(found) & set(admin.list_topics(timeout=patient(30)).topics), why="the topics are gone")


def delete_topic(log: EventLog, topic: str) -> None:
    assert isinstance(log, KafkaEventLog)
    delete_topics(log.options.servers, name=log.options.topic_prefix + topic)


def expire(log: EventLog, topic: str) -> None:
    """What retention does, without its wait."""
    from confluent_kafka import TopicPartition

    assert isinstance(log, KafkaEventLog)
    full = log.options.topic_prefix + topic
    ends = [TopicPartition(full, number, extent.end) for number, extent in log.extents(topic).items()]
    admin = admin_of(log.options.servers)
    for future in admin.delete_records(ends).values():
        future.result(timeout=patient(30))


def add_partitions(options: KafkaOptions, topic: str, total: int) -> None:
    """As whoever runs the cluster does it."""
    from confluent_kafka.admin import NewPartitions

    admin = admin_of(options.servers)
    for future in admin.create_partitions([NewPartitions(options.topic_prefix + topic, total)]).values():
        future.result(timeout=patient(30))
