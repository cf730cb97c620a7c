from __future__ import annotations

import datetime
import gzip
import json
import os
import sqlite3
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyogrio
import pytest
import shapely

from geo_assets.configuration import parse_layers
from geo_assets.services.reading import (
    LayerMapping,
    MappingError,
    Reading,
    ReadingError,
    Unfit,
    load_mapping,
    open_file,
)

SAMPLE = Path(__file__).parents[2] / "geo_assets" / "sample"

# Two integers that no double holds, and the extremes.
BIG = [2**53 + 1, None, -(2**63), 2**63 - 1]
FLAGS = [True, None, False, True]
SHAPES = [
    shapely.Point(385000.25, 6672000.75),
    shapely.Point(385001, 6672000),
    None,
    shapely.Point(385002, 6672000),
]


def table() -> pa.Table:
    return pa.table(
        {
            "key": ["a", "b", "c", "d"],
            "rev": pa.array([1, 2, 3, 4], pa.int64()),
            "big": pa.array(BIG, pa.int64()),
            "flag": pa.array(FLAGS, pa.bool_()),
            "ratio": pa.array([1.5, None, float("nan"), 1.0], pa.float64()),
            "day": pa.array([datetime.date(2024, 1, 2), None, None, None], pa.date32()),
            "text": ["Ä", None, "", '"quoted"'],
            "geometry": pa.array([None if s is None else shapely.to_wkb(s) for s in SHAPES], pa.binary()),
        }
    )


def write(path: Path, driver: str, rows: pa.Table | None = None, **options: Any) -> Path:
    options = {"crs": "EPSG:3067", "geometry_type": "Point"} | options
    pyogrio.write_arrow(table() if rows is None else rows, path, driver=driver, geometry_name="geometry", **options)
    return path


def write_parquet(path: Path, rows: pa.Table | None = None, **column: Any) -> Path:
    described = {"encoding": "WKB", "geometry_types": []} | column
    geo = {"version": "1.1.0", "primary_column": "geometry", "columns": {"geometry": described}}
    rows = table() if rows is None else rows
    pq.write_table(rows.replace_schema_metadata({"geo": json.dumps(geo)}), path)
    return path


def all_of(reading: Reading) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in reading if isinstance(raw, bytes)]


def by_key(reading: Reading) -> dict[str, dict[str, Any]]:
    return {feature["properties"]["key"]: feature for feature in all_of(reading)}


# -- tables --------------------------------------------------------------------------------------------------------


def made(tmp_path: Path, form: str) -> Path:
    match form:
        case "GPKG":
            return write(tmp_path / "places.gpkg", "GPKG")
        case "FlatGeobuf":
            return write(tmp_path / "places.fgb", "FlatGeobuf", layer_options={"SPATIAL_INDEX": "NO"})
        case _:
            crs = {"id": {"authority": "EPSG", "code": 3067}}
            return write_parquet(tmp_path / "places.parquet", crs=crs)


@pytest.mark.parametrize("form", ["GPKG", "FlatGeobuf", "GeoParquet"])
def test_integers_booleans_and_nulls_come_exactly_as_they_stand(tmp_path: Path, form: str) -> None:
    reading = open_file(made(tmp_path, form), layer="buildings")
    assert (reading.format, reading.crs, reading.total) == (form, "EPSG:3067", 4)
    features = by_key(reading)
    assert list(features) == ["a", "b", "c", "d"]
    for key, big, flag, shape in zip("abcd", BIG, FLAGS, SHAPES, strict=True):
        feature = features[key]
        assert feature["type"] == "Feature"
        assert feature["layer"] == "buildings"
        assert feature["action"] == "update"
        assert feature["properties"].get("big") == big
        assert feature["properties"].get("flag") is flag
        found = feature["geometry"]
        assert (found is None) == (shape is None)
        if shape is not None:
            assert shapely.from_wkb(found).equals_exact(shape)
    assert features["a"]["properties"]["ratio"] == 1.5
    assert features["c"]["properties"].get("ratio") is None  # JSON has no NaN
    assert features["a"]["properties"]["day"].startswith("2024-01-02")
    assert features["a"]["properties"]["text"] == "Ä"
    assert features["d"]["properties"]["text"] == '"quoted"'


