"""Following partitions of the embedded log: a look at what is new of each, and a wait for the next append."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from resources.event_log.protocol import Extent, LogUnavailable, OffsetOutOfRange, Record, Slice

if TYPE_CHECKING:
    import sqlite3

    from resources.event_log.sqlite import SqliteEventLog

_LOOK_S = 0.01
"""Between two looks while nothing comes, where other processes' appends cannot be heard."""
_LOOK_HEARING_S = 0.05
"""The same where they can: a bell that was missed costs as much."""
_BYTES = 16_000_000
"""Most of one slice, about."""


class SqliteFollower:
    """`Follower` on the embedded log. Nothing is fetched ahead: a read is a few milliseconds, of a file.

    Args:
        log: Whose.
        topic: Its name.
        offsets: Partition -> offset to begin with.

    Raises:
        UnknownTopic, UnknownPartition: As said.
    """

    def __init__(self, log: SqliteEventLog, topic: str, offsets: Mapping[int, int]) -> None:
        self._log, self._topic = log, topic
        self._next = dict(offsets)
        self._ends: dict[int, int] = {}
        self._turn = 0
        self._closed = False
        for partition in offsets:
            log.check(topic, partition)
        self._ear = log.ear([topic])
        self._look_s = _LOOK_S if self._ear is None else _LOOK_HEARING_S

    def take(self, max_records: int, timeout_s: float = 0.0) -> Slice:
        """The next records of all partitions (see `Follower.take`)."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._closed:
                raise LogUnavailable(f"this follower of {self._topic} is closed")
            appends = self._log.appends
            extents, parts = self._log.file.attempt(lambda c: self._look(c, max_records))
            self._ends = {partition: extent.end for partition, extent in extents.items() if partition in self._next}
            if parts:
                for partition, records in parts.items():
                    self._next[partition] = records[-1].offset + 1
                self._turn += 1
                return _slice(list(chain.from_iterable(parts[partition] for partition in sorted(parts))))
            for partition, offset in self._next.items():
                extent = extents[partition]
                if not extent.begin <= offset <= extent.end:
                    raise OffsetOutOfRange(self._topic, partition, offset, extent.begin, extent.end)
            left = deadline - time.monotonic()
            if left <= 0:
                return _slice([])
            self._log.wait(self._ear, min(self._look_s, left), appends)

    def _look(
        self, connection: sqlite3.Connection, max_records: int
    ) -> tuple[dict[int, Extent], dict[int, list[Record]]]:
        """Ends of all partitions, and what is new of each that has something; each has its turn at being first."""
        topic, extents = self._log.standing(connection, self._topic)
        parts: dict[int, list[Record]] = {}
        order = sorted(self._next)
        turn = self._turn % max(1, len(order))
        left = max_records
        for partition in order[turn:] + order[:turn]:
            offset, extent = self._next[partition], extents[partition]
            if left > 0 and extent.begin <= offset < extent.end:
                records = self._log.read_with(connection, topic, partition, offset, left, _BYTES // len(order))
                if records:
                    parts[partition] = records
                    left -= len(records)
        return extents, parts

    def seek(self, partition: int, offset: int) -> None:
        """Go on from an offset, or follow one more partition (see `Follower.seek`)."""
        self._log.check(self._topic, partition)
        self._next[partition] = offset

    @property
    def next_offsets(self) -> Mapping[int, int]:
        """Partition -> offset of the next record that `take` gives."""
        return self._next

    @property
    def ends(self) -> Mapping[int, int]:
        """Partition -> its end as of the last look."""
        return self._ends

    @property
    def at_end(self) -> bool:
        """Whether everything was taken, as of the last look."""
        return all(self._ends.get(partition) == offset for partition, offset in self._next.items())

    def close(self) -> None:
        """End."""
        self._closed = True


def _slice(records: list[Record]) -> Slice:
    return Slice(
        [record.partition for record in records],
        [record.offset for record in records],
        [record.value for record in records],
        [record.timestamp_ms for record in records],
        records.__getitem__,
    )
