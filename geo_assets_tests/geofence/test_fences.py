from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyproj
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from geo_assets.events.dead_letter import Refused
from geo_assets.events.models import FenceEvent
from geo_assets.geofence.fences import Fence, FenceSet, Removed, fence_of
from geo_assets.geofence.geodesic import ERROR
from geo_assets.geofence.schedule import Schedule
from geo_assets_tests.geofence.world import box

GEOD = pyproj.Geod(ellps="WGS84")


def event(**members: Any) -> FenceEvent:
    return FenceEvent.model_validate({"type": "Feature", "id": "depot", **members})


def fence(**members: Any) -> Fence:
    made = fence_of(event(**members), source="demo", revision=7)
    assert isinstance(made, Fence)
    return made


def refused(**members: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        fence(**members)
    assert "\n" not in str(caught.value)
    return caught.value


def point(lon: float, lat: float) -> dict[str, Any]:
    return {"type": "Point", "coordinates": [lon, lat]}


SQUARE = {
    "type": "Polygon",
    "coordinates": [
        [[0, 0], [4, 0], [4, 4], [0, 4], [0, 0]],
        [[1, 1], [1, 3], [3, 3], [3, 1], [1, 1]],
    ],
}
LINE = {"type": "LineString", "coordinates": [[24.0, 60.0], [25.0, 60.2], [25.0, 61.0]]}


# What an event says


def test_an_area_with_a_hole_is_taken_as_it_is() -> None:
    made = fence(geometry=SQUARE, priority=3, dwell_s=90, hysteresis_m=25, name="Yard", version=4)
    assert (made.id, made.revision, made.priority, made.dwell_ms, made.hysteresis_m, made.name) == (
        'demo:"depot"', 4, 3, 90_000, 25.0, "Yard",
    )  # fmt: skip
    assert not made.geometry.covers(shapely.Point(2, 2))
    assert made.geometry.covers(shapely.Point(0.5, 0.5))
    assert fence(geometry=SQUARE, id=12).id == "demo:12"


def test_members_may_stand_in_the_properties_and_the_event_s_own_come_first() -> None:
    said = {
        "radius_m": 80, "dwell_s": 5, "priority": 2, "hysteresis_m": 3, "name": "Kiosk",
        "schedule": {"zone": "UTC", "windows": ["Mo 00:00-24:00"]},
    }  # fmt: skip
    inside = fence(geometry=point(25, 60), properties=said)
    outside = fence(geometry=point(25, 60), **said)
    assert inside.digest == outside.digest
    assert fence(geometry=point(25, 60), properties=said, priority=9).priority == 9


def test_a_deletion_needs_no_ground() -> None:
    assert fence_of(event(action="delete", version=3), source="demo", revision=9) == Removed('demo:"depot"', 3)
    assert fence_of(event(action="delete"), source="demo", revision=9) == Removed('demo:"depot"', 9)


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"geometry": point(1, 2)}, "radius_m"),
        ({"geometry": LINE}, "width_m"),
        ({"geometry": SQUARE, "radius_m": 5}, "radius_m"),
        ({"geometry": LINE, "radius_m": 5, "width_m": 10}, "width_m"),
        ({"geometry": point(1, 2), "properties": {"radius_m": -1}}, "properties.radius_m"),
        ({"geometry": SQUARE, "properties": {"priority": 10}}, "properties.priority"),
        ({"geometry": SQUARE, "properties": {"priority": "1"}}, "properties.priority"),
        ({"geometry": SQUARE, "schedule": {"zone": "Mars/Base", "windows": ["Mo 00:00-24:00"]}}, "schedule.zone"),
        ({"geometry": SQUARE, "schedule": {"zone": "UTC", "windows": []}}, "schedule.windows"),
        ({"geometry": SQUARE, "schedule": {"zone": "UTC", "windows": ["Mon 08:00-09:00"]}}, "schedule.windows"),
        ({"geometry": SQUARE, "schedule": {"zone": "UTC", "windows": ["Mo 08:61-09:00"]}}, "schedule.windows"),
        ({"geometry": SQUARE, "schedule": {"zone": "UTC", "windows": ["Xx 08:00-09:00"]}}, "schedule.windows"),
        ({"geometry": {"type": "Polygon", "coordinates": [[[0, 0], [1, 1], [1, 0], [0, 1], [0, 0]]]}}, "geometry"),
        ({"geometry": {"type": "Polygon", "coordinates": []}}, "geometry"),
        ({"geometry": point(1, 95), "radius_m": 5}, "geometry"),
        ({"geometry": {"type": "LineString", "coordinates": [[-170, 0], [170, 0]]}, "width_m": 0.001}, "geometry"),
        ({"geometry": SQUARE, "crs": "EPSG:999999"}, "crs"),
    ],
)
def test_a_fence_at_fault_names_the_field(members: dict[str, Any], field: str) -> None:
    assert refused(**members).field == field


