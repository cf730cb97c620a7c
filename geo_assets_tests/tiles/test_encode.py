from __future__ import annotations

import json
import math
import random

import mapbox_vector_tile
import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.tiles.decode import decode
from geo_assets.tiles.encode import ID_PROPERTY, TileFeatures, encode_tiles
from geo_assets.tiles.encode.mercator import world
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets_tests.tiles.encoding import ONE_LAYER, columns, encode_one, features_of, lon_lat

TILE = Tile(14, 9326, 4738)
SQUARE = lon_lat(TILE, shapely.box(100, 100, 300, 200))
POINT = lon_lat(TILE, shapely.Point(10, 20))
LINE = lon_lat(TILE, shapely.LineString([(0, 0), (100, 50), (200, 0)]))


def test_a_tile_without_features_is_no_bytes():
    (tile,) = encode_tiles(columns([], [TILE]), ONE_LAYER)
    assert (tile.data, tile.features, tile.left_out, tile.extent) == (b"", 0, (), None)
    assert encode_tiles(columns([], []), ONE_LAYER) == []


def test_points_lines_and_polygons_are_where_they_were_put():
    (tile,) = encode_tiles(columns([POINT, LINE, SQUARE], [TILE]), ONE_LAYER)
    point, line, polygon = features_of(tile.data)
    assert point.paths == (((10, 20),),)
    assert line.paths == (((0, 0), (100, 50), (200, 0)),)
    assert set(polygon.paths[0]) == {(100, 100), (300, 100), (300, 200), (100, 200)}
    assert [point.geometry_type, line.geometry_type, polygon.geometry_type] == ["Point", "LineString", "Polygon"]
    assert (tile.features, tile.extent) == (3, (0, 0, 300, 200))


def test_another_decoder_reads_the_same():
    (tile,) = encode_tiles(
        columns([POINT, LINE, SQUARE], [TILE], properties=[{"a": 1}, {"b": 1.5}, {"c": "é"}]), ONE_LAYER
    )
    layer = mapbox_vector_tile.decode(tile.data, default_options={"y_coord_down": True})["things"]
    assert [feature["id"] for feature in layer["features"]] == [1, 2, 3]
    assert [feature["properties"] for feature in layer["features"]] == [{"a": 1}, {"b": 1.5}, {"c": "é"}]
    assert layer["features"][1]["geometry"]["coordinates"] == [[0, 0], [100, 50], [200, 0]]


def test_layers_come_in_drawing_order_and_only_where_they_have_features():
    layers = LayerSet((Layer("water"), Layer("roads"), Layer("labels")))
    (tile,) = encode_tiles(columns([POINT, SQUARE], [TILE], layers=["labels", "water"]), layers)
    assert [layer.name for layer in decode(tile.data)] == ["water", "labels"]
    assert {layer.extent for layer in decode(tile.data)} == {4096}
    assert {layer.version for layer in decode(tile.data)} == {2}


def test_a_feature_of_an_unknown_layer_is_left_out_and_recorded():
    (tile,) = encode_tiles(columns([POINT, POINT], [TILE], layers=["things", "secret"], ids=[1, '"a"']), ONE_LAYER)
    assert [feature.id for feature in features_of(tile.data)] == [1]
    (left,) = tile.left_out
    assert (left.source, left.feature_id) == ("test", '"a"')
    assert "secret" in left.reason


@pytest.mark.parametrize(
    ("geometry", "properties", "says"),
    [
        (b"\x01\x03", "{}", "geometry"),
        (b"", "{}", "geometry"),
        (shapely.Point(float("nan"), 1), "{}", "finite"),
        (shapely.LineString([(0, 0), (float("inf"), 1)]), "{}", "finite"),
        (POINT, "[1]", "not an object"),
        (POINT, '{"a": ', "properties"),
        (POINT, '{"a": NaN}', "properties"),
    ],
)
def test_a_feature_that_cannot_be_encoded_costs_nobody_else(geometry, properties, says):
    features = columns([POINT, geometry, SQUARE], [TILE], properties=[{}, properties, {}])
    (tile,) = encode_tiles(features, ONE_LAYER)
    assert [feature.id for feature in features_of(tile.data)] == [1, 3]
    assert [left.feature_id for left in tile.left_out] == ["2"]
    assert says in tile.left_out[0].reason


