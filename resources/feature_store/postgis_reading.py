"""Reading for tiles from PostGIS: one statement for thousands of boxes, its answer turned into arrays as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import psycopg

from resources.feature_store.postgis_schema import PLACE
from resources.feature_store.protocol import Changes, FeatureRows, Position, TileBox, TileDigests, TileFeatureRows

Connection = psycopg.Connection[tuple[Any, ...]]

_ASKED = PLACE.format(west="b.west", south="b.south", first="b.zoom", east="b.east", north="b.north", last="b.zoom")
_HELD = PLACE.format(
    west="s.west", south="s.south", first="s.min_zoom", east="s.east", north="s.north", last="s.max_zoom"
)

DEEP = 14
"""Zoom from which a box is small, so that what lies in it and does not show costs less than an index with zooms in it.

Measured at 100,000 features: half the time from here on; above, the plain index walks every building of a region.
"""

# Both indexes hold 32-bit floats rounded outwards: they find too much by a hair, and the columns decide.
_BOXES = """unnest(%(zoom)s::int2[], %(west)s::float8[], %(south)s::float8[], %(east)s::float8[], %(north)s::float8[])
    WITH ORDINALITY AS b (zoom, west, south, east, north, number)"""
_SHOWS = """s.west IS NOT NULL AND s.min_zoom <= s.max_zoom AND s.min_zoom <= b.zoom AND s.max_zoom >= b.zoom
    AND s.west <= b.east AND s.east >= b.west AND s.south <= b.north AND s.north >= b.south"""
_NEAR = (
    f"b.zoom >= {DEEP} AND s.geom && ST_MakeEnvelope(b.west, b.south, b.east, b.north, 4326)",
    f"b.zoom < {DEEP} AND {_HELD} &&& {_ASKED}",
)


def _shown(columns: str) -> str:
    """Rows of `standing` that show in the box `b`."""
    return " UNION ALL ".join(f"SELECT {columns} FROM standing AS s WHERE {near} AND {_SHOWS}" for near in _NEAR)


# What is of one width travels as strings of bytes, which numpy reads as a whole: Python sees a row a box here, a row a
# feature below.
DIGESTS = f"""SELECT b.number, p.digests, p.vertices, p.numbers, p.times, p.newest
    FROM {_BOXES} CROSS JOIN LATERAL (
        SELECT string_agg(digest, '') AS digests, string_agg(int4send(vertex_count), '') AS vertices,
            string_agg(int8send(fid), '') AS numbers, string_agg(int8send(event_time_ms), '') AS times,
            max(event_time_ms) AS newest
        FROM ({_shown("s.fid, s.digest, s.vertex_count, s.event_time_ms")}) AS s) AS p
    WHERE p.newest IS NOT NULL ORDER BY b.number"""

FEATURES = f"""WITH pair AS MATERIALIZED (
        SELECT p.fid, string_agg(int4send(b.number::int4), '') AS tiles
        FROM {_BOXES} CROSS JOIN LATERAL ({_shown("s.fid")}) AS p GROUP BY p.fid)
    SELECT pair.tiles, s.digest || int4send(s.vertex_count) || int8send(s.event_time_ms),
        s.source, s.feature_id, s.layer, ST_AsBinary(s.geom, 'NDR'), s.properties
    FROM pair JOIN standing AS s USING (fid)"""

ROWS = """SELECT source, feature_id, layer, ST_AsBinary(geom, 'NDR'), properties, digest
    FROM standing WHERE fid = ANY(%s::int8[]) AND west IS NOT NULL"""

POSITION = "SELECT number, mark FROM changes ORDER BY number DESC LIMIT 1"

# One row, also where nothing changed: where the log stands, whether it knows the position, and what changed since.
CHANGES = """SELECT last.number, last.mark, (SELECT mark FROM changes WHERE number = %(since)s), p.rows
    FROM (SELECT number, mark FROM changes ORDER BY number DESC LIMIT 1) AS last CROSS JOIN LATERAL (
        SELECT string_agg(int8send(c.fid) || int8send(c.number) || CASE
            WHEN s.west IS NOT NULL AND s.min_zoom <= s.max_zoom THEN s.digest || int4send(s.vertex_count)
                || int8send(s.event_time_ms) || int2send(s.min_zoom) || int2send(s.max_zoom) || float8send(s.west)
                || float8send(s.south) || float8send(s.east) || float8send(s.north)
            ELSE %(nothing)s END, '' ORDER BY c.fid) AS rows
        FROM (SELECT fid, max(number) AS number FROM changes WHERE number > %(since)s AND
            last.number - %(since)s <= %(limit)s GROUP BY fid) AS c
        LEFT JOIN standing AS s ON s.fid = c.fid) AS p"""

_CHANGE = np.dtype(
    [
        ("number", ">i8"),
        ("change", ">i8"),
        ("digest", "u1", 16),
        ("vertices", ">i4"),
        ("time", ">i8"),
        ("zooms", ">i2", 2),
        ("box", ">f8", 4),
    ]
)
_NOTHING = np.array((0, 0, 0, 0, 0, (1, 0), 0.0), _CHANGE).tobytes()[16:]
"""In place of what is left of a feature that shows nowhere: zooms of which the first is above the last."""

_FIXED = np.dtype([("digest", "u1", 16), ("vertices", ">i4"), ("time", ">i8")])


def digests(db: Connection, boxes: Sequence[TileBox]) -> TileDigests:
    """Digests of the features that show in each box, by one statement and so in one snapshot.

    Where the log stands is asked before: what changes in between is in the answer, and comes once more.
    """
    position = Position(*(db.execute(POSITION).fetchone() or (0, 0)))
    places, digest, vertices, numbers, times, newest = _columns(_rows(db, DIGESTS, boxes), 6)
    tiles = np.array(places, np.int64) - 1
    counts = np.fromiter(map(len, vertices), np.int64, len(places)) // 4
    data_time_ms = np.zeros(len(boxes), np.int64)
    data_time_ms[tiles] = newest
    return TileDigests(
        pair_tile=tiles.repeat(counts),
        pair_digest=np.frombuffer(b"".join(digest), np.uint8).reshape(-1, 16),
        pair_vertices=np.frombuffer(b"".join(vertices), ">i4").astype(np.int64),
        pair_number=np.frombuffer(b"".join(numbers), ">i8").astype(np.int64),
        pair_time_ms=np.frombuffer(b"".join(times), ">i8").astype(np.int64),
        data_time_ms=data_time_ms,
        position=position,
    )


def changes(db: Connection, since: Position, limit: int) -> Changes | None:
    """What changed since a position; None where that is too much, too long ago, or of another history."""
    asked = {"since": since.number, "limit": limit, "nothing": _NOTHING}
    found = db.cursor(binary=True).execute(CHANGES.encode(), asked).fetchone()
    if found is None or found[2] != since.mark or found[0] - since.number > limit:
        return None
    rows = np.frombuffer(found[3] or b"", _CHANGE)
    zooms = rows["zooms"].astype(np.int64)
    return Changes(
        position=Position(found[0], found[1]),
        number=rows["number"].astype(np.int64),
        change=rows["change"].astype(np.int64),
        shows=zooms[:, 0] <= zooms[:, 1],
        digest=np.ascontiguousarray(rows["digest"]),
        vertices=rows["vertices"].astype(np.int64),
        time_ms=rows["time"].astype(np.int64),
        zooms=zooms,
        box=rows["box"].astype(np.float64),
    )


def features(db: Connection, boxes: Sequence[TileBox]) -> TileFeatureRows:
    """The features that show in each box, by one statement and so in one snapshot."""
    tiles, together, source, feature_id, layer, geometry, properties = _columns(_rows(db, FEATURES, boxes), 7)
    fixed = np.frombuffer(b"".join(together), _FIXED)
    counts = np.fromiter(map(len, tiles), np.int64, len(tiles)) // 4
    pair_tile = np.frombuffer(b"".join(tiles), ">i4").astype(np.int64) - 1
    pair_row = np.arange(len(tiles)).repeat(counts)
    order = np.argsort(pair_tile, kind="stable")
    return TileFeatureRows(
        source=source,
        feature_id=feature_id,
        layer=layer,
        geometry=geometry,
        properties=properties,
        digest=np.ascontiguousarray(fixed["digest"]),
        vertex_count=fixed["vertices"].astype(np.int64),
        event_time_ms=fixed["time"].astype(np.int64),
        pair_tile=pair_tile[order],
        pair_row=pair_row[order],
    )


def rows(db: Connection, numbers: Sequence[int]) -> FeatureRows:
    """Features by their numbers, as they are now; those without geometry are left out."""
    asked = f"{{{','.join(map(str, numbers))}}}"
    found = db.cursor(binary=True).execute(ROWS.encode(), (asked,)).fetchall()
    source, feature_id, layer, geometry, properties, digest = _columns(found, 6)
    return FeatureRows(
        source=source,
        feature_id=feature_id,
        layer=layer,
        geometry=geometry,
        properties=properties,
        digest=np.frombuffer(b"".join(digest), np.uint8).reshape(-1, 16),
    )


def _rows(db: Connection, query: str, boxes: Sequence[TileBox]) -> list[tuple[Any, ...]]:
    if not boxes:
        return []
    # Arrays as one text each: numbers are written so that they are read back to the bit, and faster than one by one.
    asked = {
        name: f"{{{','.join([repr(getattr(box, name)) for box in boxes])}}}"
        for name in ("zoom", "west", "south", "east", "north")
    }
    return db.cursor(binary=True).execute(query.encode(), asked).fetchall()


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> Sequence[Sequence[Any]]:
    return list(zip(*rows, strict=True)) if rows else [()] * count
