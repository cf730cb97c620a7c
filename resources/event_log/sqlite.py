"""The embedded event log: topics in one SQLite file, appended and read by any number of processes on one machine.

Placement is Kafka's (murmur2.py), so that a deployment that moves to a broker keeps its keys where they were. The group
members' side, leases and rebalancing, is in sqlite_consumer.py.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from resources.event_log.bells import Bells, Ear
from resources.event_log.murmur2 import partition_of
from resources.event_log.protocol import (
    Extent,
    InvalidRecord,
    LogError,
    LogUnavailable,
    NewRecord,
    OffsetOutOfRange,
    Position,
    Record,
    RecordTooLarge,
    StaleEpoch,
    TopicSpec,
    UnknownPartition,
    UnknownTopic,
)
from resources.event_log.sqlite_consumer import SqliteConsumer
from resources.event_log.sqlite_follower import SqliteFollower
from resources.event_log.sqlite_publisher import SqlitePublisher
from resources.sqlite import SqliteFile

# A record's row id is its partition's id and its offset in one number: a partition is one run of rows, in offset order,
# with no second index to keep. 2^40 offsets are 17 years at 2,000 records a second; 2^22 partitions fit above them.
_OFFSET_BITS = 40
_GROUP_RECORDS = 10_000
_GROUP_BYTES = 16_000_000
"""Most of one transaction: it is held in memory, and other processes wait for it."""
_DELETE_RECORDS = 2_000
_DELETE_BYTES = 64_000_000
"""Most that retention deletes in one transaction, so that appends wait for milliseconds."""

SCHEMA_VERSION = 2
_STEPS = {2: ("ALTER TABLE partitions ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0",)}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT OR IGNORE INTO counters VALUES ('topics', 1);
CREATE TABLE IF NOT EXISTS topics (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    uuid TEXT NOT NULL,
    retention_ms INTEGER NOT NULL,
    max_record_bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS partitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    topic_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    begin_offset INTEGER NOT NULL DEFAULT 0,
    end_offset INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    UNIQUE (topic_id, number)
) STRICT;
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY,
    timestamp_ms INTEGER NOT NULL,
    appended_ms INTEGER NOT NULL,
    key TEXT,
    headers TEXT,
    value BLOB
) STRICT;
CREATE TABLE IF NOT EXISTS committed (
    group_name TEXT NOT NULL,
    topic_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    next_offset INTEGER NOT NULL,
    PRIMARY KEY (group_name, topic_id, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (name TEXT PRIMARY KEY, generation INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    group_name TEXT NOT NULL,
    member TEXT NOT NULL,
    topics TEXT NOT NULL,
    process TEXT NOT NULL,
    session_ms INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL,
    joined INTEGER NOT NULL,
    PRIMARY KEY (group_name, member)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shares (
    group_name TEXT NOT NULL,
    topic_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    owner TEXT,
    target TEXT,
    PRIMARY KEY (group_name, topic_id, number)
) STRICT, WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it stands in the file: its row, its identity and the row ids of its partitions, by number."""

    id: int
    uuid: str
    spec: TopicSpec
    partition_ids: tuple[int, ...]

    def partition_id(self, number: int) -> int:
        """The row id of a partition. Raises UnknownPartition."""
        if not 0 <= number < len(self.partition_ids):
            raise UnknownPartition(f"{self.spec.name} has partitions 0..{len(self.partition_ids) - 1}, not {number}")
        return self.partition_ids[number]


class _Prepared(NamedTuple):
    topic: str
    key: str | None
    partition: int | None
    timestamp_ms: int | None
    headers: str | None
    value: bytes | None
    size: int


@dataclass(slots=True)
class _Append:
    """One caller's records on their way into a group's transaction."""

    records: list[_Prepared]
    size: int
    epoch: int | None = None
    woken: threading.Event = field(default_factory=threading.Event)
    leads: bool = False
    positions: list[Position] | None = None
    error: Exception | None = None

    @property
    def settled(self) -> bool:
        return self.positions is not None or self.error is not None