def test_no_geometry_and_empty_geometries_show_nowhere_and_are_no_fault():
    empty = [
        None,
        *map(shapely.from_wkt, ("POINT EMPTY", "POLYGON EMPTY", "GEOMETRYCOLLECTION EMPTY", "MULTIPOINT EMPTY")),
    ]
    (tile,) = encode_tiles(columns(empty, [TILE]), ONE_LAYER)
    assert (tile.data, tile.left_out) == (b"", ())


def test_a_collection_becomes_one_feature_a_geometry_type_with_the_same_id_and_attributes():
    nested = shapely.GeometryCollection(
        [SQUARE, shapely.GeometryCollection([POINT, LINE]), lon_lat(TILE, shapely.Point(5, 5))]
    )
    tile = encode_one(nested, TILE, ids=7, properties={"name": "x"})
    found = features_of(tile.data)
    assert [feature.geometry_type for feature in found] == ["Point", "LineString", "Polygon"]
    assert {feature.id for feature in found} == {7}
    assert all(feature.properties == {"name": "x"} for feature in found)
    assert set(found[0].paths) == {((10, 20),), ((5, 5),)}


def test_overlapping_polygons_of_a_collection_become_one_outline():
    both = shapely.GeometryCollection(
        [lon_lat(TILE, shapely.box(0, 0, 100, 100)), lon_lat(TILE, shapely.box(50, 50, 150, 150))]
    )
    (feature,) = features_of(encode_one(both, TILE).data)
    assert len(feature.paths) == 1


def test_a_third_dimension_is_left_out():
    (feature,) = features_of(encode_one(shapely.force_3d(SQUARE, 12.5), TILE).data)
    assert len(feature.paths[0]) == 5


IDS = {
    "0": 0,
    "1": 1,
    str(1 << 35): 1 << 35,
    str((1 << 53) + 1): (1 << 53) + 1,
    str((1 << 64) - 1): (1 << 64) - 1,
}


@pytest.mark.parametrize("text", IDS)
def test_an_id_that_is_a_uint64_is_the_mvt_id(text: str):
    (feature,) = features_of(encode_one(POINT, TILE, ids=text).data)
    assert feature.id == IDS[text]
    assert ID_PROPERTY not in feature.properties


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"123"', "123"),
        ('"way/7"', "way/7"),
        ('"é\\n"', "é\n"),
        ("-5", -5),
        ("1.5", 1.5),
        ("1.0", 1.0),
        (str(1 << 64), str(1 << 64)),
        ("-0", 0),
        # No JSON, and no two features may fall together for it.
        ("007", "007"),
        ("٣", "٣"),
    ],
)
def test_any_other_id_reaches_the_map_as_a_property(text: str, value: object):
    (feature,) = features_of(encode_one(POINT, TILE, ids=text, properties={"a": 1}).data)
    assert feature.id is None
    assert feature.properties == {"a": 1, ID_PROPERTY: value}
    assert type(feature.properties[ID_PROPERTY]) is type(value)


def test_the_id_property_does_not_take_the_place_of_an_own_attribute():
    own = {ID_PROPERTY: "mine", f"_{ID_PROPERTY}": "too", "id": 4}
    (feature,) = features_of(encode_one(POINT, TILE, ids='"a/1"', properties=own).data)
    assert feature.properties == {**own, f"__{ID_PROPERTY}": "a/1"}


def test_the_id_property_passes_the_layers_choice_of_attributes():
    layers = LayerSet((Layer("things", attributes=("name",)),))
    tile = encode_one(
        POINT, TILE, layers, ids='"a"', properties={"name": "x", "secret": 1, ID_PROPERTY: "own, not chosen"}
    )
    assert features_of(tile.data)[0].properties == {"name": "x", ID_PROPERTY: "a"}