def test_a_shapefile_is_read_with_its_crs_and_encoding(tmp_path: Path) -> None:
    rows = table().select(["key", "flag", "text", "geometry"])
    path = write(tmp_path / "places.shp", "ESRI Shapefile", rows, encoding="UTF-8")
    reading = open_file(path)
    assert (reading.format, reading.crs, reading.total) == ("ESRI Shapefile", "EPSG:3067", 4)
    features = by_key(reading)
    assert features["a"]["properties"]["text"] == "Ä"
    assert features["a"]["layer"] == "places"
    assert features["c"]["geometry"] is None
    assert [f["id"] for f in features.values()] == [f"places.shp:{row}" for row in range(4)]


def test_an_id_column_and_a_version_column_are_taken(tmp_path: Path) -> None:
    mapping = LayerMapping.single("buildings", id_column="key", version_column="rev")
    for form in ("GPKG", "FlatGeobuf", "GeoParquet"):
        features = by_key(open_file(made(tmp_path, form), mapping))
        assert {key: (f["id"], f["version"]) for key, f in features.items()} == {
            "a": ("a", 1), "b": ("b", 2), "c": ("c", 3), "d": ("d", 4),
        }  # fmt: skip


@pytest.mark.parametrize("form", ["GPKG", "FlatGeobuf", "GeoParquet"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, form: str) -> None:
    with pytest.raises(ReadingError, match=r"no column 'code'; there are .*key"):
        open_file(made(tmp_path, form), LayerMapping.single("buildings", id_column="code"))


def test_the_default_id_names_file_table_and_row_and_no_version_is_invented(tmp_path: Path) -> None:
    features = all_of(open_file(made(tmp_path, "GPKG"), layer="buildings"))
    assert [feature["id"] for feature in features] == [f"places.gpkg:places:{row}" for row in range(1, 5)]
    assert all("version" not in feature for feature in features)


@pytest.mark.parametrize("form", ["FlatGeobuf", "GeoParquet"])
def test_the_default_id_of_a_format_with_one_nameless_table_leaves_the_table_out(tmp_path: Path, form: str) -> None:
    path = made(tmp_path, form)
    ids = [feature["id"] for feature in all_of(open_file(path))]
    assert ids == [f"{path.name}:{row}" for row in range(4)]
    assert ids == [feature["id"] for feature in all_of(open_file(path))]


def test_the_id_column_asked_for_goes_before_the_mappings(tmp_path: Path) -> None:
    mapping = LayerMapping.single("buildings", id_column="rev")
    for form in ("GPKG", "FlatGeobuf", "GeoParquet"):
        path = made(tmp_path, form)
        assert [f["id"] for f in all_of(open_file(path, mapping, id_column="key"))] == ["a", "b", "c", "d"]
        assert [f["id"] for f in all_of(open_file(path, layer="pois", id_column="rev"))] == [1, 2, 3, 4]


def test_an_id_that_is_null_or_no_integer_or_text_makes_its_row_unfit_with_the_columns_name(tmp_path: Path) -> None:
    path = made(tmp_path, "GPKG")
    whole, nothing, *_ = list(open_file(path, layer="buildings", id_column="flag"))
    assert isinstance(whole, Unfit)
    assert isinstance(nothing, Unfit)
    assert "'flag' holds neither a whole number nor a text" in str(whole.fault)
    assert "'flag' is empty" in str(nothing.fault)
    assert json.loads(nothing.raw)["layer"] == "buildings"
    fit = [item for item in open_file(path, id_column="ratio") if isinstance(item, bytes)]
    assert [json.loads(raw)["id"] for raw in fit] == [1]


def test_a_table_called_like_no_layer_of_the_map_leaves_the_layer_open(tmp_path: Path) -> None:
    path = made(tmp_path, "GPKG")
    assert all("layer" not in feature for feature in all_of(open_file(path, layers=["buildings"])))
    assert all(feature["layer"] == "places" for feature in all_of(open_file(path, layers=["places"])))


def test_a_column_called_action_is_an_attribute_and_deletes_nothing(tmp_path: Path) -> None:
    rows = table().append_column("action", pa.array(["delete"] * 4))
    for feature in all_of(open_file(write(tmp_path / "p.gpkg", "GPKG", rows))):
        assert feature["action"] == "update"
        assert feature["properties"]["action"] == "delete"


def test_several_tables_of_a_geopackage_are_layers_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "city.gpkg", "GPKG", layer="buildings")
    write(path, "GPKG", layer="roads", append=True)
    features = all_of(open_file(path))
    assert Counter(feature["layer"] for feature in features) == {"buildings": 4, "roads": 4}
    assert len({feature["id"] for feature in features}) == 8
    assert len(all_of(open_file(path, table="roads"))) == 4
    with pytest.raises(ReadingError, match="no table 'rivers'"):
        open_file(path, table="rivers")


