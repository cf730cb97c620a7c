"""A routing run among fences that cost: many over each other, batches that take long, no room for more."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from geo_assets.flow.bounds import Bounds
from geo_assets.geofence import index as index_module
from geo_assets.geofence import tracker as tracker_module
from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.triggers import ENTER, Triggers
from geo_assets.services import holding, routing
from geo_assets.services.dead_letters import list_dead_letters
from geo_assets.services.router import Router, RouterOptions
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import (
    SIDE,
    SOUTH,
    WEST,
    consistent,
    expected,
    fence,
    position,
    post_fences,
    seen,
    walk,
    what,
)  # fmt: skip
from geo_assets_tests.services.test_routing import InThread, fences_of, marks, until

RULES = Rules(lateness_ms=1_000)
OPTIONS = routing.RoutingOptions(
    idle_s=0.3, snapshot_s=0.2, fences_s=0.05, rules=RULES, router=RouterOptions(slow_publish_s=1.0)
)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(Settings(home=tmp_path, log_partitions=3)) as opened:
        yield opened


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pairs judged at once."""
    for module in (tracker_module, index_module):
        monkeypatch.setattr(module, "MOST_PAIRS", 500)
    return 500


def test_rule_9_among_many_fences_over_each_other_no_more_is_held_than_the_queue_and_a_piece(
    stack: Stack, few_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 60 fences, each shifted by a hundredth of its side: a device of the walk is in and out of all of them at once.
    post_fences(stack, [fence(n, shift=-n + 1 + n / 100) for n in range(60)])
    stack.log.append(walk(25, 25, fences=3))
    held: list[int] = []
    route = Router.route

    def measured(self: Router, *args: Any, **more: Any) -> None:
        route(self, *args, **more)
        held.append(self.held)

    monkeypatch.setattr(Router, "route", measured)
    bounds = Bounds(capacity=1_000)
    options = replace(OPTIONS, router=RouterOptions(slow_publish_s=1.0, bounds=bounds))
    assert routing.route(stack, options).ended == "idle"
    told = seen(stack)
    consistent(told)
    assert what(told) == expected(stack, fences_of(stack), RULES)
    assert sum(map(len, told.values())) > 2_000
    assert len(held) > 4
    assert max(held) <= bounds.capacity * bounds.pause_at + 2 * few_at_once


def test_a_breaker_that_is_held_in_the_middle_of_a_batch_is_let_go_again(stack: Stack, few_at_once: int) -> None:
    del few_at_once
    post_fences(stack, [fence(n, shift=-n + 1 + n / 100) for n in range(60)])
    options = replace(OPTIONS, idle_s=None, router=RouterOptions(slow_publish_s=1.0, bounds=Bounds(capacity=1_000)))
    run = InThread(stack, options)
    until(lambda: marks(stack) == 1)
    stack.log.append(walk(25, 25, fences=3))
    holding.hold(stack.ledger, "open")
    time.sleep(0.3)
    holding.hold(stack.ledger, None)
    wanted = expected(stack, fences_of(stack), RULES)
    until(lambda: what(seen(stack)) == wanted)
    run.end()


def test_batches_are_smaller_where_they_take_long_and_grow_again(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = True
    sizes: list[tuple[bool, int]] = []
    covered = FenceIndex.covered

    def costly(self: FenceIndex, lon: Any, lat: Any) -> Any:
        if len(lon):
            sizes.append((slow, len(lon)))
        if slow:
            time.sleep(len(lon) / 1_000)
        return covered(self, lon, lat)

    monkeypatch.setattr(FenceIndex, "covered", costly)
    monkeypatch.setattr(routing, "_LONG_S", 0.05)
    monkeypatch.setattr(routing, "_LEAST", 10)
    post_fences(stack, [fence(n) for n in range(6)])
    run = InThread(stack, replace(OPTIONS, idle_s=None, batch=200))
    stack.log.append(walk(15, 60))
    until(lambda: sum(size for _, size in sizes) >= 900)
    assert len([size for was_slow, size in sizes if was_slow and size <= 100]) >= 5
    slow = False
    stack.log.append(walk(15, 60, seed=2))
    until(lambda: any(size == 200 for was_slow, size in sizes if not was_slow))
    run.end()


def test_rule_9_a_position_for_whose_stays_there_is_no_room_is_a_dead_letter_and_the_log_names_the_fence(
    stack: Stack,
) -> None:
    post_fences(stack, [fence(0), fence(1)])
    now = time.time_ns() // 1_000_000 - 60_000
    middle = SOUTH + SIDE / 2
    stack.log.append([position(f"d{n}", now + n, WEST + SIDE / 2, middle) for n in range(5)])
    with capture_logs() as lines:
        result = routing.route(stack, replace(OPTIONS, rules=replace(RULES, max_stays=3)))
    assert result.ended == "idle"
    assert len(seen(stack)) == result.stays == 3
    letters = [one.letter for one in list_dead_letters(stack.log)]
    assert len(letters) == result.dlq == 2
    assert {(letter.reason, letter.stage) for letter in letters} == {("too_large", "route")}
    assert all("max_stays" in letter.explanation for letter in letters)
    (line,) = [line for line in lines if line["event"] == "too many devices in fences"]
    assert line["fullest"] == {'demo:"f0"': 3}
    assert str(WEST + SIDE / 2) not in json.dumps([letter.summary() for letter in letters]) + repr(lines)


def test_triggers_wait_for_their_turn_as_columns(stack: Stack) -> None:
    router = Router(stack.log, 1, RouterOptions(slow_publish_s=1.0), dead_letters=lambda _: None)
    router.start(thread=False)
    count = 300_000
    numbers = np.arange(count)
    triggers = Triggers(
        ["d"] * count, np.zeros(count, np.int64), ['demo:"f"'], np.full(count, ENTER), numbers, numbers, numbers * 0,
        numbers * 0, numbers, 1,
    )  # fmt: skip
    tracemalloc.start()
    router.route(triggers)
    for _ in range(5):
        router.step(0.0)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert router.held > 250_000
    # A row is some 300 bytes: all of them at once are 90 MB.
    assert most < 15_000_000
    router.close(0.0)
