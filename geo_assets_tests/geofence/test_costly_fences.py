"""Fences that cost: very many corners, holes, slivers, poles, the date line, thousands over each other."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_assets.events.dead_letter import Refused
from geo_assets.events.models import FenceEvent
from geo_assets.geofence import index as index_module
from geo_assets.geofence import tracker as tracker_module
from geo_assets.geofence.fences import Fence, FenceSet, fence_of
from geo_assets.geofence.index import Crowded, FenceIndex
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.tracker import TooManyStays, Tracker
from geo_assets_tests.geofence.reference import Record, Told, covers
from geo_assets_tests.geofence.test_reference import by_device, random_fence, random_story
from geo_assets_tests.geofence.world import NOON, Walk, box, columns, fences, told

RULES = Rules(lateness_ms=2000, max_speed_mps=0, silent_ms=120_000)


def star(corners: int, inner: float, outer: float, east: float = 25.0, north: float = 60.0) -> list[list[float]]:
    angle = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    radius = np.where(np.arange(corners) % 2, inner, outer)
    ring = np.stack((east + radius * np.cos(angle), north + radius * np.sin(angle)), axis=1)
    return [*ring.tolist(), ring[0].tolist()]


def holes(count: int, width: float, east: float = 25.0, north: float = 60.0) -> list[list[list[float]]]:
    side = math.ceil(math.sqrt(count))
    step = width / side
    corners = [
        (east - width / 2 + step * (n % side), north - width / 2 + step * (n // side)) for n in range(count)
    ]  # fmt: skip
    return [shapely.get_coordinates(shapely.box(x, y, x + step / 2, y + step / 2)).tolist() for x, y in corners]


def polygon(*rings: list[list[float]]) -> dict[str, Any]:
    return {"type": "Polygon", "coordinates": list(rings)}


def ring(*corners: tuple[float, float]) -> list[list[float]]:
    return [*map(list, corners), list(corners[0])]


COSTLY = {
    "2,000 corners and 500 holes": polygon(star(2000, 0.5, 0.6), *holes(500, 0.5)),
    "holes that touch the border": polygon(
        ring((24, 60), (26, 60), (26, 62), (24, 62)),
        *(ring((24 + n / 300, 60), (24 + n / 300 + 1e-3, 61), (24 + n / 300 - 1e-3, 61)) for n in range(1, 600)),
    ),
    "a comb": polygon(ring((24, 59), *((24 + n / 5000, 61 if n % 2 else 59.1) for n in range(10_000)), (26, 59))),
    "slivers": {
        "type": "MultiPolygon",
        "coordinates": [[ring((24 + n / 1e4, 60), (24 + n / 1e4 + 1e-9, 60), (24 + n / 1e4, 62))] for n in range(5000)],
    },
    "around a pole": polygon([[lon / 5, 80 + 5 * (lon % 2)] for lon in range(-900, 901)]),
    "across 180": polygon(ring(*((170 + 20 * (n % 2), -60 + n * 0.06) for n in range(1900)), (160, 54), (160, -60))),
}
REFUSED = {
    "a ring that touches itself": polygon(ring((24, 60), (26, 60), (26, 62), (25, 60), (24, 62))),
    "holes that cut it in two": polygon(
        ring((23, 59), (27, 59), (27, 61), (23, 61)),
        *(ring((23 + n, 60), (23.5 + n, 60.1), (24 + n, 60), (23.5 + n, 59.9)) for n in range(4)),
    ),
}


def made_of(geometry: dict[str, Any], **members: Any) -> Fence:
    event = FenceEvent.model_validate({"type": "Feature", "id": "f", "geometry": geometry, **members})
    fence = fence_of(event, source="demo", revision=1)
    assert isinstance(fence, Fence)
    return fence


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_fence_judges_as_the_slow_reference_does(name: str) -> None:
    fence = made_of(COSTLY[name], hysteresis_m=500)
    rng = np.random.default_rng(7)
    tracker = Tracker(FenceSet(1, (fence,)), RULES)
    west, south, east, north = fence.geometry.bounds
    corners = shapely.get_coordinates(fence.geometry)[::97]
    places = np.concatenate((rng.uniform((west, south), (east, north), (150, 2)), corners))
    walk = Walk()
    records = [walk.at(f"d{n}", n / 1000, *place) for n, place in enumerate(places.tolist())]
    entered = {one.device for one in told(tracker.feed(columns(records)))}
    assert entered == {r.device for r in records if covers(fence, r.lon, r.lat)}
    # And once more from nearby, where the border's distance decides who stays.
    moved = np.clip(places + rng.normal(0, 0.004, places.shape), (-180, -90), (180, 90))
    tracker.feed(columns([walk.at(f"d{n}", 60 + n / 1000, *place) for n, place in enumerate(moved.tolist())]))
    assert tracker.stays >= sum(covers(fence, *place) for place in moved.tolist())
    other = FenceSet(2, (Fence(fence.id, 2, shapely.box(-180, -90, -179, -89)),))
    assert len(tracker.adopt(other)) >= len({one for one in entered if tracker.inside(str(one))})
    assert tracker.stays == sum(covers(other.fences[0], *place) for place in moved.tolist())


@pytest.mark.parametrize("name", REFUSED)
def test_a_fence_that_is_no_area_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="invalid_geometry"):
        made_of(REFUSED[name])


@given(
    seed=st.integers(0, 2**32 - 1),
    east=st.sampled_from([25.0, 180.0]),
    north=st.sampled_from([0.0, 60.0, -84.0]),
    run=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_who_is_near_a_border_is_the_same_by_runs_of_it(seed: int, east: float, north: float, run: int) -> None:
    rng = np.random.default_rng(seed)
    made = fences(*(random_fence(rng, number, 1, east, north) for number in range(8)))
    x, y = rng.uniform(-0.02, 0.02, (2, 60))
    lon, lat = np.where(east + x > 180, east + x - 360, east + x), north + y
    which, reach = rng.integers(0, 8, 60), rng.choice([5.0, 100.0, 1000.0], 60)
    whole = FenceIndex(made)
    with patch.object(index_module, "FEW_CORNERS", int(rng.integers(0, 8))), patch.object(index_module, "RUN", run):
        pieces = FenceIndex(made)
        pieces.warm()
        found = pieces.near_border(lon, lat, which, reach)
    assert found.tolist() == (whole.border_m(lon, lat, which) <= reach).tolist()


def test_a_border_of_very_many_corners_is_not_measured_corner_by_corner() -> None:
    index = FenceIndex(fences(Fence("1", 1, shapely.Polygon(star(99_000, 0.3, 0.6)), hysteresis_m=10_000)))
    looked_at: list[int] = []
    edges = FenceIndex._edges_m

    def counted(self: FenceIndex, lon: Any, lat: Any, first: Any, stop: Any) -> Any:
        looked_at.append(int((stop - first).sum()))
        return edges(self, lon, lat, first, stop)

    angle = np.linspace(0, 2 * np.pi, 200)
    with patch.object(FenceIndex, "_edges_m", counted):
        near = index.near_border(25 + 0.62 * np.cos(angle), 60 + 0.62 * np.sin(angle), np.zeros(200, np.int64),
                                 np.full(200, 10_000.0))  # fmt: skip
    assert near.all()
    assert sum(looked_at) < 200 * 99_000 / 100


def test_a_fence_asked_about_many_devices_is_prepared_for_it() -> None:
    index = FenceIndex(fences(Fence("1", 1, shapely.Polygon(star(5_000, 0.3, 0.6)))))
    index.covers(np.zeros(3, np.int64), np.full(3, 25.0), np.full(3, 60.0))
    assert shapely.is_prepared(index._geometries).all()


# Thousands over each other


def test_fences_over_each_other_are_judged_few_positions_at_a_time() -> None:
    rng = np.random.default_rng(3)
    many = fences(*(box(f"{n:04}", *(25 - rng.uniform(0.1, 1, 2)), *(26 + rng.uniform(0, 1, 2))) for n in range(5000)))
    tracker = Tracker(many, RULES)
    walk = Walk()
    batch = columns([walk.at(f"d{n}", n / 1000, 25.5, 25.5) for n in range(120)])
    with pytest.raises(Crowded):
        tracker.feed(batch)
    assert (tracker.devices, tracker.stays, tracker.offsets, tracker.counts.positions) == (0, 0, {}, 0)
    entered = [len(triggers) for triggers in tracker.pieces(batch)]
    assert sum(entered) == tracker.stays == 120 * 5000
    assert max(entered) <= index_module.MOST_PAIRS
    leaving = columns([walk.at(f"d{n}", 60 + n / 1000, 0.0, 0.0) for n in range(120)])
    left = [len(triggers) for triggers in tracker.pieces(leaving)]
    assert (sum(left), tracker.stays) == (120 * 5000, 0)
    assert max(left) <= index_module.MOST_PAIRS


@pytest.mark.parametrize("crossings", [False, True])
@given(seed=st.integers(0, 2**32 - 1), most=st.integers(1, 12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rule_2_pieces_tell_what_a_whole_batch_tells(crossings: bool, seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    first, story = random_story(rng, 120)
    records = [one for one in story if isinstance(one, Record)]
    rules = Rules(lateness_ms=2000, max_speed_mps=60.0, silent_ms=120_000, crossings=crossings)
    whole, cut = Tracker(first, rules), Tracker(first, rules)
    said: list[Told] = []
    expected: list[Told] = []
    while records:
        size = int(rng.integers(1, 60))
        batch, records = columns(sorted(records[:size], key=lambda record: record.partition)), records[size:]
        expected += told(whole.feed(batch))
        with patch.object(tracker_module, "MOST_PAIRS", most), patch.object(index_module, "MOST_PAIRS", most):
            said += [one for piece in cut.pieces(batch) for one in told(piece)]
    assert by_device(said) == by_device(expected)
    assert (cut.offsets, cut.watermarks, cut.stays) == (whole.offsets, whole.watermarks, whole.stays)
    assert asdict(cut.counts) | {"repeated": 0} == asdict(whole.counts) | {"repeated": 0}


@given(seed=st.integers(0, 2**32 - 1), limit=st.integers(1, 8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rule_9_stays_have_a_limit_that_costs_the_same_positions_wherever_batches_are_cut(
    seed: int, limit: int
) -> None:
    rng = np.random.default_rng(seed)
    first, story = random_story(rng, 120)
    # One partition: which of two is read first is nobody's promise.
    records = [one for one in story if isinstance(one, Record) and one.partition == 0]
    rules = Rules(lateness_ms=2000, max_speed_mps=0, silent_ms=120_000, max_stays=limit)
    outcomes: list[tuple[Any, ...]] = []
    for sizes in ([1] * len(records), rng.integers(1, 50, len(records)).tolist()):
        tracker, left, said, refused = Tracker(first, rules), list(records), list[Told](), list[tuple[int, int]]()
        for size in sizes:
            batch, left = left[:size], left[size:]
            if batch:
                for piece in tracker.pieces(columns(batch), lambda *place, refused=refused: refused.append(place)):
                    said += told(piece)
                    assert tracker.stays <= limit
        outcomes.append((by_device(said), refused, tracker.stays))
    assert outcomes[0] == outcomes[1]


def test_a_position_for_whose_stays_there_is_no_room_changes_nothing() -> None:
    walk = Walk()
    tracker = Tracker(fences(box("1", 0, 0, 2, 2), box("2", 1, 1, 3, 3)), Rules(max_speed_mps=0, max_stays=2))
    tracker.feed(columns([walk.at("a", 0, 1.5, 1.5)]))
    before = tracker.snapshot()
    with pytest.raises(TooManyStays, match=r"max_stays: 2 devices in fences .* and 1 more") as caught:
        tracker.feed(columns([walk.at("b", 1, 0.5, 0.5)]))
    assert (caught.value.partition, caught.value.offset) == (0, 1)
    assert tracker.snapshot() == before
    assert tracker.fullest() == {"1": 1, "2": 1}
    # Who is inside stays so, moves about and leaves; then there is room.
    assert told(tracker.feed(columns([walk.at("a", 2, 1.6, 1.6)]))) == []
    tracker.feed(columns([walk.at("a", 3, 0.5, 0.5)]))
    (entered,) = told(tracker.feed(columns([walk.at("b", 4, 0.5, 0.5)])))
    assert (entered.device, entered.time) == ("b", NOON + 4000)
