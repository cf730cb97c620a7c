"""A member of a group on Kafka: partitions come and go by the group's protocol; what is committed is committed by hand.

Where to begin is decided here, at each assignment: at what the group committed, else at the oldest record. The client
never chooses an offset itself, so that records lost to retention show.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from resources.event_log.kafka_cluster import KafkaCluster, base_settings, made
from resources.event_log.kafka_faults import PASSING, UNKNOWN_TOPIC, Watch, error_of
from resources.event_log.kafka_groups import KafkaGroups
from resources.event_log.kafka_records import record_of, size_of
from resources.event_log.protocol import Holding, LogError, LogUnavailable, OffsetOutOfRange, Record

Pair = tuple[str, int]
"""A topic by our name, and a partition."""

_AT_ONCE = 1_000
"""Messages taken from the client at a time."""

_HELD_RECORDS = 5_000
_HELD_BYTES = 16_000_000
"""Most that is taken from the client before it is asked for: enough of each partition to give all their turn."""

_WAIT_S = 0.1
"""Longest wait in one piece: what a close from another thread waits for."""

_JOIN_S = 5.0
"""How long making a member waits for its first assignment: brokers let a new group gather for three seconds."""

_CLOSE_S = 5.0
"""How long leaving may take; a broker that is away lets the session run out by itself."""

_MOVED = frozenset(
    {
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,
    }
)
"""The group is being shared out anew: a commit has to be tried again, of what is held then."""


class KafkaConsumer:
    """A group's member on Kafka (`Consumer`). Made by `KafkaEventLog.consumer`, which joins it at once.

    Heartbeats are the client library's, in threads of its own, up to `max_poll_interval_s` after the last poll.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        groups: KafkaGroups,
        group: str,
        topics: Sequence[str],
        *,
        from_end: bool,
        closed: Callable[[KafkaConsumer], None],
    ) -> None:
        options = cluster.options
        self._cluster, self._groups, self._on_closed = cluster, groups, closed
        self.group, self.topics = group, tuple(dict.fromkeys(topics))
        self._names = {cluster.full(name): name for name in self.topics}
        self._watch = Watch(options)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._joined = False
        self._holdings = 0
        # Every pair held, with the number of the assignment that brought it: one that left and came back has another.
        self._held: dict[Pair, int] = {}
        self._fetched: dict[Pair, int] = {}
        self._ready: dict[Pair, deque[Record]] = {}
        self._ready_records = self._ready_bytes = 0
        self._rewind: set[Pair] = set()
        self._paused: set[Pair] = set()
        # Those of which records were passed over: they go on at `_fetched`, which the client has left behind.
        self._passed: set[Pair] = set()
        self._lost: dict[Pair, int] = {}
        self._fault: LogError | None = None
        self._began: Pair = ("", -1)
        for name in self.topics:
            cluster.known(name, max_age_s=0.0)
        if from_end:
            self._start_at_the_end()
        session_ms = int(options.session_timeout_s * 1_000)
        self._consumer: Consumer = made(
            Consumer,
            base_settings(options, self._watch)
            | {
                "group.id": cluster.full(group),
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": max(100, session_ms // 4),
                "max.poll.interval.ms": max(session_ms, int(options.max_poll_interval_s * 1_000)),
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                # A partition that is new or sought waits for the fetch that is under way, so that one must be short.
                "fetch.wait.max.ms": 100,
                "fetch.error.backoff.ms": 100,
                "queued.min.messages": 10_000,
                "queued.max.messages.kbytes": 32_768,
                "fetch.queue.backoff.ms": 50,
            },
            options,
        )
        self._consumer.subscribe(
            list(self._names), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        self._join()

    # What the protocol asks for

    def poll(self, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """Up to `max_records` next records of the partitions held (see `Consumer.poll`)."""
        deadline = time.monotonic() + timeout_s
        wait_s, first = 0.0, True
        while True:
            with self._lock:
                if self._closed.is_set():
                    if first:
                        raise LogError(f"consumer of group {self.group!r} is closed")
                    return []
                if self._pid != os.getpid():
                    raise LogError(f"consumer of group {self.group!r} belongs to another process")
                self._take_up_rewinds()
                if max_records > 0:
                    self._take_up_passed()
                    self._gather(0.0 if self._ready_records else wait_s)
                else:
                    self._serve(wait_s)
                self._tell_losses()
                records = self._next(max_records)
            if records:
                return records
            self._tell_outage()
            first = False
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            wait_s = min(_WAIT_S, left)

    def commit(self, next_offsets: Mapping[tuple[str, int], int]) -> None:
        """Durably set next offsets of partitions held; those of others are ignored (see `Consumer.commit`)."""
        with self._lock:
            if self._closed.is_set() or not next_offsets:
                return
            # Nothing is gathered before: what is about to be given up is this member's until it is told.
            held = {pair: self._held[pair] for pair in next_offsets if pair in self._held}
            self._commit(
                lambda: {pair: next_offsets[pair] for pair, holding in held.items() if self._held.get(pair) == holding}
            )

    def commit_for_group(self, next_offsets: Mapping[tuple[str, int], int]) -> bool:
        """Set offsets of any partition as a member of the group; False when this is none now."""
        with self._lock:
            if self._closed.is_set() or not self._joined:
                return False
            self._commit(lambda: next_offsets)
            return True

    def seek_to_committed(self) -> None:
        """The next poll gives again what was polled and not committed. It asks nobody, so it never fails."""
        with self._lock:
            self._rewind |= set(self._held)
            for pair in list(self._ready):
                self._drop(pair)
            self._lost.clear()

    def assignment(self) -> frozenset[tuple[str, int]]:
        """The (topic, partition) pairs held now."""
        return frozenset() if self._closed.is_set() else frozenset(self._held)

    def pause(self, partitions: Collection[tuple[str, int]]) -> None:
        """Give nothing of these until they are resumed (see `Consumer.pause`)."""
        with self._lock:
            pairs = self._held.keys() & set(partitions) - self._paused
            if self._closed.is_set() or not pairs:
                return
            self._tell_client(self._consumer.pause, pairs, "pause")
            self._paused |= pairs
            for pair in pairs:
                # What is at hand of it would take the room of those that go on.
                self._drop(pair)
            self._passed |= pairs

    def resume(self, partitions: Collection[tuple[str, int]]) -> None:
        """Go on with them where they stopped (see `Consumer.resume`)."""
        with self._lock:
            pairs = self._paused & set(partitions)
            if self._closed.is_set() or not pairs:
                return
            self._tell_client(self._consumer.resume, pairs, "resume")
            self._paused -= pairs

    def _tell_client(self, call: Callable[[list[TopicPartition]], None], pairs: Iterable[Pair], doing: str) -> None:
        where = [TopicPartition(self._cluster.full(name), number) for name, number in sorted(pairs)]
        try:
            call(where)
        except KafkaException as raised:
            doing = f"{doing} {', '.join(f'{one.topic}/{one.partition}' for one in where)}"
            raise self._watch.explained(error_of(raised), doing) from None

    def holdings(self) -> dict[tuple[str, int], Holding]:
        """The pairs held as of the last poll, and how each stands (see `Consumer.holdings`)."""
        with self._lock:
            if self._closed.is_set():
                return {}
            found: dict[Pair, Holding] = {}
            for pair in sorted(self._held):
                name, number = pair
                leader = self._cluster.grown(name, number).leaders.get(number, "")
                ready = self._ready.get(pair)
                following = ready[0].offset if ready else self._fetched[pair]
                end = self._end(pair)
                found[pair] = Holding(leader, None if end is None else max(0, end - following), pair in self._paused)
            return found

    def _end(self, pair: Pair) -> int | None:
        """A partition's end as its last fetch told it; None where there was none yet."""
        where = TopicPartition(self._cluster.full(pair[0]), pair[1])
        try:
            extent = self._consumer.get_watermark_offsets(where, cached=True)
        except KafkaException:
            return None
        return extent[1] if extent and extent[1] >= 0 else None

    def close(self) -> None:
        """Leave the group at once: the partitions are free for the other members."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._on_closed(self)
        if self._pid != os.getpid():
            return
        with self._lock:
            with suppress(LogError, RuntimeError):
                # What the group has said is heard before. Heard while the client leaves, as by one that did not poll in
                # time, librdkafka may wait for its own answer for ever, and the interpreter with it.
                self._take_in(self._consume(1, 0.0), keep=False)
            self._held.clear()
            self._ready.clear()
            leaving = threading.Thread(target=self._leave, name=f"leave {self.group}", daemon=True)
            leaving.start()
            leaving.join(_CLOSE_S)

    def _leave(self) -> None:
        with suppress(KafkaException, RuntimeError):
            self._consumer.close()

    # Joining

    def _start_at_the_end(self) -> None:
        """Written down at once: what comes from now on is the group's, whichever member reads it."""
        for name in self.topics:
            if self._groups.committed(self.group, name):
                continue
            ends = {number: extent.end for number, extent in self._cluster.extents(name).items()}
            try:
                self._groups.commit(self.group, name, ends)
            except LogUnavailable:
                raise
            except LogError:
                # Another member is there already, and did it before it joined.
                if not self._groups.committed(self.group, name):
                    raise

    def _join(self) -> None:
        deadline = time.monotonic() + _JOIN_S
        with self._lock:
            while not self._joined and time.monotonic() < deadline:
                self._gather(0.05)
                refusal = self._watch.refusal()
                if refusal is not None or self._fault is not None:
                    self._closed.set()
                    self._leave()
                    raise self._fault or refusal or LogUnavailable("")

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        pairs = [pair for where in partitions if (pair := self._pair(where)) is not None]
        self._holdings += 1
        starts: dict[Pair, int] = {}
        try:
            # One that leaves reads nothing any more.
            starts = {} if self._closed.is_set() else self._starts(pairs)
        except LogError:
            # The broker does not say now: they are placed at the next poll, and until then nothing of them is given.
            self._rewind |= set(pairs)
        consumer.incremental_assign(
            [TopicPartition(self._cluster.full(name), number, starts.get((name, number), 0)) for name, number in pairs]
        )
        # The client remembers that it was paused when it was held before.
        self._tell_client(consumer.resume, pairs, "resume")
        for pair in pairs:
            self._held[pair] = self._holdings
            self._fetched[pair] = starts.get(pair, 0)
        self._joined = True

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        del consumer
        for where in partitions:
            pair = self._pair(where)
            if pair is not None:
                self._held.pop(pair, None)
                self._fetched.pop(pair, None)
                for pairs in (self._rewind, self._paused, self._passed):
                    pairs.discard(pair)
                self._lost.pop(pair, None)
                self._drop(pair)

    def _pair(self, where: TopicPartition) -> Pair | None:
        name = self._names.get(where.topic)
        return None if name is None else (name, where.partition)

    def _starts(self, pairs: Iterable[Pair]) -> dict[Pair, int]:
        """Where to begin: at what the group committed, else at the oldest record."""
        starts: dict[Pair, int] = {}
        pairs = list(pairs)
        for name in sorted({name for name, _ in pairs}):
            numbers = [number for topic, number in pairs if topic == name]
            self._cluster.grown(name, max(numbers))
            committed = self._groups.committed(self.group, name)
            uncommitted = [number for number in numbers if number not in committed]
            begins = self._cluster.extents(name, uncommitted) if uncommitted else {}
            for number in numbers:
                starts[name, number] = committed[number] if number in committed else begins[number].begin
        return starts

    # Reading

    def _gather(self, wait_s: float) -> None:
        """Take from the client what it has, waiting at most `wait_s` for a first message; its callbacks run here."""
        # Asked even without room: it is how the client knows that this member is alive.
        messages = self._consume(_AT_ONCE if self._has_room() else 1, 0.0)
        if not messages and wait_s > 0:
            messages = self._consume(1, wait_s)
            messages += self._consume(_AT_ONCE, 0.0) if messages else []
        self._take_in(messages)

    def _serve(self, wait_s: float) -> None:
        """Be a member, for somebody who asks for no records: what comes is kept while there is room.

        The client runs its callbacks only where it may give a message; without room that one is passed over, and
        fetched once more when it is asked for.
        """
        if self._has_room():
            self._take_in(self._consume(_AT_ONCE, 0.0) or (self._consume(1, wait_s) if wait_s > 0 else []))
        else:
            self._take_in(self._consume(1, 0.0), keep=False)
            self._closed.wait(wait_s)

    def _has_room(self) -> bool:
        return self._ready_records < _HELD_RECORDS and self._ready_bytes < _HELD_BYTES

    def _take_in(self, messages: Sequence[Message], *, keep: bool = True) -> None:
        for message in messages:
            error = message.error()
            if error is not None:
                self._judge(error, message)
                continue
            name = self._names.get(message.topic() or "")
            pair = (name or "", message.partition() or 0)
            if (
                name is None
                or pair not in self._held
                or pair in self._rewind
                or pair in self._passed
                or pair in self._lost
            ):
                continue
            if not keep:
                self._passed.add(pair)
                continue
            record = record_of(message, name)
            self._ready.setdefault(pair, deque()).append(record)
            self._fetched[pair] = record.offset + 1
            self._ready_records += 1
            self._ready_bytes += size_of(record)

    def _consume(self, count: int, wait_s: float) -> list[Message]:
        try:
            return self._consumer.consume(count, wait_s)
        except KafkaException as raised:
            raise self._watch.explained(error_of(raised), f"read as group {self._cluster.full(self.group)}") from None

    def _judge(self, error: KafkaError, message: Message) -> None:
        """What an error in the stream means; those that pass by themselves are waited out."""
        code = error.code()
        pair = (self._names.get(message.topic() or "", ""), message.partition() or 0)
        if code == KafkaError._AUTO_OFFSET_RESET:
            if pair in self._held and pair not in self._rewind:
                self._lost[pair] = self._fetched[pair]
        elif code in UNKNOWN_TOPIC and pair[0]:
            self._cluster.forget(pair[0])
            self._fault = self._cluster.unknown(pair[0])
        elif code not in PASSING | {KafkaError._MAX_POLL_EXCEEDED} | _MOVED:
            self._fault = self._watch.explained(error, f"read as group {self._cluster.full(self.group)}")

    def _next(self, max_records: int) -> list[Record]:
        """From each partition in turn, so that a long one does not keep the others waiting."""
        pairs = sorted(pair for pair, records in self._ready.items() if records)
        if not pairs or max_records < 1:
            return []
        # The one after the last that began: pairs come and go, so that a number would skip some.
        turn = next((index for index, pair in enumerate(pairs) if pair > self._began), 0)
        self._began = pairs[turn]
        found: list[Record] = []
        for pair in pairs[turn:] + pairs[:turn]:
            records = self._ready[pair]
            while records and len(found) < max_records:
                found.append(records.popleft())
        self._ready_records -= len(found)
        self._ready_bytes -= sum(size_of(record) for record in found)
        return found

    def _drop(self, pair: Pair) -> None:
        records = self._ready.pop(pair, None)
        if records:
            self._ready_records -= len(records)
            self._ready_bytes -= sum(size_of(record) for record in records)
            if pair in self._fetched:
                self._fetched[pair] = records[0].offset

    def _take_up_rewinds(self) -> None:
        pairs = self._rewind & self._held.keys()
        if pairs:
            starts = self._starts(pairs)
            for pair in pairs:
                if pair in self._paused:
                    self._fetched[pair] = starts[pair]
                    self._passed.add(pair)
                else:
                    self._place(pair, starts[pair])
                    self._passed.discard(pair)
        self._rewind.clear()

    def _take_up_passed(self) -> None:
        for pair in self._passed - self._paused:
            self._place(pair, self._fetched[pair])
            self._passed.discard(pair)

    def _place(self, pair: Pair, offset: int) -> None:
        where = TopicPartition(self._cluster.full(pair[0]), pair[1], offset)
        try:
            self._consumer.seek(where)
        except KafkaException:
            # Not yet being read, or stopped by an offset out of range: begin anew.
            try:
                self._consumer.incremental_unassign([where])
                self._consumer.incremental_assign([where])
            except KafkaException as raised:
                doing = f"seek in {where.topic}/{where.partition}"
                raise self._watch.explained(error_of(raised), doing) from None
        self._fetched[pair] = offset

    def _tell_losses(self) -> None:
        """Raise what was lost, once what came before it was given."""
        for (name, number), offset in sorted(self._lost.items()):
            if not self._ready.get((name, number)):
                extent = self._cluster.extents(name, [number])[number]
                raise OffsetOutOfRange(name, number, offset, extent.begin, extent.end)

    def _tell_outage(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        refusal = self._watch.refusal()
        if refusal is not None or self._watch.down:
            error = self._watch.unavailable(f"read as group {self._cluster.full(self.group)}")
            self._watch.forget()
            raise error

    # Committing

    def _commit(self, wanted: Callable[[], Mapping[Pair, int]]) -> None:
        """Commit, again and again while the group is being shared out anew; `wanted` says what is still to commit."""
        deadline = time.monotonic() + self._cluster.options.request_timeout_s
        doing = f"commit as group {self._cluster.full(self.group)}"
        while offsets := wanted():
            for (name, number), offset in offsets.items():
                if offset < 0:
                    raise LogError(f"next offset {offset} of group {self.group!r} in {name}/{number} is below 0")
            where = [TopicPartition(self._cluster.full(name), n, offset) for (name, n), offset in offsets.items()]
            try:
                done = self._consumer.commit(offsets=where, asynchronous=False) or []
                error = next((one.error for one in done if one.error is not None), None)
            except KafkaException as raised:
                error = error_of(raised)
            if error is None or error.code() == KafkaError._NO_OFFSET:
                return
            if error.code() not in _MOVED | PASSING or time.monotonic() > deadline:
                raise self._watch.explained(error, doing)
            self._gather(0.05)