def test_tables_of_different_crs_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "city.gpkg", "GPKG", layer="buildings")
    write(path, "GPKG", layer="roads", append=True, crs="EPSG:3879")
    with pytest.raises(ReadingError, match="different CRS"):
        open_file(path)


def test_a_file_without_a_crs_declares_none(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="crs"):
        path = write(tmp_path / "p.shp", "ESRI Shapefile", table().select(["key", "geometry"]), crs=None)
    assert open_file(path).crs is None
    assert open_file(write_parquet(tmp_path / "p.parquet", crs=None)).crs is None


def test_a_geoparquet_file_that_says_nothing_of_its_crs_is_in_longitude_and_latitude(tmp_path: Path) -> None:
    assert open_file(write_parquet(tmp_path / "p.parquet")).crs == "OGC:CRS84"


def test_a_crs_that_only_stands_in_words_is_found_in_the_register(tmp_path: Path) -> None:
    import pyproj

    described = pyproj.CRS.from_epsg(3067).to_json_dict()
    del described["id"]
    assert open_file(write_parquet(tmp_path / "p.parquet", crs=described)).crs == "EPSG:3067"


# A row without a geometry ("c") may be of any kind.
def test_rules_sort_rows_into_layers_by_geometry_and_attributes(tmp_path: Path) -> None:
    mapping = LayerMapping.model_validate(
        {
            "id": "key",
            "rules": [
                {"layer": "areas", "geometry": ["area"], "match": {"text": True}},
                {"layer": "odd", "geometry": ["point"], "match": {"rev": ["1", "3"]}, "attributes": {"name": "text"}},
                {"layer": "flagged", "match": {"flag": True}, "attributes": {"n": {"from": "big", "type": "text"}}},
            ],
        }
    )
    reading = open_file(made(tmp_path, "GPKG"), mapping)
    features = {feature["id"]: feature for feature in all_of(reading)}
    assert {key: feature["layer"] for key, feature in features.items()} == {"a": "odd", "c": "areas", "d": "flagged"}
    assert features["a"]["properties"] == {"name": "Ä"}
    assert features["d"]["properties"] == {"n": str(2**63 - 1)}
    assert reading.left_out == {"no rule fits": 1}


def test_a_column_of_bytes_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = table().append_column("photo", pa.array([b"\xff", None, b"", b"x"], pa.binary()))
    reading = open_file(write_parquet(tmp_path / "p.parquet", rows))
    assert all("photo" not in feature["properties"] for feature in all_of(reading))
    assert sum(reading.left_out.values()) == 4


def test_nested_values_and_decimals_become_json(tmp_path: Path) -> None:
    import decimal

    rows = table().append_column(
        "nested", pa.array([{"list": [1, None], "when": datetime.datetime(2024, 1, 2, 3, 4, 5)}] * 4)
    )
    rows = rows.append_column("money", pa.array([decimal.Decimal("12.50"), decimal.Decimal("3.00"), None, None]))
    first, second, *_ = all_of(open_file(write_parquet(tmp_path / "p.parquet", rows)))
    assert first["properties"]["nested"] == {"list": [1, None], "when": "2024-01-02T03:04:05"}
    assert (first["properties"]["money"], second["properties"]["money"]) == (12.5, 3)


# -- GeoJSON -------------------------------------------------------------------------------------------------------

FEATURE = {
    "type": "Feature",
    "id": 9007199254740993,
    "geometry": {"type": "Point", "coordinates": [24.9, 60.1]},
    "properties": {"n": 1.0, "flag": None, "use": "school"},
}


def test_geojson_features_come_byte_for_byte(tmp_path: Path) -> None:
    text = json.dumps(FEATURE).replace("60.1", "60.10000000000000000")
    path = tmp_path / "p.geojson"
    path.write_text('{"type":"FeatureCollection","features":[' + text + ",\n " + text + "]}")
    reading = open_file(path)
    assert (reading.format, reading.crs, reading.total) == ("GeoJSON", None, 2)
    assert list(reading) == [text.encode()] * 2


