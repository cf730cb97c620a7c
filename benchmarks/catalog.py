"""The catalog writer against Dagster's own way: materializations stored in batches and one by one, on SQLite."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Report, parser


@contextmanager
def _instance(storage: str):
    from dagster import DagsterInstance

    folder = Path(tempfile.mkdtemp(prefix="geo-assets-catalog-"))
    where = f"  config: {{base_dir: {folder / 'storage'}}}\n"
    (folder / "dagster.yaml").write_text(
        "run_storage:\n  module: dagster._core.storage.runs\n  class: SqliteRunStorage\n" + where
        + f"event_log_storage:\n{storage}" + where
        + "schedule_storage:\n  module: dagster._core.storage.schedules\n  class: SqliteScheduleStorage\n" + where
        + "telemetry: {enabled: false}\n"
    )  # fmt: skip
    try:
        with DagsterInstance.from_config(str(folder)) as instance:
            yield instance
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _entries(count: int) -> Iterator:
    from geo_assets.catalog import tile_materialization
    from geo_assets.tiles.tile import Tile

    for index in range(count):
        yield tile_materialization(
            Tile(14, 9_000 + index % 200, 4_000 + index // 200).key,
            outcome="built",
            revision=1,
            content_hash=f"{index:064x}",
            work_key=f"{index:016x}",
            size=20_000,
            data_time_ms=1_700_000_000_000,
            tiles_url="http://localhost:8788",
            image_digest="local",
            details={"ms": 1.5, "features": 40, "vertices": 400},
        )


def _batched(count: int) -> float:
    from geo_assets.catalog import TILES, InRun, report_materializations

    storage = "  module: geo_assets.catalog_storage\n  class: BatchingSqliteEventLogStorage\n"
    with _instance(storage) as instance:
        run = InRun("11111111-1111-1111-1111-111111111111", "build_tiles", "tiles")
        report_materializations(instance, _entries(1), run=run)  # Making the run's database is not what is measured.
        started = time.perf_counter()
        report_materializations(instance, _entries(count), run=run)
        seconds = time.perf_counter() - started
        assert len(instance.get_materialized_partitions(TILES)) == count
    return count / seconds


def _one_by_one(count: int) -> float:
    from geo_assets.catalog import TILES, InRun, _dagster_event

    storage = "  module: dagster._core.storage.event_log\n  class: SqliteEventLogStorage\n"
    with _instance(storage) as instance:
        run = InRun("22222222-2222-2222-2222-222222222222", "build_tiles", "tiles")
        for entry in _entries(1):
            instance.report_dagster_event(_dagster_event(entry, run), run_id=run.run_id)
        started = time.perf_counter()
        for entry in _entries(count):
            instance.report_dagster_event(_dagster_event(entry, run), run_id=run.run_id)
        seconds = time.perf_counter() - started
        assert len(instance.get_materialized_partitions(TILES)) == count
    return count / seconds


def main() -> None:
    """Measure both in the same run and print how they compare."""
    options = parser(main.__doc__ or "").parse_args()
    report = Report("catalog", options.quick)
    many, few = (4_000, 200) if options.quick else (20_000, 1_000)
    # A slice of the slow way before and after, so that a machine that grew busy in between shows in neither alone.
    before = _one_by_one(few // 2)
    fast = _batched(many)
    after = _one_by_one(few // 2)
    slow = 2 / (1 / before + 1 / after)
    report.row("one by one, Dagster's SQLite storage", slow, "events/s")
    report.row(f"in batches, {many:,} events", fast, "events/s", "one by one", fast / slow)
    report.note("Target: 20 times one by one.")
    report.finish(options.json)


if __name__ == "__main__":
    main()
