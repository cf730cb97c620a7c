from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import shapely
import shapely.affinity
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from geo_assets.tiles.encode import encode_tiles
from geo_assets.tiles.encode.grid import one_dent
from geo_assets.tiles.encode.shapes import POLYGON, Shapes
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets_tests.mvt_checker import violations
from geo_assets_tests.tiles.encoding import ONE_LAYER, as_shape, columns, encode_one, faults, features_of, lon_lat

TILE = Tile(14, 9326, 4738)
BOX = shapely.box(-64, -64, 4160, 4160)
SIMPLIFYING = LayerSet((Layer("things", min_pixels=0, simplify=2),))


def check(data: bytes) -> None:
    assert faults(data) == []
    assert violations(data) == []


# A few coordinates around the places where something happens: edges, corners, halves, almost-halves; so that random
# rings meet themselves and each other often.
_NEAR = [
    -4200.0,
    -64.5,
    -64.0,
    -63.4,
    -1.0,
    0.0,
    0.2,
    0.5,
    0.7,
    1.0,
    1.5,
    2.0,
    3.3,
    10.0,
    100.0,
    4095.5,
    4096.0,
    4160.0,
    4160.4,
    9000.0,
]
COORDINATE = st.sampled_from(_NEAR) | st.floats(-300, 4400).map(lambda value: round(value * 4) / 4)
VERTEX = st.tuples(COORDINATE, COORDINATE)
SCALE = st.sampled_from([1.0, 1.0, 0.01, 0.3, 5.0])
RING = st.lists(VERTEX, min_size=3, max_size=9)


def _polygon(shell: list[tuple[float, float]], holes: list[list[tuple[float, float]]], scale: float) -> Any:
    def scaled(ring: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x * scale, y * scale) for x, y in ring]

    return shapely.Polygon(scaled(shell), [scaled(hole) for hole in holes])


ANY_POLYGON = st.builds(_polygon, RING, st.lists(RING, max_size=2), SCALE)
ANY_LINE = st.builds(lambda line: shapely.LineString(line), st.lists(VERTEX, min_size=2, max_size=9))
ANY_POINT = st.builds(lambda points: shapely.MultiPoint(points), st.lists(VERTEX, min_size=1, max_size=5))
ANY_MULTI = st.builds(lambda parts: shapely.MultiPolygon(parts), st.lists(ANY_POLYGON, min_size=2, max_size=3))
ANY = st.one_of(ANY_POLYGON, ANY_LINE, ANY_POINT, ANY_MULTI)
ANY_COLLECTION = st.builds(lambda parts: shapely.GeometryCollection(parts), st.lists(ANY, max_size=3))

SETTINGS = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(st.lists(ANY | ANY_COLLECTION, min_size=1, max_size=4), st.sampled_from([ONE_LAYER, SIMPLIFYING]))
@example([shapely.Polygon([(0, 0), (10, 10), (10, 0), (0, 10)])], ONE_LAYER)
@example([shapely.Polygon([(0, 0), (10, 0), (10, 10), (0, 0), (0, 0)])], ONE_LAYER)
@example([shapely.Polygon([(0, 0), (9, 0), (9, 9), (5, 0), (0, 9)])], ONE_LAYER)
@example([shapely.box(0, 0, 9, 9).difference(shapely.box(0, 3, 4, 6)), shapely.box(0, 0, 0.2, 4096)], ONE_LAYER)
@example([shapely.Polygon([(0, 0), (90, 0), (90, 90), (0, 90)], [[(0, 0), (40, 5), (5, 40)]])], ONE_LAYER)
# A mended polygon and the point or line at which it touches the buffered square: snapped, its parts share a side.
@example(
    [
        shapely.MultiPolygon(
            [
                shapely.Polygon([(0.7, -291), (69.25, -295), (3.3, -64)]),
                shapely.Polygon(
                    [(-167, 1), (4096, 1), (18.75, 245.75), (289, 294.25)],
                    [[(0, -1), (-1, 172.75), (0.7, -280.5), (-64, 222.25), (-64, -195.75)]],
                ),
            ]
        )
    ],
    ONE_LAYER,
)
def test_whatever_comes_in_the_tile_keeps_the_specification(geometries: list[Any], layers: LayerSet):
    tiles = [
        TILE,
        Tile(14, 9327, 4738),
        Tile(13, 4663, 2369),
        Tile(9, 291, 148),
        Tile(18, 149216, 75808),
        Tile(0, 0, 0),
    ]
    for tile in encode_tiles(columns([lon_lat(TILE, each) for each in geometries], tiles), layers):
        check(tile.data)
        assert tile.left_out == ()


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=9))
@example([(0, 0), (6, 0), (6, 2), (2, 2), (2, 6), (0, 6)])
@example([(2, 2), (6, 2), (6, 6), (0, 6), (0, 0), (3, 0), (3, 1), (5, 1), (5, 5), (1, 5), (1, 1)])
def test_a_ring_with_one_inward_corner_that_sees_all_others_is_valid(ring: list[tuple[int, int]]):
    polygon = shapely.Polygon(ring)
    xy = np.array(ring, float)
    count = len(ring)
    area = float(np.sum(xy[:, 0] * np.roll(xy[:, 1], -1) - np.roll(xy[:, 0], -1) * xy[:, 1]))
    one = np.array([0, 1])
    item = Shapes(np.array([POLYGON]), one, np.array([True]), one * count, xy)
    (found,) = one_dent(item, np.array([area])).tolist()
    assert not found or polygon.is_valid
    event(f"found: {found}, valid: {polygon.is_valid}")
    if ring == [(0, 0), (6, 0), (6, 2), (2, 2), (2, 6), (0, 6)]:
        assert found