def test_a_collections_members_and_the_layer_asked_for_are_defaults_of_its_features(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    own = FEATURE | {"layer": "roads", "version": 7}
    path.write_text(json.dumps({"type": "FeatureCollection", "version": 3, "features": [FEATURE, own]}))
    first, second = all_of(open_file(path, layer="buildings"))
    assert first == FEATURE | {"version": 3, "layer": "buildings"}
    assert second == own


def test_the_crs_of_a_collection_is_declared_even_behind_its_features(tmp_path: Path) -> None:
    path = tmp_path / "p.geojson"
    crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::3067"}}
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [FEATURE], "crs": crs}))
    assert open_file(path).crs == "EPSG:3067"


@pytest.mark.parametrize("separator", ["\x1e", ""])
def test_sequences_are_read_line_by_line(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "p.geojsonl"
    path.write_text("".join(f"{separator}{json.dumps(FEATURE | {'id': n})}\n" for n in range(3)))
    reading = open_file(path)
    assert (reading.format, reading.total) == ("GeoJSONSeq", 3)
    assert [feature["id"] for feature in all_of(reading)] == [0, 1, 2]


def test_the_id_column_of_geojson_is_a_property_and_features_keep_their_layers(tmp_path: Path) -> None:
    path = tmp_path / "p.geojson"
    own = FEATURE | {"layer": "roads"}
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [own, FEATURE | {"properties": {}}]}))
    first, second = list(open_file(path, layer="buildings", id_column="use"))
    assert isinstance(first, bytes)
    assert (json.loads(first)["id"], json.loads(first)["layer"]) == ("school", "roads")
    assert isinstance(second, Unfit)


def test_a_line_of_a_sequence_that_is_no_json_object_is_unfit_and_keeps_its_text(tmp_path: Path) -> None:
    path = tmp_path / "p.geojsonl"
    path.write_text(f"{json.dumps(FEATURE)}\nnonsense\n{json.dumps(FEATURE)}\n")
    reading = open_file(path)
    items = list(reading)
    assert [isinstance(item, Unfit) for item in items] == [False, True, False]
    assert [item.raw for item in items if isinstance(item, Unfit)] == [b"nonsense"]
    assert not reading.left_out


def test_rules_apply_to_geojson_and_numbers_keep_their_text(tmp_path: Path) -> None:
    path = tmp_path / "p.geojson"
    other = FEATURE | {"properties": {"use": "shed"}}
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [FEATURE, other]}))
    mapping = LayerMapping.model_validate(
        {
            "rules": [
                {
                    "layer": "pois",
                    "geometry": ["point"],
                    "match": {"use": "school"},
                    "attributes": {"n": "n"},
                }
            ]
        }
    )
    reading = open_file(path, mapping)
    (raw,) = list(reading)
    assert b'"n":1.0' in raw
    assert b"9007199254740993" in raw
    assert json.loads(raw)["layer"] == "pois"
    assert reading.left_out == {"no rule fits": 1}


# -- OpenStreetMap -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample() -> tuple[Reading, list[dict[str, Any]]]:
    reading = open_file(SAMPLE / "helsinki.osm.pbf", load_mapping(SAMPLE / "mapping.yaml"))
    return reading, all_of(reading)


def test_the_sample_has_every_layer_that_it_defines(sample: tuple[Reading, list[dict[str, Any]]]) -> None:
    import yaml

    _, features = sample
    layers = parse_layers(yaml.safe_load((SAMPLE / "layers.yaml").read_text()), "layers.yaml")
    of_the_city = {layer.name for layer in layers.layers if not layer.fences}
    assert {feature["layer"] for feature in features} == of_the_city
    assert load_mapping(SAMPLE / "mapping.yaml").layers == of_the_city
    assert "OpenStreetMap contributors" in layers.attribution
    for feature in features:
        assert set(feature["properties"]) <= set(layers[feature["layer"]].attributes or ()), feature


