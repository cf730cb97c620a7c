"""The fast lane accelerates and the sensor guarantees: what the one did the other does not do again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import AssetKey

from geo_assets import catalog
from geo_assets.catalog_reporter import by_lane
from geo_assets.services.build import TileBuilder
from geo_assets.services.lane import health
from geo_assets.services.lane.health import Beat
from geo_assets.services.lane.lane import Lane
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world
from sensors.tile_updates import tick

HOME = Tile(14, 9_327, 4_741)
TICK_MS = 5_000


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def lane(here: World) -> Iterator[Lane]:
    made = Lane(here.stack, "lane:1", coalesce_s=0.0)
    made.turn(0.0)
    yield made
    made.close()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def beats(here: World, *said: Beat) -> None:
    for number, one in enumerate(said):
        health.beat(here.ledger, f"lane:{number}", one)


def work(lane: Lane) -> None:
    for _ in range(20):
        lane.turn(0.02)


def test_what_the_lane_built_is_not_dirty_and_no_run_is_asked_for(here: World, lane: Lane) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    work(lane)
    done = tick(here.stack, here.instance)
    assert done.requests == []
    assert not here.ledger.read([HOME.key])[HOME.key].dirty
    assert here.ledger.read([HOME.key])[HOME.key].revision == 1
    # Nor is it built again by whoever asks for it by name.
    with TileBuilder(here.stack, "a run", inline=True) as builder:
        assert [result.outcome for result in builder.build([HOME.key])] == ["skipped"]


def test_a_sensor_that_read_the_hint_first_takes_nothing_from_the_lane(here: World, lane: Lane) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    lane._beat()  # pyright: ignore[reportPrivateUsage]
    assert tick(here.stack, here.instance).requests == []
    work(lane)
    assert here.ledger.read([HOME.key])[HOME.key].revision == 1


def test_young_marks_are_left_to_a_healthy_lane_and_the_reason_says_so(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    beats(here, Beat(now_ms(), now_ms()))
    done = tick(here.stack, here.instance)
    assert (done.requests, done.marked) == ([], 1)
    assert "fast lane" in done.skip_reason(8)


def test_marks_older_than_the_grace_are_taken_from_a_healthy_lane(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    beats(here, Beat(now_ms(), now_ms()))
    assert tick(here.stack, here.instance).requests == []
    monkeypatch.setattr(health, "GRACE_MS", 50)
    time.sleep(0.1)
    beats(here, Beat(now_ms(), now_ms()))
    assert len(tick(here.stack, here.instance).requests) == 1


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(lambda now: Beat(now - health.SILENT_MS, now - health.SILENT_MS), id="silent"),
        pytest.param(lambda now: Beat(now, now - health.STUCK_MS, waiting=3), id="stuck"),
    ],
)
def test_the_sensor_takes_over_from_a_lane_that_is_gone_or_stuck(here: World, said) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    beats(here, Beat(now_ms(), now_ms()))
    assert tick(here.stack, here.instance).requests == []
    beats(here, said(now_ms()))
    assert len(tick(here.stack, here.instance).requests) == 1


def test_without_a_lane_the_first_tick_asks_for_the_run(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    assert len(tick(here.stack, here.instance).requests) == 1


def test_a_killed_worker_s_tiles_are_free_within_two_ticks() -> None:
    from geo_assets.services.lane.lane import LEASE_S

    assert LEASE_S * 1_000 <= TICK_MS
    assert health.SILENT_MS <= TICK_MS
    assert health.STUCK_MS <= TICK_MS


def test_a_backfill_is_no_business_of_the_lane_s_grace(here: World) -> None:
    here.put_square("a", HOME)
    here.ledger.mark([HOME.key], kind="backfill")
    beats(here, Beat(now_ms(), now_ms()))
    assert len(tick(here.stack, here.instance).requests) == 1


def test_the_lane_s_commits_come_to_the_catalog_in_one_batch_without_a_run(here: World, lane: Lane) -> None:
    tiles = [HOME, *HOME.children()]
    here.put_square("a", HOME)
    here.hint(*(tile.key for tile in tiles))
    work(lane)
    runs = here.instance.get_runs_count()

    paid = catalog.pay_owed(here.ledger, here.instance, here.stack.settings, limit=100, min_age_ms=0, only=by_lane)

    assert paid == len(tiles)
    assert here.instance.get_runs_count() == runs
    assert here.ledger.owed("catalog", 10) == []
    shown = here.instance.get_materialized_partitions(AssetKey("tiles"))
    assert shown == {tile.key for tile in tiles}
    assert catalog.pay_owed(here.ledger, here.instance, here.stack.settings, limit=9, min_age_ms=0, only=by_lane) == 0


def test_the_reporter_leaves_a_run_s_commits_to_the_run(here: World) -> None:
    here.put_square("a", HOME)
    here.ledger.mark([HOME.key])
    with TileBuilder(here.stack, "a run", inline=True) as builder:
        list(builder.build([HOME.key]))
    owed = here.ledger.owed("catalog", 10)
    assert len(owed) == 1
    assert by_lane(owed) == []
