"""Triggers of simulated devices as they come out, and how long after their position."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from geo_assets.events import topics
from geo_assets.flow.epochs import Epochs, epoch_of_mark
from geo_assets.geofence.triggers import DWELL, NAMES, FrameError, Trigger, decode
from resources.event_log.protocol import LogError, OffsetOutOfRange

if TYPE_CHECKING:
    from geo_assets.services.simulate.tally import Tally
    from resources.event_log.protocol import EventLog, Record

_IDLE_S = 0.05
_PIECE = 10_000


class Watch:
    """Reads `[triggers]` from its end on, in a thread of its own.

    Args:
        log: The event log.
        devices: Ids of the devices whose triggers count.
        due_ms: The time at which an event time was due, milliseconds since the epoch, by the clock of this machine.
        tally: Where they are counted.
    """

    def __init__(self, log: EventLog, devices: Collection[str], due_ms: Callable[[int], float], tally: Tally) -> None:
        self._log, self._devices, self._due_ms, self._tally = log, frozenset(devices), due_ms, tally
        self._epochs = Epochs()
        self._sequences: dict[str, int] = {}
        self._offsets = {partition: extent.end for partition, extent in log.extents(topics.TRIGGERS).items()}
        self._newest_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulate-watch", daemon=True)
        self._thread.start()

    def close(self, idle_s: float, timeout_s: float) -> None:
        """Stop when no trigger has come for a while, or the time is over."""
        deadline = time.monotonic() + timeout_s
        closing = time.monotonic()
        while time.monotonic() < min(deadline, max(closing, self._newest_s) + idle_s):
            time.sleep(_IDLE_S)
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                found = self._round()
            except LogError as fault:
                self._tally.problem = f"triggers cannot be read: {fault}"
                found = False
            if not found:
                self._stop.wait(_IDLE_S)

    def _round(self) -> bool:
        found = False
        for partition, extent in sorted(self._log.extents(topics.TRIGGERS).items()):
            offset = self._offsets.setdefault(partition, extent.begin)
            if offset == extent.end:
                continue
            try:
                records = self._log.read(topics.TRIGGERS, partition, offset, max_records=_PIECE)
            except OffsetOutOfRange as gone:
                self._offsets[partition] = gone.begin
                continue
            if records:
                self._offsets[partition] = records[-1].offset + 1
                found = self._count(partition, records) or found
        return found

    def _count(self, partition: int, records: list[Record]) -> bool:
        """Count what is new (docs/triggers.md says what is)."""
        states: list[str] = []
        times: list[float] = []
        for record in records:
            value = record.value or b""
            epoch = epoch_of_mark(value)
            if epoch is not None:
                self._epochs.valid(partition, epoch)
                continue
            try:
                trigger: Trigger = decode(value)
            except FrameError:
                continue
            device = trigger.device_id
            valid = self._epochs.valid(partition, trigger.epoch)
            if not valid or device not in self._devices or trigger.sequence <= self._sequences.get(device, -1):
                continue
            self._sequences[device] = trigger.sequence
            states.append(NAMES[trigger.state])
            if trigger.state != DWELL:  # Which is stamped with no position's time.
                times.append(max(0.0, record.timestamp_ms - self._due_ms(trigger.event_time_ms)))
        if states:
            self._newest_s = time.monotonic()
            self._tally.trigger(states, times)
        return bool(states)
