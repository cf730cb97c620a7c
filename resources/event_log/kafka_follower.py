"""Following partitions on Kafka: one consumer for long, without a group, that has fetched ahead what is asked for next.

A bounded read (kafka_reader.py) pays for a question to the broker and a fetch of its own, some 5 to 15 ms; here the
client library fetches all partitions in one request after the other, and taking what came is a matter of microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import NoneType

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from resources.event_log.kafka_cluster import KafkaCluster, base_settings, made
from resources.event_log.kafka_faults import PASSING, UNKNOWN_TOPIC, Watch, error_of
from resources.event_log.kafka_records import record_of
from resources.event_log.protocol import LogError, LogUnavailable, OffsetOutOfRange, Record, Slice

_QUEUE_RECORDS = 20_000
"""A partition: as soon as so many wait, no more are fetched."""
_QUEUE_KBYTES = 16_384
"""Of all partitions together; what a fetch under way brings comes on top, a megabyte each."""


class KafkaFollower:
    """`Follower` on Kafka.

    Args:
        cluster: Where.
        topic: Its name, without prefix.
        offsets: Partition -> offset to begin with.

    Raises:
        UnknownTopic, UnknownPartition: As said.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, offsets: Mapping[int, int]) -> None:
        self._cluster, self._topic, self._name = cluster, topic, cluster.full(topic)
        info = cluster.known(topic)
        for partition in offsets:
            (info if partition < info.spec.partitions else cluster.grown(topic, partition)).check(partition)
        options = cluster.options
        self._watch = Watch(options)
        self._closed = False
        self._next = dict(offsets)
        self._eof: dict[int, int] = {}
        self._lost: set[int] = set()
        self._fault: LogError | None = None
        self._consumer: Consumer = made(
            Consumer,
            base_settings(options, self._watch)
            | {
                # It never joins: the name only has to be there.
                "group.id": cluster.full("follower"),
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                # The broker answers as soon as there is something; this is how long it holds a question otherwise.
                "fetch.wait.max.ms": 100,
                "fetch.error.backoff.ms": 100,
                "fetch.queue.backoff.ms": 10,
                "queued.min.messages": _QUEUE_RECORDS,
                "queued.max.messages.kbytes": _QUEUE_KBYTES,
            },
            options,
        )
        self._consumer.assign([TopicPartition(self._name, number, offset) for number, offset in offsets.items()])

    def take(self, max_records: int, timeout_s: float = 0.0) -> Slice:
        """The next records of all partitions, as many as are there (see `Follower.take`)."""
        if self._closed:
            raise LogUnavailable(f"this follower of {self._name} is closed")
        consumer = self._consumer
        # With a wait it would wait for all of them; without one it takes what is there.
        messages = consumer.consume(max_records, 0.0)
        if not messages and timeout_s > 0 and not self._lost:
            first = consumer.poll(timeout_s)
            if first is not None:
                messages = [first, *consumer.consume(max_records - 1, 0.0)] if max_records > 1 else [first]
        errors = list(map(Message.error, messages))
        # By type: an error of Kafka's refuses to be compared with None.
        if not set(map(type, errors)) <= {NoneType}:
            for message, error in zip(messages, errors, strict=True):
                if error is not None:
                    self._hear(error, message)
            messages = [message for message, error in zip(messages, errors, strict=True) if error is None]
        if messages:
            taken = self._sliced(messages)
            if len(taken):
                return taken
        self._tell()
        return _slice([], self._topic)

    def _sliced(self, messages: list[Message]) -> Slice:
        # Stable, so each partition's stay in their order; many fetches bring those of one alone.
        messages.sort(key=Message.partition)  # pyright: ignore[reportArgumentType, reportCallIssue]
        found = _slice(messages, self._topic)
        firsts = dict(zip(reversed(found.partitions), reversed(found.offsets), strict=True))
        ahead = self._next
        if any(offset < ahead.get(partition, offset + 1) for partition, offset in firsts.items()):
            # Fetched before a seek: librdkafka drops them, and nothing here depends on it.
            kept = [m for m in messages if (m.offset() or 0) >= ahead.get(m.partition() or 0, 1 << 62)]
            found = _slice(kept, self._topic)
        for partition, offset in dict(zip(found.partitions, found.offsets, strict=True)).items():
            ahead[partition] = offset + 1
        return found

    def _hear(self, error: KafkaError, message: Message) -> None:
        code, partition = error.code(), message.partition()
        if code == KafkaError._PARTITION_EOF:
            self._eof[partition or 0] = message.offset() or 0
        elif code == KafkaError._AUTO_OFFSET_RESET and partition is not None and partition >= 0:
            self._lost.add(partition)
        elif code not in PASSING:
            if code in UNKNOWN_TOPIC:
                self._cluster.forget(self._topic)
            self._fault = self._watch.explained(error, f"follow {self._name}/{partition}")

    def _tell(self) -> None:
        """Raise what was heard, once what came before it was given."""
        for partition in sorted(self._lost):
            offset = self._next[partition]
            extent = self._cluster.extents(self._topic, [partition])[partition]
            if extent.begin <= offset <= extent.end:
                # It was a broker that had not caught up yet, or lost its memory for a moment.
                self.seek(partition, offset)
                continue
            raise OffsetOutOfRange(self._topic, partition, offset, extent.begin, extent.end)
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        refusal = self._watch.refusal()
        if refusal is not None or self._watch.down:
            error = self._watch.unavailable(f"follow {self._name}")
            self._watch.forget()
            raise error

    def seek(self, partition: int, offset: int) -> None:
        """Go on from an offset, or follow one more partition (see `Follower.seek`)."""
        self._cluster.grown(self._topic, partition).check(partition)
        where = TopicPartition(self._name, partition, offset)
        try:
            # Anew rather than `seek`, which a partition that has stopped, or is not read yet, refuses.
            if partition in self._next:
                self._consumer.incremental_unassign([where])
            self._consumer.incremental_assign([where])
        except KafkaException as raised:
            raise self._watch.explained(error_of(raised), f"follow {self._name}/{partition}") from None
        self._next[partition] = offset
        self._lost.discard(partition)
        self._eof.pop(partition, None)

    @property
    def next_offsets(self) -> Mapping[int, int]:
        """Partition -> offset of the next record that `take` gives."""
        return self._next

    @property
    def ends(self) -> Mapping[int, int]:
        """Partition -> its end as the last fetch said."""
        found: dict[int, int] = {}
        for partition in list(self._next):
            with suppress(KafkaException, RuntimeError):
                extent = self._consumer.get_watermark_offsets(TopicPartition(self._name, partition), cached=True)
                if extent is not None and extent[1] >= 0:
                    found[partition] = extent[1]
        return found

    @property
    def at_end(self) -> bool:
        """Whether everything was taken, as of the last fetch of each partition."""
        eof = self._eof
        return all(eof.get(partition) == offset for partition, offset in self._next.items())

    def close(self) -> None:
        """End."""
        if self._closed:
            return
        self._closed = True
        with suppress(KafkaException, RuntimeError):
            self._consumer.close()


def _slice(messages: list[Message], topic: str) -> Slice:
    def record(place: int) -> Record:
        return record_of(messages[place], topic)

    # By `map`: a call of a method from a comprehension takes twice as long.
    return Slice(
        list(map(Message.partition, messages)),  # pyright: ignore[reportArgumentType]
        list(map(Message.offset, messages)),  # pyright: ignore[reportArgumentType]
        list(map(Message.value, messages)),  # pyright: ignore[reportArgumentType]
        [stamp for _, stamp in map(Message.timestamp, messages)],
        record,
    )
