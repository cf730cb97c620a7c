"""Alerts through a real Dagster instance, on SQLite and on Postgres, to a real receiver on loopback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets.definitions import defs
from geo_assets.ports import tile_object
from geo_assets.services.build import TileBuilder
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, postgres_instance, tiles_around, world
from geo_assets_tests.webhook import Webhook, webhook
from sensors.check_alerts import Tick, tick

HOME = Tile(14, 9_327, 4_741)
FAR = Tile(14, 4_823, 6_160)

KNOWN = sorted(f"{k.asset_key.to_user_string()}/{k.name}" for k in defs.resolve_asset_graph().asset_check_keys)


@pytest.fixture
def receiver() -> Iterator[Webhook]:
    with webhook() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
def both(
    request: pytest.FixtureRequest, receiver: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A world whose Dagster keeps its events in SQLite, and one in Postgres."""
    with world(tmp_path, monkeypatch, alert_webhook_urls=receiver.url) as made:
        if request.param == "sqlite":
            yield made
            return
        with postgres_instance(tmp_path, monkeypatch) as instance:
            made.instance = instance
            yield made


@pytest.fixture
def here(receiver: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch, alert_webhook_urls=receiver.url) as made:
        yield made


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def ticked(here: World, later_s: float = 0.0) -> Tick:
    return tick(here.stack, here.instance, KNOWN, now_ms() + int(later_s * 1000))


def build(here: World, *tiles: Tile) -> None:
    for tile in tiles:
        here.put_square(tile.key, tile)
    with TileBuilder(here.stack, "test", inline=True) as builder:
        assert [result.outcome for result in builder.build([tile.key for tile in tiles])] == ["built"] * len(tiles)


def lose(here: World, *tiles: Tile) -> None:
    for tile in tiles:
        state = here.ledger.read([tile.key])[tile.key]
        here.stack.tiles.delete([tile_object(state.object_name or "")])


def mend(here: World) -> None:
    keys = [state.key for state in here.ledger.dirty(100)]
    with TileBuilder(here.stack, "mend", inline=True) as builder:
        assert {result.outcome for result in builder.build(keys)} == {"built"}


def audit(here: World) -> None:
    """A run of the job `audit`: every check."""
    assert defs.resolve_job_def("audit").execute_in_process(instance=here.instance).success


def test_a_fault_is_told_once_and_so_is_its_end(both: World, receiver: Webhook) -> None:
    first, second = tiles_around(HOME, 2)
    build(both, first, second)
    assert ticked(both).told == []
    lose(both, first)
    audit(both)

    ticked(both)
    ticked(both)

    (body,) = receiver.bodies
    (alert,) = body["alerts"]
    assert (alert["name"], alert["status"], alert["severity"]) == ("tiles/integrity", "firing", "error")
    assert alert["region"] == first.quadkey
    assert [one["subject"] for one in alert["failing"]] == [first.key]
    assert alert["failing"][0]["map_url"].startswith("http://127.0.0.1:8788/#14/")
    assert alert["url"] == "http://127.0.0.1:3000/assets/tiles?view=checks&checkDetail=integrity"
    mend(both)
    audit(both)
    ticked(both)
    ticked(both)
    assert [(a["name"], a["status"]) for body in receiver.bodies[1:] for a in body["alerts"]] == [
        ("tiles/integrity", "resolved")
    ]
    assert receiver.bodies[1]["alerts"][0]["since"] == alert["since"]


def test_what_cannot_be_delivered_for_three_ticks_is_delivered_once_after(both: World, receiver: Webhook) -> None:
    build(both, HOME)
    lose(both, HOME)
    audit(both)
    receiver.status = 503
    for later_s in (0.0, 6.0, 17.0):
        assert ticked(both, later_s).refused
    receiver.status = 204

    assert ticked(both, 40.0).told
    assert ticked(both, 41.0).told == []

    ids = [body["id"] for body in receiver.bodies]
    assert len(ids) == 4
    assert len(set(ids)) == 1
