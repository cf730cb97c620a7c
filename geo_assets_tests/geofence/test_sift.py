"""A batch that cannot be judged costs the records at fault, wherever it is cut; faults are put in the real tracker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.sift import named, sift
from geo_assets.geofence.tracker import Tracker
from geo_assets.geofence.triggers import EXIT
from geo_assets_tests.geofence.reference import Record, Told
from geo_assets_tests.geofence.test_reference import by_device, random_story
from geo_assets_tests.geofence.world import NOON, Walk, box, columns, fences, told

RULES = Rules(lateness_ms=2000, max_speed_mps=0, silent_ms=120_000)


@contextmanager
def faulty(place: Callable[[float, float], bool], exits: Callable[[int], bool]) -> Iterator[None]:
    """The index fails at some places; telling EXIT fails at some times, when half of the batch is done."""
    covered, emit = FenceIndex.covered, Tracker._emit

    def fails(self: FenceIndex, lon: Any, lat: Any) -> Any:
        for x, y in zip(lon.tolist(), lat.tolist(), strict=True):
            if place(x, y):
                raise shapely.GEOSException(f"no topology at {x} {y}")
        return covered(self, lon, lat)

    def breaks(self: Tracker, row: Any, device: Any, fence: Any, state: int, time: Any) -> None:
        emit(self, row, device, fence, state, time)
        if state == EXIT and any(exits(at) for at in time.tolist()):
            raise IndexError("in the middle")

    with patch.object(FenceIndex, "covered", fails), patch.object(Tracker, "_emit", breaks):
        yield


def one_by_one(tracker: Tracker, records: list[Record]) -> tuple[list[Told], list[Record]]:
    """What the records tell singly, each of which that fails left out; and these."""
    said: list[Told] = []
    out: list[Record] = []
    for record in records:
        tried = tracker.copy()
        try:
            said += told(tried.feed(columns([record])))
        except (shapely.GEOSException, IndexError):
            out.append(record)
            tried = tracker.copy()
            said += told(tried.feed(columns([record]).silenced([0])))
        tracker = tried
    return said, out


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rule_10_records_at_fault_cost_themselves_wherever_batches_are_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, story = random_story(rng, 120)
    records = [one for one in story if isinstance(one, Record)]
    rare = int(rng.integers(5, 30))
    tracker = Tracker(first, RULES)
    with faulty(lambda x, y: int(x * 1e4 + y * 1e4) % rare == 0, lambda time: time // 100 % rare == 1):
        expected, out = one_by_one(tracker.copy(), records)
        said: list[Told] = []
        found: list[Record] = []
        while records:
            some = int(rng.integers(1, 60))
            batch = sorted(records[:some], key=lambda record: record.partition)
            records = records[some:]
            before = tracker.snapshot()
            sifted = sift(tracker, columns(batch))
            assert tracker.snapshot() == before
            tracker = sifted.tracker
            said += [one for triggers in sifted.triggers for one in told(triggers)]
            found += [batch[fault.row] for fault in sifted.faults]
    assert by_device(said) == by_device(expected)
    assert sorted(found) == sorted(out)


def test_a_batch_without_a_fault_is_judged_once_and_nothing_is_left_out() -> None:
    walk = Walk()
    records = [walk.at("a", 0, 0.5, 0.5), walk.at("a", 1, 5, 5), walk.tick(2)]
    tracker = Tracker(fences(box("f", 0, 0, 1, 1)), RULES)
    tries: list[None] = []
    sifted = sift(tracker, columns(records), lambda: tries.append(None))
    assert len(tries) == 1
    assert [one.state for triggers in sifted.triggers for one in told(triggers)] == ["ENTER", "EXIT"]
    assert not sifted.faults
    assert sifted.tracker.offsets == {0: 3}


def test_a_record_at_fault_moves_the_offset_and_not_the_watermark() -> None:
    walk = Walk()
    tracker = Tracker(fences(box("f", 0, 0, 1, 1)), RULES)
    with faulty(lambda x, _: x == 9.0, lambda _: False):
        sifted = sift(tracker, columns([walk.at("a", 0, 0.5, 0.5), walk.at("b", 50, 9.0, 9.0)]))
    assert [fault.row for fault in sifted.faults] == [1]
    assert sifted.tracker.offsets == {0: 2}
    assert sifted.tracker.watermarks == {0: NOON}


def test_rule_12_a_fault_is_named_without_its_own_words() -> None:
    walk = Walk()
    with faulty(lambda *_: True, lambda _: False):
        (fault,) = sift(Tracker(), columns([walk.at("a", 0, 24.123456, 60.654321)])).faults
    assert "24.123456" in str(fault.error)
    name = named(fault.error)
    assert name.startswith("GEOSException in test_sift.py:")
    assert "24.123456" not in name


def test_memory_that_runs_out_is_no_record_s_fault() -> None:
    walk = Walk()
    with patch.object(FenceIndex, "covered", side_effect=MemoryError), pytest.raises(MemoryError):
        sift(Tracker(), columns([walk.at("a", 0)]))
