from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.flow.stages import BUCKETS_S, DEDUP, EMIT, PUBLISH, STAGES, Buckets, Stage, StageGuard


@given(st.lists(st.floats(0, 60), min_size=1, max_size=200), st.sampled_from(BUCKETS_S))
@settings(max_examples=100, deadline=None)
def test_a_ceiling_is_exceeded_when_more_than_five_in_a_hundred_lie_above(values: list[float], ceiling: float) -> None:
    one, many = Buckets(), Buckets()
    for value in values:
        one.observe(value)
    many.observe_all(np.array(values))
    assert one.counts == many.counts
    assert one.count == many.count == len(values)
    assert one.total == pytest.approx(many.total)
    assert one.exceeds(ceiling) == (sum(value > ceiling for value in values) > 0.05 * len(values))


def guard() -> tuple[StageGuard, dict[str, Buckets], list[tuple[str, str]]]:
    tripped: list[tuple[str, str]] = []

    def trip(stage: Stage, reason: str) -> None:
        tripped.append((stage.name, reason))

    buckets = {stage.name: Buckets() for stage in STAGES}
    return StageGuard(STAGES, buckets, trip), buckets, tripped


def test_a_stage_in_breach_for_three_intervals_trips_the_next_one() -> None:
    guarded, buckets, tripped = guard()
    for _ in range(2):
        buckets[DEDUP.name].observe(0.005, 100)
        guarded.interval()
        assert tripped == []
    buckets[DEDUP.name].observe(0.005, 100)
    guarded.interval()
    assert [name for name, _ in tripped] == [PUBLISH.name]
    assert "p95 of dedup above 2 ms in 3 intervals in a row" in tripped[0][1]


def test_a_good_interval_or_an_idle_one_ends_the_row() -> None:
    guarded, buckets, tripped = guard()
    for values in ((0.005, 0.005, 0.0001, 0.005, 0.005), (None, 0.005, 0.005, None, 0.005, 0.005)):
        for value in values:
            if value is not None:
                buckets[EMIT.name].observe(value, 10)
            guarded.interval()
    assert tripped == []


def test_earlier_intervals_do_not_count_and_the_last_stage_has_none_behind_it() -> None:
    guarded, buckets, tripped = guard()
    buckets[EMIT.name].observe(0.0001, 1_000_000)
    guarded.interval()
    for _ in range(3):
        buckets[EMIT.name].observe(0.005, 10)
        buckets[PUBLISH.name].observe(0.1, 10)
        guarded.interval()
    assert [name for name, _ in tripped] == [DEDUP.name]


def test_an_interval_in_which_little_passed_says_nothing_of_a_stage() -> None:
    tripped: list[tuple[Stage, str]] = []
    buckets = {stage.name: Buckets() for stage in STAGES}
    guarded = StageGuard(STAGES, buckets, lambda stage, reason: tripped.append((stage, reason)), least=100)
    for _ in range(6):
        buckets["emit"].observe(1.0, 99)
        guarded.interval()
    assert tripped == []
    for _ in range(3):
        buckets["emit"].observe(1.0, 100)
        guarded.interval()
    assert len(tripped) == 1
