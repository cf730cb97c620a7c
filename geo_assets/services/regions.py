"""What a region is, as a person says it: a box, a file of polygons, H3 cells, or a feature of the store.

Every function gives a shape in EPSG:4326 lon/lat and a title; what becomes of them is services/backfills.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h3
import shapely

from geo_assets.tiles.tile import MAX_ZOOM

if TYPE_CHECKING:
    from resources.feature_store.protocol import Feature, FeatureStore


class RegionError(Exception):
    """A region or a range of zooms that cannot be backfilled; the message says the value, the limit and what to do."""


def parse_zooms(text: str) -> list[int]:
    """Zooms of `0-18`, `14` or `10,12-14`, ascending.

    Raises:
        RegionError: Another form, or a zoom outside 0..22.
    """
    zooms: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            zooms.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise RegionError(f"zooms {text!r} are not of the form 0-18, 14 or 10,12-14") from None
    if not zooms or min(zooms) < 0 or max(zooms) > MAX_ZOOM:
        raise RegionError(f"zooms {text!r} are empty or outside 0..{MAX_ZOOM}")
    return sorted(zooms)


def box_region(text: str) -> tuple[Any, str]:
    """Polygon and title of `west,south,east,north` in degrees, EPSG:4326; west above east crosses the date line.

    Raises:
        RegionError: Not four numbers in their ranges.
    """
    try:
        west, south, east, north = (float(part) for part in text.split(","))
    except ValueError:
        raise RegionError(f"bbox {text!r} is not west,south,east,north in degrees") from None
    if not (-180 <= west <= 180 and -180 <= east <= 180 and -90 <= south <= north <= 90):
        raise RegionError(f"bbox {text!r} is outside ±180, ±90, or its south is above its north")
    parts = [(west, east)] if west <= east else [(west, 180.0), (-180.0, east)]
    return shapely.union_all([shapely.box(w, south, e, north) for w, e in parts]), f"bbox {text}"


def h3_region(cells: Sequence[str]) -> tuple[Any, str]:
    """Polygon and title of H3 cells.

    Raises:
        RegionError: One is no H3 cell.
    """
    shapes: list[Any] = []
    for cell in cells:
        if not h3.is_valid_cell(cell):
            raise RegionError(f"h3 {cell[:40]!r} is no H3 cell, such as 891126d3623ffff")
        ring = [(lon, lat) for lat, lon in h3.cell_to_boundary(cell)]
        if max(lon for lon, _ in ring) - min(lon for lon, _ in ring) > 180:
            whole = shapely.Polygon([(lon + 360 if lon < 0 else lon, lat) for lon, lat in ring])
            shapes.append(shapely.intersection(whole, shapely.box(-180, -90, 180, 90)))
            east = shapely.intersection(whole, shapely.box(180, -90, 540, 90))
            shapes.append(shapely.transform(east, lambda xy: xy - (360, 0)))
        else:
            shapes.append(shapely.Polygon(ring))
    return shapely.union_all(shapes), f"h3 {' '.join(cells)}"[:200]


def file_region(path: Path) -> tuple[Any, str]:
    """Union of the polygons of a GeoJSON file, EPSG:4326, and its title.

    Raises:
        RegionError: The file cannot be read, is no GeoJSON, or has no polygon.
    """
    try:
        if path.stat().st_size > 50_000_000:
            raise RegionError(f"region {path}: larger than 50 MB; simplify it first")
        return geojson_region(path.read_bytes(), path.name)
    except OSError as fault:
        raise RegionError(f"region {path}: {fault.strerror or fault}") from None


def geojson_region(text: str | bytes, title: str) -> tuple[Any, str]:
    """Union of the polygons of GeoJSON text, EPSG:4326, and its title.

    Raises:
        RegionError: It is no GeoJSON, has no polygon, or its coordinates are no degrees.
    """
    try:
        geometry = shapely.from_geojson(text)
    except shapely.errors.GEOSException as fault:
        raise RegionError(f"region {title}: not GeoJSON: {' '.join(str(fault).split())[:200]}") from None
    parts = [
        part
        for part in shapely.get_parts([geometry])
        for part in ([part] if part.geom_type != "GeometryCollection" else shapely.get_parts(part))
    ]
    polygons = [
        shapely.make_valid(part)
        for part in parts
        if part.geom_type in ("Polygon", "MultiPolygon") and not part.is_empty
    ]
    if not polygons:
        raise RegionError(f"region {title}: has no polygon")
    region = shapely.union_all(polygons)
    west, south, east, north = region.bounds
    if not (west >= -180 and east <= 180 and south >= -90 and north <= 90):
        raise RegionError(
            f"region {title}: its coordinates {west:.6g},{south:.6g},{east:.6g},{north:.6g} "
            "are no degrees (EPSG:4326 lon,lat)"
        )
    return region, title


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
    raise RegionError(f"feature {text!r} is not in the store")


def _by_attribute(store: FeatureStore, text: str) -> Feature:
    where, _, value = text.partition("=")
    layer, slash, attribute = where.partition("/")
    if not slash or not layer or not attribute:
        raise RegionError(f"feature {text!r} is neither SOURCE:ID nor LAYER/ATTRIBUTE=VALUE")
    matches = (one for one in store.scan(layer=layer) if _says(json.loads(one.properties).get(attribute), value))
    found = list(islice(matches, 2))
    if not found:
        raise RegionError(f"feature {text!r}: no feature of layer {layer} has {attribute} = {value}")
    if len(found) > 1:
        ids = " and ".join(f"{one.source}:{one.feature_id}" for one in found)
        raise RegionError(f"feature {text!r}: {ids} both have it; name one by SOURCE:ID")
    return found[0]


def _says(value: Any, text: str) -> bool:
    return value == text if isinstance(value, str) else value is not None and json.dumps(value) == text
