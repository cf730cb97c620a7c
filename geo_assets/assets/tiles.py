"""The asset `tiles`: every tile of the map is a partition of it. A thin shell: services/build.py builds.

A run gets its tiles from a batch that the sensor leased, or from the partitions that a backfill in the UI names.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagster import (
    AssetExecutionContext,
    AssetMaterialization,
    AssetObservation,
    BackfillPolicy,
    Config,
    DynamicPartitionsDefinition,
    Failure,
    MetadataValue,
    TableColumn,
    TableRecord,
    TableSchema,
    asset,
)
from pydantic import Field

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import FEATURES, TILES, InRun
from geo_assets.partitions import UnknownPartition
from geo_assets.services import engines, throughput, tracing
from geo_assets.services.build import TileBuilder, TileResult
from geo_assets.services.hint_traces import traces_of_run
from geo_assets.services.pool import WorkersUnavailable
from geo_assets.services.recipe import current_recipe
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile
from resources.event_log.protocol import LogUnavailable
from resources.feature_store.protocol import FeatureStoreUnavailable
from resources.ledger.protocol import LedgerUnavailable, UnknownBatch
from resources.tile_store.protocol import TileStoreUnavailable

tile_partitions = DynamicPartitionsDefinition(name=catalog.PARTITIONS)

REPORT_TILES = 1_000
REPORT_S = 5.0
"""Results are reported every so many tiles or seconds: early enough to watch, rarely enough to come in batches."""
COUNTED_FROM = 1_000
"""Tiles of a run from which it has Dagster count the partitions anew at its end: no page of the UI waits for that."""

SHOWN = 20
"""Rows of a table in a run's metadata: a person reads no more, and each event is kept for good."""

OUTAGES = (LedgerUnavailable, FeatureStoreUnavailable, LogUnavailable, TileStoreUnavailable, WorkersUnavailable)
"""Faults that are no tile's: the batch is given back whole, and the next tick asks for it again."""


class TilesConfig(Config):
    """What to build; a run over selected partitions needs none of it."""

    batch: str | None = Field(default=None, description="Id of the batch that the sensor leased for this run.")
    force: bool = Field(default=False, description="Encode even tiles whose work key says that nothing changed.")


@dataclass(slots=True)
class Tally:
    """What became of a run's tiles."""

    targets: int
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)
    left_out: int = 0
    slowest: list[TileResult] = field(default_factory=list)
    bytes: int = 0
    vertices: int = 0
    memory: Counter[int] = field(default_factory=Counter)
    """Samples of the resident memory of worker processes, by the power of two of megabytes above it."""

    def add(self, result: TileResult) -> None:
        """Count one tile."""
        self.outcomes[result.outcome] += 1
        self.left_out += len(result.left_out)
        self.vertices += result.vertices
        if result.outcome in ("built", "emptied"):
            self.bytes += result.bytes
        if result.outcome == "failed":
            self.failed.append((result.key, result.error or ""))
        elif result.outcome != "skipped":
            self.slowest.append(result)
            if len(self.slowest) > 8 * SHOWN:
                self._trim()

    def _trim(self) -> None:
        self.slowest.sort(key=lambda result: -result.ms)
        del self.slowest[SHOWN:]

    @property
    def done(self) -> int:
        """Tiles that are answered, whatever became of them."""
        return self.outcomes.total()

    @property
    def coverage(self) -> float:
        """Fraction of the targeted tiles that stand as they should; 1 when none was targeted."""
        return (self.done - self.outcomes["failed"]) / self.targets if self.targets else 1.0

    @property
    def skip_rate(self) -> float:
        """Fraction of the tiles for which there was nothing to do."""
        return self.outcomes["skipped"] / self.done if self.done else 0.0

    def summary(self) -> str:
        """One line for the run's log."""
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"{self.done:,} of {self.targets:,} tiles: {counts or 'none yet'}"

    def metadata(self, seconds: float, tiles_url: str) -> dict[str, Any]:
        """What the run shows in the catalog."""
        self._trim()
        result: dict[str, Any] = {
            name: self.outcomes[name] for name in ("built", "unchanged", "skipped", "emptied", "failed")
        }
        result |= {
            "targets": self.targets,
            "skip_rate": round(self.skip_rate, 4),
            "coverage": round(self.coverage, 4),
            "features_left_out": self.left_out,
            "bytes": self.bytes,
            "vertices": self.vertices,
            "seconds": round(seconds, 2),
            "tiles_per_second": round(self.done / seconds, 1) if seconds else 0.0,
        }
        if self.slowest:
            result["slowest_tiles"] = _table(
                [("tile", "string"), ("ms", "float"), ("features", "int"), ("bytes", "int"), ("map", "string")],
                [
                    (one.key, round(one.ms, 1), one.features, one.bytes, _map(one.key, tiles_url))
                    for one in self.slowest
                ],
            )
        if self.failed:
            rows = [(key, error[:500], _map(key, tiles_url)) for key, error in sorted(self.failed)[:SHOWN]]
            result["failed_tiles"] = _table([("tile", "string"), ("error", "string"), ("map", "string")], rows)
        if self.memory:
            rows = [(f"up to {2**power} MB", count) for power, count in sorted(self.memory.items())]
            result["worker_memory"] = _table([("resident memory of a worker", "string"), ("samples", "int")], rows)
        return result


def _map(key: str, tiles_url: str) -> str:
    try:
        return catalog.map_url(tiles_url, Tile.from_key(key))
    except ValueError:
        return ""


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[tuple[Any, ...]]) -> MetadataValue:
    names = [name for name, _ in columns]
    records = [TableRecord(dict(zip(names, row, strict=True))) for row in rows]
    return MetadataValue.table(records, TableSchema([TableColumn(name, kind) for name, kind in columns]))


def descendants_memory(pid: int) -> list[int]:
    """Resident memory in bytes of each process below this one; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4_096
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The command's name may hold blanks and brackets: what follows it begins behind the last bracket.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        one = int(folder.name)
        children.setdefault(int(fields[1]), []).append(one)
        resident[one] = int(fields[21]) * page
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += [resident[child] for child in level]
    return found


@dataclass(slots=True)
class Reporter:
    """Stores results in the catalog in batches, and pays the ledger's catalog duties once they are stored.

    A partition of several tiles is reported when all of this run's are there, so that its newest entry speaks for them.
    """

    context: AssetExecutionContext
    stack: Stack
    left: Counter[str]
    """Partitions, and how many of this run's tiles of each are still to come."""
    pending: list[TileResult] = field(default_factory=list)
    reported_at: float = field(default_factory=time.monotonic)

    def add(self, result: TileResult) -> bool:
        """Take one result; whether it is time to report."""
        self.left[self.stack.settings.partitions.partition_of(result.key)] -= 1
        if result.outcome != "failed":
            self.pending.append(result)
        return len(self.pending) >= REPORT_TILES or time.monotonic() - self.reported_at > REPORT_S

    def report(self, *, last: bool = False) -> None:
        """Store what is pending: one materialization a partition. Those that are not complete wait for the last one."""
        zooms = self.stack.settings.partitions
        ready = [one for one in self.pending if last or self.left[zooms.partition_of(one.key)] <= 0]
        if ready:
            step_key = self.context.get_step_execution_context().step.key
            run = InRun(self.context.run.run_id, self.context.run.job_name, step_key)
            entries = catalog.by_partition(self._entries(ready), zooms, tiles_url=self.stack.settings.tiles_url)
            catalog.report_materializations(self.context.instance, entries, run=run)
            owed = [row for result in ready for row in result.catalog_owed]
            if owed:
                self.stack.ledger.pay(owed)
            self.pending = [one for one in self.pending if not last and self.left[zooms.partition_of(one.key)] > 0]
        self.reported_at = time.monotonic()

    def _entries(self, ready: Sequence[TileResult]) -> Iterator[AssetMaterialization]:
        settings = self.stack.settings
        for result in ready:
            details: dict[str, Any] = {"ms": round(result.ms, 2)}
            if result.outcome != "skipped":
                details |= {"features": result.features, "vertices": result.vertices}
            if result.left_out:
                details["features_left_out"] = len(result.left_out)
                details["left_out"] = "; ".join(" ".join(one) for one in result.left_out[:5])
            yield catalog.tile_materialization(
                result.key,
                outcome=result.outcome,
                revision=result.revision,
                content_hash=result.content_hash,
                work_key=result.work_key,
                size=result.bytes,
                data_time_ms=result.data_time_ms,
                tiles_url=settings.tiles_url,
                image_digest=settings.image_digest,
                details=details,
            )


@asset(
    name="tiles",
    partitions_def=tile_partitions,
    backfill_policy=BackfillPolicy.single_run(),
    output_required=False,
    # How many runs read the feature store at a time; a person may lower it in the UI while it suffers.
    pool="feature_store",
    deps=[FEATURES],
    group_name="map",
    kinds={"mvt", "python"},
    owners=["team:map"],
    tags={"domain": "vector"},
    description=(
        "Vector tiles (MVT 2.1), partitions named `zoom:quadkey`: every tile is one, or, with "
        "GEO_ASSETS_PARTITION_ZOOMS, holds the tiles below it down to the next such zoom. A tile is built when its "
        "features or the recipe changed, checked, put under an immutable name, and made visible by one conditional "
        "update of the ledger. Select partitions and materialize them to build a region again: what did not change is "
        "skipped."
    ),
    metadata={"partition_key": "zoom:quadkey, such as 14:12020013321101", "format": "MVT 2.1, gzip"},
)
def tiles(context: AssetExecutionContext, config: TilesConfig, stack: StackResource) -> Iterator[AssetObservation]:
    """Build this run's tiles, each committed by itself, and report one materialization for each."""
    with stack.opened(scoped=True) as ports:
        if config.batch is not None:
            tally, seconds = _build_batch(context, ports, config.batch, config.force)
        else:
            tally, seconds = _build_partitions(context, ports, config.force)
        settings = ports.settings
    metadata = tally.metadata(seconds, settings.tiles_url)
    context.log.info(tally.summary())
    context.log_event(AssetObservation(TILES, description=tally.summary(), metadata=metadata))
    context.instance.add_run_tags(
        context.run.run_id, {f"geo_assets/{name}": str(count) for name, count in sorted(tally.outcomes.items())}
    )
    _judge(context, tally, settings, metadata)
    # A generator that yields nothing: the step itself materializes nothing, the catalog writer does.
    yield from ()


def _build_batch(context: AssetExecutionContext, ports: Stack, batch_id: str, force: bool) -> tuple[Tally, float]:
    ledger = ports.ledger
    try:
        batch = ledger.start_batch(batch_id, context.run.run_id, ports.settings.lease_s)
    except UnknownBatch:
        raise Failure(
            f"There is no batch {batch_id} any more: batches that ended are forgotten after a while. To build its "
            "tiles again, select their partitions and materialize them.",
            allow_retries=False,
        ) from None
    context.log.info(f"batch {batch.id}, try {batch.attempt}: {len(batch.keys):,} tiles, {batch.kind}")
    try:
        outcome = _build(context, ports, batch.id, batch.keys, force)
    except Exception as fault:
        # An outage is no tile's fault: the batch is given back. Any other error leaves it open, and the sensor asks
        # for it again in halves, so that a tile that makes the run fail ends up alone.
        if isinstance(fault, OUTAGES):
            ledger.end_batch(batch.id)
        raise
    except BaseException:
        ledger.end_batch(batch.id)  # Somebody terminated the run.
        raise
    ledger.end_batch(batch.id)
    return outcome


def tiles_of(ports: Stack, partitions: Sequence[str]) -> list[str]:
    """The tiles that these partitions hold, in quadkey order: those that anybody ever wanted.

    Raises:
        Failure: One of them is no partition under the partition zooms.
    """
    zooms = ports.settings.partitions
    if zooms.every:
        return list(partitions)
    keys: set[str] = set()
    for partition in partitions:
        try:
            held, quadkey = zooms.span(partition)
        except UnknownPartition as fault:
            raise Failure(str(fault), allow_retries=False) from None
        keys.update(state.key for state in ports.ledger.scan(zooms=list(held), prefix=quadkey, published=False))
    return sorted(keys, key=lambda key: (key.partition(":")[2], key))


def _build_partitions(context: AssetExecutionContext, ports: Stack, force: bool) -> tuple[Tally, float]:
    if not context.has_partition_key and not context.has_partition_key_range:
        raise Failure(
            "This run names neither a batch nor partitions: select partitions of `tiles`, or let the sensor "
            "`tile_updates` ask for what is dirty.",
            allow_retries=False,
        )
    owner = f"run:{context.run.run_id}"
    keys = tiles_of(ports, context.partition_keys)
    try:
        return _build(context, ports, owner, keys, force)
    finally:
        ports.ledger.free(owner)


def _build(
    context: AssetExecutionContext, ports: Stack, owner: str, keys: Sequence[str], force: bool
) -> tuple[Tally, float]:
    tally = Tally(len(keys))
    zooms = ports.settings.partitions
    reporter = Reporter(context, ports, Counter(map(zooms.partition_of, keys)))
    started = logged = time.monotonic()
    tracing_here = tracing.start(ports.settings, "run")
    traces = traces_of_run(ports, keys)
    with TileBuilder(ports, owner, traces=traces) as builder:
        try:
            for result in builder.build(keys, force=force):
                tally.add(result)
                if traces is not None:
                    traces.ended(result.key, result.outcome)
                if reporter.add(result):
                    _sample_memory(tally)
                    reporter.report()
                    ports.ledger.renew(owner, ports.settings.lease_s)
                    if time.monotonic() - logged > 2 * REPORT_S:
                        logged = time.monotonic()
                        context.log.info(tally.summary())
            _sample_memory(tally)
        finally:
            # Committed is committed, whatever stopped the loop: what stands is reported.
            reporter.report(last=True)
            if tracing_here:
                tracing.stop()
            if tally.done >= COUNTED_FROM:
                catalog.count_partitions(context.instance)
    seconds = time.monotonic() - started
    throughput.remember_speed(ports.ledger, builder.encoded, tally.vertices, seconds)
    throughput.remember_memory(ports.ledger, tally.memory)
    if context.run.tags.get("geo_assets/kind", "backfill") != "live" and not builder.forced:
        recipe = current_recipe(ports.layers, engines.version(ports))
        throughput.remember_skips(ports.ledger, throughput.Skips(tally.outcomes["skipped"], tally.done, recipe))
    return tally, seconds


def _sample_memory(tally: Tally) -> None:
    for size in descendants_memory(os.getpid()):
        tally.memory[max(size // 1_000_000, 1).bit_length()] += 1


def _judge(context: AssetExecutionContext, tally: Tally, settings: Settings, metadata: dict[str, Any]) -> None:
    """Failed tiles are dirty still, or dead letters: a live run succeeds with them. A backfill keeps its floor."""
    for key, error in tally.failed[:SHOWN]:
        context.log.warning(f"tile {key} failed: {error}")
    kind = context.run.tags.get("geo_assets/kind", "backfill")
    if kind != "live" and tally.coverage < settings.coverage_floor:
        raise Failure(
            f"coverage {tally.coverage:.4f} is below the floor of {settings.coverage_floor}: "
            f"{tally.outcomes['failed']:,} of {tally.targets:,} tiles failed. Those that were built are published; see "
            "failed_tiles.",
            metadata=metadata,
            allow_retries=False,
        )