@SETTINGS
@given(ANY_POLYGON)
def test_a_valid_polygon_keeps_its_area(polygon: Any):
    polygon = shapely.make_valid(polygon, method="structure", keep_collapsed=False)
    tile = encode_one(lon_lat(TILE, polygon), TILE)
    expected = polygon.intersection(BOX)
    found = sum(as_shape(feature).area for feature in features_of(tile.data))
    # Every vertex moves by at most half a unit each way, so every edge sweeps at most 0.71 times its length (and ends).
    slack = 0.75 * expected.length + 2
    assert abs(found - expected.area) <= slack
    event(f"crosses the border: {not shapely.covers(BOX, polygon)}")
    for feature in features_of(tile.data):
        assert shapely.covers(BOX, as_shape(feature))


def _star(random: np.random.Generator, vertices: int, size: float, at: tuple[float, float]) -> Any:
    angle = np.sort(random.uniform(0, math.tau, vertices))
    radius = size * random.uniform(0.3, 1, vertices)
    return shapely.Polygon(np.stack([at[0] + radius * np.cos(angle), at[1] + radius * np.sin(angle)], axis=1))


@pytest.mark.parametrize("seed", range(30))
def test_large_jagged_polygons_clip_to_the_same_area_as_an_exact_intersection(seed: int):
    random = np.random.default_rng(seed)
    star = _star(
        random,
        int(random.integers(20, 800)),
        float(random.choice([900, 6_000, 40_000])),
        tuple(random.uniform(-2000, 6000, 2)),
    )
    holes = [_star(random, 40, 500, tuple(random.uniform(-500, 4500, 2))) for _ in range(4)]
    polygon = shapely.make_valid(star).difference(shapely.union_all(shapely.make_valid(np.array(holes))))
    assert polygon.is_valid
    tile = encode_one(lon_lat(TILE, polygon), TILE)
    check(tile.data)
    expected = polygon.intersection(BOX)
    found = sum(as_shape(feature).area for feature in features_of(tile.data))
    assert abs(found - expected.area) <= 0.5 * expected.length + 2
    if expected.area > 1000:
        drawn = shapely.union_all([as_shape(feature) for feature in features_of(tile.data)])
        assert drawn.symmetric_difference(expected).area <= 0.75 * expected.length + 2


def test_a_long_coastline_is_clipped_as_its_visible_part_is():
    random = np.random.default_rng(7)
    angle = np.linspace(0, math.tau, 60_001)[:-1]
    radius = 3_000 + 200 * np.sin(angle * 40) + random.normal(0, 0.5, len(angle))
    coast = shapely.Polygon(np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1))
    assert coast.is_valid
    for tile in (TILE, Tile(16, TILE.x * 4 + 2, TILE.y * 4), Tile(16, TILE.x * 4, TILE.y * 4)):
        factor = 1 << (tile.z - TILE.z)
        here, there = np.array([TILE.x, TILE.y]) * 4096, np.array([tile.x, tile.y]) * 4096
        placed = shapely.affinity.translate(coast, *here)
        placed = shapely.affinity.scale(placed, factor, factor, origin=(0, 0))
        placed = shapely.affinity.translate(placed, *-there)
        encoded = encode_one(lon_lat(TILE, coast), tile)
        check(encoded.data)
        expected = placed.intersection(BOX)
        found = sum(as_shape(feature).area for feature in features_of(encoded.data))
        assert abs(found - expected.area) <= 0.5 * expected.length + 2


