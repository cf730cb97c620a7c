"""What Dagster loads: assets, checks, jobs, sensors, and the resources they share. The one module that names all."""

from __future__ import annotations

import structlog
from dagster import Definitions, in_process_executor

from geo_assets import logs
from geo_assets.assets.backfill import backfill_region
from geo_assets.assets.dead_letters import dead_letters, replay_dead_letters
from geo_assets.assets.features import features
from geo_assets.assets.geofence_triggers import geofence_triggers
from geo_assets.assets.maintenance import maintenance, nightly_maintenance
from geo_assets.assets.mend import mend
from geo_assets.assets.repair import repair_coverage
from geo_assets.assets.shadow import shadow_diff
from geo_assets.assets.stack_resource import StackResource
from geo_assets.assets.tiles import tiles
from geo_assets.assets.tileset import tileset
from geo_assets.checks.coverage import coverage
from geo_assets.checks.crs import crs
from geo_assets.checks.dead_letters import dead_letter_rate
from geo_assets.checks.feature_crs import feature_crs
from geo_assets.checks.feature_topology import feature_topology
from geo_assets.checks.freshness import freshness
from geo_assets.checks.geofence import delivery, routing_lag, trigger_dead_letter_rate
from geo_assets.checks.half_done import half_done
from geo_assets.checks.integrity import integrity
from geo_assets.checks.log_lag import log_lag
from geo_assets.checks.skip_rate import skip_rate
from geo_assets.checks.source_silence import source_silence
from geo_assets.checks.topology import topology
from geo_assets.jobs import audit, build_tiles, hourly_audit, observe_features, publish_tileset, route_geofence_triggers
from geo_assets.services import native
from geo_assets.settings import Settings
from sensors.check_alerts import check_alerts
from sensors.dead_letter_counts import dead_letter_counts
from sensors.geofence_positions import geofence_positions
from sensors.tile_updates import tile_updates

# The code server and every run load this, whatever started them. What they log has no values of variables in it.
_settings = Settings()
if not structlog.is_configured():
    logs.configure_events(_settings.log_level, _settings.log_format, cache=False)
# On other libraries than the locked ones they would build other tiles.
native.compare(_settings)

defs = Definitions(
    assets=[features, tiles, tileset, geofence_triggers, dead_letters],
    asset_checks=[
        topology,
        crs,
        coverage,
        integrity,
        half_done,
        freshness,
        skip_rate,
        feature_topology,
        feature_crs,
        source_silence,
        log_lag,
        dead_letter_rate,
        trigger_dead_letter_rate,
        delivery,
        routing_lag,
    ],
    jobs=[
        build_tiles,
        backfill_region,
        publish_tileset,
        shadow_diff,
        route_geofence_triggers,
        audit,
        observe_features,
        repair_coverage,
        replay_dead_letters,
        maintenance,
        mend,
    ],
    schedules=[hourly_audit, nightly_maintenance],
    sensors=[tile_updates, geofence_positions, check_alerts, dead_letter_counts],
    resources={"stack": StackResource()},
    # A backfill started in the UI runs like every other: one process, with the workers below it.
    executor=in_process_executor,
)
