from __future__ import annotations

import numpy as np
import pyproj
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.geofence.fences import Fence, FenceSet
from geo_assets.geofence.index import CHUNK_CORNERS, FenceIndex, z_order
from geo_assets_tests.geofence.reference import border_m, covers
from geo_assets_tests.geofence.test_reference import STEP, random_fence
from geo_assets_tests.geofence.world import box, fences

GEOD = pyproj.Geod(ellps="WGS84")


def covered(index: FenceIndex, *points: tuple[float, float]) -> list[tuple[int, int]]:
    lon, lat = np.array(points, np.float64).reshape(-1, 2).T
    row, fence = index.covered(lon, lat)
    return list(zip(row.tolist(), fence.tolist(), strict=True))


@given(seed=st.integers(0, 2**32 - 1), east=st.sampled_from([0.0, 25.0, 180.0]), north=st.sampled_from([0.0, -80.0]))
@settings(max_examples=40, deadline=None)
def test_a_batch_is_covered_as_each_point_alone(seed: int, east: float, north: float) -> None:
    rng = np.random.default_rng(seed)
    made = fences(*(random_fence(rng, number, 1, east, north) for number in range(8)))
    x, y = (rng.integers(-28, 40, (2, 60)) / 2) * STEP
    lon, lat = np.where(east + x > 180, east + x - 360, east + x), north + y
    index = FenceIndex(made)
    expected = [
        (row, number) for row in range(60) for number, f in enumerate(made.fences) if covers(f, lon[row], lat[row])
    ]
    assert covered(index, *zip(lon, lat, strict=True)) == expected
    row, fence = np.repeat(np.arange(60), 8), np.tile(np.arange(8), 60)
    one_by_one = index.covers(fence, lon[row], lat[row])
    assert [(r, f) for r, f in zip(row[one_by_one].tolist(), fence[one_by_one].tolist(), strict=True)] == expected


def test_a_point_on_a_border_a_corner_or_the_border_of_a_hole_is_inside() -> None:
    ring = Fence("1", 1, shapely.box(0, 0, 3, 3).difference(shapely.box(1, 1, 2, 2)))
    index = FenceIndex(fences(ring, box("2", 3, 0, 5, 3)))
    assert covered(index, (3, 1), (0, 0), (1, 1.5), (1.5, 1.5)) == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_both_names_of_the_date_line_are_one_meridian() -> None:
    index = FenceIndex(fences(box("1", 179, 0, 180, 1), box("2", -180, 0, -179, 1)))
    assert covered(index, (180, 0.5), (-180, 0.5)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_point_where_two_parts_of_a_fence_meet_is_one_pair() -> None:
    twice = Fence("1", 1, shapely.MultiPolygon([shapely.box(0, 0, 1, 1), shapely.box(1, 1, 2, 2)]))
    assert covered(FenceIndex(fences(twice)), (1, 1), (0.5, 0.5), (0.5, 1.5)) == [(0, 0), (1, 0)]


def test_no_fences_and_no_points_are_no_pairs() -> None:
    assert covered(FenceIndex(FenceSet()), (1, 2), (180, 0)) == []
    assert covered(FenceIndex(fences(box("1", 0, 0, 1, 1)))) == []
    assert len(FenceIndex(FenceSet()).legs(*np.zeros((4, 2))).leg) == 0
    assert len(FenceIndex(fences(box("1", 0, 0, 1, 1))).border_m(np.empty(0), np.empty(0), np.empty(0, np.int64))) == 0


def test_places_in_order_on_the_curve_are_quadrants_of_quadrants() -> None:
    lon, lat = np.array([-90.0, 90.0, -90.0, 90.0, 180.0]), np.array([-45.0, -45.0, 45.0, 45.0, 90.0])
    order = z_order(lon, lat)
    assert (np.diff(order.astype(object)) > 0).all()
    assert int(order[-1]) == 2**64 - 1


@given(lat=st.floats(-84, 84), lon=st.floats(-180, 180), away=st.floats(0.5, 9_000), azimuth=st.floats(0, 360))
@settings(max_examples=100, deadline=None)
def test_metres_to_a_border_are_those_on_the_ellipsoid(lat: float, lon: float, away: float, azimuth: float) -> None:
    x, y, _ = GEOD.fwd(lon, lat, azimuth, away)
    corner = Fence("1", 1, shapely.Polygon([(lon, lat), (lon + 1e-9, lat), (lon, lat + 1e-9)]))
    index = FenceIndex(fences(corner))
    found = index.border_m(np.array([x]), np.array([y]), np.array([0]))[0]
    assert found == pytest.approx(away, rel=0.01, abs=0.001)


@given(seed=st.integers(0, 2**32 - 1), east=st.sampled_from([25.0, 180.0]), north=st.sampled_from([0.0, 60.0]))
@settings(max_examples=30, deadline=None)
def test_metres_to_many_borders_are_those_to_each(seed: int, east: float, north: float) -> None:
    rng = np.random.default_rng(seed)
    made = fences(*(random_fence(rng, number, 1, east, north) for number in range(8)))
    x, y = rng.uniform(-0.02, 0.02, (2, 40))
    lon, lat = np.where(east + x > 180, east + x - 360, east + x), north + y
    which = rng.integers(0, 8, 40)
    outside = [row for row in range(40) if not covers(made.fences[which[row]], lon[row], lat[row])]
    index = FenceIndex(made)
    found = index.border_m(lon[outside], lat[outside], which[outside])
    expected = [border_m(made.fences[which[row]], lon[row], lat[row]) for row in outside]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-6)


