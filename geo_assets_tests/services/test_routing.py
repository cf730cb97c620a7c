from __future__ import annotations

import gc
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_assets.events import topics
from geo_assets.events.models import FenceEvent
from geo_assets.geofence.rules import Rules
from geo_assets.services import forgetting, position_reader, routing, routing_lease, routing_result
from geo_assets.services import geofence_snapshots as snapshots
from geo_assets.services.dead_letters import list_dead_letters
from geo_assets.services.fences import FOLDER, FenceBook
from geo_assets.services.geofence_snapshots import Replaced, Snapshots, Stored
from geo_assets.services.lost_records import RecordsLost, losses_of
from geo_assets.services.router import Router, RouterOptions
from geo_assets.services.routing_lease import RoutingLease
from geo_assets.services.trigger_tail import take_epoch
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import (
    SIDE,
    SOUTH,
    WEST,
    consistent,
    expected,
    fence,
    marks,
    position,
    post_fences,
    seen,
    walk,
    what,
)
from geo_assets_tests.waiting import patient, until
from resources.event_log.protocol import Extent, LogUnavailable, NewRecord, TopicSpec
from resources.ledger.protocol import LedgerUnavailable

RULES = Rules(lateness_ms=1_000)
OPTIONS = routing.RoutingOptions(
    idle_s=0.3, snapshot_s=0.2, fences_s=0.05, rules=RULES, router=RouterOptions(slow_publish_s=1.0)
)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(Settings(home=tmp_path, log_partitions=3)) as opened:
        yield opened


class InThread(threading.Thread):
    """A routing run beside the test."""

    def __init__(self, stack: Stack, options: routing.RoutingOptions) -> None:
        super().__init__(daemon=True)
        self.stack, self.options = stack, options
        self.asked = threading.Event()
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = routing.route(self.stack, self.options, stop=self.asked)
        except BaseException as fault:
            self.result = fault
            raise

    def end(self) -> Any:
        self.asked.set()
        self.join(patient(30))
        return self.result


def fences_of(stack: Stack) -> Any:
    book = FenceBook(stack)
    return book.index(book.standing().name).fence_set


def test_positions_in_the_triggers_of_the_reference_out(stack: Stack) -> None:
    post_fences(stack, [fence(n, dwell_s=120 if n % 2 else 600, hysteresis_m=20) for n in range(6)])
    stack.log.append(walk(20, 40))
    result = routing.route(stack, OPTIONS)
    told = seen(stack)
    assert what(told) == expected(stack, fences_of(stack), RULES)
    consistent(told)
    assert result.ended == "idle"
    assert result.positions == 20 * 40 + result.ticks
    assert result.routed == sum(map(len, told.values())) > 200
    assert result.lag == 0
    assert result.p99_ms["end_to_end"] >= result.p50_ms["end_to_end"] > 0
    assert snapshots.in_force(stack.ledger).offsets == {
        p: e.end for p, e in stack.log.extents(topics.POSITIONS).items()
    }


def test_runs_one_after_the_other_tell_what_one_would(stack: Stack) -> None:
    post_fences(stack, [fence(n, dwell_s=120) for n in range(6)])
    records = walk(15, 60)
    for start in range(0, len(records), 300):
        stack.log.append(records[start : start + 300])
        assert routing.route(stack, OPTIONS).deduped == 0
    told = seen(stack)
    consistent(told)
    assert what(told) == expected(stack, fences_of(stack), RULES)
    assert marks(stack) == 3


def killed_after_it_told(stack: Stack) -> tuple[int, dict[int, Extent]]:
    """A run told of the second half of a walk, and the snapshot in force is that of the first: as if it had been killed
    before its next one.

    Returns:
        Triggers of the second half, and where `[positions]` ended before it.
    """
    post_fences(stack, [fence(n) for n in range(6)])
    records = walk(15, 40)
    stack.log.append(records[:300])
    routing.route(stack, OPTIONS)
    before, earlier = stack.ledger.get_value(snapshots.VALUE), stack.log.extents(topics.POSITIONS)
    kept = stack.tiles.get(snapshots.in_force(stack.ledger).name)
    stack.log.append(records[300:])
    told = routing.route(stack, OPTIONS).routed
    assert before
    assert kept
    stack.tiles.put(Stored.from_json(before).name, kept)
    stack.ledger.set_value(snapshots.VALUE, before)
    return told, earlier