@SETTINGS
@given(st.lists(VERTEX, min_size=2, max_size=12))
def test_a_line_is_drawn_where_it_runs_and_nowhere_else(vertices: list[tuple[float, float]]):
    line = shapely.LineString(vertices)
    tile = encode_one(lon_lat(TILE, line), TILE)
    check(tile.data)
    inside = line.intersection(BOX)
    for feature in features_of(tile.data):
        # Along the way too, not at the vertices alone. (Buffering the line will not do: it loses tips of closed lines.)
        along = shapely.points(shapely.get_coordinates(as_shape(feature).segmentize(50)))
        assert shapely.distance(along, line).max() < 0.75
    drawn = shapely.union_all([as_shape(feature) for feature in features_of(tile.data)]).buffer(1.5)
    # What is shorter than a unit may round to a point, which is no line; what runs on the border may be on either side.
    border = BOX.exterior.buffer(1e-6)
    for part in shapely.get_parts(inside):
        assert part.length < 1.5 or shapely.covers(border, part) or shapely.covers(drawn, part)


@given(x=st.floats(-200, 4300), y=st.floats(-200, 4300))
def test_points_show_within_the_buffered_box(x: float, y: float):
    assume(min(abs(edge - value) for edge in (-64, 4160) for value in (x, y)) > 1e-3)
    tile = encode_one(lon_lat(TILE, shapely.Point(x, y)), TILE)
    inside = -64 <= x <= 4160 and -64 <= y <= 4160
    assert len(features_of(tile.data)) == inside
    if inside:
        ((px, py),) = features_of(tile.data)[0].paths[0]
        assert abs(px - x) <= 0.5001
        assert abs(py - y) <= 0.5001


def test_a_point_on_a_corner_shows_in_four_tiles():
    corner = lon_lat(TILE, shapely.Point(0, 0))
    tiles = [Tile(14, TILE.x + x, TILE.y + y) for x in (-2, -1, 0, 1) for y in (-2, -1, 0, 1)]
    shown = {
        tile.tile: features_of(tile.data)[0].paths[0][0]
        for tile in encode_tiles(columns([corner], tiles), ONE_LAYER)
        if tile.data
    }
    assert shown == {
        Tile(14, TILE.x - 1, TILE.y - 1): (4096, 4096),
        Tile(14, TILE.x, TILE.y - 1): (0, 4096),
        Tile(14, TILE.x - 1, TILE.y): (4096, 0),
        TILE: (0, 0),
    }


def test_neighbouring_tiles_draw_a_shared_line_alike():
    line = lon_lat(TILE, shapely.LineString([(4000, 10), (4050.3, 17.4), (4100.6, 90.2), (4150, 10)]))
    left, right = (
        features_of(tile.data)[0].paths[0]
        for tile in encode_tiles(columns([line], [TILE, Tile(14, TILE.x + 1, TILE.y)]), ONE_LAYER)
    )
    assert (4050, 17) in left
    assert [(x - 4096, y) for x, y in left if x > 4096 - 60] == [(x, y) for x, y in right if x > -60]


def test_points_of_a_multipoint_that_fall_together_are_one():
    (feature,) = features_of(
        encode_one(lon_lat(TILE, shapely.MultiPoint([(1, 1), (5, 5), (1.2, 0.9), (5, 5)])), TILE).data
    )
    assert feature.paths == (((1, 1),), ((5, 5),))


def test_a_polygon_that_collapses_at_a_low_zoom_is_dropped_and_is_no_fault():
    building = lon_lat(TILE, shapely.box(100, 100, 103, 104))
    for zoom in range(11):
        tile = encode_one(building, TILE.ancestor(zoom))
        assert (tile.data, tile.left_out) == (b"", ())


def test_a_hole_that_collapses_goes_and_its_polygon_stays():
    ring = shapely.box(0, 0, 100, 100).difference(shapely.box(50, 50, 50.3, 50.3))
    (feature,) = features_of(encode_one(lon_lat(TILE, ring), TILE).data)
    assert len(feature.paths) == 1


def test_a_shell_that_collapses_takes_its_holes_with_it_and_leaves_other_parts():
    sliver = shapely.Polygon([(0, 0), (0.4, 0), (0.4, 90), (0, 90)], [[(0.1, 10), (0.2, 10), (0.2, 20)]])
    (feature,) = features_of(
        encode_one(lon_lat(TILE, shapely.MultiPolygon([sliver, shapely.box(50, 50, 60, 60)])), TILE).data
    )
    assert len(feature.paths) == 1
    assert as_shape(feature).area == 100


def test_what_only_touches_the_buffered_box_is_not_drawn():
    beside = lon_lat(TILE, shapely.box(4160, 0, 5000, 50))
    tile = encode_one(beside, TILE)
    assert tile.left_out == ()
    assert all(as_shape(feature).area > 0 for feature in features_of(tile.data))
    check(tile.data)


def test_a_polygon_that_covers_the_tile_fills_its_buffered_box():
    (feature,) = features_of(encode_one(lon_lat(TILE, shapely.box(-9000, -9000, 9000, 9000)), TILE).data)
    assert as_shape(feature).equals(BOX)


