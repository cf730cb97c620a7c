"""Whose turn it is in ingest: what is light goes at once, what is heavy waits for its place beside it.

Records of one key keep their order. What has another key, or none, passes a heavy record of its partition; the offset
stays at the heavy one until it is done, so whoever takes over does what passed it again, and none of it counts twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from resources.event_log.protocol import Record

Partition = tuple[str, int]

HELD_RECORDS = 5_000
HELD_BYTES = 64_000_000
"""Most that waits in memory for heavy records, about; with as much, nothing is read until some of it is done."""

AHEAD_RECORDS = 50_000
"""Most records that are done, or wait, and would be read again, half a minute of work: with as many nothing is read."""


class Turns:
    """Sorts what is read into what may be done now and what has to wait. For one thread.

    Args:
        heavy: Whether a record may take long.
    """

    def __init__(self, heavy: Callable[[Record], bool]) -> None:
        self._heavy = heavy
        self._waiting: dict[Partition, deque[Record]] = {}
        """Of each partition that waits, its records in order: a heavy one first."""
        self._keys: dict[Partition, set[str]] = {}
        """Keys of what waits."""
        self._read: dict[Partition, int] = {}
        """The offset behind the last record that was read."""
        self._told: dict[Partition, int] = {}
        """What `moved` said last, or where reading began."""
        self._under_way: set[Partition] = set()
        self._bytes = self._records = 0

    def __len__(self) -> int:
        """Records that wait, those under way with them."""
        return self._records

    @property
    def full(self) -> bool:
        """Whether nothing more should be read for now."""
        if self._records >= HELD_RECORDS or self._bytes >= HELD_BYTES:
            return True
        ahead = sum(self._read[where] - waiting[0].offset for where, waiting in self._waiting.items())
        return ahead >= AHEAD_RECORDS

    def sort(self, records: Sequence[Record]) -> list[Record]:
        """Take in records, in the order in which they were read; those that may be done now, in that order."""
        now: list[Record] = []
        for record in records:
            where = record.topic, record.partition
            self._read[where] = record.offset + 1
            # Where reading begins, or begins again: what was said of it may have been another member's to say.
            self._told[where] = min(self._told.get(where, record.offset), record.offset)
            if self._heavy(record) or self._follows(record):
                self._put(record)
            else:
                now.append(record)
        return now

    def next_heavy(self) -> Record | None:
        """A heavy record whose turn it is, which is under way from now on; each partition in turn."""
        for where, waiting in self._waiting.items():
            if where not in self._under_way:
                # Behind the others from now on.
                self._waiting[where] = self._waiting.pop(where)
                self._under_way.add(where)
                return waiting[0]
        return None

    def done(self, record: Record) -> list[Record]:
        """A heavy record is done: the light ones that waited for it and for no other, which may be done now."""
        where = record.topic, record.partition
        waiting = self._waiting.pop(where)
        del self._keys[where]
        self._under_way.discard(where)
        for one in waiting:
            self._records -= 1
            self._bytes -= len(one.value or b"")
        waiting.popleft()
        now: list[Record] = []
        for one in waiting:
            if self._heavy(one) or self._follows(one):
                self._put(one)
            else:
                now.append(one)
        return now

    def moved(self) -> dict[Partition, int]:
        """Next offsets, all that does not wait being done, of partitions where it is another than was said before."""
        found: dict[Partition, int] = {}
        for where, read in self._read.items():
            waiting = self._waiting.get(where)
            offset = waiting[0].offset if waiting else read
            if self._told.get(where) != offset:
                found[where] = self._told[where] = offset
        return found

    def _follows(self, record: Record) -> bool:
        """Whether one of its key waits."""
        return record.key is not None and record.key in self._keys.get((record.topic, record.partition), ())

    def _put(self, record: Record) -> None:
        where = record.topic, record.partition
        self._waiting.setdefault(where, deque()).append(record)
        keys = self._keys.setdefault(where, set())
        if record.key is not None:
            keys.add(record.key)
        self._records += 1
        self._bytes += len(record.value or b"")
