"""What a Kafka cluster says of itself: topics, their identities and limits, extents, and what groups committed."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    NewPartitions,  # pyright: ignore[reportPrivateImportUsage]
    NewTopic,  # pyright: ignore[reportPrivateImportUsage]
    OffsetSpec,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from resources.event_log.kafka_faults import DENIED, PASSING, UNKNOWN_TOPIC, Watch, error_of
from resources.event_log.kafka_options import MECHANISM, USERNAME, KafkaOptions
from resources.event_log.kafka_tokens import Tokens
from resources.event_log.protocol import Extent, LogError, LogUnavailable, TopicSpec, UnknownPartition, UnknownTopic

K = TypeVar("K")

BATCH_BYTES = 200_000
"""Most that a producer puts into one batch before compression, unless a single record is larger."""

ALLOWANCE_BYTES = 262_144
"""What a topic's `max.message.bytes` is above a record's limit. The broker applies it to whole batches with their
framing: without the allowance two records within the limit would be refused together."""

_INTERNAL = "__"
"""Topics of Kafka's own begin so."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the cluster knows it."""

    spec: TopicSpec
    id: str
    leaders: Mapping[int, str]
    """Partition -> id of the broker that leads it; one that nobody leads is left out."""

    @property
    def led(self) -> bool:
        """Whether every partition has a leader: it can be written and read."""
        return len(self.leaders) == self.spec.partitions

    def check(self, partition: int) -> None:
        """Raise UnknownPartition unless the topic has this one."""
        if not 0 <= partition < self.spec.partitions:
            raise UnknownPartition(f"{self.spec.name} has partitions 0..{self.spec.partitions - 1}, not {partition}")


def base_settings(options: KafkaOptions, watch: Watch) -> dict[str, Any]:
    """Settings of every client: who, where, quiet, and quick to come back after an outage."""
    return {
        "bootstrap.servers": options.servers,
        **options.security,
        **_login(options, watch),
        "client.id": "geo-assets",
        "error_cb": watch.heard,
        "logger": watch,
        # A restarted broker is found within a second of its being up; the default grows to ten.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1_000,
        "socket.connection.setup.timeout.ms": 5_000,
        "socket.timeout.ms": max(10_000, int(options.request_timeout_s * 1_000)),
        "socket.keepalive.enable": True,
        "socket.nagle.disable": True,
        "topic.metadata.refresh.interval.ms": int(options.metadata_refresh_s * 1_000),
        "metadata.max.age.ms": max(int(options.metadata_refresh_s * 3_000), 30_000),
    }


def _login(options: KafkaOptions, watch: Watch) -> dict[str, Any]:
    """What a client asks for tokens, where it logs in with one. Raises LogUnavailable when there is none."""
    if options.token is None:
        return {}
    tokens = Tokens(options.token, watch)
    tokens.prepare()
    return {"oauth_cb": tokens}


