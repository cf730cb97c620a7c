"""What is remembered between batches: a row a device, a row a stay (a device in a fence), and their bytes.

Columns of numbers that grow by doubling; rows are used again. What happens to them is decided in `tracker`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER = 1 << 62
"""Due time of a DWELL that does not come: the fence has none, or it is out of force by then."""

FIRED = NEVER + 1
"""Due time of a DWELL that has come."""

NONE = -1
"""No row; no time."""


class _Columns:
    """Columns of one length that grow together; each row of them is in use or free.

    Args:
        columns: Name -> type and the value of a free row.
    """

    def __init__(self, columns: dict[str, tuple[Any, float]]) -> None:
        self._columns = columns
        self._free = np.empty(0, np.int64)
        self._free_count = 0
        self.end = 0
        for name, (kind, _) in columns.items():
            setattr(self, name, np.empty(0, kind))

    @property
    def used(self) -> int:
        """Rows in use."""
        return self.end - self._free_count

    def take(self, count: int) -> Ints:
        """Free rows, with every column at its free value."""
        again = min(count, self._free_count)
        self._free_count -= again
        rows = self._free[self._free_count : self._free_count + again]
        if again == count:
            return rows.copy()
        rows = np.concatenate((rows, np.arange(self.end, self.end + count - again)))
        self.end += count - again
        capacity = len(self._free)
        if self.end > capacity:
            capacity = max(1024, 2 * capacity, self.end)
            for name, (kind, value) in self._columns.items():
                old = getattr(self, name)
                new = np.full(capacity, value, kind)
                new[: len(old)] = old
                setattr(self, name, new)
            free = np.empty(capacity, np.int64)
            free[: self._free_count] = self._free[: self._free_count]
            self._free = free
        return rows

    def give(self, rows: Ints) -> None:
        """Free rows again."""
        for name, (_, value) in self._columns.items():
            getattr(self, name)[rows] = value
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    def copy(self) -> Self:
        """The same rows, apart from these."""
        made = copy(self)
        for name in self._columns:
            setattr(made, name, getattr(self, name).copy())
        made._free = self._free.copy()
        return made


class Devices(_Columns):
    """The devices: where each was, and how far its triggers have been counted. 85 bytes each, and its id in a table.

    Columns: `seen`, event time of its last fix; `time`, `lon`, `lat`, `accuracy`, of its last fix that counted;
    `odd_lon`, `odd_lat`, `odd`, where it seems to have jumped to and how many fixes say so; `sequence`, of its last
    trigger; `partition`; `head`, its first stay; `stays`, how many it has.
    """

    seen: Ints
    time: Ints
    lon: Floats
    lat: Floats
    accuracy: Floats
    odd_lon: Floats
    odd_lat: Floats
    odd: Ints
    sequence: Ints
    partition: npt.NDArray[np.int32]
    head: Ints
    stays: npt.NDArray[np.int32]

    def __init__(self) -> None:
        super().__init__(
            {
                "seen": (np.int64, NONE),
                "time": (np.int64, NONE),
                "lon": (np.float64, 0.0),
                "lat": (np.float64, 0.0),
                "accuracy": (np.float64, 0.0),
                "odd_lon": (np.float64, 0.0),
                "odd_lat": (np.float64, 0.0),
                "odd": (np.int8, 0),
                "sequence": (np.int64, 0),
                "partition": (np.int32, 0),
                "head": (np.int64, NONE),
                "stays": (np.int32, 0),
            }
        )
        self.number: dict[str, int] = {}
        self.names: list[str] = []

    def add(self, names: Sequence[str]) -> Ints:
        """Rows of new devices.

        Args:
            names: Their ids, each once, none known.
        """
        rows = self.take(len(names))
        numbers = rows.tolist()
        again = len(names) - (self.end - len(self.names))
        for name, row in zip(names[:again], numbers, strict=False):
            self.names[row] = name
        self.names += names[again:]
        self.number.update(zip(names, numbers, strict=True))
        return rows

    def copy(self) -> Self:
        """The same devices, apart from these."""
        made = super().copy()
        made.number, made.names = self.number.copy(), self.names.copy()
        return made

    def rows(self) -> Ints:
        """All devices."""
        return np.flatnonzero(self.seen[: self.end] != NONE)

    def remove(self, rows: Ints) -> None:
        """Forget devices; their stays are somebody else's to close."""
        for row in rows.tolist():
            del self.number[self.names[row]]
            self.names[row] = ""
        self.give(rows)


