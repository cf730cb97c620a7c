"""The event log on Kafka: one client of a cluster, safe for many threads, that comes back by itself after an outage.

Who asks the cluster what is in kafka_cluster.py, appending in kafka_producer.py and, without waiting, in
kafka_publisher.py, slices in kafka_reader.py and, for long, in kafka_follower.py, groups in kafka_consumer.py. How it
differs from the embedded log, resources/event_log/protocol.py says.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from resources.event_log.kafka_cluster import KafkaCluster
from resources.event_log.kafka_consumer import KafkaConsumer
from resources.event_log.kafka_follower import KafkaFollower
from resources.event_log.kafka_groups import KafkaGroups
from resources.event_log.kafka_options import KafkaOptions
from resources.event_log.kafka_producer import KafkaAppender
from resources.event_log.kafka_publisher import KafkaPublisher
from resources.event_log.kafka_reader import KafkaReaders
from resources.event_log.protocol import Extent, LogError, LogUnavailable, NewRecord, Position, Record, TopicSpec


class KafkaEventLog:
    """An event log on a Kafka cluster (`EventLog`). Nothing is connected before it is used.

    Args:
        options: Where the cluster is and how it is used.
    """

    def __init__(self, options: KafkaOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._cluster = KafkaCluster(self.options)
        self._appender = KafkaAppender(self._cluster)
        self._readers = KafkaReaders(self._cluster)
        self._groups = KafkaGroups(self._cluster)
        self._members: set[KafkaConsumer] = set()

    def _open(self) -> KafkaCluster:
        if self._closed:
            raise LogUnavailable(f"this client of {self.options.where} is closed")
        if self._pid != os.getpid():
            # Forked: the clients' threads stayed in the parent. They are left alone: ending them would wait for ever.
            _LEFT_TO_THE_PARENT.append((self._cluster, self._appender, self._readers, self._groups, self._members))
            self._lock = threading.Lock()
            self._start()
        return self._cluster

    # Topics

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create the topics that are missing; grow partitions, update retention and record limit of the others."""
        self._open().ensure(specs)

    def topics(self) -> Mapping[str, TopicSpec]:
        """Every topic of the cluster that has the prefix."""
        return self._open().all()

    def topic_id(self, topic: str) -> str:
        """Kafka's own id of the topic. Raises UnknownTopic."""
        return self._open().identity(topic)

    # Records

    def append(self, records: Sequence[NewRecord], *, epoch: int | None = None) -> list[Position]:
        """Append durably and say where the records stand (see `EventLog.append`, and there what differs)."""
        del epoch
        self._open()
        return self._appender.append(records)

    def publisher(self, topic: str, *, epoch: int | None = None) -> KafkaPublisher:
        """A publisher of its own for one thread (see `EventLog.publisher`). Raises UnknownTopic, LogUnavailable."""
        del epoch
        return KafkaPublisher(self._open(), topic)

    def read(
        self, topic: str, partition: int, offset: int, max_records: int = 10_000, max_bytes: int = 16_000_000
    ) -> list[Record]:
        """Records from `offset` on, bounded by both limits; never waits for new ones (see `EventLog.read`)."""
        self._open()
        return self._readers.read(topic, partition, offset, max_records, max_bytes)

    def follow(self, topic: str, offsets: Mapping[int, int]) -> KafkaFollower:
        """A follower of its own for one thread (see `EventLog.follow`). Raises UnknownTopic, UnknownPartition."""
        return KafkaFollower(self._open(), topic, offsets)

    def extents(self, topic: str) -> dict[int, Extent]:
        """Begin and end of every partition. Raises UnknownTopic."""
        return self._open().extents(topic)

    # Groups

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's next offset of every partition it committed one for. Raises UnknownTopic."""
        self._open()
        return self._groups.committed(group, topic)

    def commit(self, group: str, topic: str, next_offsets: Mapping[int, int]) -> None:
        """Set a group's offsets outright (see `EventLog.commit`). Raises UnknownTopic, UnknownPartition.

        Raises:
            LogError: Other processes are members of the group: Kafka lets only members commit then.
        """
        cluster = self._open()
        if not next_offsets:
            return
        info = cluster.grown(topic, max(next_offsets))
        for number, offset in next_offsets.items():
            info.check(number)
            if offset < 0:
                raise LogError(f"next offset {offset} of group {group!r} in {topic}/{number} is below 0")
        with self._lock:
            members = [member for member in self._members if member.group == group]
        pairs = {(topic, number): offset for number, offset in next_offsets.items()}
        if not any(member.commit_for_group(pairs) for member in members):
            self._groups.commit(group, topic, next_offsets)

    def consumer(self, group: str, topics: Sequence[str], *, from_end: bool = False) -> KafkaConsumer:
        """Join a group (see `EventLog.consumer`). Raises UnknownTopic."""
        member = KafkaConsumer(self._open(), self._groups, group, topics, from_end=from_end, closed=self._left)
        with self._lock:
            self._members.add(member)
        return member

    def _left(self, member: KafkaConsumer) -> None:
        with self._lock:
            self._members.discard(member)

    # Keeping house

    def enforce_retention(self, now_ms: int | None = None) -> dict[str, int]:
        """Brokers delete by themselves: nothing to do."""
        del now_ms
        return {}

    def close(self) -> None:
        """Send what other threads still append, leave groups, let go of connections."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        with self._lock:
            members = list(self._members)
        for member in members:
            member.close()
        self._appender.close()
        self._readers.close()
        self._groups.close()
        self._cluster.close()


_LEFT_TO_THE_PARENT: list[object] = []
"""Clients of the process this one was forked from."""
