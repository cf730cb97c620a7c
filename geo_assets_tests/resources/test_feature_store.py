"""The embedded feature store under the contract, and what is its own: a GeoPackage that others open, files, locks."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyogrio
import pytest
import shapely

from geo_assets_tests.needs import missing
from geo_assets_tests.resources.contract_feature_store import (
    REPOSITORY,
    Connect,
    FeatureStoreContract,
    delete,
    feature,
    no_plan,
    upsert,
)
from geo_assets_tests.waiting import patient
from resources.feature_store.geopackage import GeoPackageStore
from resources.feature_store.gpkg_geometry import to_blob, wkb_of
from resources.feature_store.protocol import FeatureStoreError, FeatureStoreUnavailable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "features.gpkg"


@pytest.fixture
def connect(path: Path) -> Connect:
    return lambda: GeoPackageStore(path)


@pytest.fixture
def opening(path: Path) -> str:
    return f"from resources.feature_store.geopackage import GeoPackageStore\nstore = GeoPackageStore({str(path)!r})"


class TestGeoPackageStore(FeatureStoreContract):
    pass


@pytest.fixture
def city(path: Path) -> GeoPackageStore:
    """A store with two layers, a feature without geometry and a deleted one."""
    store = GeoPackageStore(path)
    edits = [upsert(feature(str(i), box=(10 + i / 10, 20.0, 10.05 + i / 10, 20.05))) for i in range(20)]
    edits += [upsert(feature("100", layer="water-ways")), upsert(feature("101", box=None)), delete("3")]
    assert {a.outcome for a in store.apply(edits, no_plan, now_ms=1_700_000_000_000)} == {"applied"}
    return store


def direct(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


# -- a GeoPackage ----------------------------------------------------------------------------------------------------
def test_gdal_shows_the_whole_and_each_layer_by_its_name(city: GeoPackageStore, path: Path) -> None:
    listed = {name for name, geometry in pyogrio.list_layers(path) if geometry is not None}
    assert listed == {"features", "buildings", "water-ways"}


def test_gdal_reads_geometries_attributes_and_crs_while_the_store_is_open(city: GeoPackageStore, path: Path) -> None:
    meta, fids, geometries, fields = pyogrio.raw.read(path, layer="buildings", return_fids=True)
    assert meta["crs"] == "EPSG:4326"
    assert len(geometries) == 20
    ids = fields[list(meta["fields"]).index("feature_id")]
    by_id = dict(zip(ids, geometries, strict=True))
    assert shapely.from_wkb(by_id["5"]).bounds == (10.5, 20.0, 10.55, 20.05)
    assert by_id["101"] is None
    assert len(set(fids)) == 20


def test_gdal_filters_by_box(city: GeoPackageStore, path: Path) -> None:
    for layer in ("features", "buildings"):
        geometries = pyogrio.raw.read(path, layer=layer, bbox=(10.42, 20.0, 10.62, 20.1))[2]
        assert len(geometries) == {"features": 4, "buildings": 3}[layer]


def test_ogrinfo_opens_it_without_a_warning(city: GeoPackageStore, path: Path) -> None:
    if shutil.which("ogrinfo") is None:
        missing("no ogrinfo (Debian and Ubuntu have it in the package gdal-bin)")
    done = subprocess.run(["ogrinfo", "-ro", "-so", str(path), "features"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "Feature Count: 21" in done.stdout
    assert "FID Column = fid" in done.stdout
    assert "WGS 84" in done.stdout


def test_the_header_says_geopackage(city: GeoPackageStore, path: Path) -> None:
    with direct(path) as db:
        assert db.execute("PRAGMA application_id").fetchone()[0] == int.from_bytes(b"GPKG", "big")
        assert db.execute("PRAGMA user_version").fetchone()[0] == 10_300


def test_the_tables_of_the_specification_are_filled(city: GeoPackageStore, path: Path) -> None:
    with direct(path) as db:
        assert {row[0] for row in db.execute("SELECT srs_id FROM gpkg_spatial_ref_sys")} == {-1, 0, 4326}
        contents = dict(db.execute("SELECT table_name, data_type FROM gpkg_contents"))
        assert contents == {
            "features": "features",
            "buildings": "features",
            "water-ways": "features",
            "ga_layer": "attributes",
        }
        assert db.execute("SELECT last_change FROM gpkg_contents WHERE table_name = 'features'").fetchone() == (
            "2023-11-14T22:13:20.000Z",
        )
        extensions = db.execute("SELECT table_name, column_name, extension_name, scope FROM gpkg_extensions").fetchall()
        assert extensions == [("features", "geom", "gpkg_rtree_index", "write-only")]
        triggers = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
        expected = ("insert", "update2", "update4", "update5", "update6", "update7", "delete")
        assert triggers == {f"rtree_features_geom_{name}" for name in expected}
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_geometry_blob_carries_its_envelope(city: GeoPackageStore, path: Path) -> None:
    with direct(path) as db:
        blob = db.execute("SELECT geom FROM features WHERE feature_id = '5'").fetchone()[0]
    assert blob[:8] == b"GP\x00\x03\xe6\x10\x00\x00"
    assert shapely.from_wkb(wkb_of(blob)).bounds == (10.5, 20.0, 10.55, 20.05)
    assert wkb_of(to_blob(b"wkb", None)) == b"wkb"


def test_both_spatial_indexes_hold_what_the_rows_say_after_any_edits(path: Path) -> None:
    store = GeoPackageStore(path)
    pick = random.Random(7)
    for version in range(1, 30):
        edits = []
        for i in range(20):
            box = pick.choice([None, (pick.random(), pick.random(), 1 + pick.random(), 1 + pick.random())])
            made = feature(str(i), version, box=box, zooms=pick.choice([(0, 22), (1, 0), (3, 5)]), content=str(version))
            edits.append(upsert(made) if pick.random() < 0.7 else delete(str(i), version))
        store.apply(edits, no_plan, now_ms=5)
    with direct(path) as db:
        assert db.execute("SELECT rtreecheck('rtree_features_geom')").fetchone() == ("ok",)
        assert db.execute("SELECT rtreecheck('ga_place')").fetchone() == ("ok",)
        indexed = {row[0] for row in db.execute("SELECT id FROM rtree_features_geom")}
        assert indexed == {row[0] for row in db.execute("SELECT fid FROM features WHERE geom IS NOT NULL")}
        visible = "SELECT fid FROM features WHERE west IS NOT NULL AND min_zoom <= max_zoom"
        assert {row[0] for row in db.execute("SELECT id FROM ga_place")} == {row[0] for row in db.execute(visible)}
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("layer", ["features", "GPKG_contents", "ga_meta", "it's", 'a"b', "sqlite_x", "Buildings"])
def test_a_layer_whose_name_is_taken_is_stored_all_the_same(city: GeoPackageStore, path: Path, layer: str) -> None:
    (applied,) = city.apply([upsert(feature("777", layer=layer))], no_plan, now_ms=5)
    assert applied.outcome == "applied"
    assert city.counts().by_layer[layer] == 1
    assert len(pyogrio.raw.read(path, layer="features")[2]) == 22


# -- files and locks -------------------------------------------------------------------------------------------------
def test_a_store_of_a_newer_schema_is_refused_with_one_clear_error(path: Path) -> None:
    GeoPackageStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE ga_meta SET value = 99 WHERE name = 'schema'")
    with pytest.raises(FeatureStoreError, match="99"):
        GeoPackageStore(path)


def test_somebody_elses_database_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE gpkg_contents (a)")
    with pytest.raises(FeatureStoreError, match="somebody else"):
        GeoPackageStore(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(FeatureStoreError, match=r"features\.gpkg"):
        GeoPackageStore(path)


def test_a_store_locked_too_long_is_unavailable_and_works_again_afterwards(path: Path) -> None:
    store = GeoPackageStore(path, lock_timeout_s=0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(FeatureStoreUnavailable, match="locked"):
        store.apply([upsert(feature())], no_plan, now_ms=5)
    assert store.get("city", '"a"') is None
    other.execute("ROLLBACK")
    assert store.apply([upsert(feature())], no_plan, now_ms=5)[0].outcome == "applied"


def test_a_full_disk_is_unavailable_and_leaves_nothing_of_the_batch(path: Path) -> None:
    store = GeoPackageStore(path)
    db = store._file.connection()  # pyright: ignore[reportPrivateUsage]
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 4}")
    edits = [upsert(feature(str(i))) for i in range(500)]
    with pytest.raises(FeatureStoreUnavailable, match="disk full"):
        store.apply(edits, no_plan, now_ms=5)
    db.execute("PRAGMA max_page_count = 1000000")
    counts = store.counts()
    assert (counts.by_layer, counts.applied_keys) == ({}, 0)
    assert {a.outcome for a in store.apply(edits, no_plan, now_ms=5)} == {"applied"}


def test_a_read_only_store_is_unavailable_for_edits(path: Path) -> None:
    store = GeoPackageStore(path)
    store._file.connection().execute("PRAGMA query_only = ON")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(FeatureStoreUnavailable, match="read-only"):
        store.apply([upsert(feature())], no_plan, now_ms=5)


def test_a_home_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FeatureStoreUnavailable, match="file"):
        GeoPackageStore(tmp_path / "file" / "features.gpkg")


def test_an_edit_is_synced_to_the_disk(path: Path) -> None:
    db = GeoPackageStore(path)._file.connection()  # pyright: ignore[reportPrivateUsage]
    assert db.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_many_processes_may_make_the_file_at_once(path: Path, opening: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    code = f"{opening}\nprint(store.counts().outbox)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=patient(60))[0].strip() for process in processes] == ["0"] * 3


def test_a_tile_of_zoom_0_does_not_walk_what_shows_only_deeper(path: Path) -> None:
    store = GeoPackageStore(path)
    store.apply([upsert(feature(str(i), zooms=(14, 18))) for i in range(500)], no_plan, now_ms=5)
    store.apply([upsert(feature("big", zooms=(0, 18)))], no_plan, now_ms=5)
    plan = store._file.connection().execute(  # pyright: ignore[reportPrivateUsage]
        "EXPLAIN QUERY PLAN SELECT id FROM ga_place WHERE minzoom <= 0 AND maxzoom >= 0 AND minx <= 180"
    )
    assert "VIRTUAL TABLE INDEX" in plan.fetchall()[0][3]
