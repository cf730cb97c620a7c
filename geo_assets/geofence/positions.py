"""Positions as columns: what the tracker reads, and how it is made of the records of `[positions]`.

A tick is a record with a time and no device: it moves the watermark where devices are silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from geo_assets.events.json_text import loads
from geo_assets.events.models import PositionEvent, parse

MAX_DEVICE_ID = 128
"""Characters of a device id, as at the edge."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Positions:
    """Records of `[positions]` in the order of their partitions, one row a record.

    Args:
        device: Device id; None for a tick.
        lon: Degrees, within ±180; what a tick has here does not matter.
        lat: Degrees.
        accuracy_m: Radius in metres; NaN where the device says none.
        time_ms: Event time, milliseconds since the epoch, UTC.
        received_ms: When the record was received: its stamp in the log, never the clock of who reads it.
        partition: Partition of the log.
        offset: Offset in it, ascending within the batch.
    """

    device: Sequence[str | None]
    lon: Floats
    lat: Floats
    accuracy_m: Floats
    time_ms: Ints
    received_ms: Ints
    partition: Ints
    offset: Ints

    def __len__(self) -> int:
        return len(self.device)

    def rows(self, rows: Ints) -> Positions:
        """Some of the rows, in the order given."""
        device = self.device
        return Positions(
            [device[row] for row in rows.tolist()], self.lon[rows], self.lat[rows], self.accuracy_m[rows],
            self.time_ms[rows], self.received_ms[rows], self.partition[rows], self.offset[rows],
        )  # fmt: skip

    def silenced(self, rows: Sequence[int]) -> Positions:
        """The same records, of which some say nothing, not even the time: a tick would move the watermark."""
        device, time_ms = list(self.device), self.time_ms.copy()
        for row in rows:
            device[row], time_ms[row] = None, 0
        return replace(self, device=device, time_ms=time_ms)


class _Position(msgspec.Struct, gc=False):
    event_time_ms: int
    device_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_DEVICE_ID)] | None = None
    lon: float | None = None
    lat: float | None = None
    accuracy_m: float | None = None


_decode = msgspec.json.Decoder(_Position).decode
_NOTHING = _Position(0)


def _as_it_was_sent(value: bytes) -> _Position | None:
    """A position that no edge has seen: its time in any of the forms that the edge takes."""
    try:
        event = parse(PositionEvent, loads(value))
    except Exception:
        # Whatever a library finds wrong with a value costs that value and no other.
        return None
    return _Position(event.event_time_ms, event.device_id, event.lon, event.lat, event.accuracy_m)


def tick_value(time_ms: int) -> bytes:
    """The value of a tick's record.

    Args:
        time_ms: The time it says, milliseconds since the epoch, UTC.
    """
    return msgspec.json.encode({"event_time_ms": time_ms})


def read_positions(
    values: Sequence[bytes | None], partition: Sequence[int], offset: Sequence[int], received_ms: Sequence[int]
) -> tuple[Positions, list[int]]:
    """The columns of records.

    Args:
        values: Value of each record: JSON as `records.position_value` makes it, or `tick_value`.
        partition: Partition of each.
        offset: Offset of each.
        received_ms: Stamp of each in the log, milliseconds since the epoch, UTC.

    Returns:
        The columns, and the rows that are no position (for the dead letters). Such a row stays as a record that says
        nothing, so that offsets move past it.
    """
    found, poison = _decoded(values)
    devices = [p.device_id for p in found]
    # Lists first: an array takes a list's numbers three times as fast as a generator's. None becomes NaN.
    lon, lat = np.array([p.lon for p in found], np.float64), np.array([p.lat for p in found], np.float64)
    wrong = _without_place(devices, lon, lat)
    if wrong:
        poison = sorted({*poison, *wrong})
        for row in wrong:
            found[row], devices[row] = _NOTHING, None
    accuracy: list[float | None] = [p.accuracy_m for p in found]
    times = [p.event_time_ms for p in found]
    try:
        time_ms = np.array(times, np.int64)
    except OverflowError:
        # A time that is no int64 is out of range in any case.
        time_ms = np.array([time if -(1 << 62) < time < 1 << 62 else 0 for time in times], np.int64)
    return (
        Positions(
            devices,
            lon,
            lat,
            np.array(accuracy, np.float64),
            time_ms,
            np.asarray(received_ms, np.int64),
            np.asarray(partition, np.int64),
            np.asarray(offset, np.int64),
        ),
        poison,
    )


def _without_place(devices: list[str | None], lon: Floats, lat: Floats) -> list[int]:
    """Rows that name a device and no place, a place and no device, or a device that no edge would let in."""
    nowhere = np.isnan(lon) | np.isnan(lat)
    named = np.fromiter((device is not None for device in devices), np.bool_, len(devices))
    # A tick has neither.
    wrong = np.flatnonzero((named & nowhere) | (~named & ~(np.isnan(lon) & np.isnan(lat)))).tolist()
    if "\0" in "".join([device or "" for device in devices]):
        wrong += [row for row, device in enumerate(devices) if device is not None and "\0" in device]
    return wrong


def _decoded(values: Sequence[bytes | None]) -> tuple[list[_Position], list[int]]:
    """What values say, and the rows that say nothing."""
    try:
        return list(map(_decode, values)), []  # pyright: ignore[reportArgumentType]
    except Exception:
        pass  # One after the other says which.
    found: list[_Position] = []
    poison: list[int] = []
    for row, value in enumerate(values):
        try:
            found.append(_decode(value or b""))
        except Exception:
            said = _as_it_was_sent(value or b"")
            found.append(said or _NOTHING)
            if said is None:
                poison.append(row)
    return found, poison
