"""`geo-assets import` of tables: whose ids they get, what is refused before anything is read, and a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyogrio
import pytest
import shapely

from geo_assets.services.dead_letters import list_dead_letters
from geo_assets_tests.test_cli import Terminal, terminal, write
from geo_assets_tests.world import HERE, World, feature

__all__ = ["terminal"]


def rows(keys: list[Any], shift: float = 0.0) -> pa.Table:
    lon, lat = HERE
    places = [shapely.to_wkb(shapely.Point(lon + shift + n * 1e-4, lat)) for n in range(len(keys))]
    return pa.table({"key": keys, "geometry": pa.array(places, pa.binary())})


def gpkg(path: Path, table: pa.Table) -> str:
    pyogrio.write_arrow(table, path, driver="GPKG", geometry_name="geometry", crs="EPSG:4326", geometry_type="Point")
    return str(path)


def stored(terminal: Terminal) -> dict[Any, str]:
    world = World(terminal.home)
    found = {json.loads(one.feature_id): one.layer for one in world.stack.features.scan()}
    world.close()
    return found


def letters(terminal: Terminal) -> list[Any]:
    world = World(terminal.home)
    found = [listed.letter for listed in list_dead_letters(world.stack.log)]
    world.close()
    return found


def test_a_second_file_of_a_source_leaves_the_features_of_the_first(terminal: Terminal) -> None:
    one = gpkg(terminal.home / "one.gpkg", rows(["a", "b"]))
    two = gpkg(terminal.home / "two.gpkg", rows(["c", "d"]))
    assert terminal("import", one, "--layer", "pois").code == 0
    assert terminal("import", two, "--layer", "buildings").code == 0
    assert stored(terminal) == {
        "one.gpkg:one:1": "pois", "one.gpkg:one:2": "pois",
        "two.gpkg:two:1": "buildings", "two.gpkg:two:2": "buildings",
    }  # fmt: skip


def test_the_same_table_imported_again_changes_nothing_and_a_changed_row_is_one_change(terminal: Terminal) -> None:
    file = terminal.home / "places.gpkg"
    assert "3 of 3 features are new or changed" in terminal("import", gpkg(file, rows(["a", "b", "c"]))).out
    again = terminal("import", str(file))
    assert again.code == 0
    assert "0 of 3 features are new or changed, 3 unchanged" in again.out
    assert "tiles to build" not in again.out
    file.unlink()
    third = terminal("import", gpkg(file, rows(["a", "b", "new"])))
    assert "1 of 3 features are new or changed, 2 unchanged" in third.out
    file.unlink()
    assert "1 of 3 features are new or changed" in terminal("import", gpkg(file, rows(["a", "b", "c"]))).out


def test_an_import_of_ids_from_a_column_refuses_null_and_a_second_one_with_other_content(terminal: Terminal) -> None:
    file = gpkg(terminal.home / "places.gpkg", rows(["a", None, "a"]))
    answer = terminal("import", file, "--layer", "pois", "--id-column", "key")
    assert answer.code == 0
    assert stored(terminal) == {"a": "pois"}
    faults = {letter.reason: letter for letter in letters(terminal)}
    assert set(faults) == {"schema", "version_conflict"}
    assert "the id column 'key' is empty" in faults["schema"].explanation
    assert faults["schema"].payload
    assert "another feature of this import has the same id" in faults["version_conflict"].explanation
    assert "no column 'kye'" in terminal.refused("import", file, "--id-column", "kye")


def test_a_line_that_is_no_json_becomes_a_dead_letter_with_its_text(terminal: Terminal) -> None:
    file = write(terminal.home / "p.geojsonl", f"{json.dumps(feature(1))}\nnonsense\n")
    answer = terminal("import", file)
    assert answer.code == 0
    assert "1 refused (schema)" in answer.out
    assert [letter.payload for letter in letters(terminal)] == [b"nonsense"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--layer", "bildings"], ["--layer", "'bildings'", "buildings, pois"]),
        (["--layer", "pois"], ["--layer", "'pois'", "may not write", "its layers are buildings"]),
        (["--layer", "buildings", "--crs", "EPSG:99999"], ["--crs", "EPSG:99999", "EPSG:3067"]),
        (["--layer", "buildings", "--crs", "mercator"], ["--crs", "mercator", "EPSG:3067"]),
        ([], ["no layer for its features", "'places'", "say --layer", "buildings"]),
        (["--mapping", "mapping.yaml"], ["mapping.yaml", "'rivers'", "buildings, pois"]),
    ],
)
def test_a_layer_or_crs_that_cannot_be_is_one_line_before_anything_is_read(
    terminal: Terminal, arguments: list[str], expected: list[str]
) -> None:
    text = (terminal.home / "sources.yaml").read_text().replace("default_layer: buildings", "layers: [buildings]")
    write(terminal.home / "sources.yaml", text)
    mapping = write(terminal.home / "mapping.yaml", "rules: [{layer: buildings}, {layer: rivers}]")
    file = gpkg(terminal.home / "places.gpkg", rows(["a"]))
    line = terminal.refused("import", file, *(mapping if word == "mapping.yaml" else word for word in arguments))
    for word in expected:
        assert word in line
    assert letters(terminal) == []
    assert stored(terminal) == {}


def test_a_table_takes_its_layer_from_its_name_its_column_or_its_sources_default(terminal: Terminal) -> None:
    assert terminal("import", gpkg(terminal.home / "pois.gpkg", rows(["a"]))).code == 0
    assert terminal("import", gpkg(terminal.home / "other.gpkg", rows(["a"]))).code == 0
    named = rows(["a"]).append_column("layer", pa.array(["pois"]))
    geo = {"version": "1.1.0", "primary_column": "geometry",
           "columns": {"geometry": {"encoding": "WKB", "geometry_types": []}}}  # fmt: skip
    pq.write_table(named.replace_schema_metadata({"geo": json.dumps(geo)}), terminal.home / "p.parquet")
    assert terminal("import", str(terminal.home / "p.parquet")).code == 0
    assert stored(terminal) == {"pois.gpkg:pois:1": "pois", "other.gpkg:other:1": "buildings", "p.parquet:0": "pois"}
