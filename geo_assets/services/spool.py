"""The spool: triggers of outside callers on local disk while the broker is away. Append, read in order, move on.

Segment files of framed entries (length, CRC-32, bytes), each append ended by fsync, and a file that says up to where
they were drained. A crash costs nothing that was appended: a torn end is cut off when the spool is opened, and what was
drained and not yet said so is read again, which whoever drains knows by its key.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

log = structlog.get_logger()

_HEAD = struct.Struct("<II")
_PLACE = struct.Struct("<QQI")
SEGMENT_BYTES = 16_000_000
"""A segment is deleted as a whole when it was drained."""
LIMIT_BYTES = 512_000_000
"""At 80 bytes a trigger six million of them: two minutes of 50,000 a second."""
_LARGEST = 16_000_000


class SpoolFull(Exception):
    """The spool has its limit in bytes: nothing of what was handed over was taken."""


class SpoolInUse(Exception):
    """Another process has the folder open."""


class Place(NamedTuple):
    """Where an entry begins: number of the segment and offset in it."""

    segment: int
    offset: int


class Spool:
    """Entries on disk, first in, first out. For one thread of one process.

    Args:
        folder: Its own; made when it is missing.
        limit_bytes: Most that waits in it.
        segment_bytes: Size at which a new file is begun.

    Raises:
        SpoolInUse: Another process has it open.
        OSError: The folder cannot be used.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = LIMIT_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self.limit_bytes, self._segment_bytes = folder, limit_bytes, segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise SpoolInUse(f"{folder} is another process's spool") from None
        self._file: int | None = None
        self.head = Place(0, 0)
        self._sizes: dict[int, int] = {}
        self._recover()

    # Opening

    def _recover(self) -> None:
        self.head = self._stored_head()
        for path in sorted(self.folder.glob("*.segment")):
            number = int(path.stem)
            if number < self.head.segment:
                path.unlink()
                continue
            self._sizes[number] = self._mend(path)
        if self.head.segment not in self._sizes:
            # Its file was deleted as drained and the next one not begun.
            self.head = Place(min(self._sizes, default=self.head.segment + 1), 0)
        self._tail = max(self._sizes, default=self.head.segment)

    def _mend(self, path: Path) -> int:
        """Cut off what is not whole; the size that is left."""
        data = path.read_bytes()
        good = 0
        while good < len(data):
            entry = _entry(data, good)
            if entry is None:
                break
            good += _HEAD.size + len(entry)
        if good < len(data):
            # A torn end is a crash in the middle of an append that never returned. The bytes are kept all the same.
            path.with_suffix(f".torn-{good}").write_bytes(data[good:])
            log.warning("spool: a torn end was cut off", file=str(path), bytes=len(data) - good)
            with path.open("r+b") as file:
                file.truncate(good)
                os.fsync(file.fileno())
        return good

    def _stored_head(self) -> Place:
        try:
            data = (self.folder / "head").read_bytes()
        except FileNotFoundError:
            return Place(0, 0)
        if len(data) == _PLACE.size:
            segment, offset, crc = _PLACE.unpack(data)
            if crc == zlib.crc32(data[:16]):
                return Place(segment, offset)
        log.warning("spool: where it was drained up to is not readable; it is drained from its beginning")
        return Place(0, 0)

    # Appending

    @property
    def bytes_waiting(self) -> int:
        """Bytes on disk that were not drained."""
        return sum(self._sizes.values()) - (self.head.offset if self.head.segment in self._sizes else 0)

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return self.bytes_waiting <= 0

    def append(self, entries: Sequence[bytes]) -> None:
        """Append entries; they are on disk when this returns.

        Raises:
            SpoolFull: They would exceed the limit; none was taken.
            OSError: The disk does not take them; none counts as taken.
        """
        data = b"".join(_HEAD.pack(len(entry), zlib.crc32(entry)) + entry for entry in entries)
        if not data:
            return
        if self.bytes_waiting + len(data) > self.limit_bytes:
            raise SpoolFull(
                f"{self.folder} holds {self.bytes_waiting:,} bytes of triggers that wait for the broker, and "
                f"{len(data):,} more would exceed {self.limit_bytes:,}"
            )
        size = self._sizes.get(self._tail, 0)
        if self._file is None or size >= self._segment_bytes:
            size = self._begin_segment()
        assert self._file is not None
        try:
            _write_all(self._file, data, size)
            os.fsync(self._file)
        except OSError:
            # What was written of it may or may not be there: a later append must not stand behind half an entry.
            os.close(self._file)
            self._file = None
            with (self.folder / f"{self._tail:012}.segment").open("r+b") as file:
                file.truncate(size)
            raise
        self._sizes[self._tail] = size + len(data)

    def _begin_segment(self) -> int:
        """Open the last segment, or a new one if it is full; its size."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._sizes.get(self._tail, self._segment_bytes) >= self._segment_bytes:
            self._tail += 1
        path = self.folder / f"{self._tail:012}.segment"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._sizes.setdefault(self._tail, 0)
        if self.head.segment not in self._sizes:
            self.head = Place(self._tail, 0)
        return self._sizes[self._tail]

    # Draining

    def read(self, place: Place | None = None, max_entries: int = 1_000) -> tuple[list[bytes], Place]:
        """The next entries from a place on (its head by default), and the place behind them."""
        place = self.head if place is None else place
        found: list[bytes] = []
        while len(found) < max_entries:
            size = self._sizes.get(place.segment)
            if size is None or place.offset >= size:
                following = min((number for number in self._sizes if number > place.segment), default=None)
                if following is None:
                    break
                place = Place(following, 0)
                continue
            with (self.folder / f"{place.segment:012}.segment").open("rb") as file:
                file.seek(place.offset)
                # As much as the entries wanted may have; an entry that is larger is read by itself.
                data = file.read(min(size - place.offset, max(65_536, 512 * max_entries)))
                offset = 0
                while len(found) < max_entries and (entry := _entry(data, offset)) is not None:
                    found.append(entry)
                    offset += _HEAD.size + len(entry)
                if offset == 0:
                    length, _ = _HEAD.unpack(data[: _HEAD.size])
                    file.seek(place.offset)
                    entry = _entry(file.read(_HEAD.size + length), 0)
                    if entry is None:
                        raise OSError(f"{file.name}: the entry at {place.offset} is damaged")
                    found.append(entry)
                    offset = _HEAD.size + length
            place = Place(place.segment, place.offset + offset)
        return found, place

    def entries(self) -> Iterator[bytes]:
        """All that waits, in order."""
        place = self.head
        while True:
            found, place = self.read(place)
            if not found:
                return
            yield from found

    def advance(self, place: Place) -> None:
        """Everything before this place was drained."""
        packed = _PLACE.pack(place.segment, place.offset, 0)[:16]
        path = self.folder / "head.new"
        with path.open("wb") as file:
            file.write(packed + struct.pack("<I", zlib.crc32(packed)))
            file.flush()
            os.fsync(file.fileno())
        path.replace(self.folder / "head")
        self.head = place
        for number in [number for number in self._sizes if number < place.segment]:
            self._drop(number)
        if place.offset >= self._sizes.get(place.segment, 0) and self._tail == place.segment:
            # Empty: the next append begins a new file, so that nothing grows.
            self._drop(place.segment)

    def _drop(self, number: int) -> None:
        if number == self._tail and self._file is not None:
            os.close(self._file)
            self._file = None
        if self._sizes.pop(number, None) is not None:
            (self.folder / f"{number:012}.segment").unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        os.close(self._lock)


def _entry(data: bytes, offset: int) -> bytes | None:
    """The whole entry that begins there, or None."""
    if offset + _HEAD.size > len(data):
        return None
    length, crc = _HEAD.unpack_from(data, offset)
    entry = data[offset + _HEAD.size : offset + _HEAD.size + length]
    if length > _LARGEST or len(entry) < length or zlib.crc32(entry) != crc:
        return None
    return entry


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
