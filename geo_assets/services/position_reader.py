"""Positions from the log, read ahead by a thread: partition after partition, each from its own offset, in batches."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from resources.event_log.protocol import LogUnavailable, OffsetOutOfRange

if TYPE_CHECKING:
    from resources.event_log.protocol import EventLog, Record

log = structlog.get_logger()

_AHEAD = 2
"""Batches read ahead: one is judged while the next ones are read."""

_IDLE_S = 0.01
_PAUSE_S = 0.5
"""After a log that did not answer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of a partition, in their order, and when they were read (`time.perf_counter_ns`)."""

    records: list[Record]
    read_ns: int


class PositionReader:
    """Reads ahead. `take` from one thread.

    Args:
        log_: The event log.
        offsets: Partition -> offset to begin with; a partition that is not named begins with its oldest record.
        size: Most records of a batch.
        lost: Called, in the reader's thread, with what retention took before it was read; raises to end the reading.
    """

    def __init__(
        self, log_: EventLog, offsets: Mapping[int, int], *, size: int, lost: Callable[[OffsetOutOfRange], None]
    ) -> None:
        self._log = log_
        self._offsets = dict(offsets)
        self._size = size
        self._lost = lost
        self._ready: queue.Queue[Batch] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._fault: Exception | None = None
        self.at_end = False
        """Whether the last look found nothing new and everything read was taken."""
        self._thread = threading.Thread(target=self._run, name="positions", daemon=True)
        self._thread.start()

    def take(self) -> Batch | None:
        """The next batch; None where none is there yet.

        Raises:
            Exception: What ended the reading.
        """
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            if self._fault is not None:
                raise self._fault from None
            return None

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=30.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                found = self._round()
            except LogUnavailable as fault:
                log.warning("positions wait", error=str(fault))
                self.at_end = False
                self._stop.wait(_PAUSE_S)
                continue
            except Exception as fault:
                self._fault = fault
                return
            if not found:
                self.at_end = self._ready.empty()
                self._stop.wait(_IDLE_S)

    def _round(self) -> bool:
        """Read what is new of each partition, and hand it over at once: none waits for another's; whether there was."""
        found = False
        for partition, extent in sorted(self._log.extents(topics.POSITIONS).items()):
            offset = self._offsets.setdefault(partition, extent.begin)
            if extent.end == offset:
                continue
            try:
                records = self._log.read(topics.POSITIONS, partition, offset, max_records=self._size)
            except OffsetOutOfRange as gone:
                self._lost(gone)
                self._offsets[partition] = gone.begin
                found = True
                continue
            if records:
                found = True
                self.at_end = False
                self._put(Batch(records, time.perf_counter_ns()))
                self._offsets[partition] = records[-1].offset + 1
        return found

    def _put(self, batch: Batch) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(batch, timeout=0.1)
            except queue.Full:
                continue
            return
