"""The asset `tiles`: runs over a batch and over selected partitions, what they report, and what a fault costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterEventType, DynamicPartitionsDefinition

from geo_assets import catalog
from geo_assets.assets.tiles import Tally, descendants_memory
from geo_assets.definitions import defs
from geo_assets.services.build import TileBuilder, TileResult
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, tiles_around, world
from sensors.tile_updates import tick

HOME = Tile(14, 9_327, 4_741)
DEFINITION = DynamicPartitionsDefinition(name=catalog.PARTITIONS)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        yield made


def entry_of(here: World, key: str):
    records = here.instance.fetch_materializations(catalog.TILES, limit=100).records
    return next(r.asset_materialization for r in records if r.partition_key == key)


def select(here: World, tiles: list[Tile], **config: object):
    """A run over a range of partitions, as a backfill in the UI starts it for the asset alone."""
    keys = [tile.key for tile in tiles]
    here.instance.add_dynamic_partitions(catalog.PARTITIONS, keys)
    job = defs.resolve_job_def("build_tiles")
    run_config = {"ops": {"tiles": {"config": config}}} if config else {}
    if len(keys) == 1:
        return job.execute_in_process(
            partition_key=keys[0], instance=here.instance, run_config=run_config, raise_on_error=False
        )
    tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
    return job.execute_in_process(instance=here.instance, run_config=run_config, tags=tags, raise_on_error=False)


def test_every_targeted_partition_gets_one_materialization_that_says_what_happened(here: World) -> None:
    tiles = tiles_around(HOME, 3)
    here.put_square("a", tiles[0])
    here.hint(*(tile.key for tile in tiles))
    (request,) = tick(here.stack, here.instance).requests
    result = here.execute(request)

    assert result.success
    logged = here.instance.all_logs(result.run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION)
    assert sorted(event.get_dagster_event().partition for event in logged) == sorted(tile.key for tile in tiles)
    entry = entry_of(here, tiles[0].key)
    state = here.ledger.read([tiles[0].key])[tiles[0].key]
    shown = {name: value.value for name, value in entry.metadata.items()}
    assert shown["outcome"] == "built"
    assert shown["content_hash"] == state.content_hash
    assert shown["work_key"] == state.work_key
    assert shown["revision"] == 1
    assert shown["bytes"] == state.bytes > 0
    assert shown["features"] == 1
    assert shown["map"] == catalog.map_url(here.stack.settings.tiles_url, tiles[0])
    assert entry_of(here, tiles[2].key).metadata["content_hash"].value == "empty"


def test_a_run_shows_its_counts_skip_rate_and_slowest_tiles(here: World) -> None:
    tiles = tiles_around(HOME, 2)
    here.put_square("a", tiles[0])
    here.hint(*(tile.key for tile in tiles))
    result = here.execute(tick(here.stack, here.instance).requests[0])
    (observed,) = here.instance.fetch_observations(catalog.TILES, limit=5).records
    metadata = observed.asset_observation.metadata
    assert metadata["built"].value == 1
    assert metadata["unchanged"].value == 1
    assert metadata["skip_rate"].value == 0.0
    assert metadata["slowest_tiles"].value.records[0].data["map"].startswith("http")
    run = here.instance.get_run_by_id(result.run_id)
    assert run.tags["geo_assets/built"] == "1"


@pytest.mark.parametrize("counted_from", [2, 3])
def test_after_a_large_run_no_page_has_to_count_its_partitions(
    here: World, monkeypatch: pytest.MonkeyPatch, counted_from: int
) -> None:
    monkeypatch.setattr("geo_assets.assets.tiles.COUNTED_FROM", counted_from)
    built = tiles_around(HOME, 2)
    here.hint(*(tile.key for tile in built))
    here.execute(tick(here.stack, here.instance).requests[0])
    (entry,) = here.instance.get_asset_records([catalog.TILES])
    kept = entry.asset_entry.cached_status
    if counted_from > len(built):
        assert kept is None
    else:
        assert kept is not None
        assert set(kept.deserialize_materialized_partition_subsets(DEFINITION).get_partition_keys()) == {
            tile.key for tile in built
        }


def test_selected_partitions_are_built_without_a_batch_and_their_leases_end_with_the_run(here: World) -> None:
    tiles = tiles_around(HOME, 4)
    for tile in tiles:
        here.put_square(tile.key, tile)
    result = select(here, tiles)
    assert result.success
    assert here.instance.get_materialized_partitions(catalog.TILES) == {tile.key for tile in tiles}
    states = here.ledger.read([tile.key for tile in tiles])
    assert all(state.revision == 1 and state.lease is None for state in states.values())


def test_a_second_backfill_of_the_same_partitions_skips_every_tile_and_reports_it(here: World) -> None:
    tiles = tiles_around(HOME, 4)
    for tile in tiles:
        here.put_square(tile.key, tile)
    select(here, tiles)
    assert select(here, tiles).success
    assert {entry_of(here, tile.key).metadata["outcome"].value for tile in tiles} == {"skipped"}
    observed = here.instance.fetch_observations(catalog.TILES, limit=1).records[0].asset_observation
    assert observed.metadata["skip_rate"].value == 1.0
    assert all(state.revision == 1 for state in here.ledger.read([tile.key for tile in tiles]).values())


def test_force_encodes_again_and_same_bytes_are_told_to_nobody(here: World) -> None:
    here.put_square("a", HOME)
    select(here, [HOME])
    assert select(here, [HOME], force=True).success
    assert entry_of(here, HOME.key).metadata["outcome"].value == "unchanged"
    assert here.ledger.read([HOME.key])[HOME.key].revision == 1


def test_a_run_that_names_neither_batch_nor_partitions_says_what_to_do(here: World) -> None:
    result = defs.resolve_job_def("build_tiles").execute_in_process(instance=here.instance, raise_on_error=False)
    assert not result.success
    failure = result.failure_data_for_node("tiles")
    assert "select partitions" in str(failure.user_failure_data.description)


def test_a_batch_that_is_forgotten_fails_its_run_with_what_to_do(here: World) -> None:
    result = defs.resolve_job_def("build_tiles").execute_in_process(
        instance=here.instance, raise_on_error=False, run_config={"ops": {"tiles": {"config": {"batch": "gone"}}}}
    )
    assert "no batch gone any more" in str(result.failure_data_for_node("tiles").user_failure_data.description)


def failing(monkeypatch: pytest.MonkeyPatch, keys: set[str]) -> None:
    """Let the builds of these tiles fail by a fault of their own."""
    build = TileBuilder.build

    def fails(self: TileBuilder, wanted, *, force: bool = False) -> Iterator[TileResult]:
        from resources.ledger.protocol import Failure

        yield from build(self, [key for key in wanted if key not in keys], force=force)
        bad = [key for key in wanted if key in keys]
        states = self.stack.ledger.take(bad, self.owner, 60)
        self.stack.ledger.fail([Failure(key, states[key].wanted, "size: too large") for key in bad], max_attempts=3)
        for key in bad:
            yield TileResult(key, "failed", 0, None, "", 0, 0.0, 0, 0, 0, error="size: too large")

    monkeypatch.setattr(TileBuilder, "build", fails)


def test_a_live_run_succeeds_with_a_failed_tile_and_its_neighbours_are_built(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = tiles_around(HOME, 3)
    failing(monkeypatch, {tiles[1].key})
    here.put_square("a", tiles[0])
    here.hint(*(tile.key for tile in tiles))
    assert here.execute(tick(here.stack, here.instance).requests[0]).success
    assert here.instance.get_materialized_partitions(catalog.TILES) == {tiles[0].key, tiles[2].key}
    observed = here.instance.fetch_observations(catalog.TILES, limit=1).records[0].asset_observation
    assert observed.metadata["failed_tiles"].value.records[0].data["error"] == "size: too large"
    # The failed one is dirty still and is asked for again, under another run key.
    assert len(tick(here.stack, here.instance).requests) == 1


def test_a_backfill_below_its_coverage_floor_fails_and_keeps_what_it_built(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = tiles_around(HOME, 3)
    failing(monkeypatch, {tiles[1].key})
    for tile in tiles:
        here.put_square(tile.key, tile)
    here.ledger.write_manifest("m", "all", "backfill", [tile.key for tile in tiles])
    here.ledger.mark_manifest("m")
    result = here.execute(tick(here.stack, here.instance).requests[0])
    assert not result.success
    assert "coverage 0.6667" in str(result.failure_data_for_node("tiles").user_failure_data.description)
    assert here.instance.get_materialized_partitions(catalog.TILES) == {tiles[0].key, tiles[2].key}
    # It ended in good order: no halves, no second charge.
    (request,) = tick(here.stack, here.instance).requests
    opened = here.ledger.batch(here.batch_of(request))
    assert (opened.keys, opened.attempt) == ((tiles[1].key,), 1)
    assert here.ledger.read([tiles[1].key])[tiles[1].key].attempts == 1


def test_rule_15_an_outage_gives_the_batch_back_whole_and_charges_no_tile(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resources.feature_store.protocol import FeatureStoreUnavailable

    def away(*_: object, **__: object) -> Iterator[TileResult]:
        raise FeatureStoreUnavailable("locked for 30 s")
        yield

    keys = [tile.key for tile in tiles_around(HOME, 3)]
    here.hint(*keys)
    (request,) = tick(here.stack, here.instance).requests
    with monkeypatch.context() as patched:
        patched.setattr(TileBuilder, "build", away)
        assert not here.execute(request).success
    (again,) = tick(here.stack, here.instance).requests
    assert here.ledger.batch(here.batch_of(again)).keys == here.ledger.batch(here.batch_of(request)).keys
    assert again.run_key != request.run_key
    assert all(state.attempts == 0 for state in here.ledger.read(keys).values())


def test_the_slowest_tiles_are_kept_however_many_there_are() -> None:
    tally = Tally(1_000)
    for index in range(1_000):
        tally.add(TileResult(HOME.key, "built", 1, "h", "k", 10, float((index * 37) % 1_000), 1, 1, 0))
    shown = tally.metadata(2.0, "http://map")
    assert [row.data["ms"] for row in shown["slowest_tiles"].value.records[:3]] == [999.0, 998.0, 997.0] or [
        row.data["ms"] for row in shown["slowest_tiles"].records[:3]
    ] == [999.0, 998.0, 997.0]
    assert shown["tiles_per_second"] == 500.0


def test_memory_is_that_of_the_processes_below_this_one() -> None:
    import os
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert any(size > 1_000_000 for size in descendants_memory(os.getpid()))
        assert descendants_memory(child.pid) == []
    finally:
        child.communicate(b"\n")
