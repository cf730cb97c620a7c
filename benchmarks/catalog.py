"""The catalog writer against Dagster's own way: materializations stored in batches and one by one, on both stacks."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from benchmarks.report import Report, parser
from geo_assets_tests.real_services import found

SQLITE = {
    "runs": ("dagster._core.storage.runs", "SqliteRunStorage"),
    "schedules": ("dagster._core.storage.schedules", "SqliteScheduleStorage"),
    "dagster": ("dagster._core.storage.event_log", "SqliteEventLogStorage"),
    "ours": ("geo_assets.catalog_storage", "BatchingSqliteEventLogStorage"),
}
POSTGRES = {
    "runs": ("dagster_postgres.run_storage", "PostgresRunStorage"),
    "schedules": ("dagster_postgres.schedule_storage", "PostgresScheduleStorage"),
    "dagster": ("dagster_postgres.event_log", "PostgresEventLogStorage"),
    "ours": ("geo_assets.catalog_storage_postgres", "BatchingPostgresEventLogStorage"),
}


@contextmanager
def _instance(storages: dict[str, tuple[str, str]], events: str):
    """An empty instance of Dagster on these storages; `events`: Dagster's own or ours."""
    from dagster import DagsterInstance

    folder = Path(tempfile.mkdtemp(prefix="geo-assets-catalog-"))
    with _place(storages, folder) as config:
        (folder / "dagster.yaml").write_text(
            "".join(
                f"{name}:\n  module: {module}\n  class: {kind}\n  config: {config}\n"
                for name, (module, kind) in (
                    ("run_storage", storages["runs"]),
                    ("event_log_storage", storages[events]),
                    ("schedule_storage", storages["schedules"]),
                )
            )
            + "telemetry: {enabled: false}\n"
        )
        try:
            with DagsterInstance.from_config(str(folder)) as instance:
                yield instance
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _place(storages: dict[str, tuple[str, str]], folder: Path) -> Iterator[str]:
    """Configuration of the storages: a folder, or a schema of Postgres that is dropped at the end."""
    if storages is SQLITE:
        yield json.dumps({"base_dir": str(folder / "storage")})
        return
    import psycopg
    from psycopg import sql

    from geo_assets_tests.postgres_rooms import postgres_room

    with postgres_room() as room:
        with psycopg.connect(room.url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(room.schema)))
        yield json.dumps({"postgres_url": f"{room.url}&options={quote(f'-csearch_path={room.schema}', safe='')}"})


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


def _batched(storages: dict[str, tuple[str, str]], events: str, count: int) -> float:
    """Events a second in batches."""
    from geo_assets.catalog import TILES, InRun, report_materializations

    with _instance(storages, events) as instance:
        run = InRun("11111111-1111-1111-1111-111111111111", "build_tiles", "tiles")
        report_materializations(instance, _entries(1), run=run)  # Making the run's database is not what is measured.
        started = time.perf_counter()
        report_materializations(instance, _entries(count), run=run)
        seconds = time.perf_counter() - started
        assert len(instance.get_materialized_partitions(TILES)) == count
    return count / seconds


def _one_by_one(storages: dict[str, tuple[str, str]], count: int) -> float:
    """Events a second as Dagster stores them."""
    from geo_assets.catalog import TILES, InRun, _dagster_event

    with _instance(storages, "dagster") as instance:
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
    stacks = [("SQLite", SQLITE)]
    if "GEO_ASSETS_POSTGRES_URL" in found():
        stacks.append(("Postgres", POSTGRES))
    else:
        report.note("Postgres not measured: none runs here (scripts/services start postgres)")
    for name, storages in stacks:
        # A slice of the slow way before and after, so that a machine that grew busy in between shows in neither alone.
        before = _one_by_one(storages, few // 2)
        fast = _batched(storages, "ours", many)
        plain = _batched(storages, "dagster", many // 2) if storages is POSTGRES else None
        after = _one_by_one(storages, few // 2)
        slow = 2 / (1 / before + 1 / after)
        report.row(f"one by one, Dagster's {name} storage", slow, "events/s")
        if plain is not None:
            report.row(f"in batches, Dagster's {name} storage", plain, "events/s", "one by one", plain / slow)
        report.row(f"in batches, {name}, {many:,} events", fast, "events/s", "one by one", fast / slow)
    report.note("Targets: 20 times one by one on SQLite; 2,000 events/s and 50 times one by one on Postgres.")
    report.finish(options.json)


if __name__ == "__main__":
    main()
