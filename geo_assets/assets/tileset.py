"""The asset `tileset`: a region of the map published as files of its own. A thin shell: services/tileset publishes.

Its configuration says which region, zooms and formats; with none it is the whole map as PMTiles. A run that may not
publish fails with the tiles that stand in the way, and leaves the version in force as it is.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagster import (
    AssetExecutionContext,
    Config,
    DataVersion,
    Failure,
    MaterializeResult,
    MetadataValue,
    TableColumn,
    TableRecord,
    TableSchema,
    asset,
)
from pydantic import Field

from geo_assets import ports
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import TILES, TILESET
from geo_assets.services.regions import RegionError
from geo_assets.services.tileset.publishing import Published, Request, publish
from geo_assets.services.tileset.regions import region_of
from geo_assets.services.tileset.registry import TilesetError
from geo_assets.services.tileset.snapshot import BelowFloor, TilesDirty, map_link
from geo_assets.stack import Stack
from geo_assets.tiles.tileset import TilesetNameError

SHOWN = 50
"""Rows of a table in a run's metadata; the number beside it counts all."""

REPORT_S = 10.0
"""How often progress is logged: each line is an event that Dagster keeps."""


class TilesetConfig(Config):
    """What to publish. Every field has a default: the whole map, at all its zooms, as the PMTiles of tileset `map`."""

    name: str = Field(default="map", description="Of the tileset: a-z, 0-9, _ and -. It stands in its address.")
    bbox: str = Field(
        default="", description="Region: west,south,east,north in degrees, such as 24.93,60.16,24.96,60.18; west above "
        "east crosses the date line. With none of bbox, geojson, file, h3 and feature: the whole map.",
    )  # fmt: skip
    geojson: str = Field(default="", description="Region: GeoJSON text with polygons, EPSG:4326.")
    file: str = Field(default="", description="Region: GeoJSON file, on the machine of the code server.")
    h3: list[str] = Field(default=[], description="Region: H3 cells, such as 891126d3623ffff.")
    feature: str = Field(
        default="", description="Region: a polygon of the feature store: SOURCE:ID, or LAYER/ATTRIBUTE=VALUE."
    )
    zooms: str = Field(default="", description="Zooms, such as 0-14; empty: all that the layers are built for.")
    formats: list[str] = Field(
        default=["pmtiles"], description="pmtiles (always written: the tile server serves it), mbtiles, folder."
    )
    floor: float = Field(
        default=-1.0, ge=-1, le=1, description="Share of the tiles that must be there; -1: GEO_ASSETS_COVERAGE_FLOOR."
    )
    allow_dirty: bool = Field(
        default=False, description="Publish tiles that wait for their build as they stand, instead of refusing."
    )
    cap: int = Field(default=0, ge=0, description="Tiles a region may have; 0: GEO_ASSETS_MANIFEST_CAP.")


@asset(
    key=TILESET,
    deps=[TILES],
    group_name="map",
    kinds={"mvt", "pmtiles"},
    owners=["team:map"],
    tags={"domain": "vector"},
    description=(
        "A region of the map as a PMTiles archive (MBTiles and a plain folder by option) under a new, immutable "
        "version, verified by reading it back. Refuses below the coverage floor and while tiles wait for their build. "
        "`geo-assets rollback` puts an earlier version in force."
    ),
)
def tileset(context: AssetExecutionContext, config: TilesetConfig, stack: StackResource) -> MaterializeResult:
    """Publish a region as it stands."""
    with stack.opened() as opened:
        settings = opened.settings
        try:
            request = Request(
                config.name,
                region_of(
                    opened,
                    region=Path(config.file) if config.file else None,
                    geojson=config.geojson or None,
                    bbox=config.bbox or None,
                    cells=config.h3,
                    feature=config.feature or None,
                    zooms=config.zooms or None,
                    cap=config.cap or None,
                ),
                tuple(config.formats),
                settings.coverage_floor if config.floor < 0 else config.floor,
                config.allow_dirty,
            )
            done = _publish(context, opened, request)
        except BelowFloor as fault:
            rows = [(key, why, map_link(settings.tiles_url, key)) for key, why in fault.missing[:SHOWN]]
            raise _refused(fault, "missing", len(fault.missing), ("tile", "why", "map"), rows) from None
        except TilesDirty as fault:
            rows = [(key, map_link(settings.tiles_url, key)) for key in fault.dirty[:SHOWN]]
            raise _refused(fault, "dirty", len(fault.dirty), ("tile", "map"), rows) from None
        except (RegionError, TilesetError, TilesetNameError) as fault:
            raise Failure(str(fault), allow_retries=False) from None
    context.log.info(
        f"{done.name} {done.version.version}: {done.version.tiles:,} tiles, {done.version.bytes:,} bytes, verified"
    )
    return MaterializeResult(
        metadata=metadata_of(done, settings.tiles_url), data_version=DataVersion(done.manifest["digest"][:16])
    )


