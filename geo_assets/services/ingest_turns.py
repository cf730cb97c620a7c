"""Whose turn it is in ingest: what is light goes at once, what is heavy waits for its place beside it.

Order holds within a partition: behind a heavy record its partition's light ones wait, those of others do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from resources.event_log.protocol import Record

Partition = tuple[str, int]

HELD_RECORDS = 5_000
HELD_BYTES = 64_000_000
"""Most that waits in memory behind heavy records, about; with as much, nothing is read until some of it is done."""


class Turns:
    """Sorts what is read into what may be done now and what has to wait. For one thread.

    Args:
        heavy: Whether a record may take long.
    """

    def __init__(self, heavy: Callable[[Record], bool]) -> None:
        self._heavy = heavy
        self._waiting: dict[Partition, deque[Record]] = {}
        """Of each partition that waits, its records in order: a heavy one first."""
        self._under_way: set[Partition] = set()
        self._bytes = self._records = 0

    def __len__(self) -> int:
        """Records that wait, those under way with them."""
        return self._records

    @property
    def full(self) -> bool:
        """Whether nothing more should be read for now."""
        return self._records >= HELD_RECORDS or self._bytes >= HELD_BYTES

    def sort(self, records: Sequence[Record]) -> list[Record]:
        """Take in records, in the order in which they were read; those that may be done now, in that order."""
        now: list[Record] = []
        for record in records:
            where = record.topic, record.partition
            if where in self._waiting or self._heavy(record):
                self._waiting.setdefault(where, deque()).append(record)
                self._records += 1
                self._bytes += len(record.value or b"")
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
        """A heavy record is done: the light ones behind it, which may be done now."""
        where = record.topic, record.partition
        waiting = self._waiting[where]
        self._under_way.discard(where)
        self._take(waiting)
        now: list[Record] = []
        while waiting and not self._heavy(waiting[0]):
            now.append(self._take(waiting))
        if not waiting:
            del self._waiting[where]
        return now

    def _take(self, waiting: deque[Record]) -> Record:
        record = waiting.popleft()
        self._records -= 1
        self._bytes -= len(record.value or b"")
        return record
