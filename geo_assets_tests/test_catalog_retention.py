"""Retention of Dagster's storages, on SQLite and Postgres: what is left is read back through Dagster's public API."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from dagster import (
    AssetCheckKey,
    AssetCheckResult,
    AssetKey,
    AssetObservation,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    DynamicPartitionsDefinition,
    EventLogRecord,
    asset,
    asset_check,
    materialize,
)
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.cli import execute_query

from geo_assets import catalog, catalog_retention
from geo_assets.catalog_retention import DAY_S, Event, Keep, enforce, plan_events
from geo_assets.catalog_retention_sqlite import shrink_file
from geo_assets.catalog_storage import INCREMENTAL, BatchingSqliteEventLogStorage
from geo_assets_tests.assets.test_catalog import entries, keys
from geo_assets_tests.dagster_storages import age, instance_on
from geo_assets_tests.dagster_world import _nothing_job
from geo_assets_tests.stacks import STACKS

PARTITIONS = DynamicPartitionsDefinition(name=catalog.PARTITIONS)

CHECK = AssetCheckKey(catalog.TILES, "sound")


@pytest.fixture(params=STACKS)
def instance(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DagsterInstance]:
    with instance_on(request.param, tmp_path, monkeypatch) as instance:
        yield instance


@asset(name="tiles", partitions_def=PARTITIONS)
def tiles() -> None: ...


@asset(name="broken", partitions_def=PARTITIONS)
def broken() -> None:
    raise ValueError("as it should")


@asset_check(asset=tiles)
def sound(tiles: None) -> AssetCheckResult:
    return AssetCheckResult(passed=True, metadata={"n": 1})


def built(instance: DagsterInstance, key: str) -> str:
    result = materialize([tiles], partition_key=key, instance=instance, raise_on_error=False)
    assert result.success
    return result.run_id


def checked(instance: DagsterInstance) -> str:
    from dagster import AssetSelection, Definitions, define_asset_job

    @asset_check(asset=AssetKey("tiles"), name="sound")
    def sound_alone() -> AssetCheckResult:
        return AssetCheckResult(passed=True)

    job = Definitions(
        asset_checks=[sound_alone], jobs=[define_asset_job("audit", AssetSelection.all_asset_checks())]
    ).resolve_job_def("audit")
    return job.execute_in_process(instance=instance).run_id


def newest(instance: DagsterInstance) -> dict[str, int]:
    return dict(
        instance.event_log_storage.get_latest_storage_id_by_partition(
            catalog.TILES, DagsterEventType.ASSET_MATERIALIZATION
        )
    )


def records(instance: DagsterInstance, key: str) -> list[EventLogRecord]:
    of = AssetRecordsFilter(catalog.TILES, asset_partitions=[key])
    return list(instance.fetch_materializations(of, limit=1_000).records)


def history(instance: DagsterInstance, key: str) -> list[int]:
    return [record.storage_id for record in records(instance, key)]


def quiet(instance: DagsterInstance) -> None:
    """The databases of runs were left alone for a while."""
    storage = instance.event_log_storage
    if isinstance(storage, BatchingSqliteEventLogStorage):
        for file in Path(storage.path_for_shard("index")).parent.iterdir():
            os.utime(file, (time.time() - 40 * DAY_S,) * 2)


def no_pause(_: float) -> None: ...


def test_dagsters_schema_is_the_one_that_retention_was_written_for(instance: DagsterInstance) -> None:
    for storage in (instance.event_log_storage, instance.run_storage, instance.schedule_storage):
        current, head = storage.alembic_version()
        assert head == catalog_retention.REVISION, (
            f"{type(storage).__name__}: Dagster's schema moved on to {head}. Look at what changed in the tables that "
            "catalog_retention.py reads and deletes from, then move REVISION."
        )
        assert current == head


def test_what_is_left_is_what_the_catalog_shows(instance: DagsterInstance) -> None:
    names = keys(1_500)
    catalog.register_partitions(instance, names)
    for outcome in ("built", "unchanged", "skipped"):
        catalog.report_materializations(instance, entries(names, outcome))
    catalog.report_materializations(instance, [AssetObservation(catalog.FEATURES, metadata={"n": n}) for n in range(5)])
    before = newest(instance)
    status = get_and_update_asset_status_cache_value(instance, catalog.TILES, PARTITIONS)
    age(instance, 15 * DAY_S)
    catalog.report_materializations(instance, entries(names[:10], "emptied"))
    after_build = newest(instance)

    removed = enforce(instance, Keep(), pause=no_pause)

    # Of ten partitions all three old entries are superseded; what superseded them is young.
    assert removed["superseded materializations"] == 2 * 1_500 + 10
    assert removed["superseded observations and plans"] == 4
    assert newest(instance) == after_build
    assert {key: before[key] for key in names[10:]} == {key: after_build[key] for key in names[10:]}
    assert history(instance, names[3]) == [after_build[names[3]]]
    latest = instance.get_latest_materialization_event(catalog.TILES)
    assert latest is not None
    assert latest.asset_materialization is not None
    assert latest.asset_materialization.metadata["outcome"].value == "emptied"
    record = instance.fetch_materializations(AssetRecordsFilter(catalog.TILES, asset_partitions=[names[99]]), limit=1)
    assert record.records[0].asset_materialization.metadata["outcome"].value == "skipped"
    assert len(instance.fetch_observations(catalog.FEATURES, limit=10).records) == 1
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)
    for stored in (status, None):
        if stored is None:
            instance.event_log_storage.wipe_asset_cached_status(catalog.TILES)
        now = get_and_update_asset_status_cache_value(instance, catalog.TILES, PARTITIONS)
        assert now is not None
        with_store = now.deserialize_materialized_partition_subsets(PARTITIONS)
        assert len(with_store) == 1_500
    assert enforce(instance, Keep(), pause=no_pause) == {}


def test_a_dry_pass_counts_the_same_and_deletes_nothing(instance: DagsterInstance) -> None:
    names = keys(20)
    for outcome in ("built", "unchanged"):
        catalog.report_materializations(instance, entries(names, outcome))
    age(instance, 15 * DAY_S)
    said = enforce(instance, Keep(), dry=True, pause=no_pause)
    assert len(history(instance, names[0])) == 2
    done = enforce(instance, Keep(), pause=no_pause)
    assert said == {name: count for name, count in done.items() if name != "bytes given back"}
    assert said["superseded materializations"] == 20


def test_a_run_goes_and_the_newest_materialization_that_it_made_stays(instance: DagsterInstance) -> None:
    key, other = keys(2)
    catalog.register_partitions(instance, [key, other])
    first = built(instance, key)
    failed = materialize([broken], partition_key=other, instance=instance, raise_on_error=False).run_id
    age(instance, 40 * DAY_S)
    second = built(instance, other)
    alive = instance.create_run_for_job(_nothing_job(), status=DagsterRunStatus.STARTED)
    instance.report_engine_event("working", alive)
    age(instance, 40 * DAY_S)
    catalog.report_materializations(instance, entries([other]))  # So that the second run is no more the asset's last.
    third = built(instance, other)
    quiet(instance)
    enforce(instance, Keep(), pause=no_pause)

    left = {run.run_id for run in instance.get_runs()}
    assert left == {failed, alive.run_id, third}, "by the failed one its partition is shown as failed"
    assert {first, second}.isdisjoint(left)
    assert len(history(instance, key)) == 1
    assert third in {record.run_id for record in records(instance, other)}, "that of the run before is young"
    assert len(records(instance, other)) == 2
    left_of_first = {entry.dagster_event_type for entry in instance.all_logs(first)}
    assert left_of_first <= {
        DagsterEventType.ASSET_MATERIALIZATION,
        DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
    }, "the newest of its partition"
    assert any("working" in (entry.message or "") for entry in instance.all_logs(alive.run_id))
    instance.event_log_storage.wipe_asset_cached_status(AssetKey("broken"))
    status = get_and_update_asset_status_cache_value(instance, AssetKey("broken"), PARTITIONS)
    assert status is not None
    assert list(status.deserialize_failed_partition_subsets(PARTITIONS).get_partition_keys()) == [other]
    assert enforce(instance, Keep(), pause=no_pause) == {}


def test_what_a_run_logged_goes_before_the_run(instance: DagsterInstance) -> None:
    (key,) = keys(1)
    catalog.register_partitions(instance, [key])
    run = built(instance, key)
    age(instance, 10 * DAY_S)
    quiet(instance)
    enforce(instance, Keep(), pause=no_pause)
    assert instance.has_run(run)
    kinds = {entry.dagster_event_type for entry in instance.all_logs(run)}
    assert DagsterEventType.STEP_START not in kinds
    assert len(history(instance, key)) == 1


def test_of_a_check_the_newest_evaluation_stays_and_the_newest_that_came_to_an_end(instance: DagsterInstance) -> None:
    runs = [checked(instance) for _ in range(3)]
    age(instance, 20 * DAY_S)
    quiet(instance)
    removed = enforce(instance, Keep(), pause=no_pause)
    assert removed["check evaluations"] == 2
    storage = instance.event_log_storage
    left = storage.get_asset_check_execution_history(CHECK, limit=10)
    assert [record.run_id for record in left] == [runs[-1]]
    assert left[0].event is not None
    assert left[0].event.dagster_event is not None
    summary = storage.get_asset_check_summary_records([CHECK])[CHECK]
    assert summary.last_completed_check_execution_record is not None
    # The event that the row names is there as well.
    events = instance.event_log_storage
    with events.index_connection() as connection:
        kinds = [
            row[0]
            for row in connection.exec_driver_sql(
                "SELECT dagster_event_type FROM event_logs WHERE dagster_event_type LIKE 'ASSET_CHECK_EVALUATION%%'"
            )
        ]
    assert kinds == ["ASSET_CHECK_EVALUATION"]


def test_old_ticks_go_but_the_newest_of_each_sensor(instance: DagsterInstance) -> None:
    ages = (30, 20, 15, 1)
    for sensor, count in (("a", 4), ("gone", 2)):
        for days in ages[:count]:
            instance.create_tick(
                TickData(
                    instigator_origin_id=sensor,
                    instigator_name=sensor,
                    instigator_type=InstigatorType.SENSOR,
                    status=TickStatus.SUCCESS,
                    timestamp=time.time() - days * DAY_S,
                    selector_id=sensor,
                    run_ids=[],
                )
            )
    assert enforce(instance, Keep(), pause=no_pause)["ticks"] == 4
    assert [len(instance.get_ticks(sensor, sensor)) for sensor in ("a", "gone")] == [1, 1]


def test_writers_go_on_while_a_pass_deletes(instance: DagsterInstance) -> None:
    names = keys(1_000)
    for _ in range(4):
        catalog.report_materializations(instance, entries(names))
    age(instance, 15 * DAY_S)
    waits: list[float] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            began = time.monotonic()
            catalog.report_materializations(instance, entries(names[:50], "unchanged"))
            waits.append(time.monotonic() - began)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        removed = enforce(instance, Keep())
    finally:
        stop.set()
        writer.join()
    assert removed["superseded materializations"] >= 3_000
    # Nobody waits for a whole pass: several wrote while it went on.
    assert len(waits) > 3
    assert set(newest(instance)) == set(names)


@pytest.mark.parametrize("stack", ["embedded"])
def test_files_really_shrink(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with instance_on(stack, tmp_path, monkeypatch) as instance:
        names = keys(1_000)
        for _ in range(3):
            catalog.report_materializations(instance, entries(names))
        age(instance, 15 * DAY_S)
        index = Path(instance.event_log_storage.path_for_shard("index"))
        runless = Path(instance.event_log_storage.path_for_shard(""))
        with closing(sqlite3.connect(index)) as connection:
            assert connection.execute("PRAGMA auto_vacuum").fetchone() == (INCREMENTAL,)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = index.stat().st_size, runless.stat().st_size
        removed = enforce(instance, Keep(), pause=no_pause)
        assert index.stat().st_size < before[0] / 2
        assert runless.stat().st_size < before[1] / 10
        assert removed["bytes given back"] > 4_000_000
        assert len(newest(instance)) == 1_000


def test_a_file_that_cannot_give_pages_back_is_written_anew_once_unless_it_is_large(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (b)")
        connection.executemany("INSERT INTO t VALUES (?)", [(b"x" * 4_000,)] * 500)
        connection.commit()
        connection.execute("DELETE FROM t WHERE rowid > 10")
        connection.commit()
    assert shrink_file(path, rewrite_bytes=1_000) == 0
    assert shrink_file(path) > 1_500_000
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (INCREMENTAL,)
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (10,)


def test_an_event_of_a_kind_that_is_unknown_here_is_left_alone() -> None:
    long_ago = datetime(2020, 1, 1)
    plan = plan_events(
        [
            Event(1, "r", "SOMETHING_NEW", "asset", None, long_ago),
            Event(2, "r", "STEP_START", None, None, long_ago),
            Event(3, "alive", "STEP_START", None, None, long_ago),
            Event(4, "r", "ASSET_MATERIALIZATION", "asset", "p", long_ago),
            Event(5, "r", "ASSET_MATERIALIZATION", "asset", None, long_ago),
            Event(6, "r", "ASSET_MATERIALIZATION", "asset", None, long_ago),
            Event(7, "r", None, None, None, long_ago),
            Event(8, "r", "FRESHNESS_STATE_CHANGE", "asset", None, long_ago),
            Event(9, "r", "ASSET_CHECK_EVALUATION", "asset", None, long_ago),
            Event(10, "r", "PIPELINE_SUCCESS", None, None, long_ago + timedelta(days=2)),
        ],
        alive=frozenset({"alive"}),
        steps_before=long_ago + timedelta(days=1),
        history_before=long_ago + timedelta(days=1),
        runs_before=long_ago + timedelta(days=1),
        newest_without_partition={("asset", "ASSET_MATERIALIZATION"): 6},
        named_by_checks=frozenset({9}),
    )
    assert plan.past == (2, 5, 7)
    assert plan.if_superseded == (4,)


PAGE = """query Page($key: AssetKeyInput!, $partition: [String!]) {
  assetNodeOrError(assetKey: $key) { ... on AssetNode {
    partitionStats { numPartitions numMaterialized numFailed }
    assetPartitionStatuses { ... on DefaultPartitionStatuses { materializedPartitions } }
    latestMaterializationByPartition(partitions: $partition) { runId timestamp runOrError { __typename } }
  } }
  assetOrError(assetKey: $key) { ... on Asset {
    assetMaterializations(limit: 10) { partition metadataEntries { label } }
    assetEventHistory(limit: 10, eventTypeSelectors: [MATERIALIZATION, OBSERVATION]) { results { __typename } }
  } }
}"""
"""What the pages of the UI ask about an asset's partitions, in its own words."""