def test_the_sample_is_a_city(sample: tuple[Reading, list[dict[str, Any]]]) -> None:
    reading, features = sample
    assert reading.crs == "EPSG:4326"
    counts = Counter(feature["layer"] for feature in features)
    assert counts["buildings"] > 400
    assert counts["roads"] > 900
    assert counts["pois"] > 1_000
    for feature in features:
        shape = shapely.from_wkb(feature["geometry"])
        assert shape.is_valid
        west, south, east, north = shape.bounds
        assert west > 24.93
        assert south > 60.16
        assert east < 24.96
        assert north < 60.18
    assert {shapely.from_wkb(f["geometry"]).geom_type for f in features if f["layer"] == "buildings"} <= {
        "Polygon",
        "MultiPolygon",
    }


def test_ids_are_unique_over_nodes_ways_and_relations_and_versions_are_the_objects(
    sample: tuple[Reading, list[dict[str, Any]]],
) -> None:
    _, features = sample
    ids = [feature["id"] for feature in features]
    assert len(set(ids)) == len(ids)
    assert {number % 10 for number in ids} == {1, 2, 3}
    assert max(ids) < 2**53
    assert all(feature["version"] >= 1 for feature in features)


def test_what_became_no_feature_is_counted(sample: tuple[Reading, list[dict[str, Any]]]) -> None:
    reading, _ = sample
    assert set(reading.left_out) == {
        "no rule fits",
        "relation that is no area",
        "nodes of the way are missing",
        "no valid area",
    }


OSM = """<osm version="0.6">
<node id="1" version="1" lat="60.0" lon="24.0"/><node id="2" version="1" lat="60.0" lon="24.1"/>
<node id="3" version="1" lat="60.1" lon="24.1"/><node id="4" version="1" lat="60.1" lon="24.0"/>
<node id="5" version="3" lat="60.05" lon="24.05"><tag k="amenity" v="cafe"/><tag k="name" v="Café"/></node>
<way id="1" version="2"><nd ref="1"/><nd ref="2"/><nd ref="3"/><nd ref="4"/><nd ref="1"/><tag k="building" v="yes"/>
 <tag k="building:levels" v="5"/><tag k="height" v="12.5 m"/></way>
<way id="2" version="1"><nd ref="1"/><nd ref="2"/><nd ref="99"/><nd ref="3"/><nd ref="4"/><tag k="highway" v="primary"/>
 <tag k="bridge" v="viaduct"/><tag k="oneway" v="no"/></way>
<way id="3" version="1"><nd ref="1"/><nd ref="2"/><nd ref="3"/><nd ref="1"/><tag k="highway" v="footway"/></way>
<way id="4" version="1"><nd ref="1"/><nd ref="3"/><nd ref="2"/><nd ref="4"/><nd ref="1"/>
 <tag k="building" v="no"/></way>
<way id="5" version="1"><nd ref="1"/><nd ref="3"/><nd ref="2"/><nd ref="4"/><nd ref="1"/>
 <tag k="building" v="bow"/></way>
<way id="6" version="1"><nd ref="98"/><nd ref="99"/><tag k="highway" v="primary"/></way>
<way id="7" version="1"><nd ref="1"/><nd ref="2"/><nd ref="3"/><nd ref="4"/><nd ref="1"/></way>
<relation id="1" version="9"><member type="way" ref="7" role="outer"/><tag k="type" v="multipolygon"/>
 <tag k="landuse" v="grass"/></relation>
</osm>"""


@pytest.fixture
def osm(tmp_path: Path) -> dict[int, dict[str, Any]]:
    path = tmp_path / "small.osm"
    path.write_text('<?xml version="1.0"?>' + OSM)
    return {feature["id"]: feature for feature in all_of(open_file(path, load_mapping(SAMPLE / "mapping.yaml")))}


def test_a_closed_way_is_an_area_or_a_line_as_its_rule_says(osm: dict[int, dict[str, Any]]) -> None:
    assert shapely.from_wkb(osm[12]["geometry"]).equals(shapely.box(24.0, 60.0, 24.1, 60.1))
    assert osm[12]["properties"] == {"class": "yes", "height": 12.5, "levels": 5}
    assert osm[12]["version"] == 2
    assert shapely.from_wkb(osm[32]["geometry"]).geom_type == "LineString"
    assert osm[32]["layer"] == "paths"


