"""Spooled triggers and the devices they park: which wait, in which order they go, which were delivered after all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from geo_assets.geofence.triggers import Trigger, decode, encode
from geo_assets.services.spool import Place, Spool

if TYPE_CHECKING:
    from geo_assets.flow.dedup import DedupWindow

_KEY = 16


class Batch(NamedTuple):
    """Entries that were read to be sent: where the next ones begin, their devices and keys."""

    behind: Place
    devices: list[str]
    keys: list[bytes]


class SpooledDevices:
    """A spool of triggers: an entry is a key and a frame. For one thread.

    Args:
        spool: Where they are.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._parked: dict[str, int] = {}
        self._delivered: set[bytes] = set()
        self.waiting = 0
        """Triggers in it."""

    @property
    def parked(self) -> int:
        """Devices that have triggers in it."""
        return len(self._parked)

    @property
    def bytes_waiting(self) -> int:
        """Bytes in it."""
        return self._spool.bytes_waiting

    def take_up(self, window: DedupWindow, now_ms: int) -> None:
        """Take up what a process before left: what is in the log already is passed over when its turn comes.

        Args:
            window: Filled with the tail of `[triggers]`.
            now_ms: For the window.
        """
        # First which are known by the tail alone, then all into the window: one that is in the spool twice is sent.
        for entries in _pieces(self._spool.entries()):
            keys = [entry[:_KEY] for entry in entries]
            self._delivered.update(key for key, known in zip(keys, window.known(keys), strict=True) if known)
            self._count([decode(entry[_KEY:]).device_id for entry in entries])
        for entries in _pieces(self._spool.entries()):
            window.admit([entry[:_KEY] for entry in entries], now_ms)

    def behind(self, devices: Sequence[str]) -> list[int]:
        """Places of the devices that are parked."""
        parked = self._parked
        return [place for place, device in enumerate(devices) if device in parked]

    def append(self, devices: Sequence[str], keys: Sequence[bytes], frames: Sequence[bytes]) -> None:
        """Append triggers; they are on disk when this returns.

        Args:
            devices: Their devices, which are parked from now on.
            keys: Their keys.
            frames: Their frames.

        Raises:
            SpoolFull: None was taken.
            OSError: The disk does not take them.
        """
        self._spool.append([key + frame for key, frame in zip(keys, frames, strict=True)])
        self._count(devices)

    def delivered(self, keys: Sequence[bytes]) -> None:
        """These are in the log: they are not sent out of the spool."""
        self._delivered.update(keys)

    def next(self, epoch: int, count: int) -> tuple[list[str], list[bytes], list[bytes], list[Trigger], Batch]:
        """What is to be sent next: devices, keys, frames under this epoch, triggers, and the batch to be `drained`."""
        entries, behind = self._spool.read(max_entries=count)
        triggers = [decode(entry[_KEY:]) for entry in entries]
        keys = [entry[:_KEY] for entry in entries]
        batch = Batch(behind, [trigger.device_id for trigger in triggers], keys)
        open_ = [place for place, key in enumerate(keys) if key not in self._delivered]
        chosen = [triggers[place] for place in open_]
        for trigger in chosen:
            # One that waited for a later run is that run's: under its old epoch it would be void.
            trigger.epoch = epoch
        return (
            [trigger.device_id for trigger in chosen],
            [keys[place] for place in open_],
            [encode(trigger) for trigger in chosen],
            chosen,
            batch,
        )

    def drained(self, batch: Batch) -> None:
        """All of a batch is in the log: its devices that have no more in the spool go straight on."""
        self._spool.advance(batch.behind)
        parked = self._parked
        for device in batch.devices:
            left = parked[device] - 1
            if left:
                parked[device] = left
            else:
                del parked[device]
        self._delivered.difference_update(batch.keys)
        self.waiting -= len(batch.devices)

    def close(self) -> None:
        """Let go of the folder."""
        self._spool.close()

    def _count(self, devices: Sequence[str]) -> None:
        parked = self._parked
        for device in devices:
            parked[device] = parked.get(device, 0) + 1
        self.waiting += len(devices)


def _pieces(entries: Iterable[bytes], count: int = 1_000) -> Iterator[list[bytes]]:
    several = iter(entries)
    while piece := list(islice(several, count)):
        yield piece
