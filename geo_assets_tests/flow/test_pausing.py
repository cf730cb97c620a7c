"""Whatever happens to a consumer, it stops asking first, pauses late, leaves each broker a partition, and goes on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from geo_assets.flow.pausing import PAUSE_AFTER_S, PAUSED_LEAST_S, Decision, Flow, Limits, decide

ONE = {"a": [0, 1, 2]}
TWO = {"a": [0, 1, 2], "b": [3, 4], "c": [5]}
LAG = {0: 50, 1: 10, 2: 99, 3: 7, 4: 7}


def steps(*looks: tuple[float, float], brokers: Mapping[str, list[int]] = TWO) -> list[Decision[int]]:
    """Decisions at times with fills, of a client that does as it is told."""
    flow, paused, found = Flow(), set[int](), list[Decision[int]]()
    for now, fill in looks:
        found.append(decide(flow, fill, brokers, paused, LAG, now))
        flow = found[-1].flow
        paused = (paused - found[-1].resume) | found[-1].pause
    return found


def test_it_stops_asking_at_seventy_hundredths_and_asks_again_below_fifty() -> None:
    fills = [0.69, 0.7, 0.9, 0.5, 0.49, 0.69]
    assert [one.flow.asks for one in steps(*enumerate(fills))] == [True, False, False, False, True, True]


def test_partitions_are_paused_late_and_each_broker_keeps_the_one_that_is_least_behind() -> None:
    early, still, late, later = steps((0, 0.8), (9.9, 0.8), (10, 0.8), (11, 0.8))
    assert not early.pause
    assert not still.pause
    assert late.pause == {0, 2, 4}
    assert (later.pause, later.resume) == (frozenset(), frozenset())


def test_a_pause_lasts_some_seconds_and_ends_while_there_is_still_work() -> None:
    *_, asks, early, end = steps((0, 0.8), (10, 0.8), (10.5, 0.4), (14.9, 0.4), (15, 0.4))
    assert asks.flow.asks
    assert not asks.resume
    assert not early.resume
    assert (end.resume, end.flow) == (frozenset({0, 2, 4}), Flow())


def test_a_consumer_of_one_partition_a_broker_is_never_paused_and_still_says_how_long_it_asks_for_nothing() -> None:
    first, last = steps((0, 0.9), (40, 0.9), brokers={"a": [0], "b": [1]})
    assert not first.pause | last.pause
    assert last.flow.stopped_since_s == 0


def test_partitions_that_come_and_go_and_change_brokers_leave_none_without_one_that_goes_on() -> None:
    flow = Flow(0.0, 10.0)
    given_up = decide(flow, 0.9, {"a": [0, 2]}, {0, 2}, LAG, 11.0)
    assert (given_up.pause, given_up.resume) == (frozenset(), {0})
    moved = decide(flow, 0.9, {"a": [1], "b": [0, 2]}, {0, 2}, LAG, 11.0)
    assert (moved.pause, moved.resume) == (frozenset(), {0})
    back = decide(flow, 0.9, {"a": [0, 1, 2]}, {2}, LAG, 12.0)
    assert (back.pause, back.resume) == ({0}, frozenset())
    none = decide(flow, 0.9, {}, set[int](), LAG, 13.0)
    assert (none.pause, none.resume, none.flow.paused_since_s) == (frozenset(), frozenset(), None)


class Consumer(RuleBasedStateMachine):
    """A consumer whose client does as it is told, and what must hold of it at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self.now = 0.0
        self.brokers: dict[str, list[int]] = {}
        self.client: set[int] = set()
        self.stopped_since: float | None = None

    @initialize(brokers=st.sampled_from([ONE, TWO]))
    def begin(self, brokers: dict[str, list[int]]) -> None:
        self.brokers = dict(brokers)

    @rule(leaders=st.sampled_from(["aaabbc", "aaaaaa", "abcabc", "aaa---", "-bb-cc", "aabbb-", "------", "c-abba"]))
    def partitions_move(self, leaders: str) -> None:
        self.brokers = {name: [n for n, leader in enumerate(leaders) if leader == name] for name in "abc"}
        self.client &= {n for n, leader in enumerate(leaders) if leader != "-"}

    @rule(number=st.integers(0, 5))
    def a_partition_leaves_and_comes_back(self, number: int) -> None:
        self.client.discard(number)

    @rule(
        seconds=st.sampled_from([0.0, 0.3, 2.0, 6.0, 11.0]),
        fill=st.sampled_from([0.0, 0.3, 0.49, 0.5, 0.6, 0.69, 0.7, 0.95, 1.4]),
        lag=st.sampled_from([{}, LAG, {0: 9, 1: 8, 2: 7, 3: 6, 4: 5, 5: 4}]),
    )
    def it_is_looked_at(self, seconds: float, fill: float, lag: dict[int, int]) -> None:
        self.now += seconds
        done = decide(self.flow, fill, self.brokers, self.client, lag, self.now)
        assert not done.pause & self.client
        assert done.resume <= self.client
        self.client = (self.client - done.resume) | done.pause
        assert bool(self.client) == (done.flow.paused_since_s is not None)
        held = {partition for partitions in self.brokers.values() for partition in partitions}
        assert self.client <= held
        for partitions in self.brokers.values():
            assert not partitions or set(partitions) - self.client, "a broker has nothing left that goes on"
        # Asking stops when it is full, goes on when it is empty, and in between stays as it was.
        if fill >= 0.7:
            assert not done.flow.asks
        if fill < 0.5:
            assert done.flow.asks
        if 0.5 <= fill < 0.7:
            assert done.flow.asks == self.flow.asks
        self.stopped_since = None if done.flow.asks else self.now if self.stopped_since is None else self.stopped_since
        assert done.flow.stopped_since_s == self.stopped_since
        if done.pause:
            assert self.stopped_since is not None
            assert self.now - self.stopped_since >= PAUSE_AFTER_S
        if self.stopped_since is not None and self.now - self.stopped_since >= PAUSE_AFTER_S:
            assert all(len(set(partitions) - self.client) <= 1 for partitions in self.brokers.values())
        if (
            done.flow.asks
            and self.flow.paused_since_s is not None
            and self.now - self.flow.paused_since_s >= PAUSED_LEAST_S
        ):
            assert not self.client, "what is asked for again is not paused for ever"
        self.flow = done.flow


def test_of_any_consumer_at_any_time() -> None:
    run_state_machine_as_test(Consumer, settings=settings(max_examples=100, stateful_step_count=30, deadline=None))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.0, 1.0)), min_size=2, max_size=200))
def test_however_the_queue_swings_pauses_are_few(looks: list[tuple[float, float]]) -> None:
    flow, now, begun, paused = Flow(), 0.0, list[float](), set[int]()
    for seconds, fill in looks:
        now += seconds
        done = decide(flow, fill, ONE, paused, LAG, now)
        paused = (paused - done.resume) | done.pause
        if flow.paused_since_s is None and done.flow.paused_since_s is not None:
            begun.append(now)
        flow = done.flow
    assert all(after - before >= PAUSE_AFTER_S for before, after in pairwise(begun))


@pytest.mark.parametrize("changes", [{"ask_at": 0.7}, {"stop_at": 1.1}, {"ask_at": 0.0}, {"pause_after_s": -1.0}])
def test_limits_out_of_order_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ask_at"):
        Limits(**changes)