def test_limits_of_the_model_are_named() -> None:
    for member, value in (("hysteresis_m", 10_001), ("priority", -1), ("dwell_s", 0), ("width_m", 0)):
        with pytest.raises(ValidationError, match=member):
            event(geometry=SQUARE, **{member: value})


def test_another_crs_is_reprojected() -> None:
    metres = {"type": "Point", "coordinates": [2_782_987.27, 8_399_737.89]}
    made = fence(geometry=metres, radius_m=100, crs="EPSG:3857")
    assert made.geometry.covers(shapely.Point(25, 60))
    assert fence_of(event(geometry=metres, radius_m=100), source="demo", revision=7, crs="EPSG:3857") == made


# Circles and corridors


def away_m(shape: Any, lon: float, lat: float, step: float = 0.01) -> np.ndarray:
    edge = shapely.get_coordinates(shapely.segmentize(shapely.boundary(shape), step))
    edge = edge[(np.abs(np.abs(edge[:, 0]) - 180) > 1e-9) & (np.abs(edge[:, 1]) < 89.999)]
    many = np.full(len(edge), lon), np.full(len(edge), lat)
    return np.asarray(GEOD.inv(edge[:, 0], edge[:, 1], *many)[2])


@given(lon=st.floats(-180, 180), lat=st.floats(-84, 84), radius=st.sampled_from([1.0, 50.0, 3_000.0, 90_000.0]))
@settings(max_examples=60, deadline=None)
def test_a_circle_is_within_a_thousandth_of_its_radius(lon: float, lat: float, radius: float) -> None:
    shape = fence(geometry=point(lon, lat), radius_m=radius).geometry
    assert shapely.is_valid(shape)
    west, _, east, _ = shape.bounds
    assert west >= -180
    assert east <= 180
    apart = away_m(shape, lon, lat)
    assert np.abs(apart / radius - 1).max() <= ERROR


@pytest.mark.parametrize(("lon", "lat", "radius"), [(0, 90, 20_000), (10, 89.95, 20_000), (-40, -89.9, 50_000)])
def test_a_circle_holds_the_pole_that_lies_in_it(lon: float, lat: float, radius: float) -> None:
    shape = fence(geometry=point(lon, lat), radius_m=radius).geometry
    assert shapely.is_valid(shape)
    for east in (-180, -91, 0, 33, 180):
        assert shape.covers(shapely.Point(east, math.copysign(90, lat)))
    assert np.abs(away_m(shape, lon, lat) / radius - 1).max() < 2 * ERROR


def test_a_circle_over_the_date_line_is_on_both_sides() -> None:
    shape = fence(geometry=point(179.9999, 60), radius_m=500).geometry
    assert shape.geom_type == "MultiPolygon"
    assert shape.covers(shapely.Point(-179.995, 60))
    assert shape.covers(shapely.Point(179.995, 60))


@given(lat=st.floats(-80, 80), turn=st.floats(-3, 3), width=st.sampled_from([4.0, 100.0, 5_000.0]))
@settings(max_examples=30, deadline=None)
def test_a_corridor_is_as_wide_as_it_says(lat: float, turn: float, width: float) -> None:
    line = [[24.0, lat], [24.3, lat + turn / 20], [24.2, lat + 0.1]]
    shape = fence(geometry={"type": "LineString", "coordinates": line}, width_m=width).geometry
    assert shapely.is_valid(shape)
    assert shape.geom_type == "Polygon"
    dense = shapely.get_coordinates(shapely.segmentize(shapely.LineString(line), 0.00002 if width > 50 else 0.000005))
    edge = shapely.get_coordinates(shapely.segmentize(shape.boundary, 0.003))[::7]
    for lon, north in edge[:60]:
        near = dense[np.argsort(np.hypot((dense[:, 0] - lon) * np.cos(np.radians(north)), dense[:, 1] - north))[:40]]
        apart = GEOD.inv(near[:, 0], near[:, 1], np.full(len(near), lon), np.full(len(near), north))[2]
        assert abs(np.min(apart) / (width / 2) - 1) < 2 * ERROR + 0.01 / width + (0.06 if width < 50 else 0)


