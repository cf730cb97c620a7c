from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_assets.services import shadow as shadows
from geo_assets.services.layer_changes import follow_layers
from geo_assets.services.shadow import ShadowError, html_of, shadow, svg_of
from geo_assets.services.tileset.regions import region_of
from geo_assets.tiles.decode import decode
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.world import HERE, LAYERS, World, feature

BUILDINGS = "{name: buildings, min_zoom: 12, min_pixels: 0}"
REGION = "24.943,60.1685,24.966,60.176"


@pytest.fixture(params=STACKS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with changes_of(request.param) as changes:
        yield from filled(tmp_path, **changes)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[World]:
    yield from filled(tmp_path)


def filled(tmp_path: Path, **changes: Any) -> Iterator[World]:
    world = World(tmp_path / "home", **changes)
    for number in range(6):
        at = (HERE[0] + number * 0.004, HERE[1] + number % 3 * 0.003)
        world.edit(feature(number, 1, at=at, name=f"house {number}", floors=number))
    world.edit(feature("café", 1, at=HERE, layer="pois", kind="café", size=0.003))
    world.build_dirty()
    yield world
    world.close()


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A map that no test changes."""
    yield from filled(tmp_path_factory.mktemp("settled"))


def compared(world: World, **more: Any) -> shadows.Report:
    chosen = {name: more.pop(name) for name in ("bbox", "zooms") if name in more}
    return shadow(world.stack, region_of(world.stack, **chosen), **more)


def layers(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = LAYERS
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "other-layers.yaml"
    path.write_text(text)
    return path


def rebuilt(world: World, tmp_path: Path, layers_file: Path) -> dict[str, bytes]:
    """Every tile as the platform itself makes it when it adopts these layers, in a copy of the home."""
    home = tmp_path / "adopted"
    home.mkdir()
    with sqlite3.connect(world.settings.home / "ledger.db") as ledger:
        ledger.execute("VACUUM INTO ?", (str(home / "ledger.db"),))
    with sqlite3.connect(world.settings.home / "features.gpkg") as features:
        features.execute("VACUUM INTO ?", (str(home / "features.gpkg"),))
    shutil.copytree(world.settings.home / "tiles", home / "tiles")
    other = World(home, layers_file=layers_file)
    follow_layers(other.stack)
    # As a backfill of the region does: a larger buffer reaches tiles that had nothing to show before.
    other.stack.ledger.mark(list(region_of(other.stack, bbox=REGION, zooms="9-16").keys or ()))
    other.build_dirty()
    found = {key: other.tile(key) for key in {*other.published(), *world.published()}}
    other.close()
    return found


def test_the_same_recipe_differs_in_no_tile(world: World) -> None:
    before = [(o.name, o.modified_ms) for o in world.stack.tiles.list("tiles/")]
    report = compared(world)
    assert (len(report.differing), report.tiles, report.out_of_date) == (0, len(world.published()), 0)
    assert not report.differs
    assert report.before["recipe"] == report.after["recipe"]
    assert [(o.name, o.modified_ms) for o in world.stack.tiles.list("tiles/")] == before
    kept = {o.name for o in world.stack.tiles.list("shadow/")}
    assert len(kept) == report.tiles + 2
    assert json.loads(world.stack.tiles.get(f"{report.prefix}report.json") or b"")["tiles"] == report.tiles


@pytest.mark.parametrize(
    "change",
    [
        (BUILDINGS, BUILDINGS.replace("}", ", attributes: [name]}")),
        (BUILDINGS, BUILDINGS.replace("12", "14")),
        (BUILDINGS, BUILDINGS.replace("12", "11")),
        (BUILDINGS, BUILDINGS.replace("pixels: 0", "pixels: 9")),
        ("{name: pois, min_zoom: 10}", "{name: pois, min_zoom: 10, min_pixels: 0, max_zoom: 15}"),
        ("  - {name: pois, min_zoom: 10}\n", ""),
        ("layers:", "buffer: 512\nlayers:"),
        ("layers:", "extent: 2048\nbuffer: 32\nlayers:"),
    ],
    ids=["attributes", "later", "earlier", "larger", "zooms", "layer gone", "buffer", "extent"],
)  # fmt: skip
def test_changed_layers_differ_in_exactly_the_tiles_that_the_platform_would_build_anew(
    settled: World, tmp_path: Path, change: tuple[str, str]
) -> None:
    other = layers(tmp_path, change)
    expected = rebuilt(settled, tmp_path, other)
    report = compared(settled, bbox=REGION, zooms="9-16", layers_file=other, worst=3)
    differing = {one.key for one in report.differing}
    assert differing
    inside = set(region_of(settled.stack, bbox=REGION, zooms="9-16").keys or ())
    assert differing == {key for key, data in expected.items() if data != settled.tile(key) and key in inside}
    for one in report.differing:
        name = f"{report.prefix}{one.tile}.mvt.gz"
        stored = settled.stack.tiles.get(name)
        assert (gzip.decompress(stored) if stored else b"") == expected[one.key]
        assert (one.before_bytes, one.after_bytes) == (len(settled.tile(one.key)), len(expected[one.key]))
    assert report.before["recipe"] != report.after["recipe"]
    assert "<svg" in html_of(report)


def test_the_report_names_features_by_layer_and_id(settled: World, tmp_path: Path) -> None:
    other = layers(tmp_path, (BUILDINGS, BUILDINGS.replace("12", "14").replace("}", ", attributes: [name]}")))
    report = compared(settled, layers_file=other)
    by_tile = {one.tile: one for one in report.differing}
    gone = next(one for name, one in by_tile.items() if name.startswith("13/"))
    assert gone.layers["buildings"]["removed"] > 0
    assert {(change["kind"], change["layer"]) for change in gone.changes} == {("removed", "buildings")}
    changed = next(one for name, one in by_tile.items() if name.startswith("16/"))
    assert changed.changes[0] == {
        "layer": "buildings", "id": changed.changes[0]["id"], "kind": "changed", "what": ["floors", "version"],
    }  # fmt: skip
    assert report.features["buildings"]["removed"] == sum(
        len([f for layer in decode(settled.tile(key)) if layer.name == "buildings" for f in layer.features])
        for key in settled.published()
        if key.startswith(("12:", "13:"))
    )
    assert report.plain()["differing"][0]["map"].startswith(settled.settings.tiles_url)
    assert json.dumps(report.plain())


def test_what_is_published_out_of_date_is_not_taken_for_a_difference(local: World) -> None:
    local.edit(feature(0, 2, size=0.0009))
    report = compared(local)
    assert not report.differs
    assert report.out_of_date > 0
    local.mark_hints()
    local.build_dirty()
    assert compared(local).out_of_date == 0


def test_nothing_of_the_map_changes(settled: World, tmp_path: Path) -> None:
    other = layers(tmp_path, ("min_zoom: 12", "min_zoom: 13"))
    before = {key: settled.state(key) for key in settled.published()}
    announced = len(settled.announced())
    compared(settled, layers_file=other)
    assert {key: settled.state(key) for key in settled.published()} == before
    assert len(settled.announced()) == announced
    assert settled.stack.ledger.get_value("recipe-seen") is None


def test_a_sample_is_the_same_each_time_and_spread(settled: World) -> None:
    region = region_of(settled.stack)
    sample = shadows.sample_of(settled.stack, region, 12)
    assert sample == shadows.sample_of(settled.stack, region, 12)
    assert len(set(sample)) == 12
    assert len({key.partition(":")[0] for key in sample}) > 1
    assert compared(settled, sample=12).tiles == 12
    with pytest.raises(ShadowError, match="no tile to compare"):
        compared(settled, zooms="3")


OTHER_LIBRARY = """
import geo_assets.tiles.encode as encode

encode.ENCODER_VERSION = "next"
whole = encode.encode_tiles

def encode_tiles(features, layers, *more):
    import dataclasses
    properties = [text.replace("house 3", "HOUSE 3") for text in features.properties]
    return whole(dataclasses.replace(features, properties=properties), layers, *more)

encode.encode_tiles = encode_tiles
"""


def test_another_interpreters_libraries_make_the_difference(settled: World, tmp_path: Path) -> None:
    folder = tmp_path / "other venv"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OTHER_LIBRARY)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:{Path(__file__).parents[2]}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    report = compared(settled, python=python)
    expected = {key for key in settled.published() if any(p.get("name") == "house 3" for p in settled.properties(key))}
    assert {one.key for one in report.differing} == expected
    assert report.after["libraries"]["encoder"] == "next"
    assert report.after["recipe"] != report.before["recipe"]
    assert {tuple(change["what"]) for one in report.differing for change in one.changes} == {("name",)}


def test_an_interpreter_that_cannot_build_is_one_line(settled: World, tmp_path: Path) -> None:
    with pytest.raises(ShadowError, match="No such file"):
        compared(settled, python=tmp_path / "none/bin/python")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named shapely' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ShadowError, match="the other interpreter ended: no module named shapely"):
        compared(settled, python=broken)
    with pytest.raises(ShadowError, match="neither numpy nor st_asmvt"):
        compared(settled, engine="tippecanoe")


def test_postgis_as_the_other_engine_is_compared_in_this_process(tmp_path: Path) -> None:
    with changes_of("production") as changes:
        for world in filled(tmp_path, **changes):
            report = compared(world, engine="st_asmvt", zooms="14-16")
            assert report.tiles > 0
            assert "engine" in report.after["libraries"]
            assert report.before["recipe"] != report.after["recipe"]
            assert not report.faults


def test_shadows_are_removable_and_old_ones_go_by_themselves(world: World) -> None:
    reports = [compared(world, sample=3) for _ in range(2)]
    assert {one.id for one in shadows.kept(world.stack.tiles)} == {one.id for one in reports}
    assert shadows.remove(world.stack.tiles, reports[0].id) == 5
    assert [one.id for one in shadows.kept(world.stack.tiles)] == [reports[1].id]
    for name in ("", "../tiles", "a/b"):
        with pytest.raises(ShadowError):
            shadows.remove(world.stack.tiles, name)
    assert shadows.remove_old(world.stack.tiles, now_ms=2**50) == 5
    assert shadows.kept(world.stack.tiles) == []
    assert compared(world, sample=3, keep=False).prefix is None
    assert shadows.kept(world.stack.tiles) == []


def test_the_picture_shows_before_after_and_the_difference(settled: World, tmp_path: Path, browser: Any) -> None:
    other = layers(tmp_path, (BUILDINGS, BUILDINGS.replace("12", "14")))
    report = compared(settled, layers_file=other, zooms="13")
    drawn = svg_of(report, limit_bytes=100_000)
    assert drawn is not None
    assert svg_of(report, limit_bytes=100) is None
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    page.set_content(html_of(report))
    assert page.locator("figure svg svg").count() == 3 * min(6, len(report.differing))
    red = page.locator("figure").first.locator("svg svg").nth(2).locator('g[fill="#d2233c"] path')
    assert red.count() == report.differing[0].layers["buildings"]["removed"]
    page.close()


def test_a_report_of_no_difference_says_so(settled: World) -> None:
    report = compared(settled, sample=5)
    assert "No tile differs" in html_of(report)
    assert svg_of(report, limit_bytes=10**6) is None
    assert report.summary().startswith("0 of 5 tiles differ")
