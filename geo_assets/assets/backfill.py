"""The job that backfills a region from Dagster's UI: plan, estimate, mark, and watch it to its end.

It builds nothing itself: the sensor `tile_updates` turns its marks into runs, live edits first. Its run may die; the
marks stay, and a re-execution goes on with the same manifest.
"""

import time
from pathlib import Path
from typing import Any

from dagster import (
    AssetObservation,
    Config,
    DagsterRunStatus,
    Failure,
    MetadataValue,
    OpExecutionContext,
    Output,
    RunConfig,
    TableColumn,
    TableRecord,
    TableSchema,
    in_process_executor,
    job,
    op,
)
from dagster._core.storage.tags import PRIORITY_TAG
from pydantic import Field

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import TILES
from geo_assets.services.backfills import (
    Cancelled,
    Estimate,
    RegionPlan,
    Verdict,
    estimate,
    plan_region,
    start_backfill,
    verdict,
    watch,
)
from geo_assets.services.regions import (
    RegionError,
    box_region,
    feature_region,
    file_region,
    geojson_region,
    h3_region,
    parse_zooms,
)
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile, TileError
from resources.ledger.protocol import Manifest, UnknownManifest

WATCHING_TAG = "geo_assets/watching"
"""Marks runs that only watch others: they take no place among the runs that build."""

REPORT_S = 10.0
"""How often progress is logged: each line is an event that Dagster keeps."""


class BackfillConfig(Config):
    """The region, by exactly one of its five ways, and what to do there."""

    bbox: str = Field(
        default="", description="west,south,east,north in degrees, such as 24.93,60.16,24.96,60.18; west above east "
        "crosses the date line.",
    )  # fmt: skip
    geojson: str = Field(default="", description="GeoJSON text with the region's polygons, EPSG:4326.")
    file: str = Field(default="", description="GeoJSON file, on the machine of the code server.")
    h3: list[str] = Field(default=[], description="H3 cells, such as 891126d3623ffff.")
    feature: str = Field(
        default="", description="A polygon of the feature store: SOURCE:ID, or LAYER/ATTRIBUTE=VALUE for the one "
        "feature that has this value.",
    )  # fmt: skip
    zooms: str = Field(default="", description="Zooms, such as 0-18, 14 or 10,12-14; empty: all that the layers show.")
    force: bool = Field(default=False, description="Encode also what is up to date; put objects again that are gone.")
    cap: int = Field(default=0, ge=0, description="Tiles it may touch; 0: the setting GEO_ASSETS_MANIFEST_CAP.")
    dry_run: bool = Field(default=False, description="Plan and estimate only: nothing is marked.")
    wait: bool = Field(
        default=True, description="Watch it to its end and fail below the coverage floor. Terminating the run then "
        "cancels the backfill.",
    )  # fmt: skip
    manifest: str = Field(default="", description="Instead of a region: watch this manifest, which is going on.")


def region_of(stack: Stack, config: BackfillConfig) -> tuple[Any, str]:
    """Shape and title of the region that a config names.

    Raises:
        RegionError: None or several are named, or what is named is no region.
    """
    given = [name for name in ("bbox", "geojson", "file", "h3", "feature") if getattr(config, name)]
    if len(given) != 1:
        said = ", ".join(given) or "none"
        raise RegionError(f"name the region by exactly one of bbox, geojson, file, h3 and feature; given: {said}")
    if config.bbox:
        return box_region(config.bbox)
    if config.geojson:
        return geojson_region(config.geojson, "GeoJSON of the config")
    if config.file:
        return file_region(Path(config.file))
    if config.h3:
        return h3_region(config.h3)
    return feature_region(stack.features, config.feature)


def table_of(costs: Estimate) -> MetadataValue:
    """The width by zoom."""
    schema = TableSchema([TableColumn(name, "int") for name in ("zoom", "tiles", "up_to_date", "vertices")])
    return MetadataValue.table(
        [
            TableRecord({"zoom": one.zoom, "tiles": one.tiles, "up_to_date": one.up_to_date, "vertices": one.vertices})
            for one in costs.zooms
        ],
        schema,
    )


