"""What the tracker promises, rule by rule (the walks of test_reference hold it against a slow one)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import shapely

from geo_assets.geofence.fences import Fence, FenceSet, fence_of
from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.rules import RuleError, Rules
from geo_assets.geofence.schedule import Schedule
from geo_assets.geofence.state import SnapshotError
from geo_assets.geofence.tracker import TooManyDevices, Tracker
from geo_assets_tests.geofence.reference import Record, Told
from geo_assets_tests.geofence.world import NOON, Walk, box, columns, fences, told

IN, OUT = 0.0, 0.01
"""Longitudes in and out of the depot; they are a kilometre apart."""

DEPOT = box("depot", -0.001, -0.001, 0.001, 0.001)
FREE = Rules(max_speed_mps=0)


def say(tracker: Tracker, *records: Record) -> list[Told]:
    return told(tracker.feed(columns(records)))


def brief(many: list[Told]) -> list[tuple[str, float]]:
    return [(f"{one.state} {one.fence}", (one.time - NOON) / 1000) for one in many]


def depot(rules: Rules = FREE, **more: Any) -> Tracker:
    return Tracker(fences(box("depot", -0.001, -0.001, 0.001, 0.001, **more)), rules)


def count(tracker: Tracker, name: str) -> int:
    return int(asdict(tracker.counts)[name])


def test_a_device_enters_and_leaves() -> None:
    tracker, walk = depot(priority=4), Walk(partition=3)
    first = say(tracker, walk.at("d", 0, OUT), walk.at("d", 1, IN), walk.at("d", 2, IN), walk.at("d", 3, OUT))
    assert brief(first) == [("ENTER depot", 1), ("EXIT depot", 3)]
    base = NOON * 1024
    assert first[0] == Told("d", "depot", "ENTER", NOON + 1000, base + 1, 4, 3, 2, 1)
    assert [(one.sequence, one.source) for one in first] == [(base + 1, 2), (base + 2, 4)]
    assert tracker.offsets == {3: 4}
    assert tracker.watermarks == {3: NOON + 3000}


def test_a_point_on_the_border_is_inside() -> None:
    walk = Walk()
    assert brief(say(depot(), walk.at("d", 0, 0.001, 0.001), walk.at("d", 1, 0.0010001))) == [
        ("ENTER depot", 0), ("EXIT depot", 1),
    ]  # fmt: skip


def test_exit_waits_for_the_hysteresis_and_enter_does_not() -> None:
    tracker, walk = depot(hysteresis_m=50), Walk()
    metre = 0.001 / 111.32
    assert brief(say(tracker, walk.at("d", 0, 0.001 + 40 * metre))) == []
    assert brief(say(tracker, walk.at("d", 1, IN), walk.at("d", 2, 0.001 + 49 * metre))) == [("ENTER depot", 1)]
    assert tracker.inside("d") == ["depot"]
    assert brief(say(tracker, walk.at("d", 3, 0.001 + 51 * metre))) == [("EXIT depot", 3)]


def test_exit_waits_until_the_whole_circle_of_accuracy_is_outside() -> None:
    tracker, walk = depot(), Walk()
    metre = 0.001 / 111.32
    near = 0.001 + 30 * metre
    assert brief(say(tracker, walk.at("d", 0, IN, accuracy=90.0), walk.at("d", 1, near, accuracy=31.0))) == [
        ("ENTER depot", 0)
    ]
    assert brief(say(tracker, walk.at("d", 2, near, accuracy=29.0))) == [("EXIT depot", 2)]


def test_a_fix_too_coarse_says_nothing() -> None:
    tracker, walk = depot(), Walk()
    assert say(tracker, walk.at("d", 0, IN, accuracy=201.0)) == []
    assert count(tracker, "coarse") == 1
    assert tracker.watermarks == {0: NOON}


def test_a_late_position_is_ignored_and_counted() -> None:
    tracker, walk = depot(), Walk()
    assert brief(say(tracker, walk.at("d", 5, IN), walk.at("d", 5, OUT), walk.at("d", 4, OUT))) == [("ENTER depot", 5)]
    assert count(tracker, "late") == 2


def test_a_clock_too_far_ahead_is_refused_and_moves_no_watermark() -> None:
    tracker, walk = depot(), Walk()
    records = [walk.at("d", 61, IN, received=NOON), walk.at("d", 60, IN, received=NOON)]
    assert brief(say(tracker, *records)) == [("ENTER depot", 60)]
    assert count(tracker, "future") == 1
    assert say(tracker, walk.at(None, 100, received=NOON)) == []
    assert tracker.watermarks == {0: NOON + 60_000}


@pytest.mark.parametrize(
    ("lon", "lat", "time"),
    [(181, 0, 0), (0, -91, 0), (math.nan, 0, 0), (0, math.inf, 0), (0, 0, -NOON), (0, 0, 1 << 61)],
)
def test_a_place_or_time_outside_the_world_is_refused(lon: float, lat: float, time: int) -> None:
    tracker = depot()
    assert say(tracker, Record(0, 0, "d", NOON + time, lon, lat)) == []
    assert count(tracker, "out_of_range") == 1
    assert tracker.devices == 0


def test_a_jump_does_not_count_until_enough_fixes_agree() -> None:
    tracker, walk = depot(Rules(max_speed_mps=50, recover_after=3)), Walk()
    far = 0.3
    assert brief(say(tracker, walk.at("d", 0, IN), walk.at("d", 1, far), walk.at("d", 2, IN))) == [("ENTER depot", 0)]
    assert say(tracker, walk.at("d", 3, far), walk.at("d", 4, far), walk.at("d", 5, -far), walk.at("d", 6, far)) == []
    assert brief(say(tracker, walk.at("d", 7, far), walk.at("d", 8, far + 0.0001))) == [("EXIT depot", 8)]
    assert (count(tracker, "jumped"), count(tracker, "recovered")) == (6, 1)


def test_time_makes_a_long_way_plausible() -> None:
    tracker, walk = depot(Rules(max_speed_mps=50)), Walk()
    assert brief(say(tracker, walk.at("d", 0, IN), walk.at("d", 1000, 0.3))) == [
        ("ENTER depot", 0), ("EXIT depot", 1000),
    ]  # fmt: skip


# DWELL


def test_dwell_comes_once_a_stay_stamped_enter_plus_dwell() -> None:
    tracker, walk = depot(dwell_ms=10_000), Walk()
    visits = [walk.at("d", second, IN if second % 30 < 25 else OUT) for second in range(0, 60, 4)]
    assert brief(say(tracker, *visits)) == [
        ("ENTER depot", 0), ("DWELL depot", 10), ("EXIT depot", 28), ("ENTER depot", 32), ("DWELL depot", 42),
        ("EXIT depot", 56),
    ]  # fmt: skip


def test_dwell_of_a_silent_device_waits_for_the_watermark_and_the_lateness() -> None:
    tracker, walk = depot(dwell_ms=10_000), Walk()
    assert brief(say(tracker, walk.at("d", 0, IN), walk.tick(14.999))) == [("ENTER depot", 0)]
    dwell = say(tracker, walk.tick(15), walk.tick(16))
    assert brief(dwell) == [("DWELL depot", 10)]
    assert dwell[0].source == 3
    assert say(tracker, walk.tick(1000)) == []


def test_the_watermark_of_another_partition_fires_nothing() -> None:
    tracker, walk, other = depot(dwell_ms=10_000), Walk(), Walk(partition=1)
    say(tracker, walk.at("d", 0, IN))
    assert say(tracker, other.tick(1000)) == []
    assert brief(say(tracker, other.tick(1001), walk.tick(15))) == [("DWELL depot", 10)]


def test_a_stay_that_ended_as_dwell_was_due_has_none() -> None:
    tracker, walk = depot(dwell_ms=10_000), Walk()
    assert brief(say(tracker, walk.at("d", 0, IN), walk.at("d", 10, OUT))) == [("ENTER depot", 0), ("EXIT depot", 10)]
    tracker, walk = depot(dwell_ms=10_000), Walk()
    assert brief(say(tracker, walk.at("d", 0, IN), walk.at("d", 10.001, OUT))) == [
        ("ENTER depot", 0), ("DWELL depot", 10), ("EXIT depot", 10.001),
    ]  # fmt: skip


def test_a_device_behind_the_watermark_dwells_at_its_own_record() -> None:
    tracker, walk = depot(dwell_ms=10_000), Walk()
    said = say(tracker, walk.tick(100), walk.at("d", 0, IN), walk.tick(101))
    assert brief(said) == [("ENTER depot", 0), ("DWELL depot", 10)]
    assert [one.source for one in said] == [2, 2]


# Order


def test_exit_comes_before_enter_and_priority_before_id() -> None:
    around = fences(
        box("a", -1, -1, 0, 1), box("b", 0.001, -1, 1, 1), box("c", 0.001, -1, 1, 1, priority=5),
        box("d", -1, -1, 0, 1, priority=1),
    )  # fmt: skip
    tracker, walk = Tracker(around, FREE), Walk()
    assert brief(say(tracker, walk.at("x", 0, -0.5), walk.at("x", 1, 0.5))) == [
        ("ENTER d", 0), ("ENTER a", 0), ("EXIT d", 1), ("EXIT a", 1), ("ENTER c", 1), ("ENTER b", 1),
    ]  # fmt: skip


def test_three_transitions_in_a_second_are_three() -> None:
    tracker, walk = depot(), Walk()
    said = say(tracker, *(walk.at("d", n / 10, IN if n % 2 else OUT) for n in range(1, 7)))
    assert [one.state for one in said] == ["ENTER", "EXIT"] * 3
    assert [one.sequence - said[0].sequence for one in said] == list(range(6))


# Crossings


def test_a_fence_passed_between_two_fixes_is_told_by_option() -> None:
    walk = Walk()
    way = [walk.at("d", 0, -0.002), walk.at("d", 4, 0.002)]
    assert say(depot(), *way) == []
    assert brief(say(depot(Rules(max_speed_mps=0, crossings=True), dwell_ms=1500), *way)) == [
        ("ENTER depot", 1), ("DWELL depot", 2.5), ("EXIT depot", 3),
    ]  # fmt: skip


def test_nothing_is_known_of_a_way_that_took_too_long_or_came_by_a_jump() -> None:
    walk = Walk()
    slow = [walk.at("d", 0, -0.002), walk.at("d", 301, 0.002)]
    assert say(depot(Rules(crossings=True)), *slow) == []
    walk = Walk()
    jump = [walk.at("d", 0, -0.002), walk.at("d", 1, 0.002), walk.at("d", 2, 0.002)]
    assert say(depot(Rules(crossings=True, max_speed_mps=10, recover_after=2)), *jump) == []


def test_a_fence_passed_and_left_by_less_than_its_hysteresis_is_still_open() -> None:
    tracker, walk = depot(Rules(max_speed_mps=0, crossings=True), hysteresis_m=200), Walk()
    assert brief(say(tracker, walk.at("d", 0, -0.002), walk.at("d", 4, 0.002))) == [("ENTER depot", 1)]
    assert brief(say(tracker, walk.at("d", 5, 0.005))) == [("EXIT depot", 5)]


def test_a_way_over_the_date_line_passes_what_lies_there() -> None:
    area = Fence("1", 1, shapely.MultiPolygon([shapely.box(179.999, -1, 180, 1), shapely.box(-180, -1, -179.999, 1)]))
    tracker, walk = Tracker(fences(area), Rules(max_speed_mps=0, crossings=True)), Walk()
    assert brief(say(tracker, walk.at("d", 0, 179.998), walk.at("d", 4, -179.998))) == [("ENTER 1", 1), ("EXIT 1", 3)]


def test_staying_on_one_side_of_the_date_line_or_the_other_is_one_stay() -> None:
    area = Fence("1", 1, shapely.box(179.999, -1, 180, 1), hysteresis_m=100)
    tracker, walk = Tracker(fences(area), FREE), Walk()
    way = [walk.at("d", n, lon) for n, lon in enumerate((179.9995, 180, -180, -179.9995, 179.9995, -179.998))]
    assert brief(say(tracker, *way)) == [("ENTER 1", 0), ("EXIT 1", 5)]


# Schedules


def test_a_fence_is_entered_and_left_with_its_schedule_by_event_time() -> None:
    schedule = Schedule("Europe/Helsinki", ("Fr 15:01-15:03",))
    tracker, walk = depot(schedule=schedule, hysteresis_m=50, dwell_ms=100_000), Walk()
    said = say(tracker, *(walk.at("d", second, IN) for second in (30, 60, 100, 190, 200)))
    assert brief(said) == [("ENTER depot", 60), ("DWELL depot", 160), ("EXIT depot", 190)]


def test_dwell_does_not_come_while_the_fence_is_out_of_force() -> None:
    schedule = Schedule("UTC", ("Fr 12:00-12:01",))
    tracker, walk = depot(schedule=schedule, dwell_ms=100_000), Walk()
    assert brief(say(tracker, walk.at("d", 0, IN), walk.tick(1000))) == [("ENTER depot", 0)]


# Changes of fences


def test_a_deleted_fence_and_one_that_moved_away_close_what_they_had_open() -> None:
    before = fences(box("a", -1, -1, 1, 1), box("b", -1, -1, 1, 1), box("c", -1, -1, 1, 1))
    tracker, walk = Tracker(before, FREE), Walk()
    say(tracker, walk.at("d", 0, IN), walk.tick(9))
    after = fences(box("a", -1, -1, 1, 1), box("c", 2, 2, 3, 3, revision=2), revision=2)
    said = told(tracker.adopt(after))
    assert brief(said) == [("EXIT b", 9), ("EXIT c", 9)]
    assert [(one.source, one.revision) for one in said] == [(2, 2), (2, 2)]
    assert tracker.inside("d") == ["a"]
    assert tracker.revision == 2


def test_a_fence_that_now_covers_a_device_is_entered_at_its_next_position() -> None:
    tracker, walk = Tracker(fences(box("a", 2, 2, 3, 3)), FREE), Walk()
    say(tracker, walk.at("d", 0, IN))
    assert told(tracker.adopt(fences(box("a", -1, -1, 1, 1, revision=2), revision=2))) == []
    assert brief(say(tracker, walk.at("d", 1, IN))) == [("ENTER a", 1)]


def test_a_fence_that_changed_under_a_device_goes_on_with_its_new_dwell() -> None:
    tracker, walk = depot(dwell_ms=100_000), Walk()
    say(tracker, walk.at("d", 0, IN))
    assert told(tracker.adopt(fences(box("depot", -0.001, -0.001, 0.001, 0.001, 2, dwell_ms=3000), revision=2))) == []
    assert brief(say(tracker, walk.at("d", 5, IN))) == [("DWELL depot", 3)]
    assert told(tracker.adopt(fences(box("depot", -0.001, -0.001, 0.001, 0.001, 3, dwell_ms=9000), revision=3))) == []
    assert brief(say(tracker, walk.at("d", 20, IN))) == []


def test_an_older_revision_is_not_adopted() -> None:
    with pytest.raises(ValueError, match="revision: 0 is below 1"):
        depot().adopt(FenceSet(0))


# What is forgotten


def test_a_device_that_fell_silent_leaves_and_comes_back_with_higher_numbers() -> None:
    tracker, walk = depot(Rules(silent_ms=60_000, lateness_ms=0), dwell_ms=50_000), Walk()
    first = say(tracker, walk.at("d", 0, IN), walk.at("other", 59.999, OUT), walk.tick(60))
    assert brief(first) == [("ENTER depot", 0), ("DWELL depot", 50), ("EXIT depot", 60)]
    assert first[-1].source == 3
    assert (tracker.devices, tracker.stays, count(tracker, "forgotten")) == (1, 0, 1)
    again = say(tracker, walk.at("d", 61, IN))
    assert brief(again) == [("ENTER depot", 61)]
    assert again[0].sequence > first[-1].sequence


def test_a_stay_forgotten_as_dwell_was_due_has_none() -> None:
    tracker, walk = depot(Rules(silent_ms=60_000), dwell_ms=60_000), Walk()
    assert brief(say(tracker, walk.at("d", 0, IN), walk.tick(100))) == [("ENTER depot", 0), ("EXIT depot", 60)]


def test_a_position_older_than_what_is_remembered_is_late() -> None:
    tracker, walk = depot(Rules(silent_ms=60_000)), Walk()
    assert say(tracker, walk.tick(100), walk.at("d", 40, IN)) == []
    assert count(tracker, "late") == 1
    assert brief(say(tracker, walk.at("d", 40.001, IN))) == [("ENTER depot", 40.001)]


def test_rule_9_one_device_more_than_may_be_remembered_stops_the_batch_before_it_changed_anything() -> None:
    tracker, walk = depot(Rules(max_devices=2)), Walk()
    say(tracker, walk.at("a", 0), walk.at("b", 0))
    before = tracker.snapshot()
    with pytest.raises(TooManyDevices, match="max_devices: 2 devices are known and 1 more came; the limit is 2"):
        say(tracker, walk.at("a", 1, OUT), walk.at("c", 1))
    assert tracker.snapshot() == before


def test_rule_12_an_erased_device_is_unknown() -> None:
    tracker, walk = depot(), Walk()
    say(tracker, walk.at("secret", 0, IN), walk.at("other", 0, IN))
    assert tracker.erase("secret")
    assert not tracker.erase("secret")
    assert b"secret" not in tracker.snapshot()
    assert (tracker.devices, tracker.stays, tracker.inside("other")) == (1, 1, ["depot"])
    assert brief(say(tracker, walk.at("other", 1, OUT), walk.at("secret", 2, IN))) == [
        ("EXIT depot", 1), ("ENTER depot", 2),
    ]  # fmt: skip


# Records and snapshots


def test_rule_2_a_record_that_was_read_before_changes_nothing() -> None:
    tracker, walk = depot(), Walk()
    once = [walk.at("d", 0, IN), walk.at("d", 1, OUT)]
    assert len(say(tracker, *once)) == 2
    before = tracker.snapshot()
    assert say(tracker, *once) == []
    assert tracker.snapshot() == before
    assert count(tracker, "repeated") == 2


def test_an_empty_batch_is_nothing() -> None:
    assert say(depot()) == []


def test_a_tracker_goes_on_from_its_snapshot() -> None:
    rules = Rules(silent_ms=90_000, crossings=True, max_speed_mps=50)
    tracker, walk = depot(rules, dwell_ms=20_000), Walk()
    say(tracker, walk.at("d", 0, IN), walk.at("e", 0, IN), walk.at("e", 1, 0.5))
    sets = {1: tracker.index}
    again, closed = Tracker.restore(tracker.snapshot(), sets)
    assert not len(closed)
    assert again.snapshot() == tracker.snapshot()
    assert again.rules == rules
    rest = [walk.at("d", 30, IN), walk.at("e", 31, 0.5), walk.at("e", 32, 0.5), walk.tick(500)]
    assert say(again, *rest) == say(tracker, *rest)


def test_what_is_no_snapshot_is_refused_by_name() -> None:
    tracker = depot()
    data = tracker.snapshot()
    for damaged in (b"", b"\x09" + data[1:], data[:-1]):
        with pytest.raises(SnapshotError, match="snapshot: "):
            Tracker.restore(damaged, {1: tracker.index})
    with pytest.raises(SnapshotError, match=r"needs the fences of revision 1; at hand are 2, 3"):
        Tracker.restore(data, {2: FenceSet(2), 3: FenceSet(3)})


@pytest.mark.parametrize(("rule", "value"), [("silent_ms", 10), ("recover_after", 0), ("max_accuracy_m", -1.0)])
def test_a_rule_outside_its_range_is_named(rule: str, value: float) -> None:
    with pytest.raises(RuleError, match=f"{rule}: {value} is outside"):
        Rules(**{rule: value})  # pyright: ignore[reportArgumentType]


def test_a_batch_of_very_many_devices_is_as_each_alone() -> None:
    from geo_assets.events.models import FenceEvent

    circle = FenceEvent.model_validate(
        {"type": "Feature", "id": 1, "geometry": {"type": "Point", "coordinates": [0, 0]}, "radius_m": 500}
    )
    made = fence_of(circle, source="demo", revision=1)
    assert isinstance(made, Fence)
    index = FenceIndex(fences(made))
    rng = np.random.default_rng(4)
    place = rng.uniform(-0.01, 0.01, (3, 5_000))
    walk = Walk()
    records = [walk.at(f"d{n}", step, place[step, n], 0) for step in range(3) for n in range(5_000)]
    together = say(Tracker(index, FREE), *records)
    apart = Tracker(index, FREE)
    one_by_one = [one for start in range(0, 15_000, 500) for one in say(apart, *records[start : start + 500])]
    assert together == one_by_one
    assert apart.stays == sum(shapely.contains_xy(made.geometry, place[2], np.zeros(5_000)))
