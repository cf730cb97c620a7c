"""Devices: on their streets, as fast as their kind, the same for a seed, and odd in known numbers."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.models import FenceEvent, PositionEvent, read_events
from geo_assets.events.records import position_value
from geo_assets.geofence.fences import Fence, FenceSet, fence_of
from geo_assets.geofence.positions import read_positions
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.tracker import Tracker
from geo_assets.geofence.triggers import NAMES
from geo_assets.services.sample import folder
from geo_assets.services.simulate.sending import texts_of
from geo_assets.simulation.expected import Fix, Ground, expected_crossings
from geo_assets.simulation.fleet import ERROR_M, SPEEDS, Fate, Fleet, FleetError, Sent
from geo_assets.simulation.routes import METRES_A_DEGREE, Route, read_routes

ROUTES = read_routes((folder() / "routes.json").read_bytes())
START = 1_770_004_200_000
"""A Monday in February 2026, ten to six in Helsinki: the park's fence is in force from six on."""


def metres(lon: Any, lat: Any) -> Any:
    """Between points in a row."""
    return np.hypot(np.diff(lon) * np.cos(np.radians(lat[1:])), np.diff(lat)) * METRES_A_DEGREE


def sample_fences() -> dict[str, Fence]:
    features = json.loads((folder() / "fences.geojson").read_text())["features"]
    made = [fence_of(FenceEvent.model_validate(f), source="demo", revision=1) for f in features]
    return {fence.id: fence for fence in made if isinstance(fence, Fence)}


def tracked(fleet: Fleet, sent: Sent, fences: FenceSet, **rules: Any) -> tuple[Tracker, Counter[tuple[Any, ...]]]:
    """What the tracker makes of positions as they stand in the log."""
    tracker = Tracker(fences, Rules(**rules))
    values = [text.encode() for text in texts_of(sent, fleet.ids, with_event_time=True)]
    received: list[int] = sent.time_ms.tolist()
    told: Counter[tuple[Any, ...]] = Counter()
    for first in range(0, len(values), 5_000):
        some = values[first : first + 5_000]
        count = len(some)
        positions, poison = read_positions(some, [0] * count, range(first, first + count), received[first:][:count])
        assert poison == []
        for t in tracker.feed(positions).rows():
            told[t.device_id, t.fence_id, NAMES[t.state], t.event_time_ms] += 1
    return tracker, told


@pytest.fixture(scope="module")
def quarter() -> tuple[Fleet, Sent]:
    fleet = Fleet(ROUTES, 60, seed=3, start_ms=START)
    return fleet, fleet.between(START, START + 900_000)


def test_devices_stay_on_their_route_but_for_the_error_of_a_fix(quarter: tuple[Fleet, Sent]) -> None:
    fleet, sent = quarter
    scale = np.array([METRES_A_DEGREE * np.cos(np.radians(60.17)), METRES_A_DEGREE])

    def off(kind: str, mine: Any, lon: Any, lat: Any) -> float:
        routes = [np.column_stack((r.lon, r.lat)) * scale for r in ROUTES if r.kind == kind]
        tree = shapely.STRtree([shapely.LineString(pair) for route in routes for pair in pairwise(route)])
        points = shapely.points(np.column_stack((lon, lat))[mine] * scale)
        return tree.query_nearest(points, return_distance=True, all_matches=False)[1].max()

    for kind in SPEEDS:
        mine = np.array([fleet.kind[d] == kind for d in sent.device.tolist()])
        assert off(kind, mine, sent.lon, sent.lat) <= 1.9 * ERROR_M[1] * 2**0.5
        lon, lat, _, _ = fleet.where(sent.device, sent.time_ms)
        assert off(kind, mine, lon, lat) < 0.5


