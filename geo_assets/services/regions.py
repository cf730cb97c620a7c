"""What a region is, as a person says it: a box, a file of polygons, H3 cells, or a feature of the store.

Every function gives a shape in EPSG:4326 lon/lat and a title; what becomes of them is services/backfills.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import h3
import shapely

from geo_assets.events.crs import resolve_crs, to_wgs84
from geo_assets.events.dead_letter import Refused
from geo_assets.services.cells import ring_of
from geo_assets.tiles.tile import MAX_LATITUDE, MAX_ZOOM

if TYPE_CHECKING:
    from geo_assets.tiles.cover import Width
    from resources.feature_store.protocol import Feature, FeatureStore

_ZOOMS = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")
_CELL = re.compile(r"[0-9a-fA-F]{1,16}")


MOST_TILES = 5_000_000
"""Tiles of one region, whatever cap is asked for: a gigabyte of names in memory. What is larger is done in pieces."""

MOST_BYTES = 50_000_000
"""Bytes of a file with polygons."""


class RegionError(Exception):
    """A region or a range of zooms that cannot be backfilled; the message says the value, the limit and what to do."""


def parse_zooms(text: str) -> list[int]:
    """Zooms of `0-18`, `14` or `10,12-14`, ascending.

    Raises:
        RegionError: Another form, or a zoom outside 0..22.
    """
    zooms: set[int] = set()
    for part in text.split(","):
        found = _ZOOMS.fullmatch(part)
        if found is None:
            raise RegionError(f"zooms {text[:40]!r} are not of the form 0-18, 14 or 10,12-14")
        first, last = int(found[1]), int(found[2] or found[1])
        if max(first, last) > MAX_ZOOM:
            raise RegionError(f"zooms {text[:40]!r} are outside 0..{MAX_ZOOM}")
        if first > last:
            raise RegionError(f"zooms {text[:40]!r}: {first} is above {last}: the lower one comes first")
        zooms.update(range(first, last + 1))
    return sorted(zooms)


def zooms_text(zooms: Sequence[int]) -> str:
    """Zooms as `parse_zooms` reads them: `0-18`, `10,12-14`."""
    runs: list[list[int]] = []
    for zoom in zooms:
        if runs and zoom == runs[-1][-1] + 1:
            runs[-1].append(zoom)
        else:
            runs.append([zoom])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def too_wide(title: str, zooms: Sequence[int], width: Width, cap: int) -> RegionError:
    """What is said of a region that covers more tiles than the cap, or than any region may."""
    covers = f"{title} covers {'about ' if width.estimated else ''}{width.total:,} tiles at zooms {zooms_text(zooms)}"
    if cap >= MOST_TILES:
        return RegionError(f"{covers}, above {MOST_TILES:,}, the most that one region may have: take it in pieces")
    return RegionError(
        f"{covers}, above the cap of {cap:,}: take fewer zooms or a smaller region, or go wider with --cap"
    )


def box_region(text: str) -> tuple[Any, str]:
    """Polygon and title of `west,south,east,north` in degrees, EPSG:4326; west above east crosses the date line.

    Raises:
        RegionError: Not four numbers in their ranges, or all of it is beyond the map.
    """
    try:
        west, south, east, north = (float(part) for part in text.split(","))
    except ValueError:
        raise RegionError(f"bbox {text[:80]!r} is not west,south,east,north in degrees") from None
    if not (-180 <= west <= 180 and -180 <= east <= 180 and -90 <= south <= north <= 90):
        raise RegionError(f"bbox {text[:80]!r} is outside ±180, ±90, or its south is above its north")
    title = f"bbox {text}"
    if west > east:
        title += f" (over the date line, {east - west + 360:g}° wide)"
    parts = [(west, east)] if west <= east else [(west, 180.0), (-180.0, east)]
    return _on_the_map(shapely.union_all([shapely.box(w, south, e, north) for w, e in parts]), title), title


def h3_region(cells: Sequence[str]) -> tuple[Any, str]:
    """Polygon and title of H3 cells.

    Raises:
        RegionError: One is no H3 cell, or all of it is beyond the map.
    """
    shapes: list[Any] = []
    for cell in cells:
        # H3 reads any hexadecimal number, and overflows where it is none of 64 bits.
        if _CELL.fullmatch(cell) is None or not h3.is_valid_cell(cell):
            raise RegionError(f"h3 {cell[:40]!r} is no H3 cell, such as 891126d3623ffff")
        shapes.append(_in_one_world(shapely.make_valid(shapely.Polygon(ring_of(h3.str_to_int(cell))))))
    title = f"h3 {' '.join(cells)}"[:200]
    return _on_the_map(shapely.union_all(shapes), title), title


def _in_one_world(shape: Any) -> Any:
    """A shape whose longitudes go on past ±180: what is beyond the date line comes back on its other side."""
    west, _, east, _ = shape.bounds
    if west >= -180 and east <= 180:
        return shape
    parts = [
        shapely.transform(
            shapely.intersection(shape, shapely.box(turn - 180, -90, turn + 180, 90)),
            lambda xy, turn=turn: xy - (turn, 0),
        )
        for turn in (-360, 0, 360)
    ]
    return shapely.union_all(parts)


def _on_the_map(shape: Any, title: str) -> Any:
    """The shape, if any of it is within the square of Web Mercator.

    Raises:
        RegionError: None is.
    """
    _, south, _, north = shape.bounds
    if south > MAX_LATITUDE or north < -MAX_LATITUDE:
        raise RegionError(f"{title} lies beyond ±{MAX_LATITUDE:.4f}° of latitude, where the map ends: it has no tile")
    return shape


def file_region(path: Path) -> tuple[Any, str]:
    """Union of the polygons of a GeoJSON file, and its title.

    Raises:
        RegionError: The file cannot be read, or as for `geojson_region`.
    """
    try:
        # Pipes and devices have no size to ask for.
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RegionError(f"region {path}: more than {MOST_BYTES:,} bytes: simplify it first")
        return geojson_region(data, path.name)
    except OSError as fault:
        raise RegionError(f"region {path}: {fault.strerror or fault}") from None


def geojson_region(text: str | bytes, title: str) -> tuple[Any, str]:
    """Union of the polygons of GeoJSON text, and its title.

    Coordinates are EPSG:4326 unless the text declares another CRS (GeoJSON 2008, section 3), which is brought to it.
    Longitudes may go on past ±180, to ±360. Points and lines are passed over.

    Raises:
        RegionError: It is no GeoJSON, has no polygon with an area, or its coordinates are no degrees.
    """
    place = f"region {title}"
    try:
        document: Any = json.loads(text)
        crs = resolve_crs([("crs", document.get("crs") if isinstance(document, dict) else None)], "EPSG:4326")
        geometries = [shapely.from_geojson(json.dumps(one)) for one in _geometries(document)]
        geometries = [shapely.transform(one, lambda xy: to_wgs84(crs, xy)[0]) for one in geometries]
    except (ValueError, RecursionError) as fault:
        raise RegionError(f"{place}: not GeoJSON: {str(fault)[:200]}") from None
    except shapely.errors.GEOSException as fault:
        raise RegionError(f"{place}: not GeoJSON: {' '.join(str(fault).split())[:200]}") from None
    except Refused as fault:
        raise RegionError(f"{place}: {fault}") from None
    polygons = [part for one in geometries for part in _polygons(one)]
    if not polygons:
        raise RegionError(f"{place}: has no polygon with an area")
    region = shapely.union_all(polygons)
    west, south, east, north = region.bounds
    if not (west >= -360 and east <= 360 and south >= -90 and north <= 90):
        raise RegionError(
            f"{place}: its coordinates {west:.6g},{south:.6g},{east:.6g},{north:.6g} are no degrees: it is read as "
            "EPSG:4326 lon,lat unless its member `crs` says another"
        )
    return _on_the_map(_in_one_world(region), place), title


def _geometries(document: Any) -> Iterator[Any]:
    """The geometries of a FeatureCollection, a Feature or a geometry; features may have none.

    Raises:
        ValueError: It is none of them.
    """
    kind = cast("dict[str, Any]", document).get("type") if isinstance(document, dict) else None
    if kind == "FeatureCollection":
        features = document.get("features")
        if not isinstance(features, list):
            raise ValueError("a FeatureCollection has a list of features")
        for one in cast("list[Any]", features):
            yield from _geometries(one)
    elif kind == "Feature":
        if document.get("geometry") is not None:
            yield document["geometry"]
    elif isinstance(kind, str):
        yield document
    else:
        raise ValueError("an object with a type is expected: a FeatureCollection, a Feature or a geometry")


def _polygons(shape: Any) -> Iterator[Any]:
    """The valid polygons in a geometry, however deep; those that mending leaves without an area are none."""
    if shape.geom_type == "GeometryCollection":
        for part in shapely.get_parts(shape):
            yield from _polygons(part)
    elif shape.geom_type in ("Polygon", "MultiPolygon") and not shape.is_empty:
        mended = shapely.make_valid(shape)
        if mended.geom_type in ("Polygon", "MultiPolygon"):
            yield mended
        elif mended.geom_type == "GeometryCollection":
            yield from _polygons(mended)


def feature_region(store: FeatureStore, text: str) -> tuple[Any, str]:
    """Polygon and title of one feature of the store, such as an administrative area.

    Args:
        store: The feature store.
        text: `SOURCE:ID`, the id as text or as JSON (`osm:17`, `osm:"17"`), or `LAYER/ATTRIBUTE=VALUE` for the one
            feature of a layer whose attribute has this value (`boundaries/name=Kamppi`).

    Raises:
        RegionError: There is no such feature, several have the value, or it has no area.
    """
    found = _by_attribute(store, text) if "=" in text else _by_id(store, text)
    shape = None if found.geometry is None else shapely.from_wkb(found.geometry)
    if shape is None or shapely.area(shape) == 0:
        raise RegionError(f"feature {text!r} has no area: name a polygon")
    name = json.loads(found.properties).get("name")
    return shape, f"{name} ({found.source}:{found.feature_id})" if name else f"{found.source}:{found.feature_id}"


def _by_id(store: FeatureStore, text: str) -> Feature:
    source, colon, id_text = text.partition(":")
    if not colon or not source or not id_text:
        raise RegionError(f"feature {text!r} is neither SOURCE:ID nor LAYER/ATTRIBUTE=VALUE")
    # An id is JSON: 17 and "17" are two features. What was not quoted is tried as both.
    for candidate in (id_text, json.dumps(id_text, ensure_ascii=False)):
        found = store.get(source, candidate)
        if found is not None:
            return found
    known = store.counts().sources
    if source not in known:
        raise RegionError(f"feature {text!r}: no source {source[:64]} ever wrote here; there are {_some(known)}")
    raise RegionError(f"feature {text!r} is not in the store")


def _by_attribute(store: FeatureStore, text: str) -> Feature:
    where, _, value = text.partition("=")
    layer, slash, attribute = where.partition("/")
    if not slash or not layer or not attribute:
        raise RegionError(f"feature {text!r} is neither SOURCE:ID nor LAYER/ATTRIBUTE=VALUE")
    matches = (one for one in store.scan(layer=layer) if _says(json.loads(one.properties).get(attribute), value))
    found = list(islice(matches, 2))
    if not found:
        known = store.counts().by_layer
        if layer not in known:
            raise RegionError(f"feature {text!r}: no feature is in a layer {layer[:64]}; there are {_some(known)}")
        raise RegionError(f"feature {text!r}: no feature of layer {layer} has {attribute} = {value}")
    if len(found) > 1:
        ids = " and ".join(f"{one.source}:{one.feature_id}" for one in found)
        raise RegionError(f"feature {text!r}: {ids} both have it; name one by SOURCE:ID")
    return found[0]


def _says(value: Any, text: str) -> bool:
    return value == text if isinstance(value, str) else value is not None and json.dumps(value) == text


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return (", ".join(shown[:20]) + (" and more" if len(shown) > 20 else "")) or "none"
