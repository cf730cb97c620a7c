r"""What an event log promises. Adapters keep it; the contract suite in geo_assets_tests shows that they do.

Where a broker (Kafka) differs from the embedded log:
- `append` checks all its records before it sends the first, so a refused record leaves nothing behind. From then on
  each is acknowledged by itself: where LogUnavailable is raised, or the process is killed, some may be in the log.
- Retention is the broker's own work and counts from a record's timestamp, not from when it was appended. It takes
  timestamps from 1 on, and by default none more than an hour ahead.
- `EventLog.commit` works while nobody reads in the group, or through a member that this very client opened.
- A member that was killed is noticed when its session ends. What a group committed is forgotten when nobody has read in
  it for a week (`offsets.retention.minutes`).
- Offsets may have gaps: marks of other writers' transactions take one each.
- It does not check epochs: what a writer that was replaced still appends is in the log, and readers pass it over.
- Other writers' keys and headers need be no text: what is not UTF-8 is read with `\xff` escapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable


class LogError(Exception):
    """The event log could not do what was asked."""


class LogUnavailable(LogError):
    """The log cannot take or give records now (disk full, broker away, locked too long); try again later."""


class UnknownTopic(LogError):
    """The topic was never declared."""


class UnknownPartition(LogError):
    """The topic has no partition of that number."""


class InvalidRecord(LogError):
    """A record's key or header is no text that UTF-8 can hold (a lone surrogate), or its timestamp no 64-bit number."""


class RecordTooLarge(LogError):
    """A record is larger than the log takes in one piece; it names the size and the limit in bytes."""


class StaleEpoch(LogError):
    """An append's epoch is below the highest one written to a partition: another writer has taken over."""


class OffsetOutOfRange(LogError):
    """The offset lies before the oldest record that retention left, or beyond the end."""

    def __init__(self, topic: str, partition: int, offset: int, begin: int, end: int) -> None:
        super().__init__(f"offset {offset} of {topic}/{partition} is outside {begin}..{end}")
        self.topic, self.partition, self.offset, self.begin, self.end = topic, partition, offset, begin, end


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic as it is declared: its name, its partitions, how long it keeps records, what one record may weigh."""

    name: str
    partitions: int = 4
    retention_ms: int = 7 * 24 * 3600 * 1000
    max_record_bytes: int = 1_000_000


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to append. A key places it in a partition (same key, same partition, same order); None spreads it."""

    topic: str
    key: str | None
    value: bytes | None
    headers: Mapping[str, str] = field(default_factory=dict)
    timestamp_ms: int | None = None
    """Milliseconds since the epoch, UTC; None stamps it when it is appended."""
    partition: int | None = None
    """Names the partition outright; None places it by its key."""


