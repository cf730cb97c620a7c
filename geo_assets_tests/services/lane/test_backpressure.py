"""With more in hand than it can build the lane stays a member, asks for nothing, pauses late, and builds everything."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from geo_assets.events import topics
from geo_assets.flow.budget import Ticket, VertexBudget
from geo_assets.flow.pausing import PAUSE_AFTER_S, PAUSED_LEAST_S
from geo_assets.services.lane import lane as lane_module
from geo_assets.services.lane import metrics
from geo_assets.services.lane.lane import Lane
from geo_assets.services.lane.reading import HintReader
from geo_assets.services.pool import WorkerPool
from geo_assets_tests.services.lane.test_burst import giant
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import HERE, World, feature

FULL = 100
"""Tiles that fill the queue here."""


@pytest.fixture(params=STACKS)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with changes_of(request.param) as changes:
        world = World(tmp_path / "home", live_coalesce_ms=0, log_partitions=3, **changes)
        yield world
        world.close()


class Clock:
    """Seconds, which the test puts forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def value(gauge: Any) -> float:
    return gauge.collect()[0].samples[0].value


def hint(world: World, number: int) -> None:
    """An edit of many tiles, each of its own."""
    at = (HERE[0] + 0.05 * (number % 7), HERE[1] + 0.05 * (number // 7))
    world.edit(feature(number, 1, at=at, size=0.005))


def test_at_a_full_queue_it_keeps_polling_asks_for_nothing_pauses_late_goes_on_and_builds_everything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "QUEUE_FULL", FULL)
    clock = Clock()
    asked: list[int] = []
    poll = HintReader.poll

    def polled(self: HintReader, timeout_s: float, most: int = 500) -> Any:
        asked.append(most)
        # A few at a time, so that a queue is full and not flooded.
        return poll(self, timeout_s, min(most, 20))

    monkeypatch.setattr(HintReader, "poll", polled)
    here = Lane(world.stack, "lane:1", clock=clock)
    held = set(here._reader._consumer.assignment())
    try:
        here.turn(0.0)
        edits = 0
        with monkeypatch.context() as busy:
            busy.setattr(Lane, "_work", lambda self: None)
            deadline = time.monotonic() + patient(60)
            while here._flow.asks:
                assert time.monotonic() < deadline
                if not asked or len(here._queue) < FULL:
                    hint(world, edits := edits + 1)
                here.turn(0.05)
            waiting = set(here._queue)
            assert 0.7 * FULL <= len(waiting) < 0.7 * FULL + 20 + lane_module.SWEEP_TILES
            for _ in range(6):
                hint(world, edits := edits + 1)
            asked.clear()
            for _ in range(20):
                here.turn(0.0)
            assert asked == [0] * len(asked)
            assert len(asked) >= 20, "it polls in every turn"
            assert set(here._queue) == waiting
            assert {pair for pair, one in here._reader.holdings().items() if one.paused} == set()

            clock.ahead_s += PAUSE_AFTER_S
            here.turn(0.0)
            paused = {pair for pair, one in here._reader.holdings().items() if one.paused}
            assert len(paused) == len(held) - 1, "of the one broker's partitions one goes on"
            assert here._reader.holdings().keys() == held, "it is a member all the while"
            clock.ahead_s += 2.0
            here.turn(0.0)
            assert value(metrics.PAUSED) == len(paused)
            assert value(metrics.NOT_ASKING) >= PAUSE_AFTER_S + 2.0

        # As soon as there is room it asks, and what is paused goes on a little later.
        while not here._flow.asks:
            here.turn(0.0)
        assert len(here._queue) < 0.5 * FULL
        clock.ahead_s += PAUSED_LEAST_S
        here.turn(0.0)
        assert not any(one.paused for one in here._reader.holdings().values())
        everything = world.stack.log.extents(topics.TILES)
        deadline = time.monotonic() + patient(90)
        while dirty(world) or unread(world, everything) or here._queue:
            assert time.monotonic() < deadline, "it does not come to rest"
            here.turn(0.05)
        clock.ahead_s += 2.0
        here.turn(0.0)
        assert (value(metrics.PAUSED), value(metrics.NOT_ASKING)) == (0, 0)
    finally:
        here.close()
    assert world.mark_hints() == 0
    assert waiting < world.published().keys()
    at_16 = [one["version"] for key in world.published() if key.startswith("16:") for one in world.properties(key)]
    assert len(at_16) >= edits


def dirty(world: World) -> list[str]:
    return [state.key for state in world.stack.ledger.dirty(1_000, unleased=False)]


def unread(world: World, extents: Any) -> bool:
    positions = world.stack.ledger.positions(world.stack.log.topic_id(topics.TILES))
    return any(positions.get(number, extent.begin) < extent.end for number, extent in extents.items())


def test_an_outage_while_partitions_are_paused_leaves_none_paused_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "QUEUE_FULL", 1)
    clock = Clock()
    here = Lane(world.stack, "lane:1", clock=clock)
    try:
        here.turn(0.0)
        with monkeypatch.context() as busy:
            busy.setattr(Lane, "_work", lambda self: None)
            world.edit(feature(1, 1))
            deadline = time.monotonic() + patient(60)
            while not here._paused:
                assert time.monotonic() < deadline
                here.turn(0.05)
                clock.ahead_s += 1.0
        here.give_up_turn()  # As `run` does after an outage: what was read comes again.
        clock.ahead_s += PAUSED_LEAST_S
        here.turn(0.0)
        assert not any(one.paused for one in here._reader.holdings().values())
        deadline = time.monotonic() + patient(60)
        while dirty(world) or not world.published():
            assert time.monotonic() < deadline
            here.turn(0.05)
    finally:
        here.close()


