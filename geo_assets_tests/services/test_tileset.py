from __future__ import annotations

import gzip
import hashlib
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pmtiles.reader import MemorySource, Reader, all_tiles
from pmtiles.tile import Compression, TileType

from geo_assets.ports import tile_object
from geo_assets.services import pins
from geo_assets.services.garbage import collect_objects
from geo_assets.services.housekeeping import enforce_retention
from geo_assets.services.tileset import keeping, registry
from geo_assets.services.tileset.formats import Unverified
from geo_assets.services.tileset.publishing import ObjectsDamaged, Published, Request, publish
from geo_assets.services.tileset.reading import Archive, ArchiveError
from geo_assets.services.tileset.regions import region_of
from geo_assets.services.tileset.registry import ClaimLost, TilesetError, UnknownTileset
from geo_assets.services.tileset.snapshot import BelowFloor, EmptyRegion, TilesDirty
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.tileset import TilesetNameError
from geo_assets_tests.needs import missing
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.world import HERE, World, feature

BBOX = "24.92,60.15,24.99,60.19"


class Killed(BaseException):
    """As a process that is gone: nothing of its own is tidied up."""


@pytest.fixture(params=STACKS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with changes_of(request.param) as changes:
        world = World(tmp_path / "home", **changes)
        yield world
        world.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "home")
    yield world
    world.close()


def fill(world: World, count: int = 6) -> None:
    for number in range(count):
        at = (HERE[0] + number * 0.004, HERE[1] + number % 3 * 0.003)
        world.edit(feature(number, 1, at=at, name=f"house {number}", floors=number, tall=number > 3))
    world.edit(feature("café", 1, at=HERE, layer="pois", kind="café"))
    world.build_dirty()


def published(world: World, name: str = "city", **more: Any) -> Published:
    chosen = {key: more.pop(key) for key in ("bbox", "zooms", "cap") if key in more}
    options = {key: more.pop(key) for key in ("step", "ttl_s", "progress") if key in more}
    return publish(world.stack, Request(name, region_of(world.stack, **chosen), **more), **options)


def served(world: World) -> dict[tuple[int, int, int], str]:
    """Place -> content hash of every published tile, as the ledger says."""
    return {
        (tile.z, tile.x, tile.y): state.content_hash or ""
        for key, state in world.published().items()
        for tile in [Tile.from_key(key)]
    }


def archive_of(world: World, done: Published, kind: str = "pmtiles") -> bytes:
    data = world.stack.tiles.get(done.version.files[kind].object)
    assert data is not None
    return data


def hashes_in(data: bytes) -> dict[tuple[int, int, int], str]:
    return {place: hashlib.sha256(gzip.decompress(tile)).hexdigest() for place, tile in all_tiles(MemorySource(data))}


def objects(world: World, name: str = "city") -> list[str]:
    return [one.name for one in world.stack.tiles.list(f"tilesets/{name}/")]


def killed_at(step: str) -> Callable[[str], None]:
    def look(name: str) -> None:
        if name == step:
            raise Killed

    return look


