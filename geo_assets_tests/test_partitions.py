"""Partition zooms: which tile belongs where, what the catalog then shows, and moving it from some zooms to others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetRecordsFilter, DagsterRunStatus, DynamicPartitionsDefinition
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, event

from geo_assets import catalog
from geo_assets.catalog_partitions import Migrated, RunsInTheWay, migrate
from geo_assets.partitions import CATALOG_VALUE, PartitionZooms, PartitionZoomsError, UnknownPartition
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world
from sensors.tile_updates import tick

HOME = Tile(14, 8_900, 5_700)

DEFINITION = DynamicPartitionsDefinition(name=catalog.PARTITIONS)

some_zooms = st.sets(st.integers(0, 22)).map(lambda zooms: PartitionZooms.parse(",".join(map(str, {0, *zooms}))))
some_keys = st.integers(0, 22).flatmap(
    lambda zoom: st.text("0123", min_size=zoom, max_size=zoom).map(lambda quadkey: f"{zoom}:{quadkey}")
)


@given(some_zooms, some_keys)
def test_a_tile_belongs_to_its_ancestor_at_the_nearest_lower_partition_zoom(zooms: PartitionZooms, key: str) -> None:
    partition = zooms.partition_of(key)
    own, tile = Tile.from_key(partition), Tile.from_key(key)
    assert own.z == max(zoom for zoom in zooms.zooms if zoom <= tile.z)
    assert (own.x, own.y) == (tile.x >> (tile.z - own.z), tile.y >> (tile.z - own.z))
    held, quadkey = zooms.span(partition)
    assert tile.z in held
    assert key.partition(":")[2].startswith(quadkey)
    assert zooms.partition_of(partition) == partition
    assert not held[1:] or all(zoom not in zooms.zooms for zoom in held[1:])


def test_partition_zooms_are_written_in_one_way() -> None:
    assert str(PartitionZooms.parse("14, 6,10")) == "0,6,10,14"
    assert str(PartitionZooms.parse("all")) == str(PartitionZooms.parse(",".join(map(str, range(23))))) == "all"
    assert PartitionZooms.parse("0").partition_of("14:12020013321101") == "0:"
    assert Settings(partition_zooms="14,6").partition_zooms == "0,6,14"
    for wrong in ("", "6,x", "23", "-1"):
        with pytest.raises(PartitionZoomsError):
            PartitionZooms.parse(wrong)
    with pytest.raises(UnknownPartition, match="belongs to 0:"):
        PartitionZooms.parse("0,6").span("3:012")


def test_a_planet_at_some_zooms_stays_under_a_hundred_thousand_partitions_and_no_partition_is_too_wide() -> None:
    zooms = PartitionZooms.parse("0,4,8")
    assert sum(4**zoom for zoom in zooms.zooms) < 100_000


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch, partition_zooms="0,10") as here:
        yield here


def partitions(here: World) -> list[str]:
    return sorted(here.instance.get_dynamic_partitions(catalog.PARTITIONS))


def built(here: World, *tiles: Tile) -> None:
    for number, tile in enumerate(tiles):
        here.put_square(f"b{number}-{tile.key}", tile)
    here.hint(*(tile.key for tile in tiles))
    (request,) = tick(here.stack, here.instance).requests
    assert here.execute(request).success


def entry_of(here: World, partition: str) -> dict[str, Any]:
    of = AssetRecordsFilter(catalog.TILES, asset_partitions=[partition])
    (newest,) = here.instance.fetch_materializations(of, limit=1).records
    assert newest.asset_materialization is not None
    return {name: value.value for name, value in newest.asset_materialization.metadata.items()}


def test_a_run_reports_one_entry_for_all_tiles_of_a_partition(here: World) -> None:
    east = Tile(14, HOME.x + 1, HOME.y)
    built(here, HOME, east)
    parent = f"10:{HOME.key.partition(':')[2][:10]}"
    assert partitions(here) == [parent]
    entry = entry_of(here, parent)
    assert (entry["tiles"], entry["built"], entry["skipped"]) == (2, 2, 0)
    changed = entry["changed"]
    assert {record.data["tile"] for record in changed.records} == {HOME.key, east.key}
    assert here.ledger.owed("catalog") == []
    assert here.ledger.read([HOME.key])[HOME.key].revision == 1, "the ledger knows single tiles"


def test_the_table_of_a_partitions_changed_tiles_is_bounded(here: World) -> None:
    tiles = [Tile(14, HOME.x // 16 * 16 + n % 8, HOME.y // 16 * 16 + n // 8) for n in range(30)]
    built(here, *tiles)
    (partition,) = partitions(here)
    entry = entry_of(here, partition)
    assert entry["built"] == 30
    assert len(entry["changed"].records) == catalog.CHANGED_SHOWN


def test_a_backfill_of_a_partition_in_the_ui_builds_all_its_known_tiles(here: World) -> None:
    from geo_assets.definitions import defs

    east = Tile(14, HOME.x + 1, HOME.y)
    built(here, HOME, east)
    (partition,) = partitions(here)
    result = defs.resolve_job_def("build_tiles").execute_in_process(
        instance=here.instance, partition_key=partition, run_config={"ops": {"tiles": {"config": {"force": True}}}}
    )
    assert result.success
    entry = entry_of(here, partition)
    assert (entry["tiles"], entry["unchanged"]) == (2, 2)


def test_entries_that_a_dead_run_owed_are_reported_by_partition(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from geo_assets.services.build import TileBuilder
    from sensors import tile_updates

    here.put_square("a", HOME)
    here.ledger.mark([HOME.key])
    with TileBuilder(here.stack, "somebody") as builder:
        assert [result.outcome for result in builder.build([HOME.key])] == ["built"]
    monkeypatch.setattr(tile_updates, "CATALOG_AGE_MS", 0)
    assert tick(here.stack, here.instance).reported == 1
    (partition,) = partitions(here)
    assert entry_of(here, partition)["built"] == 1


def test_the_catalog_moves_to_other_zooms_and_back(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    far = Tile(14, HOME.x + 300, HOME.y)
    built(here, HOME, Tile(14, HOME.x + 1, HOME.y), far)
    before = partitions(here)
    assert len(before) == 2
    here.instance.event_log_storage.wipe_asset_cached_status(catalog.TILES)

    with Stack(Settings(partition_zooms="all")) as every:
        assert migrate(every, here.instance) == Migrated(3, 3, 0), "10 is a partition zoom of `all` as well"
        assert migrate(every, here.instance) == Migrated(0, 0, 0)
        assert every.ledger.get_value(CATALOG_VALUE) == "all"
    assert entry_of(here, far.key)["outcome"] == "skipped"

    with Stack(Settings(partition_zooms="0,6")) as coarse:
        done = migrate(coarse, here.instance)
        assert done.retired == 5
        assert {key.partition(":")[0] for key in partitions(here)} == {"6"}
        assert entry_of(here, partitions(here)[0])["tiles"] in (1, 2, 3)
        assert migrate(coarse, here.instance) == Migrated(0, 0, 0)
    status = get_and_update_asset_status_cache_value(here.instance, catalog.TILES, DEFINITION)
    assert status is not None
    shown = status.deserialize_materialized_partition_subsets(DEFINITION)
    assert set(shown.get_partition_keys()) == set(partitions(here))


def test_partitions_under_a_run_stay_until_it_has_ended(here: World) -> None:
    built(here, HOME)
    run = here.run_with({"dagster/partition": partitions(here)[0]}, DagsterRunStatus.STARTED)
    with Stack(Settings(partition_zooms="0,6")) as coarse:
        with pytest.raises(RunsInTheWay, match="1 runs on partitions"):
            migrate(coarse, here.instance, wait_s=0)
        assert len(partitions(here)) == 2, "the new one is there, the old one as well"
        assert coarse.ledger.get_value(CATALOG_VALUE) is None
        here.instance.report_run_canceled(run)
        assert migrate(coarse, here.instance, wait_s=0) == Migrated(0, 0, 1)


def test_a_migration_that_died_after_registering_still_reports(here: World) -> None:
    built(here, HOME)
    six = PartitionZooms.parse("0,6")
    catalog.register_partitions(here.instance, [HOME.key], six)
    with Stack(Settings(partition_zooms="0,6")) as coarse:
        assert migrate(coarse, here.instance) == Migrated(0, 1, 1)


def statements_of_a_tick(here: World, key: str) -> list[str]:
    """What a tick that requests one run asks of Dagster's storages."""
    said: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    here.put_square(key, Tile.from_key(key))
    here.hint(key)
    event.listen(Engine, "before_cursor_execute", note)
    try:
        assert tick(here.stack, here.instance).requests
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    for batch in here.ledger.batches():
        here.ledger.end_batch(batch.id)
    return said


def test_what_a_tick_asks_of_dagster_does_not_grow_with_the_partitions(here: World) -> None:
    few = statements_of_a_tick(here, HOME.key)
    here.instance.add_dynamic_partitions(catalog.PARTITIONS, [Tile(10, n % 100, n // 100).key for n in range(5_000)])
    many = statements_of_a_tick(here, Tile(14, HOME.x + 300, HOME.y).key)
    assert len(many) <= len(few)
    of_partitions = [text for text in many if "FROM dynamic_partitions" in text]
    assert of_partitions
    assert all("dynamic_partitions.partition IN" in text for text in of_partitions), "none reads all of them"
