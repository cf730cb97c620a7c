"""Shedding of positions by a routing run: only where declared, after a long pause, and the same in every replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_assets.events.topics import HEADER_REGION_PRIORITY
from geo_assets.geofence.rules import Rules
from geo_assets.services import geofence_snapshots as snapshots
from geo_assets.services import holding, routing, routing_result
from geo_assets.services.fences import FenceBook
from geo_assets.services.geofence_snapshots import Snapshots, Stored
from geo_assets.services.position_shedding import NOTHING
from geo_assets.services.router import RouterOptions
from geo_assets.services.trigger_tail import Replaced
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import consistent, expected, fence, post_fences, seen, walk, what
from geo_assets_tests.services.test_routing import InThread, fences_of
from geo_assets_tests.waiting import until
from resources.event_log.protocol import NewRecord

RULES = Rules(lateness_ms=1_000)
OPTIONS = routing.RoutingOptions(
    idle_s=0.3, snapshot_s=0.2, fences_s=0.05, report_s=0.1, rules=RULES, router=RouterOptions(slow_publish_s=1.0)
)
FENCES = [fence(n) for n in range(6)]


def settings_of(home: Path, shed_topics: str) -> Settings:
    return Settings(home=home, log_partitions=3, shed_topics=shed_topics, shed_after_s=1.0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(settings_of(tmp_path, "positions")) as opened:
        post_fences(opened, FENCES)
        yield opened


def with_priority(record: NewRecord, number: int) -> NewRecord:
    """Every third record says 0 by saying nothing, every third 1, every third 2."""
    return replace(record, headers={HEADER_REGION_PRIORITY: str(number % 3)} if number % 3 else {})


def told_of(tmp_path: Path, records: list[NewRecord]) -> dict[str, Any]:
    """What the slow reference tells of a log of these records."""
    with Stack(Settings(home=tmp_path / "other", log_partitions=3)) as other:
        post_fences(other, FENCES)
        other.log.append(records)
        FenceBook(other).fold()
        return expected(other, fences_of(other), RULES)


def route_after_a_pause(stack: Stack, waiting: list[NewRecord], seconds: float) -> Any:
    """A run that is held for so long while records gather, and then goes on to the end."""
    holding.hold(stack.ledger, "open")
    run = InThread(stack, OPTIONS)
    until(lambda: "an operator holds it open" in (stack.ledger.get_value(routing_result.VALUE) or ""))
    stack.log.append(waiting)
    run.join(seconds)
    assert run.is_alive()
    holding.hold(stack.ledger, "closed")
    until(lambda: not run.is_alive())
    holding.hold(stack.ledger, None)
    return run.result


def test_after_a_long_pause_positions_below_priority_2_say_nothing_and_a_replay_tells_the_same(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[str, bytes]] = []
    shed = Snapshots.shed

    def noted(self: Snapshots, spans: Any) -> None:
        shed(self, spans)
        kept.append((self.stored.to_json(), self.load() or b""))

    monkeypatch.setattr(Snapshots, "shed", noted)
    records = [with_priority(record, number) for number, record in enumerate(walk(20, 60))]
    early, waiting, late = records[:300], records[300:900], records[900:]
    stack.log.append(early)
    routing.route(stack, OPTIONS)
    # Two and a half times as long as it takes: priorities 0 and 1.
    result = route_after_a_pause(stack, waiting, 2.5)
    shed_of = [r for r in waiting if r.headers.get(HEADER_REGION_PRIORITY, "0") != "2"]
    assert result.positions_shed == len(shed_of) > 0
    stack.log.append(late)
    routing.route(stack, OPTIONS)
    silent = [replace(record, value=NOTHING) if record in shed_of else record for record in records]
    told = seen(stack)
    consistent(told)
    assert what(told) == told_of(tmp_path, silent)
    # A run that was killed right after it had said so is followed by one to which nothing is declared.
    ((value, data),) = kept
    stack.tiles.put(Stored.from_json(value).name, data)
    now = Stored.from_json(stack.ledger.get_value(snapshots.VALUE))
    before = replace(Stored.from_json(value), epoch=now.epoch, number=now.number + 1)
    stack.ledger.set_value(snapshots.VALUE, before.to_json())
    with Stack(settings_of(tmp_path, "")) as other:
        again = routing.route(other, OPTIONS)
    assert again.deduped > 0
    assert again.routed == 0
    assert what(seen(stack)) == what(told)
    # What nobody reads again is not kept.
    assert snapshots.in_force(stack.ledger).shed == ()


@pytest.mark.parametrize(("shed_topics", "after_s", "seconds"), [("", 1.0, 2.5), ("positions", 600.0, 0.5)])
def test_nothing_is_shed_undeclared_nor_after_a_short_pause(
    tmp_path: Path, shed_topics: str, after_s: float, seconds: float
) -> None:
    settings = settings_of(tmp_path, shed_topics).model_copy(update={"shed_after_s": after_s})
    with Stack(settings) as stack:
        post_fences(stack, FENCES)
        result = route_after_a_pause(stack, walk(10, 40), seconds)
        assert result.positions_shed == 0
        assert what(seen(stack)) == expected(stack, fences_of(stack), RULES)


def test_a_run_that_was_replaced_sheds_nothing(stack: Stack) -> None:
    old, new = (Snapshots(stack.ledger, stack.tiles, epoch) for epoch in (1, 2))
    old.claim()
    new.claim()
    with pytest.raises(Replaced):
        old.shed([(0, 5, 9, 1)])
    assert snapshots.in_force(stack.ledger).shed == ()
    new.shed([(0, 5, 9, 1)])
    new.shed([(1, 2, 4, 2)])
    assert snapshots.in_force(stack.ledger).shed == ((0, 5, 9, 1), (1, 2, 4, 2))
    new.store(b"one", Stored(offsets={0: 8, 1: 4}))
    assert snapshots.in_force(stack.ledger).shed == ((0, 5, 9, 1),)
    new.store(b"two", Stored(topic="another", offsets={0: 8}))
    assert snapshots.in_force(stack.ledger).shed == ()
