"""Geometries as they come in (GeoJSON, WKT, WKB in hexadecimal) and what makes them fit to be stored.

Parse, repair, bring back over the date line, close over a pole, orient. Z and M are dropped: a map tile has none. What
a feature is beside its geometry, and its CRS, are judged elsewhere.
"""

# Shapely's functions take keyword arguments of no declared type, and return a geometry or an array of them.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import shapely
from shapely.geometry.base import BaseGeometry

from geo_assets.events.dead_letter import Reason, Refused
from geo_assets.events.json_text import shorten
from geo_assets.tiles.tile import Box

Floats = npt.NDArray[np.float64]

MAX_NESTING = 16
"""Levels of collections within collections; GEOS reads them recursively and thousands overrun its stack."""

HAIR = 1e-9
"""Degrees (0.1 mm) beyond the edge of the world that are rounding, not a place."""

_make = cast(Any, shapely)
"""For the constructors, which are typed as giving a geometry or an array of them."""

_HEX = re.compile(r"[0-9A-Fa-f]+", re.ASCII)
_EWKT = re.compile(r"\s*SRID\s*=\s*([0-9]{1,9})\s*;", re.IGNORECASE | re.ASCII)
_KINDS = (
    "Point",
    "LineString",
    "LinearRing",
    "Polygon",
    "MultiPoint",
    "MultiLineString",
    "MultiPolygon",
    "GeometryCollection",
)
_GEOJSON_KINDS = tuple(kind for kind in _KINDS if kind != "LinearRing")
_NUMBERS = frozenset({int, float})


@dataclass(frozen=True, slots=True)
class Parsed:
    """A geometry as it was written, 2D, in whatever CRS."""

    shape: BaseGeometry
    kind: str
    """GeoJSON's name of its type."""
    count: int
    """Coordinates, a ring's closing one included."""
    srid: int | None = None
    """The EPSG code that EWKT or EWKB declares."""
    over_the_pole: bool = False
    """Whether a ring whose ends lie one turn (360) apart was closed over the pole: this is right of degrees only."""


def refuse(
    explanation: str, reason: Reason = "invalid_geometry", value: object = None, limit: str | None = None
) -> Refused:
    """A refusal of the geometry."""
    return Refused(reason, "geometry", None if value is None else shorten(value), limit, explanation)


