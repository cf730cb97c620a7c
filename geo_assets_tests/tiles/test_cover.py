"""The cover against brute force: every tile of a zoom as a box, held against the geometry by GEOS."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from shapely import (
    Geometry,
    GeometryCollection,
    LinearRing,
    LineString,
    MultiLineString,
    MultiPoint,
    MultiPolygon,
    Point,
    Polygon,
)
from shapely import box as square

from geo_assets.tiles.cover import CoverError, cover, cover_count, covers
from geo_assets.tiles.encode import TileFeatures, encode_tiles
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.zooms import buffered_boxes, tile_box, to_degrees, to_mercator

BUFFER = 1 / 64
Tiles = set[tuple[int, int]]


def brute_force(geometry: Geometry, zoom: int, buffer: float, near: Geometry | None = None) -> Tiles:
    """Every tile of the zoom, or those around the box of `near`, one by one."""
    side = 1 << zoom
    columns = rows = np.arange(side)
    if near is not None:
        west, south, east, north = (to_mercator(np.reshape(near.bounds, (2, 2))).ravel() / 20037508.342789244).tolist()
        columns = np.arange(max(0, int((west + 1) / 2 * side) - 3), min(side, int((east + 1) / 2 * side) + 4))
        rows = np.arange(max(0, int((1 - north) / 2 * side) - 3), min(side, int((1 - south) / 2 * side) + 4))
    x, y = (values.ravel() for values in np.meshgrid(columns, rows))
    boxes = shapely.box(*buffered_boxes(zoom, x, y, buffer).T)
    touched = shapely.intersects(boxes, shapely.transform(geometry, to_mercator))
    return set(zip(x[touched].tolist(), y[touched].tolist(), strict=True))


def covered(geometry: Geometry, zoom: int, buffer: float) -> Tiles:
    tiles = cover(geometry, [zoom], buffer=buffer).by_zoom[zoom].tolist()
    assert len(set(map(tuple, tiles))) == len(tiles), "no tile twice"
    return set(map(tuple, tiles))


# -- random geometry -------------------------------------------------------------------------------------------------


def star(center: np.ndarray, radii: np.ndarray) -> Polygon:
    """A valid ring around a center: one vertex in each direction."""
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    return Polygon(center + np.stack((np.cos(angles), np.sin(angles)), axis=1) * radii[:, None])


def random_geometry(rng: np.random.Generator) -> Geometry:
    center = rng.uniform((-175, -84), (175, 84))
    radius = 10 ** rng.uniform(-3, 2)
    points = center + rng.normal(size=(rng.integers(3, 14), 2)) * radius
    ring = star(center, rng.uniform(0.3, 1, rng.integers(3, 40)) * radius)
    makers: list[Callable[[], Geometry]] = [
        lambda: Point(center),
        lambda: MultiPoint(points),
        lambda: LineString(points),
        lambda: MultiLineString([points[:2], points[1:]]),
        lambda: LinearRing(points),
        lambda: ring,
        lambda: ring.difference(star(center, rng.uniform(0.1, 0.25, 9) * radius)),
        lambda: MultiPolygon(
            [star(center + radius * np.array((2.5 * i, 0)), rng.uniform(0.3, 1, 7) * radius) for i in range(3)]
        ),
        lambda: MultiPolygon(
            [star(center + radius * np.array((2.1 * i, 0)), rng.uniform(0.3, 1, 5) * radius) for i in range(20)]
        ),
        lambda: GeometryCollection(
            [ring, LineString(points), Point(points[0]), GeometryCollection([MultiPoint(points)])]
        ),
        lambda: GeometryCollection([ring, shapely.affinity.scale(ring, 0.5, 0.9)]),
        lambda: shapely.convex_hull(MultiPoint(points)),
    ]
    geometry = makers[int(rng.integers(len(makers)))]()
    # Ends at the date line and at the poles, as everything does that ingest lets in.
    return shapely.transform(geometry, lambda c: np.clip(c, (-180, -90), (180, 90)))


@pytest.mark.parametrize("seed", range(8))
def test_the_cover_of_random_geometry_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(75):
        geometry = random_geometry(rng)
        buffer = float(rng.choice([0, BUFFER, 0.1, 0.5, 1.5]))
        found = cover(geometry, range(7), buffer=buffer)
        for zoom in range(7):
            tiles = set(map(tuple, found.by_zoom[zoom].tolist()))
            assert tiles == brute_force(geometry, zoom, buffer), (zoom, buffer, geometry.wkt)


@pytest.mark.parametrize("seed", range(8, 12))
def test_the_cover_of_small_geometry_at_deep_zooms_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        zoom = int(rng.integers(10, 23))
        spread = 360 / (1 << zoom) * rng.uniform(0.1, 10)
        center = rng.uniform((-170, -80), (170, 80))
        shape = random_geometry(rng)
        middle = np.array(shape.envelope.centroid.coords[0])
        size = max(np.ptp(np.reshape(shape.bounds, (2, 2)), axis=0).max(), 1e-9)
        geometry = shapely.transform(shape, lambda c: center + (c - middle) / size * spread)  # noqa: B023
        assert covered(geometry, zoom, BUFFER) == brute_force(geometry, zoom, BUFFER, near=geometry), geometry.wkt


on_grid = st.builds(lambda i, j: (i * 360 / 32 - 180, j * 170 / 32 - 85), st.integers(0, 32), st.integers(0, 32))
corner = st.builds(
    lambda z, i, j: tuple(
        to_degrees(np.array([(i / 2**z * 2 - 1, 1 - j / 2**z * 2)]) * 20037508.342789244)[0].tolist()
    ),
    st.just(5),
    st.integers(0, 32),
    st.integers(0, 32),
)
anywhere = st.tuples(st.floats(-180, 180), st.floats(-90, 90))
vertex = st.one_of(on_grid, corner, anywhere)


@given(st.lists(vertex, min_size=2, max_size=8), st.integers(0, 6), st.sampled_from([0, BUFFER, 0.25, 0.5]))
@settings(max_examples=250, deadline=None)
def test_lines_through_corners_and_along_borders(vertices: list[tuple[float, float]], zoom: int, buffer: float) -> None:
    line = LineString(vertices)
    assert covered(line, zoom, buffer) == brute_force(line, zoom, buffer)


@given(
    st.lists(vertex, min_size=3, max_size=7, unique=True), st.integers(0, 6), st.sampled_from([0, BUFFER, 0.25, 0.5])
)
@settings(max_examples=250, deadline=None)
def test_polygons_with_edges_on_borders(vertices: list[tuple[float, float]], zoom: int, buffer: float) -> None:
    polygon = shapely.convex_hull(MultiPoint(vertices))
    assert covered(polygon, zoom, buffer) == brute_force(polygon, zoom, buffer)


@given(st.lists(vertex, min_size=4, max_size=9), st.integers(0, 5))
@settings(max_examples=250, deadline=None)
def test_any_ring_at_all_is_covered_by_its_edges_and_the_even_odd_rule(
    vertices: list[tuple[float, float]], zoom: int
) -> None:
    polygon = Polygon(vertices)
    found = covered(polygon, zoom, BUFFER)
    edges = brute_force(LineString(polygon.exterior.coords), zoom, BUFFER)
    assert edges <= found
    drawn = shapely.transform(polygon, to_mercator)
    for x, y in itertools.product(range(1 << zoom), repeat=2):
        if (x, y) not in edges:
            west, south, east, north = buffered_boxes(zoom, [x], [y], BUFFER)[0]
            assert ((x, y) in found) == odd_crossings(drawn, (west + east) / 2, (south + north) / 2)


def odd_crossings(polygon: Polygon, x: float, y: float) -> bool:
    """Whether a ray from the point to the east crosses the ring an odd number of times."""
    ring = np.array(polygon.exterior.coords)
    (x0, y0), (x1, y1) = ring[:-1].T, ring[1:].T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        crosses = ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) / (y1 - y0) * (x1 - x0))
    return bool(crosses.sum() % 2)


# -- awkward geometry ------------------------------------------------------------------------------------------------


def test_a_point_on_a_corner_touches_four_tiles() -> None:
    tile = Tile(14, 9327, 4741)
    point = Point(tile.bounds.west, tile.bounds.north)
    assert covered(point, 14, BUFFER) == {(9326, 4740), (9327, 4740), (9326, 4741), (9327, 4741)}


def test_a_point_on_a_corner_touches_four_closed_boxes_without_buffer() -> None:
    assert covered(Point(0, 0), 1, 0) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert covered(Point(0, 0), 22, 0) == {(x, y) for x in (2097151, 2097152) for y in (2097151, 2097152)}


def test_a_point_inside_of_a_tile_touches_that_tile_alone() -> None:
    assert (
        covered(Point(24.94, 60.17), 14, BUFFER)
        == {(9327, 4742)}
        == brute_force(Point(24.94, 60.17), 14, BUFFER, near=Point(24.94, 60.17))
    )


def test_a_point_in_the_buffer_of_a_neighbour_touches_both() -> None:
    box = Tile(10, 500, 500).bounds
    width = box.east - box.west
    middle = (box.south + box.north) / 2
    assert covered(Point(box.east - width / 100, middle), 10, BUFFER) == {(500, 500), (501, 500)}
    assert covered(Point(box.east - width / 50, middle), 10, BUFFER) == {(500, 500)}


@pytest.mark.parametrize(("latitude", "row"), [(90, 0), (85.06, 0), (85.0511287798066, 0), (-90, 15), (-85.06, 15)])
def test_a_pole_is_in_the_first_or_the_last_row(latitude: float, row: int) -> None:
    assert covered(Point(11, latitude), 4, BUFFER) == {(8, row)}


def test_a_polygon_beyond_web_mercator_is_in_the_first_row() -> None:
    assert covered(square(-10, 86, 10, 90), 4, BUFFER) == {(7, 0), (8, 0)}
    assert covered(square(-180, -90, 180, -85.5), 2, BUFFER) == {(x, 3) for x in range(4)}
    assert covered(Polygon([(1, 80), (2, 90), (3, 80)]), 4, BUFFER) == brute_force(
        Polygon([(1, 80), (2, 90), (3, 80)]), 4, BUFFER
    )


def test_nothing_wraps_around_the_world() -> None:
    assert covered(Point(180, 10), 3, BUFFER) == {(7, 3)}
    assert covered(Point(-180, 10), 3, BUFFER) == {(0, 3)}
    assert covered(square(179, 10, 180, 11), 8, 0.5) == brute_force(square(179, 10, 180, 11), 8, 0.5)
    assert min(x for x, _ in covered(square(179, 10, 180, 11), 8, 0.5)) > 250


def test_a_geometry_split_at_the_date_line_is_two_parts() -> None:
    split = MultiPolygon([square(179, -18, 180, -16), square(-180, -18, -178, -16)])
    assert covered(split, 7, BUFFER) == covered(split.geoms[0], 7, BUFFER) | covered(split.geoms[1], 7, BUFFER)
    assert covered(split, 7, BUFFER) == brute_force(split, 7, BUFFER)


def test_the_whole_world_touches_every_tile() -> None:
    world = square(-180, -90, 180, 90)
    assert len(cover(world, range(6), buffer=BUFFER)) == sum(4**zoom for zoom in range(6))


def test_a_hole_larger_than_tiles_is_not_covered() -> None:
    ring = square(-60, -60, 60, 60).difference(square(-40, -40, 40, 40))
    found = covered(ring, 5, BUFFER)
    assert (16, 16) not in found
    assert found == brute_force(ring, 5, BUFFER)


def test_polygons_that_overlap_in_a_collection_do_not_cancel_each_other() -> None:
    both = GeometryCollection([square(-40, -40, 40, 40), square(-30, -30, 60, 60)])
    assert covered(both, 5, BUFFER) == brute_force(both, 5, BUFFER)
    assert (16, 16) in covered(MultiPolygon([square(-40, -40, 40, 40), square(-30, -30, 60, 60)]), 5, BUFFER)


def test_an_edge_on_the_border_of_a_tile_touches_both_sides() -> None:
    box = Tile(6, 20, 20).bounds
    found = covered(square(*box), 6, BUFFER)
    assert found == {(x, y) for x in (19, 20, 21) for y in (19, 20, 21)}


@pytest.mark.parametrize(
    "geometry",
    [
        square(10, 10, 10, 10),
        Polygon([(10, 10), (11, 10), (12, 10), (10, 10)]),
        LineString([(10, 10), (10, 10)]),
        Polygon([(10, 10), (10, 10), (10, 10), (10, 10)]),
        Polygon([(0, 0), (10, 10), (10, 0), (0, 10)]),
        Polygon([(0, 0), (10, 0), (10, 10), (5, 10), (5, 20), (5, 10), (0, 10)]),
        MultiPoint([(1, 1), (1, 1), (2, 2)]),
    ],
    ids=["no area", "flat", "line without length", "one place", "bow-tie", "spike", "same point twice"],
)
def test_degenerate_and_invalid_geometry_is_covered_and_breaks_nothing(geometry: Geometry) -> None:
    for zoom in (0, 3, 6):
        assert covered(geometry, zoom, BUFFER) == brute_force(geometry, zoom, BUFFER)


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("there_and_back", ["N E", "E N", "E W", "N S"])
def test_a_ring_along_two_axes_and_back_is_no_more_than_its_edges(there_and_back: str, turn: int) -> None:
    # GEOS takes such a ring for its bounding box.
    step = {"N": (0, 30), "E": (40, 0), "S": (0, -30), "W": (-40, 0)}
    one, two = (step[each] for each in there_and_back.split())
    ring = [one, (0, 0), two, (0, 0)]
    ring = [(x + 10, y + 10) for x, y in ring[turn:] + ring[:turn]]
    polygon = Polygon(ring)
    for geometry in (polygon, GeometryCollection([Point(10, 10), polygon])):
        for zoom in (2, 5, 7):
            assert covered(geometry, zoom, BUFFER) == brute_force(LineString([*ring, ring[0]]), zoom, BUFFER)


def test_a_hole_that_leaves_its_shell_still_touches_the_tiles_along_it() -> None:
    hole = [(0, 0), (30, 5), (5, 30), (0, 0)]
    polygon = Polygon([(0, 0), (20, 0), (20, 20), (0, 20)], [hole])
    assert covered(polygon, 6, BUFFER) >= brute_force(LineString(hole), 6, BUFFER) | brute_force(polygon, 6, BUFFER)


@pytest.mark.parametrize(
    "geometry",
    [None, Point(), Polygon(), GeometryCollection(), MultiPolygon(), GeometryCollection([Point(), LineString()])],
)
def test_no_geometry_touches_nothing(geometry: Geometry | None) -> None:
    found = cover(geometry, [0, 5], buffer=BUFFER)
    assert len(found) == 0
    assert found.keys() == []
    assert found.zooms_left == ()
    assert cover_count(geometry, [0, 5], buffer=BUFFER).total == 0


def test_a_third_coordinate_does_not_matter() -> None:
    assert covered(LineString([(1, 1, 50), (20, 30, math.nan)]), 4, 0) == covered(LineString([(1, 1), (20, 30)]), 4, 0)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("coordinate", [(math.inf, 0), (0, -math.inf), (math.nan, 0.0)])
def test_a_coordinate_that_is_not_finite_is_refused(coordinate: tuple[float, float]) -> None:
    with pytest.raises(CoverError, match="not a finite number"):
        cover(LineString([(0, 0), coordinate]), [3], buffer=0)


def test_zooms_and_buffers_outside_their_range_are_refused() -> None:
    with pytest.raises(CoverError, match=r"zooms 3\.\.23"):
        cover(Point(0, 0), [3, 23], buffer=0)
    with pytest.raises(CoverError, match=r"buffer 1\.6 is outside 0\.\.1\.5"):
        cover(Point(0, 0), [3], buffer=1.6)
    with pytest.raises(CoverError, match=r"zooms -1\.\.-1"):
        covers([Point(0, 0)], -1, 2, buffer=0)
    assert len(cover(Point(0, 0), [], buffer=0)) == 0


# -- what the store looks for is never less than what the cover touches ----------------------------------------------


@given(st.lists(vertex, min_size=1, max_size=4), st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_rule_3_whoever_touches_a_tile_meets_its_box_in_degrees(vertices: list[tuple[float, float]], zoom: int) -> None:
    shape = MultiPoint(vertices)
    west, south, east, north = shape.bounds
    for x, y in covered(shape, zoom, BUFFER):
        box = tile_box(Tile(zoom, x, y), BUFFER)
        assert west <= box.east
        assert east >= box.west
        assert south <= box.north
        assert north >= box.south


@pytest.mark.parametrize("pixels", [0, 0.5, 4, 16])
def test_rule_3_nothing_is_drawn_in_a_tile_beyond_the_reach_of_a_feature(pixels: float) -> None:
    layers = LayerSet((Layer("lines", simplify=pixels),), max_zoom=18)
    rng = np.random.default_rng(11)
    side = 360 / (1 << 12)
    for number in range(40):
        along = np.linspace(0, 1, 60)[:, None] * rng.uniform(-3, 3, 2) * side
        wave = LineString((24.9, 60.15) + along + rng.normal(size=(60, 2)) * side / 256 * pixels)
        shape = wave if number % 2 else wave.buffer(side / 50)
        reached = set(cover(shape, [12], buffer=layers.reach_fraction).keys())
        around = cover(shape.envelope, [12], buffer=0.5).by_zoom[12].tolist()
        tiles = [Tile(12, x, y) for x, y in around]
        rows = TileFeatures(
            ["test"], ["1"], ["lines"], [shapely.to_wkb(shape)], ["{}"], tiles,
            np.arange(len(tiles)), np.zeros(len(tiles), dtype=np.int64),
        )  # fmt: skip
        drawn = {encoded.tile.key for encoded in encode_tiles(rows, layers) if encoded.data}
        assert drawn <= reached


# -- caps ------------------------------------------------------------------------------------------------------------


def test_rule_7_the_zooms_that_fit_are_complete_and_the_deepest_are_left() -> None:
    town = square(24.8, 60.1, 25.2, 60.3)
    free = cover(town, range(8, 19), buffer=BUFFER)
    capped = cover(town, range(8, 19), buffer=BUFFER, cap=2_000)
    assert capped.zooms_left == (16, 17, 18)
    assert len(capped) <= 2_000 < len(capped) + len(free.by_zoom[16])
    assert list(capped.by_zoom) == list(range(8, 16))
    assert all((capped.by_zoom[zoom] == free.by_zoom[zoom]).all() for zoom in capped.by_zoom)


@given(
    st.integers(0, 3_000),
    st.integers(0, 2**32 - 1),
    st.sets(st.integers(0, 6), min_size=1),
    st.sampled_from([0, BUFFER, 0.5, 1.5]),
)
@settings(max_examples=150, deadline=None)
def test_rule_7_a_cap_leaves_exactly_what_does_not_fit(cap: int, seed: int, zooms: set[int], buffer: float) -> None:
    geometry = random_geometry(np.random.default_rng(seed))
    free, capped = cover(geometry, zooms, buffer=buffer), cover(geometry, zooms, buffer=buffer, cap=cap)
    total = 0
    fitting: list[int] = []
    for zoom in sorted(zooms):
        total += len(free.by_zoom[zoom])
        if total > cap:
            break
        fitting.append(zoom)
    assert list(capped.by_zoom) == fitting
    assert capped.zooms_left == tuple(sorted(zooms - set(fitting)))


def test_rule_7_a_cap_stops_a_continent_before_it_is_spread_out() -> None:
    started = time.process_time()
    found = cover(square(-170, -80, 170, 80), [22], buffer=BUFFER, cap=2_000)
    assert found.zooms_left == (22,)
    outline = cover(LineString([(-170, -80), (170, 80), (-170, 80), (170, -80)]), [22], buffer=BUFFER, cap=2_000)
    assert outline.zooms_left == (22,)
    assert time.process_time() - started < 10


# -- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 50])
def test_many_covers_are_those_of_each_geometry_alone(cap: int | None) -> None:
    rng = np.random.default_rng(5)
    shapes: list[Geometry | None] = [random_geometry(rng) for _ in range(60)]
    shapes += [None, Point()]
    first = rng.integers(0, 7, len(shapes))
    last = rng.integers(0, 7, len(shapes))
    found = covers(shapes, first, last, buffer=BUFFER, cap=cap)
    rows = list(zip(found.feature.tolist(), found.zoom.tolist(), found.x.tolist(), found.y.tolist(), strict=True))
    assert len(set(rows)) == len(rows)
    assert found.keys() == [Tile(z, x, y).key for _, z, x, y in rows]
    for index, shape in enumerate(shapes):
        alone = cover(shape, range(int(first[index]), int(last[index]) + 1), buffer=BUFFER, cap=cap)
        assert {Tile(z, x, y).key for i, z, x, y in rows if i == index} == set(alone.keys())
        if first[index] <= last[index]:
            assert found.complete_to[index] == (alone.zooms_left[0] - 1 if alone.zooms_left else last[index])


small = st.builds(
    lambda middle, shifts: [(middle[0] + dx, middle[1] + dy) for dx, dy in shifts],
    corner,
    st.lists(
        st.tuples(*[st.sampled_from((-2e-3, -1e-9, 0.0, 1e-9, 1e-4, 2e-3, 0.17578125, 0.4))] * 2),
        min_size=1,
        max_size=6,
    ),
)
"""Vertices at, or a hair from, the corners of tiles, or some tiles away."""


@given(st.lists(small, min_size=1, max_size=3), st.integers(0, 6), st.integers(0, 9), st.sampled_from([0, BUFFER, 0.5]))
@settings(max_examples=150, deadline=None)
def test_a_few_small_geometries_are_covered_as_each_is_alone(
    vertices: list[list[tuple[float, float]]], first: int, last: int, buffer: float
) -> None:
    shapes = [LineString(one) if len(one) > 1 else Point(one[0]) for one in vertices]
    shapes += [shapely.convex_hull(shape) for shape in shapes]
    for cap in (None, 3):
        found = covers(shapes, first, last, buffer=buffer, cap=cap)
        rows = list(zip(found.feature.tolist(), found.keys(), strict=True))
        assert len(set(rows)) == len(rows)
        for index, shape in enumerate(shapes):
            alone = cover(shape, range(first, last + 1), buffer=buffer, cap=cap)
            assert {key for i, key in rows if i == index} == set(alone.keys()), shape.wkt
            if first <= last:
                assert found.complete_to[index] == (alone.zooms_left[0] - 1 if alone.zooms_left else last)


@pytest.mark.parametrize("cap", [None, 50])
@pytest.mark.parametrize("seed", range(6))
def test_a_few_covers_are_those_of_each_geometry_alone(seed: int, cap: int | None) -> None:
    rng = np.random.default_rng(seed)
    shapes: list[Geometry | None] = [random_geometry(rng) for _ in range(9)]
    shapes += [None, Point(), GeometryCollection()]
    found = covers(shapes, 2, 7, buffer=BUFFER, cap=cap)
    rows = list(zip(found.feature.tolist(), found.keys(), strict=True))
    for index, shape in enumerate(shapes):
        alone = cover(shape, range(2, 8), buffer=BUFFER, cap=cap)
        assert {key for i, key in rows if i == index} == set(alone.keys())
        assert found.complete_to[index] == (alone.zooms_left[0] - 1 if alone.zooms_left else 7)


def test_no_geometries_have_no_covers() -> None:
    found = covers([], 0, 5, buffer=BUFFER)
    assert found.keys() == []
    assert found.complete_to.tolist() == []


def test_more_edges_than_descend_at_once_are_covered_in_pieces() -> None:
    rng = np.random.default_rng(3)
    shapes = [star(rng.uniform((-170, -80), (170, 80)), rng.uniform(0.3, 1, 3_000)) for _ in range(150)]
    found = covers(shapes, 6, 7, buffer=BUFFER)
    assert set(found.feature.tolist()) == set(range(150))
    for index in (0, 70, 149):
        keys = {key for key, feature in zip(found.keys(), found.feature.tolist(), strict=True) if feature == index}
        assert keys == set(cover(shapes[index], [6, 7], buffer=BUFFER).keys())


# -- widths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_width_is_the_number_of_tiles(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(20):
        geometry = random_geometry(rng)
        found = cover(geometry, [0, 2, 5, 6], buffer=BUFFER)
        width = cover_count(geometry, [0, 2, 5, 6], buffer=BUFFER)
        assert width.by_zoom == {zoom: len(tiles) for zoom, tiles in found.by_zoom.items()}
        assert width.total == len(found)
        assert width.estimated == ()


def test_the_width_of_a_continent_is_told_in_bounded_time_and_nearly_right() -> None:
    started = time.process_time()
    width = cover_count(square(-20, 35, 40, 70), range(19), buffer=BUFFER, budget=20_000)
    assert time.process_time() - started < 20
    assert width.estimated
    assert width.estimated[-1] == 18
    exact = cover_count(square(-20, 35, 40, 70), range(19), buffer=BUFFER)
    assert exact.estimated == ()
    assert width.total == pytest.approx(exact.total, rel=0.01)
    counted = [zoom for zoom in range(19) if zoom not in width.estimated]
    assert all(width.by_zoom[zoom] == exact.by_zoom[zoom] for zoom in counted)


def test_the_width_of_a_long_line_doubles_a_zoom_where_it_is_estimated() -> None:
    line = LineString([(-100, -33), (100, 55)])
    width = cover_count(line, range(14), buffer=BUFFER, budget=1_000)
    exact = cover_count(line, range(14), buffer=BUFFER)
    assert width.estimated
    assert width.total == pytest.approx(exact.total, rel=0.1)


# -- speed -----------------------------------------------------------------------------------------------------------


def test_a_polygon_of_100_000_vertices_at_zoom_18_takes_seconds_at_most() -> None:
    rng = np.random.default_rng(7)
    large = star(np.array([24.94, 60.17]), 0.1 * (1 + 0.05 * rng.random(100_000)))
    started = time.process_time()
    found = cover(large, [18], buffer=BUFFER)
    assert time.process_time() - started < 50
    sample = rng.choice(len(found.by_zoom[18]), 50)
    boxes = shapely.box(*buffered_boxes(18, *found.by_zoom[18][sample].T, BUFFER).T)
    assert shapely.intersects(boxes, shapely.transform(large, to_mercator)).all()