def test_a_way_whose_nodes_are_partly_missing_keeps_the_stretches_that_are_there(
    osm: dict[int, dict[str, Any]],
) -> None:
    shape = shapely.from_wkb(osm[22]["geometry"])
    assert shape.equals(shapely.MultiLineString([[(24, 60), (24.1, 60)], [(24.1, 60.1), (24, 60.1)]]))
    assert osm[22]["properties"] == {"class": "primary", "bridge": True, "oneway": False}
    assert 62 not in osm


def test_a_multipolygon_relation_is_an_area_with_its_own_id(osm: dict[int, dict[str, Any]]) -> None:
    assert osm[13]["layer"] == "landuse"
    assert osm[13]["version"] == 9
    assert set(osm) == {51, 12, 22, 32, 13}


def test_an_openstreetmap_file_without_a_mapping_is_refused() -> None:
    with pytest.raises(ReadingError, match="needs a mapping"):
        open_file(SAMPLE / "helsinki.osm.pbf")


# -- mappings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: []", "rules"),
        ("rules: [{layer: a, geometry: [volume]}]", "geometry"),
        ("rules: [{layer: a, colour: red}]", "colour"),
        ("rules: [{layer: a}\n", "line"),
        ("- a", "mapping|dictionary"),
        ("\x00", "YAML"),
    ],
)
def test_a_mapping_at_fault_names_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mapping.yaml"
    path.write_text(text)
    with pytest.raises(MappingError, match=message) as fault:
        load_mapping(path)
    assert str(path) in str(fault.value)
    assert "\n" not in str(fault.value)


# -- files that are not what they should be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "http://example.com/p.gpkg",
        "https://example.com/p.gpkg",
        "s3://bucket/p.parquet",
        "ftp://example.com/p.shp",
        "/vsicurl/http://example.com/p.gpkg",
        "/vsis3/bucket/p.gpkg",
        "/vsizip/p.zip/p.shp",
        "/vsistdin/",
        "GPKG:/etc/passwd",
        "PG:host=db",
        "WFS:http://example.com",
    ],
)
def test_network_paths_and_gdals_own_file_systems_are_refused(path: str) -> None:
    with pytest.raises(ReadingError, match="only local files"):
        open_file(path)


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write(tmp_path / "p.gpkg", "GPKG"))
    assert len(all_of(open_file(tmp_path / "link"))) == 4


def test_what_is_no_readable_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.gpkg").touch()
    (tmp_path / "text.gpkg").write_text("hello")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "missing.gpkg": "No such file",
        "empty.gpkg": "is empty",
        "text.gpkg": "no format that is read here",
        "dangling": "No such file",
        "pipe": "no regular file",
        ".": "is a folder",
        "a\x00b": "no path",
    }.items():
        with pytest.raises(ReadingError, match=message) as fault:
            open_file(str(tmp_path / name))
        assert "\n" not in str(fault.value)


def test_archives_are_refused_by_their_content_whatever_they_are_called(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p.gpkg", "w") as archive:
        archive.writestr("p.shp", b"")
    (tmp_path / "p.geojson").write_bytes(gzip.compress(b"{}"))
    for name, kind in (("p.gpkg", "zip"), ("p.geojson", "gzip")):
        with pytest.raises(ReadingError, match=f"{kind} archive; unpack"):
            open_file(tmp_path / name)


def test_a_virtual_dataset_is_not_opened_under_any_name(tmp_path: Path) -> None:
    vrt = """<OGRVRTDataSource><OGRVRTLayer name="a"><SrcDataSource>/vsicurl/http://127.0.0.1:1/a.gpkg</SrcDataSource>
    </OGRVRTLayer></OGRVRTDataSource>"""
    for name in ("a.vrt", "a.gpkg", "a.shp", "a.geojson", "a.fgb"):
        (tmp_path / name).write_text(vrt)
        with pytest.raises(ReadingError, match="no format that is read here"):
            open_file(tmp_path / name)


def test_an_sqlite_database_that_is_no_geopackage_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "p.gpkg") as connection:
        connection.execute("CREATE TABLE a (b)")
    with pytest.raises(ReadingError, match="no GeoPackage"):
        open_file(tmp_path / "p.gpkg")