class SqliteEventLog:
    """An event log in one SQLite file (`EventLog`).

    Appends of several threads at once share a commit: while one thread commits, the others gather, and one of them
    writes for all. So the slower the disk, the larger the groups; a pause to wait for company cost latency and won
    nothing (32 threads: 10,000/s without, 8,200/s with 2 ms; measured with 1 kB records).

    Args:
        path: The database file; its folder is made.
        lock_timeout_s: How long another process may hold the write lock before LogUnavailable.
        session_timeout_s: How long a member of a group may be silent before its partitions go to others.
        max_poll_interval_s: How long a member may work on what it polled before it counts as stuck.

    Raises:
        LogUnavailable: The file cannot be opened now.
        LogError: It is damaged, or a newer program wrote it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lock_timeout_s: float = 5.0,
        session_timeout_s: float = 10.0,
        max_poll_interval_s: float = 300.0,
    ) -> None:
        self._file = SqliteFile(
            path,
            schema=_SCHEMA,
            version=SCHEMA_VERSION,
            steps=_STEPS,
            synchronous="FULL",
            unavailable=LogUnavailable,
            failed=LogError,
            lock_timeout_s=lock_timeout_s,
        )
        self._session_timeout_s, self._max_poll_interval_s = session_timeout_s, max_poll_interval_s
        self._topics: tuple[int, dict[str, Topic]] = (0, {})
        self._spread = itertools.count(random.randrange(1 << 16))
        self._queue: deque[_Append] = deque()
        self._queue_lock = threading.Lock()
        self._led = False
        self._bells = self._own_bells()
        self.appended = threading.Condition()
        """Notified after each commit of this process, so that a consumer in it need not wait for its next look."""
        self.appends = 0
        self._pid = os.getpid()

    @property
    def path(self) -> Path:
        """The database file."""
        return self._file.path

    @property
    def file(self) -> SqliteFile:
        """The file, for the consumers of this log."""
        return self._file

    def _own_bells(self) -> Bells:
        return Bells(self._file.path.with_name(f".{self._file.path.name}.bells"))

    def ear(self, topics: Sequence[str]) -> Ear | None:
        """What hears of appends to these topics by any process; None where nobody can, or one was never declared."""
        known = self._file.attempt(self.topics_in)
        return self._bells.ear([known[name].id for name in topics]) if all(name in known for name in topics) else None

    def wait(self, ear: Ear | None, seconds: float, appends: int) -> None:
        """Until something may have been appended, at most so long.

        Args:
            ear: Of the topics that are waited for; without one only appends of this process are heard of.
            seconds: Longest wait.
            appends: `appends` as it was before the caller looked.
        """
        if ear is not None:
            ear.wait(seconds)
            return
        with self.appended:
            if self.appends == appends:
                self.appended.wait(seconds)

    def wake(self, topics: Sequence[str]) -> None:
        """Wake whoever waits for these topics, in any process, although nothing was appended."""
        _, known = self._topics
        self._bells.ring([known[name].id for name in topics if name in known])
        with self.appended:
            self.appends += 1
            self.appended.notify_all()

    # Topics

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create the topics that are missing; grow partitions, update retention and record limit of the others."""
        for spec in specs:
            if not spec.name or spec.partitions < 1 or spec.retention_ms < 0 or spec.max_record_bytes < 1:
                raise LogError(f"{spec}: a topic needs a name, at least 1 partition, retention >= 0 and a limit >= 1")
        present = self.topics()
        if all(_covers(present.get(spec.name), spec) for spec in specs):
            return
        with self._file.transaction() as connection:
            topics = self.topics_in(connection)
            for spec in specs:
                topic = topics.get(spec.name)
                if topic is None:
                    identity = connection.execute(
                        "INSERT INTO topics (name, uuid, retention_ms, max_record_bytes) VALUES (?, ?, ?, ?)",
                        (spec.name, str(uuid.uuid4()), spec.retention_ms, spec.max_record_bytes),
                    ).lastrowid
                else:
                    identity = topic.id
                    connection.execute(
                        "UPDATE topics SET retention_ms = ?, max_record_bytes = ? WHERE id = ?",
                        (spec.retention_ms, spec.max_record_bytes, identity),
                    )
                connection.executemany(
                    "INSERT OR IGNORE INTO partitions (topic_id, number) VALUES (?, ?)",
                    [(identity, number) for number in range(spec.partitions)],
                )
            _topics_changed(connection)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, its records and what groups committed of it. Raises UnknownTopic."""
        with self._file.transaction() as connection:
            found = self._topic_in(connection, topic)
            for partition_id in found.partition_ids:
                connection.execute(
                    "DELETE FROM records WHERE id >= ? AND id < ?",
                    (partition_id << _OFFSET_BITS, (partition_id + 1) << _OFFSET_BITS),
                )
            for table in ("partitions", "committed", "shares"):
                connection.execute(f"DELETE FROM {table} WHERE topic_id = ?", (found.id,))
            connection.execute("DELETE FROM topics WHERE id = ?", (found.id,))
            _topics_changed(connection)
        self._file.give_back_space()

    def topics(self) -> Mapping[str, TopicSpec]:
        """Every declared topic."""
        found = self._file.attempt(self.topics_in)
        return {name: topic.spec for name, topic in found.items()}

    def topic_id(self, topic: str) -> str:
        """A UUID made when the topic was created. Raises UnknownTopic."""
        return self._file.attempt(lambda c: self._topic_in(c, topic)).uuid

    def topics_in(self, connection: sqlite3.Connection) -> dict[str, Topic]:
        """The topics as a connection sees them; read anew only when somebody changed one."""
        version = int(connection.execute("SELECT value FROM counters WHERE name = 'topics'").fetchone()[0])
        known, topics = self._topics
        if known == version:
            return topics
        # One statement is one snapshot: a topic never shows with another version's partitions.
        rows = connection.execute(
            """SELECT c.value, t.id, t.name, t.uuid, t.retention_ms, t.max_record_bytes, p.id
               FROM counters c LEFT JOIN topics t LEFT JOIN partitions p ON p.topic_id = t.id
               WHERE c.name = 'topics' ORDER BY t.id, p.number"""
        ).fetchall()
        topics = {}
        for _, rows_of in itertools.groupby(rows, key=lambda row: row[1]):
            of_topic = list(rows_of)
            _, identity, name, topic_uuid, retention_ms, max_bytes, _ = of_topic[0]
            if identity is not None:
                spec = TopicSpec(name, len(of_topic), retention_ms, max_bytes)
                topics[name] = Topic(identity, topic_uuid, spec, tuple(row[6] for row in of_topic))
        self._topics = (int(rows[0][0]), topics)
        return topics

    def _topic_in(self, connection: sqlite3.Connection, topic: str) -> Topic:
        topics = self.topics_in(connection)
        if topic not in topics:
            raise UnknownTopic(f"topic {topic!r} was never declared in {self.path}; declared: {sorted(topics)}")
        return topics[topic]

    # Appending

    def append(self, records: Sequence[NewRecord], *, epoch: int | None = None) -> list[Position]:
        """Append all or none of them durably and say where they stand (see `EventLog.append`)."""
        if not records:
            return []
        prepared = [_prepare(record) for record in records]
        request = _Append(prepared, sum(record.size for record in prepared), epoch)
        if self._pid != os.getpid():  # Forked, perhaps while another thread of the parent led: here nobody does.
            self._queue, self._queue_lock, self._led = deque(), threading.Lock(), False
            self.appended, self._pid = threading.Condition(), os.getpid()
            self._bells = self._own_bells()
        with self._queue_lock:
            self._queue.append(request)
            if not self._led:
                self._led = request.leads = True
        try:
            if not request.leads:
                request.woken.wait()
            if not request.settled:
                self._lead()
        except BaseException:
            self._withdraw(request)
            raise
        if request.error is not None:
            raise request.error
        assert request.positions is not None
        return request.positions

    def _lead(self) -> None:
        """Commit what waits, this thread's own request among it, then let the next one that waits lead."""
        group: list[_Append] = []
        try:
            with self._queue_lock:
                count = size = 0
                while self._queue:
                    first = self._queue[0]
                    count, size = count + len(first.records), size + first.size
                    if group and (count > _GROUP_RECORDS or size > _GROUP_BYTES):
                        break
                    group.append(self._queue.popleft())
            self._commit_group(group)
        finally:
            for request in group:
                if not request.settled:
                    request.error = LogUnavailable("the thread that committed for this one was interrupted")
            self._pass_on()
            for request in group:
                request.woken.set()
            self.wake(sorted({record.topic for request in group if request.positions for record in request.records}))

    def _pass_on(self) -> None:
        with self._queue_lock:
            if self._queue:
                self._queue[0].leads = True
                self._queue[0].woken.set()
            else:
                self._led = False

    def _withdraw(self, request: _Append) -> None:
        """An interrupted caller leaves: its records go no further, and if it was to lead, the next one does."""
        with self._queue_lock:
            if request not in self._queue:
                return
            self._queue.remove(request)
        if request.leads:
            self._pass_on()

    def _commit_group(self, group: list[_Append]) -> None:
        try:
            self._commit(group)
        except LogUnavailable as error:
            for request in group:
                request.error = request.error or error
        except Exception as error:
            if len(group) == 1:
                group[0].error = error
                return
            # Whatever one of them brought, it costs its own caller alone.
            for request in group:
                if request.error is None:
                    self._commit_group([request])

    def _commit(self, group: list[_Append]) -> None:
        now_ms = time.time_ns() // 1_000_000
        placed: list[tuple[_Append, list[Position]]] = []
        rows: list[tuple[int, int, int, str | None, str | None, bytes | None]] = []
        ends: dict[int, int] = {}
        epochs: dict[int, int] = {}
        with self._file.transaction() as connection:
            topics = self.topics_in(connection)
            for request in group:
                try:
                    where = [self._place(topics, record) for record in request.records]
                    if request.epoch is not None:
                        self._raise_epochs(connection, request, request.epoch, where, epochs)
                except LogError as error:
                    request.error = error
                    continue
                positions: list[Position] = []
                for record, (number, partition_id) in zip(request.records, where, strict=True):
                    offset = ends.get(partition_id)
                    if offset is None:
                        (offset,) = connection.execute(
                            "SELECT end_offset FROM partitions WHERE id = ?", (partition_id,)
                        ).fetchone()
                    ends[partition_id] = offset + 1
                    stamp = now_ms if record.timestamp_ms is None else record.timestamp_ms
                    row_id = partition_id << _OFFSET_BITS | offset
                    rows.append((row_id, stamp, now_ms, record.key, record.headers, record.value))
                    positions.append(Position(number, offset))
                placed.append((request, positions))
            connection.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", rows)
            connection.executemany(
                "UPDATE partitions SET end_offset = ? WHERE id = ?", [(end, identity) for identity, end in ends.items()]
            )
            connection.executemany(
                "UPDATE partitions SET epoch = ? WHERE id = ?",
                [(epoch, identity) for identity, epoch in epochs.items()],
            )
        for request, positions in placed:
            request.positions = positions

    @staticmethod
    def _raise_epochs(
        connection: sqlite3.Connection,
        request: _Append,
        epoch: int,
        where: Sequence[tuple[int, int]],
        epochs: dict[int, int],
    ) -> None:
        """Hold an append's epoch against the highest of its partitions, and note it there. Raises StaleEpoch."""
        wanted = {identity: (record.topic, n) for record, (n, identity) in zip(request.records, where, strict=True)}
        for identity, (topic, number) in wanted.items():
            highest = epochs.get(identity)
            if highest is None:
                (highest,) = connection.execute("SELECT epoch FROM partitions WHERE id = ?", (identity,)).fetchone()
            if epoch < highest:
                raise StaleEpoch(f"epoch {epoch} is below {highest}, which has taken over {topic}/{number}")
        epochs.update(dict.fromkeys(wanted, epoch))

    def _place(self, topics: dict[str, Topic], record: _Prepared) -> tuple[int, int]:
        topic = topics.get(record.topic)
        if topic is None:
            raise UnknownTopic(f"topic {record.topic!r} was never declared in {self.path}; declared: {sorted(topics)}")
        limit = topic.spec.max_record_bytes
        if record.size > limit:
            raise RecordTooLarge(f"a record of {record.size} bytes is over the limit of {record.topic}, {limit} bytes")
        if record.partition is not None:
            number = record.partition
        elif record.key is not None:
            number = partition_of(record.key, len(topic.partition_ids))
        else:
            number = next(self._spread) % len(topic.partition_ids)
        return number, topic.partition_id(number)

    def publisher(self, topic: str, *, epoch: int | None = None) -> SqlitePublisher:
        """A publisher of its own for one thread (see `EventLog.publisher`). Raises UnknownTopic."""
        return SqlitePublisher(
            partial(self.append, epoch=epoch),
            topic,
            self._file.attempt(lambda c: self._topic_in(c, topic)).spec.max_record_bytes,
        )

    # Reading

    def read(
        self, topic: str, partition: int, offset: int, max_records: int = 10_000, max_bytes: int = 16_000_000
    ) -> list[Record]:
        """Records from `offset` on, bounded by both limits; never waits (see `EventLog.read`)."""
        return self._file.attempt(
            lambda c: self.read_with(c, self._topic_in(c, topic), partition, offset, max_records, max_bytes)
        )

    def read_with(
        self,
        connection: sqlite3.Connection,
        topic: Topic,
        partition: int,
        offset: int,
        max_records: int,
        max_bytes: int,
    ) -> list[Record]:
        """`read` on a given connection, outside a transaction."""
        partition_id = topic.partition_id(partition)
        name, base = topic.spec.name, partition_id << _OFFSET_BITS
        if 0 <= offset < 1 << _OFFSET_BITS:
            records = list(_bounded(connection, name, partition, base, offset, max_records, max_bytes))
            if records and records[0].offset == offset:
                return records
        # Nothing there, or a gap: the ends as they were when that was read do not matter, as they only ever grow.
        extent = _extents(connection, topic)[partition]
        if offset < extent.begin or offset > extent.end:
            raise OffsetOutOfRange(name, partition, offset, extent.begin, extent.end)
        return []

    def follow(self, topic: str, offsets: Mapping[int, int]) -> SqliteFollower:
        """A follower of its own for one thread (see `EventLog.follow`). Raises UnknownTopic, UnknownPartition."""
        return SqliteFollower(self, topic, offsets)

    def standing(self, connection: sqlite3.Connection, topic: str) -> tuple[Topic, dict[int, Extent]]:
        """A topic and its extents as a connection sees them. Raises UnknownTopic."""
        found = self._topic_in(connection, topic)
        return found, _extents(connection, found)

    def check(self, topic: str, partition: int) -> None:
        """Raise UnknownTopic or UnknownPartition where there is no such partition."""
        self._file.attempt(lambda c: self._topic_in(c, topic)).partition_id(partition)

    def extents(self, topic: str) -> dict[int, Extent]:
        """Begin and end of every partition, all as of one moment. Raises UnknownTopic."""
        return self._file.attempt(lambda c: _extents(c, self._topic_in(c, topic)))

    # Groups

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's next offset of every partition it committed one for. Raises UnknownTopic."""
        return self._file.attempt(
            lambda c: dict(
                c.execute(
                    "SELECT number, next_offset FROM committed WHERE group_name = ? AND topic_id = ? ORDER BY number",
                    (group, self._topic_in(c, topic).id),
                ).fetchall()
            )
        )

    def commit(self, group: str, topic: str, next_offsets: Mapping[int, int]) -> None:
        """Set a group's offsets outright, whoever holds the partitions. Raises UnknownTopic, UnknownPartition."""
        if not next_offsets:
            return
        with self._file.transaction() as connection:
            found = self._topic_in(connection, topic)
            for number, offset in next_offsets.items():
                found.partition_id(number)
                self.set_committed(connection, group, found.id, number, offset)

    @staticmethod
    def set_committed(connection: sqlite3.Connection, group: str, topic_id: int, number: int, next_offset: int) -> None:
        """Write one next offset in the caller's transaction. Raises LogError for one that no partition can have."""
        if not 0 <= next_offset < 1 << _OFFSET_BITS:
            raise LogError(f"next offset {next_offset} of group {group!r} is not in 0..{(1 << _OFFSET_BITS) - 1}")
        connection.execute(
            """INSERT INTO committed VALUES (?, ?, ?, ?)
               ON CONFLICT (group_name, topic_id, number) DO UPDATE SET next_offset = excluded.next_offset""",
            (group, topic_id, number, next_offset),
        )

    def consumer(self, group: str, topics: Sequence[str], *, from_end: bool = False) -> SqliteConsumer:
        """Join a group (see `EventLog.consumer`). Raises UnknownTopic."""
        return SqliteConsumer(
            self,
            group,
            topics,
            from_end=from_end,
            session_timeout_s=self._session_timeout_s,
            max_poll_interval_s=self._max_poll_interval_s,
        )

    # Keeping house

    def enforce_retention(self, now_ms: int | None = None) -> dict[str, int]:
        """Delete what was appended longer ago than its topic keeps, and give the space back (see `EventLog`).

        A partition is shortened from its beginning up to the first record that is young enough: offsets stay dense.
        The stamp that counts is the log's own, not the record's, so that an old event is not gone as it arrives.
        """
        now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        deleted: dict[str, int] = {}
        for name, topic in self._file.attempt(self.topics_in).items():
            cutoff = now_ms - topic.spec.retention_ms
            for partition_id in topic.partition_ids:
                while count := self._delete_piece(partition_id, cutoff):
                    deleted[name] = deleted.get(name, 0) + count
        if deleted:
            self._file.give_back_space()
        return deleted

    def _delete_piece(self, partition_id: int, cutoff_ms: int) -> int:
        base = partition_id << _OFFSET_BITS
        rows = self._file.attempt(lambda c: _old_rows(c, base, cutoff_ms))
        if not rows:
            return 0
        with self._file.transaction() as connection:
            # Another process may have deleted the same ones meanwhile; it never deletes younger ones than these.
            count = connection.execute("DELETE FROM records WHERE id >= ? AND id <= ?", (base, rows[-1])).rowcount
            connection.execute(
                "UPDATE partitions SET begin_offset = max(begin_offset, ?) WHERE id = ?",
                (rows[-1] - base + 1, partition_id),
            )
        return count

    def close(self) -> None:
        """Close every connection. Appends and reads fail with LogUnavailable afterwards."""
        self._file.close()


