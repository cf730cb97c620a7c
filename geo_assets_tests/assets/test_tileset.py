from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, MetadataValue, TableMetadataValue
from pmtiles.reader import MemorySource, all_tiles

from geo_assets.catalog import TILESET
from geo_assets.services.build import TileBuilder
from geo_assets.services.tileset import registry
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world

HERE = Tile(14, 9327, 4741)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        made.put_square("house", HERE)
        keys = [HERE.ancestor(zoom).key for zoom in range(15)]
        made.ledger.mark(keys)
        with TileBuilder(made.stack, "tests", inline=True) as builder:
            list(builder.build(keys))
        yield made


def run(here: World, **config: Any) -> Any:
    from geo_assets.definitions import defs

    job = defs.resolve_job_def("publish_tileset")
    run_config = {"ops": {"tileset": {"config": config}}} if config else {}
    return job.execute_in_process(run_config=run_config, instance=here.instance, raise_on_error=False)


def latest(instance: DagsterInstance) -> dict[str, MetadataValue]:
    event = instance.get_latest_materialization_event(TILESET)
    assert event is not None
    assert event.asset_materialization is not None
    return dict(event.asset_materialization.metadata)


def test_with_no_configuration_the_whole_map_is_published(here: World) -> None:
    result = run(here)
    assert result.success
    tileset = registry.read(here.ledger, "map")
    version = tileset.in_force
    assert version is not None
    data = here.stack.tiles.get(version.files["pmtiles"].object) or b""
    found = {f"{z}/{x}/{y}": hashlib.sha256(gzip.decompress(tile)).hexdigest()
             for (z, x, y), tile in all_tiles(MemorySource(data))}  # fmt: skip
    assert found == {Tile.from_key(state.key).path: state.content_hash for state in here.ledger.scan()}
    metadata = latest(here.instance)
    assert metadata["version"].value == version.version
    assert metadata["tiles"].value == len(found)
    assert metadata["tiles_expected"].value == 15 == len(found) + metadata["tiles_empty"].value
    assert metadata["archive"].value == f"{here.stack.settings.tiles_url}/tilesets/map/{version.version}.pmtiles"
    assert metadata["recipe"].value
    assert metadata["coverage"].value == 1.0
    assert isinstance(metadata["files"], TableMetadataValue)


def test_rule_7_below_the_floor_the_run_fails_with_a_table_of_what_is_missing(here: World) -> None:
    here.put_square("unbuilt", Tile(14, 9328, 4741))
    result = run(here, bbox="24.945,60.16,24.98,60.18", zooms="14", name="corner")
    assert not result.success
    (failure,) = result.get_step_failure_events()
    data = failure.step_failure_data.user_failure_data
    assert "below the floor of 99.50%" in data.description
    rows = [record.data for record in data.metadata["missing"].records]
    assert rows[0]["tile"] == Tile(14, 9328, 4741).key
    assert rows[0]["map"].startswith(f"{here.stack.settings.tiles_url}/#14/")
    assert here.instance.get_latest_materialization_event(TILESET) is None
    assert registry.names(here.ledger) == []


def test_what_waits_for_its_build_is_named_and_can_be_published_as_it_stands(here: World) -> None:
    here.ledger.mark([HERE.key])
    result = run(here, zooms="10-14", floor=0.5)
    (failure,) = result.get_step_failure_events()
    assert failure.step_failure_data.user_failure_data.metadata["dirty_tiles"].value == 1
    assert run(here, zooms="10-14", floor=0.5, allow_dirty=True, formats=["mbtiles", "folder"]).success
    assert latest(here.instance)["tiles_dirty"].value == 1
    assert set(registry.read(here.ledger, "map").versions[0].files) == {"pmtiles", "mbtiles", "folder"}


def test_a_region_that_cannot_be_is_one_line(here: World) -> None:
    (failure,) = run(here, bbox="1,2,3").get_step_failure_events()
    assert "is not west,south,east,north" in failure.step_failure_data.user_failure_data.description
