"""Publishing to Kafka without waiting: a producer of its own, tuned for latency, and delivery reports for every record.

librdkafka would let a record time out alone and deliver the next one of its key. Here none times out: the publisher
looks at the oldest one's age itself, and then gives up all of them at once (see `Publisher`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from resources.event_log.kafka_cluster import KafkaCluster, base_settings, made
from resources.event_log.kafka_faults import Watch, error_of
from resources.event_log.protocol import Done, InvalidRecord, LogError, LogUnavailable, RecordTooLarge

BATCH_BYTES = 16_384
"""A request leaves as soon as one partition has this much: smaller batches, shorter waits."""
_QUEUE_RECORDS = 1_000_000
"""Of the producer. Whoever sends bounds what is under way, by less."""
_QUEUE_KBYTES = 1_048_576
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
_OF_THE_RECORD = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG})

_clock = time.perf_counter_ns


class _Sent:
    """One `send` under way. `delivered` runs for every record: it does as little as it can."""

    __slots__ = ("acknowledged", "at_s", "done", "due", "failed", "places", "publisher", "values")

    def __init__(self, publisher: KafkaPublisher, values: Sequence[bytes | None], done: Done) -> None:
        self.publisher, self.values, self.done = publisher, values, done
        self.due = len(values)
        """Acknowledgements that end it: one less with each failure."""
        self.at_s = time.monotonic()
        self.acknowledged: list[int] = []
        self.failed: dict[int, LogError] = {}
        self.places: dict[bytes | None, list[int]] | None = None

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """The delivery report of one record."""
        if error is not None:
            self.publisher.refused(self, error, message)
            return
        acknowledged = self.acknowledged
        acknowledged.append(_clock())
        if len(acknowledged) == self.due:
            self.publisher.finished(self)

    def fail(self, place: int, error: LogError) -> None:
        """One record has failed."""
        self.failed[place] = error
        self.due -= 1
        if len(self.acknowledged) == self.due:
            self.publisher.finished(self)

    def place_of(self, value: bytes | None) -> int:
        """The place of a record that failed, by its value: only failures pay for being told apart."""
        if self.places is None:
            self.places = {}
            for place in reversed(range(len(self.values))):
                self.places.setdefault(self.values[place], []).append(place)
        return self.places[value].pop()


class KafkaPublisher:
    """`Publisher` on Kafka.

    Args:
        cluster: Where.
        topic: Its name, without prefix.

    Raises:
        UnknownTopic: It was never declared.
        LogUnavailable: The cluster does not answer.
    """

    def __init__(self, cluster: KafkaCluster, topic: str) -> None:
        self._options = cluster.options
        self._topic = cluster.full(topic)
        info = cluster.known(topic)
        self._limit = info.spec.max_record_bytes
        self._watch = Watch(cluster.options)
        self._under_way: deque[_Sent] = deque()
        self._outcomes: deque[_Sent] = deque()
        self._records = 0
        self._broken: LogError | None = None
        self._closed = False
        options = cluster.options
        self._producer = made(
            Producer,
            base_settings(options, self._watch)
            | {
                "acks": "all",
                "enable.idempotence": True,
                "compression.type": "lz4",
                "partitioner": "murmur2_random",
                "linger.ms": options.linger_ms,
                "batch.size": BATCH_BYTES,
                "message.max.bytes": 100_000_000,
                "delivery.timeout.ms": 0,
                "request.timeout.ms": int(options.request_timeout_s * 1_000),
                "retry.backoff.ms": 50,
                "retry.backoff.max.ms": 1_000,
                "queue.buffering.max.messages": _QUEUE_RECORDS,
                "queue.buffering.max.kbytes": _QUEUE_KBYTES,
            },
            options,
        )
        # Connects first: what is sent meanwhile would wait for a retry.
        with suppress(KafkaException):
            self._producer.list_topics(self._topic, timeout=2.0)

    @property
    def under_way(self) -> int:
        """Records sent of which no outcome was served yet."""
        return self._records

    @property
    def broken(self) -> LogError | None:
        """Why it takes no more."""
        return self._broken

    @property
    def max_record_bytes(self) -> int:
        """The topic's limit."""
        return self._limit

    def send(
        self, keys: Sequence[str | None], values: Sequence[bytes | None], done: Done, *, partition: int | None = None
    ) -> None:
        """Send records, in this order (see `Publisher.send`)."""
        if self._broken is not None or self._closed:
            raise self._broken or LogUnavailable(f"this publisher of {self._topic} is closed")
        sent = _Sent(self, values, done)
        self._under_way.append(sent)
        self._records += len(values)
        if not values:
            self.finished(sent)
        produce, topic, limit, report = self._producer.produce, self._topic, self._limit, sent.delivered
        where = -1 if partition is None else partition
        place = 0
        try:
            for key, value in zip(keys, values, strict=True):
                # A key's characters, not its bytes: four times as many at most, and the topic has an allowance.
                if len(value or b"") + len(key or "") > limit:
                    sent.fail(place, RecordTooLarge(f"a record is over the limit of {topic}, {limit} bytes"))
                else:
                    try:
                        produce(topic, value, key, where, report)
                    except UnicodeEncodeError as fault:
                        sent.fail(place, InvalidRecord(f"a key of a record for {topic} is no text: {fault}"))
                place += 1
        except (BufferError, KafkaException) as fault:
            error = self._explained(error_of(fault)) if isinstance(fault, KafkaException) else None
            why = error or LogUnavailable(f"append to {topic}: the producer's queue is full")
            for rest in range(place, len(values)):
                sent.fail(rest, why)
            self._break(why)

    def serve(self, timeout_s: float = 0.0) -> None:
        """Call `done` of what has its outcome by now; waits at most `timeout_s` for a first one."""
        self._producer.poll(timeout_s)
        if self._under_way and self._broken is None:
            age = time.monotonic() - self._under_way[0].at_s
            if age > self._options.delivery_timeout_s:
                why = self._watch.unavailable(f"append to {self._topic}")
                self._break(LogUnavailable(f"{why} (not acknowledged within {self._options.delivery_timeout_s:g} s)"))
            elif age > 1.0 and (refusal := self._watch.refusal()) is not None:
                self._break(refusal)
        for _ in range(len(self._outcomes)):
            sent = self._outcomes.popleft()
            self._records -= len(sent.values)
            sent.done(sent.failed, sent.acknowledged)

    def flush(self, timeout_s: float) -> bool:
        """Serve until nothing is under way; whether that was reached in time."""
        deadline = time.monotonic() + timeout_s
        while self._records and time.monotonic() < deadline:
            self.serve(0.01)
        return not self._records

    def close(self) -> None:
        """Fail what is still under way, and end."""
        if self._closed:
            return
        self._closed = True
        if self._under_way:
            self._break(LogUnavailable(f"this publisher of {self._topic} is closed"))
        self.serve()

    def finished(self, sent: _Sent) -> None:
        """All records of one `send` have their outcome, which `serve` tells."""
        under_way = self._under_way
        if under_way[0] is sent:
            under_way.popleft()
        else:
            under_way.remove(sent)
        self._outcomes.append(sent)

    def refused(self, sent: _Sent, error: KafkaError, message: Message) -> None:
        """A record was not delivered."""
        value = message.value()
        place = sent.place_of(value)  # pyright: ignore[reportArgumentType]
        if error.code() in _OF_THE_RECORD:
            sent.fail(place, self._watch.explained(error, f"append to {self._topic}"))
            return
        why = self._broken or self._explained(error)
        sent.fail(place, why)
        if self._broken is None:
            self._broken = why
            self._purge()

    def _explained(self, error: KafkaError) -> LogError:
        doing = f"append to {self._topic}"
        if error.fatal() or error.code() in (*_PURGED, KafkaError._FATAL):
            return LogUnavailable(f"{doing}: the producer has to be made anew: {error.str()}")
        return self._watch.explained(error, doing)

    def _break(self, why: LogError) -> None:
        self._broken = self._broken or why
        self._purge()
        deadline = time.monotonic() + 5.0
        while self._under_way and time.monotonic() < deadline:
            self._producer.poll(0.05)
        for sent in list(self._under_way):
            # librdkafka owes these reports and did not give them: nobody waits for ever.
            for place in range(len(sent.values)):
                sent.failed.setdefault(place, self._broken or why)
            self.finished(sent)

    def _purge(self) -> None:
        with suppress(KafkaException):
            self._producer.purge(in_queue=True, in_flight=True, blocking=False)
