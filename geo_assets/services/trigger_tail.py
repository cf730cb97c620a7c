"""Taking over `[triggers]`: a higher epoch, its mark in every partition, and what the tail says was told already."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog

from geo_assets.flow.epochs import Epochs, epoch_of_mark, mark
from geo_assets.geofence.replay import horizon_of
from geo_assets.geofence.triggers import FrameError, Trigger, decode, keys
from resources.event_log.protocol import LogError, LogUnavailable, OffsetOutOfRange, StaleEpoch

if TYPE_CHECKING:
    from geo_assets.flow.dedup import DedupWindow
    from resources.event_log.protocol import EventLog, Publisher, Record
    from resources.ledger.protocol import Ledger

log = structlog.get_logger()

EPOCH = "geofence-epoch"
"""Name of the ledger's value."""
_PIECE = 20_000
_SHARE = 1.25
"""Devices do not spread evenly over partitions."""


class Replaced(Exception):
    """A run of a higher epoch has taken over; this one ends."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What the tail of `[triggers]` said.

    Args:
        horizon: Partition of `[positions]` -> highest source offset, of void triggers too.
        triggers: Read.
        void: Those among them below the epoch of their partition: nobody counts them, so they go again.
        highest_epoch: Seen in any partition.
    """

    horizon: dict[int, int]
    triggers: int
    void: int
    highest_epoch: int


def take_epoch(ledger: Ledger, name: str = EPOCH) -> int:
    """A higher epoch than any before it, durably taken."""
    while True:
        found = ledger.get_value(name)
        epoch = int(found or 0) + 1
        if ledger.set_value(name, str(epoch), expect=found):
            return epoch


def current_epoch(ledger: Ledger, name: str = EPOCH) -> int:
    """The highest epoch taken; a run whose own is lower has been replaced, and writes no snapshot."""
    return int(ledger.get_value(name) or 0)


def take_over(publisher: Publisher, partitions: Sequence[int], epoch: int, timeout_s: float = 60.0) -> None:
    """Write the epoch's mark to every partition: what a run before this one still sends is void from here on.

    Through the publisher that triggers will take: it is connected and known to every partition's broker afterwards,
    and the first triggers do not wait for that.

    Raises:
        Replaced: A higher epoch has been written to one of them, and the log checks.
        LogError: Not all of them have it; begin again.
    """
    faults: list[LogError] = []
    for partition in partitions:
        publisher.send([None], [mark(epoch)], lambda failed, at: faults.extend(failed.values()), partition=partition)
    flushed = publisher.flush(timeout_s)
    stale = next((fault for fault in faults if isinstance(fault, StaleEpoch)), None)
    if stale is not None:
        raise Replaced(str(stale)) from stale
    if not flushed:
        raise LogUnavailable(f"epoch {epoch} could not be written to all partitions within {timeout_s:g} s")
    if faults:
        raise faults[0]


class TailReader:
    """Fills a window with the keys of the newest triggers, and learns how far positions were told of.

    It may read again and again: a run that stands by reads beforehand, so that little is left when it takes over. What
    counts is read after `take_over`.

    Of each partition the newest records are read, somewhat more than its share of the window; none older than the
    window's time counts. 12 µs a record: a full window takes as many seconds, unless it was read ahead.

    Args:
        log_: The event log.
        topic: `[triggers]`.
        window: Empty.
    """

    def __init__(self, log_: EventLog, topic: str, window: DedupWindow) -> None:
        self._log, self._topic, self._window = log_, topic, window
        self._epochs = Epochs()
        self._next: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        self._count = self._void = 0

    def read(self, now_ms: int) -> Tail:
        """Read on to the end.

        Args:
            now_ms: Milliseconds since the epoch.
        """
        found: list[bytes] = []
        stamps: list[int] = []
        oldest = 0 if self._window.ttl_ms is None else now_ms - self._window.ttl_ms
        for partition, records in self._pieces():
            valid = [each for each in self._valid(partition, records) if each[1] >= oldest]
            found += keys([trigger for trigger, _ in valid])
            stamps += [stamp for _, stamp in valid]
        order = np.argsort(np.array(stamps, np.int64), kind="stable").tolist()
        for start in range(0, len(order), 1_000):
            some = order[start : start + 1_000]
            self._window.admit([found[place] for place in some], min(now_ms, stamps[some[-1]]))
        highest = max(self._epochs.highest.values(), default=0)
        return Tail(horizon_of(self._sources.items()), self._count, self._void, highest)

    def _valid(self, partition: int, records: Sequence[Record]) -> Iterator[tuple[Trigger, int]]:
        """Triggers that count, with the stamps of their records."""
        for record in records:
            epoch = epoch_of_mark(record.value or b"")
            if epoch is not None:
                self._epochs.valid(partition, epoch)
                continue
            try:
                trigger = decode(record.value or b"")
            except FrameError as fault:
                log.warning("no trigger", partition=partition, offset=record.offset, error=str(fault))
                continue
            self._count += 1
            at = trigger.source_partition
            self._sources[at] = max(trigger.source_offset, self._sources.get(at, 0))
            if self._epochs.valid(partition, trigger.epoch):
                yield trigger, record.timestamp_ms
            else:
                self._void += 1

    def _pieces(self) -> Iterator[tuple[int, list[Record]]]:
        extents = self._log.extents(self._topic)
        share = math.ceil(_SHARE * self._window.capacity / max(1, len(extents)))
        for partition, extent in sorted(extents.items()):
            offset = max(extent.begin, extent.end - share, self._next.get(partition, 0))
            while offset < extent.end:
                try:
                    records = self._log.read(self._topic, partition, offset, max_records=_PIECE)
                except OffsetOutOfRange as moved:
                    if moved.begin <= offset:
                        break
                    offset = moved.begin
                    continue
                if not records:
                    break
                yield partition, records
                offset = self._next[partition] = records[-1].offset + 1


def now_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000