def test_what_was_told_after_the_last_snapshot_is_told_again_under_the_same_keys(stack: Stack) -> None:
    told, _ = killed_after_it_told(stack)
    again = routing.route(stack, OPTIONS)
    assert (again.routed, again.deduped) == (0, told)
    assert what(seen(stack)) == expected(stack, fences_of(stack), RULES)


class Killed(Exception):
    """The run dies here."""


class Unanswered:
    """The log's publisher; triggers that it is given are on their way and never get there."""

    def __init__(self, real: Any, lost: list[int]) -> None:
        self.real, self.lost = real, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def send(self, keys: Any, values: Any, done: Any, **more: Any) -> None:
        if more.get("partition") is None:
            self.lost.append(len(values))
        else:
            # Marks of the epoch.
            self.real.send(keys, values, done, **more)


def test_rule_2_no_snapshot_gets_ahead_of_the_acknowledgements_so_that_a_kill_loses_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    records = walk(15, 40)
    stack.log.append(records[:300])
    routing.route(stack, OPTIONS)
    dead, lost = threading.Event(), list[int]()
    publisher, take = stack.log.publisher, position_reader.PositionReader.take

    def dies(self: Any, *args: Any) -> Any:
        if dead.is_set():
            raise Killed
        return take(self, *args)

    stack.log.append(records[300:])
    with monkeypatch.context() as patched:
        patched.setattr(stack.log, "publisher", lambda *a, **m: Unanswered(publisher(*a, **m), lost))
        patched.setattr(position_reader.PositionReader, "take", dies)
        waits = replace(OPTIONS, idle_s=None, snapshot_s=0.05, barrier_s=0.01, router=RouterOptions(slow_publish_s=60))

        def kill() -> None:
            until(lambda: sum(lost) > 50, why="triggers wait for an answer")
            # It has time for a dozen snapshots.
            time.sleep(1.0)
            dead.set()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with pytest.raises(Killed):
            routing.route(stack, waits)
        killer.join()
    routing.route(stack, OPTIONS)
    assert what(seen(stack)) == expected(stack, fences_of(stack), RULES)


