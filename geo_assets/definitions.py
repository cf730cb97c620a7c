"""What Dagster loads: assets, checks, jobs, sensors, and the resources they share. The one module that names all."""

from __future__ import annotations

from dagster import Definitions, in_process_executor

from geo_assets.assets.features import features
from geo_assets.assets.stack_resource import StackResource
from geo_assets.assets.tiles import tiles
from geo_assets.jobs import build_tiles, observe_features
from sensors.tile_updates import tile_updates

defs = Definitions(
    assets=[features, tiles],  # pyright: ignore[reportArgumentType]
    jobs=[build_tiles, observe_features],
    sensors=[tile_updates],
    resources={"stack": StackResource()},
    # A backfill started in the UI runs like every other: one process, with the workers below it.
    executor=in_process_executor,
)
