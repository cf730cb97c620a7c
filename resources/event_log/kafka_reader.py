"""Reading a slice of a partition: a few consumers that join no group, lent to one reader at a time."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from resources.event_log.kafka_cluster import KafkaCluster, base_settings, made
from resources.event_log.kafka_faults import PASSING, UNKNOWN_TOPIC, Watch
from resources.event_log.kafka_records import record_of, size_of
from resources.event_log.protocol import LogUnavailable, OffsetOutOfRange, Record

_IDLE_READERS = 4
"""Kept for the next read; more are made when more threads read at once, and closed after."""

_AT_ONCE = 1_000
"""Messages taken from the client at a time."""


class _Reader:
    """One consumer with what was heard on it."""

    def __init__(self, cluster: KafkaCluster) -> None:
        options = cluster.options
        self.watch = Watch(options)
        self.consumer: Consumer = made(
            Consumer,
            base_settings(options, self.watch)
            | {
                # It never joins: the name only has to be there.
                "group.id": cluster.full("reader"),
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
                "fetch.error.backoff.ms": 50,
                "queued.min.messages": 20_000,
                "queued.max.messages.kbytes": 32_768,
                "fetch.queue.backoff.ms": 20,
            },
            options,
        )


class KafkaReaders:
    """`EventLog.read` on Kafka. Safe for many threads."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._timeout_s = cluster.options.request_timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Reader] = []
        self._closed = False

    def read(self, topic: str, partition: int, offset: int, max_records: int, max_bytes: int) -> list[Record]:
        """Records from `offset` on, bounded by both limits; waits for nothing that is not there yet."""
        self._cluster.grown(topic, partition).check(partition)
        if max_records < 1:
            return []
        reader = self._lent()
        try:
            records = self._slice(reader, topic, partition, offset, max_records, max_bytes)
        except BaseException:
            # Whatever state it is in, the next read gets a fresh one.
            _end(reader)
            raise
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE_READERS:
                self._idle.append(reader)
                return records
        _end(reader)
        return records

    def _slice(
        self, reader: _Reader, topic: str, partition: int, offset: int, max_records: int, max_bytes: int
    ) -> list[Record]:
        name = self._cluster.full(topic)
        begin, end = self._cluster.extents(topic, [partition])[partition]
        if not begin <= offset <= end:
            raise OffsetOutOfRange(topic, partition, offset, begin, end)
        if offset == end:
            return []
        consumer = reader.consumer
        reader.watch.forget()
        consumer.assign([TopicPartition(name, partition, offset)])
        found: list[Record] = []
        total = 0
        position = offset
        deadline = time.monotonic() + self._timeout_s
        try:
            while len(found) < max_records and position < end:
                # As many as must be there: the client waits until it has them all.
                wanted = min(max_records - len(found), end - position, _AT_ONCE)
                for message in consumer.consume(wanted, 0.05):
                    error = message.error()
                    if error is not None:
                        if error.code() == KafkaError._PARTITION_EOF:
                            # The rest are no records: marks of transactions, or deleted meanwhile.
                            return found
                        self._judge(reader, error, topic, partition, position)
                        continue
                    if message.partition() != partition or message.topic() != name or (message.offset() or 0) < offset:
                        continue
                    record = record_of(message, topic)
                    total += size_of(record)
                    if found and total > max_bytes:
                        return found
                    found.append(record)
                    position = record.offset + 1
                    deadline = time.monotonic() + self._timeout_s
                if total >= max_bytes:
                    break
                if time.monotonic() > deadline:
                    if found:
                        break
                    raise reader.watch.unavailable(f"read {name}/{partition}")
                refusal = reader.watch.refusal()
                if refusal is not None:
                    raise refusal
        finally:
            with suppress(KafkaException):
                consumer.unassign()
        return found

    def _judge(self, reader: _Reader, error: KafkaError, topic: str, partition: int, position: int) -> None:
        """Raise what an error in the stream means; those that pass by themselves are waited out."""
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            begin, end = self._cluster.extents(topic, [partition])[partition]
            raise OffsetOutOfRange(topic, partition, position, begin, end)
        if error.code() in UNKNOWN_TOPIC:
            self._cluster.forget(topic)
        if error.code() not in PASSING:
            raise reader.watch.explained(error, f"read {self._cluster.full(topic)}/{partition}")

    def _lent(self) -> _Reader:
        with self._lock:
            if self._closed:
                raise LogUnavailable(f"this client of {self._cluster.options.where} is closed")
            if self._idle:
                return self._idle.pop()
        return _Reader(self._cluster)

    def close(self) -> None:
        """Close the readers that are not lent; the others close when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for reader in idle:
            _end(reader)


def _end(reader: _Reader) -> None:
    with suppress(KafkaException, RuntimeError):
        reader.consumer.close()