def fences_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No position is read before new fences, if there are any, are at hand."""
    take, index, at_hand = position_reader.PositionReader.take, FenceBook.index, list[str]()

    def folds(self: Any, name: str) -> Any:
        found = index(self, name)
        at_hand.append(name)
        return found

    def waits(self: Any, *args: Any) -> Any:
        # One was restored, or taken to begin with; the other is what `[fences]` says now.
        if len(set(at_hand)) < 2:
            time.sleep(0.01)
            return None
        if at_hand[-1]:
            at_hand.append("")
            return None  # Once around the loop, in which they would be adopted.
        return take(self, *args)

    monkeypatch.setattr(FenceBook, "index", folds)
    monkeypatch.setattr(position_reader.PositionReader, "take", waits)


def test_new_fences_wait_until_a_replay_is_over(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    told, _ = killed_after_it_told(stack)
    post_fences(stack, [fence(n, version=2, shift=0.5) for n in range(6)])
    fences_come_first(monkeypatch)
    again = routing.route(stack, OPTIONS)
    assert again.adopted == 1
    assert again.deduped == told
    consistent(seen(stack))


def test_what_a_predecessor_told_while_the_next_run_began_is_part_of_its_replay(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that was paused goes on, and judges positions that came after the next one looked how many there are.
    told, earlier = killed_after_it_told(stack)
    extents = stack.log.extents
    post_fences(stack, [fence(n, version=2, shift=0.5) for n in range(6)])
    begun, start = threading.Event(), Router.start

    def starts(self: Router, **more: Any) -> Any:
        begun.set()
        return start(self, **more)

    def as_of_then(topic: str) -> Any:
        return extents(topic) if begun.is_set() or topic != topics.POSITIONS else earlier

    monkeypatch.setattr(Router, "start", starts)
    monkeypatch.setattr(stack.log, "extents", as_of_then)
    fences_come_first(monkeypatch)
    again = routing.route(stack, OPTIONS)
    assert again.adopted == 1
    assert again.deduped == told
    consistent(seen(stack))


def test_fences_move_while_a_run_goes_on(stack: Stack) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    run = InThread(stack, replace(OPTIONS, idle_s=None))
    records = walk(15, 60)
    for number, start in enumerate(range(0, len(records), 100)):
        stack.log.append(records[start : start + 100])
        moved = fence(number % 6, version=number + 2, shift=0.3 * (number % 3))
        post_fences(stack, [moved if number % 4 else deleted(number)])
        time.sleep(0.1)

    def all_adopted() -> bool:
        standing = FenceBook(stack).standing()
        read = sum(standing.offsets.values()) == sum(e.end for e in stack.log.extents(topics.FENCES).values())
        return read and snapshots.in_force(stack.ledger).revision == standing.revision

    until(all_adopted)
    result = run.end()
    assert result.ended == "stopped"
    assert result.adopted >= 2
    told = seen(stack)
    consistent(told)
    # Whoever is inside at the end is in a fence that is there.
    ids = {one.id for one in fences_of(stack).fences}
    inside = {t.fence_id for some in told.values() for t in _open(some)}
    assert inside <= ids
    # Sets that no snapshot needs are gone.
    assert len(list(stack.tiles.list(FOLDER))) <= 2
    assert len(list(stack.tiles.list(snapshots.FOLDER))) == 1


def deleted(number: int) -> FenceEvent:
    return FenceEvent.model_validate(
        {"type": "Feature", "id": f"f{number % 6}", "version": number + 2, "action": "delete", "geometry": None}
    )


def _open(triggers: list[Any]) -> list[Any]:
    last = {trigger.fence_id: trigger for trigger in triggers if trigger.state != 2}
    return [trigger for trigger in last.values() if trigger.state == 1]


def test_a_standby_takes_over_as_soon_as_the_lease_is_given_back(stack: Stack) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    first = InThread(stack, replace(OPTIONS, idle_s=None))
    until(lambda: marks(stack) == 1)
    second = InThread(stack, replace(OPTIONS, idle_s=None))
    time.sleep(0.3)
    assert marks(stack) == 1
    first.end()
    # Given back, and not run out: that takes as long as the lease is held without a word.
    ended = time.monotonic()
    until(lambda: marks(stack) == 2)
    assert time.monotonic() - ended < patient(0.8 * routing_lease.TTL_S)
    stack.log.append(walk(5, 20))
    until(lambda: len(seen(stack)) == 5)
    second.end()
    assert what(seen(stack)) == expected(stack, fences_of(stack), RULES)


def test_dwell_of_a_silent_device_is_told_by_a_tick(stack: Stack) -> None:
    post_fences(stack, [fence(0, dwell_s=2)])
    now = time.time_ns() // 1_000_000
    stack.log.append([position("d", now, WEST + SIDE / 2, SOUTH + SIDE / 2)])
    result = routing.route(stack, replace(OPTIONS, idle_s=0.3))
    assert result.ticks == 0
    due = snapshots.in_force(stack.ledger).due_ms
    assert due is not None
    assert abs(due - (now + 3_000)) < 10
    time.sleep(max(0.0, due / 1000 - time.time()))
    assert routing.route(stack, replace(OPTIONS, idle_s=1.5)).ticks == 1
    assert [state for _, state, _, _ in what(seen(stack))["d"]] == ["ENTER", "DWELL"]


def test_what_is_no_position_is_a_dead_letter_that_tells_no_place(stack: Stack) -> None:
    post_fences(stack, [fence(0)])
    bad = {"device_id": "d", "lon": "24.123456", "lat": 60.654321, "event_time_ms": 1}
    stack.log.append(
        [NewRecord(topics.POSITIONS, "d", json.dumps(bad).encode()), NewRecord(topics.POSITIONS, "d", None),
         position("d", time.time_ns() // 1_000_000, WEST + SIDE / 2, SOUTH + SIDE / 2)]
    )  # fmt: skip
    result = routing.route(stack, OPTIONS)
    assert result.dlq == 2
    letters = list_dead_letters(stack.log)
    assert sorted(one.letter.reason for one in letters) == ["null_value", "schema"]
    shown = json.dumps([one.letter.summary() for one in letters])
    assert "24.123456" not in shown
    assert "60.654321" not in shown
    assert len(seen(stack)["d"]) == 1


def test_rule_9_a_device_for_which_there_is_no_room_costs_itself_and_is_a_dead_letter(stack: Stack) -> None:
    post_fences(stack, [fence(0)])
    now = time.time_ns() // 1_000_000 - 60_000
    inside = (WEST + SIDE / 2, SOUTH + SIDE / 2)
    stack.log.append([position(device, now + n, *inside) for n, device in enumerate("abcab")])
    options = replace(OPTIONS, rules=replace(OPTIONS.rules, max_devices=2))
    result = routing.route(stack, options)
    assert result.ended == "idle"
    told = set(seen(stack))
    assert len(told) == 2
    # Whichever partition was read last has the one too many.
    (left_out,) = set("abc") - told
    letters = [one.letter for one in list_dead_letters(stack.log)]
    assert len(letters) == result.dlq == "abcab".count(left_out)
    assert {(letter.reason, letter.stage) for letter in letters} == {("too_large", "route")}
    assert all("max_devices" in letter.explanation for letter in letters)


def test_fences_that_are_none_are_dead_letters_and_cost_no_other(stack: Stack) -> None:
    stack.log.append([NewRecord(topics.FENCES, '"a"', value) for value in (b"{", b'{"type":"Feature","id":"a"}', None)])
    post_fences(stack, [fence(0), fence(0, shift=1.0), fence(1)])
    book = FenceBook(stack)
    standing = book.fold()
    assert standing.fences == 2
    assert sorted(one.letter.reason for one in list_dead_letters(stack.log)) == [
        "null_value", "schema", "schema", "version_conflict"
    ]  # fmt: skip
    assert book.fold() == standing


def test_folding_at_once_gives_one_set(stack: Stack) -> None:
    books = [FenceBook(stack) for _ in range(4)]
    for version in range(1, 6):
        post_fences(stack, [fence(n, version=version, shift=version / 10) for n in range(6)])
        threads = [threading.Thread(target=book.fold) for book in books]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [one.revision for one in fences_of(stack).fences] == [5] * 6
    assert not list_dead_letters(stack.log)


def test_a_run_that_was_replaced_writes_no_snapshot(stack: Stack) -> None:
    old = Snapshots(stack.ledger, stack.tiles, take_epoch(stack.ledger))
    old.claim()
    old.store(b"one", Stored(revision=1))
    new = Snapshots(stack.ledger, stack.tiles, take_epoch(stack.ledger))
    assert new.claim().revision == 1
    with pytest.raises(Replaced):
        old.store(b"two", Stored(revision=2))
    assert new.load() == b"one"
    assert [one.name for one in stack.tiles.list(snapshots.FOLDER)] == [new.stored.name]
    with pytest.raises(Replaced):
        old.claim()


def test_a_ledger_that_falls_silent_after_it_took_a_snapshot_stops_nobody(stack: Stack) -> None:
    class Silent:
        quiet = False

        def __getattr__(self, name: str) -> Any:
            return getattr(stack.ledger, name)

        def set_value(self, *args: Any, **more: Any) -> bool:
            done = stack.ledger.set_value(*args, **more)
            if self.quiet:
                raise LedgerUnavailable("silent")
            return done

    ledger = Silent()
    mine = Snapshots(ledger, stack.tiles, take_epoch(stack.ledger))  # type: ignore[arg-type]
    mine.claim()
    ledger.quiet = True
    with pytest.raises(LedgerUnavailable):
        mine.store(b"one", Stored(revision=1))
    ledger.quiet = False
    mine.store(b"two", Stored(revision=2))
    assert snapshots.in_force(stack.ledger).revision == 2
    assert mine.load() == b"two"


def test_a_log_that_is_away_for_a_while_costs_nothing(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    run = InThread(stack, replace(OPTIONS, idle_s=None, report_s=0.1))
    # It marks partitions before it reads positions; one that cannot begin ends, and is started again.
    until(lambda: stack.ledger.get_value(routing_result.VALUE), why="it routes")
    read = stack.log.extents

    def away(topic: str) -> Any:
        raise LogUnavailable("away")

    monkeypatch.setattr(stack.log, "extents", away)
    time.sleep(0.3)
    monkeypatch.setattr(stack.log, "extents", read)
    stack.log.append(walk(5, 20))
    until(lambda: len(seen(stack)) == 5)
    assert run.end().ended == "stopped"
    assert what(seen(stack)) == expected(stack, fences_of(stack), RULES)


def test_a_lease_that_ran_out_is_taken_by_the_next(stack: Stack) -> None:
    stop = threading.Event()
    held = RoutingLease(stack.guard, ttl_s=30)
    assert held.wait(stop)
    assert not RoutingLease(stack.guard).wait(stop, 0.2)
    held.close()
    with RoutingLease(stack.guard) as following:
        assert following.wait(stop, 0.2)


def test_a_device_that_is_to_be_forgotten_is_gone_from_state_and_snapshot(stack: Stack) -> None:
    post_fences(stack, [fence(0)])
    now = time.time_ns() // 1_000_000 - 120_000
    stack.log.append([position(d, now, WEST + SIDE / 2, SOUTH + SIDE / 2) for d in ("secret-one", "other")])
    routing.route(stack, OPTIONS)
    data = stack.tiles.get(snapshots.in_force(stack.ledger).name)
    assert data is not None
    assert b"secret-one" in data
    forgetting.wish(stack.ledger, "secret-one")
    forgetting.wish(stack.ledger, "nobody")
    result = routing.route(stack, OPTIONS)
    assert (result.devices, result.routed) == (1, 0)
    assert forgetting.wishes(stack.ledger) == ()
    (kept,) = stack.tiles.list(snapshots.FOLDER)
    assert b"secret-one" not in (stack.tiles.get(kept.name) or b"")
    # It comes back as a device never seen, and contradicts nothing under its old keys.
    stack.log.append([position("secret-one", now + 60_000, WEST + SIDE / 2, SOUTH + SIDE / 2)])
    routing.route(stack, OPTIONS)
    first, second = seen(stack)["secret-one"]
    assert second.sequence > first.sequence


def test_a_run_that_goes_on_forgets_a_device_too(stack: Stack) -> None:
    post_fences(stack, [fence(0)])
    run = InThread(stack, replace(OPTIONS, idle_s=None))
    stack.log.append([position("d", time.time_ns() // 1_000_000, WEST + SIDE / 2, SOUTH + SIDE / 2)])
    until(lambda: FenceBook(stack).standing().fences and snapshots.in_force(stack.ledger).offsets)
    forgetting.wish(stack.ledger, "d")
    until(lambda: not forgetting.wishes(stack.ledger))
    assert run.end().devices == 0


def test_erase_device_at_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from geo_assets.cli import app

    monkeypatch.setenv("GEO_ASSETS_HOME", str(tmp_path))
    with Stack(Settings(home=tmp_path)) as stack:
        post_fences(stack, [fence(0)])
        stack.log.append([position("d-17", time.time_ns() // 1_000_000, WEST + SIDE / 2, SOUTH + SIDE / 2)])
        routing.route(stack, OPTIONS)
        done = CliRunner().invoke(app, ["erase", "--device", "d-17"])
        assert done.exit_code == 0, done.output
        assert "forgotten" in done.output
        assert "d-17" not in done.output
        data = stack.tiles.get(snapshots.in_force(stack.ledger).name)
        assert data is not None
        assert b"d-17" not in data
    assert CliRunner().invoke(app, ["erase"]).exit_code != 0


def metrics_of(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patient(30)) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


def test_a_run_tells_its_metrics_while_it_routes_on_a_free_port_where_its_own_is_taken(stack: Stack) -> None:
    post_fences(stack, [fence(n, dwell_s=120) for n in range(6)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        run = InThread(stack, replace(OPTIONS, idle_s=None, report_s=0.1, metrics_port=number))
        until(lambda: stack.ledger.get_value(routing_result.VALUE))
    port = json.loads(stack.ledger.get_value(routing_result.VALUE) or "")["metrics_port"]
    assert port not in (0, number)
    stack.log.append([*walk(20, 40), NewRecord(topics.POSITIONS, "x", b"no position", {}, 1)])
    until(lambda: metrics_of(port)["geofence_routing_positions_total"] >= 801)
    until(lambda: metrics_of(port)["geofence_router_routed_total"] == sum(map(len, seen(stack).values())) > 200)
    until(lambda: metrics_of(port)["geofence_router_held"] == 0)
    found = metrics_of(port)
    assert found['geofence_routing_judged_total{outcome="accepted"}'] == 800
    assert found["geofence_routing_poison_total"] == 1
    assert found["geofence_routing_devices"] == 20
    assert {name for name in found if name.startswith("geofence_routing_lag")} == {
        f'geofence_routing_lag{{partition="{n}"}}' for n in range(3)
    }
    assert sum(value for name, value in found.items() if name.startswith("geofence_routing_lag")) == 0
    assert found["geofence_routing_read_to_acknowledgement_seconds_count"] == found["geofence_router_routed_total"]
    assert found["geofence_router_window_keys"] == found["geofence_router_routed_total"]
    assert found["geofence_router_bloom_false_positives_total"] <= found["geofence_router_bloom_suspects_total"]
    assert found['geofence_router_breaker{stage="publish"}'] == 0
    assert found["geofence_router_epoch"] == 1
    gc.collect()
    assert metrics_of(port)['geofence_gc_pause_seconds_count{generation="2"}'] >= 1
    assert not [name for name in found if "d1" in name]
    run.end()
    with pytest.raises(urllib.error.URLError):
        metrics_of(port)


def test_an_operator_holds_the_breaker_open_and_lets_it_go(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from geo_assets.cli import app

    def breaker(*where: str) -> str:
        answer = CliRunner().invoke(app, ["breaker", *where])
        assert answer.exit_code == 0, answer.output
        return answer.output

    monkeypatch.setenv("GEO_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("GEO_ASSETS_LOG_PARTITIONS", "3")
    post_fences(stack, [fence(n) for n in range(6)])
    assert "held open" in breaker("open")
    assert "held open" in breaker("status")
    run = InThread(stack, replace(OPTIONS, report_s=0.1))
    until(lambda: "open: an operator holds it open" in breaker())
    stack.log.append(walk(5, 20))
    time.sleep(0.5)
    assert seen(stack) == {}
    # Neither idle, while positions wait, nor at its end.
    assert run.is_alive()
    assert "held closed" in breaker("close")
    until(lambda: len(seen(stack)) == 5)
    assert "by itself" in breaker("auto")
    assert run.end().breaker == "closed"
    assert what(seen(stack)) == expected(stack, fences_of(stack), RULES)


def test_a_partition_that_is_added_is_read_from_its_first_record(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_reader, "_LOOK_S", 0.05)
    post_fences(stack, [fence(n) for n in range(6)])
    run = InThread(stack, replace(OPTIONS, idle_s=None))
    until(lambda: marks(stack) == 1)
    stack.log.ensure_topics([TopicSpec(topics.POSITIONS, partitions=4, retention_ms=stack.settings.retention_s * 1000)])
    stack.log.append(walk(30, 20))
    until(lambda: len(seen(stack)) == 30)
    run.end()
    assert what(seen(stack)) == expected(stack, fences_of(stack), RULES)


def test_rule_1_positions_that_retention_took_unread_stop_the_run_or_are_counted(stack: Stack, tmp_path: Path) -> None:
    post_fences(stack, [fence(n) for n in range(6)])
    stack.log.append(walk(5, 20))
    routing.route(stack, OPTIONS)
    told = len(seen(stack))
    stack.log.append(walk(5, 10, seed=2))
    stack.log.enforce_retention(int(time.time() * 1000) + stack.settings.retention_s * 1000 + 60_000)
    stack.log.append([position("new", time.time_ns() // 1_000_000, WEST + SIDE / 2, SOUTH + SIDE / 2)])
    careful = Settings(home=tmp_path, log_partitions=3, offset_out_of_range="stop")
    with Stack(careful) as opened, pytest.raises(RecordsLost, match="OFFSET_OUT_OF_RANGE"):
        routing.route(opened, OPTIONS)
    result = routing.route(stack, OPTIONS)
    assert (result.ended, result.positions - result.ticks) == ("idle", 1)
    assert losses_of(stack.ledger)[topics.POSITIONS].records == 50
    assert told == 5
