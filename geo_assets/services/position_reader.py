"""Positions from the log as slices of columns, each partition from its own offset on, and how many are left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from resources.event_log.protocol import LogUnavailable, OffsetOutOfRange

if TYPE_CHECKING:
    from resources.event_log.protocol import EventLog, Slice

log = structlog.get_logger()

_LOOK_S = 10.0
"""Between looks for new partitions: as often as a broker's client asks by itself."""
_AGAIN_S = 0.5
"""The same while the log does not answer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Records, and when they were read (`time.perf_counter_ns`)."""

    records: Slice
    read_ns: int


class PositionReader:
    """Follows `[positions]`. For one thread; a thread of its own looks for new partitions.

    Args:
        log_: The event log.
        offsets: Partition -> offset to begin with; a partition that is not named begins with its oldest record.
        lost: Called with what retention took before it was read; raises to end the reading.
        silenced: What is to be known of records that were read: of some nothing.

    Raises:
        LogUnavailable: Not now.
    """

    def __init__(
        self,
        log_: EventLog,
        offsets: Mapping[int, int],
        *,
        lost: Callable[[OffsetOutOfRange], None],
        silenced: Callable[[Slice], Slice] = lambda records: records,
    ) -> None:
        self._log, self._lost, self._silenced = log_, lost, silenced
        begins = {partition: extent.begin for partition, extent in log_.extents(topics.POSITIONS).items()}
        self._follower = log_.follow(topics.POSITIONS, {p: offsets.get(p, begin) for p, begin in begins.items()})
        self._known = frozenset(begins)
        self._fresh: dict[int, int] = {}
        self._away = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="partitions", daemon=True)
        self._thread.start()

    def take(self, most: int, timeout_s: float = 0.0) -> Batch | None:
        """The next batch; None where none is there yet.

        Args:
            most: Records.
            timeout_s: How long to wait for a first one.

        Raises:
            Exception: What ends the reading.
        """
        while self._fresh:
            self._follower.seek(*self._fresh.popitem())
        try:
            records = self._follower.take(most, timeout_s)
        except OffsetOutOfRange as gone:
            self._lost(gone)
            self._follower.seek(gone.partition, gone.begin)
            return None
        except LogUnavailable as fault:
            if not self._away:
                log.warning("positions wait", error=str(fault))
            self._away = True
            return None
        if not len(records):
            return None
        self._away = False
        return Batch(self._silenced(records), time.perf_counter_ns())

    @property
    def at_end(self) -> bool:
        """Whether the last look found nothing new and everything read was taken."""
        return not self._away and self._follower.at_end

    @property
    def next_offsets(self) -> dict[int, int]:
        """Partition -> offset of the next record that `take` gives."""
        return dict(self._follower.next_offsets)

    @property
    def lag(self) -> dict[int, int]:
        """Partition -> records not taken, as of the last look of the one who fetches. Any thread may ask."""
        ends = self._follower.ends
        return {p: max(0, ends.get(p, offset) - offset) for p, offset in dict(self._follower.next_offsets).items()}

    def close(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(timeout=30.0)
        self._follower.close()

    def _look(self) -> None:
        while not self._stop.wait(_AGAIN_S if self._away else _LOOK_S):
            try:
                extents = self._log.extents(topics.POSITIONS)
            except Exception as fault:
                log.warning("partitions of [positions] are not seen", error=f"{type(fault).__name__}: {fault}")
                continue
            self._away = False
            new = {partition: extent.begin for partition, extent in extents.items() if partition not in self._known}
            if new:
                log.info("[positions] has more partitions", partitions=sorted(new))
                self._known |= new.keys()
                self._fresh |= new