# -- what is published -----------------------------------------------------------------------------------------------
def test_every_tile_of_an_archive_is_the_ledgers_as_another_reader_reads_it(world: World) -> None:
    fill(world)
    done = published(world)
    data = archive_of(world, done)
    assert hashes_in(data) == served(world)
    reader = Reader(MemorySource(data))
    header = reader.header()
    assert header["clustered"]
    assert header["version"] == 3
    assert (header["tile_type"], header["tile_compression"]) == (TileType.MVT, Compression.GZIP)
    assert header["addressed_tiles_count"] == len(served(world)) == done.version.tiles
    zooms = {z for z, _, _ in served(world)}
    assert (header["min_zoom"], header["max_zoom"]) == (min(zooms), max(zooms)) == done.version.zooms
    place = max(served(world))
    assert hashlib.sha256(gzip.decompress(reader.get(*place) or b"")).hexdigest() == served(world)[place]
    file = done.version.files["pmtiles"]
    assert (file.bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert objects(world) == [f"tilesets/city/{done.version.version}/{name}" for name in
                              ("manifest.json", "tilejson.json", "tiles.pmtiles")]  # fmt: skip
    assert not list((world.settings.home / "publishing").iterdir())
    assert pins.live_pins(world.stack.ledger) == []


def test_a_version_says_where_it_comes_from(local: World) -> None:
    fill(local)
    done = published(local, formats=("pmtiles", "mbtiles"))
    stored = local.stack.tiles.get(f"tilesets/city/{done.version.version}/manifest.json")
    manifest = json.loads(stored or b"")
    metadata = Reader(MemorySource(archive_of(local, done))).metadata()
    assert manifest == done.manifest
    assert {key: manifest[key] for key in metadata["geo_assets"]} == metadata["geo_assets"]
    assert set(manifest["libraries"]) >= {"geos", "proj", "encoder", "numpy", "shapely", "pyproj", "pmtiles", "python"}
    assert manifest["image_digest"] == "local"
    assert len(manifest["recipe"]) == 32
    assert manifest["source_watermark_ms"] == local.stack.features.counts().watermark_ms > 0
    assert manifest["ledger"] == {
        "mark": manifest["ledger"]["mark"],
        "commits": local.stack.ledger.counts().revision_sum,
    }
    assert manifest["ledger"]["mark"] > 0
    assert manifest["tiles"]["total"] == len(served(local)) == sum(manifest["tiles"]["by_zoom"].values())
    assert manifest["coverage"]["share"] == 1.0
    fields = {one["id"]: one["fields"] for one in metadata["vector_layers"]}
    assert fields["buildings"] == {"floors": "Number", "name": "String", "tall": "Boolean", "version": "Number"}
    assert fields["pois"] == {"_id": "String", "kind": "String", "version": "Number"}
    zooms = {one["id"]: (one["minzoom"], one["maxzoom"]) for one in metadata["vector_layers"]}
    assert zooms["buildings"] == (12, 16)
    assert zooms["pois"][1] == 16


def test_tilejson_names_layers_bounds_and_attribution(local: World) -> None:
    fill(local)
    done = published(local, bbox=BBOX, zooms="0-14")
    document = json.loads(local.stack.tiles.get(f"tilesets/city/{done.version.version}/tilejson.json") or b"")
    assert document["tilejson"] == "3.0.0"
    assert document["version"] == "1.0.0"
    west, south, east, north = document["bounds"]
    assert west <= HERE[0] <= east
    assert south <= HERE[1] <= north
    assert east - west < 0.2
    lon, lat, zoom = document["center"]
    assert west < lon < east
    assert south < lat < north
    assert document["minzoom"] <= zoom <= document["maxzoom"]
    assert document["maxzoom"] == 14
    assert [one["id"] for one in document["vector_layers"]] == ["buildings", "pois"]


def test_tiles_with_the_same_bytes_are_one_content(local: World) -> None:
    local.edit(
        {
            "type": "Feature", "id": 5, "version": 1, "layer": "pois", "properties": {},
            "geometry": {"type": "Polygon",
                         "coordinates": [[[-170, -80], [170, -80], [170, 80], [-170, 80], [-170, -80]]]},
        }
    )  # fmt: skip
    # The inner tiles of a polygon as large as the world all show the same square.
    with_zooms = [Tile(10, x, y).key for x in range(500, 520) for y in range(500, 510)]
    local.stack.ledger.mark(with_zooms)
    from geo_assets.services.build import TileBuilder

    with TileBuilder(local.stack, "tests", inline=True) as builder:
        list(builder.build(with_zooms))
    done = published(local, zooms="10", formats=("pmtiles", "mbtiles", "folder"), allow_dirty=True)
    data = archive_of(local, done)
    header = Reader(MemorySource(data)).header()
    assert header["tile_contents_count"] == 1 == done.manifest["tiles"]["contents"]
    assert header["addressed_tiles_count"] == 200 > header["tile_entries_count"]
    assert hashes_in(data) == {place: h for place, h in served(local).items() if place[0] == 10}
    assert len([name for name in objects(local) if name.endswith(".mvt")]) == 200


def test_mbtiles_has_tms_rows_and_the_metadata_of_its_specification(local: World, tmp_path: Path) -> None:
    fill(local)
    done = published(local, formats=("mbtiles",))
    path = tmp_path / "city.mbtiles"
    path.write_bytes(archive_of(local, done, "mbtiles"))
    with sqlite3.connect(path) as db:
        found = {
            (z, x, (1 << z) - 1 - y): hashlib.sha256(gzip.decompress(data)).hexdigest()
            for z, x, y, data in db.execute("SELECT zoom_level, tile_column, tile_row, tile_data FROM tiles")
        }
        metadata = dict(db.execute("SELECT name, value FROM metadata"))
        assert db.execute("PRAGMA application_id").fetchone() == (0x4D504258,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert found == served(local)
    assert metadata["name"] == "city"
    assert metadata["format"] == "pbf"
    assert metadata["version"] == "1"
    assert len(metadata["bounds"].split(",")) == 4
    assert len(metadata["center"].split(",")) == 3
    assert (int(metadata["minzoom"]), int(metadata["maxzoom"])) == done.version.zooms
    assert [one["id"] for one in json.loads(metadata["json"])["vector_layers"]] == ["buildings", "pois"]


def test_gdal_reads_the_mbtiles_and_the_folder(local: World, tmp_path: Path) -> None:
    import shutil

    if shutil.which("ogrinfo") is None:
        missing("no ogrinfo (Debian and Ubuntu have it in the package gdal-bin)")
    fill(local)
    done = published(local, formats=("mbtiles", "folder"))
    path = tmp_path / "city.mbtiles"
    path.write_bytes(archive_of(local, done, "mbtiles"))
    shown = subprocess.run(["ogrinfo", "-json", str(path)], capture_output=True, text=True)
    if shown.returncode:  # GDAL before 3.7 has no -json.
        shown = subprocess.run(["ogrinfo", "-so", "-al", str(path)], capture_output=True, text=True, check=True)
    assert "buildings" in shown.stdout
    assert "pois" in shown.stdout
    folder = local.settings.home / "tiles" / done.version.files["folder"].object
    z, x, y = max(served(local))
    tile = subprocess.run(
        ["ogrinfo", "-so", "-al", f"MVT:{folder / str(z) / str(x) / f'{y}.mvt'}"], capture_output=True, text=True
    )
    assert "Layer name:" in tile.stdout, tile.stderr


def test_a_folder_holds_every_tile_and_a_tilejson(world: World) -> None:
    fill(world, 3)
    done = published(world, formats=("folder",))
    base = done.version.files["folder"].object
    found = {}
    for name in objects(world):
        if name.endswith(".mvt"):
            z, x, y = (int(part) for part in name.removeprefix(base).removesuffix(".mvt").split("/"))
            found[z, x, y] = hashlib.sha256(gzip.decompress(world.stack.tiles.get(name) or b"")).hexdigest()
    assert found == served(world)
    document = json.loads(world.stack.tiles.get(f"{base}tiles.json") or b"")
    assert document["tiles"] == [
        f"{world.settings.tiles_url}/tilesets/city/{done.version.version}/{{z}}/{{x}}/{{y}}.mvt"
    ]


def test_a_region_is_published_and_nothing_outside_it(local: World) -> None:
    fill(local)
    done = published(local, bbox="24.94,60.165,24.945,60.17", zooms="12,14")
    inside = set(hashes_in(archive_of(local, done)))
    assert inside
    assert {z for z, _, _ in inside} <= {12, 14}
    assert len(inside) < len([place for place in served(local) if place[0] in (12, 14)])


# -- a snapshot -------------------------------------------------------------------------------------------------------
def test_edits_while_it_is_written_do_not_show_and_garbage_leaves_what_is_read(world: World) -> None:
    fill(world)
    before = served(world)
    collected: list[int] = []

    def change(step: str) -> None:
        if step == "claim":  # The ledger was read; not a single object was.
            for number in range(6):
                at = (HERE[0] + number * 0.004, HERE[1] + number % 3 * 0.003)
                world.edit(feature(number, 2, at=at, size=0.0009))
            world.build_dirty()
            collected.append(collect_objects(world.stack, now_ms=2**50))

    done = published(world, step=change)
    assert served(world) != before
    assert hashes_in(archive_of(world, done)) == before
    assert collected == [0]
    assert collect_objects(world.stack, now_ms=2**50) > 0


def test_rule_7_below_the_floor_nothing_is_published_and_the_missing_are_named(local: World) -> None:
    fill(local)
    # A feature arrives whose tiles nobody has built: its hints are lost.
    local.edit(feature(99, 1, at=(24.96, 60.155)))
    topic_id, log = local.stack.log.topic_id("tiles"), local.stack.log
    for partition, extent in log.extents("tiles").items():
        local.stack.ledger.reset_position(topic_id, partition, extent.end)
    with pytest.raises(BelowFloor) as refused:
        published(local, bbox=BBOX, zooms="12-16")
    message = str(refused.value)
    missing_keys = [key for key, _ in refused.value.missing]
    assert "floor of 99.50%" in message
    assert "are present" in message
    assert all(Tile.from_key(key).z in range(12, 17) for key in missing_keys)
    assert f"{missing_keys[0]} {local.settings.tiles_url}/#" in message
    assert objects(local) == []
    assert registry.names(local.stack.ledger) == []
    done = published(local, bbox=BBOX, zooms="12-16", floor=0.1)
    assert done.manifest["coverage"]["missing"] == len(missing_keys)
    # What no feature shows in is not missing.
    assert done.manifest["coverage"]["expected"] < 1_000


def test_a_tile_that_only_the_box_of_a_feature_meets_is_not_missing(world: World) -> None:
    fill(world)
    street = feature("diagonal", 1, name="aslant")
    lon, lat = HERE
    street["geometry"] = {"type": "LineString", "coordinates": [[lon, lat], [lon + 0.05, lat + 0.025]]}
    world.edit(street)
    world.build_dirty()
    done = published(world, bbox=f"{lon},{lat},{lon + 0.05},{lat + 0.025}", zooms="14-16", floor=1.0)
    coverage = done.manifest["coverage"]
    assert (coverage["missing"], coverage["expected"]) == (0, coverage["present"])
    assert coverage["expected"] > 20


def test_while_tiles_wait_for_their_build_it_refuses_unless_told_otherwise(local: World) -> None:
    fill(local)
    before = served(local)
    local.edit(feature(0, 2, size=0.0009))
    with pytest.raises(TilesDirty, match="wait for their build"):
        published(local)  # Not even marked: the hint is still in the log.
    local.mark_hints()
    with pytest.raises(TilesDirty, match="--allow-dirty") as refused:
        published(local)
    assert refused.value.dirty
    done = published(local, allow_dirty=True)
    assert hashes_in(archive_of(local, done)) == before
    assert done.manifest["coverage"]["dirty"] == len(refused.value.dirty)
    local.build_dirty()
    assert hashes_in(archive_of(local, published(local))) == served(local) != before


def test_a_tile_given_up_counts_as_missing(local: World) -> None:
    from resources.ledger.protocol import Failure

    fill(local)
    key = next(iter(local.published()))
    mark = local.stack.ledger.mark([key])
    local.stack.ledger.fail([Failure(key, mark, "boom")], max_attempts=1)
    with pytest.raises(BelowFloor, match="present") as refused:
        published(local, floor=1.0)
    assert refused.value.missing == [(key, "its builds failed: boom")]
    assert published(local, floor=0.9).version.tiles == len(served(local))


def test_an_object_that_is_gone_or_damaged_stops_it_and_is_marked(world: World) -> None:
    fill(world)
    states = list(world.published().values())
    world.stack.tiles.delete([tile_object(states[0].object_name or "")])
    world.stack.tiles.put(tile_object(states[1].object_name or ""), gzip.compress(b"something else"))
    world.stack.tiles.put(tile_object(states[2].object_name or ""), b"no gzip")
    with pytest.raises(ObjectsDamaged, match="3 tiles are gone or damaged"):
        published(world)
    assert objects(world) == []
    assert {world.state(s.key).dirty for s in states[:3]} == {True}
    world.build_dirty()
    assert hashes_in(archive_of(world, published(world))) == served(world)


def test_a_region_without_anything_or_above_the_cap_is_refused_with_its_number(local: World) -> None:
    from geo_assets.services.regions import RegionError

    fill(local)
    with pytest.raises(EmptyRegion, match="nothing to publish"):
        published(local, bbox="10,10,10.1,10.1", zooms="0-9")
    with pytest.raises(RegionError, match="above the cap of 20,000"):
        published(local, bbox="24,60,26,61", zooms="0-16")
    with pytest.raises(RegionError, match="above 16, the deepest"):
        published(local, zooms="18")
    with pytest.raises(TilesetError, match="'shapefile' is none of"):
        published(local, formats=("shapefile",))
    for name in ("", "a/b", "..", "UPPER", "a.json", "x" * 64, "ü"):
        with pytest.raises(TilesetNameError):
            published(local, name)


def test_what_is_read_back_wrong_is_not_published(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(local)
    put = local.stack.tiles.put_stream

    def flip(name: str, pieces: Any, **more: Any) -> None:
        data = bytearray(b"".join(pieces))
        data[-20] ^= 1
        put(name, [bytes(data)], **more)

    monkeypatch.setattr(local.stack.tiles, "put_stream", flip)
    with pytest.raises(Unverified):
        published(local)
    assert objects(local) == []
    with pytest.raises(UnknownTileset, match="no version"):
        registry.read(local.stack.ledger, "city").version("1")


# -- killed -----------------------------------------------------------------------------------------------------------
KILLED = """
import os, sys
from pathlib import Path
from geo_assets.services.tileset.publishing import Request, publish
from geo_assets.services.tileset.regions import region_of
from geo_assets.settings import Settings
from geo_assets.stack import Stack
stack = Stack(Settings(home=Path(sys.argv[1])))
def step(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), 9)
publish(stack, Request("city", region_of(stack), ("mbtiles", "folder")), step=step)
"""


@pytest.mark.parametrize("step", ["verify", "publish"])
def test_a_publisher_killed_in_the_middle_publishes_nothing_and_the_next_removes_its_leftovers(
    local: World, step: str
) -> None:
    fill(local, 3)
    first = published(local)
    command = [sys.executable, "-c", KILLED, str(local.settings.home), step]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == -9, ended.stderr
    tileset = registry.read(local.stack.ledger, "city")
    assert tileset.current == first.version.version
    assert len(tileset.versions) == 1
    (dead,) = tileset.claims
    assert [name for name in objects(local) if f"/{dead}/" in name]
    assert keeping.workplace(local.settings, "city", dead).exists()
    third = published(local)
    assert third.swept > 0
    assert third.version.version.startswith("3-")
    assert {name.split("/")[2] for name in objects(local)} == {first.version.version, third.version.version}
    assert list((local.settings.home / "publishing").iterdir()) == []


def test_housekeeping_removes_what_a_killed_publisher_left_once_its_claim_ran_out_and_the_grace_is_over(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(local, 3)
    first = published(local)
    kept = objects(local)
    command = [sys.executable, "-c", KILLED, str(local.settings.home), "verify"]
    assert subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[2]).returncode == -9
    (dead,) = registry.read(local.stack.ledger, "city").claims
    left = [name for name in objects(local) if f"/{dead}/" in name]
    assert left
    assert enforce_retention(local.stack)["unfinished tilesets"] == 0
    began, grace_s = registry.now_ms(), local.settings.garbage_grace_s
    at_ms = began + int((registry.CLAIM_S + grace_s - 120) * 1000)
    monkeypatch.setattr(registry, "now_ms", lambda: at_ms)
    assert enforce_retention(local.stack)["unfinished tilesets"] == 0, "its claim ran out, the grace has not"
    assert set(left) <= set(objects(local))
    at_ms = began + int((registry.CLAIM_S + grace_s + 1) * 1000)
    assert enforce_retention(local.stack)["unfinished tilesets"] == len(left)
    assert objects(local) == kept
    assert not keeping.workplace(local.settings, "city", dead).exists()
    assert registry.read(local.stack.ledger, "city").current == first.version.version
    assert keeping.whole(local.stack, "city", first.version)
    # Remembered for an hour, so that a publisher that only slept finds out, and then forgotten.
    assert set(registry.read(local.stack.ledger, "city").claims) == {dead}
    at_ms += registry.FORGET_MS
    assert enforce_retention(local.stack)["unfinished tilesets"] == 0
    assert registry.read(local.stack.ledger, "city").claims == {}


def test_housekeeping_lets_a_publisher_be_that_is_slow_or_whose_process_it_cannot_see(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(local, 2)
    here = registry.this_process().partition("|")[0]
    monkeypatch.setattr(registry, "this_process", lambda: f"{here}|999999999|1.00")
    swept: list[int] = []

    def housekeeping(step: str) -> None:
        if step in ("write", "verify", "publish"):
            swept.append(enforce_retention(local.stack)["unfinished tilesets"])

    assert published(local, step=housekeeping).in_force
    assert swept == [0, 0, 0]


def test_a_claim_is_void_before_its_objects_go_and_its_owner_finds_out(world: World) -> None:
    fill(world, 2)

    def swept_meanwhile(step: str) -> None:
        if step == "publish":
            (version,) = registry.read(world.stack.ledger, "city").claims
            later = registry.now_ms() + 3_600_000
            assert registry.void(world.stack.ledger, "city", later) == [version]

    with pytest.raises(ClaimLost, match="silent for too long"):
        published(world, step=swept_meanwhile)
    assert objects(world) == []
    assert published(world).in_force


def test_a_publisher_whose_pin_ran_out_ends(local: World) -> None:
    fill(local, 2)

    def sleep(step: str) -> None:
        if step == "write":
            time.sleep(0.6)

    with pytest.raises(pins.PinLost):
        published(local, step=sleep, ttl_s=0.5)
    assert objects(local) == []


# -- the pointer ------------------------------------------------------------------------------------------------------
def test_roll_back_moves_the_pointer_and_touches_no_tile(world: World) -> None:
    fill(world, 2)
    ledger = world.stack.ledger
    versions = [published(world).version.version for _ in range(3)]
    stored = [(one.name, one.modified_ms) for one in world.stack.tiles.list()]
    assert registry.roll_back(ledger, "city")[1].version == versions[1]
    assert registry.roll_back(ledger, "city")[1].version == versions[0]
    with pytest.raises(TilesetError, match="no version before"):
        registry.roll_back(ledger, "city")
    assert registry.roll_back(ledger, "city", "3")[1].version == versions[2]
    with pytest.raises(TilesetError, match="in force already"):
        registry.roll_back(ledger, "city", versions[2])
    with pytest.raises(UnknownTileset, match="no version '9'"):
        registry.roll_back(ledger, "city", "9")
    with pytest.raises(UnknownTileset, match="there is city"):
        registry.roll_back(ledger, "town")
    assert [(one.name, one.modified_ms) for one in world.stack.tiles.list()] == stored
    moves = [(one.what, one.after) for one in registry.read(ledger, "city").history]
    assert moves == [
        *(("published", version) for version in versions),
        ("rolled back", versions[1]),
        ("rolled back", versions[0]),
        ("moved", versions[2]),
    ]


def test_prune_keeps_the_one_in_force_and_what_a_reader_pinned(world: World) -> None:
    fill(world, 2)
    ledger = world.stack.ledger
    versions = [published(world).version.version for _ in range(5)]
    registry.roll_back(ledger, "city", "2")
    pin = registry.pin(ledger, "city", "3", "the printer")
    registry.pin(ledger, "city", "4", "a visitor", for_s=-1)
    for reader, for_s in ((" ", None), ("atlas", 1e30), ("atlas", float("nan"))):
        with pytest.raises(TilesetError, match=r"reader is empty|without a time it has no end"):
            registry.pin(ledger, "city", "4", reader, for_s=for_s)
    gone = keeping.prune(world.stack, "city", 1)
    assert [one.version for one in gone] == [versions[0], versions[3]]
    left = [versions[1], versions[2], versions[4]]
    assert [one.version for one in registry.read(ledger, "city").versions] == left
    assert sorted({name.split("/")[2] for name in objects(world)}) == sorted(left)
    assert registry.unpin(ledger, "city", pin.id)
    assert not registry.unpin(ledger, "city", pin.id)
    assert [one.version for one in keeping.prune(world.stack, "city", 0)] == [versions[2], versions[4]]
    assert {name.split("/")[2] for name in objects(world)} == {versions[1]}
    assert published(world).version.version.startswith("6-"), "numbers never come again"


def test_an_older_publication_that_ends_later_does_not_move_the_pointer_back(local: World) -> None:
    fill(local, 2)
    inner: list[Published] = []

    def overtake(step: str) -> None:
        if step == "publish" and not inner:
            inner.append(published(local))

    outer = published(local, step=overtake)
    assert not outer.in_force
    assert inner[0].in_force
    tileset = registry.read(local.stack.ledger, "city")
    assert tileset.current == inner[0].version.version
    assert [one.version for one in tileset.versions] == [outer.version.version, inner[0].version.version]


def test_many_publishers_and_rollers_at_once_lose_nothing(world: World) -> None:
    fill(world, 2)
    first = published(world)
    faults: list[Exception] = []

    def work(number: int) -> None:
        try:
            published(world)
            registry.pin(world.stack.ledger, "city", first.version.version, f"reader {number}")
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    tileset = registry.read(world.stack.ledger, "city")
    assert [registry.version_number(one.version) for one in tileset.versions] == [1, 2, 3, 4, 5]
    assert len(tileset.pins) == 4
    assert tileset.claims == {}
    assert tileset.current == tileset.versions[-1].version


# -- archives ---------------------------------------------------------------------------------------------------------
def test_our_reader_and_the_librarys_read_an_archive_with_leaf_directories_alike(local: World, tmp_path: Path) -> None:
    import numpy as np

    from geo_assets.services.tileset.formats import PmtilesFile
    from geo_assets.services.tileset.publishing import _Content
    from geo_assets.services.tileset.snapshot import ROW
    from geo_assets.tiles.tile import Box

    random = np.random.default_rng(3)
    ids = np.unique(random.integers(10**8, 10**9, 30_000)).astype(np.uint64)
    rows = np.zeros(len(ids), ROW)
    rows["id"] = ids
    content_of = random.integers(0, 50, len(ids))
    order: dict[int, int] = {}
    content = _Content(rows, np.array([order.setdefault(int(one), len(order)) for one in content_of], np.int64))
    file = PmtilesFile(tmp_path / "data")
    pieces = [gzip.compress(b"tile %d" % number * number, mtime=0) for number in range(len(order))]
    for number, piece in enumerate(pieces):
        file.add(number, piece)
    store = local.stack.tiles
    file.send(
        store, "tilesets/x/1-0/tiles.pmtiles", content, metadata={"name": "x"}, bounds=Box(1, 2, 3, 4),
        center=(2.0, 3.0, 9), alive=lambda: None,
    )  # fmt: skip
    file.close()
    data = store.get("tilesets/x/1-0/tiles.pmtiles") or b""
    assert Reader(MemorySource(data)).header()["leaf_directory_length"] > 0
    archive = Archive(store, "tilesets/x/1-0/tiles.pmtiles")
    assert json.loads(gzip.decompress(archive.metadata())) == {"name": "x"}
    tiles = list(all_tiles(MemorySource(data)))
    assert len(tiles) == len(ids)
    for (z, x, y), tile in tiles[::997]:
        assert archive.get(z, x, y) == tile
    assert archive.get(0, 0, 0) is None
    store.delete(["tilesets/x/1-0/tiles.pmtiles"])
    with pytest.raises(ArchiveError, match="not in the tile store"):
        Archive(store, "tilesets/x/1-0/tiles.pmtiles")
    store.put("tilesets/x/1-0/tiles.pmtiles", b"no archive" * 100)
    with pytest.raises(ArchiveError, match="no PMTiles"):
        Archive(store, "tilesets/x/1-0/tiles.pmtiles")