def test_metres_to_the_borders_of_fences_with_very_many_corners_take_bounded_memory() -> None:
    angle = np.linspace(0, 2 * np.pi, 60_000, endpoint=False)
    round_one = Fence("1", 1, shapely.Polygon(np.stack((np.cos(angle), np.sin(angle)), axis=1)))
    index = FenceIndex(fences(round_one, box("2", 5, 5, 6, 6)))
    count = 3 * CHUNK_CORNERS // 60_000
    which = np.arange(count) % 2
    found = index.border_m(np.full(count, 1.01), np.zeros(count), which)
    assert found[0::2] == pytest.approx(1113.2, abs=0.5)
    assert (found[1::2] > 500_000).all()


def legs(index: FenceIndex, *ends: tuple[float, float, float, float]) -> list[tuple[int, int, float, float]]:
    found = index.legs(*np.array(ends, np.float64).T)
    return [tuple(row) for row in zip(*(column.tolist() for column in found), strict=True)]


def test_a_leg_tells_where_it_comes_in_and_where_it_is_out_for_good() -> None:
    notched = Fence("1", 1, shapely.box(1, -1, 4, 1).difference(shapely.box(2, -1, 3, 0.5)))
    index = FenceIndex(fences(notched, box("2", 0, 5, 1, 6), box("3", 8, 0, 9, 1)))
    assert legs(index, (0, 0, 10, 0), (0, 5.5, 10, 5.5)) == [(0, 0, 0.1, 0.4), (0, 2, 0.8, 0.9), (1, 1, 0.0, 0.1)]


def test_a_leg_that_touches_a_corner_is_not_in() -> None:
    index = FenceIndex(fences(box("1", 0, 0, 1, 1)))
    assert legs(index, (-1, 1, 1, 3), (-1, 0, 1, 2), (-1, 2, 2, -1)) == [
        (2, 0, pytest.approx(1 / 3), pytest.approx(2 / 3))
    ]


def test_a_leg_goes_the_shorter_way_over_the_date_line() -> None:
    east = Fence("1", 1, shapely.MultiPolygon([shapely.box(179, -1, 180, 1), shapely.box(-180, -1, -179, 1)]))
    index = FenceIndex(fences(east, box("2", 0, -1, 1, 1)))
    there, back = legs(index, (178, 0, -178, 0), (-178, 0, 178, 0))
    assert there == (0, 0, 0.25, 0.75)
    assert back == (1, 0, 0.25, 0.75)
