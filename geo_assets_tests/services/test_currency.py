"""How current sources and tilesets are, as currency, status, the command line and Prometheus say it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_assets.services import currency
from geo_assets.services.pipeline_metrics import PipelineMetrics
from geo_assets.services.status import snapshot
from geo_assets.services.tileset import registry
from geo_assets.services.tileset.publishing import Request, publish
from geo_assets.services.tileset.regions import region_of
from geo_assets.stack import Stack
from geo_assets_tests.services.test_pipeline_metrics import figures
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.world import SOURCES, World, feature

HOUR_MS = 3_600_000


@pytest.fixture(params=STACKS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "sources.yaml").write_text(SOURCES + "    expect_every_s: 60\n  quiet: {default_crs: EPSG:4326}\n")
    with changes_of(request.param) as changes:
        world = World(home, **changes)
        yield world
        world.close()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def edit(world: World, number: int, at_ms: int, **more: Any) -> None:
    """An edit that the edge received at a time, milliseconds since the epoch, UTC."""
    outcome = world.edit(feature(number, 1, **more), event_id=f"e{number}", received_ms=str(at_ms))
    assert not outcome.letters


def published(world: World, name: str = "city") -> str:
    world.build_dirty()
    return publish(world.stack, Request(name, region_of(world.stack))).version.version


def test_a_source_is_as_current_as_its_newest_edit_and_silent_since_something_new_came(world: World) -> None:
    assert [(one.name, one.watermark_ms, one.silent_s) for one in currency.sources(world.stack, now_ms())] == [
        ("city", 0, None), ("quiet", 0, None)
    ]  # fmt: skip
    happened = now_ms() - HOUR_MS
    before = now_ms()
    edit(world, 1, happened)
    edit(world, 2, happened - HOUR_MS)
    (city, quiet) = currency.sources(world.stack, now_ms() + 30_000)
    assert (city.watermark_ms, city.expected_s, city.silent) == (happened, 60, False)
    assert city.received_ms >= before
    assert 30 <= (city.silent_s or 0) < 60
    assert (quiet.expected_s, quiet.silent) == (None, False)
    assert currency.sources(world.stack, now_ms() + 120_000)[0].silent


def test_a_tileset_is_behind_by_what_was_applied_since_it_was_read(world: World) -> None:
    assert currency.tilesets(world.stack) == []
    first = now_ms() - 5 * HOUR_MS
    edit(world, 1, first)
    version = published(world)
    (one,) = currency.tilesets(world.stack)
    assert (one.name, one.version, one.watermark_ms, one.behind_s, one.commits) == ("city", version, first, 0, 0)
    assert now_ms() - 60_000 < one.published_ms <= now_ms()

    edit(world, 2, first + HOUR_MS)
    (one,) = currency.tilesets(world.stack)
    assert (one.behind_s, one.commits) == (3_600, 0), "stored, and not built yet"
    built = len(world.build_dirty())
    (one,) = currency.tilesets(world.stack)
    assert (one.behind_s, one.commits) == (3_600, built)
    published(world)
    (one,) = currency.tilesets(world.stack)
    assert (one.behind_s, one.commits) == (0, 0)
    # The version before it is as old as it was.
    registry.roll_back(world.stack.ledger, "city", version)
    (one,) = currency.tilesets(world.stack)
    assert (one.version, one.watermark_ms, one.behind_s, one.commits) == (version, first, 3_600, built)


def test_an_edit_that_comes_late_shows_in_the_tiles_built_since_alone(world: World) -> None:
    edit(world, 1, now_ms() - HOUR_MS)
    published(world)
    edit(world, 2, now_ms() - 9 * HOUR_MS)
    built = len(world.build_dirty())
    (one,) = currency.tilesets(world.stack)
    assert (one.behind_s, one.commits) == (0, built)
    assert built > 0


def test_of_a_version_from_before_watermarks_were_kept_it_is_not_known(world: World) -> None:
    edit(world, 1, now_ms() - HOUR_MS)
    published(world)
    ledger = world.stack.ledger
    before = registry.read(ledger, "city")
    text = ledger.get_value(registry.value_name("city"))
    stored = json.loads(text or "")
    for version in stored["versions"]:
        del version["watermark_ms"], version["commits"]
    assert ledger.set_value(registry.value_name("city"), json.dumps(stored), expect=text)
    assert registry.read(ledger, "city").versions == tuple(
        replace(one, watermark_ms=0, commits=0) for one in before.versions
    )
    (one,) = currency.tilesets(world.stack)
    assert (one.watermark_ms, one.behind_s, one.commits) == (0, None, None)


def test_a_tileset_whose_first_publication_is_under_way_is_none_yet(world: World) -> None:
    registry.claim(world.stack.ledger, "city", "0" * 64, owner="somebody")
    assert currency.tilesets(world.stack) == []


def test_status_and_metrics_say_the_same(world: World) -> None:
    happened = now_ms() - 3 * HOUR_MS
    edit(world, 1, happened - HOUR_MS)
    version = published(world)
    edit(world, 2, happened)
    report = snapshot(world.stack)
    (city, _) = report["sources"]
    assert city["name"] == "city"
    assert city["watermark"] == report["features"]["watermark"]
    assert (city["expected_every_s"], city["silent"]) == (60, False)
    (shown,) = report["tilesets"]
    assert (shown["name"], shown["version"], shown["behind_s"], shown["commits_since"]) == ("city", version, 3_600, 0)
    assert shown["watermark"] < city["watermark"]
    assert shown["published"] > city["watermark"]

    metrics = PipelineMetrics(lambda: Stack(world.settings))
    metrics.count(world.stack)
    found = figures(metrics)
    assert found["tileset_behind_seconds", "city"] == 3_600
    assert 0 <= found["tileset_published_seconds", "city"] < 60
    assert 10_700 < found["watermark_seconds", "city"] < 10_900
    assert 0 <= found["source_silent_seconds", "city"] < 60
    assert found["pipeline_readable", "tilesets"] == 1