def _planned(context: OpExecutionContext, ports: Stack, config: BackfillConfig) -> tuple[RegionPlan, dict[str, Any]]:
    try:
        shape, title = region_of(ports, config)
        zooms = parse_zooms(config.zooms or f"0-{ports.layers.max_zoom}")
        plan = plan_region(ports, shape, title, zooms, cap=config.cap or None)
    except RegionError as fault:
        raise Failure(str(fault), allow_retries=False) from None
    costs = estimate(ports, plan, force=config.force)
    metadata: dict[str, Any] = {
        "region": plan.title,
        "tiles": costs.tiles,
        "up_to_date": costs.up_to_date,
        "vertices": costs.vertices,
        "minutes": round(costs.seconds / 60, 1),
        "estimated_from": "all tiles" if costs.exact else f"{costs.sampled:,} tiles",
        "speed": "measured by the last runs" if costs.measured else "assumed: none was measured yet",
        "width": table_of(costs),
    }
    context.log.info(
        f"{plan.title}: {costs.tiles:,} tiles, about {costs.up_to_date:,} up to date, {costs.vertices:,} vertices, "
        f"{costs.seconds / 60:.1f} minutes"
    )
    return plan, metadata


def _watched(context: OpExecutionContext, ports: Stack, manifest: Manifest) -> Verdict:
    logged = -REPORT_S
    try:
        for progress in watch(ports, manifest.id, poll_s=1.0):
            if time.monotonic() - logged >= REPORT_S:
                logged = time.monotonic()
                context.log.info(f"{progress.done:,} of {progress.tiles:,} tiles, {progress.failed:,} failed")
    except Cancelled as cancelled:
        raise Failure(str(cancelled), allow_retries=False) from None
    except BaseException:
        # Terminated by a person, the backfill is cancelled with it. A platform that is shut down goes on tomorrow.
        run = context.instance.get_run_by_id(context.run_id)
        if run is not None and run.status is DagsterRunStatus.CANCELING:
            count = ports.ledger.cancel_manifest(manifest.id)
            context.log.warning(f"manifest {manifest.id} cancelled: {count:,} tiles are no longer wanted by it")
        raise
    return verdict(ports, manifest.id)


def _failed_table(end: Verdict, tiles_url: str) -> MetadataValue:
    schema = TableSchema([TableColumn(name, "string") for name in ("tile", "error", "map")])
    records: list[TableRecord] = []
    for key, error in end.failed:
        try:
            link = catalog.map_url(tiles_url, Tile.from_key(key))
        except TileError:
            link = ""
        records.append(TableRecord({"tile": key, "error": error[:500], "map": link}))
    return MetadataValue.table(records, schema)


@op(description="Plans a region's tiles, marks them, and watches the runs that build them.")
def region(context: OpExecutionContext, config: BackfillConfig, stack: StackResource) -> Output[str]:
    """The one step of the job; what it returns is the manifest's id."""
    with stack.opened() as ports:
        metadata: dict[str, Any] = {}
        if config.manifest:
            try:
                manifest = ports.ledger.manifest(config.manifest)
            except UnknownManifest:
                raise Failure(f"there is no manifest {config.manifest!r}", allow_retries=False) from None
        else:
            plan, metadata = _planned(context, ports, config)
            if config.dry_run:
                return Output("", metadata=metadata)
            # A re-execution has the same root: it goes on with what was marked.
            name = f"backfill-{(context.run.root_run_id or context.run_id)[:8]}"
            manifest = start_backfill(ports, plan, force=config.force, manifest_id=name)
        context.log.info(f"manifest {manifest.id}: {manifest.tiles:,} tiles, {manifest.state}")
        metadata["manifest"] = manifest.id
        if manifest.state in ("refused", "cancelled"):
            raise Failure(f"manifest {manifest.id} is {manifest.state}: {manifest.problem or 'by somebody'}",
                          metadata=metadata, allow_retries=False)  # fmt: skip
        if not config.wait:
            return Output(manifest.id, metadata=metadata)
        end = _watched(context, ports, manifest)
        metadata |= {"done": end.progress.done, "failed": end.progress.failed, "coverage": round(end.coverage, 5)}
        if end.failed:
            metadata["failed_tiles"] = _failed_table(end, ports.settings.tiles_url)
    context.log_event(AssetObservation(TILES, description=f"{manifest.title}: {end.summary}", metadata=metadata))
    if not end.passed:
        raise Failure(end.summary, metadata=metadata, allow_retries=False)
    return Output(manifest.id, metadata=metadata)


@job(
    name="backfill_region",
    executor_def=in_process_executor,
    # The launchpad opens with every field and its help.
    config=RunConfig(ops={"region": BackfillConfig()}),
    # It costs nothing while it watches, and must not wait behind what it asked for.
    tags={WATCHING_TAG: "yes", PRIORITY_TAG: "15"},
    description=(
        "Backfills a region: plans its tiles, shows width and cost, marks them for the sensor `tile_updates`, and "
        "fails below the coverage floor. Launch it with one of bbox, geojson, file, h3 and feature."
    ),
)
def backfill_region() -> None:
    """One step: plan, mark, watch."""
    region()
