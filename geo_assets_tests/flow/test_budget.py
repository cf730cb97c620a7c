"""The vertex budget beside a slow model of it, and what it promises to whoever waits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from geo_assets.events.topics import HEADER_VERTEX_COUNT
from geo_assets.flow.budget import CAPACITY, BudgetFull, Ticket, VertexBudget, vertices_in

ROOM, SMALL, KEPT, WORKERS, MOST = 100, 10, 25, 3, 12
COSTS = st.one_of(st.integers(1, 30), st.integers(60, 130), st.sampled_from([None, 0, 10, 11, 75, 76, 100, 10**9]))
PARTITIONS = st.integers(0, 3)


def made(waiting: int = MOST) -> VertexBudget[int]:
    return VertexBudget(ROOM, small=SMALL, kept=KEPT / ROOM, workers=WORKERS, waiting=waiting)


@dataclass
class Asked:
    """A work as the model knows it."""

    number: int
    partition: int
    cost: int
    asked_s: float
    first_since: int = -1

    @property
    def small(self) -> bool:
        return self.cost <= SMALL

    @property
    def held(self) -> int:
        return self.cost if self.small else min(self.cost, ROOM - KEPT)


class Model:
    """The rules in words and lists: everything is looked for anew each time."""

    def __init__(self) -> None:
        self.waiting: list[Asked] = []
        self.under_way: list[Asked] = []
        self.events = 0

    def used(self, small: bool | None = None) -> int:
        return sum(one.held for one in self.under_way if small is None or one.small == small)

    def firsts(self, small: bool) -> list[Asked]:
        found = [
            one for one in self.waiting if not any(o.partition == one.partition and o.number < one.number
                                                   for o in self.waiting)
        ]  # fmt: skip
        for one in sorted(found, key=lambda one: one.number):
            if one.first_since < 0:
                self.events += 1
                one.first_since = self.events
        return sorted((one for one in found if one.small == small), key=lambda one: one.first_since)

    def ask(self, number: int, partition: int, vertices: int | None, now_s: float) -> None:
        self.waiting.append(Asked(number, partition, min(vertices or ROOM, ROOM), now_s))
        self.firsts(True)

    def start(self) -> list[int]:
        started: list[int] = []
        while True:
            large, small = self.firsts(False)[:1], self.firsts(True)[:1]
            for one in large:
                few = sum(not each.small for each in self.under_way) < WORKERS - 1
                if few and self.used(False) + one.held <= ROOM - KEPT and self.used() + one.held <= ROOM:
                    break
            else:
                for one in small:
                    within = self.used() + one.held <= ROOM
                    if within and (not large or self.used(True) + one.held <= KEPT):
                        break
                else:
                    return started
            self.waiting.remove(one)
            self.under_way.append(one)
            started.append(one.number)
            self.firsts(True)


class BudgetMachine(RuleBasedStateMachine):
    """Whatever is asked, granted, refunded and withdrawn, the budget does as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.budget, self.model = made(), Model()
        self.now = 100.0
        self.tickets: list[Ticket[int]] = []
        self.started: list[Ticket[int]] = []

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(partition=PARTITIONS, vertices=COSTS)
    def somebody_asks(self, partition: int, vertices: int | None) -> None:
        number = len(self.tickets)
        if len(self.model.waiting) == MOST:
            with pytest.raises(BudgetFull):
                self.budget.ask(partition, number, vertices, self.now)
            return
        self.tickets.append(self.budget.ask(partition, number, vertices, self.now))
        self.model.ask(number, partition, vertices, self.now)
        assert self.tickets[-1].cost == self.model.waiting[-1].cost <= ROOM

    @rule()
    def what_may_start_starts(self) -> None:
        granted = self.budget.grants()
        assert [ticket.work for ticket in granted] == self.model.start()
        self.started += granted
        assert self.budget.grants() == []

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def one_ends_or_is_withdrawn(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        ticket.refund()
        self.model.waiting = [one for one in self.model.waiting if one.number != ticket.work]
        self.model.under_way = [one for one in self.model.under_way if one.number != ticket.work]
        self.model.firsts(True)

    @invariant()
    def it_stands_as_the_model(self) -> None:
        found = self.budget.gauges(self.now)
        assert found.in_use == self.model.used() <= ROOM
        assert (found.under_way, found.waiting) == (len(self.model.under_way), len(self.model.waiting))
        assert found.oldest_wait_s == max((self.now - one.asked_s for one in self.model.waiting), default=0.0)
        assert self.model.used(False) <= ROOM - KEPT
        assert sum(not one.small for one in self.model.under_way) < WORKERS

    @invariant()
    def each_partition_starts_in_its_order(self) -> None:
        for partition in {ticket.partition for ticket in self.started}:
            numbers = [ticket.work for ticket in self.started if ticket.partition == partition]
            assert numbers == sorted(numbers)

    def teardown(self) -> None:
        for ticket in self.tickets:
            ticket.refund()
        assert self.budget.gauges(self.now) == (0, 0, 0, 0.0, 0.0)


def test_it_is_never_above_its_capacity_keeps_order_and_does_as_the_slow_model() -> None:
    few = settings(max_examples=150, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(BudgetMachine, settings=few)


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(COSTS, max_size=3),
    target=COSTS,
    others=st.lists(st.tuples(st.integers(1, 3), COSTS), min_size=5, max_size=30),
    lasts=st.integers(1, 4),
)
def test_nobody_waits_for_ever_whatever_comes_behind(
    before: list[int | None], target: int | None, others: list[tuple[int, int | None]], lasts: int
) -> None:
    """Three other partitions never run dry; every work ends `lasts` steps after its start."""
    budget = made(waiting=10_000)
    under_way: list[tuple[int, Ticket[int]]] = []
    for partition, vertices in others:
        budget.ask(partition, 0, vertices, 0.0)
    for vertices in before:
        budget.ask("mine", 0, vertices, 0.0)
    wanted = budget.ask("mine", 1, target, 0.0)
    # Of each partition at most one goes before each of mine, and each starts when what is under way has ended.
    bound = (len(before) + 1) * 4 * 2 * lasts + lasts
    for step in range(bound):
        for ticket in budget.grants():
            under_way.append((step + lasts, ticket))
        if wanted.state == "granted":
            return
        for partition, vertices in others:
            if budget.gauges(0.0).waiting < 1_000:
                budget.ask(partition, 0, vertices, 0.0)
        for _, ticket in (pair for pair in under_way if pair[0] <= step):
            ticket.refund()
        under_way = [pair for pair in under_way if pair[0] > step]
    pytest.fail(f"a work of {target} vertices still waits after {bound} steps")


def test_a_giant_does_not_hold_up_small_work_of_other_partitions() -> None:
    budget = VertexBudget[str]()
    giants = [budget.ask("giants", f"giant {n}", 41_000, 0.0) for n in range(50)]
    assert [ticket.work for ticket in budget.grants()] == ["giant 0"]
    for number in range(20):
        edit = budget.ask(number % 7, f"edit {number}", 600, 0.0)
        assert [ticket.work for ticket in budget.grants()] == [f"edit {number}"]
        edit.refund()
    giants[0].refund()
    assert [ticket.work for ticket in budget.grants()] == ["giant 1"]


def test_large_work_leaves_a_worker_to_small_work_however_much_room_there_is() -> None:
    budget = made()
    large = [budget.ask(n, n, SMALL + 1, 0.0) for n in range(3)]
    assert [ticket.work for ticket in budget.grants()] == [0, 1]
    budget.ask(3, 3, SMALL, 0.0)
    assert [ticket.work for ticket in budget.grants()] == [3]
    large[0].refund()
    assert [ticket.work for ticket in budget.grants()] == [2]


def test_small_work_that_never_ends_coming_does_not_hold_up_a_giant() -> None:
    budget = VertexBudget[str](40, small=10, kept=0.25)
    under_way = []
    for _ in range(4):
        budget.ask("small", "small", 10, 0.0)
    under_way += budget.grants()
    assert budget.gauges(0.0).in_use == 40
    giant = budget.ask("giant", "giant", None, 0.0)
    while giant.state == "waiting":
        assert under_way, "nothing is under way, and the giant waits"
        under_way.pop(0).refund()
        budget.ask("small", "small", 10, 0.0)
        under_way += [ticket for ticket in budget.grants() if ticket is not giant]
    assert budget.gauges(0.0).in_use <= 40


@pytest.mark.parametrize("vertices", [None, 0, -5, CAPACITY, CAPACITY + 1, 10**12])
def test_what_nobody_measured_and_what_is_larger_costs_the_whole_budget(vertices: int | None) -> None:
    assert VertexBudget[int]().ask(0, 1, vertices, 0.0).cost == CAPACITY


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("41000", 41_000),
        ("0", 0),
        ("", None),
        ("many", None),
        ("-3", None),
        ("4e3", None),
        ("٤", None),
        ("9" * 13, None),
    ],
)
def test_the_header_of_any_producer_is_read_or_counts_as_missing(text: str, found: int | None) -> None:
    assert vertices_in({HEADER_VERTEX_COUNT: text}) == found
    assert vertices_in({}) is None


