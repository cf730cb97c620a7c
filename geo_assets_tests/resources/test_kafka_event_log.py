from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import pytest

from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.resources.contract_event_log import EventLogContract, LogHarness
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_options import KafkaOptions
from resources.event_log.protocol import EventLog

SESSION_S = 6.0
"""The least that a broker takes unless told otherwise."""


def delete_topics(servers: str, *, prefix: str = "", name: str = "") -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": servers})
    found = [t for t in admin.list_topics(timeout=20).topics if t == name or (prefix and t.startswith(prefix))]
    for future in admin.delete_topics(found).values() if found else ():
        future.result(timeout=20)
    deadline = time.monotonic() + 20
    while set(found) & set(admin.list_topics(timeout=20).topics):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def delete_topic(log: EventLog, topic: str) -> None:
    assert isinstance(log, KafkaEventLog)
    delete_topics(log.options.servers, name=log.options.topic_prefix + topic)


@pytest.fixture
def options() -> Iterator[KafkaOptions]:
    servers = settings_of("kafka")["GEO_ASSETS_KAFKA_SERVERS"]
    options = KafkaOptions(servers, topic_prefix=f"{room()}.", session_timeout_s=SESSION_S, metadata_refresh_s=1.0)
    yield options
    delete_topics(servers, prefix=options.topic_prefix)


@pytest.fixture
def log(options: KafkaOptions) -> Iterator[KafkaEventLog]:
    log = KafkaEventLog(options)
    yield log
    log.close()


class TestKafkaEventLog(EventLogContract):
    @pytest.fixture
    def harness(self, options: KafkaOptions) -> LogHarness:
        return LogHarness(
            open=functools.partial(KafkaEventLog, options),
            delete_topic=delete_topic,
            session_s=SESSION_S,
            deletes_by_itself=True,
            appends_whole_batches=False,
        )
