"""Writing to Dagster's asset catalog: many events at the price of a few transactions, behind one function.

What a tile's materialization says is decided here too, so that run, sensor and repair say the same. Measured on two
cores: Dagster stores one event in 13-33 ms, a new connection and a commit each; in batches 0.4 ms.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    DagsterEventType,
    DagsterInstance,
    DynamicPartitionsDefinition,
    MetadataValue,
    TableColumn,
    TableRecord,
    TableSchema,
)
from dagster._core.events import (
    AssetObservationData,
    DagsterEvent,
    DagsterEventBatchMetadata,
    StepMaterializationData,
    generate_event_batch_id,
)
from dagster._core.instance import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value

from geo_assets.links import map_url
from geo_assets.partitions import PartitionZooms
from geo_assets.settings import Settings
from geo_assets.tiles.tile import Tile
from resources.ledger.protocol import Ledger, Owed

TILES = AssetKey("tiles")
FEATURES = AssetKey("features")
TRIGGERS = AssetKey("geofence_triggers")
DEAD_LETTERS = AssetKey("dead_letters")
TILESET = AssetKey("tileset")

PARTITIONS = "tiles"
"""Name of the dynamic partitions definition of the asset `tiles`."""

BATCH_EVENTS = 1_000
"""Events of one transaction: 1,000 hold SQLite's write lock for about 0.3 s, and larger ones gain nothing."""

_BATCH_SIZE = "DAGSTER_EVENT_BATCH_SIZE"
"""Dagster batches only where this is set; where it is not, each event is a transaction again."""


@dataclass(frozen=True, slots=True)
class InRun:
    """The run and step that the events belong to; events without one are stored as reported from outside."""

    run_id: str
    job_name: str
    step_key: str | None = None


def report_materializations(
    instance: DagsterInstance, events: Iterable[AssetMaterialization | AssetObservation], *, run: InRun | None = None
) -> int:
    """Store events in the catalog in batches of `BATCH_EVENTS`, durably before it returns.

    Args:
        instance: Dagster's instance.
        events: Materializations and observations, in the order in which they happened.
        run: The run that made them; None reports them from outside any run.

    Returns:
        How many events were stored.
    """
    if int(os.environ.get(_BATCH_SIZE, "0")) < BATCH_EVENTS:
        os.environ[_BATCH_SIZE] = str(BATCH_EVENTS)
    count = 0
    batch: list[AssetMaterialization | AssetObservation] = []
    for event in events:
        batch.append(event)
        if len(batch) == BATCH_EVENTS:
            _report_batch(instance, batch, run)
            count += len(batch)
            batch = []
    if batch:
        _report_batch(instance, batch, run)
    return count + len(batch)


def count_partitions(instance: DagsterInstance) -> None:
    """Have Dagster count the partitions of `tiles` that are materialized, failed and missing, and keep the figures.

    Otherwise the next page of the UI does it, and the one who opened it waits: eight seconds at 90,000 new ones.
    """
    get_and_update_asset_status_cache_value(instance, TILES, DynamicPartitionsDefinition(name=PARTITIONS))


def _report_batch(
    instance: DagsterInstance, batch: Sequence[AssetMaterialization | AssetObservation], run: InRun | None
) -> None:
    batch_id = generate_event_batch_id()
    # All made before the first is sent: one that cannot be made must not leave its neighbours in Dagster's buffer.
    events = [_dagster_event(event, run) for event in batch]
    for index, event in enumerate(events):
        instance.report_dagster_event(
            event,
            run_id=RUNLESS_RUN_ID if run is None else run.run_id,
            batch_metadata=DagsterEventBatchMetadata(batch_id, index == len(events) - 1),
        )


def _dagster_event(event: AssetMaterialization | AssetObservation, run: InRun | None) -> DagsterEvent:
    if isinstance(event, AssetMaterialization):
        kind, data = DagsterEventType.ASSET_MATERIALIZATION, StepMaterializationData(event, [])
    else:
        kind, data = DagsterEventType.ASSET_OBSERVATION, AssetObservationData(event)
    return DagsterEvent(
        event_type_value=kind.value,
        job_name=RUNLESS_JOB_NAME if run is None else run.job_name,
        step_key=None if run is None else run.step_key,
        message=event.description or "",
        event_specific_data=data,
    )


def tile_materialization(
    key: str,
    *,
    outcome: str,
    revision: int,
    content_hash: str | None,
    work_key: str | None,
    size: int,
    data_time_ms: int,
    tiles_url: str,
    image_digest: str,
    details: Mapping[str, Any] | None = None,
) -> AssetMaterialization:
    """The catalog's entry for one tile.

    Args:
        key: Partition key `zoom:quadkey`.
        outcome: `built`, `unchanged`, `skipped` or `emptied`.
        revision: The ledger's revision that stands.
        content_hash: sha256 hex of the uncompressed bytes; None when the tile is empty.
        work_key: Key of the work that it stands for.
        size: Uncompressed bytes.
        data_time_ms: Newest event time of its features, milliseconds since the epoch, UTC; 0 when it has none.
        tiles_url: Where browsers find the tile server.
        image_digest: Digest of the image that built it.
        details: More numbers: `ms`, `features`, `vertices`, `left_out`.

    Returns:
        The materialization, with a link to the map.
    """
    tile = Tile.from_key(key)
    metadata: dict[str, Any] = {
        "outcome": outcome,
        "tile": tile.path,
        "map": MetadataValue.url(map_url(tiles_url, tile)),
        "revision": revision,
        "content_hash": content_hash or "empty",
        "work_key": work_key or "",
        "bytes": size,
        "image_digest": image_digest,
    }
    if data_time_ms:
        metadata["data_time"] = MetadataValue.timestamp(data_time_ms / 1000)
    for name, value in (details or {}).items():
        if isinstance(value, bool | int | float | str) and name not in metadata:
            metadata[name] = value
    return AssetMaterialization(asset_key=TILES, partition=key, metadata=metadata)