def parse_geometry(value: object, max_vertices: int) -> Parsed | None:
    """The geometry of a `geometry` member.

    Args:
        value: A GeoJSON object, a text of WKT or EWKT, WKB or EWKB in hexadecimal, or None.
        max_vertices: Coordinates it may have; counted before it is built where its form allows.

    Returns:
        The geometry; None where there is none, or an empty one.

    Raises:
        Refused: `invalid_geometry`, `too_large` or `schema`.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        parsed = _Reader(max_vertices).read(cast(dict[str, Any], value))
    elif isinstance(value, str):
        parsed = _from_text(value, max_vertices)
    else:
        raise refuse("is no GeoJSON object, WKT or WKB in hexadecimal", "schema", value)
    if shapely.is_empty(parsed.shape):
        return None
    return parsed


def _too_many(count: int, limit: int) -> Refused:
    return refuse(f"the geometry has more than {limit} vertices", "too_large", count, f"{limit} vertices")


class _Reader:
    """Builds a GeoJSON geometry, counting vertices before each piece is made."""

    __slots__ = ("count", "limit", "over_the_pole")

    def __init__(self, limit: int) -> None:
        self.limit, self.count, self.over_the_pole = limit, 0, False

    def read(self, value: dict[str, Any]) -> Parsed:
        shape = self._geometry(value, 0)
        return Parsed(shape, str(value["type"]), self.count, over_the_pole=self.over_the_pole)

    def _geometry(self, value: Any, depth: int) -> BaseGeometry:
        if not isinstance(value, dict):
            raise refuse("a member of a GeometryCollection is no object", "schema", value)
        members = cast(dict[str, Any], value)
        kind = members.get("type")
        if kind not in _GEOJSON_KINDS:
            raise refuse("is none of GeoJSON's geometry types", "schema", kind, ", ".join(_GEOJSON_KINDS))
        if kind == "GeometryCollection":
            if depth >= MAX_NESTING:
                raise refuse(f"collections within collections, more than {MAX_NESTING} levels", "too_large")
            parts = _list(members.get("geometries"), "geometries")
            made = [self._geometry(part, depth + 1) for part in parts]
            return shapely.GeometryCollection([shape for shape in made if not shapely.is_empty(shape)])
        coordinates = _list(members.get("coordinates"), "coordinates")
        if kind == "Polygon":
            return self._polygon(coordinates)
        if kind == "MultiPolygon":
            return shapely.MultiPolygon(_filled(self._polygon(_list(part, "coordinates")) for part in coordinates))
        if kind == "Point":
            return _make.points(self._positions([coordinates])[0]) if coordinates else shapely.Point()
        if kind == "LineString":
            return self._line(coordinates)
        if kind == "MultiPoint":
            return _make.multipoints(_make.points(self._positions(coordinates))) if coordinates else shapely.Point()
        return shapely.MultiLineString(_filled(self._line(_list(part, "coordinates")) for part in coordinates))

    def _positions(self, positions: list[Any]) -> Floats:
        """Positions as an array (n, 2); further dimensions are dropped."""
        self.count += len(positions)
        if self.count > self.limit:
            raise _too_many(self.count, self.limit)
        if set(map(type, positions)) != {list}:
            raise refuse("a position is no array of numbers", "invalid_geometry", _odd(positions, list))
        lengths = set(map(len, positions))
        if min(lengths) < 2:
            raise refuse("a position has fewer than two numbers", "invalid_geometry", _short(positions))
        if not set(map(type, chain.from_iterable(positions))) <= _NUMBERS:
            raise refuse("a coordinate is no number", "invalid_geometry", _no_number(positions))
        if lengths != {2}:
            positions = [position[:2] for position in positions]
        try:
            return np.array(positions, dtype=np.float64)
        except OverflowError:
            raise refuse("a coordinate is beyond the range of a double", "invalid_geometry") from None

    def _line(self, coordinates: list[Any]) -> BaseGeometry:
        if not coordinates:
            return shapely.LineString()
        if len(coordinates) < 2:
            raise refuse("a line has at least two positions", "invalid_geometry", len(coordinates), ">= 2 positions")
        return _make.linestrings(self._positions(coordinates))

    def _polygon(self, coordinates: list[Any]) -> BaseGeometry:
        rings = [self._ring(_list(ring, "coordinates")) for ring in coordinates]
        if not rings:
            return shapely.Polygon()
        if len(rings) == 1:
            return _make.polygons(rings[0])
        return _make.polygons(_make.linearrings(rings[0]), [_make.linearrings(ring) for ring in rings[1:]])

    def _ring(self, coordinates: list[Any]) -> Floats:
        if not coordinates:
            raise refuse("a ring has no positions")
        ring = self._positions(coordinates)
        if (ring[0] != ring[-1]).any():
            turn, rise = np.abs(ring[0] - ring[-1]).tolist()
            if abs(turn - 360.0) <= HAIR and rise <= HAIR:
                self.over_the_pole = True
                return _over_the_pole(ring)
            raise refuse(
                "a ring is not closed: its last position is not its first", "invalid_geometry", coordinates[-1]
            )
        if len(ring) < 4:
            raise refuse("a ring has at least four positions", "invalid_geometry", len(ring), ">= 4 positions")
        return ring


def _list(value: object, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refused("schema", f"geometry.{field}", shorten(value), "array", "is no array")
    return cast(list[Any], value)


def _filled(shapes: Iterator[BaseGeometry]) -> list[Any]:
    return [shape for shape in shapes if not shapely.is_empty(shape)]


def _odd(values: Sequence[object], wanted: type) -> object:
    return next(value for value in values if type(value) is not wanted)


def _short(positions: Sequence[Sequence[object]]) -> object:
    return next(position for position in positions if len(position) < 2)


def _no_number(positions: Sequence[Sequence[object]]) -> object:
    return next(position for position in positions if not set(map(type, position)) <= _NUMBERS)


def _from_text(text: str, limit: int) -> Parsed:
    stripped = text.strip()
    if not stripped:
        raise refuse("is an empty text", "schema")
    if _HEX.fullmatch(stripped):
        if len(stripped) % 2:
            raise refuse("no WKB: an odd number of hexadecimal digits", value=len(stripped))
        return _from_wkb(bytes.fromhex(stripped), limit)
    return _from_wkt(stripped, limit)


def _from_wkt(text: str, limit: int) -> Parsed:
    srid = None
    if "\x00" in text:
        # GEOS reads a text up to there and would not see the rest.
        raise refuse("no WKT: a NUL character")
    if (match := _EWKT.match(text)) is not None:
        srid, text = int(match[1]) or None, text[match.end() :]
    # A comma stands between any two coordinates, and between a coordinate and an empty part.
    commas = text.count(",") + 1
    if commas > limit and commas - text.upper().count("EMPTY") > limit:
        raise _too_many(commas, limit)
    depth = deepest = 0
    if text.count("(") > MAX_NESTING:
        for bracket in re.finditer(r"[()]", text):
            depth += 1 if bracket[0] == "(" else -1
            deepest = max(deepest, depth)
            # Below the last collection stand the three brackets of a multipolygon.
            if deepest > MAX_NESTING + 3:
                raise refuse(f"collections within collections, more than {MAX_NESTING} levels", "too_large")
    try:
        with np.errstate(all="ignore"):
            shape = shapely.from_wkt(text)
    except (shapely.GEOSException, NotImplementedError, UnicodeEncodeError, ValueError) as fault:
        raise refuse(f"no WKT: {_said(fault)}", value=text) from None
    return _built(shape, srid, limit)


def _from_wkb(data: bytes, limit: int) -> Parsed:
    try:
        count, _ = _walk_wkb(data, 0, 0, None)
    except (struct.error, IndexError):
        raise refuse("no WKB: it ends in the middle") from None
    if count > limit:
        raise _too_many(count, limit)
    try:
        shape = shapely.from_wkb(data)
    except (shapely.GEOSException, NotImplementedError, ValueError) as fault:
        raise refuse(f"no WKB: {_said(fault)}") from None
    return _built(shape, int(shapely.get_srid(shape)) or None, limit)


def _walk_wkb(data: bytes, at: int, depth: int, within: int | None) -> tuple[int, int]:
    """Coordinates of the WKB that begins at `at`, and where it ends (OGC 06-103r4, section 8; PostGIS's EWKB flags)."""
    order = "<" if data[at] else ">"
    (code,) = struct.unpack_from(order + "I", data, at + 1)
    at += 5 + (4 if code & 0x20000000 else 0)
    plain = code & 0x1FFFFFFF
    kind, iso = plain % 1000, plain // 1000
    if not 1 <= kind <= 7 or iso > 3:
        raise refuse("no WKB: a type other than point, line, polygon, their multiples and collections", value=code)
    if within is not None and within != 7 and kind != within - 3:
        raise refuse("no WKB: a multiple holds a part of another type", value=kind)
    dimensions = 2 + bool(code & 0x80000000 or iso in (1, 3)) + bool(code & 0x40000000 or iso in (2, 3))
    if kind == 1:
        return 1, at + 8 * dimensions
    (n,) = struct.unpack_from(order + "I", data, at)
    at += 4
    if kind == 2:
        return n, at + 8 * dimensions * n
    total = 0
    if kind == 3:
        for _ in range(n):
            (points,) = struct.unpack_from(order + "I", data, at)
            total, at = total + points, at + 4 + 8 * dimensions * points
        return total, at
    if depth >= MAX_NESTING:
        raise refuse(f"collections within collections, more than {MAX_NESTING} levels", "too_large")
    for _ in range(n):
        points, at = _walk_wkb(data, at, depth + 1, kind)
        total += points
    return total, at


def _built(shape: BaseGeometry, srid: int | None, limit: int) -> Parsed:
    count = int(shapely.get_num_coordinates(shape))
    if count > limit:
        raise _too_many(count, limit)
    kind = _KINDS[int(shapely.get_type_id(shape))]
    if kind == "LinearRing":
        raise refuse("a LinearRing is no geometry of its own: a line or a polygon is", value=kind)
    return Parsed(shapely.force_2d(shape), kind, count, srid)


def _said(fault: Exception) -> str:
    return shorten(str(fault).removeprefix("ParseException: ").removeprefix("IllegalArgumentException: ").strip(), 200)


def check_finite(coordinates: Floats) -> None:
    """Refuse coordinates of which one is NaN or infinite.

    Raises:
        Refused: `invalid_geometry`.
    """
    if not np.isfinite(coordinates).all():
        bad = coordinates[~np.isfinite(coordinates).all(axis=1)][0].tolist()
        raise refuse("a coordinate is not a finite number", value=str(bad))


def dimension_of(shape: BaseGeometry) -> int:
    """0 for points, 1 for lines, 2 for polygons; of a collection, the highest."""
    return int(shapely.get_dimensions(shape))


def repaired(shape: BaseGeometry) -> BaseGeometry:
    """A valid geometry of the same dimension that covers the same ground.

    Raises:
        Refused: `invalid_geometry`: nothing of that dimension is left.
    """
    dimension = dimension_of(shape)
    made = shapely.make_valid(shape, method="structure", keep_collapsed=False)
    if shapely.get_type_id(made) == 7 and shapely.get_type_id(shape) != 7:
        made = _union_of([part for part in _flat(made) if dimension_of(part) == dimension], dimension)
    if shapely.is_empty(made) or not shapely.is_valid(made):
        raise refuse(f"not repairable: {shapely.is_valid_reason(shape)}")
    return made


def _flat(shape: BaseGeometry) -> Iterator[BaseGeometry]:
    """The points, lines and polygons that a geometry consists of."""
    if shapely.get_type_id(shape) < 4:
        if not shapely.is_empty(shape):
            yield shape
        return
    for part in shapely.get_parts(shape):
        yield from _flat(part)


def _union_of(parts: list[BaseGeometry], dimension: int) -> BaseGeometry:
    """One geometry of parts of one dimension: the part itself, or a multiple of them."""
    if len(parts) == 1:
        return parts[0]
    if dimension == 0:
        return shapely.MultiPoint(cast(Any, parts))
    return shapely.MultiLineString(cast(Any, parts)) if dimension == 1 else shapely.MultiPolygon(cast(Any, parts))


def _over_the_pole(ring: Floats) -> Floats:
    """A ring that goes once around the globe, its end one turn from its start, closed over the pole on its side."""
    south, north = float(ring[:, 1].min()), float(ring[:, 1].max())
    if south < 0 < north:
        raise refuse(
            "a ring around the globe crosses the equator: which pole it holds cannot be said", value=[south, north]
        )
    pole = 90.0 if north > 0 else -90.0
    return np.vstack((ring, [[ring[-1, 0], pole], [ring[0, 0], pole], ring[0]]))


def wide(box: Sequence[float]) -> bool:
    """Whether a geometry with this box (west, south, east, north in degrees) may have to do with the date line."""
    return box[0] < -180.0 or box[2] > 180.0 or box[2] - box[0] >= 180.0


def unrolled(shape: BaseGeometry, *, projected: bool) -> BaseGeometry:
    """A geometry whose longitudes go on past ±180 where it crosses the date line, and whose polar rings are closed.

    In GeoJSON an edge is a straight line in lon/lat (RFC 7946, section 3.1.1), so longitudes are taken as they are.
    Two cases differ. Coordinates that come from a projected CRS were rolled up at ±180 by the projection: there each
    edge goes the shorter way. And a ring of one hemisphere with a single edge of 270 degrees or more is one that goes
    around the pole and was rolled up: as a plain polygon it would be a sliver around the world.

    Args:
        shape: Degrees, lon before lat.
        projected: Whether its coordinates come from a projected CRS.

    Returns:
        The geometry in degrees; longitudes may lie beyond ±180.
    """
    parts = list(_flat(shape))
    made = [_unrolled_part(part, projected) for part in parts]
    if all(new is old for new, old in zip(made, parts, strict=True)):
        return shape
    kind = int(shapely.get_type_id(shape))
    if kind == 7:
        return shapely.GeometryCollection(cast(Any, made))
    return _union_of(made, dimension_of(shape))


def _unrolled_part(part: BaseGeometry, projected: bool) -> BaseGeometry:
    kind = int(shapely.get_type_id(part))
    if kind == 1 and projected:
        line = shapely.get_coordinates(part)
        return _make.linestrings(_shorter_way(line)) if _rolls(line) else part
    if kind != 3:
        return part
    polygon = cast(shapely.Polygon, part)
    rings = [shapely.get_coordinates(ring) for ring in (polygon.exterior, *polygon.interiors)]
    changed = [_unrolled_ring(ring, projected) for ring in rings]
    if all(new is old for new, old in zip(changed, rings, strict=True)):
        return part
    shell = _make.polygons(changed[0])
    holes = [_make.polygons(ring) for ring in changed[1:]]
    for hole in holes:
        # A hole may have been unrolled on the other side of the date line than its shell.
        turns = [shapely.transform(hole, _turner(turn)) for turn in (0.0, 360.0, -360.0)]
        shell = shapely.difference(shell, next((h for h in turns if shapely.contains_properly(shell, h)), hole))
    return shell


def _turner(turn: float) -> Any:
    shift = np.array([turn, 0.0])

    def move(coordinates: Floats) -> Floats:
        return coordinates + shift

    return move


def _rolls(line: Floats) -> bool:
    return bool((np.abs(np.diff(line[:, 0])) > 180.0).any())


def _shorter_way(line: Floats) -> Floats:
    """The line with each edge going the shorter way around the globe."""
    steps = np.diff(line[:, 0])
    turns = np.cumsum(-np.round(steps / 360.0)) * 360.0
    made = line.copy()
    made[1:, 0] += turns
    return made


def _unrolled_ring(ring: Floats, projected: bool) -> Floats:
    if not _rolls(ring):
        return ring
    steps = np.diff(ring[:, 0])
    if not projected:
        # An edge along a pole closes a ring over it: what was closed so before, as all that is stored, stays as it is.
        polar = np.abs(ring[:, 1]) >= 90.0 - HAIR
        long = np.where(polar[:-1] & polar[1:], 0.0, np.abs(steps))
        one_side = bool((ring[:, 1] > 0).all() or (ring[:, 1] < 0).all())
        if not (one_side and (long > 180.0).sum() == 1 and 270.0 <= long.max() < 360.0):
            return ring
    made = _shorter_way(ring)
    turn = float(made[-1, 0] - made[0, 0])
    if abs(turn) > 180.0:
        made[-1, 1] = made[0, 1]
        made = _over_the_pole(made)
    west, east = float(made[:, 0].min()), float(made[:, 0].max())
    if west < -360.0:
        made[:, 0] += 360.0
    elif east > 360.0:
        made[:, 0] -= 360.0
    return made


def check_range(box: Sequence[float]) -> None:
    """Refuse what lies outside the world.

    Latitudes are within ±90. Longitudes are within ±180, or go on to ±360 in a geometry that crosses the date line so
    and is no wider than the world.

    Args:
        box: West, south, east, north of the geometry, degrees.

    Raises:
        Refused: `out_of_range`.
    """
    west, south, east, north = box
    if south < -90.0 - HAIR or north > 90.0 + HAIR:
        raise refuse("a latitude is outside ±90", "out_of_range", south if south < -90 else north, "±90")
    if west >= -180.0 - HAIR and east <= 180.0 + HAIR:
        return
    crosses = west <= -180.0 <= east or west <= 180.0 <= east
    if not crosses or west < -360.0 - HAIR or east > 360.0 + HAIR or east - west > 360.0 + HAIR:
        limit = "±180, or on to ±360 across the date line"
        raise refuse("a longitude is outside ±180", "out_of_range", west if west < -180 else east, limit)


def brought_back(shape: BaseGeometry) -> BaseGeometry:
    """A geometry within ±180 and ±90, split at the date line where it crosses it.

    Args:
        shape: Degrees, lon before lat, valid, in range.

    Returns:
        The same ground; a single geometry that was split is a multiple.
    """
    west, south, east, north = shapely.bounds(shape).tolist()
    if west < -180.0 - HAIR or east > 180.0 + HAIR:
        parts = list(chain.from_iterable(_back(part) for part in _flat(shape)))
        if int(shapely.get_type_id(shape)) == 7:
            return shapely.GeometryCollection(cast(Any, parts))
        return _union_of(parts, dimension_of(shape))
    if west < -180.0 or east > 180.0 or south < -90.0 or north > 90.0:
        return shapely.transform(shape, _clipped)
    return shape


def _clipped(coordinates: Floats) -> Floats:
    return np.clip(coordinates, (-180.0, -90.0), (180.0, 90.0))


def _back(part: BaseGeometry) -> Iterator[BaseGeometry]:
    """The pieces of a point, line or polygon in the worlds to the west, here and to the east, each brought here."""
    dimension = dimension_of(part)
    if dimension == 0:
        lon, lat = shapely.get_coordinates(part)[0].tolist()
        lon += 360.0 if lon < -180.0 else -360.0 if lon > 180.0 else 0.0
        yield _make.points(lon, min(max(lat, -90.0), 90.0))
        return
    pieces: list[BaseGeometry] = []
    for turn in (-360.0, 0.0, 360.0):
        if dimension == 1:
            # An overlay would cut the line wherever it crosses itself.
            piece = shapely.clip_by_rect(part, turn - 180.0, -90.0, turn + 180.0, 90.0)
        else:
            piece = shapely.intersection(part, shapely.box(turn - 180.0, -90.0, turn + 180.0, 90.0))
        for found in _flat(piece):
            if dimension_of(found) == dimension:
                pieces.append(shapely.transform(found, _turner(-turn)))
    # Pieces from two sides meet again here where a ring around a pole began: only the date line stays a cut.
    joined = _flat(shapely.union_all(pieces)) if dimension == 2 and len(pieces) > 1 else pieces
    for piece in joined:
        yield shapely.transform(piece, _clipped)


def oriented(shape: BaseGeometry) -> BaseGeometry:
    """Exterior rings counterclockwise, holes clockwise (RFC 7946, section 3.1.6)."""
    return shapely.orient_polygons(shape, exterior_cw=False) if dimension_of(shape) == 2 else shape


def box_of(shape: BaseGeometry) -> Box:
    """West, south, east, north in degrees."""
    return Box(*shapely.bounds(shape).tolist())


def to_wkb(shape: BaseGeometry) -> bytes:
    """WKB: ISO, little endian, 2D."""
    return shapely.to_wkb(shape, byte_order=1, flavor="iso", output_dimension=2)
