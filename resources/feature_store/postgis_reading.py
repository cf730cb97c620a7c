"""Reading for tiles from PostGIS: one statement for thousands of boxes, its answer turned into arrays as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql

from resources.feature_store.postgis_schema import PLACE
from resources.feature_store.protocol import TileBox, TileDigests, TileFeatureRows

Connection = psycopg.Connection[tuple[Any, ...]]
Ints = npt.NDArray[np.int64]

_ASKED = PLACE.format(west="b.west", south="b.south", first="b.zoom", east="b.east", north="b.north", last="b.zoom")
_HELD = PLACE.format(
    west="s.west", south="s.south", first="s.min_zoom", east="s.east", north="s.north", last="s.max_zoom"
)

# The index holds 32-bit floats rounded outwards: it finds too much by a hair, and the columns decide. Text literals,
# because COPY takes no parameters; numbers are written so that they are read back to the bit.
_PAIRS = f"""unnest({{zoom}}::int2[], {{west}}::float8[], {{south}}::float8[], {{east}}::float8[], {{north}}::float8[])
        WITH ORDINALITY AS b (zoom, west, south, east, north, number)
    JOIN standing AS s ON {_HELD} &&& {_ASKED}
        AND s.west IS NOT NULL AND s.min_zoom <= s.max_zoom AND s.min_zoom <= b.zoom AND s.max_zoom >= b.zoom
        AND s.west <= b.east AND s.east >= b.west AND s.south <= b.north AND s.north >= b.south"""

_DIGESTS = f"""COPY (SELECT b.number, s.digest, s.vertex_count::int8, s.event_time_ms FROM {_PAIRS})
    TO STDOUT (FORMAT binary)"""

# What is of one width travels as one string of bytes, which numpy reads; the rest as psycopg makes it.
_FEATURES = f"""WITH pair AS MATERIALIZED (
        SELECT s.fid, string_agg(int8send(b.number), '') AS tiles FROM {_PAIRS} GROUP BY s.fid)
    SELECT pair.tiles, s.digest || int8send(s.vertex_count::int8) || int8send(s.event_time_ms),
        s.source, s.feature_id, s.layer, ST_AsBinary(s.geom, 'NDR'), s.properties
    FROM pair JOIN standing AS s USING (fid)"""

# Layout: "Binary Format" of COPY in the Postgres manual: a header of 19 bytes, then tuples of a count of fields and
# each field with its length, then a trailer of 2 bytes. All fields here have one width, none is null.
_HEADER, _TRAILER = 19, 2
_PAIR = np.dtype(
    [
        ("fields", ">i2"),
        ("number_bytes", ">i4"), ("number", ">i8"),
        ("digest_bytes", ">i4"), ("digest", "u1", 16),
        ("vertices_bytes", ">i4"), ("vertices", ">i8"),
        ("time_bytes", ">i4"), ("time", ">i8"),
    ]
)  # fmt: skip
_FIXED = np.dtype([("digest", "u1", 16), ("vertices", ">i8"), ("time", ">i8")])


def digests(db: Connection, boxes: Sequence[TileBox]) -> TileDigests:
    """Digests of the features that show in each box, by one statement and so in one snapshot."""
    found = np.zeros(0, _PAIR)
    if boxes:
        with db.cursor().copy(_with_boxes(_DIGESTS, boxes)) as copy:
            data = b"".join(copy)
        found = np.frombuffer(data[_HEADER:-_TRAILER], _PAIR)
    pair_tile = found["number"].astype(np.int64) - 1
    found, pair_tile = _in_order(found, pair_tile)
    newest = np.zeros(len(boxes), np.int64)
    if len(pair_tile):
        starts = np.flatnonzero(np.diff(pair_tile, prepend=-1))
        newest[pair_tile[starts]] = np.maximum.reduceat(found["time"].astype(np.int64), starts)
    return TileDigests(pair_tile, np.ascontiguousarray(found["digest"]), found["vertices"].astype(np.int64), newest)


def features(db: Connection, boxes: Sequence[TileBox]) -> TileFeatureRows:
    """The features that show in each box, by one statement and so in one snapshot."""
    rows: list[tuple[Any, ...]] = []
    if boxes:
        rows = db.cursor(binary=True).execute(_with_boxes(_FEATURES, boxes)).fetchall()
    columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * 7
    numbers = np.frombuffer(b"".join(columns[0]), ">i8").astype(np.int64) - 1
    counts = np.fromiter(map(len, columns[0]), np.int64, len(rows)) // 8
    fixed = np.frombuffer(b"".join(columns[1]), _FIXED)
    pair_row, pair_tile = _in_order(np.arange(len(rows)).repeat(counts), numbers)
    return TileFeatureRows(
        source=columns[2],
        feature_id=columns[3],
        layer=columns[4],
        geometry=columns[5],
        properties=columns[6],
        digest=np.ascontiguousarray(fixed["digest"]),
        vertex_count=fixed["vertices"].astype(np.int64),
        event_time_ms=fixed["time"].astype(np.int64),
        pair_tile=pair_tile,
        pair_row=pair_row,
    )


def _in_order(what: npt.NDArray[Any], pair_tile: Ints) -> tuple[npt.NDArray[Any], Ints]:
    """Both with tiles ascending: a join may give them in any order."""
    if (pair_tile[1:] >= pair_tile[:-1]).all():
        return what, pair_tile
    order = np.argsort(pair_tile, kind="stable")
    return what[order], pair_tile[order]


def _with_boxes(statement: str, boxes: Sequence[TileBox]) -> sql.Composed:
    columns = {
        name: sql.Literal(f"{{{','.join([repr(getattr(box, name)) for box in boxes])}}}")
        for name in ("zoom", "west", "south", "east", "north")
    }
    return sql.SQL(statement).format(**columns)  # pyright: ignore[reportArgumentType]
