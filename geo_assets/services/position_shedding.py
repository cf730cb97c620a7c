"""Shedding of `[positions]`, where it is declared: what waited through a long pause says nothing, by its priority.

A routing run pauses reading while its triggers find no way out. When it goes on after a pause long enough, it names a
span of each partition, from where it stands to the end, and the priority below which records in it are passed over. The
span is kept beside the snapshot in force before anything of it is judged: a run that reads it again passes over the
same records, and tells the same triggers under the same keys. While triggers of a run before are told again, nothing is
shed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from geo_assets.flow.shedding import Shedding, declared, priority_in

if TYPE_CHECKING:
    from geo_assets.services.geofence_snapshots import Snapshots
    from geo_assets.settings import Settings
    from resources.event_log.protocol import Record, Slice

log = structlog.get_logger()

NOTHING = b'{"event_time_ms": 0}'
"""The value of a record that says nothing: neither a device nor, as time does not go back, a time."""

Span = tuple[int, int, int, int]
"""As `Stored.shed`: partition, first offset, offset behind the last, priority below which records are passed over."""


class PositionShedding:
    """Which positions a routing run passes over. For one thread.

    Args:
        settings: What is declared.
        snapshots: Of the run; keeps the spans.
    """

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        self._rules = Shedding(declared(settings.shed_topics), after_s=settings.shed_after_s)
        self._snapshots = snapshots
        self._since_s: float | None = None
        self.passed_over = 0
        """Records taken that say nothing for being shed; those that are read again count again."""

    @property
    def spans(self) -> Sequence[Span]:
        """What is shed, from the snapshot in force on."""
        return self._snapshots.stored.shed

    def paused(self, now_s: float) -> None:
        """Nothing is read now."""
        if self._since_s is None:
            self._since_s = now_s

    def below(self, now_s: float) -> int | None:
        """The priority below which what waits may be shed if reading goes on now; None: nothing."""
        return self._rules.below(topics.POSITIONS, self._since_s, now_s)

    def shed(self, now_s: float, offsets: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Before reading goes on after a long pause: what waits by now is shed by its priority.

        Not while a snapshot is being written: both change what is in force.

        Args:
            now_s: The time, seconds.
            offsets: Partition -> offset of the next record to be read.
            ends: Partition -> offset behind its last record.

        Raises:
            Replaced: A run of a higher epoch has taken over.
            LedgerUnavailable: Not now; nothing may be read before this has returned.
        """
        below = self.below(now_s)
        if below is None or self._since_s is None:
            return
        spans = [(p, offset, ends[p], below) for p, offset in sorted(offsets.items()) if ends.get(p, 0) > offset]
        if spans:
            self._snapshots.shed(spans)
        log.warning(
            "positions of low priority are shed", below=below, paused_s=round(now_s - self._since_s),
            records=sum(stop - start for _, start, stop, _ in spans),
        )  # fmt: skip

    def resumed(self) -> None:
        """Something is read now."""
        self._since_s = None

    def sheds(self, record: Record) -> bool:
        """Whether a record is passed over."""
        spans = (span for span in self.spans if span[0] == record.partition and span[1] <= record.offset < span[2])
        below = max((span[3] for span in spans), default=None)
        return below is not None and priority_in(record.headers) < below

    def silenced(self, records: Slice) -> Slice:
        """A slice in which what is shed says nothing, and keeps its offset."""
        partitions = {span[0] for span in self.spans}
        if not partitions:
            return records
        rows = [
            row
            for row, partition in enumerate(records.partitions)
            if partition in partitions and self.sheds(records.record(row))
        ]
        if not rows:
            return records
        self.passed_over += len(rows)
        values = list(records.values)
        for row in rows:
            values[row] = NOTHING
        return replace(records, values=values)

    def without(self, records: Sequence[Record]) -> list[Record]:
        """The same of records."""
        return [record._replace(value=NOTHING) if self.sheds(record) else record for record in records]
