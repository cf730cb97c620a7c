"""Appending to Kafka: one idempotent producer a process, delivery reports for every record, a thread that serves them.

Appends of many threads gather in the producer for a few milliseconds and go out together; nobody flushes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from resources.event_log.kafka_cluster import BATCH_BYTES, KafkaCluster, TopicInfo, base_settings, made
from resources.event_log.kafka_faults import DENIED, UNKNOWN_TOPIC, Watch, error_of
from resources.event_log.protocol import (
    InvalidRecord,
    LogError,
    LogUnavailable,
    NewRecord,
    Position,
    RecordTooLarge,
)

_QUEUE_KBYTES = 262_144
"""Most that waits to be sent, of all threads together; beyond, appends wait for room."""

_LARGEST_MESSAGE = 100_000_000
"""The producer's own limit, out of the way: each topic has its own, and it is checked before."""


def _is_offset(offset: int | None) -> bool:
    """Whether a delivery report says where its record is."""
    return offset is not None and offset >= 0


class _Append:
    """One caller's records under way: counts delivery reports and wakes the caller after the last."""

    __slots__ = ("_done", "_left", "_lock", "error", "positions")

    def __init__(self, count: int) -> None:
        self.positions: list[Position | None] = [None] * count
        self.error: KafkaError | None = None
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()

    def report(self, index: int) -> Callable[[KafkaError | None, Message], None]:
        """The delivery report of one record; called in the thread that serves the producer."""

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self.positions[index] = Position(message.partition(), message.offset())  # pyright: ignore[reportArgumentType]
            elif self.error is None:
                self.error = error
            with self._lock:
                self._left -= 1
                if self._left > 0:
                    return
            self._done.set()

        return delivered

    def wait(self, seconds: float) -> bool:
        """Whether every report is in."""
        return self._done.wait(seconds)


class _Client:
    """A producer, and what ended it: after a fatal error (librdkafka's word) only a new one can go on."""

    __slots__ = ("fatal", "producer")

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.fatal: KafkaError | None = None


