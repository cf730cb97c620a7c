from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import shapely
from structlog.testing import capture_logs

from geo_assets.services.layer_changes import follow_layers
from geo_assets.tiles.cover import cover
from geo_assets.tiles.tile import Tile
from geo_assets_tests.world import World, feature

POINT = {"type": "Point", "coordinates": [24.9441, 60.1690]}


class Crash(BaseException):
    """A process that is gone: nothing may catch it."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def layers(home: Path, pois_from: int, buffer: int = 64) -> None:
    home.mkdir(exist_ok=True)
    (home / "layers.yaml").write_text(
        f"max_zoom: 16\nbuffer: {buffer}\nlayers:\n  - {{name: buildings, min_zoom: 14, min_pixels: 0}}\n"
        f"  - {{name: pois, min_zoom: {pois_from}}}\n"
    )


def poi(number: int) -> dict[str, object]:
    return {**feature(number, 1, layer="pois"), "geometry": POINT}


def zooms(world: World) -> set[int]:
    return {int(key.partition(":")[0]) for key in world.published() if world.properties(key, "pois")}


@pytest.fixture
def old(home: Path) -> Iterator[World]:
    layers(home, pois_from=15)
    world = World(home)
    follow_layers(world.stack)
    world.edit(poi(1))
    world.edit(feature(2, 1))
    world.build_dirty()
    assert zooms(world) == {15, 16}
    yield world
    world.close()


def reopened(old: World, pois_from: int, buffer: int = 64) -> World:
    layers(old.settings.home, pois_from, buffer)
    return World(old.settings.home)


@pytest.mark.parametrize(("pois_from", "expected"), [(12, {12, 13, 14, 15, 16}), (16, {16}), (15, {15, 16})])
def test_a_changed_layer_shows_stored_features_at_its_new_zooms(old: World, pois_from: int, expected: set[int]) -> None:
    world = reopened(old, pois_from)
    follow_layers(world.stack)
    world.build_dirty()
    assert zooms(world) == expected
    assert follow_layers(world.stack) is None
    world.close()


def test_layers_that_did_not_change_mark_nothing(old: World) -> None:
    assert follow_layers(old.stack) is None
    assert old.stack.ledger.dirty(10) == []


def test_a_layer_that_is_gone_leaves_the_tiles(old: World) -> None:
    (old.settings.home / "layers.yaml").write_text("max_zoom: 16\nlayers: [{name: buildings, min_zoom: 14}]\n")
    world = World(old.settings.home)
    follow_layers(world.stack)
    world.build_dirty()
    assert zooms(world) == set()
    assert any(world.properties(key) for key in world.published())
    world.close()


@pytest.mark.parametrize("step", ["set_zooms", "mark_manifest", "set_value"])
def test_killed_on_the_way_it_does_the_rest_when_started_again(
    old: World, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = reopened(old, 12)
    port = world.stack.features if step == "set_zooms" else world.stack.ledger

    def dies(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(port, step, dies)
        with pytest.raises(Crash):
            follow_layers(world.stack)
    follow_layers(world.stack)
    world.build_dirty()
    assert zooms(world) == {12, 13, 14, 15, 16}
    world.close()


def shown_in(world: World, number: int) -> set[str]:
    """Published tiles in which a building shows, of which `number` is a property."""
    return {key for key in world.published() if any(one.get("n") == number for one in world.properties(key))}


@pytest.mark.parametrize("buffer", [80, 256, 2_048])
def test_a_larger_buffer_shows_features_in_neighbours_that_were_never_published(old: World, buffer: int) -> None:
    tile = Tile(14, 9_327, 4_741)
    west, _, east, north = tile.bounds
    side = east - west
    # Off its east and north by 64.7 of 4,096 units.
    near = shapely.box(east - 0.04 * side, north - 0.02 * side, east - 0.0158 * side, north - 0.0158 * side)
    edit = {**feature(7, 1, n=7), "geometry": shapely.geometry.mapping(near)}
    old.edit(edit)
    old.build_dirty()
    before = shown_in(old, 7)
    assert before == set(cover(near, range(14, 17), buffer=64 / 4096).keys())
    world = reopened(old, 15, buffer)
    follow_layers(world.stack)
    world.build_dirty()
    expected = set(cover(near, range(14, 17), buffer=buffer / 4096).keys())
    assert shown_in(world, 7) == expected
    assert expected > before
    world.close()


def test_killed_under_other_layers_it_does_all_of_it_under_those_of_today(
    old: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of the layers that came first are stored by then: they no longer say what is due."""
    world = reopened(old, 12)

    def dies(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(world.stack.ledger, "mark_manifest", dies)
        with pytest.raises(Crash):
            follow_layers(world.stack)
    world.close()
    world = reopened(old, 12, buffer=65)
    follow_layers(world.stack)
    world.build_dirty()
    assert zooms(world) == {12, 13, 14, 15, 16}
    world.close()


def test_a_feature_too_wide_for_every_tile_is_said(old: World) -> None:
    wide = {**feature(9, 1, n=9), "geometry": shapely.geometry.mapping(shapely.box(24, 60, 26, 61))}
    old.edit(wide)
    layers(old.settings.home, 12)
    world = World(old.settings.home, manifest_cap=5_000)
    with capture_logs() as lines:
        follow_layers(world.stack)
    (line,) = [line for line in lines if "too wide" in line["event"]]
    assert (line["log_level"], line["features"]) == ("warning", 1)
    world.close()