def test_a_corridor_crosses_the_date_line_where_its_line_does() -> None:
    over = {"type": "LineString", "coordinates": [[179.9, 60], [180.1, 60.0]]}
    shape = fence(geometry=over, width_m=100).geometry
    assert shape.covers(shapely.Point(-179.95, 60))
    assert shape.covers(shapely.Point(179.95, 60))
    assert not shape.covers(shapely.Point(0, 60))
    assert fence(geometry=over, radius_m=50).digest == fence(geometry=over, width_m=100).digest


# Schedules


def at(text: str) -> int:
    return int(np.datetime64(text, "ms").astype(np.int64))


@pytest.mark.parametrize(
    ("windows", "zone", "time", "answer"),
    [
        ("Mo-Fr 08:00-17:30", "UTC", "2026-05-01T08:00", True),
        ("Mo-Fr 08:00-17:30", "UTC", "2026-05-01T17:29:59.999", True),
        ("Mo-Fr 08:00-17:30", "UTC", "2026-05-01T17:30", False),
        ("Mo-Fr 08:00-17:30", "UTC", "2026-05-02T12:00", False),
        ("Mo-Fr 08:00-17:30", "Europe/Helsinki", "2026-05-01T05:00", True),
        ("Mo-Fr 08:00-17:30", "Europe/Helsinki", "2026-01-02T05:00", False),
        ("Fr 22:00-06:00", "UTC", "2026-05-02T05:59", True),
        ("Fr 22:00-06:00", "UTC", "2026-05-01T05:59", False),
        ("Su 22:00-06:00", "UTC", "2026-05-04T01:00", True),
        ("Sa-Mo 00:00-24:00", "UTC", "2026-05-04T23:59", True),
        ("Sa-Mo 00:00-24:00", "UTC", "2026-05-05T00:00", False),
        ("We,Fr 12:00-12:00", "UTC", "2026-05-02T11:59", True),
        ("We,Fr 12:00-12:00", "UTC", "2026-05-02T12:00", False),
    ],
)  # fmt: skip
def test_a_window_is_open_by_the_wall_clock_of_its_zone(windows: str, zone: str, time: str, answer: bool) -> None:
    schedule = Schedule.read({"zone": zone, "windows": [windows]})
    assert schedule.in_force([at(time)]).tolist() == [answer]


# Sets


def test_a_change_gives_the_next_revision_and_leaves_the_old_set_alone() -> None:
    one, outcomes = FenceSet().apply([box("2", 0, 0, 1, 1), box("1", 0, 0, 2, 2)])
    assert outcomes == ["applied", "applied"]
    assert (one.revision, [f.id for f in one.fences], one.place) == (1, ["1", "2"], {"1": 0, "2": 1})
    two, _ = one.apply([box("1", 0, 0, 3, 3, revision=2)], revision=40)
    assert (two.revision, len(one), one.fences[0].geometry.bounds) == (40, 2, (0, 0, 2, 2))
    assert two.content_hash != one.content_hash
    with pytest.raises(ValueError, match="revision: 40 is not above 40"):
        two.apply([Removed("1", 3)], revision=40)


def test_old_and_repeated_changes_are_told_apart_and_change_nothing() -> None:
    standing, _ = FenceSet().apply([box("1", 0, 0, 1, 1, revision=5)])
    for change, outcome in (
        (box("1", 0, 0, 1, 1, revision=4), "stale"),
        (box("1", 0, 0, 1, 1, revision=5), "duplicate"),
        (box("1", 0, 0, 9, 9, revision=5), "version_conflict"),
        (Removed("1", 4), "stale"),
    ):
        after, outcomes = standing.apply([change])
        assert outcomes == [outcome]
        assert after is standing


