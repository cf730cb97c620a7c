"""Positions that could not be judged: which they are, and the tracker as it was before their batch.

The ledger keeps them beside the snapshot in force (`Stored.passed_over`), so that a run that reads them again tells
what the one before told, whether the fault comes again or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from geo_assets.events import topics
from geo_assets.geofence.positions import read_positions
from geo_assets.geofence.tracker import TooManyDevices, Tracker
from resources.event_log.protocol import OffsetOutOfRange

if TYPE_CHECKING:
    from geo_assets.geofence.index import FenceIndex
    from geo_assets.geofence.positions import Positions
    from resources.event_log.protocol import EventLog, Record

MOST = 10_000
"""Of one snapshot; who reads waits for the next one above. Some 100 kB in the ledger."""

_PIECE = 4_000
"""Records read again at once."""


class PassedOver:
    """The positions to be passed over.

    Args:
        offsets: Partition -> their offsets.
    """

    def __init__(self, offsets: Mapping[int, Sequence[int]]) -> None:
        self._offsets = {partition: set(some) for partition, some in offsets.items()}

    @property
    def full(self) -> bool:
        """Whether no more positions may be read before the next snapshot."""
        return bool(self._offsets) and sum(map(len, self._offsets.values())) >= MOST

    def add(self, positions: Positions, rows: Sequence[int]) -> None:
        """Pass over rows of a batch from here on."""
        for row in rows:
            self._offsets.setdefault(int(positions.partition[row]), set()).add(int(positions.offset[row]))

    def from_(self, offsets: Mapping[int, int]) -> dict[int, list[int]]:
        """Those from given offsets on: what a snapshot of these offsets has to be kept with.

        Args:
            offsets: Partition -> offset of the next record.
        """
        kept = {p: sorted(o for o in some if o >= offsets.get(p, 0)) for p, some in sorted(self._offsets.items())}
        return {partition: some for partition, some in kept.items() if some}

    def drop(self, offsets: Mapping[int, int]) -> None:
        """Forget those below the offsets of the snapshot in force: nobody reads them again."""
        if self._offsets:
            self._offsets = {partition: set(some) for partition, some in self.from_(offsets).items()}

    def silenced(self, positions: Positions) -> Positions:
        """A batch in which they say nothing."""
        if not self._offsets:
            return positions
        none = frozenset[int]()
        places = zip(positions.partition.tolist(), positions.offset.tolist(), strict=True)
        rows = [row for row, (p, offset) in enumerate(places) if offset in self._offsets.get(p, none)]
        return positions.silenced(rows) if rows else positions


def rows_of(fault: TooManyDevices, positions: Positions) -> list[int]:
    """The rows of a batch whose devices are too many."""
    return [row for row, device in enumerate(positions.device) if device in fault.devices]


def rebuilt(
    log: EventLog,
    snapshot: bytes,
    index: FenceIndex,
    offsets: Mapping[int, int],
    passed_over: PassedOver,
    meanwhile: Callable[[], None],
    shed: Callable[[Sequence[Record]], Sequence[Record]] = lambda records: records,
) -> Tracker:
    """The tracker as it was: from the snapshot in force, by what was read since. All that was told.

    Args:
        log: The event log.
        snapshot: Its bytes.
        index: The fences it names.
        offsets: Partition -> offset of the next record, at the moment that is wanted.
        passed_over: As they were then.
        meanwhile: Called before each read; may raise to end the matter.
        shed: What is to be known of records that were read: of some nothing.

    Raises:
        LogUnavailable: Not now.
    """
    tracker, _ = Tracker.restore(snapshot, {index.fence_set.revision: index})
    for partition, stop in sorted(offsets.items()):
        offset = tracker.offsets.get(partition, 0)
        while offset < stop:
            meanwhile()
            try:
                read = log.read(topics.POSITIONS, partition, offset, max_records=_PIECE)
            except OffsetOutOfRange as gone:
                if offset >= gone.begin:
                    raise
                # What a partition begins with, or what retention has taken since.
                offset = gone.begin
                continue
            some = [record for record in read if record.offset < stop]
            if not some:
                break
            _feed(tracker, shed(some), passed_over)
            offset = some[-1].offset + 1
    return tracker


def _feed(tracker: Tracker, records: Sequence[Record], passed_over: PassedOver) -> None:
    positions, _ = read_positions(
        [record.value for record in records], [record.partition for record in records],
        [record.offset for record in records], [record.timestamp_ms for record in records],
    )  # fmt: skip
    positions = passed_over.silenced(positions)
    while True:
        try:
            for _ in tracker.pieces(positions, lambda *_: None):
                pass
        except TooManyDevices as fault:
            positions = positions.silenced(rows_of(fault, positions))
        else:
            return