def _covers(present: TopicSpec | None, wanted: TopicSpec) -> bool:
    return (
        present is not None
        and present.partitions >= wanted.partitions
        and present.retention_ms == wanted.retention_ms
        and present.max_record_bytes == wanted.max_record_bytes
    )


def _topics_changed(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE counters SET value = value + 1 WHERE name = 'topics'")
    connection.execute("UPDATE groups SET generation = generation + 1")


def _extents(connection: sqlite3.Connection, topic: Topic) -> dict[int, Extent]:
    rows = connection.execute(
        "SELECT number, begin_offset, end_offset FROM partitions WHERE topic_id = ? ORDER BY number", (topic.id,)
    )
    return {number: Extent(begin, end) for number, begin, end in rows}


def _bounded(
    connection: sqlite3.Connection, topic: str, partition: int, base: int, offset: int, max_records: int, max_bytes: int
) -> Iterator[Record]:
    cursor = connection.execute(
        """SELECT id, key, value, headers, timestamp_ms FROM records
           WHERE id >= ? AND id < ? ORDER BY id LIMIT ?""",
        (base | offset, base + (1 << _OFFSET_BITS), max(0, max_records)),
    )
    try:
        total = 0
        for row_id, key, value, headers, timestamp_ms in cursor:
            # Text is counted by characters: the bound is on memory, not to the byte.
            total += len(key or "") + len(value or b"") + len(headers or "")
            if total > max_bytes and row_id != base | offset:
                return
            yield Record(
                topic, partition, row_id - base, key, value, json.loads(headers) if headers else {}, timestamp_ms
            )
    finally:
        cursor.close()


def _old_rows(connection: sqlite3.Connection, base: int, cutoff_ms: int) -> list[int]:
    """Row ids at the beginning of a partition that were appended before the cutoff; as many as one piece takes."""
    cursor = connection.execute(
        """SELECT id, appended_ms, coalesce(length(value), 0) FROM records
           WHERE id >= ? AND id < ? ORDER BY id LIMIT ?""",
        (base, base + (1 << _OFFSET_BITS), _DELETE_RECORDS),
    )
    old: list[int] = []
    size = 0
    for row_id, appended_ms, length in cursor:
        size += length
        if appended_ms >= cutoff_ms or (old and size > _DELETE_BYTES):
            break
        old.append(row_id)
    cursor.close()
    return old


def _prepare(record: NewRecord) -> _Prepared:
    """Everything that needs no lock: encoding, measuring, refusing what no row can hold."""
    try:
        size = len(record.key.encode()) if record.key is not None else 0
        headers = None
        if record.headers:
            headers = json.dumps(dict(record.headers), ensure_ascii=False, separators=(",", ":"))
            size += sum(len(name.encode()) + len(text.encode()) for name, text in record.headers.items())
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"a key or header of a record for {record.topic!r} is no text: {error}") from error
    except (AttributeError, TypeError) as error:
        raise InvalidRecord(f"a key or header of a record for {record.topic!r} is no text: {error}") from error
    stamp = record.timestamp_ms
    if stamp is not None and not -(1 << 63) <= stamp < 1 << 63:
        raise InvalidRecord(f"timestamp_ms {stamp} of a record for {record.topic!r} does not fit into 64 bits")
    value = None if record.value is None else bytes(record.value)
    size += len(value or b"")
    return _Prepared(record.topic, record.key, record.partition, stamp, headers, value, size)