# -- the budget, through the lane ----------------------------------------------------------------------------------


SMALL_VERTICES, LARGE_VERTICES = 4_000, 12_000


def circle(number: int, at: tuple[float, float], vertices: int) -> dict[str, Any]:
    """A round building some metres across, around `at` (lon, lat)."""
    turns = [2 * math.pi * step / vertices for step in range(vertices)]
    ring = [[at[0] + 0.001 * math.cos(turn), at[1] + 0.001 * math.sin(turn)] for turn in turns]
    return {**feature(number, 1), "geometry": {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}}


class HeldBack:
    """Builds in worker processes, each of which begins when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start = WorkerPool.start
        self.waiting: list[tuple[str, WorkerPool, Any, Any, Future[Any]]] = []
        back = self

        def start(pool: WorkerPool, work: Any, task: Any) -> Any:
            if not hasattr(task, "key"):
                return back.start(pool, work, task)
            future: Future[Any] = Future()
            back.waiting.append((task.key, pool, work, task, future))
            return future

        monkeypatch.setattr(WorkerPool, "start", start)

    def go(self) -> str:
        """Build the one that has waited longest; its tile."""
        key, pool, work, task, future = self.waiting.pop(0)
        future.set_result(self.start(pool, work, task).result(timeout=patient(60)))
        return key


@pytest.fixture
def city(tmp_path: Path) -> Iterator[World]:
    # Worker processes of these tests began before another store's credentials were in the environment.
    home = tmp_path / "home"
    home.mkdir()
    (home / "layers.yaml").write_text("max_zoom: 14\nlayers: [{name: buildings, min_zoom: 13, min_pixels: 0}]\n")
    world = World(home, live_coalesce_ms=0)
    yield world
    world.close()


def test_small_edits_behind_giants_are_built_while_the_first_of_them_is_under_way_and_giants_keep_their_order(
    city: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = HeldBack(monkeypatch)
    asked: list[Ticket[Any]] = []
    granted: list[Ticket[Any]] = []
    crowd: list[int] = []
    ask, grants = VertexBudget.ask, VertexBudget.grants

    def noted(self: VertexBudget[Any], *arguments: Any) -> Ticket[Any]:
        asked.append(ask(self, *arguments))
        return asked[-1]

    def grant(self: VertexBudget[Any]) -> list[Ticket[Any]]:
        found = grants(self)
        granted.extend(found)
        if any(not one.small and one.state == "waiting" for one in asked):
            crowd.append(sum(one.held for one in asked if one.small and one.state == "granted"))
        assert self.gauges(0.0).in_use <= self.capacity
        return found

    monkeypatch.setattr(VertexBudget, "ask", noted)
    monkeypatch.setattr(VertexBudget, "grants", grant)
    here = Lane(city.stack, "lane:1")
    try:
        here.turn(0.0)
        for number in range(3):
            city.edit(circle(number, (HERE[0] + 0.1 * number, HERE[1]), LARGE_VERTICES))
        deadline = time.monotonic() + patient(60)
        while not [one for one in asked if not one.small]:
            assert time.monotonic() < deadline
            here.turn(0.05)
        assert len(back.waiting) == city.settings.live_build_workers, "one fewer than works: that one is for small work"
        for number in range(20):
            city.edit(circle(100 + number, (HERE[0] + 0.05 * number, HERE[1] + 0.3), SMALL_VERTICES))
        small: set[str] = set()
        while len(small) < 40:  # Zooms 13 and 14 of each.
            assert time.monotonic() < deadline, f"{len(small)} small tiles while a giant is under way"
            here.turn(0.05)
            small = {key for key in city.published() if any(p["version"] for p in city.properties(key))}
        assert [one.work.task.key for one in granted if not one.small] == [back.waiting[0][0]]
        assert not small & {one.work.task.key for one in asked if not one.small}

        ended: list[str] = []
        while dirty(city) or here._jobs:
            assert time.monotonic() < deadline
            if back.waiting:
                ended.append(back.go())
            here.turn(0.05)
    finally:
        here.close()
    large = [one.work.task.key for one in asked if not one.small]
    assert ended == [one.work.task.key for one in granted if not one.small] == large, "first in, first out"
    quarter = city.settings.vertex_budget // 4
    assert crowd, "giants waited"
    assert 0 < max(crowd) <= quarter < 20 * SMALL_VERTICES, "while one waits, small work keeps to its share"
    assert {one.state for one in asked} == {"refunded"}


def test_a_giant_that_fails_gives_back_what_it_holds(city: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [True]
    start = WorkerPool.start

    def breaks(self: WorkerPool, work: Any, task: Any) -> Any:
        if not hasattr(task, "key") or not failing[0]:
            return start(self, work, task)
        future: Future[Any] = Future()
        future.set_exception(MemoryError("too large"))
        return future

    monkeypatch.setattr(WorkerPool, "start", breaks)
    here = Lane(city.stack, "lane:1")
    try:
        here.turn(0.0)
        city.edit(giant(0))
        deadline = time.monotonic() + patient(60)
        while not [one for one in city.stack.ledger.dirty(100, unleased=False) if one.attempts]:
            assert time.monotonic() < deadline
            here.turn(0.05)
        failing[0] = False
        while dirty(city):
            assert time.monotonic() < deadline
            here.turn(0.05)
        assert here._budget.gauges(0.0)[:3] == (0, 0, 0)
    finally:
        here.close()
    assert all(city.properties(key) for key in city.published())
