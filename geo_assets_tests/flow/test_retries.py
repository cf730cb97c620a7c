"""Retries: spread in time, few in number, none at the cost of fresh work, and nothing that is lost on the way."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.flow.bounds import PAUSE_AT
from geo_assets.flow.retries import CLOSE_AT, Backoff, Fault, Retries, RetryTokens


def test_the_bounds_double_up_to_the_cap() -> None:
    assert [Backoff().bound_s(failed) for failed in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert Backoff().bound_s(100_000) == 30
    assert Backoff(base_s=30, factor=1).bound_s(10**9) == 30


@given(st.integers(1, 60), st.integers())
def test_a_wait_is_anything_up_to_its_bound(failed: int, seed: int) -> None:
    backoff = Backoff()
    assert 0 <= backoff.wait_s(failed, Random(seed)) <= backoff.bound_s(failed)


def test_jitter_is_full_so_that_a_thousand_that_failed_together_come_back_evenly() -> None:
    chance = Random(7)
    waits = [Backoff().wait_s(4, chance) for _ in range(1_000)]
    tenths = [sum(tenth <= 10 * wait / 4 < tenth + 1 for wait in waits) for tenth in range(10)]
    assert min(tenths) > 60


def test_five_tries_in_all_and_then_a_dead_letter() -> None:
    retries, now = Retries[str](chance=Random(1)), 0.0
    attempt, tries = 1, 1
    while retries.failed("edit", attempt, "transient", now) == "again":
        now += 60
        ((work, attempt),) = retries.due(now, 0.0)
        assert work == "edit"
        tries += 1
    assert (tries, len(retries), retries.counts) == (5, 0, {"again": 4, "dead": 1, "full": 0})


def test_what_is_permanent_is_never_tried_again() -> None:
    retries = Retries[str]()
    assert retries.failed("edit", 1, "permanent", 0.0) == "dead"
    assert (retries.next_s(), retries.due(1e9, 0.0)) == (None, [])


def test_retries_close_before_records_stop_being_asked_for_and_open_much_lower() -> None:
    assert CLOSE_AT < PAUSE_AT
    retries = Retries[int](chance=Random(1))
    for number in range(3):
        retries.failed(number, 1, "transient", 0.0)
    seen: list[tuple[int, bool]] = []
    for now, saturation in enumerate((0.6, 0.59, 0.4, 0.39), start=10):
        seen.append((len(retries.due(now, saturation)), retries.closed))
    assert seen == [(0, True), (0, True), (0, True), (3, False)]


def test_what_finds_no_place_is_left_to_whoever_stands_behind_it() -> None:
    retries = Retries[int](waiting=2)
    verdicts = [retries.failed(number, 1, "transient", 0.0) for number in range(3)]
    assert verdicts == ["again", "again", "full"]


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),
        st.one_of(st.sampled_from([0.0, 0.5, 0.7]), st.floats(0.0, 1.2)),
        st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["transient", "permanent"])), max_size=8),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.integers())
def test_whatever_fails_and_however_full_it_is(
    events: list[tuple[float, float, list[tuple[int, Fault]]]], seed: int
) -> None:
    a_s, burst, most = 2.0, 3, 20
    backoff = Backoff()
    retries = Retries[int](backoff, RetryTokens(a_s, burst), waiting=most, chance=Random(seed))
    now, number = 0.0, 0
    earliest: dict[int, tuple[float, int]] = {}
    given: list[float] = []

    def take(saturation: float) -> None:
        for work, attempt in retries.due(now, saturation):
            failed_s, failed = earliest.pop(work)
            assert attempt == failed + 1 <= backoff.attempts
            assert now >= failed_s
            given.append(now)

    for seconds, saturation, failures in events:
        now += seconds
        before = len(given)
        take(saturation)
        if saturation >= CLOSE_AT:
            assert len(given) == before, "a retry took the room of fresh work"
        for attempt, fault in failures:
            verdict = retries.failed(number, attempt, fault, now)
            if fault == "permanent" or attempt >= backoff.attempts:
                assert verdict == "dead"
            else:
                assert verdict == ("again" if len(earliest) < most else "full")
            if verdict == "again":
                earliest[number] = now, attempt
            number += 1
            assert len(retries) == len(earliest) <= most
    # Never more than the bucket's rate, in any span of time.
    for first in range(len(given)):
        for last in range(first, len(given)):
            assert last - first + 1 <= burst + a_s * (given[last] - given[first]) + 1e-6
    # With room again, everything comes: nothing waits longer than its bound and the bucket's pace.
    now += backoff.cap_s
    for _ in range(most):
        take(0.0)
        now += 1 / a_s
    assert not earliest
    assert retries.next_s() is None


@pytest.mark.parametrize("changes", [{"base_s": 0}, {"factor": 0.5}, {"cap_s": 0.1}, {"attempts": 0}])
def test_a_backoff_out_of_order_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="base_s"):
        Backoff(**changes)


@pytest.mark.parametrize("changes", [{"a_s": 0}, {"burst": 0}, {"open_at": 0.6}, {"close_at": 1.5}])
def test_a_bucket_out_of_order_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a_s"):
        RetryTokens(**changes)
