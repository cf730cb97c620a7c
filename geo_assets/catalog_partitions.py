"""Moving the asset catalog to other partition zooms: new partitions with what stands in them, old ones retired.

Nothing else knows of partitions, so nothing else moves. It may be done again, and goes on where a killed one stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from dagster import AssetMaterialization, DagsterInstance, RunsFilter
from dagster._core.execution.backfill import BulkActionStatus
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from dagster._core.storage.event_log import SqlEventLogStorage
from dagster._core.storage.event_log.schema import DynamicPartitionsTable

from geo_assets import catalog
from geo_assets.catalog import PARTITIONS, TILES
from geo_assets.partitions import CATALOG_VALUE

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.ledger.protocol import TileState

log = structlog.get_logger()

RETIRE_KEYS = 1_000
"""Partition keys deleted in one transaction."""

WAIT_S = 300.0
POLL_S = 1.0


class RunsInTheWay(RuntimeError):
    """Runs over partitions of `tiles` go on: a key that is deleted under one of them would fail it."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a migration did: partitions registered, entries stored for them, partitions retired."""

    registered: int = 0
    reported: int = 0
    retired: int = 0


def migrate(
    stack: Stack,
    instance: DagsterInstance,
    *,
    wait_s: float = WAIT_S,
    say: Callable[[str], None] = lambda _: None,
) -> Migrated:
    """Bring the catalog to the partition zooms of the settings.

    New partitions come first, each with an entry for what its tiles are now; then, when no run over partitions is alive
    any more, the old ones go. A key that is deleted under a running run would fail that run.

    Args:
        stack: The ports; the ledger knows every tile.
        instance: Dagster's instance.
        wait_s: How long to wait for runs that are in the way.
        say: Told what it waits for.

    Raises:
        RunsInTheWay: They did not end in time: new partitions are there, the old ones are as well. Run it again.
    """
    zooms = stack.settings.partitions
    tiles = sorted(stack.ledger.scan(published=False), key=lambda state: (state.key.partition(":")[2], state.key))
    wanted = {zooms.partition_of(state.key) for state in tiles}
    there = set(instance.get_dynamic_partitions(PARTITIONS))
    new = wanted - there
    catalog.register_partitions(instance, new)
    # Not only the new ones: a migration that was killed may have registered them, and reported nothing.
    unreported = wanted - instance.get_materialized_partitions(TILES)
    standing = (state for state in tiles if state.built and zooms.partition_of(state.key) in unreported)
    entries = catalog.by_partition(_standing(stack, standing), zooms, tiles_url=stack.settings.tiles_url)
    reported = catalog.report_materializations(instance, entries)
    old = sorted(key for key in there if not zooms.is_partition(key))
    if old:
        _wait_for_runs(instance, wait_s, say)
        _retire(instance, old)
    stack.ledger.set_value(CATALOG_VALUE, str(zooms))
    # Counted here, so that the first page of the UI does not wait for it.
    catalog.count_partitions(instance)
    return Migrated(len(new), reported, len(old))


def _standing(stack: Stack, tiles: Iterable[TileState]) -> Iterator[AssetMaterialization]:
    """Entries that say what is published, as a run would that found nothing to do."""
    settings = stack.settings
    for state in tiles:
        yield catalog.tile_materialization(
            state.key,
            outcome="skipped",
            revision=state.revision,
            content_hash=state.content_hash,
            work_key=state.work_key,
            size=state.bytes,
            data_time_ms=state.data_time_ms,
            tiles_url=settings.tiles_url,
            image_digest=settings.image_digest,
            details={"reported_by": "a change of the partition zooms"},
        )


def _wait_for_runs(instance: DagsterInstance, wait_s: float, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_s
    while found := _in_the_way(instance):
        if time.monotonic() >= deadline:
            raise RunsInTheWay(
                f"{_told(found)} on partitions of `tiles` still go on; old partitions stay until they have ended: run "
                "geo-assets migrate-partitions again"
            )
        say(f"waiting for {_told(found)}")
        time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.01)))


def _told(found: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in found.items())


def _in_the_way(instance: DagsterInstance) -> Counter[str]:
    """Runs and backfills that are not finished and target `tiles`."""
    found: Counter[str] = Counter()
    for run in instance.get_runs(RunsFilter(statuses=list(NOT_FINISHED_STATUSES))):
        if run.asset_selection is None or TILES in run.asset_selection:
            partitioned = any(tag.startswith(("dagster/partition", "dagster/asset_partition")) for tag in run.tags)
            if partitioned or run.job_name == "build_tiles":
                found["runs"] += 1
    for status in (BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING):
        found["backfills"] += len(instance.get_backfills(status=status))
    return +found


def _retire(instance: DagsterInstance, keys: Sequence[str]) -> None:
    """Delete partition keys, many at a time: Dagster's own way takes a connection for each."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    of = DynamicPartitionsTable.c
    for start in range(0, len(keys), RETIRE_KEYS):
        piece = keys[start : start + RETIRE_KEYS]
        with storage.index_connection() as connection:
            connection.execute(
                DynamicPartitionsTable.delete().where(of.partitions_def_name == PARTITIONS, of.partition.in_(piece))
            )
    # What the UI counts is kept beside the asset, and has the old keys in it.
    storage.wipe_asset_cached_status(TILES)