def test_the_content_decides_over_a_wrong_extension(tmp_path: Path) -> None:
    write(tmp_path / "p.gpkg", "GPKG").rename(tmp_path / "p.geojson")
    assert open_file(tmp_path / "p.geojson").format == "GPKG"
    made(tmp_path, "FlatGeobuf").rename(tmp_path / "p.shp")
    assert len(all_of(open_file(tmp_path / "p.shp"))) == 4
    (tmp_path / "p.parquet").write_text(json.dumps(FEATURE))
    assert open_file(tmp_path / "p.parquet").format == "GeoJSON"
    (tmp_path / "city.gpkg").write_bytes((SAMPLE / "helsinki.osm.pbf").read_bytes())
    assert open_file(tmp_path / "city.gpkg", load_mapping(SAMPLE / "mapping.yaml")).format == "OpenStreetMap"


def many_rows() -> pa.Table:
    count = 20_000
    shapes = shapely.to_wkb(shapely.points(range(count), range(count)))
    return pa.table({"key": [f"key {n}" for n in range(count)], "geometry": pa.array(list(shapes), pa.binary())})


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("form", ["GPKG", "ESRI Shapefile", "FlatGeobuf", "GeoParquet", "GeoJSON", "OSM"])
def test_a_file_that_was_cut_off_is_an_error_and_never_a_shorter_import(
    tmp_path: Path, form: str, share: float
) -> None:
    mapping = None
    match form:
        case "GPKG":
            path = write(tmp_path / "p.gpkg", form, many_rows())
        case "ESRI Shapefile":
            path = write(tmp_path / "p.shp", form, many_rows())
        case "FlatGeobuf":
            path = write(tmp_path / "p.fgb", form, many_rows())
        case "GeoParquet":
            path = write_parquet(tmp_path / "p.parquet", many_rows())
        case "GeoJSON":
            path = tmp_path / "p.geojson"
            path.write_text(json.dumps({"type": "FeatureCollection", "features": [FEATURE] * 1_000}))
        case _:
            path = tmp_path / "p.osm.pbf"
            path.write_bytes((SAMPLE / "helsinki.osm.pbf").read_bytes())
            mapping = load_mapping(SAMPLE / "mapping.yaml")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ReadingError) as fault:
        all_of(open_file(path, mapping))
    assert "\n" not in str(fault.value)
    assert str(path) in str(fault.value)


@pytest.mark.parametrize("index", ["YES", "NO"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_a_flatgeobuf_that_was_cut_off_is_told_to_be_damaged(tmp_path: Path, share: float, index: str) -> None:
    path = write(tmp_path / "p.fgb", "FlatGeobuf", many_rows().slice(0, 500), layer_options={"SPATIAL_INDEX": index})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ReadingError, match="is damaged"):
        all_of(open_file(path))


def test_an_openstreetmap_file_takes_no_id_column() -> None:
    with pytest.raises(ReadingError, match="no id column 'name'"):
        open_file(SAMPLE / "helsinki.osm.pbf", load_mapping(SAMPLE / "mapping.yaml"), id_column="name")


def test_a_collection_cut_off_at_any_byte_is_an_error(tmp_path: Path) -> None:
    text = json.dumps({"type": "FeatureCollection", "crs": None, "features": [FEATURE, FEATURE]}, indent=1).encode()
    path = tmp_path / "p.geojson"
    for length in range(1, len(text)):
        path.write_bytes(text[:length])
        with pytest.raises(ReadingError):
            all_of(open_file(path))


def test_a_part_of_a_shapefile_or_one_without_its_parts_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "p.shp", "ESRI Shapefile", table().select(["key", "geometry"]))
    with pytest.raises(ReadingError, match=r"name its \.shp"):
        open_file(tmp_path / "p.shx")
    (tmp_path / "p.shx").unlink()
    with pytest.raises(ReadingError):
        all_of(open_file(path))


def test_a_parquet_file_without_a_geometry_or_with_another_encoding_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "p.parquet")
    with pytest.raises(ReadingError, match="no GeoParquet"):
        open_file(tmp_path / "p.parquet")
    with pytest.raises(ReadingError, match="only WKB"):
        open_file(write_parquet(tmp_path / "q.parquet", encoding="point"))


def test_a_geopackage_without_features_has_none(tmp_path: Path) -> None:
    reading = open_file(write(tmp_path / "p.gpkg", "GPKG", table().slice(0, 0)))
    assert reading.total == 0
    assert all_of(reading) == []
