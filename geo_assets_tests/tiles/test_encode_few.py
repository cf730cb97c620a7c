"""A tile of few features that comes alone takes a way of its own: here it is held against the arrays' way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import geo_assets.tiles.encode as encode
from geo_assets.tiles.encode import TileFeatures, few, shapes
from geo_assets.tiles.encode.varint import VARINTS, varint
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets_tests.mvt_checker import violations
from geo_assets_tests.tiles.encoding import columns, lon_lat
from geo_assets_tests.tiles.test_encode import PROPERTIES
from geo_assets_tests.tiles.test_encode_geometry import ANY, ANY_COLLECTION

TILE = Tile(14, 9326, 4738)
LAYERS = LayerSet((Layer("a", simplify=2.0), Layer("b", simplify=0.0), Layer("c", attributes=("name", "_id", "é"))))

IDS = st.integers(-3, 3) | st.sampled_from(['"x"', '"1"', '""', "1.5", "007", "٣", "", str(1 << 64), "9" * 5_000])
WRONG = st.sampled_from(["[1]", "nonsense", '{"a": NaN}', '{"a": -0.0, "b": 0.0, "c": 0}', f'{{"a": {1 << 70}}}'])
LONG = st.integers(0, 5).map(
    lambda seed: shapely.LineString(np.random.default_rng(seed).normal(2000, 2500, (60, 2)).cumsum(axis=0) / 8)
)
EMPTY = st.sampled_from(["POINT EMPTY", "POLYGON EMPTY", "MULTIPOINT EMPTY", "LINESTRING EMPTY"]).map(shapely.from_wkt)
BROKEN = st.sampled_from([None, b"", b"\x01\x03", shapely.Point(float("nan"), 1), shapely.Point(1, float("inf"))])
GEOMETRY = st.one_of((ANY | ANY_COLLECTION | LONG | EMPTY).map(lambda each: lon_lat(TILE, each)), BROKEN)
ROW = st.tuples(
    GEOMETRY, IDS, PROPERTIES | WRONG, st.sampled_from("aabbccx"), st.sampled_from(["one", "two"]), st.booleans()
)


def arrays_way(features: TileFeatures, layers: LayerSet) -> encode.EncodedTile:
    """The tile as the arrays make it, geometries read and written by arrays too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few, "FEATURES", -1)
        patch.setattr(shapes, "FEW", -1)
        patch.setattr("geo_assets.tiles.encode.grid.FEW", -1)
        (tile,) = encode.encode_tiles(features, layers)
    return tile


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.lists(ROW, max_size=9),
    st.sampled_from([TILE, Tile(14, 9327, 4738), Tile(18, 149216, 75808), Tile(9, 291, 148), Tile(0, 0, 0)]),
    st.booleans(),
)
def test_rule_6_a_tile_of_few_features_has_the_same_bytes_by_both_ways(rows: list[Any], tile: Tile, shown_twice: bool):
    pairs = [(0, number) for number, row in enumerate(rows) if not row[5]]
    features = columns(
        [row[0] for row in rows],
        [tile],
        ids=[row[1] for row in rows],
        properties=[row[2] for row in rows],
        layers=[row[3] for row in rows],
        sources=[row[4] for row in rows],
        pairs=pairs * 2 if shown_twice else pairs[::-1],
    )
    (alone,) = encode.encode_tiles(features, LAYERS)
    assert alone == arrays_way(features, LAYERS)
    # Ids come twice on purpose here.
    assert [each for each in violations(alone.data) if " have id " not in each] == []


@pytest.mark.parametrize("count", [1, few.FEATURES, few.FEATURES + 1])
def test_rule_6_where_few_ends_does_not_show(count: int):
    random_ = random.Random(count)
    geometries: list[Any] = []
    for _ in range(count):
        x, y = random_.uniform(-200, 4200), random_.uniform(-200, 4200)
        size = random_.uniform(1, 300)
        court = shapely.box(x, y, x + size, y + size).difference(shapely.Point(x, y).buffer(size / 3))
        geometries.append(lon_lat(TILE, random_.choice([shapely.Point(x, y), court, court.exterior, court.buffer(9)])))
    features = columns(
        geometries,
        [TILE],
        layers=random_.choices("abc", k=count),
        properties=[{"name": random_.choice(["x", 1, 1.0, None, True]), "é": number} for number in range(count)],
    )
    (tile,) = encode.encode_tiles(features, LAYERS)
    assert tile == arrays_way(features, LAYERS)
    assert tile.left_out == ()
    assert violations(tile.data) == []


@given(st.integers(0, (1 << 64) - 1))
def test_varints_looked_up_are_those_calculated(value: int):
    assert VARINTS[value] == VARINTS.__getitem__(value) == varint(value)