class KafkaAppender:
    """`EventLog.append` on Kafka. Safe for many threads."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._options = cluster.options
        self._watch = Watch(cluster.options)
        self._lock = threading.Lock()
        self._client: _Client | None = None
        self._closed = threading.Event()

    def append(self, records: Sequence[NewRecord]) -> list[Position]:
        """Append and wait for every acknowledgement (see `EventLog.append`).

        All records are checked before the first is sent. From then on each is acknowledged by itself: where this
        raises LogUnavailable, some may be in the log.
        """
        if not records:
            return []
        topics = {name: self._cluster.known(name) for name in {record.topic for record in records}}
        prepared = [self._prepare(topics[record.topic], record) for record in records]
        under_way = _Append(len(prepared))
        deadline = time.monotonic() + self._options.delivery_timeout_s + 2.0
        client = self._running(prepared[0]["topic"])
        self._watch.forget()
        for index, arguments in enumerate(prepared):
            self._send(client, arguments, under_way.report(index), deadline)
        doing = f"append to {', '.join(sorted({self._cluster.full(record.topic) for record in records}))}"
        while not under_way.wait(0.5):
            if time.monotonic() > deadline or self._closed.is_set():
                raise self._watch.unavailable(doing)
            refusal = self._watch.refusal()
            if refusal is not None:
                raise refusal
            if client.fatal is not None:
                raise self._explained(client, client.fatal, doing, topics)
        if under_way.error is not None:
            raise self._explained(client, client.fatal or under_way.error, doing, topics)
        if not all(position is not None and _is_offset(position.offset) for position in under_way.positions):
            # What a broker calls a duplicate has no offset: that the first one is there is but the client's guess.
            raise LogUnavailable(f"{doing}: acknowledged without an offset")
        return under_way.positions  # pyright: ignore[reportReturnType]

    def _explained(self, client: _Client, error: KafkaError, doing: str, topics: dict[str, TopicInfo]) -> LogError:
        if error.code() in UNKNOWN_TOPIC | {KafkaError._UNKNOWN_PARTITION}:
            for name in topics:
                self._cluster.forget(name)
        if error.fatal() or error.code() in (KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            self._replace(client)
            if error.code() in DENIED:
                return self._watch.explained(error, doing)
            return LogUnavailable(f"{doing}: the producer had to be made anew: {error.str()}")
        if error.code() in (KafkaError._MSG_TIMED_OUT, KafkaError.REQUEST_TIMED_OUT, KafkaError._TIMED_OUT):
            why = self._watch.unavailable(doing, error)
            return LogUnavailable(f"{why} (not acknowledged within {self._options.delivery_timeout_s:g} s)")
        return self._watch.explained(error, doing)

    def _prepare(self, topic: TopicInfo, record: NewRecord) -> dict[str, Any]:
        """Everything that can be refused before anything is sent."""
        try:
            key = None if record.key is None else record.key.encode()
            headers = [(name.encode().decode(), text.encode()) for name, text in record.headers.items()]
            size = sum(len(name.encode()) + len(text) for name, text in headers)
        except (UnicodeEncodeError, AttributeError, TypeError) as error:
            raise InvalidRecord(f"a key or header of a record for {record.topic!r} is no text: {error}") from error
        value = None if record.value is None else bytes(record.value)
        size += len(key or b"") + len(value or b"")
        if size > topic.spec.max_record_bytes:
            raise RecordTooLarge(
                f"a record of {size} bytes is over the limit of {record.topic}, {topic.spec.max_record_bytes} bytes"
            )
        arguments: dict[str, Any] = {"topic": self._cluster.full(record.topic), "key": key, "value": value}
        if headers:
            arguments["headers"] = headers
        if record.partition is not None:
            topic.check(record.partition)
            arguments["partition"] = record.partition
        if record.timestamp_ms is not None:
            # librdkafka reads 0 as now, and brokers know no time before 1970.
            if not 0 < record.timestamp_ms < 1 << 63:
                raise InvalidRecord(
                    f"timestamp_ms {record.timestamp_ms} of a record for {record.topic!r} is not in 1..2^63-1"
                )
            arguments["timestamp"] = record.timestamp_ms
        return arguments

    def _send(self, client: _Client, arguments: dict[str, Any], report: Callable[..., None], deadline: float) -> None:
        producer = client.producer
        while True:
            try:
                producer.produce(**arguments, on_delivery=report)
                return
            except BufferError:
                # Full with what others append: it empties as the broker acknowledges.
                if time.monotonic() > deadline:
                    raise self._watch.unavailable(f"append to {arguments['topic']}: the queue is full") from None
                time.sleep(0.02)
            except KafkaException as raised:
                error = error_of(raised)
                if error.code() == KafkaError._UNKNOWN_PARTITION and time.monotonic() < deadline:
                    # The partition is there, as was checked, and new to this producer.
                    self._refresh(producer, arguments["topic"])
                    continue
                if error.code() == KafkaError._QUEUE_FULL and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                raise self._explained(client, error, f"append to {arguments['topic']}", {}) from None

    def _refresh(self, producer: Producer, full_name: str) -> None:
        try:
            producer.list_topics(full_name, timeout=self._options.request_timeout_s)
        except KafkaException as raised:
            raise self._watch.explained(error_of(raised), f"append to {full_name}") from None
        time.sleep(0.02)

    def _running(self, full_name: str) -> _Client:
        with self._lock:
            if self._closed.is_set():
                raise LogUnavailable(f"this client of {self._options.where} is closed")
            client = self._client
            if client is None:
                options = self._options
                producer: Producer = made(
                    Producer,
                    base_settings(options, self._watch)
                    | {
                        "acks": "all",
                        "enable.idempotence": True,
                        # With more, a partition that is new to this producer may refuse its first batch (its leader is
                        # not ready) and take the second: a broker accepts any sequence of a producer it knows nothing
                        # of. The first one's retry is then taken for a duplicate and acknowledged, and is nowhere.
                        "max.in.flight.requests.per.connection": 1,
                        "compression.type": "lz4",
                        "partitioner": "murmur2_random",
                        # Whoever appends waits for it, and what waits meanwhile goes with the next request anyway:
                        # lingering cost two milliseconds an append, and 2,000 at once were no faster for it.
                        "linger.ms": 0,
                        "sticky.partitioning.linger.ms": 1,
                        "batch.size": BATCH_BYTES,
                        "message.max.bytes": _LARGEST_MESSAGE,
                        "delivery.timeout.ms": int(options.delivery_timeout_s * 1_000),
                        "request.timeout.ms": int(min(options.request_timeout_s, options.delivery_timeout_s) * 1_000),
                        "retry.backoff.ms": 50,
                        "retry.backoff.max.ms": 1_000,
                        "queue.buffering.max.kbytes": _QUEUE_KBYTES,
                    },
                    options,
                )
                # Connects first: a producer that is given its first record meanwhile loses a second to a retry.
                with suppress(KafkaException):
                    producer.list_topics(full_name, timeout=2.0)
                client = self._client = _Client(producer)
                threading.Thread(target=self._serve, args=(client,), name="kafka deliveries", daemon=True).start()
            return client

    def _serve(self, client: _Client) -> None:
        """Serve delivery reports until the log is closed, or the producer was replaced and has none left."""
        while not self._closed.is_set() and (self._client is client or len(client.producer)):
            try:
                client.producer.poll(0.2)
            except KafkaException as raised:
                client.fatal = error_of(raised)
                self._replace(client)
                self._closed.wait(0.05)

    def _replace(self, client: _Client) -> None:
        with self._lock:
            if self._client is client:
                self._client = None

    def close(self, seconds: float = 5.0) -> None:
        """Send what other threads still append, then end."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            with suppress(KafkaException):
                client.producer.flush(seconds)
        self._closed.set()