class KafkaCluster:
    """Questions to the cluster that are not about reading or writing records. Safe for many threads."""

    def __init__(self, options: KafkaOptions) -> None:
        self.options = options
        self.watch = Watch(options)
        self._lock = threading.Lock()
        self._admin: AdminClient | None = None
        self._known: dict[str, tuple[float, TopicInfo]] = {}
        self._declared: dict[str, TopicSpec] = {}

    # Names

    def full(self, name: str) -> str:
        """A topic's or group's name on the cluster."""
        return self.options.topic_prefix + name

    # Topics

    def ensure(self, specs: Sequence[TopicSpec]) -> None:
        """Create what is missing, grow partitions, update retention and limit (see `EventLog.ensure_topics`).

        Raises:
            LogError: Topics are missing and this user may not create them.
        """
        for spec in specs:
            if not spec.name or spec.partitions < 1 or spec.retention_ms < 0 or spec.max_record_bytes < 1:
                raise LogError(f"{spec}: a topic needs a name, at least 1 partition, retention >= 0 and a limit >= 1")
        self._declared |= {spec.name: spec for spec in specs}
        present = self.describe([spec.name for spec in specs])
        missing = [spec for spec in specs if present[spec.name] is None]
        if missing:
            self._create(missing)
        grow: list[TopicSpec] = []
        alter: list[TopicSpec] = []
        for spec in specs:
            info = present[spec.name]
            if info is None:
                continue
            if info.spec.partitions < spec.partitions:
                grow.append(spec)
            if (info.spec.retention_ms, info.spec.max_record_bytes) != (spec.retention_ms, spec.max_record_bytes):
                alter.append(spec)
        if grow:
            grow = self._grow(grow)
        if alter:
            self._alter(alter)
            for spec in alter:
                self.forget(spec.name)
        if missing or grow or alter:
            self._settle(missing + grow)

    def _create(self, specs: Sequence[TopicSpec]) -> None:
        copies = self.options.replication_factor or min(3, self._brokers())
        insync = self.options.min_insync_replicas or (2 if copies >= 3 else 1)
        topics = [
            NewTopic(
                self.full(spec.name),
                num_partitions=spec.partitions,
                replication_factor=copies,
                config={
                    "cleanup.policy": "delete",
                    "retention.ms": str(spec.retention_ms),
                    "max.message.bytes": str(spec.max_record_bytes + ALLOWANCE_BYTES),
                    "min.insync.replicas": str(insync),
                },
            )
            for spec in specs
        ]
        answers = self._ask("create topics", lambda admin, t: admin.create_topics(topics, request_timeout=t))
        denied: list[str] = []
        for spec in specs:
            error = _error(answers[self.full(spec.name)])
            if error is None or error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.code() in DENIED:
                denied.append(self.full(spec.name))
            elif error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                raise LogError(
                    f"topic {self.full(spec.name)} cannot have {copies} copies "
                    f"(GEO_ASSETS_KAFKA_REPLICATION_FACTOR) on {self.options.where}: {error.str()}"
                )
            else:
                raise self.watch.explained(error, f"create topic {self.full(spec.name)}")
        if denied:
            user = f"user {self.options.security.get('sasl.username', '')!r} ({USERNAME})"
            if self.options.token is not None:
                user = f"this role ({MECHANISM})"
            raise LogError(
                f"topics {', '.join(denied)} are missing on {self.options.where} and {user} may "
                "not create them: have them created, or let this user do it"
            )

    def _grow(self, specs: Sequence[TopicSpec]) -> list[TopicSpec]:
        """Add partitions; the topics that get them. Fewer than declared work as well: who runs the cluster decides."""
        wanted = [NewPartitions(self.full(spec.name), spec.partitions) for spec in specs]
        answers = self._ask("add partitions", lambda admin, t: admin.create_partitions(wanted, request_timeout=t))
        grown: list[TopicSpec] = []
        for spec in specs:
            error = _error(answers[self.full(spec.name)])
            if error is None:
                grown.append(spec)
            elif error.code() not in DENIED | {KafkaError.INVALID_PARTITIONS}:
                raise self.watch.explained(error, f"add partitions to {self.full(spec.name)}")
        return grown

    def _alter(self, specs: Sequence[TopicSpec]) -> None:
        def entry(name: str, value: int) -> ConfigEntry:
            return ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)

        wanted = [
            ConfigResource(
                ResourceType.TOPIC,
                self.full(spec.name),
                incremental_configs=[
                    entry("retention.ms", spec.retention_ms),
                    entry("max.message.bytes", spec.max_record_bytes + ALLOWANCE_BYTES),
                ],
            )
            for spec in specs
        ]
        answers = self._ask(
            "update topics", lambda admin, t: admin.incremental_alter_configs(wanted, request_timeout=t)
        )
        for resource, answer in answers.items():
            error = _error(answer)
            if error is not None and error.code() not in DENIED:
                raise self.watch.explained(error, f"update topic {resource.name}")

    def _settle(self, specs: Sequence[TopicSpec]) -> None:
        """Wait until the cluster shows what it acknowledged: its brokers learn of it one after the other."""
        deadline = time.monotonic() + self.options.request_timeout_s
        names = [spec.name for spec in specs]
        while names:
            found = self.describe(names)
            waits = [
                spec.name
                for spec in specs
                if spec.name in names
                and ((info := found[spec.name]) is None or not info.led or info.spec.partitions < spec.partitions)
            ]
            names = waits
            if not names or time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def _brokers(self) -> int:
        cluster = self._ask("list brokers", lambda admin, t: {"": admin.describe_cluster(request_timeout=t)})[""]
        error = _error(cluster)
        if error is not None:
            raise self.watch.explained(error, "list brokers")
        return max(1, len(cluster.nodes))

    def describe(self, names: Sequence[str]) -> dict[str, TopicInfo | None]:
        """Topics as the cluster knows them now; None where it knows none."""
        full = [self.full(name) for name in names]
        if not full:
            return {}
        described = self._described(full)
        present = [name for name, answer in described.items() if answer is not None]
        configs = self._configs(present)
        found: dict[str, TopicInfo | None] = {}
        now = time.monotonic()
        for name in names:
            answer = described[self.full(name)]
            if answer is None or self.full(name) not in configs:
                found[name] = None
                self._known.pop(name, None)
                continue
            info = TopicInfo(
                self._spec(name, len(answer.partitions), configs[self.full(name)]),
                _id(answer.topic_id),
                {part.id: str(part.leader.id) for part in answer.partitions if part.leader is not None},
            )
            found[name] = info
            self._known[name] = (now, info)
        return found

    def _described(self, full: Sequence[str]) -> dict[str, Any]:
        """Descriptions by full name; None of an unknown topic."""
        deadline = time.monotonic() + self.options.request_timeout_s
        while True:
            answers = self._ask(
                "describe topics",
                lambda admin, t: admin.describe_topics(TopicCollection(list(full)), request_timeout=t),
            )
            found: dict[str, Any] = {}
            waits = False
            for name, answer in answers.items():
                error = _error(answer)
                if error is not None and error.code() in UNKNOWN_TOPIC:
                    found[name] = None
                elif error is not None and error.code() not in PASSING:
                    raise self.watch.explained(error, f"describe topic {name}")
                elif error is not None:
                    waits = True
                else:
                    found[name] = answer
            if not waits:
                return found
            if time.monotonic() > deadline:
                raise LogUnavailable(f"{self.options.where} does not find {', '.join(sorted(full))} now")
            time.sleep(0.05)

    def _configs(self, full: Sequence[str]) -> dict[str, Mapping[str, str]]:
        """Settings of topics by full name. A user who may not see them goes by what was declared."""
        if not full:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in full]
        answers = self._ask("read topics", lambda admin, t: admin.describe_configs(resources, request_timeout=t))
        found: dict[str, Mapping[str, str]] = {}
        for resource, answer in answers.items():
            error = _error(answer)
            if error is None:
                found[resource.name] = {name: entry.value for name, entry in answer.items()}
            elif error.code() in DENIED:
                found[resource.name] = {}
            elif error.code() not in UNKNOWN_TOPIC:
                raise self.watch.explained(error, f"read settings of topic {resource.name}")
        return found

    def _spec(self, name: str, partitions: int, config: Mapping[str, str]) -> TopicSpec:
        declared = self._declared.get(name, TopicSpec(name))
        retention = int(config.get("retention.ms", declared.retention_ms))
        largest = config.get("max.message.bytes")
        if largest is None:
            limit = declared.max_record_bytes
        else:
            # A topic that somebody else made with a small limit: half of it leaves room for what frames a record.
            limit = int(largest) - ALLOWANCE_BYTES if int(largest) > ALLOWANCE_BYTES else max(1, int(largest) // 2)
        # Kafka's "for ever" is -1.
        return TopicSpec(name, partitions, retention if retention >= 0 else (1 << 63) - 1, limit)

    def known(self, name: str, *, max_age_s: float | None = None) -> TopicInfo:
        """A topic, looked up anew when what is known of it is too old. In an outage what is known is good enough.

        Raises:
            UnknownTopic: The cluster has none of that name.
        """
        age = self.options.metadata_refresh_s if max_age_s is None else max_age_s
        stamped = self._known.get(name)
        if stamped is not None and time.monotonic() - stamped[0] <= age:
            return stamped[1]
        try:
            info = self.describe([name])[name]
        except LogUnavailable:
            if stamped is None or max_age_s is not None:
                raise
            # Not asked again by each record: whoever writes or reads finds out by itself.
            self._known[name] = (time.monotonic(), stamped[1])
            return stamped[1]
        if info is None:
            raise self.unknown(name)
        return info

    def grown(self, name: str, partition: int) -> TopicInfo:
        """A topic, looked up anew when this partition would be a new one. Raises UnknownTopic."""
        info = self.known(name)
        return info if partition < info.spec.partitions else self.known(name, max_age_s=0.0)

    def unknown(self, name: str) -> UnknownTopic:
        """The error of a topic that is not there."""
        return UnknownTopic(f"topic {self.full(name)!r} was never declared on {self.options.where}")

    def forget(self, name: str) -> None:
        """Look a topic up anew the next time."""
        self._known.pop(name, None)

    def identity(self, name: str) -> str:
        """A topic's id. Raises UnknownTopic."""
        answer = self._described([self.full(name)])[self.full(name)]
        if answer is None:
            self.forget(name)
            raise self.unknown(name)
        return _id(answer.topic_id)

    def all(self) -> dict[str, TopicSpec]:
        """Every topic with this prefix, but Kafka's own."""
        prefix = self.options.topic_prefix
        listed = self._listed()
        partitions = {
            name: len(topic.partitions)
            for name, topic in listed.items()
            if name.startswith(prefix) and not name.startswith(_INTERNAL) and topic.error is None
        }
        return {
            name[len(prefix) :]: self._spec(name[len(prefix) :], partitions[name], config)
            for name, config in self._configs(list(partitions)).items()
        }

    def _listed(self) -> Mapping[str, Any]:
        admin = self.admin()
        admin.poll(0)
        self.watch.forget()
        deadline = time.monotonic() + self.options.request_timeout_s
        while True:
            try:
                # In steps: a refused password is told at once, not after the whole time.
                return admin.list_topics(timeout=max(0.1, min(1.0, deadline - time.monotonic()))).topics
            except KafkaException as raised:
                error = error_of(raised)
            admin.poll(0)
            refusal = self.watch.refusal()
            if refusal is not None or time.monotonic() > deadline:
                raise refusal or self.watch.unavailable("list topics", error)
            if error.code() not in PASSING | {KafkaError._TIMED_OUT}:
                raise self.watch.explained(error, "list topics")

    # Extents

    def extents(self, name: str, partitions: Sequence[int] | None = None) -> dict[int, Extent]:
        """Begin and end of every partition, or of those named. Raises UnknownTopic, UnknownPartition."""
        deadline = time.monotonic() + self.options.request_timeout_s
        doing = f"extents of {self.full(name)}"
        while True:
            info = self.known(name)
            for number in partitions or ():
                info.check(number)
            where = [TopicPartition(self.full(name), n) for n in partitions or range(info.spec.partitions)]
            # Begins are asked for before ends: both only grow, so that a begin is never above its end.
            begins, error = self._offsets(where, OffsetSpec.earliest(), doing)
            ends: dict[int, int] = {}
            if error is None:
                ends, error = self._offsets(where, OffsetSpec.latest(), doing)
            if error is None:
                return {number: Extent(begin, max(begin, ends[number])) for number, begin in sorted(begins.items())}
            self.forget(name)
            if error.code() not in PASSING | UNKNOWN_TOPIC or time.monotonic() > deadline:
                raise self.watch.explained(error, doing)
            time.sleep(0.05)

    def _offsets(
        self, where: Sequence[TopicPartition], spec: OffsetSpec | None, doing: str
    ) -> tuple[dict[int, int], KafkaError | None]:
        wanted: dict[TopicPartition, Any] = dict.fromkeys(where, spec)
        answers = self._ask(
            doing,
            lambda admin, timeout: admin.list_offsets(
                wanted, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=timeout
            ),
        )
        errors = [error for answer in answers.values() if (error := _error(answer)) is not None]
        found = {place.partition: answer.offset for place, answer in answers.items() if _error(answer) is None}
        return found, errors[0] if errors else None

    # The client

    def admin(self) -> AdminClient:
        """The client, made when first used."""
        with self._lock:
            admin = self._admin
            if admin is None:
                admin = self._admin = made(AdminClient, base_settings(self.options, self.watch), self.options)
            return admin

    def _ask(self, doing: str, start: Callable[[AdminClient, float], dict[K, Future[Any]]]) -> dict[K, Any]:
        """Ask and wait; answers by subject, a KafkaException where one failed.

        Raises:
            LogUnavailable: No answer came in time, or the broker turned this client away.
        """
        admin = self.admin()
        admin.poll(0)
        self.watch.forget()
        timeout = self.options.request_timeout_s
        deadline = time.monotonic() + timeout + 1.0
        try:
            futures = start(admin, timeout)
        except KafkaException as raised:
            raise self.watch.explained(error_of(raised), doing) from None
        answers: dict[K, Any] = {}
        for subject, future in futures.items():
            while subject not in answers:
                try:
                    answers[subject] = future.result(timeout=0.1)
                except KafkaException as raised:
                    error = error_of(raised)
                    if error.code() in (KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT):
                        admin.poll(0)
                        raise self.watch.unavailable(doing, error) from None
                    answers[subject] = raised
                except TimeoutError:
                    admin.poll(0)
                    refusal = self.watch.refusal()
                    if refusal is not None or time.monotonic() > deadline:
                        raise refusal or self.watch.unavailable(doing) from None
        return answers

    def close(self) -> None:
        """Let go of the client."""
        with self._lock:
            self._admin = None


def made(make: Callable[[dict[str, Any]], Any], settings: dict[str, Any], options: KafkaOptions) -> Any:
    """A client of librdkafka. Raises LogError when it cannot be made of its settings."""
    try:
        return make(settings)
    except KafkaException as raised:
        raise LogError(f"a client of {options.where} cannot be made: {error_of(raised).str()}") from None


def _id(topic_id: Any) -> str:
    """A `confluent_kafka.Uuid` as it is usually written; Kafka's own tools show the same bits in base64."""
    bits = topic_id.get_most_significant_bits() << 64 | topic_id.get_least_significant_bits() & (1 << 64) - 1
    return str(uuid.UUID(int=bits & (1 << 128) - 1))


def _error(answer: Any) -> KafkaError | None:
    return error_of(answer) if isinstance(answer, KafkaException) else None
