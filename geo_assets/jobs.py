"""The jobs: build the tiles of a batch, and audit what is stored. And the tags by which their runs are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster import (
    AssetSelection,
    DefaultScheduleStatus,
    ScheduleDefinition,
    define_asset_job,
    in_process_executor,
)
from dagster._core.storage.tags import PRIORITY_TAG

from geo_assets.catalog import FEATURES, TILES, TILESET, TRIGGERS
from geo_assets.tiles.tile import common_prefix

if TYPE_CHECKING:
    from resources.ledger.protocol import Batch

BATCH_TAG = "geo_assets/batch"
"""Names the batch of a run: the sensor finds a batch's run by it."""


AUDIT_TAG = "geo_assets/audit"
"""Names the ledger's commits at which the sensor asked for an audit. No audit has a batch."""


ROUTING_TAG = "geo_assets/routing"
"""Names the runs that route triggers: the sensor finds them by it, and Dagster's queue lets two of them run."""


def tags_of(batch: Batch, vertices: int) -> dict[str, str]:
    """Tags of the run of a batch: what a person looks for in the list of runs."""
    quadkeys = [key.partition(":")[2] for key in batch.keys]
    zooms = sorted({int(key.partition(":")[0]) for key in batch.keys})
    tags = {
        BATCH_TAG: batch.id,
        "geo_assets/kind": batch.kind,
        "geo_assets/attempt": str(batch.attempt),
        "geo_assets/tiles": str(len(batch.keys)),
        "geo_assets/vertices": str(vertices),
        "geo_assets/zooms": f"{zooms[0]}-{zooms[-1]}" if zooms else "",
        "geo_assets/region": common_prefix(quadkeys) or "world",
        # An edit's run passes those of backfills in Dagster's queue.
        PRIORITY_TAG: "10" if batch.kind == "live" else "-10",
    }
    if batch.manifest is not None:
        tags["geo_assets/manifest"] = batch.manifest
    return tags


# In one process: a step of its own process costs another import of Dagster and the libraries, two seconds a run. The
# heavy work is in worker processes anyway.
build_tiles = define_asset_job(
    "build_tiles",
    selection=AssetSelection.assets(TILES).without_checks(),
    executor_def=in_process_executor,
    description="Builds the tiles of a batch that the sensor `tile_updates` leased.",
)

publish_tileset = define_asset_job(
    "publish_tileset",
    selection=AssetSelection.assets(TILESET).without_checks(),
    executor_def=in_process_executor,
    description="Publishes a region (with no configuration the whole map) as a new version of a tileset.",
)

route_geofence_triggers = define_asset_job(
    "route_geofence_triggers",
    selection=AssetSelection.assets(TRIGGERS).without_checks(),
    executor_def=in_process_executor,
    # Positions wait for it: it passes every tile's run in Dagster's queue.
    tags={ROUTING_TAG: "yes", PRIORITY_TAG: "20"},
    description="Routes geofence triggers while positions come; the sensor `geofence_positions` starts it.",
)

audit = define_asset_job(
    "audit",
    selection=AssetSelection.all_asset_checks(),
    executor_def=in_process_executor,
    # In Dagster's queue both edits and backfills pass it.
    tags={PRIORITY_TAG: "-20"},
    description="Runs every check over what is stored: topology, CRS, coverage, integrity and the dead-letter rate.",
)

observe_features = define_asset_job(
    "observe_features",
    selection=AssetSelection.assets(FEATURES),
    executor_def=in_process_executor,
    description="Observes the feature store: watermark and features by layer.",
)

hourly_audit = ScheduleDefinition(
    name="hourly_audit",
    job=audit,
    cron_schedule="7 * * * *",
    default_status=DefaultScheduleStatus.RUNNING,
    description="Every hour, a few minutes past, when nothing else is wont to start.",
)
