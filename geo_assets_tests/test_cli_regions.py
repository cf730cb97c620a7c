"""Backfills, tilesets, shadows, dead letters and mending at the command line, with whatever somebody may type."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets_tests.test_cli import Terminal, write
from geo_assets_tests.world import HERE, World, feature

BOX = "24.93,60.16,24.96,60.18"
RING = [[24.94, 60.16], [24.95, 60.17], [24.95, 60.16], [24.94, 60.16]]


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture
def world(terminal: Terminal) -> Iterator[World]:
    """A map with two buildings, built."""
    world = World(terminal.home)
    world.edit(feature(1, 1, name="depot"))
    world.edit(feature(2, 1, at=(HERE[0] + 0.002, HERE[1])))
    world.build_dirty()
    yield world
    world.close()


def marked(world: World) -> list[str]:
    return [one.id for one in world.stack.ledger.manifests()]


# -- regions ---------------------------------------------------------------------------------------------------------
REGIONS = [
    (["--bbox", "1,2,3"], "is not west,south,east,north"),
    (["--bbox", "24.93,60.18,24.96,60.16"], "its south is above its north"),
    (["--bbox", "-1e300,0,1e300,1"], "outside ±180, ±90"),
    (["--bbox", "nan,nan,nan,nan"], "outside ±180, ±90"),
    (["--bbox", "0,86,10,89"], "where the map ends"),
    (["--bbox", "24.96,60.16,24.93,60.18"], "over the date line, 359.97° wide"),
    (["--bbox", "-180,-85,180,85"], "above the cap of 20,000"),
    (["--bbox", "-180,-85,180,85", "--cap", "9" * 30], "above 5,000,000"),
    (["--bbox", BOX, "--zooms", "0-"], "are not of the form"),
    (["--bbox", BOX, "--zooms", "9-3"], "9 is above 3"),
    (["--bbox", BOX, "--zooms", "0-99999999"], "outside 0..22"),
    (["--bbox", BOX, "--zooms", "20"], "above 16, the deepest"),
    (["--h3", "-1"], "is no H3 cell"),
    (["--h3", "f" * 40], "is no H3 cell"),
    (["--feature", "nowhere:1"], "no source nowhere ever wrote here; there are city"),
    (["--feature", "city:99"], "is not in the store"),
    (["--feature", "parcels/name=x"], "no feature is in a layer parcels"),
    (["--bbox", BOX, "--h3", "891126d3623ffff"], "name the region by"),
    (["--region", "/does/not/exist.geojson"], "No such file"),
    (["--region", "EMPTY"], "has no polygon with an area"),
    (["--region", "TEXT"], "not GeoJSON"),
]


@pytest.mark.parametrize("command", ["backfill", "publish", "shadow"])
def test_a_region_that_is_none_is_one_line_whatever_it_is_for(
    terminal: Terminal, world: World, tmp_path: Path, command: str
) -> None:
    files = {
        "EMPTY": write(tmp_path / "empty[red].geojson", {"type": "Polygon", "coordinates": [[]]}),
        "TEXT": write(tmp_path / "text.geojson", "no map"),
    }
    for arguments, said in REGIONS:
        assert said in terminal.refused(command, *(files.get(one, one) for one in arguments))
    assert marked(world) == []
    assert world.stack.ledger.dirty(1) == []


def test_a_cell_at_the_pole_and_a_box_over_the_date_line_are_planned(terminal: Terminal, world: World) -> None:
    polar = terminal("backfill", "--h3", "8001fffffffffff", "--zooms", "0-3", "--dry-run")
    assert polar.code == 0
    wide = terminal("backfill", "--bbox", "170,-10,-170,10", "--zooms", "0-3", "--dry-run")
    assert "170,-10,-170,10 (over the date line, 20° wide)" in wide.out
    assert marked(world) == []


def test_what_looks_like_markup_is_shown_as_it_is(terminal: Terminal, world: World, tmp_path: Path) -> None:
    odd = write(tmp_path / "[bold]x[-red].geojson", {"type": "Polygon", "coordinates": [RING]})
    assert "[bold]x[-red].geojson: 1 tile\n" in terminal("backfill", "--region", odd, "--zooms", "3").out
    assert "[bold]x[-red].geojson" in terminal("backfills", "list").out
    assert "[bold]x[-red].geojson" in terminal("status").out
    assert "[bold]x[-red].geojson" in terminal("shadow", "--region", odd, "--zooms", "12-14").out
    world.build_dirty()
    assert terminal("publish", "--region", odd, "--zooms", "12-14", "--name", "x").code == 0
    assert "[bold]x[-red].geojson" in terminal("tilesets", "show", "x").out
    pinned = terminal("tilesets", "pin", "x", "1", "--reader", "[/red] [bold]atlas")
    assert "stays for [/red] [bold]atlas" in pinned.out
    assert "[/red] [bold]atlas" in terminal("tilesets", "show", "x").out
    collection = {"type": "FeatureCollection", "features": [feature("[/red]a", 1, at=(24.9, 95.0))]}
    refused = write(tmp_path / "[bold]y.geojson", collection)
    answer = terminal("import", refused)
    assert "[bold]y.geojson" in answer.err
    assert '"[/red]a"' in terminal("dead-letters", "list").out


# -- backfills -------------------------------------------------------------------------------------------------------
def test_backfills_that_are_none_and_that_have_ended_are_refused(terminal: Terminal, world: World) -> None:
    for command in ("follow", "cancel"):
        assert "there is no manifest ''" in terminal.refused("backfills", command, "")
        assert "there is no manifest 'nope'" in terminal.refused("backfills", command, "nope")
    assert terminal("backfill", "--bbox", BOX, "--zooms", "12-14").code == 0
    (manifest,) = marked(world)
    cancelled = terminal("backfills", "cancel", manifest)
    assert "tiles are no longer wanted by it" in cancelled.out
    assert "stays stored" not in cancelled.out
    assert "is cancelled already" in terminal.refused("backfills", "cancel", manifest)
    assert terminal("backfills", "list", "--limit", "-1").code == 2


def test_cancelling_an_import_says_that_the_map_lacks_it(terminal: Terminal, world: World, tmp_path: Path) -> None:
    far = [feature(n, 1, at=(25.5 + n / 100, 60.3)) for n in range(3)]
    file = write(tmp_path / "far.geojson", {"type": "FeatureCollection", "features": far})
    assert terminal("import", file).code == 0
    (manifest,) = [one for one in marked(world) if one.startswith("import-")]
    assert "what the import changed stays stored" in terminal("backfills", "cancel", manifest).out


# -- tilesets --------------------------------------------------------------------------------------------------------
TILESETS = [
    (["publish", "--name", "Bad Name!"], "is not 1..63 characters"),
    (["publish", "--format", "geojson"], "is none of pmtiles, mbtiles, folder"),
    (["publish", "--bbox", "0,0,1,1", "--zooms", "8-9"], "there is nothing to publish"),
    (["tilesets", "show", "nope"], "there is no tileset nope; there is city"),
    (["tilesets", "show", "../x"], "is not 1..63 characters"),
    (["tilesets", "prune", "nope", "--keep", "1"], "there is no tileset nope"),
    (["tilesets", "pin", "city", "7", "--reader", "x"], "has no version '7'; there is 1-"),
    (["tilesets", "pin", "city", "1", "--reader", " "], "reader is empty"),
    (["tilesets", "unpin", "city", "x"], "has no pin x"),
    (["rollback", "nope"], "there is no tileset nope"),
    (["rollback", "city"], "has no version before"),
    (["rollback", "city", "--to", ""], "has no version ''"),
    (["rollback", "city", "--to", "-1"], "has no version '-1'"),
    (["rollback", "city", "--to", "1"], "is in force already"),
    (["shadow", "--layers", "/does/not/exist.yaml"], "--layers: /does/not/exist.yaml is no file"),
    (["shadow", "--html", "/does/not/exist/x.html"], "--html: there is no folder /does/not/exist"),
    (["shadow", "--engine", "foo"], "is neither numpy nor st_asmvt"),
    (["shadow", "--python", "/does/not/exist"], "python /does/not/exist: No such file or directory"),
    (["shadow", "--remove", "../tiles"], "is no shadow"),
]


def test_a_tileset_or_shadow_that_cannot_be_is_one_line(terminal: Terminal, world: World) -> None:
    assert terminal("publish", "--name", "city").code == 0
    before = world.stack.ledger.get_value("tileset:city")
    for arguments, said in TILESETS:
        answer = terminal(*arguments)
        assert answer.code == 1, arguments
        # Beside it there may be a progress bar.
        (line,) = [line for line in answer.err.splitlines() if line.startswith("geo-assets: ")]
        assert said in line
    assert world.stack.ledger.get_value("tileset:city") == before


NUMBERS = [
    ["tilesets", "pin", "city", "1", "--reader", "x", "--days", "1e30"],
    ["tilesets", "pin", "city", "1", "--reader", "x", "--days", "-1"],
    ["tilesets", "prune", "city", "--keep", "-1"],
    ["publish", "--floor", "1.01"],
    ["publish", "--cap", "0"],
    ["shadow", "--sample", "-1"],
    ["mend", "--grace", "1e400"],
    ["mend", "--grace", "1e30"],
    ["mend", "--grace", "-1"],
    ["maintenance", "--budget", "nan"],
    ["migrate-partitions", "--wait", "-1"],
    ["dead-letters", "list", "--limit", "0"],
]


def test_a_number_outside_its_range_is_a_usage_error(terminal: Terminal) -> None:
    for arguments in NUMBERS:
        answer = terminal(*arguments)
        assert answer.code == 2, arguments
        assert "Invalid value for '--" in answer.err


def test_prune_keeps_what_is_in_force_however_few_are_to_stay(terminal: Terminal, world: World) -> None:
    for number in range(3):
        world.edit(feature(1, 2 + number))
        world.build_dirty()
        assert terminal("publish", "--name", "city").code == 0
    assert terminal("tilesets", "pin", "city", "2", "--reader", "atlas").code == 0
    assert "0 versions removed" in terminal("tilesets", "prune", "city", "--keep", "9" * 30).out
    assert "1 version removed" in terminal("tilesets", "prune", "city", "--keep", "0").out
    left = json.loads(terminal("tilesets", "show", "city", "--json").out)
    assert [one["version"].partition("-")[0] for one in left["versions"]] == ["2", "3"]
    assert "→ 2-" in terminal("rollback", "city").out


# -- dead letters ----------------------------------------------------------------------------------------------------
def test_dead_letters_are_chosen_by_time_and_say_what_is_wrong_and_what_was_replayed(
    terminal: Terminal, world: World
) -> None:
    far_off = feature(7, 1, at=(24.9, 95.0))
    assert len(world.edit(far_off, event_id="a").letters) == 1
    (line,) = [one for one in terminal("dead-letters", "list").out.splitlines() if "out_of_range" in one]
    assert "geometry: a latitude is outside ±90 (got 95.0002; allowed: ±90)" in line
    assert " 7 " in line
    assert "out_of_range" in terminal("dead-letters", "list", "--since", "1h").out
    assert "no dead letter is one of these" in terminal("dead-letters", "list", "--since", "2999-01-01T00:00Z").out
    assert "no dead letter is one of these" in terminal("dead-letters", "list", "--source", "nobody").out
    for since in ("yesterday", "-5h", "9" * 30 + "d", "2026-05-01"):
        assert "since " in terminal.refused("dead-letters", "list", "--since", since)
        assert "since " in terminal.refused("dead-letters", "replay", "--since", since)
    assert "0 would be replayed" in terminal("dead-letters", "replay", "--source", "nobody", "--dry-run").out
    assert terminal("dead-letters", "replay", "--reason", "out_of_range").code == 0
    assert "no dead letters; --all looks at those that were replayed" in terminal("dead-letters", "list").out
    assert "replayed" in terminal("dead-letters", "list", "--all").out.splitlines()[0]


# -- half done, partitions -------------------------------------------------------------------------------------------
def test_mend_and_migrate_say_what_they_found(
    terminal: Terminal, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing was left behind" in terminal("mend").out
    # Without Dagster here: what else was left is mended, and what was not is said.
    world.stack.ledger.mark(["14:12020013321101"])
    world.stack.ledger.take(["14:12020013321101"], "gone", 0.001)
    time.sleep(0.01)
    told = terminal("mend", "--grace", "0")
    assert told.code == 1
    assert "lease" in told.out.rpartition("mended: ")[2]
    assert "what Dagster's catalog is to be told is left" in told.err
    with monkeypatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(terminal.home))
        assert "has no dagster.yaml" in terminal.refused("maintenance", "--dry-run")
    assert "`geo-assets up` makes it" in terminal.refused("migrate-partitions")
    assert "`geo-assets up` makes it" in terminal.refused("maintenance", "--dry-run")
    for zooms in ("a,b", "99", "-1", "0,0,0,", "9" * 30):
        with monkeypatch.context() as patch:
            patch.setenv("GEO_ASSETS_PARTITION_ZOOMS", zooms)
            assert "GEO_ASSETS_PARTITION_ZOOMS" in terminal.refused("status")
