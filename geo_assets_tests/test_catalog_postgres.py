"""The catalog writer on Dagster's Postgres storage: read back through Dagster's public API, as the UI reads it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from dagster import (
    AssetMaterialization,
    AssetObservation,
    AssetRecordsFilter,
    DagsterInstance,
    DynamicPartitionsDefinition,
    asset,
    materialize,
)
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value
from psycopg import sql

from geo_assets import catalog
from geo_assets.catalog_storage import NotWritableInBatchError
from geo_assets.catalog_storage_postgres import BatchingPostgresEventLogStorage
from geo_assets_tests.assets.test_catalog import entries, events_of, keys
from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.waiting import patient

ROOT = Path(__file__).parents[1]


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        with psycopg.connect(room.url, autocommit=True) as db:
            db.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(room.schema)))
        yield room


@pytest.fixture
def home(room: PostgresRoom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dagster's home as production has it: the repository's deploy/dagster.yaml, whose logs are not asked for here."""
    monkeypatch.setenv(
        "GEO_ASSETS_DAGSTER_POSTGRES_URL", f"{room.url}&options={quote(f'-csearch_path={room.schema}', safe='')}"
    )
    monkeypatch.setenv("GEO_ASSETS_DAGSTER_STORAGE", str(tmp_path / "storage"))
    monkeypatch.setenv("GEO_ASSETS_LOGS_BUCKET", "logs")
    monkeypatch.setenv("GEO_ASSETS_LOGS_PREFIX", "compute-logs")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("DAGSTER_EVENT_BATCH_SIZE", "1000")
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(ROOT / "deploy" / "dagster.yaml", folder)
    return folder


@pytest.fixture
def instance(home: Path) -> Iterator[DagsterInstance]:
    with DagsterInstance.from_config(str(home)) as instance:
        yield instance


def test_productions_dagster_yaml_gives_the_batching_storage(instance: DagsterInstance, room: PostgresRoom) -> None:
    assert isinstance(instance.event_log_storage, BatchingPostgresEventLogStorage)
    assert type(instance.run_storage).__name__ == "KeptPostgresRunStorage"
    assert type(instance.schedule_storage).__name__ == "KeptPostgresScheduleStorage"
    assert type(instance.compute_log_manager).__name__ == "S3ComputeLogManager"
    assert type(instance.run_coordinator).__name__ == "QueuedRunCoordinator"
    assert not instance.run_retries_enabled
    assert not instance.telemetry_enabled
    with psycopg.connect(room.url) as db:
        tables = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (room.schema,)).fetchall()
    assert {"event_logs", "runs", "asset_keys", "jobs"} <= {row[0] for row in tables}


def test_ten_thousand_materializations_read_back_through_the_public_api(instance: DagsterInstance) -> None:
    names = keys(10_000)
    instance.add_dynamic_partitions(catalog.PARTITIONS, names)

    began = time.perf_counter()
    assert catalog.report_materializations(instance, entries(names)) == 10_000
    # Measured 1.6 s; one by one they take five minutes.
    assert time.perf_counter() - began < patient(60)

    assert instance.get_materialized_partitions(catalog.TILES) == set(names)
    found = instance.fetch_materializations(AssetRecordsFilter(catalog.TILES, asset_partitions=[names[4_321]]), limit=2)
    assert len(found.records) == 1
    entry = found.records[0].asset_materialization
    assert entry is not None
    assert entry.partition == names[4_321]
    assert entry.metadata["outcome"].value == "built"
    latest = instance.get_latest_materialization_event(catalog.TILES)
    assert latest is not None
    assert latest.asset_materialization is not None
    assert latest.asset_materialization.partition == names[-1]
    records = instance.get_asset_records([catalog.TILES])
    assert records[0].asset_entry.last_materialization_record is not None
    definition = DynamicPartitionsDefinition(name=catalog.PARTITIONS)
    cached = get_and_update_asset_status_cache_value(instance, catalog.TILES, definition)
    assert cached is not None
    assert len(cached.deserialize_materialized_partition_subsets(definition)) == 10_000


def test_ids_follow_the_order_of_the_events(instance: DagsterInstance) -> None:
    names = keys(2_000)
    catalog.report_materializations(instance, entries(names))
    records = instance.fetch_materializations(catalog.TILES, limit=3_000, ascending=True).records
    assert [record.partition_key for record in records] == names
    assert [record.storage_id for record in records] == sorted(record.storage_id for record in records)


def test_events_stored_within_a_run_stand_in_its_log_and_in_the_catalog(instance: DagsterInstance) -> None:
    names = keys(50)
    definition = DynamicPartitionsDefinition(name=catalog.PARTITIONS)
    instance.add_dynamic_partitions(catalog.PARTITIONS, names)

    @asset(name="tiles", partitions_def=definition, output_required=False)
    def tiles(context):
        run = catalog.InRun(context.run.run_id, context.job_name, "tiles")
        catalog.report_materializations(context.instance, entries(names), run=run)
        yield from ()  # A function that returns None would materialize the asset once more, without a partition.

    result = materialize([tiles], instance=instance, raise_on_error=True)

    assert result.success
    assert events_of(instance, result.run_id) == 50
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)


