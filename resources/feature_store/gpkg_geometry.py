"""GeoPackage geometry blobs: the header around a WKB, and what SQL asks of it. No tables.

Format: OGC GeoPackage 1.3, section 2.1.3 (GeoPackageBinary).
"""

from __future__ import annotations

import sqlite3
import struct

SRS_ID = 4326

# "GP", version 0, flags, srs id. Flags: bit 0 little endian, bits 1-3 which envelope (1: xy), bit 4 empty.
_WITH_ENVELOPE = struct.pack("<2sBBi", b"GP", 0, 0b00011, SRS_ID)
_EMPTY = struct.pack("<2sBBi", b"GP", 0, 0b10001, SRS_ID)
_ENVELOPE_BYTES = (0, 32, 48, 48, 64)
_FLAGS = 3


def to_blob(wkb: bytes, bbox: tuple[float, float, float, float] | None) -> bytes:
    """A geometry as GeoPackage stores it.

    Args:
        wkb: ISO WKB, EPSG:4326 lon/lat.
        bbox: West, south, east, north in degrees; None for an empty geometry.
    """
    if bbox is None:
        return _EMPTY + wkb
    west, south, east, north = bbox
    return b"%b%b%b" % (_WITH_ENVELOPE, struct.pack("<4d", west, east, south, north), wkb)


def wkb_of(blob: bytes) -> bytes:
    """The WKB in a GeoPackage geometry, whoever wrote it."""
    return blob[8 + _ENVELOPE_BYTES[blob[_FLAGS] >> 1 & 0b111] :]


def register_functions(connection: sqlite3.Connection) -> None:
    """Give a connection the ST_* functions that the R-tree triggers call (GeoPackage 1.3, annex F.3)."""
    for position, name in enumerate(("ST_MinX", "ST_MaxX", "ST_MinY", "ST_MaxY")):
        connection.create_function(name, 1, _envelope_reader(position), deterministic=True)
    connection.create_function("ST_IsEmpty", 1, _is_empty, deterministic=True)


def _envelope_reader(position: int):
    little, big = (
        struct.Struct(f"<{8 + 8 * position}xd").unpack_from,
        struct.Struct(f">{8 + 8 * position}xd").unpack_from,
    )

    def read(blob: bytes | None) -> float | None:
        if blob is None or not blob[_FLAGS] >> 1 & 0b111:
            return None
        return (little if blob[_FLAGS] & 1 else big)(blob)[0]

    return read


def _is_empty(blob: bytes | None) -> int | None:
    return None if blob is None else blob[_FLAGS] >> 4 & 1
