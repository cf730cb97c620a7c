"""Geometries as they come in and as they are stored."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.dead_letter import Refused
from geo_assets.events.geometry import (
    MAX_NESTING,
    brought_back,
    check_range,
    oriented,
    parse_geometry,
    repaired,
    to_wkb,
    unrolled,
)

degrees = st.floats(-80, 80, allow_nan=False).map(lambda value: round(value, 4))


def shape_of(value: Any, limit: int = 1000) -> Any:
    parsed = parse_geometry(value, limit)
    return None if parsed is None else parsed.shape


def refused(value: Any, limit: int = 1000) -> Refused:
    with pytest.raises(Refused) as caught:
        parse_geometry(value, limit)
    assert len(str(caught.value)) < 400
    return caught.value


def polygon(*rings: list[list[float]]) -> dict[str, Any]:
    return {"type": "Polygon", "coordinates": list(rings)}


def ready(shape: Any, *, projected: bool = False) -> Any:
    """What validation does with a geometry in degrees."""
    shape = unrolled(shape, projected=projected)
    check_range(shapely.bounds(shape))
    return oriented(brought_back(shape))


points = st.tuples(degrees, degrees).map(lambda p: shapely.Point(*p))
lines = st.lists(st.tuples(degrees, degrees), min_size=2, max_size=6).map(shapely.LineString)
boxes = st.tuples(degrees, degrees, st.floats(0.1, 9), st.floats(0.1, 9)).map(
    lambda b: shapely.box(b[0], b[1], b[0] + b[2], b[1] + b[3])
)
rings = boxes.map(lambda box: box.difference(shapely.affinity.scale(box, 0.5, 0.5)))
simple = points | lines | boxes | rings
many = st.lists(points, min_size=1, max_size=4).map(shapely.MultiPoint)
multiples = many | st.lists(lines, min_size=1, max_size=3).map(shapely.MultiLineString)
multiples |= st.lists(boxes, min_size=1, max_size=3).map(shapely.MultiPolygon)
geometries = simple | multiples | st.lists(simple | multiples, min_size=1, max_size=3).map(shapely.GeometryCollection)


@settings(max_examples=150, deadline=None)
@given(geometries)
def test_geojson_wkt_and_wkb_of_one_geometry_are_parsed_alike(shape: Any):
    value = json.loads(shapely.to_geojson(shape))
    assert shape_of(value).equals_exact(shape)
    assert parse_geometry(value, 1000).kind == shape.geom_type  # type: ignore[union-attr]
    assert parse_geometry(value, 1000).count == shapely.get_num_coordinates(shape)  # type: ignore[union-attr]
    assert shape_of(shapely.to_wkt(shape, rounding_precision=-1)).equals_exact(shape, 1e-9)
    for options in ({"byte_order": 0}, {"byte_order": 1}, {"flavor": "iso"}, {"flavor": "extended"}):
        assert shape_of(shapely.to_wkb(shape, hex=True, **options)).equals_exact(shape)


@settings(max_examples=60, deadline=None)
@given(geometries)
def test_a_third_dimension_is_dropped(shape: Any):
    high = shapely.force_3d(shape, 7.0)
    assert shape_of(json.loads(shapely.to_geojson(high))).equals_exact(shape)
    assert shape_of(shapely.to_wkt(high, rounding_precision=-1)).equals_exact(shape, 1e-9)
    assert shape_of(shapely.to_wkb(high, hex=True, flavor="iso")).equals_exact(shape)
    assert not shapely.has_z(shape_of(shapely.to_wkb(high, hex=True)))


@settings(max_examples=100, deadline=None)
@given(geometries, st.integers(1, 20))
def test_the_vertex_limit_holds_in_every_form(shape: Any, limit: int):
    count = shapely.get_num_coordinates(shape)
    for value in (json.loads(shapely.to_geojson(shape)), shape.wkt, shapely.to_wkb(shape, hex=True)):
        if count > limit:
            assert refused(value, limit).reason == "too_large"
        else:
            parse_geometry(value, limit)


def test_a_giant_is_refused_before_it_is_built():
    assert refused("POINT(" + "1 2," * 5_000_000 + "1 2)").reason == "too_large"
    assert refused((struct.pack("<BII", 1, 2, 2_000_000) + bytes(32_000_000)).hex()).reason == "too_large"


def test_ewkt_and_ewkb_declare_their_crs():
    assert parse_geometry("SRID=3067;POINT(1 2)", 9).srid == 3067  # type: ignore[union-attr]
    ewkb = shapely.to_wkb(shapely.set_srid(shapely.Point(1, 2), 2154), hex=True, include_srid=True)
    assert parse_geometry(ewkb, 9).srid == 2154  # type: ignore[union-attr]
    assert parse_geometry("SRID=0;POINT(1 2)", 9).srid is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "POINT EMPTY",
        "GEOMETRYCOLLECTION EMPTY",
        {"type": "Point", "coordinates": []},
        {"type": "LineString", "coordinates": []},
        {"type": "Polygon", "coordinates": []},
        {"type": "MultiPoint", "coordinates": []},
        {"type": "MultiPolygon", "coordinates": [[]]},
        {"type": "GeometryCollection", "geometries": []},
        {"type": "GeometryCollection", "geometries": [{"type": "Point", "coordinates": []}]},
        "010200000000000000",
    ],
)
def test_null_and_empty_are_no_geometry(value: Any):
    assert parse_geometry(value, 9) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "schema"),
        ({"type": "Circle", "coordinates": []}, "schema"),
        ({"type": ["Point"], "coordinates": [1, 2]}, "schema"),
        ({"type": "Point"}, "schema"),
        ({"type": "Point", "coordinates": {"lon": 1}}, "schema"),
        ({"type": "GeometryCollection", "geometries": [5]}, "schema"),
        ({"type": "GeometryCollection"}, "schema"),
        ({"type": "MultiLineString", "coordinates": [5]}, "schema"),
        (5, "schema"),
        ("", "schema"),
        ({"type": "Point", "coordinates": [1]}, "invalid_geometry"),
        ({"type": "Point", "coordinates": ["1", "2"]}, "invalid_geometry"),
        ({"type": "Point", "coordinates": [True, 2]}, "invalid_geometry"),
        ({"type": "Point", "coordinates": [None, 2]}, "invalid_geometry"),
        ({"type": "Point", "coordinates": [[1, 2]]}, "invalid_geometry"),
        ({"type": "Point", "coordinates": [10**400, 2]}, "invalid_geometry"),
        ({"type": "MultiPoint", "coordinates": ["ab"]}, "invalid_geometry"),
        ({"type": "LineString", "coordinates": [[1, 2]]}, "invalid_geometry"),
        (polygon([[0, 0], [1, 1], [0, 0]]), "invalid_geometry"),
        (polygon([[0, 0], [1, 1], [1, 0]]), "invalid_geometry"),
        (polygon([]), "invalid_geometry"),
        ("POLYGON((0 0,1 0,1 1))", "invalid_geometry"),
        ("POINT(1)", "invalid_geometry"),
        ("POINT(1 2) x", "invalid_geometry"),
        ("LINEARRING(0 0,1 0,1 1,0 0)", "invalid_geometry"),
        ("CIRCULARSTRING(0 0,1 1,2 0)", "invalid_geometry"),
        ("hello", "invalid_geometry"),
        ("POINT(1 2)\x00", "invalid_geometry"),
        ("0", "invalid_geometry"),
        ("0101", "invalid_geometry"),
        ("0101000000", "invalid_geometry"),
        ("0103000000ffffffff", "invalid_geometry"),
        ("0107000000ffffffff", "invalid_geometry"),
        ("010800000000000000", "invalid_geometry"),
        ((struct.pack("<BII", 1, 4, 1) + struct.pack("<BII", 1, 7, 0)).hex(), "invalid_geometry"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_no_geometry_says_why(value: Any, reason: str):
    assert refused(value).reason == reason


def test_collections_within_collections_end_before_the_stack_does():
    n = 200_000
    deep: Any = {"type": "Point", "coordinates": [1, 2]}
    for _ in range(100):
        deep = {"type": "GeometryCollection", "geometries": [deep]}
    wkb = struct.pack("<BII", 1, 7, 1) * n + struct.pack("<BIdd", 1, 1, 1, 2)
    for value in (deep, "GEOMETRYCOLLECTION(" * n + "POINT(1 2)" + ")" * n, wkb.hex()):
        assert refused(value).reason == "too_large"
    few = MAX_NESTING - 1
    assert shape_of("GEOMETRYCOLLECTION(" * few + "MULTIPOLYGON(((0 0,1 0,1 1,0 0)))" + ")" * few) is not None
    assert shape_of((struct.pack("<BII", 1, 7, 1) * few + struct.pack("<BIdd", 1, 1, 1, 2)).hex()) is not None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40).map(bytes.hex) | st.text("POINTLGYESRD()0123 ,.-e;=", max_size=40))
def test_no_text_crashes_the_parser(text: str):
    try:
        parse_geometry(text, 100)
    except Refused as caught:
        assert caught.reason in ("schema", "invalid_geometry", "too_large")  # noqa: PT017


# Repair


def test_a_repair_keeps_the_dimension_and_the_ground():
    bow_tie = shapely.Polygon([(0, 0), (2, 2), (2, 0), (0, 2)])
    made = repaired(bow_tie)
    assert made.geom_type == "MultiPolygon"
    assert made.area == pytest.approx(2.0)
    spike = shapely.Polygon([(0, 0), (1, 0), (1, 1), (1, 5), (1, 1), (0, 1)])
    assert repaired(spike).equals(shapely.box(0, 0, 1, 1))


def test_what_has_no_ground_left_is_not_repairable():
    for shape in (shapely.Polygon([(0, 0), (1, 1), (2, 2)]), shapely.LineString([(1, 1), (1, 1)])):
        with pytest.raises(Refused, match="not repairable"):
            repaired(shape)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=9))
def test_every_repair_is_valid_and_of_the_same_dimension(places: list[tuple[int, int]]):
    shape = shapely.Polygon(places)
    try:
        made = repaired(shape)
    except Refused:
        return
    assert made.is_valid
    assert made.geom_type in ("Polygon", "MultiPolygon")
    assert made.area > 0


# The date line and the poles


def test_a_geometry_across_the_date_line_is_brought_back_and_split():
    made = ready(shapely.box(170, 0, 190, 10))
    assert made.equals(shapely.union(shapely.box(170, 0, 180, 10), shapely.box(-180, 0, -170, 10)))
    assert ready(shapely.box(-190, 0, -170, 10)).equals(made)
    line = ready(shapely.LineString([(170, 0), (190, 10)]))
    assert line.geom_type == "MultiLineString"
    assert line.equals(shapely.MultiLineString([[(170, 0), (180, 5)], [(-180, 5), (-170, 10)]]))
    assert ready(shapely.MultiPoint([(170, 0), (190, 10)])).equals(shapely.MultiPoint([(170, 0), (-170, 10)]))


def test_a_line_that_crosses_itself_is_not_cut_there():
    crossing = shapely.LineString([(170, 0), (175, 5), (175, 0), (170, 5), (190, 5)])
    assert len(ready(crossing).geoms) == 2


def test_a_collection_is_split_part_by_part():
    made = ready(shapely.GeometryCollection([shapely.Point(24, 60), shapely.box(170, 0, 190, 10)]))
    assert made.geom_type == "GeometryCollection"
    assert [part.geom_type for part in made.geoms] == ["Point", "Polygon", "Polygon"]


@settings(max_examples=100, deadline=None)
@given(st.floats(-175, 175), st.floats(-85, 80), st.floats(0.5, 60), st.floats(0.5, 5), st.booleans())
def test_the_ground_stays_the_same_wherever_the_date_line_cuts(
    x: float, y: float, width: float, height: float, hole: bool
):
    shape = shapely.box(x, y, x + width, y + height)
    if hole:
        shape = shape.difference(shapely.affinity.scale(shape, 0.5, 0.5))
    made = ready(shape)
    assert made.is_valid
    assert made.area == pytest.approx(shape.area)
    west, _, east, _ = made.bounds
    assert -180 <= west <= east <= 180
    for lon in np.linspace(x + width / 10, x + width * 0.9, 5):
        place = shapely.Point((lon + 180) % 360 - 180, y + height / 2)
        assert made.distance(place) < 1e-9 or not shape.intersects(shapely.Point(lon, y + height / 2))


@pytest.mark.parametrize(
    "shape",
    [
        shapely.Point(0, 90.001),
        shapely.Point(0, -91),
        shapely.Point(181, 0),
        shapely.Point(-200, 0),
        shapely.box(190, 0, 200, 10),
        shapely.box(170, 0, 361, 10),
        shapely.box(-181, 0, 180, 10),
        shapely.box(-190, 0, 190, 10),
        shapely.Point(1e300, 0),
    ],
)
def test_beyond_the_world_is_out_of_range(shape: Any):
    with pytest.raises(Refused) as caught:
        check_range(shapely.bounds(shape))
    assert caught.value.reason == "out_of_range"


def test_rounding_at_the_edge_of_the_world_is_no_fault():
    made = ready(shapely.box(-180 - 1e-12, -90 - 1e-12, 180 + 1e-12, 90 + 1e-12))
    assert made.bounds == (-180, -90, 180, 90)
    assert made.geom_type == "Polygon"


def test_a_ring_whose_ends_are_one_turn_apart_is_closed_over_the_pole():
    north = shape_of(polygon([[0, 80], [90, 81], [180, 80], [270, 81], [360, 80]]))
    made = ready(north)
    assert made.is_valid
    assert made.bounds == (-180, 80, 180, 90)
    assert made.area == pytest.approx(360 * 9.5)
    south = ready(shape_of(polygon([[-180, -70], [0, -75], [180, -70]])))
    assert south.bounds == (-180, -90, 180, -70)


def test_a_ring_around_a_pole_that_was_rolled_up_is_closed_over_it():
    made = ready(shape_of(polygon([[0, 80], [90, 80], [180, 80], [-90, 80], [0, 80]])))
    assert made.equals(shapely.box(-180, 80, 180, 90))
    other_way = ready(shape_of(polygon([[0, -80], [-90, -80], [180, -80], [90, -80], [0, -80]])))
    assert other_way.equals(shapely.box(-180, -90, 180, -80))


def test_a_polar_ring_keeps_its_hole():
    shell = [[0, 80], [90, 80], [180, 80], [-90, 80], [0, 80]]
    made = ready(shape_of(polygon(shell, [[-20, 85], [-10, 85], [-10, 86], [-20, 86], [-20, 85]])))
    assert made.area == pytest.approx(360 * 10 - 10)


def test_a_ring_around_the_globe_across_the_equator_holds_no_pole():
    caught = refused(polygon([[-180, -10], [0, 10], [180, -10]]))
    assert caught.reason == "invalid_geometry"


def test_a_wide_polygon_that_is_no_ring_around_a_pole_stays_as_it_is():
    for shape in (
        shapely.box(-180, -90, 180, 90),
        shapely.box(-100, 10, 100, 20),
        shapely.Polygon([(-100, 10), (100, 10), (100, 20), (0, 20), (-100, 20)]),
        shapely.Polygon([(-180, -70), (0, -72), (180, -70), (180, -90), (-180, -90)]),
    ):
        assert ready(shape).equals(shape)


def test_edges_of_a_projected_crs_go_the_shorter_way():
    rolled = shapely.Polygon([(179, 0), (-179, 0), (-179, 1), (179, 1)])
    assert ready(rolled, projected=True).area == pytest.approx(2.0)
    assert ready(rolled).area == pytest.approx(358.0)
    line = shapely.LineString([(179, 0), (-179, 1)])
    assert ready(line, projected=True).length < 3


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 60), st.floats(60, 88), st.integers(0, 59), st.booleans(), st.booleans())
def test_a_circle_around_a_pole_covers_it_from_wherever_it_starts(
    n: int, lat: float, start: int, south: bool, back: bool
):
    sign = -1 if south else 1
    angles = [((start + i) * 360 / n + 180) % 360 - 180 for i in range(n)]
    ring = [[lon, sign * lat] for lon in (angles[::-1] if back else angles)]
    made = ready(shape_of(polygon([*ring, ring[0]])))
    assert made.is_valid
    assert made.area == pytest.approx(360 * (90 - lat), rel=1e-6)


# Storing


@settings(max_examples=80, deadline=None)
@given(geometries)
def test_rings_are_wound_as_rfc_7946_says(shape: Any):
    for part in shapely.get_parts(shapely.get_parts(oriented(shape))):
        if part.geom_type == "Polygon":
            assert part.exterior.is_ccw
            assert not any(hole.is_ccw for hole in part.interiors)


def test_wkb_is_iso_little_endian_2d():
    assert to_wkb(shapely.Point(1, 2, 3)) == struct.pack("<BIdd", 1, 1, 1.0, 2.0)
    assert not math.isnan(struct.unpack("<d", to_wkb(shapely.Point(1, 2))[5:13])[0])