def test_a_batch_of_several_assets_and_kinds_shows_the_newest_of_each(instance: DagsterInstance) -> None:
    names = keys(3)
    mixed = [
        *entries(names),
        AssetObservation(catalog.FEATURES, metadata={"watermark_ms": 5}),
        AssetMaterialization(catalog.FEATURES, tags={"from": "import"}),
    ]
    catalog.report_materializations(instance, mixed)
    assert len(instance.fetch_observations(catalog.FEATURES, limit=5).records) == 1
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)
    latest = instance.get_latest_materialization_event(catalog.FEATURES)
    assert latest is not None
    assert latest.asset_materialization is not None
    assert latest.asset_materialization.tags == {"from": "import"}
    (record,) = instance.get_asset_records([catalog.TILES])
    assert record.asset_entry.last_materialization is not None
    assert record.asset_entry.last_materialization.asset_materialization.partition == names[-1]  # type: ignore[union-attr]


def test_batches_of_many_writers_at_once_are_all_stored(instance: DagsterInstance) -> None:
    names = keys(4_000)
    parts = [names[start : start + 500] for start in range(0, 4_000, 500)]
    threads = [
        threading.Thread(target=catalog.report_materializations, args=(instance, list(entries(part)))) for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)


def test_an_event_that_dagster_never_batches_is_refused(instance: DagsterInstance) -> None:
    @asset
    def other() -> None: ...

    result = materialize([other], instance=instance)
    starts = [record.event_log_entry for record in instance.get_records_for_run(result.run_id).records]
    with pytest.raises(NotWritableInBatchError, match="PIPELINE_START"):
        instance.event_log_storage.store_event_batch([e for e in starts if e.is_dagster_event])


def test_a_batch_whose_process_dies_halfway_is_not_in_the_catalog_and_can_be_stored_again(
    instance: DagsterInstance, home: Path
) -> None:
    names = keys(2_000)
    script = textwrap.dedent("""
        import os, sys
        from dagster import DagsterInstance
        from geo_assets import catalog
        from geo_assets.catalog_storage_postgres import BatchingPostgresEventLogStorage as Storage
        from geo_assets_tests.assets.test_catalog import entries, keys

        store = Storage._store_asset_event
        calls = []

        def dies_the_second_time(self, conn, event, event_id):
            store(self, conn, event, event_id)
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), 9)  # inside the transaction, before its commit

        Storage._store_asset_event = dies_the_second_time
        with DagsterInstance.from_config(sys.argv[1]) as instance:
            catalog.report_materializations(instance, entries(keys(2_000)))
    """)
    died = subprocess.run([sys.executable, "-c", script, str(home)], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL

    assert instance.get_materialized_partitions(catalog.TILES) == set(names[:1_000])
    catalog.report_materializations(instance, entries(names))
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)


def test_a_connection_that_the_server_ended_costs_no_event(instance: DagsterInstance, room: PostgresRoom) -> None:
    catalog.report_materializations(instance, entries(keys(1)))
    with psycopg.connect(room.url.partition("?")[0], autocommit=True) as db:
        for pid in room.backends():
            db.execute("SELECT pg_terminate_backend(%s)", (pid,))
    catalog.report_materializations(instance, entries(keys(5)))
    assert instance.get_materialized_partitions(catalog.TILES) == set(keys(5))


@pytest.mark.parametrize("webserver", [False, True])
def test_a_connection_that_the_server_ended_costs_daemon_and_ui_no_error(
    instance: DagsterInstance, room: PostgresRoom, webserver: bool
) -> None:
    if webserver:
        instance.optimize_for_webserver(statement_timeout=5_000, pool_recycle=600, max_overflow=2)

    def look() -> None:
        assert instance.get_runs(limit=1) == []
        assert instance.all_instigator_state() == []
        assert instance.get_materialized_partitions(catalog.TILES) == set()

    look()
    with psycopg.connect(room.url.partition("?")[0], autocommit=True) as db:
        for pid in room.backends():
            db.execute("SELECT pg_terminate_backend(%s)", (pid,))
    look()


def test_an_instance_keeps_one_connection_and_closes_it_at_its_end(home: Path, room: PostgresRoom) -> None:
    with DagsterInstance.from_config(str(home)) as instance:
        for _ in range(3):
            catalog.report_materializations(instance, entries(keys(2)))
        assert len(room.backends()) == 1
    assert room.backends() == []


def test_a_forked_child_uses_a_connection_of_its_own(instance: DagsterInstance) -> None:
    catalog.report_materializations(instance, entries(keys(1)))

    def child() -> None:
        catalog.report_materializations(instance, entries(keys(2)))
        os._exit(0)

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join(patient(30))
    assert forked.exitcode == 0
    catalog.report_materializations(instance, entries(keys(3)))
    assert instance.get_materialized_partitions(catalog.TILES) == set(keys(3))