def test_a_deleted_fence_is_not_brought_back_by_an_older_update() -> None:
    gone, _ = FenceSet().apply([box("1", 0, 0, 1, 1, revision=5), Removed("1", 6)])
    assert len(gone) == 0
    after, outcomes = gone.apply([box("1", 0, 0, 1, 1, revision=5), Removed("1", 6), box("1", 0, 0, 1, 1, revision=7)])
    assert outcomes == ["stale", "duplicate", "applied"]
    assert len(after) == 1


def test_a_set_comes_back_from_its_bytes() -> None:
    made, _ = FenceSet().apply(
        [
            fence(geometry=SQUARE, id=1, priority=1, schedule={"zone": "UTC", "windows": ["Mo 01:00-02:00"]}),
            fence(geometry=LINE, width_m=50, name="Line"),
            Removed("9", 3),
        ]
    )
    again = FenceSet.from_bytes(made.to_bytes())
    assert (again.revision, again.content_hash, again.removed) == (made.revision, made.content_hash, made.removed)
    assert [f.digest for f in again.fences] == [f.digest for f in made.fences]
    for damaged in (b"", b"\x07" + made.to_bytes()[1:], made.to_bytes()[:-1]):
        with pytest.raises(ValueError, match="fence set"):
            FenceSet.from_bytes(damaged)


def test_the_content_hash_knows_content_and_not_revisions() -> None:
    one = FenceSet(1, (box("1", 0, 0, 1, 1), box("2", 0, 0, 1, 1)))
    other = FenceSet(9, (box("2", 0, 0, 1, 1, revision=8), box("1", 0, 0, 1, 1)))
    assert one.content_hash == other.content_hash
    assert one.content_hash != FenceSet(1, (box("1", 0, 0, 1, 1, priority=1), box("2", 0, 0, 1, 1))).content_hash


def test_an_id_stands_once_in_a_set() -> None:
    with pytest.raises(ValueError, match="twice"):
        FenceSet(1, (box("1", 0, 0, 1, 1), box("1", 0, 0, 2, 2)))


RING = [[24.9, 60.1], [25.0, 60.1], [25.0, 60.2], [24.9, 60.2], [24.9, 60.1]]
AREA = {"type": "Polygon", "coordinates": [RING]}
NEXT = {"type": "Polygon", "coordinates": [[[x + 0.05, y] for x, y in RING]]}
LINE = {"type": "LineString", "coordinates": [[24.9, 60.1], [24.91, 60.1]]}
SPOT = {"type": "Point", "coordinates": [24.9, 60.1]}


def collection(*parts: Any) -> dict[str, Any]:
    return {"type": "GeometryCollection", "geometries": list(parts)}


@pytest.mark.parametrize(
    ("geometry", "more"),
    [
        (collection(AREA), {}),
        (collection(collection(AREA)), {}),
        (collection(AREA, collection(NEXT)), {}),
        (collection(collection(), AREA), {}),
        (collection(SPOT), {"radius_m": 50}),
        (collection(collection(LINE)), {"width_m": 50}),
    ],
)
def test_a_collection_however_nested_is_the_area_of_its_parts(geometry: Any, more: dict[str, Any]) -> None:
    made = fence(geometry=geometry, **more)
    assert made.geometry.geom_type == "Polygon"
    assert shapely.is_valid(made.geometry)


@pytest.mark.parametrize(
    "geometry",
    [
        collection(),
        collection(collection(), collection()),
        collection(AREA, SPOT),
        collection(collection(AREA), collection(LINE)),
    ],
)
def test_a_collection_without_ground_or_of_mixed_kinds_is_refused(geometry: Any) -> None:
    refused(geometry=geometry)


def test_an_area_that_cannot_be_drawn_is_refused_in_words() -> None:
    over_the_pole = {"type": "LineString", "coordinates": [[0, 89], [180, 89]]}
    assert "cannot be drawn" in str(refused(geometry=over_the_pole, width_m=2_000_000))


def test_metres_beyond_the_globe_are_out_of_range() -> None:
    far = {"type": "Point", "coordinates": [1e300, 1]}
    assert refused(geometry=far, radius_m=9, crs="EPSG:3857").reason == "out_of_range"