class Stays(_Columns):
    """The stays: which device is in which fence since when. 40 bytes each.

    Columns: `device`; `fence`, its position in the set; `since`, event time of ENTER; `due`, when DWELL comes;
    `opened`, the row of the batch in which it began; `next`, the device's next stay.
    """

    device: Ints
    fence: Ints
    since: Ints
    due: Ints
    opened: npt.NDArray[np.int32]
    next: npt.NDArray[np.int32]

    def __init__(self) -> None:
        super().__init__(
            {
                "device": (np.int64, NONE),
                "fence": (np.int64, NONE),
                "since": (np.int64, NONE),
                "due": (np.int64, NEVER),
                "opened": (np.int32, NONE),
                "next": (np.int32, NONE),
            }
        )

    def of(self, heads: Ints) -> tuple[Ints, Ints]:
        """The stays of devices.

        Args:
            heads: (n) first stay of each device.

        Returns:
            Stays, and to which of the n each belongs.
        """
        stays: list[Ints] = []
        owners: list[Ints] = []
        owner = np.flatnonzero(heads >= 0)
        stay = heads[owner]
        while len(stay):
            stays.append(stay)
            owners.append(owner)
            stay = self.next[stay].astype(np.int64)
            more = np.flatnonzero(stay >= 0)
            stay, owner = stay[more], owner[more]
        if not stays:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(stays), np.concatenate(owners)

    def open(self) -> Ints:
        """All stays."""
        return np.flatnonzero(self.device[: self.end] >= 0)

    def chain(self, devices: Devices, rows: Ints, stays: Ints) -> None:
        """Say which stays devices have.

        Args:
            devices: The devices.
            rows: Devices whose stays may have changed.
            stays: All stays of theirs.
        """
        devices.head[rows], devices.stays[rows] = NONE, 0
        if not len(stays):
            return
        owner = self.device[stays]
        order = np.argsort(owner, kind="stable")
        stays, owner = stays[order], owner[order]
        first = np.ones(len(stays), np.bool_)
        first[1:] = owner[1:] != owner[:-1]
        self.next[stays[:-1]] = np.where(first[1:], NONE, stays[1:])
        self.next[stays[-1]] = NONE
        devices.head[owner[first]] = stays[first]
        begins = np.flatnonzero(first)
        devices.stays[owner[begins]] = np.diff(begins, append=len(stays))


SNAPSHOT_VERSION = b"\x01"
"""First byte of a snapshot."""


DEVICE_COLUMNS = (
    "seen", "time", "lon", "lat", "accuracy", "odd_lon", "odd_lat", "odd", "sequence", "partition",
)  # fmt: skip
STAY_COLUMNS = ("device", "fence", "since", "due")
FLOAT_COLUMNS = frozenset({"lon", "lat", "accuracy", "odd_lon", "odd_lat"})


class _Head(msgspec.Struct, array_like=True):
    revision: int
    rules: dict[str, Any]
    offsets: dict[int, int]
    watermarks: dict[int, int]
    devices: list[str]
    fences: list[str]
    priorities: list[int]
    stays: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tracker at one moment; its columns are copies, so that another thread may write them while the tracker goes on.

    As bytes: the version byte, the length of the head (4 bytes, little endian), the head as a MessagePack array (the
    members here up to `priorities`, and the number of stays), then the columns of the devices and of the stays in the
    order of `DEVICE_COLUMNS` and `STAY_COLUMNS`, little-endian int64 or float64.

    Args:
        revision: Of the fences *from these offsets on*.
        rules: The tracker's rules, by name.
        offsets: Partition -> offset of the next record.
        watermarks: Partition -> highest event time.
        devices: Ids.
        fences: Ids of the fences in which somebody is, sorted.
        priorities: Of these fences before the revision.
        device_columns: Name -> column.
        stay_columns: Name -> column; `device` and `fence` are positions in the lists here.
    """

    revision: int
    rules: dict[str, Any]
    offsets: dict[int, int]
    watermarks: dict[int, int]
    devices: list[str]
    fences: list[str]
    priorities: list[int]
    device_columns: dict[str, npt.NDArray[Any]]
    stay_columns: dict[str, npt.NDArray[Any]]

    def to_bytes(self) -> bytes:
        """The bytes, version first: 80 a device and its id, 32 a stay."""
        head = _encode(
            _Head(
                self.revision, self.rules, self.offsets, self.watermarks, self.devices, self.fences, self.priorities,
                len(self.stay_columns["device"]),
            )
        )  # fmt: skip
        columns = [self.device_columns[name].astype(_kind(name), copy=False) for name in DEVICE_COLUMNS]
        columns += [self.stay_columns[name].astype(_kind(name), copy=False) for name in STAY_COLUMNS]
        parts: list[Any] = [SNAPSHOT_VERSION, struct.pack("<I", len(head)), head, *map(np.ascontiguousarray, columns)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Snapshot:
        """What `to_bytes` gave.

        Raises:
            SnapshotError: Bytes of another version, or none of ours.
        """
        if data[:1] != SNAPSHOT_VERSION:
            raise SnapshotError(
                f"snapshot: version byte {data[:1].hex() or 'missing'}, known is {SNAPSHOT_VERSION.hex()}"
            )
        try:
            (length,) = struct.unpack_from("<I", data, 1)
            head = _decode(memoryview(data)[5 : 5 + length])
        except (struct.error, msgspec.MsgspecError) as fault:
            raise SnapshotError(f"snapshot: {fault}") from None
        devices = len(head.devices)
        place = 5 + length
        expected = place + 8 * (len(DEVICE_COLUMNS) * devices + len(STAY_COLUMNS) * head.stays)
        if len(data) != expected:
            raise SnapshotError(f"snapshot: {len(data)} bytes, its head says {expected}")
        columns: list[dict[str, npt.NDArray[Any]]] = []
        for names, count in ((DEVICE_COLUMNS, devices), (STAY_COLUMNS, head.stays)):
            columns.append({})
            for name in names:
                columns[-1][name] = np.frombuffer(data, _kind(name), count, place)
                place += 8 * count
        return cls(
            head.revision,
            head.rules,
            head.offsets,
            head.watermarks,
            head.devices,
            head.fences,
            head.priorities,
            *columns,
        )


def _kind(name: str) -> str:
    return "<f8" if name in FLOAT_COLUMNS else "<i8"


class SnapshotError(ValueError):
    """Bytes that are no snapshot, of an unknown version, or of fences that are not at hand."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode
