"""Ledger and catalog writer under a steady rate of commits while retention runs; the disk is sampled meanwhile.

By hand: python -m geo_assets_tests.endurance embedded 600 400
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dagster import AssetRecordsFilter, DagsterEventType, DagsterInstance
from dagster._core.events import DagsterEvent

from geo_assets import catalog, catalog_retention, catalog_retention_sqlite
from geo_assets.catalog_retention import Keep, enforce
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_storages import instance_on
from geo_assets_tests.dagster_world import _nothing_job
from geo_assets_tests.stacks import changes_of
from geo_assets_tests.waiting import patient
from resources.ledger.protocol import Commit

TILES = 2_000
"""Tiles that are committed again and again: what is current of them is what stays."""

LOGGED = 20
"""Events that each run logs besides."""


@dataclass
class Endured:
    """What was measured."""

    stack: str
    seconds: float
    commits: int = 0
    runs: int = 0
    passes: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    slowest_write_s: float = 0.0
    slowest_pass_s: float = 0.0
    disk: list[int] = field(default_factory=list)
    """Bytes, every half second."""
    faults: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.commits / self.seconds

    def thirds(self) -> list[int]:
        """The most that was on disk in each third of the time, in bytes."""
        size = max(len(self.disk) // 3, 1)
        return [max(self.disk[at * size : (at + 1) * size]) for at in range(3)]

    def told(self) -> str:
        return json.dumps(
            {
                "stack": self.stack,
                "seconds": round(self.seconds, 1),
                "commits": self.commits,
                "commits_per_second": round(self.rate, 1),
                "runs": self.runs,
                "passes": self.passes,
                "slowest_write_s": round(self.slowest_write_s, 2),
                "slowest_pass_s": round(self.slowest_pass_s, 2),
                "disk_mb_of_thirds": [round(size / 1e6, 1) for size in self.thirds()],
                "removed": self.removed,
                "faults": self.faults[:5],
            }
        )


def endure(
    stack_name: str,
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    seconds: float,
    rate: int,
    kept_s: float,
    every_s: float,
) -> Endured:
    """Commit at a rate, report each commit to the catalog, and let another process enforce retention meanwhile.

    At the end it sees that nothing current is gone.

    Args:
        stack_name: `embedded` or `production`.
        folder: For files.
        patch: Undone by the caller.
        seconds: How long.
        rate: Commits a second.
        kept_s: How long anything is kept.
        every_s: Between two passes of retention.
    """
    home = folder / "home"
    home.mkdir()
    with (
        changes_of(stack_name) as changes,
        Stack(Settings(**{"home": home, **changes})) as stack,
        instance_on(stack_name, folder, patch) as instance,
    ):
        result = Endured(stack_name, seconds)
        disk = _disk_of(stack, instance, folder)
        stop = threading.Event()
        sampler = threading.Thread(target=_sample, args=(disk, stop, result))
        spawning = multiprocessing.get_context("spawn")
        ended, said = spawning.Event(), spawning.Queue()
        keeper = spawning.Process(target=_keep_retention, args=(str(folder / "dagster"), kept_s, every_s, ended, said))
        keeper.start()
        assert said.get(timeout=patient(120)) == "ready"
        sampler.start()
        try:
            _commit(stack, instance, rate, kept_s, result)
        finally:
            stop.set()
            ended.set()
            sampler.join()
            result.passes, result.slowest_pass_s, result.removed, result.faults = said.get(timeout=patient(120))
            keeper.join()
        _nothing_current_is_gone(stack, instance)
        return result


def _commit(stack: Stack, instance: DagsterInstance, rate: int, kept_s: float, result: Endured) -> None:
    keys = [Tile(14, 9_300 + index % 50, 4_700 + index // 50).key for index in range(TILES)]
    catalog.register_partitions(instance, keys)
    chance = random.Random(7)
    size = max(rate // 4, 1)
    began = time.monotonic()
    run = None
    run_began = forgot = began
    while time.monotonic() - began < result.seconds:
        if run is None:
            run = instance.create_run_for_job(_nothing_job())
            _say(instance, run.run_id, DagsterEventType.RUN_START)
            for number in range(LOGGED):
                instance.report_engine_event(f"line {number} of what a run logs", run)
            result.runs += 1
            run_began = time.monotonic()
        started = time.monotonic()
        _commit_some(stack, instance, chance.sample(keys, size), run.run_id)
        result.slowest_write_s = max(result.slowest_write_s, time.monotonic() - started)
        result.commits += size
        if time.monotonic() - run_began > kept_s / 6:
            _say(instance, run.run_id, DagsterEventType.RUN_SUCCESS)
            run = None
        if time.monotonic() - forgot > kept_s / 10:
            forgot = time.monotonic()
            stack.ledger.forget_batches(int((time.time() - kept_s) * 1_000))
        time.sleep(max(began + result.commits / rate - time.monotonic(), 0))
    result.seconds = time.monotonic() - began
    if run is not None:
        _say(instance, run.run_id, DagsterEventType.RUN_SUCCESS)


def _say(instance: DagsterInstance, run_id: str, kind: DagsterEventType) -> None:
    instance.report_dagster_event(DagsterEvent(kind.value, job_name="build_tiles"), run_id=run_id)


def _commit_some(stack: Stack, instance: DagsterInstance, keys: list[str], run_id: str) -> None:
    ledger = stack.ledger
    ledger.mark(keys)
    (batch,) = ledger.open_batches([keys], kind="live", ttl_s=60)
    states = ledger.take(batch.keys, batch.id, 60)
    held = ledger.commit(
        [
            Commit(key, state.revision, state.wanted, f"{state.wanted:016x}", f"{state.wanted:064x}", 1_234, 1, "built")
            for key, state in states.items()
        ]
    )
    ledger.pay([row.id for rows in held.values() for row in rows if row.duty == "announce"])
    entries = [
        catalog.tile_materialization(
            key,
            outcome="built",
            revision=rows[0].revision,
            content_hash=rows[0].content_hash,
            work_key=rows[0].work_key,
            size=1_234,
            data_time_ms=1_700_000_000_000,
            tiles_url="http://localhost:8788",
            image_digest="local",
            details={"ms": 1.5, "features": 12, "vertices": 340},
        )
        for key, rows in held.items()
    ]
    catalog.report_materializations(instance, entries, run=catalog.InRun(run_id, "build_tiles", "tiles"))
    ledger.pay([row.id for rows in held.values() for row in rows if row.duty == "catalog"])
    ledger.end_batch(batch.id)


def _keep_retention(home: str, kept_s: float, every_s: float, ended: Any, said: Any) -> None:
    """A process of its own, as the job `maintenance` is."""
    catalog_retention.LEAST_AGE_S = min(kept_s, catalog_retention.LEAST_AGE_S)
    catalog_retention_sqlite.LEAST_QUIET_S = min(kept_s, catalog_retention_sqlite.LEAST_QUIET_S)
    keep = Keep(kept_s, kept_s, kept_s, kept_s)
    passes, slowest, faults = 0, 0.0, []
    removed: Counter[str] = Counter()
    with DagsterInstance.from_config(home) as instance:
        instance.get_runs(limit=1)
        said.put("ready")
        while not ended.wait(every_s):
            began = time.monotonic()
            try:
                removed.update(enforce(instance, keep))
            except Exception as fault:
                faults.append(f"{type(fault).__name__}: {fault}")
            passes += 1
            slowest = max(slowest, time.monotonic() - began)
    said.put((passes, slowest, dict(removed), faults))


def _sample(disk: Callable[[], int], stop: threading.Event, result: Endured) -> None:
    while not stop.wait(0.5):
        result.disk.append(disk())


def _disk_of(stack: Stack, instance: DagsterInstance, folder: Path) -> Callable[[], int]:
    if stack.settings.stack == "embedded":

        def of_files() -> int:
            total = 0
            for path in folder.rglob("*"):
                try:
                    total += path.stat().st_size if path.is_file() else 0
                except FileNotFoundError:
                    continue
            return total

        return of_files
    assert stack.settings.postgres_url is not None
    url = stack.settings.postgres_url.get_secret_value()
    with instance.event_log_storage.index_connection() as connection:
        catalogs = connection.exec_driver_sql("SELECT current_schema()").scalar()

    def of_tables() -> int:
        with psycopg.connect(url) as connection:
            (size,) = connection.execute(
                """SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class AS c
                   JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = ANY(%s) AND c.relkind = 'r'""",
                ([stack.settings.postgres_schema, catalogs],),
            ).fetchone() or (0,)
        return int(size)

    return of_tables


def _nothing_current_is_gone(stack: Stack, instance: DagsterInstance) -> None:
    revisions = {state.key: state.revision for state in stack.ledger.scan()}
    assert instance.get_materialized_partitions(catalog.TILES) == set(revisions)
    newest = instance.event_log_storage.get_latest_storage_id_by_partition(
        catalog.TILES, DagsterEventType.ASSET_MATERIALIZATION
    )
    for key in sorted(revisions)[::97]:
        of = AssetRecordsFilter(catalog.TILES, asset_partitions=[key])
        (record,) = instance.fetch_materializations(of, limit=1).records
        assert record.storage_id == newest[key]
        assert record.asset_materialization is not None
        assert record.asset_materialization.metadata["revision"].value == revisions[key]


if __name__ == "__main__":
    which, long, fast = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        kept = min(60.0, long / 10)
        print(endure(which, Path(place), patched, seconds=long, rate=fast, kept_s=kept, every_s=kept / 6).told())
