"""The source asset `features`: what upstream systems wrote, how much of it, and how current it is.

Its watermark is the newest event time of anything applied. The asset is observed, never built: ingest writes it.
"""

import json
from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetObservation,
    AssetSpec,
    DagsterInstance,
    DataVersion,
    MetadataValue,
    ObserveResult,
    TableColumn,
    TableRecord,
    TableSchema,
    multi_observable_source_asset,
)

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import FEATURES
from geo_assets.services.status import moment
from geo_assets.stack import Stack
from resources.feature_store.protocol import StoreCounts

OBSERVE_EVERY_MS = 60_000
"""How often the sensor looks: counting the layers takes a while, and each observation is an event for good."""

SHOWN = 100
"""Sources in the table of an observation."""

_LAST_OBSERVED = "catalog.features"
"""Ledger value: when the sensor last looked, and the watermark that it saw."""


def observation_metadata(counts: StoreCounts) -> dict[str, Any]:
    """What an observation shows: the watermark, features by layer, and what is still owed."""
    layers = sorted(counts.by_layer.items())
    schema = TableSchema([TableColumn("layer", "string"), TableColumn("features", "int")])
    metadata: dict[str, Any] = {
        "features": sum(counts.by_layer.values()),
        "layers": MetadataValue.table([TableRecord({"layer": name, "features": n}) for name, n in layers], schema),
        "tombstones": counts.tombstones,
        "applied_events": counts.applied_keys,
        "hints_owed": counts.outbox,
        "watermark_ms": counts.watermark_ms,
    }
    if counts.sources:
        columns = [
            TableColumn("source", "string"),
            TableColumn("watermark", "string"),
            TableColumn("received", "string"),
        ]
        rows = [
            TableRecord(
                {"source": name, "watermark": moment(one.watermark_ms) or "", "received": moment(one.received_ms) or ""}
            )
            for name, one in sorted(counts.sources.items())
        ]
        metadata["sources"] = MetadataValue.table(rows[:SHOWN], TableSchema(columns))
    if counts.watermark_ms:
        metadata["watermark"] = MetadataValue.timestamp(counts.watermark_ms / 1000)
    return metadata


@multi_observable_source_asset(
    name="features",
    specs=[
        AssetSpec(
            FEATURES,
            group_name="map",
            kinds={"geopackage"},
            owners=["team:map"],
            tags={"domain": "vector"},
            description=(
                "Features of every source, in EPSG:4326, as ingest applied them: signed edits, imports and deletes. "
                "Its data version is the watermark, the newest event time of anything applied."
            ),
            metadata={"crs": "EPSG:4326", "written_by": "ingest and `geo-assets import`"},
        )
    ],
)
def features(stack: StackResource) -> Iterator[ObserveResult]:
    """Observe the feature store: watermark and counts by layer."""
    with stack.opened() as ports:
        counts = ports.features.counts()
    version = DataVersion(str(counts.watermark_ms))
    yield ObserveResult(FEATURES, data_version=version, metadata=observation_metadata(counts))


def observe_if_moved(stack: Stack, instance: DagsterInstance, now_ms: int) -> bool:
    """Report an observation when the watermark moved, at most once a minute; whether it did."""
    last = json.loads(stack.ledger.get_value(_LAST_OBSERVED) or "{}")
    if now_ms - last.get("at_ms", 0) < OBSERVE_EVERY_MS:
        return False
    counts = stack.features.counts()
    moved = counts.watermark_ms != last.get("watermark_ms", 0)
    if moved:
        observation = AssetObservation(
            FEATURES,
            metadata=observation_metadata(counts),
            tags={"dagster/data_version": str(counts.watermark_ms)},
        )
        catalog.report_materializations(instance, [observation])
    stack.ledger.set_value(_LAST_OBSERVED, json.dumps({"at_ms": now_ms, "watermark_ms": counts.watermark_ms}))
    return moved