def test_work_that_fails_refunds_all_the_same_and_only_once() -> None:
    budget = VertexBudget[int]()
    budget.ask(0, 1, 500, 0.0)
    (ticket,) = budget.grants()
    with pytest.raises(ZeroDivisionError), ticket:
        _ = 1 / 0
    ticket.refund()
    assert budget.gauges(0.0).in_use == 0


def test_from_a_pool_of_threads_it_is_never_above_its_capacity_and_ends_at_zero() -> None:
    budget, lock = VertexBudget[int](1_000, small=100, kept=0.2, workers=4, waiting=1_000), threading.Lock()
    in_use = highest = done = 0
    ended = threading.Event()

    def work(ticket: Ticket[int]) -> None:
        nonlocal in_use, highest, done
        with ticket:
            with lock:
                in_use += ticket.held
                highest = max(highest, in_use)
            sum(range(ticket.work))
            with lock:
                in_use -= ticket.held
                done += 1
        ended.set()

    with ThreadPoolExecutor(4) as pool:
        for number in range(600):
            budget.ask(number % 5, number, (number * 37) % 1_500, 0.0)
            for ticket in budget.grants():
                pool.submit(work, ticket)
        while budget.gauges(0.0).waiting:
            ended.wait(5)
            ended.clear()
            for ticket in budget.grants():
                pool.submit(work, ticket)
    assert (done, budget.gauges(0.0).in_use) == (600, 0)
    assert highest <= 1_000


@pytest.mark.parametrize(
    "options",
    [{"small": 50, "kept": 0.25}, {"kept": 1.0}, {"kept": 0.0}, {"small": 0}, {"workers": 1}, {"waiting": 0}],
)
def test_numbers_that_keep_no_promise_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"capacity|workers"):
        VertexBudget[int](100, **{"small": 10, **options})  # pyright: ignore[reportArgumentType]
