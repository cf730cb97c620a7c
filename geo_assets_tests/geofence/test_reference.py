"""The tracker against the slow one: random walks tell the same, wherever batches are cut and whenever it restarts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict

import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_assets.geofence.fences import Fence, FenceSet, Removed
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.schedule import Schedule
from geo_assets.geofence.tracker import Tracker
from geo_assets_tests.geofence.reference import Record, Reference, Told
from geo_assets_tests.geofence.world import NOON, columns, told

STEP = 0.0005
"""Degrees: 55 m to the north. Fences and fixes lie on this grid, so that borders and corners are met."""

SCHEDULES = (
    Schedule("UTC", ("Mo-Su 11:59-12:01",)),
    Schedule("Europe/Helsinki", ("Fr 15:00-15:02", "Sa,Su 22:00-06:00")),
    Schedule("UTC", ("Fr 12:01-11:59",)),
)


def random_fence(rng: np.random.Generator, number: int, revision: int, east: float, north: float) -> Fence:
    x, y = rng.integers(-12, 10, 2)
    w, h = rng.integers(1, 14, 2)
    corners = [(x, y), (x + w, y), (x + w + rng.integers(-1, 4), y + h), (x - rng.integers(-1, 2), y + h)]
    shape = shapely.Polygon(corners)
    if w > 3 and h > 3 and rng.random() < 0.5:
        shape = shape.difference(shapely.box(x + 1, y + 1, x + 2 + rng.integers(0, w - 2), y + h - 1))
    if rng.random() < 0.2:
        shape = shape.union(shapely.box(x + w + 5, y, x + w + 7, y + 3))
    shape = shapely.transform(shape, lambda c: np.round(c) * STEP + (east, north))
    if east > 170 and shape.is_valid:
        world = shapely.box(-180, -90, 180, 90)
        back = shapely.transform(shape, lambda c: c - (360, 0))
        shape = shapely.union_all([shape.intersection(world), back.intersection(world)])
        shape = shapely.MultiPolygon([p for p in shapely.get_parts(shape) if p.geom_type == "Polygon"])
    if shape.is_empty or not shape.is_valid:
        return random_fence(rng, number, revision, east, north)
    return Fence(
        f'"f{number}"', revision, shape, priority=int(rng.integers(0, 3)),
        dwell_ms=int(rng.choice([0, 1000, 4000, 20_000, 300_000])),
        hysteresis_m=float(rng.choice([0.0, 0.0, 30.0, 90.0])),
        schedule=SCHEDULES[rng.integers(0, 3)] if rng.random() < 0.25 else None,
    )  # fmt: skip


def random_story(rng: np.random.Generator, count: int) -> tuple[FenceSet, list[Record | list[Fence | Removed]]]:
    """Fences, and records with changes of fences between."""
    east, north = float(rng.choice([25.0, 180.0, 0.0])), float(rng.choice([0.0, 60.0, -80.0]))
    first = {number: random_fence(rng, number, 1, east, north) for number in range(int(rng.integers(1, 9)))}
    fences, _ = FenceSet().apply(first.values())
    story: list[Record | list[Fence | Removed]] = []
    devices = int(rng.integers(1, 6))
    place = rng.integers(-10, 12, (devices, 2)).astype(float)
    partitions = int(rng.integers(1, 3))
    offset = [int(rng.integers(0, 5)) for _ in range(partitions)]
    now, version = NOON, 1
    for _ in range(count):
        dice = rng.random()
        if dice < 0.03:
            version += 1
            number = int(rng.integers(0, 9))
            change = random_fence(rng, number, version, east, north)
            story.append([Removed(change.id, version) if rng.random() < 0.3 else change])
            continue
        now += int(rng.choice([0, 1, 200, 1000, 3000, 20_000], p=[0.1, 0.1, 0.2, 0.4, 0.15, 0.05]))
        if rng.random() < 0.01:
            now += int(rng.choice([60_000, 400_000]))
        device = int(rng.integers(0, devices))
        partition = device % partitions
        time = now + int(rng.choice([0] * 25 + [-500, -5000, 70_000, -130_000]))
        received = now if rng.random() < 0.9 else 1 << 60
        if dice < 0.08:
            story.append(Record(partition, offset[partition], None, time, received=received))
        else:
            step = rng.integers(-2, 3, 2) if rng.random() < 0.9 else rng.integers(-14, 14, 2)
            place[device] = np.clip(place[device] + step * rng.choice([0.5, 1, 1]), -18, 18)
            x, y = place[device]
            if rng.random() < 0.05:
                x, y = x + 400, y - 30
            lon = (east + x * STEP + 180) % 360 - 180
            if abs(lon) == 180 and rng.random() < 0.5:
                lon = -lon
            lat = float(rng.choice([north + y * STEP] * 49 + [np.nan]))
            accuracy = float(rng.choice([np.nan, 0.0, 5.0, 70.0, 300.0], p=[0.5, 0.1, 0.2, 0.17, 0.03]))
            story.append(Record(partition, offset[partition], f"d{device}", time, lon, lat, accuracy, received))
        if rng.random() > 0.02:  # else it comes once more
            offset[partition] += int(rng.choice([1, 1, 1, 3]))
    return fences, story


def by_device(all_of_them: list[Told]) -> dict[str, list[Told]]:
    result: dict[str, list[Told]] = defaultdict(list)
    for one in all_of_them:
        result[one.device].append(one)
    return dict(result)


@pytest.mark.parametrize("crossings", [False, True])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rule_1_a_random_walk_tells_what_the_slow_tracker_tells(crossings: bool, seed: int) -> None:
    check(seed, crossings, 150)


def check(seed: int, crossings: bool, count: int) -> int:
    rng = np.random.default_rng(seed)
    fences, story = random_story(rng, count)
    rules = Rules(
        lateness_ms=int(rng.choice([0, 2000, 10_000])),
        max_future_ms=int(rng.choice([1000, 100_000])),
        max_speed_mps=float(rng.choice([0.0, 60.0, 350.0])),
        recover_after=int(rng.integers(1, 4)),
        silent_ms=int(rng.choice([30_000, 120_000, 600_000])),
        crossings=crossings,
        crossing_gap_ms=int(rng.choice([2000, 300_000])),
    )
    slow, fast = Reference(fences, rules), Tracker(fences, rules)
    said: list[Told] = []
    batch: list[Record] = []
    cut = float(rng.choice([0.02, 0.2, 1.0]))
    sets = {fences.revision: fences}
    counts: dict[str, int] = defaultdict(int)

    def flush() -> None:
        said.extend(told(fast.feed(columns(batch))))
        batch.clear()

    def restart(data: bytes) -> None:
        nonlocal fast
        for name, number in asdict(fast.counts).items():
            counts[name] += number
        fast, closed = Tracker.restore(data, sets)
        said.extend(told(closed))

    for entry in story:
        if isinstance(entry, list):
            flush()
            fences, outcomes = fences.apply(entry)
            if outcomes != ["applied"]:
                continue
            sets[fences.revision] = fences
            slow.adopt(fences)
            if rng.random() < 0.5:
                said.extend(told(fast.adopt(fences)))
            else:
                restart(fast.snapshot(adopting=fences.revision))
            continue
        slow.feed(entry)
        batch.append(entry)
        if rng.random() < cut:
            flush()
            if rng.random() < 0.1:
                restart(fast.snapshot())
    flush()
    assert by_device(said) == by_device(slow.told)
    for partition in {one.partition for one in said}:
        sources = [one.source for one in said if one.partition == partition]
        assert sources == sorted(sources)
    for name, number in asdict(fast.counts).items():
        counts[name] += number
    mine = {name: number for name, number in counts.items() if number}
    assert mine == slow.counts, (mine, slow.counts)
    # Rule 1: every position is counted under what became of it.
    assert mine["positions"] == sum(
        counts[name] for name in ("accepted", "out_of_range", "future", "late", "coarse", "jumped")
    )
    assert fast.devices == len(slow.devices)
    assert fast.stays == sum(len(device.stays) for device in slow.devices.values())
    assert fast.watermarks == slow.watermark
    assert fast.offsets == slow.next
    keys = [(one.device, one.fence, one.state, one.time // 1000, one.sequence) for one in said]
    assert len(set(keys)) == len(keys)
    return len(said)