def test_devices_are_as_fast_as_their_kind_and_stop_now_and_then(quarter: tuple[Fleet, Sent]) -> None:
    fleet, sent = quarter
    stood = set()
    for device in range(len(fleet)):
        own = sent.rows(sent.device == device)
        low, high = SPEEDS[fleet.kind[device]]
        seconds = np.diff(own.time_ms) / 1_000
        assert (seconds > 0).all()
        # 1.6 m/s: how fast the error of a fix wanders.
        assert (metres(own.lon, own.lat) / seconds <= high + 1.6).all()
        moving = own.speed_mps[own.speed_mps > 0]
        assert ((moving >= low - 0.01) & (moving <= high + 0.01)).all()
        if (own.speed_mps == 0).any():
            stood.add(fleet.kind[device])
    assert stood == set(SPEEDS)


def test_a_position_says_a_radius_within_which_two_thirds_of_the_fixes_are(quarter: tuple[Fleet, Sent]) -> None:
    fleet, sent = quarter
    lon, lat, _, _ = fleet.where(sent.device, sent.time_ms)
    off = np.hypot((sent.lon - lon) * np.cos(np.radians(lat)), sent.lat - lat) * METRES_A_DEGREE
    assert 0.55 < (off <= sent.accuracy_m).mean() < 0.85


def test_some_devices_are_silent_for_a_while_and_go_on() -> None:
    fleet = Fleet(ROUTES, 100, seed=3, start_ms=START)
    sent = fleet.between(START, START + 600_000)
    gaps = {d: max(np.diff(sent.time_ms[sent.device == d])) for d in range(100)}
    silent = [d for d, gap in gaps.items() if gap > 60_000]
    assert 1 <= len(silent) <= 15
    assert all(gap <= 80_000 for gap in gaps.values())


def test_ids_are_unique_and_of_all_kinds() -> None:
    fleet = Fleet(ROUTES, 1_000, prefix="sim-")
    assert len(set(fleet.ids)) == 1_000
    assert {name.split("-")[1] for name in fleet.ids} == set(SPEEDS)


def test_the_same_seed_gives_the_same_positions_and_another_others() -> None:
    def some(seed: int) -> list[str]:
        fleet = Fleet(ROUTES, 50, seed=seed, start_ms=START, late=0.1, duplicates=0.1, jumps=0.1)
        return texts_of(fleet.between(START, START + 20_000), fleet.ids, with_event_time=False)

    assert some(5) == some(5)
    assert some(5) != some(6)


