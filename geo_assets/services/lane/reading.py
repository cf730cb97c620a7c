"""From records of `[tiles]` to marks: what the lane reads, the ledger's positions decide upon.

The lane reads in a group, so that several workers share the partitions; where reading begins is the group's matter.
Which records count is not: each mark moves the ledger's position of its partition, so what lies between that position
and the first record read is marked first. Sensor, lane and replays may bring a record in any order, and twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import structlog

from geo_assets.services.dead_letters import now_ms, write_dead_letters
from geo_assets.services.hints import hint_dead_letter, read_slice
from resources.event_log.protocol import Holding, OffsetOutOfRange, Record

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

GROUP = "live"
"""Consumer group of the lane's workers."""

POLL_RECORDS = 500
"""Most records of one poll: they are marked in some milliseconds."""

YOUNG_MS = 10_000
"""Records that somebody else marked are looked at while they are so young: that one may still be about to build."""

GAP_RECORDS = 5_000
"""Records of one transaction when a gap is marked."""


class HintReader:
    """Reads hints in the lane's group and marks their tiles.

    Args:
        stack: The ports.
        topics: Where hints come in.
    """

    def __init__(self, stack: Stack, topics: Sequence[str]) -> None:
        self._stack = stack
        # What is older is in the ledger, or between its position and the first record read.
        self._consumer = stack.log.consumer(GROUP, topics, from_end=True)
        self._topic_ids = {topic: stack.log.topic_id(topic) for topic in topics}
        self._positions: dict[tuple[str, int], int] = {}
        self._owed: dict[tuple[str, int], int] = {}

    def poll(self, timeout_s: float, most: int = POLL_RECORDS) -> list[Record]:
        """Next records whose tiles are marked, durably; waits at most so long for a first one.

        Args:
            timeout_s: Longest wait.
            most: Records at most. With 0 it only stays in the group.

        Raises:
            LogUnavailable, LedgerUnavailable: Not now. `again` makes the next poll give the records again.
        """
        try:
            records = self._consumer.poll(most, timeout_s)
        except OffsetOutOfRange as gone:
            # The sensor finds the same gap at the ledger's position and has the coverage repaired.
            log.warning("hints were deleted before the lane read them", topic=gone.topic, partition=gone.partition)
            self._stack.log.commit(GROUP, gone.topic, {gone.partition: gone.begin})
            self._consumer.seek_to_committed()
            return []
        fresh: list[Record] = []
        for (topic, partition), part in groupby(records, key=lambda record: (record.topic, record.partition)):
            fresh += self._mark(topic, partition, list(part))
        return fresh

    def commit(self) -> None:
        """Show the group how far its marks are: what a successor need not read again."""
        if self._owed:
            self._consumer.commit(self._owed)
            self._owed = {}

    def again(self) -> None:
        """After an outage: what was polled and not committed comes again."""
        self._owed = {}
        self._positions = {}
        self._consumer.seek_to_committed()

    def holdings(self) -> Mapping[tuple[str, int], Holding]:
        """The partitions held, and how each stands. Raises LogUnavailable."""
        return self._consumer.holdings()

    def pause(self, partitions: Collection[tuple[str, int]]) -> None:
        """Have nothing of them fetched."""
        self._consumer.pause(partitions)

    def resume(self, partitions: Collection[tuple[str, int]]) -> None:
        """Go on with them."""
        self._consumer.resume(partitions)

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()

    def _mark(self, topic: str, partition: int, records: list[Record]) -> list[Record]:
        """Mark, and say which of the records are worth a look: old ones that were marked long ago are not."""
        where = topic, partition
        first, end = records[0].offset, records[-1].offset + 1
        position = self._positions.get(where, -1)
        if position < first:
            # The first look; or another worker had the partition, or the sensor went on.
            position = self._stack.ledger.positions(self._topic_ids[topic]).get(partition, 0)
            try:
                for slice_ in self._gap(topic, partition, position, first):
                    self._mark_slice(topic, partition, slice_)
            except OffsetOutOfRange:
                return []  # The sensor has the coverage repaired, moves the position, and marks what is there.
        if end > position:
            self._mark_slice(topic, partition, records)
        self._positions[where] = max(position, end)
        self._owed[where] = end
        young = now_ms() - YOUNG_MS
        return [record for record in records if record.offset >= position or record.timestamp_ms > young]

    def _gap(self, topic: str, partition: int, position: int, first: int) -> Iterator[Sequence[Record]]:
        """Records from the ledger's position to the first one read.

        Raises:
            OffsetOutOfRange: Retention took some of them.
        """
        while position < first:
            records = self._stack.log.read(topic, partition, position, max_records=GAP_RECORDS)
            records = [record for record in records if record.offset < first]
            if not records:
                return  # Offsets may have holes.
            yield records
            position = records[-1].offset + 1

    def _mark_slice(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        part = read_slice(records, records[0].offset)
        if part.unreadable:
            # What no tile can be made of is durable as a dead letter before the position moves past it.
            letters = [hint_dead_letter(record, fault, now_ms()) for record, fault in part.unreadable]
            write_dead_letters(self._stack, letters)
        self._stack.ledger.mark_from_log(self._topic_ids[topic], partition, part.hints, part.next_offset)
