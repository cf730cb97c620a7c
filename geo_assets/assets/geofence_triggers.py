"""The asset `geofence_triggers`: what `[triggers]` holds. A thin shell: services/routing.py routes.

A run of it routes while positions come, stands by for the lease before that where another one routes, and ends after a
while without positions or when its time is over.
"""

import threading
from typing import Any

from dagster import (
    AssetExecutionContext,
    MaterializeResult,
    MetadataValue,
    TableColumn,
    TableRecord,
    TableSchema,
    asset,
)

from geo_assets.assets.stack_resource import StackResource
from geo_assets.services import routing
from geo_assets.services.routing_result import RoutingResult


def metadata_of(result: RoutingResult) -> dict[str, Any]:
    """What the run shows in the catalog."""
    stages = TableSchema(
        [TableColumn("stage", "string"), TableColumn("p50_ms", "float"), TableColumn("p99_ms", "float")]
    )
    rows = [
        TableRecord({"stage": name, "p50_ms": result.p50_ms[name], "p99_ms": result.p99_ms[name]})
        for name in result.p50_ms
    ]
    return {
        "ended": result.ended,
        "epoch": result.epoch,
        "positions": result.positions,
        "positions_per_second": round(result.positions_per_second, 1),
        "routed": result.routed,
        "deduped": result.deduped,
        "shed": result.shed,
        "positions_shed": result.positions_shed,
        "dlq": result.dlq,
        "late": result.judged.get("late", 0),
        "jumps": result.judged.get("jumped", 0),
        "future": result.judged.get("future", 0),
        "ticks": result.ticks,
        "snapshots": result.snapshots,
        "fences_adopted": result.adopted,
        "fence_revision": result.fence_revision,
        "devices": result.devices,
        "devices_in_fences": result.stays,
        "lag": result.lag,
        "seconds": round(result.seconds, 1),
        "stages": MetadataValue.table(rows, stages),
    }


@asset(
    name="geofence_triggers",
    group_name="geofence",
    kinds={"kafka", "python"},
    owners=["team:map"],
    tags={"domain": "vector"},
    description=(
        "ENTER, DWELL and EXIT of devices and fences, in order per device, on the topic `triggers` (docs/triggers.md). "
        "The sensor `geofence_positions` keeps a routing run alive while positions come; a materialization is one run."
    ),
)
def geofence_triggers(context: AssetExecutionContext, stack: StackResource) -> MaterializeResult:
    """Route triggers until there is nothing to do or the time is over."""
    stop = threading.Event()
    with stack.opened() as ports:
        options = routing.options_of(ports.settings)
        try:
            result = routing.route(ports, options, stop=stop, progress=lambda so_far: context.log.info(so_far.summary))
        finally:
            stop.set()
    context.log.info(f"{result.ended}: {result.summary}")
    return MaterializeResult(metadata=metadata_of(result))
