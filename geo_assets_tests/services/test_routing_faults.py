"""A routing run over batches that its tracker cannot judge: faults are put into the index, all else is real."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shapely
from structlog.testing import capture_logs

from geo_assets.events import topics
from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.rules import Rules
from geo_assets.services import geofence_snapshots as snapshots
from geo_assets.services import passed_over, routing
from geo_assets.services.dead_letters import list_dead_letters, write_dead_letters
from geo_assets.services.geofence_snapshots import Snapshots, Stored
from geo_assets.services.router import RouterOptions
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import (
    SIDE,
    SOUTH,
    WEST,
    consistent,
    expected,
    fence,
    post_fences,
    seen,
    walk,
    what,
)
from geo_assets_tests.services.test_routing import InThread, fences_of, until
from resources.event_log.protocol import LogUnavailable, NewRecord
from resources.ledger.protocol import LedgerUnavailable

RULES = Rules(lateness_ms=1_000)
OPTIONS = routing.RoutingOptions(
    idle_s=0.3, snapshot_s=0.2, fences_s=0.05, rules=RULES, router=RouterOptions(slow_publish_s=1.0)
)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(Settings(home=tmp_path, log_partitions=3)) as opened:
        yield opened


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> set[float]:
    """Longitudes at which the index fails."""
    places: set[float] = set()
    covered = FenceIndex.covered

    def fails(self: FenceIndex, lon: Any, lat: Any) -> Any:
        bad = places.intersection(lon.tolist())
        if bad:
            raise shapely.GEOSException(f"TopologyException: side location conflict at {bad}")
        return covered(self, lon, lat)

    monkeypatch.setattr(FenceIndex, "covered", fails)
    return places


def place_of(record: NewRecord) -> float:
    return json.loads(record.value or b"")["lon"]


def without(records: list[NewRecord], bad: set[float]) -> list[NewRecord]:
    """The same records, of which those at fault say nothing."""
    nothing = b'{"event_time_ms": 0}'
    return [replace(record, value=nothing) if place_of(record) in bad else record for record in records]


def judged_without(tmp_path: Path, records: list[NewRecord], bad: set[float]) -> dict[str, Any]:
    """What the slow reference tells of a log in which records at fault say nothing."""
    with Stack(Settings(home=tmp_path / "other", log_partitions=3)) as other:
        post_fences(other, [fence(n) for n in range(6)])
        other.log.append(without(records, bad))
        routing.FenceBook(other).fold()
        return expected(other, fences_of(other), RULES)


def put_back(stack: Stack, value: str | None, kept: bytes | None) -> None:
    """As if the run had been killed when this was in force."""
    assert value is not None
    assert kept is not None
    stack.tiles.put(Stored.from_json(value).name, kept)
    stack.ledger.set_value(snapshots.VALUE, value)


def test_rule_10_a_record_that_cannot_be_judged_costs_itself_and_is_a_dead_letter_without_a_place(
    stack: Stack, tmp_path: Path, faults: set[float]
) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    records = walk(15, 40)
    stack.log.append(records[:300])
    routing.route(stack, OPTIONS)
    bad = {place_of(records[number]) for number in (310, 444, 445, 590)}
    faults |= bad
    stack.log.append(records[300:])
    with capture_logs() as lines:
        result = routing.route(stack, OPTIONS)
    assert result.ended == "idle"
    told = seen(stack)
    consistent(told)
    assert what(told) == judged_without(tmp_path, records, bad)
    letters = [one.letter for one in list_dead_letters(stack.log)]
    assert {place_of(NewRecord(topics.POSITIONS, None, letter.payload)) for letter in letters} == bad
    assert {(letter.reason, letter.stage) for letter in letters} == {("internal", "route")}
    assert all("GEOSException" in letter.explanation for letter in letters)
    assert result.dlq == len(letters) == 4
    assert result.judged["positions"] == 300 - 4
    shown = json.dumps([letter.summary() for letter in letters]) + "".join(letter.explanation for letter in letters)
    shown += repr(lines)
    assert not [place for place in bad if str(place) in shown]


def test_a_replay_tells_the_same_though_the_fault_is_gone(stack: Stack, tmp_path: Path, faults: set[float]) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    records = walk(15, 40)
    stack.log.append(records[:300])
    routing.route(stack, OPTIONS)
    # Both times within the batch: the records are read together.
    bad = {place_of(records[number]) for number in (310, 320, 444)}
    faults |= bad
    run = InThread(stack, replace(OPTIONS, idle_s=None, snapshot_s=3_600.0))
    stack.log.append(records[300:])
    wanted = judged_without(tmp_path, records, bad)
    until(lambda: what(seen(stack)) == wanted)
    value = stack.ledger.get_value(snapshots.VALUE)
    kept = stack.tiles.get(snapshots.in_force(stack.ledger).name)
    told = run.end().routed
    put_back(stack, value, kept)
    faults.clear()
    again = routing.route(stack, OPTIONS)
    assert (again.routed, again.deduped, again.dlq) == (0, told, 0)
    # What no run reads again is remembered no longer.
    assert snapshots.in_force(stack.ledger).passed_over == {}
    stack.log.append(walk(15, 10, seed=3))
    routing.route(stack, OPTIONS)
    consistent(seen(stack))


def test_a_fault_after_others_in_one_run_leaves_those_passed_over(
    stack: Stack, tmp_path: Path, faults: set[float]
) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    records = walk(15, 40)
    bad = {place_of(records[number]) for number in (100, 250, 251, 400, 599)}
    faults |= bad
    run = InThread(stack, replace(OPTIONS, idle_s=None, snapshot_s=3_600.0))
    for start in range(0, 600, 120):
        stack.log.append(records[start : start + 120])
        time.sleep(0.1)
    wanted = judged_without(tmp_path, records, bad)
    until(lambda: what(seen(stack)) == wanted)
    assert sum(map(len, snapshots.in_force(stack.ledger).passed_over.values())) == 5
    assert run.end().dlq == 5
    assert snapshots.in_force(stack.ledger).passed_over == {}


@pytest.mark.parametrize("away", ["log", "ledger"])
def test_what_is_away_while_a_batch_is_searched_is_waited_for(
    stack: Stack, tmp_path: Path, faults: set[float], monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    monkeypatch.setattr(routing, "_AGAIN_S", 0.01)
    failures = {"log": 3, "ledger": 3}

    def failing(name: str, fault: type[Exception], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if away == name and failures[name]:
                failures[name] -= 1
                # Half the times it was done, and nobody said so.
                if failures[name] % 2:
                    real(*args, **more)
                raise fault("away")
            return real(*args, **more)

        return call

    monkeypatch.setattr(routing, "write_dead_letters", failing("log", LogUnavailable, write_dead_letters))
    monkeypatch.setattr(Snapshots, "pass_over", failing("ledger", LedgerUnavailable, Snapshots.pass_over))
    post_fences(stack, [fence(n) for n in range(6)])
    records = walk(15, 20)
    bad = {place_of(records[number]) for number in (100, 250)}
    faults |= bad
    stack.log.append(records)
    result = routing.route(stack, OPTIONS)
    assert failures[away] == 0
    assert what(seen(stack)) == judged_without(tmp_path, records, bad)
    assert result.dlq == len(list_dead_letters(stack.log)) == 2


def test_a_run_that_is_told_to_end_while_it_searches_tells_nothing_of_the_batch(
    stack: Stack, tmp_path: Path, faults: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    records = walk(15, 20)
    bad = {place_of(records[100])}
    faults |= bad
    stack.log.append(records)
    asked = routing.threading.Event()

    def away(*_: Any) -> None:
        asked.set()
        raise LogUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(routing, "write_dead_letters", away)
        assert routing.route(stack, OPTIONS, stop=asked).ended == "stopped"
    assert seen(stack) == {}
    assert routing.route(stack, OPTIONS).dlq == 1
    assert what(seen(stack)) == judged_without(tmp_path, records, bad)


def test_rule_9_no_more_is_passed_over_than_the_ledger_keeps(
    stack: Stack, faults: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed_over, "MOST", 20)
    monkeypatch.setattr(routing, "write_dead_letters", lambda *_: None)
    kept: list[int] = []
    pass_over = Snapshots.pass_over

    def note(self: Snapshots, offsets: dict[int, list[int]]) -> None:
        kept.append(sum(map(len, offsets.values())))
        pass_over(self, offsets)

    monkeypatch.setattr(Snapshots, "pass_over", note)
    post_fences(stack, [fence(0)])
    faults.add(WEST + SIDE / 2)
    value = json.dumps({"device_id": "d", "lon": WEST + SIDE / 2, "lat": SOUTH, "event_time_ms": 1_777_636_800_000})
    stack.log.append([NewRecord(topics.POSITIONS, "d", value.encode()) for _ in range(100)])
    result = routing.route(stack, replace(OPTIONS, batch=10, gather_s=0.0))
    assert result.dlq == 100
    assert max(kept) <= 20 + 10
