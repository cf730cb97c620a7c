"""Reading for tiles from PostGIS: one statement for thousands of boxes, its answer turned into arrays as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import psycopg

from resources.feature_store.postgis_schema import PLACE
from resources.feature_store.protocol import FeatureRows, TileBox, TileDigests, TileFeatureRows

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
DIGESTS = f"""SELECT b.number, p.digests, p.vertices, p.numbers, p.newest
    FROM {_BOXES} CROSS JOIN LATERAL (
        SELECT string_agg(digest, '') AS digests, string_agg(int4send(vertex_count), '') AS vertices,
            string_agg(int8send(fid), '') AS numbers, max(event_time_ms) AS newest
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

_FIXED = np.dtype([("digest", "u1", 16), ("vertices", ">i4"), ("time", ">i8")])


def digests(db: Connection, boxes: Sequence[TileBox]) -> TileDigests:
    """Digests of the features that show in each box, by one statement and so in one snapshot."""
    places, digest, vertices, numbers, newest = _columns(_rows(db, DIGESTS, boxes), 5)
    tiles = np.array(places, np.int64) - 1
    counts = np.fromiter(map(len, vertices), np.int64, len(places)) // 4
    data_time_ms = np.zeros(len(boxes), np.int64)
    data_time_ms[tiles] = newest
    return TileDigests(
        pair_tile=tiles.repeat(counts),
        pair_digest=np.frombuffer(b"".join(digest), np.uint8).reshape(-1, 16),
        pair_vertices=np.frombuffer(b"".join(vertices), ">i4").astype(np.int64),
        pair_number=np.frombuffer(b"".join(numbers), ">i8").astype(np.int64),
        data_time_ms=data_time_ms,
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
