"""What groups committed, seen and set from outside: by a client for each group that never joins it.

The admin client's calls for this end the whole process when a coordinator is just moving or starting (librdkafka 2.16,
its issue 5040), so they are not used.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from resources.event_log.kafka_cluster import KafkaCluster, base_settings, made
from resources.event_log.kafka_faults import PASSING, Watch, error_of
from resources.event_log.protocol import LogError, LogUnavailable

_CLIENTS = 16
"""Groups whose clients are kept: a platform has a handful, and each costs a connection."""

_HELD_BY_OTHERS = frozenset(
    {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS}
)


class _Client:
    def __init__(self, cluster: KafkaCluster, group: str) -> None:
        self.lock = threading.Lock()
        self.watch = Watch(cluster.options)
        self.consumer: Consumer = made(
            Consumer,
            base_settings(cluster.options, self.watch)
            | {"group.id": cluster.full(group), "enable.auto.commit": False, "auto.offset.reset": "error"},
            cluster.options,
        )


class KafkaGroups:
    """`EventLog.committed` and `EventLog.commit` on Kafka. Safe for many threads."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._closed = False

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """A group's next offsets in a topic. Raises UnknownTopic."""
        info = self._cluster.known(topic)
        wanted = [TopicPartition(self._cluster.full(topic), number) for number in range(info.spec.partitions)]
        found = self._ask(group, f"committed offsets of {topic}", lambda c, s: c.committed(wanted, timeout=s))
        return {
            where.partition: where.offset
            for where in sorted(found, key=lambda where: where.partition)
            if where.error is None and where.offset >= 0
        }

    def commit(self, group: str, topic: str, next_offsets: Mapping[int, int]) -> None:
        """Set the offsets of a group that nobody is a member of now.

        Raises:
            LogError: Members hold its partitions; only they can commit.
        """
        wanted = [TopicPartition(self._cluster.full(topic), number, offset) for number, offset in next_offsets.items()]
        self._ask(
            group,
            f"commit offsets of {topic}",
            lambda consumer, _: consumer.commit(offsets=wanted, asynchronous=False) or [],
        )

    def _ask(
        self, group: str, doing: str, ask: Callable[[Consumer, float], list[TopicPartition]]
    ) -> list[TopicPartition]:
        deadline = time.monotonic() + self._cluster.options.request_timeout_s
        doing = f"{doing}, group {self._cluster.full(group)}"
        client = self._client(group)
        with client.lock:
            client.consumer.poll(0)
            client.watch.forget()
            while True:
                try:
                    # In steps: a refused password is told at once, not after the whole time.
                    found = ask(client.consumer, max(0.05, min(1.0, deadline - time.monotonic())))
                    error = next((where.error for where in found if where.error is not None), None)
                except KafkaException as raised:
                    found, error = [], error_of(raised)
                except RuntimeError:
                    raise LogUnavailable(f"this client of {self._cluster.options.where} is closed") from None
                if error is None:
                    return found
                if error.code() in _HELD_BY_OTHERS:
                    raise LogError(
                        f"offsets of group {self._cluster.full(group)!r} cannot be set while other processes read in "
                        "it: stop them first"
                    )
                client.consumer.poll(0)
                refusal = client.watch.refusal()
                if refusal is not None:
                    raise refusal
                if error.code() not in PASSING | {KafkaError._TIMED_OUT} or time.monotonic() > deadline:
                    raise client.watch.explained(error, doing)
                time.sleep(0.05)

    def _client(self, group: str) -> _Client:
        with self._lock:
            if self._closed:
                raise LogUnavailable(f"this client of {self._cluster.options.where} is closed")
            client = self._clients.get(group)
            if client is None:
                client = self._clients[group] = _Client(self._cluster, group)
            self._clients.move_to_end(group)
            oldest = next(iter(self._clients)) if len(self._clients) > _CLIENTS else None
            dropped = self._clients.pop(oldest) if oldest is not None else None
        if dropped is not None:
            _end(dropped)
        return client

    def close(self) -> None:
        """Close the clients."""
        with self._lock:
            self._closed = True
            clients, self._clients = list(self._clients.values()), OrderedDict()
        for client in clients:
            _end(client)


def _end(client: _Client) -> None:
    with client.lock, suppress(KafkaException, RuntimeError):
        client.consumer.close()
