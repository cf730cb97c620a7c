"""What the catalog writer stores is read back through Dagster's public API, as the UI reads it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import (
    AssetMaterialization,
    AssetObservation,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DynamicPartitionsDefinition,
    TextMetadataValue,
    asset,
    materialize,
)
from dagster._check import CheckError
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value

from geo_assets import catalog
from geo_assets.catalog_storage import BatchingSqliteEventLogStorage, NotWritableInBatchError, serialized
from geo_assets.tiles.tile import Tile
from resources.ledger.protocol import Owed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterInstance]:
    """An instance as `geo-assets up` makes it: the repository's dagster.yaml in a folder of its own."""
    monkeypatch.setenv("GEO_ASSETS_DAGSTER_STORAGE", str(tmp_path / "storage"))
    monkeypatch.delenv("DAGSTER_EVENT_BATCH_SIZE", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(ROOT / "dagster.yaml", home)
    with DagsterInstance.from_config(str(home)) as instance:
        yield instance


def keys(count: int) -> list[str]:
    return [Tile(14, 9_300 + index % 100, 4_700 + index // 100).key for index in range(count)]


def entries(names: list[str], outcome: str = "built") -> Iterator[AssetMaterialization]:
    for key in names:
        yield catalog.tile_materialization(
            key,
            outcome=outcome,
            revision=3,
            content_hash="ab" * 32,
            work_key="0123456789abcdef",
            size=1_234,
            data_time_ms=1_700_000_000_000,
            tiles_url="http://localhost:8788",
            image_digest="local",
            details={"ms": 1.5},
        )


def events_of(instance: DagsterInstance, run_id: str) -> int:
    return len(instance.all_logs(run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION))


def test_the_repositorys_dagster_yaml_gives_the_batching_storage(instance: DagsterInstance) -> None:
    assert isinstance(instance.event_log_storage, BatchingSqliteEventLogStorage)
    assert not instance.run_retries_enabled
    assert not instance.telemetry_enabled
    assert instance.event_log_storage.get_all_run_ids() == []


def test_ten_thousand_materializations_read_back_through_the_public_api(instance: DagsterInstance) -> None:
    names = keys(10_000)
    instance.add_dynamic_partitions(catalog.PARTITIONS, names)

    assert catalog.report_materializations(instance, entries(names)) == 10_000

    assert instance.get_materialized_partitions(catalog.TILES) == set(names)
    found = instance.fetch_materializations(AssetRecordsFilter(catalog.TILES, asset_partitions=[names[4_321]]), limit=2)
    assert len(found.records) == 1
    entry = found.records[0].asset_materialization
    assert entry is not None
    assert entry.partition == names[4_321]
    assert entry.metadata["outcome"].value == "built"
    assert entry.metadata["map"].value == catalog.map_url("http://localhost:8788", Tile.from_key(names[4_321]))
    latest = instance.get_latest_materialization_event(catalog.TILES)
    assert latest is not None
    assert latest.asset_materialization is not None
    assert latest.asset_materialization.partition == names[-1]
    records = instance.get_asset_records([catalog.TILES])
    assert records[0].asset_entry.last_materialization_record is not None
    assert records[0].asset_entry.last_materialization_storage_id == 10_000


def test_the_status_cache_of_the_ui_sees_the_partitions_of_every_batch(instance: DagsterInstance) -> None:
    names = keys(2_500)
    definition = DynamicPartitionsDefinition(name=catalog.PARTITIONS)
    instance.add_dynamic_partitions(catalog.PARTITIONS, names)
    for part in (names[:1_200], names[1_200:2_400]):
        catalog.report_materializations(instance, entries(part))
        cached = get_and_update_asset_status_cache_value(instance, catalog.TILES, definition)
    assert cached is not None
    subset = cached.deserialize_materialized_partition_subsets(definition)
    assert set(subset.get_partition_keys()) == set(names[:2_400])


def test_events_stored_within_a_run_stand_in_its_log_and_in_the_catalog(instance: DagsterInstance) -> None:
    names = keys(50)
    definition = DynamicPartitionsDefinition(name=catalog.PARTITIONS)
    instance.add_dynamic_partitions(catalog.PARTITIONS, names)

    @asset(name="tiles", partitions_def=definition, output_required=False)
    def tiles(context):
        run = catalog.InRun(context.run.run_id, context.job_name, "tiles")
        catalog.report_materializations(context.instance, entries(names), run=run)
        yield from ()  # A function that returns None would materialize the asset once more, without a partition.

    result = materialize([tiles], instance=instance)

    assert events_of(instance, result.run_id) == 50
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)
    record = instance.get_latest_materialization_event(catalog.TILES)
    assert record is not None
    assert record.run_id == result.run_id


def test_observations_and_materializations_may_share_a_batch(instance: DagsterInstance) -> None:
    names = keys(3)
    catalog.report_materializations(
        instance, [*entries(names), AssetObservation(catalog.FEATURES, metadata={"watermark_ms": 5})]
    )
    observed = instance.fetch_observations(catalog.FEATURES, limit=5).records
    assert len(observed) == 1
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)


def test_events_written_after_a_pattern_are_dagsters_own_to_the_character() -> None:
    from dagster._core.events.log import EventLogEntry
    from dagster._serdes import serialize_value

    run = catalog.InRun("1", "build_tiles", "tiles")
    mixed = [
        *entries(keys(2)),
        AssetMaterialization("tiles", metadata={"a": 1.5, "b": {"json": [1]}}),
        AssetMaterialization("tiles", partition='ä "quoted"', metadata={"x": 'é\n"', "y": 10**12, "z": 1e-300}),
        AssetMaterialization("tiles", partition="0:", tags={"k": "v"}),
        AssetObservation("features", metadata={"n": 1}),
        *entries(keys(1), outcome="skipped"),
    ]
    logged = [
        EventLogEntry(
            error_info=None, level=20, user_message="", run_id="1", timestamp=1.25 + index, step_key="tiles",
            job_name="build_tiles", dagster_event=catalog._dagster_event(event, run),
        )
        for index, event in enumerate(mixed)
    ]  # fmt: skip
    assert serialized(logged) == [serialize_value(entry) for entry in logged]


def test_another_way_of_writing_in_dagster_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._core.events.log import EventLogEntry
    from dagster._serdes import serialize_value

    from geo_assets import catalog_storage

    logged = [
        EventLogEntry(
            error_info=None, level=20, user_message="", run_id="1", timestamp=1.0, job_name="j",
            dagster_event=catalog._dagster_event(event, None),
        )
        for event in entries(keys(3))
    ]  # fmt: skip
    monkeypatch.setitem(catalog_storage._PLAIN_METADATA, TextMetadataValue, ("AnotherName", "text"))
    assert serialized(logged) == [serialize_value(entry) for entry in logged]


def test_an_event_that_cannot_be_made_leaves_its_neighbours_unsent(instance: DagsterInstance) -> None:
    with pytest.raises(CheckError):
        catalog.report_materializations(instance, [*entries(keys(2)), None])  # type: ignore[list-item]
    assert instance.get_materialized_partitions(catalog.TILES) == set()
    catalog.report_materializations(instance, entries(keys(1)))
    assert instance.get_materialized_partitions(catalog.TILES) == set(keys(1))


def test_an_event_that_dagster_never_batches_is_refused(instance: DagsterInstance) -> None:
    @asset
    def other() -> None: ...

    result = materialize([other], instance=instance)
    starts = [record.event_log_entry for record in instance.get_records_for_run(result.run_id).records]
    with pytest.raises(NotWritableInBatchError, match="PIPELINE_START"):
        instance.event_log_storage.store_event_batch([e for e in starts if e.is_dagster_event])


def test_a_batch_whose_process_dies_halfway_is_not_in_the_catalog_and_can_be_stored_again(
    instance: DagsterInstance, tmp_path: Path
) -> None:
    names = keys(2_000)
    script = textwrap.dedent("""
        import os, sys
        from dagster import DagsterInstance
        from geo_assets import catalog
        from geo_assets.catalog_storage import BatchingSqliteEventLogStorage as Storage
        from geo_assets_tests.assets.test_catalog import entries, keys

        store = Storage._store_in_index
        calls = []

        def dies_the_second_time(self, conn, stored):
            store(self, conn, stored)
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), 9)  # inside the transaction, before its commit

        Storage._store_in_index = dies_the_second_time
        with DagsterInstance.from_config(sys.argv[1]) as instance:
            catalog.report_materializations(instance, entries(keys(2_000)))
    """)
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path / "home")], cwd=ROOT, check=False)
    assert died.returncode == -9

    assert instance.get_materialized_partitions(catalog.TILES) == set(names[:1_000])
    catalog.report_materializations(instance, entries(names))
    assert instance.get_materialized_partitions(catalog.TILES) == set(names)


def test_an_outbox_row_of_a_dead_builder_becomes_the_entry_that_it_would_have_reported() -> None:
    row = Owed(
        7, "catalog", "14:12020013321101", 4, "cd" * 32, "fedc", 99, "built", 1, 0, '{"ms": 2.5, "image": "sha256:1"}'
    )
    entry = catalog.owed_materialization(row, tiles_url="http://map", image_digest="local")
    assert entry.partition == "14:12020013321101"
    assert entry.metadata["revision"].value == 4
    assert entry.metadata["ms"].value == 2.5
    assert entry.metadata["image_digest"].value == "sha256:1"
    assert "data_time" not in entry.metadata


def test_the_batch_size_is_set_where_dagster_would_not_batch(instance: DagsterInstance) -> None:
    catalog.report_materializations(instance, entries(keys(1)))
    assert os.environ["DAGSTER_EVENT_BATCH_SIZE"] == "1000"