def owed_materialization(row: Owed, *, tiles_url: str, image_digest: str) -> AssetMaterialization:
    """The catalog's entry for a commit whose builder died before it could report it."""
    try:
        details = json.loads(row.details)
    except ValueError:
        details = {}
    details = details if isinstance(details, dict) else {}
    return tile_materialization(
        row.key,
        outcome=row.outcome,
        revision=row.revision,
        content_hash=row.content_hash,
        work_key=row.work_key,
        size=row.bytes,
        data_time_ms=row.data_time_ms,
        tiles_url=tiles_url,
        image_digest=str(details.pop("image", image_digest)),
        details=details,
    )


CHANGED_SHOWN = 20
"""Rows of the table of a partition's changed tiles: each event is kept for long, and the number stands beside it."""

_OUTCOMES = ("built", "unchanged", "skipped", "emptied")


def by_partition(
    events: Iterable[AssetMaterialization], zooms: PartitionZooms, *, tiles_url: str
) -> Iterator[AssetMaterialization]:
    """The catalog's entries for tiles as entries for their partitions: one a partition, in the order of the first tile.

    Args:
        events: What `tile_materialization` made, one a tile.
        zooms: The partition zooms; where every tile is a partition of its own, the entries stay as they are.
        tiles_url: Where browsers find the tile server.
    """
    if zooms.every:
        yield from events
        return
    groups: dict[str, list[AssetMaterialization]] = {}
    for event in events:
        assert event.partition is not None
        groups.setdefault(zooms.partition_of(event.partition), []).append(event)
    for partition, group in groups.items():
        yield _partition_materialization(partition, group, tiles_url)


def _partition_materialization(
    partition: str, group: Sequence[AssetMaterialization], tiles_url: str
) -> AssetMaterialization:
    """One entry for what became of some tiles of a partition: counts, and a table of those that changed."""
    tile = Tile.from_key(partition)
    said = [{name: value.value for name, value in event.metadata.items()} for event in group]
    outcomes = Counter(str(one["outcome"]) for one in said)
    changed = [
        (str(event.partition), one)
        for event, one in zip(group, said, strict=True)
        if one["outcome"] in ("built", "emptied")
    ]
    metadata: dict[str, Any] = {
        "tiles": len(group),
        **{outcome: outcomes[outcome] for outcome in _OUTCOMES},
        "map": MetadataValue.url(map_url(tiles_url, tile)),
        "bytes": sum(_number(one.get("bytes")) for one in said),
        "ms": round(sum(_number(one.get("ms")) for one in said), 2),
        "image_digest": str(said[0].get("image_digest", "")),
    }
    newest = max((_number(one.get("data_time")) for one in said), default=0)
    if newest:
        metadata["data_time"] = MetadataValue.timestamp(newest)
    if changed:
        metadata["changed"] = MetadataValue.table(
            [
                TableRecord(
                    {
                        "tile": key,
                        "outcome": str(one["outcome"]),
                        "revision": int(_number(one.get("revision"))),
                        "bytes": int(_number(one.get("bytes"))),
                        "map": map_url(tiles_url, Tile.from_key(key)),
                    }
                )
                for key, one in changed[:CHANGED_SHOWN]
            ],
            TableSchema(
                [
                    TableColumn("tile", "string"),
                    TableColumn("outcome", "string"),
                    TableColumn("revision", "int"),
                    TableColumn("bytes", "int"),
                    TableColumn("map", "string"),
                ]
            ),
        )
    return AssetMaterialization(asset_key=TILES, partition=partition, metadata=metadata)


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def pay_owed(
    ledger: Ledger,
    instance: DagsterInstance,
    settings: Settings,
    *,
    limit: int,
    min_age_ms: int,
    only: Callable[[Sequence[Owed]], Sequence[Owed]] | None = None,
) -> int:
    """Report commits that their builder did not, and pay their catalog duties; how many.

    Args:
        ledger: Where the duties stand.
        instance: Dagster's instance.
        settings: Partition zooms and addresses.
        limit: Most rows looked at, oldest first.
        min_age_ms: How old a row must be.
        only: Chooses among them.
    """
    rows = ledger.owed("catalog", limit, min_age_ms=min_age_ms)
    if only is not None:
        rows = only(rows)
    if not rows:
        return 0
    register_partitions(instance, (row.key for row in rows), settings.partitions)
    events = (
        owed_materialization(row, tiles_url=settings.tiles_url, image_digest=settings.image_digest) for row in rows
    )
    report_materializations(instance, by_partition(events, settings.partitions, tiles_url=settings.tiles_url))
    ledger.pay([row.id for row in rows])
    return len(rows)


REGISTER_KEYS = 10_000
"""Partition keys of one call: each is a variable of one SQL statement, of which SQLite allows 32,766."""


def register_partitions(instance: DagsterInstance, keys: Iterable[str], zooms: PartitionZooms | None = None) -> None:
    """Make the partitions of these tiles partitions of the asset `tiles`; those that are stay as they are.

    In quadkey order: Dagster's ranges follow the order of insertion, so a region that came at once is one range.

    Args:
        instance: Dagster's instance.
        keys: Keys of tiles.
        zooms: The partition zooms; None: every tile is a partition of its own.
    """
    partitions = {key if zooms is None else zooms.partition_of(key) for key in keys}
    ordered = sorted(partitions, key=lambda key: (key.partition(":")[2], key))
    for start in range(0, len(ordered), REGISTER_KEYS):
        instance.add_dynamic_partitions(PARTITIONS, ordered[start : start + REGISTER_KEYS])
