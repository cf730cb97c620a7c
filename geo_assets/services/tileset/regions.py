"""The region of a publication, as a command line or a job's configuration names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from geo_assets.services.regions import (
    MOST_TILES,
    RegionError,
    box_region,
    feature_region,
    file_region,
    geojson_region,
    h3_region,
    parse_zooms,
    too_wide,
)
from geo_assets.services.tileset.snapshot import Region
from geo_assets.tiles.cover import cover, cover_count

if TYPE_CHECKING:
    from geo_assets.stack import Stack


def region_of(
    stack: Stack,
    *,
    region: Path | None = None,
    geojson: str | None = None,
    bbox: str | None = None,
    cells: Sequence[str] = (),
    feature: str | None = None,
    zooms: str | None = None,
    cap: int | None = None,
) -> Region:
    """The tiles to publish.

    Args:
        stack: The ports.
        region: GeoJSON file with polygons, EPSG:4326.
        geojson: The same as text.
        bbox: `west,south,east,north` in degrees.
        cells: H3 cells.
        feature: An area in the feature store, as `regions.feature_region` reads it. With none of these five it is the
            whole map, which has no cap: it is what is there.
        zooms: Such as `0-14`; default: every zoom of the layers.
        cap: Most tiles of a region; default: the setting `manifest_cap`.

    Raises:
        RegionError: Two of the five, or one that cannot be used, covers nothing, or more than the cap.
    """
    if sum(map(bool, (region, geojson, bbox, cells, feature))) > 1:
        raise RegionError(
            "name the region by at most one of a file, a bbox, H3 cells and a feature; with none, the map"
        )
    deepest = stack.layers.max_zoom
    wanted = parse_zooms(zooms) if zooms else list(range(deepest + 1))
    if wanted[-1] > deepest:
        raise RegionError(f"zoom {wanted[-1]} is above {deepest}, the deepest that the layers are built for")
    if region:
        shape, title = file_region(region)
    elif geojson:
        shape, title = geojson_region(geojson, "GeoJSON")
    elif bbox:
        shape, title = box_region(bbox)
    elif cells:
        shape, title = h3_region(cells)
    elif feature:
        shape, title = feature_region(stack.features, feature)
    else:
        return Region("the whole map", tuple(wanted))
    cap = min(stack.settings.manifest_cap if cap is None else cap, MOST_TILES)
    found = cover(shape, wanted, buffer=0.0, cap=cap)
    if found.zooms_left:
        raise too_wide(title, wanted, cover_count(shape, wanted, buffer=0.0), cap)
    return Region(title, tuple(wanted), tuple(found.keys()))