def test_the_pages_of_the_ui_answer_after_a_pass_and_know_of_runs_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(30)
    with instance_on("embedded", tmp_path, monkeypatch) as instance:
        catalog.register_partitions(instance, names)
        first = instance.create_run_for_job(_nothing_job(), status=DagsterRunStatus.SUCCESS)
        for _ in range(2):
            run = catalog.InRun(first.run_id, "build_tiles", "tiles")
            catalog.report_materializations(instance, entries(names), run=run)
        age(instance, 40 * DAY_S)
        second = instance.create_run_for_job(_nothing_job(), status=DagsterRunStatus.SUCCESS)
        catalog.report_materializations(
            instance, entries(names[:1]), run=catalog.InRun(second.run_id, "build_tiles", "tiles")
        )
        quiet(instance)
        assert enforce(instance, Keep(), pause=no_pause)["runs"] == 1

        origin = InProcessCodeLocationOrigin(
            LoadableTargetOrigin(executable_path=sys.executable, module_name="geo_assets.definitions"), "geo_assets"
        )
        with WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget(origin)) as workspace:
            answer = execute_query(workspace, PAGE, {"key": {"path": ["tiles"]}, "partition": [names[5]]})
    assert "errors" not in answer
    node, entry = answer["data"]["assetNodeOrError"], answer["data"]["assetOrError"]
    assert node["partitionStats"] == {"numPartitions": 30, "numMaterialized": 30, "numFailed": 0}
    assert set(node["assetPartitionStatuses"]["materializedPartitions"]) == set(names)
    (latest,) = node["latestMaterializationByPartition"]
    assert latest["runId"] == first.run_id
    assert latest["runOrError"] == {"__typename": "RunNotFoundError"}
    assert len(entry["assetMaterializations"]) == 10
    assert len(entry["assetEventHistory"]["results"]) == 10