def test_a_layers_attributes_choose_what_goes_into_the_tile():
    layers = LayerSet((Layer("all"), Layer("some", attributes=("b", "missing")), Layer("none", attributes=())))
    own = {"a": 1, "b": 2, "c": 3}
    (tile,) = encode_tiles(columns([POINT] * 3, [TILE], layers=["all", "some", "none"], properties=[own] * 3), layers)
    assert [layer.features[0].properties for layer in decode(tile.data)] == [own, {"b": 2}, {}]


def test_two_sources_may_share_an_id_and_both_show():
    (tile,) = encode_tiles(columns([POINT, SQUARE], [TILE], ids=[5, 5], sources=["b", "a"]), ONE_LAYER)
    found = features_of(tile.data)
    assert [feature.id for feature in found] == [5, 5]
    assert [feature.geometry_type for feature in found] == ["Polygon", "Point"]


def test_one_and_one_point_zero_and_true_and_text_are_four_values():
    (tile,) = encode_tiles(
        columns([POINT] * 4, [TILE], properties=['{"v":1}', '{"v":1.0}', '{"v":true}', '{"v":"1"}']), ONE_LAYER
    )
    values = [feature.properties["v"] for feature in features_of(tile.data)]
    assert values == [1, 1.0, True, "1"]
    assert list(map(type, values)) == [int, float, bool, str]


def test_zero_keeps_its_sign_and_its_type():
    (tile,) = encode_tiles(columns([POINT] * 3, [TILE], properties=['{"v":0.0}', '{"v":-0.0}', '{"v":0}']), ONE_LAYER)
    first, second, third = (feature.properties["v"] for feature in features_of(tile.data))
    assert (math.copysign(1, first), math.copysign(1, second), third) == (1, -1, 0)
    assert type(third) is int


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9223372036854775807", (1 << 63) - 1),
        ("9223372036854775808", 1 << 63),
        ("18446744073709551615", (1 << 64) - 1),
        ("-9223372036854775808", -(1 << 63)),
        ("18446744073709551616", "18446744073709551616"),
        ("-9223372036854775809", "-9223372036854775809"),
        ("0.1", 0.1),
        ("16777217.0", 16777217.0),
        ("1e-300", 1e-300),
        ("1e400", "1e400"),
        ('{"b": [1, 2.5, null], "a": "é"}', '{"a":"é","b":[1,2.5,null]}'),
        ("[]", "[]"),
        ('"\\u0000"', "\0"),
        ('""', ""),
        ('"😀"', "😀"),
    ],
)
def test_values_are_exact(text: str, value: object):
    # With neighbours of the same and of other types, so that no column is all of one kind.
    rows = [f'{{"v": {text}}}', '{"v": 1}', '{"v": -1}', '{"v": 2.5}', '{"v": "x"}', f'{{"w": {text}}}']
    (tile,) = encode_tiles(columns([POINT] * len(rows), [TILE], properties=rows), ONE_LAYER)
    found = features_of(tile.data)
    assert found[0].properties == {"v": value}
    assert type(found[0].properties["v"]) is type(value)
    assert found[5].properties == {"w": value}
    assert [feature.properties["v"] for feature in found[1:5]] == [1, -1, 2.5, "x"]


def test_negative_zero_beside_a_number_too_large_for_an_integer():
    (tile,) = encode_tiles(columns([POINT] * 2, [TILE], properties=['{"v":-0.0}', f'{{"v":{1 << 64}}}']), ONE_LAYER)
    first, second = (feature.properties["v"] for feature in features_of(tile.data))
    assert (math.copysign(1, first), second) == (-1, str(1 << 64))


def test_an_id_of_thousands_of_digits_costs_nobody_else():
    tiles = encode_tiles(columns([POINT] * 2, [TILE, TILE.ancestor(13)], ids=["9" * 5_000, 7]), ONE_LAYER)
    assert [tile.features for tile in tiles] == [2, 2]
    assert [feature.id for feature in features_of(tiles[0].data)] == [7, None]


def test_null_leaves_the_key_out():
    (feature,) = features_of(encode_one(POINT, TILE, properties={"a": None, "b": 0, "c": None}).data)
    assert feature.properties == {"b": 0}
    (feature,) = features_of(encode_one(POINT, TILE, properties={"a": None}).data)
    assert feature.properties == {}