def _publish(context: AssetExecutionContext, opened: Stack, request: Request) -> Published:
    logged = time.monotonic()

    def progress(what: str, now: int, total: int) -> None:
        nonlocal logged
        if time.monotonic() - logged > REPORT_S:
            logged = time.monotonic()
            context.log.info(f"{what}: {now:,} of {total:,}")

    settings = opened.settings
    if settings.tile_store_url is None or settings.tile_store_role is None:
        return publish(opened, request, progress=progress)
    # Credentials of this run alone: they write below this tileset's prefix and nowhere else.
    store = ports.open_tile_store(settings, scoped=True, write_prefix=f"{ports.TILESETS_FOLDER}{request.name}/")
    try:
        return publish(opened, request, store=store, progress=progress)
    finally:
        store.close()


def metadata_of(done: Published, tiles_url: str) -> dict[str, Any]:
    """What the materialization shows: where it is, what is in it, and where that comes from."""
    stamps, version = done.manifest, done.version
    base = f"{tiles_url}/tilesets/{done.name}"
    counts = stamps["tiles"]
    result: dict[str, Any] = {
        "tileset": done.name,
        "version": version.version,
        "in_force": done.in_force,
        "tilejson": MetadataValue.url(f"{base}.json"),
        "archive": MetadataValue.url(f"{base}/{version.version}.pmtiles"),
        "region": version.title,
        "zooms": f"{version.zooms[0]}-{version.zooms[1]}",
        "tiles": version.tiles,
        "contents": counts["contents"],
        "bytes": version.bytes,
        "coverage": stamps["coverage"]["share"],
        **{f"tiles_{name}": stamps["coverage"][name] for name in ("expected", "present", "empty", "missing", "dirty")},
        "digest": stamps["digest"],
        "recipe": stamps["recipe"],
        "libraries": MetadataValue.json(stamps["libraries"]),
        "image_digest": stamps["image_digest"],
        "ledger_mark": stamps["ledger"]["mark"],
        "ledger_commits": stamps["ledger"]["commits"],
        "seconds": round(done.seconds, 2),
        "objects_swept": done.swept,
        "by_zoom": text_table(("zoom", "tiles"), [(zoom, f"{count:,}") for zoom, count in counts["by_zoom"].items()]),
        "files": text_table(
            ("format", "object", "bytes", "sha256"),
            [(kind, file.object, f"{file.bytes:,}", file.sha256) for kind, file in version.files.items()],
        ),
    }
    for name in ("source_watermark", "newest_event"):
        if stamps[f"{name}_ms"]:
            result[name] = MetadataValue.timestamp(stamps[f"{name}_ms"] / 1000)
    return result


def _refused(fault: Exception, what: str, count: int, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Failure:
    metadata = {f"{what}_tiles": count, what: text_table(columns, rows)}
    return Failure(str(fault), metadata=metadata, allow_retries=False)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> MetadataValue:
    """A table of texts for metadata."""
    schema = TableSchema([TableColumn(column, "string") for column in columns])
    return MetadataValue.table([TableRecord(dict(zip(columns, row, strict=True))) for row in rows], schema)