@pytest.mark.parametrize("reverse", [False, True])
def test_winding_is_the_tiles_whatever_it_was(reverse: bool):
    ring = [(0, 0), (100, 0), (100, 100), (0, 100), (0, 0)]
    hole = [(20, 20), (40, 20), (40, 40), (20, 40), (20, 20)]
    polygon = shapely.Polygon(ring[::-1] if reverse else ring, [hole if reverse else hole[::-1]])
    (feature,) = features_of(encode_one(lon_lat(TILE, polygon), TILE).data)
    areas = [sum(a[0] * b[1] - b[0] * a[1] for a, b in pairwise(path)) / 2 for path in feature.paths]
    assert areas == [10_000, -400]


@pytest.mark.parametrize("zoom", [0, 1, 5])
def test_the_poles_are_in_the_first_and_the_last_row(zoom: int):
    side = 1 << zoom
    north, south = Tile(zoom, 0, 0), Tile(zoom, 0, side - 1)
    tiles = encode_tiles(columns([shapely.Point(-180, 90), shapely.Point(-180, -90)], [north, south]), ONE_LAYER)
    assert (0, 0) in [feature.paths[0][0] for feature in features_of(tiles[0].data)]
    assert (0, 4096) in [feature.paths[0][0] for feature in features_of(tiles[1].data)]


def test_a_polygon_around_the_pole_ends_at_the_edge_of_the_map():
    cap = shapely.Polygon([(-180, 70), (-60, 75), (60, 70), (180, 72), (180, 90), (-180, 90)])
    (tile,) = encode_tiles(columns([cap, shapely.box(10, 86, 20, 89)], [Tile(0, 0, 0)]), ONE_LAYER)
    check(tile.data)
    (feature,) = features_of(tile.data)
    assert tile.left_out == ()
    assert min(y for path in feature.paths for _, y in path) == 0


def test_nothing_wraps_around_the_date_line():
    edge = shapely.box(179, 10, 180, 11)
    west, east = encode_tiles(columns([edge], [Tile(3, 0, 3), Tile(3, 7, 3)]), ONE_LAYER)
    assert west.data == b""
    (feature,) = features_of(east.data)
    assert max(x for path in feature.paths for x, _ in path) == 4096


def test_the_whole_world_is_one_square_at_every_zoom():
    world = shapely.box(-180, -90, 180, 90)
    for zoom in (0, 3, 22):
        (tile,) = encode_tiles(columns([world], [Tile(zoom, 0, 0)]), ONE_LAYER)
        check(tile.data)
        assert as_shape(features_of(tile.data)[0]).area >= 4096**2


def test_simplification_takes_vertices_below_the_deepest_zoom_and_none_at_it():
    angle = np.linspace(0, math.tau, 400)
    circle = lon_lat(
        TILE, shapely.Polygon(np.stack([2000 + 1000 * np.cos(angle), 2000 + 1000 * np.sin(angle)], axis=1))
    )
    coarse = LayerSet((Layer("things", simplify=1.0),), max_zoom=14)
    all_of_it = features_of(encode_one(circle, TILE, coarse).data)[0]
    above = features_of(encode_one(circle, TILE.ancestor(13), coarse).data)[0]
    exact = features_of(encode_one(circle, TILE.ancestor(13), ONE_LAYER).data)[0]
    assert len(all_of_it.paths[0]) == 400
    assert len(above.paths[0]) < 60 < len(exact.paths[0])
    # One pixel of 256 is 16 units.
    assert as_shape(above).hausdorff_distance(as_shape(exact)) <= 17


@pytest.mark.parametrize("seed", range(10))
def test_simplified_polygons_stay_valid(seed: int):
    random = np.random.default_rng(seed)
    stars = [_star(random, 300, 1500, tuple(random.uniform(0, 4096, 2))) for _ in range(5)]
    stars = [star.difference(star.centroid.buffer(200)) for star in map(shapely.make_valid, stars)]
    tiles = [TILE, TILE.ancestor(12), TILE.ancestor(10), *TILE.children()]
    for tile in encode_tiles(columns([lon_lat(TILE, star) for star in stars], tiles), SIMPLIFYING):
        check(tile.data)
        assert tile.left_out == ()


def test_a_random_tile_anywhere_draws_what_lies_in_its_middle():
    random = np.random.default_rng(11)
    for zoom in range(23):
        side = 1 << zoom
        tile = Tile(zoom, int(random.integers(0, side)), int(random.integers(0, side)))
        (feature,) = features_of(encode_one(lon_lat(tile, shapely.box(1000.3, 1000.3, 3000.2, 2000.2)), tile).data)
        assert as_shape(feature).equals(shapely.box(1000, 1000, 3000, 2000))