def test_text_that_is_no_unicode_is_shown_with_a_replacement():
    (tile,) = encode_tiles(columns([POINT], [TILE], properties=['{"v": "a\\ud800b"}']), ONE_LAYER)
    assert tile.left_out == ()
    assert features_of(tile.data)[0].properties["v"] == "a\ufffdb"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
PROPERTIES = st.dictionaries(
    st.sampled_from(["a", "b", "name", "é", "", "_id"]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    JSON,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(PROPERTIES, st.sampled_from(["a", "b"])), max_size=8),
    tiles=st.integers(1, 3),
)
def test_ids_and_attributes_survive_exactly(rows, tiles: int):
    layers = LayerSet((Layer("b"), Layer("a")))
    inside = [Tile(14, 9326 + number, 4738) for number in range(tiles)]
    at_border = lon_lat(inside[0], shapely.MultiPoint([(4096 * number + 9, 20) for number in range(tiles)]))
    encoded = encode_tiles(
        columns(
            [at_border] * len(rows), inside, properties=[own for own, _ in rows], layers=[layer for _, layer in rows]
        ),
        layers,
    )
    for tile in encoded:
        found = {
            feature.id: (layer.name, feature.properties) for layer in decode(tile.data) for feature in layer.features
        }
        assert len(found) == len(rows)
        for number, (own, layer) in enumerate(rows, start=1):
            name, got = found[number]
            assert name == layer
            expected = {key: value for key, value in own.items() if value is not None}
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                if isinstance(value, (list, dict)):
                    assert json.loads(got[key]) == value
                else:
                    assert type(got[key]) is type(value)
                    assert repr(got[key]) == repr(value)


def _city(seed: int, count: int) -> list[object]:
    random_ = np.random.default_rng(seed)
    result: list[object] = []
    for number in range(count):
        x, y = random_.uniform(-300, 8500, 2)
        w, h = random_.uniform(0.2, 900, 2)
        shapes = [
            shapely.box(x, y, x + w, y + h),
            shapely.Polygon(
                [(x, y), (x + w, y), (x + w, y + h / 3), (x + w / 3, y + h / 3), (x + w / 3, y + h), (x, y + h)]
            ),
            shapely.Point(x, y).buffer(w / 2).difference(shapely.Point(x, y).buffer(w / 5)),
            shapely.LineString(np.cumsum(random_.normal(0, w / 3, (40, 2)), axis=0) + np.array([x, y])),
            shapely.MultiPoint(random_.uniform(-300, 8500, (5, 2))),
            shapely.MultiPolygon([shapely.box(x, y, x + w, y + h), shapely.box(x + w + 3, y, x + w + 50, y + h)]),
        ]
        result.append(lon_lat(TILE, shapes[number % len(shapes)]))
    return result


def _subset(features: TileFeatures, rows: list[int], pairs: list[int], tiles: list[int]) -> TileFeatures:
    """The same features with rows, pairs and tiles in another order, or fewer of them."""
    new_row = {row: position for position, row in enumerate(rows)}
    new_tile = {tile: position for position, tile in enumerate(tiles)}
    kept = [
        pair for pair in pairs if int(features.pair_row[pair]) in new_row and int(features.pair_tile[pair]) in new_tile
    ]
    return TileFeatures(
        source=[features.source[row] for row in rows],
        feature_id=[features.feature_id[row] for row in rows],
        layer=[features.layer[row] for row in rows],
        geometry=[features.geometry[row] for row in rows],
        properties=[features.properties[row] for row in rows],
        tiles=[features.tiles[tile] for tile in tiles],
        pair_tile=np.array([new_tile[int(features.pair_tile[pair])] for pair in kept], np.int64),
        pair_row=np.array([new_row[int(features.pair_row[pair])] for pair in kept], np.int64),
    )


