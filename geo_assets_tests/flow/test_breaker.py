from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from geo_assets.flow.breaker import Breaker


class BreakerMachine(RuleBasedStateMachine):
    """The breaker beside a model in words: a row of failures, a time since when it is open, one probe in force."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.breaker = Breaker(3, 5.0, self.told.append)
        self.now = 100.0
        self.row = 0
        self.open_since: float | None = None
        self.probe: int | None = None
        self.probes: list[int] = []

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.9, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def something_succeeds(self) -> None:
        self.breaker.succeeded()
        if self.open_since is None:
            self.row = 0

    @rule()
    def something_fails(self) -> None:
        opened = self.breaker.failed(self.now, reason="why")
        if self.open_since is None:
            self.row += 1
            assert opened == (self.row == 3)
            if opened:
                self.open_since, self.probe = self.now, None
        else:
            assert not opened

    @rule()
    def somebody_asks_to_be_the_probe(self) -> None:
        number = self.breaker.probe(self.now)
        due = self.open_since is not None and self.now - self.open_since >= 5.0
        assert (number is not None) == due
        if number is not None:
            assert number not in self.probes
            self.probes.append(number)
            self.probe, self.open_since = number, self.now

    @rule(which=st.integers(0, 3), well=st.booleans())
    def a_probe_reports(self, which: int, well: bool) -> None:
        if not self.probes:
            return
        number = self.probes[-1 - which % len(self.probes)]
        if self.open_since is None:
            return
        if well:
            self.breaker.succeeded(number)
            if number == self.probe:
                self.row, self.open_since, self.probe = 0, None, None
        else:
            opened = self.breaker.failed(self.now, number)
            assert opened == (number == self.probe)
            if opened:
                self.open_since, self.probe = self.now, None

    @rule()
    def it_is_tripped(self) -> None:
        self.breaker.trip(self.now, "tripped")
        if self.open_since is None or self.probe is not None:
            self.open_since, self.probe = self.now, None

    @invariant()
    def it_is_what_the_model_says(self) -> None:
        if self.open_since is None:
            assert self.breaker.state == "closed"
        else:
            assert self.breaker.state == ("half-open" if self.probe is not None else "open")
        assert self.told[-1:] in ([], [self.breaker.state])


def test_it_opens_after_failures_in_a_row_and_closes_by_its_probe_alone() -> None:
    few = settings(max_examples=100, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(BreakerMachine, settings=few)


def test_of_many_threads_that_ask_at_once_exactly_one_is_the_probe() -> None:
    for _ in range(50):
        breaker = Breaker(1, 5.0)
        breaker.failed(0.0)
        start = threading.Barrier(8)
        chosen: list[int] = []

        def ask(breaker: Breaker = breaker, start: threading.Barrier = start, chosen: list[int] = chosen) -> None:
            start.wait()
            number = breaker.probe(5.0)
            if number is not None:
                chosen.append(number)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(chosen) == 1
        breaker.succeeded(chosen[0])
        assert breaker.closed


def test_numbers_that_make_no_breaker_are_refused() -> None:
    with pytest.raises(ValueError, match="failures"):
        Breaker(0)


def test_one_that_is_held_open_lets_no_probe_through_until_it_is_let_go() -> None:
    breaker = Breaker(3, 5.0)
    breaker.hold("open", 100.0)
    assert (breaker.state, breaker.reason) == ("open", "an operator holds it open")
    assert breaker.probe(200.0) is None
    breaker.succeeded()
    assert breaker.state == "open"
    breaker.hold(None, 201.0)
    number = breaker.probe(201.0)
    assert number is not None
    breaker.hold("open", 202.0)
    breaker.succeeded(number)
    assert breaker.state == "open"
    breaker.hold(None, 203.0)
    breaker.succeeded(breaker.probe(203.0))
    assert breaker.closed


def test_one_that_is_held_closed_opens_for_no_failures_in_a_row_and_for_who_cannot_go_on() -> None:
    breaker = Breaker(3, 5.0)
    breaker.trip(100.0, "why")
    breaker.hold("closed", 100.0)
    assert breaker.closed
    assert not any(breaker.failed(100.0 + n) for n in range(10))
    assert breaker.closed
    breaker.trip(120.0, "the publisher is broken")
    assert breaker.state == "open"
    breaker.succeeded(breaker.probe(125.0))
    assert breaker.closed
    breaker.hold(None, 140.0)
    assert [breaker.failed(140.0 + n) for n in range(3)] == [False, False, True]
