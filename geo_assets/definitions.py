"""What Dagster loads: assets, checks, jobs, sensors, and the resources they share. The one module that names all."""

from __future__ import annotations

from dagster import Definitions, in_process_executor

from geo_assets.assets.features import features
from geo_assets.assets.repair import repair_coverage
from geo_assets.assets.stack_resource import StackResource
from geo_assets.assets.tiles import tiles
from geo_assets.checks.coverage import coverage
from geo_assets.checks.crs import crs
from geo_assets.checks.dead_letters import dead_letter_rate
from geo_assets.checks.freshness import freshness
from geo_assets.checks.integrity import integrity
from geo_assets.checks.topology import topology
from geo_assets.jobs import audit, build_tiles, hourly_audit, observe_features
from sensors.tile_updates import tile_updates

defs = Definitions(
    assets=[features, tiles],
    asset_checks=[topology, crs, coverage, integrity, freshness, dead_letter_rate],
    jobs=[build_tiles, audit, observe_features, repair_coverage],
    schedules=[hourly_audit],
    sensors=[tile_updates],
    resources={"stack": StackResource()},
    # A backfill started in the UI runs like every other: one process, with the workers below it.
    executor=in_process_executor,
)
