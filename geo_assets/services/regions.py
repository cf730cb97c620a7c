"""Backfill of a region: plan its tiles, guard its width, write and mark its manifest. The sensor does the rest."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h3
import shapely

from geo_assets.tiles.cover import cover, cover_count
from geo_assets.tiles.tile import MAX_ZOOM
from resources.ledger.protocol import Manifest

if TYPE_CHECKING:
    from geo_assets.stack import Stack


class RegionError(Exception):
    """A region or a range of zooms that cannot be backfilled; the message says the value, the limit and what to do."""


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """The tiles of a region, before anything is written."""

    title: str
    keys: tuple[str, ...]
    width: tuple[tuple[int, int], ...]
    """(zoom, tiles), ascending."""
    parameters: str


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
        geometry = shapely.from_geojson(path.read_bytes())
    except OSError as fault:
        raise RegionError(f"region {path}: {fault.strerror or fault}") from None
    except shapely.errors.GEOSException as fault:
        raise RegionError(f"region {path}: not GeoJSON: {' '.join(str(fault).split())[:200]}") from None
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
        raise RegionError(f"region {path}: has no polygon")
    region = shapely.union_all(polygons)
    west, south, east, north = region.bounds
    if not (west >= -180 and east <= 180 and south >= -90 and north <= 90):
        raise RegionError(
            f"region {path}: its coordinates {west:.6g},{south:.6g},{east:.6g},{north:.6g} "
            "are no degrees (EPSG:4326 lon,lat)"
        )
    return region, path.name


def plan_region(stack: Stack, region: Any, title: str, zooms: Sequence[int], *, cap: int | None = None) -> RegionPlan:
    """The tiles of a region at these zooms. Nothing is written.

    Raises:
        RegionError: The region covers no tile, or more than the cap.
    """
    cap = stack.settings.manifest_cap if cap is None else cap
    deepest = stack.layers.max_zoom
    if zooms[-1] > deepest:
        raise RegionError(f"zoom {zooms[-1]} is above {deepest}, the deepest that the layers are built for")
    # The region says which tiles are meant: without a buffer, or each would bring its neighbours along.
    found = cover(region, zooms, buffer=0.0, cap=cap)
    if found.zooms_left:
        width = cover_count(region, zooms, buffer=0.0)
        about = "about " if width.estimated else ""
        raise RegionError(
            f"{title} covers {about}{width.total:,} tiles at zooms {', '.join(map(str, zooms))}, "
            f"above the cap of {cap:,}: "
            "take fewer zooms or a smaller region, or go wider with --cap"
        )
    keys = tuple(found.keys())
    if not keys:
        raise RegionError(
            f"{title} covers 0 tiles: the region is empty; give one with an area, inside ±180 and ±90 degrees"
        )
    width = tuple((zoom, len(found.by_zoom[zoom])) for zoom in zooms if zoom in found.by_zoom)
    parameters = json.dumps({"title": title, "zooms": list(zooms), "bounds": list(shapely.bounds(region))})
    return RegionPlan(title, keys, width, parameters)


def start_backfill(stack: Stack, plan: RegionPlan, *, force: bool = False) -> Manifest:
    """Write the plan's manifest and mark its tiles."""
    manifest_id = f"backfill-{uuid.uuid4().hex[:12]}"
    stack.ledger.write_manifest(
        manifest_id, plan.title, "backfill", plan.keys, parameters=plan.parameters, cap=len(plan.keys)
    )
    return stack.ledger.mark_manifest(manifest_id, force=force)