class Record(NamedTuple):
    """A record as it stands in the log."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: bytes | None
    headers: Mapping[str, str]
    timestamp_ms: int


class Position(NamedTuple):
    """Where a record stands: partition and offset."""

    partition: int
    offset: int


class Extent(NamedTuple):
    """What a partition holds: `begin` is its oldest offset, `end` the offset the next record will get."""

    begin: int
    end: int


class Holding(NamedTuple):
    """How a partition stands that a member of a group holds."""

    broker: str
    """Who leads it: one connection brings what all partitions of a broker give. Empty where nobody is known to."""
    behind: int | None
    """Records up to its end, as of the last look of whoever fetches; None where nobody has looked."""
    paused: bool


@runtime_checkable
class Consumer(Protocol):
    """A member of a group. Partitions of the topics are shared among the members that are alive.

    A partition passes to another member when this one closes or is silent past its session timeout; it then goes on
    from the committed offset, so records since then come again (at least once).
    """

    def poll(self, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """Up to `max_records` next records of the partitions held, waiting at most `timeout_s` for a first one.

        Whoever has enough for now polls for 0: it stays a member, and gives up and takes partitions as the group says.

        Raises:
            OffsetOutOfRange: Retention took records that this group had not read. It is raised again until the group's
                position is set (`EventLog.commit`) and taken up (`seek_to_committed`): a loss is never passed over.
            LogUnavailable: Not now; nothing was lost.
        """
        ...

    def commit(self, next_offsets: Mapping[tuple[str, int], int]) -> None:
        """Set (topic, partition) -> next offset to read. One of a partition no longer held is ignored.

        It outlives every process. A power failure may take the last ones back: their records are then polled again.
        """
        ...

    def seek_to_committed(self) -> None:
        """Forget what was polled and not committed: the next poll gives it again (after a transient fault)."""
        ...

    def assignment(self) -> frozenset[tuple[str, int]]:
        """The (topic, partition) pairs held now."""
        ...

    def pause(self, partitions: Collection[tuple[str, int]]) -> None:
        """Give nothing of these (topic, partition) pairs until they are resumed, and fetch nothing of them.

        One that is not held is ignored. One that is given up and comes back is not paused.
        """
        ...

    def resume(self, partitions: Collection[tuple[str, int]]) -> None:
        """Go on with paused (topic, partition) pairs where they stopped; from a broker that takes up to a second."""
        ...

    def holdings(self) -> Mapping[tuple[str, int], Holding]:
        """The (topic, partition) pairs held as of the last poll, and how each stands.

        Raises:
            LogUnavailable: Not now.
        """
        ...

    def close(self) -> None:
        """Leave the group at once."""
        ...


@dataclass(frozen=True, slots=True)
class Slice:
    """Records of a topic as columns, partition after partition, those of each in their order.

    Columns, as whoever reads tens of thousands a second pays for every object.

    Args:
        partitions: Partition of each, ascending.
        offsets: Offset of each.
        values: Value of each.
        timestamps_ms: Stamp of each, milliseconds since the epoch, UTC.
        record: All of one, by its place.
    """

    partitions: Sequence[int]
    offsets: Sequence[int]
    values: Sequence[bytes | None]
    timestamps_ms: Sequence[int]
    record: Callable[[int], Record]

    def __len__(self) -> int:
        return len(self.offsets)


@runtime_checkable
class Follower(Protocol):
    """Reads partitions of one topic from given offsets on, without a group, for as long as it is open.

    What comes is fetched ahead (by a broker's client, as much as its bounded queue holds), so that taking it waits for
    nobody. Whoever has enough for now takes no more: the queue fills and fetching stops. For one thread.
    """

    def take(self, max_records: int, timeout_s: float = 0.0) -> Slice:
        """The next records of all partitions, as many as are there; waits at most `timeout_s` for a first one.

        Raises:
            OffsetOutOfRange: Of one partition, the next offset is not there any more, or not yet. It is raised again
                until `seek` says where to go on; the other partitions may be read no further before. What came before
                it was given.
            LogUnavailable: Not now. Nothing was lost; it goes on by itself.
        """
        ...

    def seek(self, partition: int, offset: int) -> None:
        """Go on from an offset: of a partition that is followed, or of one more. Raises UnknownPartition."""
        ...

    @property
    def next_offsets(self) -> Mapping[int, int]:
        """Partition -> offset of the next record that `take` gives."""
        ...

    @property
    def ends(self) -> Mapping[int, int]:
        """Partition -> its end as of the last look of the one who fetches; one that was not seen yet is left out."""
        ...

    @property
    def at_end(self) -> bool:
        """Whether everything was taken up to the ends of all partitions, as of the last look."""
        ...

    def close(self) -> None:
        """End."""
        ...


Done = Callable[[Mapping[int, LogError], Sequence[int]], None]
"""What became of the records of one `Publisher.send`, called once: those that failed, by their place, and when each of
the others was acknowledged (`time.perf_counter_ns`), in no order."""


@runtime_checkable
class Publisher(Protocol):
    """Appends to one topic without waiting: many thousands of records a second, each acknowledged by itself.

    For one thread: it sends, serves and closes. Records of one key get into the log in the order in which they were
    sent. Hence a publisher that could not deliver one for any cause but the record itself is broken: it fails whatever
    it has under way, and what was sent later is never in the log before what was sent earlier. What it failed may be in
    the log all the same. Whoever sends goes on with another publisher, from the first record that failed.
    """

    @property
    def under_way(self) -> int:
        """Records sent of which no outcome was served yet."""
        ...

    @property
    def broken(self) -> LogError | None:
        """Why it takes no more."""
        ...

    @property
    def max_record_bytes(self) -> int:
        """Most that key and value may have together."""
        ...

    def send(
        self, keys: Sequence[str | None], values: Sequence[bytes | None], done: Done, *, partition: int | None = None
    ) -> None:
        """Send records, in this order. Never waits for the log.

        Args:
            keys: Of the records; the same number as `values`.
            values: Of the records.
            done: Called by `serve` (or `close`), in the caller's thread, when the last of them has its outcome. A
                record that is too large or cannot be stored fails by itself (RecordTooLarge, InvalidRecord), and costs
                no other.
            partition: Where they go; None places each by its key.

        Raises:
            LogError: It is broken, or closed; nothing was sent.
        """
        ...

    def serve(self, timeout_s: float = 0.0) -> None:
        """Call `done` of what has its outcome by now; waits at most `timeout_s` for a first one."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Serve until nothing is under way; whether that was reached in time."""
        ...

    def close(self) -> None:
        """Fail what is still under way, and end."""
        ...


@runtime_checkable
class EventLog(Protocol):
    """Records by topic and partition, kept for a time, read from any offset by any number of processes."""

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create the topics that are missing. Partitions of an existing one only grow; retention is updated."""
        ...

    def topics(self) -> Mapping[str, TopicSpec]:
        """Every declared topic."""
        ...

    def topic_id(self, topic: str) -> str:
        """An identity that a deleted and re-created topic does not share. Raises UnknownTopic."""
        ...

    def append(self, records: Sequence[NewRecord], *, epoch: int | None = None) -> list[Position]:
        """Append all or none of them durably (in order per key) and say where they stand; see above for brokers.

        Args:
            records: Of any topics.
            epoch: Of the writer, where one takes over from the other: in the same transaction it is held against the
                highest one written to each partition, and written there. None: whoever writes.

        Raises:
            StaleEpoch: It is below that of a partition; nothing was appended. Never from a broker.
            UnknownTopic: A topic was never declared.
            UnknownPartition: A record names a partition that its topic has not.
            InvalidRecord: A key or header cannot be stored; nothing was appended.
            RecordTooLarge: A record is over its topic's limit; nothing was appended.
            LogUnavailable: Not now; nothing was acknowledged. Appending them again is right: at least once.
        """
        ...

    def publisher(self, topic: str, *, epoch: int | None = None) -> Publisher:
        """A publisher of its own for one thread. Raises UnknownTopic, LogUnavailable.

        Args:
            topic: Where it appends.
            epoch: Of all that it appends (see `append`); StaleEpoch breaks it.
        """
        ...

    def read(
        self, topic: str, partition: int, offset: int, max_records: int = 10_000, max_bytes: int = 16_000_000
    ) -> list[Record]:
        """Records from `offset` on, bounded by both limits (at least one record if there is one); never waits.

        Raises:
            UnknownTopic: The topic was never declared.
            UnknownPartition: It has no such partition.
            OffsetOutOfRange: Retention took the offset, or it lies beyond the end.
        """
        ...

    def follow(self, topic: str, offsets: Mapping[int, int]) -> Follower:
        """A follower of its own for one thread.

        Args:
            topic: Which.
            offsets: Partition -> offset to begin with. Those that are not named are not read.

        Raises:
            UnknownTopic: The topic was never declared.
            UnknownPartition: It has no such partition.
        """
        ...

    def extents(self, topic: str) -> dict[int, Extent]:
        """Begin and end of every partition. Raises UnknownTopic."""
        ...

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's next offset of every partition it committed one for."""
        ...

    def commit(self, group: str, topic: str, next_offsets: Mapping[int, int]) -> None:
        """Set a group's offsets outright, for readers that keep their positions elsewhere and only show them here.

        Raises:
            UnknownTopic: The topic was never declared.
            UnknownPartition: It has no such partition.
            LogError: A broker refuses, as other processes are members of the group.
        """
        ...

    def consumer(self, group: str, topics: Sequence[str], *, from_end: bool = False) -> Consumer:
        """Join a group. Where it committed nothing it starts at the oldest record, or with `from_end` at the end."""
        ...

    def enforce_retention(self, now_ms: int | None = None) -> dict[str, int]:
        """Delete what was appended longer ago than its topic keeps; records deleted by topic. A broker of its own: {}.

        It asks nobody: what a group has not read yet goes too, and OffsetOutOfRange tells that group.
        """
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...
