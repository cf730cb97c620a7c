"""Geometry into tiles by PostGIS: clipped, snapped and made valid by ST_AsMVTGeom, written by ST_AsMVT.

Only the geometry: ST_AsMVT writes 1.0 as 1, loses integers beyond 2^63 and ids that are no bigint, and keeps keys of
attributes that nobody has. Whoever calls it frames ids and attributes himself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

VERSION = "1"
"""Raised with every change of the statement below that can change a geometry."""

# The order of an aggregate's features is free: each is known by its number.
_DRAW = """SELECT ST_AsMVT(d, 'drawn', %(extent)s, 'geom', 'number') FROM (
    SELECT number, ST_AsMVTGeom(ST_GeomFromWKB(wkb), ST_MakeEnvelope(0, 0, %(extent)s, %(extent)s)::box2d,
        %(extent)s, %(buffer)s, true) AS geom
    FROM unnest(%(geometry)b::bytea[]) WITH ORDINALITY AS a (wkb, number)) AS d
    WHERE geom IS NOT NULL"""


def version(db: Connection) -> str:
    """Everything in the server that a geometry can depend on."""
    row = db.execute("SELECT postgis_lib_version(), postgis_geos_version(), postgis_wagyu_version()").fetchone()
    assert row is not None
    return f"st_asmvt {VERSION}, PostGIS {row[0]}, GEOS {row[1]}, wagyu {row[2]}"


def draw(db: Connection, geometries: Sequence[bytes], *, extent: int, buffer: int) -> bytes:
    """Draw geometries into their tiles.

    Args:
        db: Any connection to a database with PostGIS.
        geometries: WKB in the units of each one's tile, x east and y north from its south-west corner.
        extent: Units a side of a tile.
        buffer: Units by which a tile reaches over its edge.

    Returns:
        A Mapbox Vector Tile of at most one layer. The id of a feature is the position of its geometry, from 1; what
        lies outside or collapses is not in it.

    Raises:
        psycopg.InternalError: PostGIS, or GEOS in it, cannot draw one of them.
    """
    row = db.execute(_DRAW, {"geometry": list(geometries), "extent": extent, "buffer": buffer}, binary=True).fetchone()
    return bytes(row[0]) if row is not None and row[0] is not None else b""