@given(
    cuts=st.lists(st.integers(0, 15_000), max_size=8),
    rate=st.sampled_from([0.5, 1.0, 3.0, 7.0, 20.0]),
    seed=st.integers(0, 1_000),
)
@settings(max_examples=30, deadline=None)
def test_windows_in_a_row_give_what_one_over_all_of_them_gives(cuts: list[int], rate: float, seed: int) -> None:
    fleet = Fleet(ROUTES, 20, seed=seed, interval_ms=1_000 / rate, start_ms=START, late=0.1, duplicates=0.2, jumps=0.1)
    whole = texts_of(fleet.between(START, START + 15_000), fleet.ids, with_event_time=False)
    edges = [START, *sorted(START + cut for cut in cuts), START + 15_000]
    parts = [t for a, b in pairwise(edges) for t in texts_of(fleet.between(a, b), fleet.ids, with_event_time=False)]

    def by_device(texts: list[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for text in texts:
            found.setdefault(json.loads(text)["device_id"], []).append(text)
        return found

    assert by_device(parts) == by_device(whole)


def test_a_simulator_that_begins_later_goes_on_where_its_devices_are() -> None:
    early = Fleet(ROUTES, 30, seed=2, start_ms=START).between(START + 60_000, START + 70_000)
    late = Fleet(ROUTES, 30, seed=2, start_ms=START + 60_000).between(START + 60_000, START + 70_000)
    assert np.array_equal(early.lon, late.lon)
    assert np.array_equal(early.time_ms, late.time_ms)


@pytest.mark.parametrize("rate", [0.2, 1.0, 4.0])
def test_a_tracker_counts_exactly_the_odd_ones_that_were_made(rate: float) -> None:
    fleet = Fleet(ROUTES, 40, seed=9, interval_ms=1_000 / rate, start_ms=START, late=0.05, duplicates=0.05, jumps=0.05)
    sent = fleet.between(START, START + int(400_000 / rate))
    counts = Counter(sent.fate.tolist())
    share = {fate: count / len(sent) for fate, count in counts.items()}
    assert all(0.035 < share[fate] < 0.065 for fate in (Fate.LATE, Fate.DUPLICATE, Fate.JUMP))

    tracker, _ = tracked(fleet, sent, FenceSet())

    assert tracker.counts.positions == len(sent)
    assert tracker.counts.late == counts[Fate.LATE] + counts[Fate.DUPLICATE]
    assert tracker.counts.jumped == counts[Fate.JUMP]
    assert tracker.counts.accepted == counts[Fate.PLAIN]


def test_a_tracker_tells_the_crossings_that_plain_shapely_expects_through_the_fences_of_the_sample() -> None:
    fleet = Fleet(ROUTES, 80, seed=4, interval_ms=2_000, start_ms=START, late=0.03, duplicates=0.03, jumps=0.03)
    sent = fleet.between(START, START + 1_200_000)
    fences = sample_fences()
    plain = sent.counting()
    fixes = [
        Fix(fleet.ids[d], t, lon, lat, r)
        for d, t, lon, lat, r in zip(
            plain.device.tolist(), plain.time_ms.tolist(), plain.lon.tolist(), plain.lat.tolist(),
            plain.accuracy_m.tolist(), strict=True,
        )
    ]  # fmt: skip
    expected = expected_crossings(
        fixes,
        {
            name: Ground(f.geometry, f.hysteresis_m, None if f.schedule is None else in_force(f))
            for name, f in fences.items()
        },
    )
    _, told = tracked(fleet, sent, FenceSet(1, tuple(fences.values())))
    crossings = Counter({key: count for key, count in told.items() if key[2] != "DWELL"})
    assert Counter(map(tuple, expected)) == crossings
    assert len(expected) > 250
    assert {c.fence for c in expected} > {'demo:"esplanadinpuisto"', 'demo:"raitiotie-mannerheimintie"'}
    assert sum(count for key, count in told.items() if key[2] == "DWELL") > 10


def in_force(fence: Fence) -> Any:
    schedule = fence.schedule
    assert schedule is not None
    return lambda time_ms: bool(schedule.in_force(np.array([time_ms]))[0])


def test_the_edge_takes_a_position_as_it_is_sent_and_makes_the_record_that_goes_straight_to_the_log() -> None:
    fleet = Fleet(ROUTES, 25, start_ms=START, prefix="a:b_c.")
    sent = fleet.between(START, START + 3_000)
    body = "[" + ",".join(texts_of(sent, fleet.ids, with_event_time=False)) + "]"
    events = read_events(body.encode(), "positions")
    records = [json.loads(text) for text in texts_of(sent, fleet.ids, with_event_time=True)]
    assert [position_value(event) for event in events if isinstance(event, PositionEvent)] == records


def test_a_fleet_without_errors_is_exactly_on_its_routes() -> None:
    fleet = Fleet(ROUTES, 10, start_ms=START, noise=False, silent=False)
    sent = fleet.between(START, START + 5_000)
    lon, lat, _, _ = fleet.where(sent.device, sent.time_ms)
    assert np.allclose(sent.lon, lon, atol=1e-7)
    assert np.allclose(sent.lat, lat, atol=1e-7)
    assert len(sent) == 50


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"devices": 0}, "devices: 0"),
        ({"interval_ms": 1}, "interval_ms: 1 is outside 10..120000"),
        ({"interval_ms": 200_000}, "interval_ms"),
        ({"late": 0.6}, "late"),
        ({"late": 0.2, "duplicates": 0.2, "jumps": 0.2}, "late . duplicates . jumps: 0.6 is outside 0..0.5"),
        ({"routes": [r for r in ROUTES if r.kind != "car"]}, "none for a car"),
    ],
)
def test_a_number_outside_its_range_is_named(changes: dict[str, Any], says: str) -> None:
    given_: dict[str, Any] = {"routes": ROUTES, "devices": 100} | changes
    routes: list[Route] = given_.pop("routes")
    with pytest.raises(FleetError, match=says):
        Fleet(routes, given_.pop("devices"), **given_)