@pytest.mark.parametrize("seed", range(4))
def test_rule_6_row_order_pair_order_and_batch_do_not_show_in_the_bytes(seed: int):
    layers = LayerSet((Layer("a", simplify=1), Layer("b", simplify=0), Layer("c")))
    geometries = _city(seed, 90)
    random_ = random.Random(seed)
    ids = [random_.choice([number, f'"{number}"', -number - 1, number + 0.5]) for number in range(90)]
    properties = [
        {random_.choice("pqrs"): random_.choice([1, 1.0, True, "1", None, [1], number]) for _ in range(3)}
        for number in range(90)
    ]
    tiles = [
        TILE,
        *(Tile(14, 9326 + x, 4738 + y) for x in (0, 1) for y in (0, 1) if x + y),
        TILE.ancestor(12),
        TILE.ancestor(3),
    ]
    tiles += [Tile(16, TILE.x * 4 + x, TILE.y * 4 + 1) for x in range(4)] + [
        Tile(18, TILE.x * 16 + x, TILE.y * 16) for x in range(4)
    ]
    features = columns(
        geometries,
        tiles,
        ids=ids,
        properties=properties,
        layers=[random_.choice("abc") for _ in ids],
        sources=[random_.choice(["s", "t"]) for _ in ids],
    )
    together = encode_tiles(features, layers)
    assert sum(len(tile.data) > 0 for tile in together) > 8

    rows, pairs = list(range(90)), list(range(len(features.pair_row)))
    order = list(range(len(tiles)))
    for _ in range(3):
        random_.shuffle(rows)
        random_.shuffle(pairs)
        random_.shuffle(order)
        shuffled = encode_tiles(_subset(features, rows, pairs, order), layers)
        assert [tile.data for tile in shuffled] == [together[number].data for number in order]
        assert [tile.left_out for tile in shuffled] == [together[number].left_out for number in order]
    for number in range(len(tiles)):
        (alone,) = encode_tiles(_subset(features, rows, pairs, [number]), layers)
        assert alone == together[number]


def test_rule_6_where_a_batch_is_cut_does_not_show(monkeypatch: pytest.MonkeyPatch):
    tiles = [Tile(14, 9326 + x, 4738 + y) for x in range(3) for y in range(3)]
    features = columns(_city(9, 60), tiles)
    whole = encode_tiles(features, ONE_LAYER)
    monkeypatch.setattr("geo_assets.tiles.encode.CHUNK_COORDINATES", 500)
    assert encode_tiles(features, ONE_LAYER) == whole


def test_geometries_may_come_as_an_array():
    features = columns([SQUARE, LINE], [TILE])
    array = TileFeatures(
        features.source,
        features.feature_id,
        features.layer,
        np.array([SQUARE, LINE], object),
        features.properties,
        features.tiles,
        features.pair_tile,
        features.pair_row,
    )
    assert encode_tiles(array, ONE_LAYER) == encode_tiles(features, ONE_LAYER)


def test_the_projection_is_web_mercator_to_a_micrometre():
    latitudes = np.concatenate([np.linspace(-90, 90, 20_001), [0, 1e-12, -1e-12, 85.0511287798066, 60.17]])
    longitudes = np.linspace(-180, 180, len(latitudes))
    result = world(np.stack([longitudes, latitudes], axis=1))
    clamped = np.clip(latitudes, -85.0511287798066, 85.0511287798066)
    expected = [0.5 - math.asinh(math.tan(math.radians(latitude))) / math.tau for latitude in clamped]
    assert np.abs(result[:, 1] - expected).max() * 40_075_016 < 1e-6
    assert np.abs(result[:, 0] - (longitudes / 360 + 0.5)).max() == 0
    assert result[:, 1].min() >= 0
    assert result[:, 1].max() <= 1


def test_the_projection_agrees_with_proj():
    pyproj = pytest.importorskip("pyproj")
    random_ = np.random.default_rng(3)
    points = np.stack([random_.uniform(-180, 180, 5_000), random_.uniform(-85, 85, 5_000)], axis=1)
    x, y = pyproj.Transformer.from_crs(4326, 3857, always_xy=True).transform(points[:, 0], points[:, 1])
    result = world(points)
    half = 20037508.342789244
    assert np.abs((result[:, 0] * 2 - 1) * half - x).max() < 1e-6
    assert np.abs((1 - result[:, 1] * 2) * half - y).max() < 1e-6
