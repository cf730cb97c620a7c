"""The sensor against real ports and real run records: what it promises, tick by tick."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import shapely
from dagster import AssetCheckKey, DagsterRunStatus, SensorResult, build_sensor_context
from dagster._core.loader import LoadingContextForTest
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.definitions import defs
from geo_assets.events import topics
from geo_assets.jobs import AUDIT_TAG, BATCH_TAG
from geo_assets.services.build import TileBuilder
from geo_assets.services.hints import read_slice
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, tiles_around, world
from resources.event_log.protocol import NewRecord, Record
from resources.ledger.protocol import Batch, TileState
from sensors import tile_updates as sensor
from sensors.tile_updates import Audits, Work, care_for, cut, halves, plan_audit, still_dirty, tick

HOME = Tile(14, 9_327, 4_741)
MINUTE = 60_000


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        yield made


def later(here: World, ms: int = MINUTE) -> int:
    """A time at which a batch without a run counts as never submitted."""
    return here.ledger.batches(open_only=False)[-1].created_ms + ms


# -- planning, pure ------------------------------------------------------------------------------------------------


def record(offset: int, key: str | None, value: bytes | None = None) -> Record:
    return Record(topics.TILES, 0, offset, key, value, {}, 0)


def test_a_record_is_a_hint_by_its_key_alone() -> None:
    part = read_slice([record(3, HOME.key), record(4, "0:", b"not JSON"), record(5, HOME.key, b'{"force": true}')], 3)
    assert [(hint.offset, hint.key, hint.force) for hint in part.hints] == [
        (3, HOME.key, False), (4, "0:", False), (5, HOME.key, True)
    ]  # fmt: skip
    assert part.next_offset == 6


@pytest.mark.parametrize("key", [None, "", "14", "14:999", "3:01", "23:" + "0" * 23, "14:0１2"])
def test_a_key_that_names_no_tile_is_set_apart_and_passed_over(key: str | None) -> None:
    part = read_slice([record(8, key), record(9, HOME.key)], 8)
    assert [hint.key for hint in part.hints] == [HOME.key]
    assert [one.offset for one, _ in part.unreadable] == [8]
    assert part.next_offset == 10


def test_an_empty_slice_stays_where_it_is() -> None:
    assert read_slice([], 7).next_offset == 7


def batch(state: str = "running", *, created_ms: int = 0, keys: tuple[str, ...] = ("0:",)) -> Batch:
    return Batch("b", keys, 1, "live", state, created_ms, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", sorted(sensor.ALIVE, key=str))
def test_a_batch_whose_run_is_queued_or_alive_keeps_its_lease(status: DagsterRunStatus) -> None:
    care = care_for([batch()], {"b": status}, 10**9)
    assert care.renew
    assert not care.end
    assert not care.lost


def test_a_batch_without_a_run_waits_for_a_tick_and_is_then_taken_anew() -> None:
    assert care_for([batch("queued", created_ms=1_000)], {}, 2_000).renew
    assert care_for([batch("queued", created_ms=1_000)], {}, 1_000 + sensor.UNSEEN_MS).end


def test_only_a_run_that_began_and_failed_is_lost() -> None:
    assert care_for([batch("running")], {"b": DagsterRunStatus.FAILURE}, 0).lost
    assert care_for([batch("queued")], {"b": DagsterRunStatus.FAILURE}, 0).end
    assert care_for([batch("running")], {"b": DagsterRunStatus.CANCELED}, 0).end
    assert care_for([batch("running")], {"b": DagsterRunStatus.SUCCESS}, 0).end


def test_of_a_lost_batch_only_what_is_still_its_own_and_dirty_is_asked_for_again() -> None:
    states = {
        "a": TileState("a", wanted_live=5, built=4, lease="b"),
        "b": TileState("b", wanted_live=5, built=5),
        "c": TileState("c", wanted_live=5, given_up=5),
        "d": TileState("d", wanted_live=5, lease="other", lease_until_ms=99),
        "e": TileState("e", wanted_live=5, lease="other", lease_until_ms=9),
    }
    assert still_dirty(batch(keys=tuple("abcde")), states, 50) == ["a", "e"]


@given(st.integers(2, 50))
def test_halves_are_all_of_it_and_neither_is_empty(count: int) -> None:
    keys = [str(index) for index in range(count)]
    first, second = halves(keys)
    assert first + second == keys
    assert abs(len(first) - len(second)) <= 1


def work(index: int, vertices: int = 100, **state: object) -> Work:
    key = Tile(14, index % 128, index // 128).key
    return Work(TileState(key, wanted_live=1, **state), "k", vertices)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50_000), max_size=120), st.integers(0, 4), st.integers(1, 40), st.integers(600, 200_000))
def test_work_is_cut_into_what_fits_first_come_first_and_nothing_twice(
    vertices: list[int], slots: int, most_tiles: int, most_weight: int
) -> None:
    offered = [work(index, weight) for index, weight in enumerate(vertices)]
    pieces = cut(offered, slots, most_tiles, most_weight)
    taken = [one.key for piece in pieces for one in piece]
    assert len(pieces) <= slots
    assert all(0 < len(piece) <= most_tiles for piece in pieces)
    assert sorted(taken) == sorted(one.key for one in offered[: len(taken)])
    assert bool(taken) == bool(offered and slots)
    assert sum(one.weight for piece in pieces for one in piece) <= max(
        slots * most_weight, offered[0].weight if offered else 0
    )


def test_batches_are_of_similar_weight_although_the_tiles_are_not() -> None:
    offered = [work(index, 90_000 if index % 10 == 0 else 1_000) for index in range(200)]
    total = sum(one.weight for one in offered)
    pieces = cut(offered, 2, 150, total // 2 + 100_000)
    weights = [sum(one.weight for one in piece) for piece in pieces]
    assert len(pieces) == 2
    assert max(weights) < 1.2 * min(weights)


def test_little_work_is_one_run_however_many_could_run() -> None:
    assert len(cut([work(index) for index in range(100)], 4, 2_500)) == 1


T0 = 1_800_000_000_000


def test_a_map_at_rest_is_audited_once_for_what_changed() -> None:
    seen, wanted = plan_audit(Audits(), 7, busy=False, now_ms=T0)
    assert not wanted  # The changes may just have come.
    seen, wanted = plan_audit(seen, 7, busy=False, now_ms=T0 + sensor.AUDIT_QUIET_MS - 1)
    assert not wanted
    seen, wanted = plan_audit(seen, 7, busy=False, now_ms=T0 + sensor.AUDIT_QUIET_MS)
    assert wanted
    # An audit commits nothing: for the same commits there is no second one, however long it stays quiet.
    for hours in range(1, 50):
        seen, wanted = plan_audit(seen, 7, busy=False, now_ms=T0 + hours * 60 * MINUTE)
        assert not wanted


def test_an_empty_map_is_not_audited() -> None:
    assert plan_audit(Audits(), 0, busy=False, now_ms=T0) == (Audits(), False)


def test_a_busy_map_is_not_audited_and_its_rest_counts_from_the_last_commit() -> None:
    seen = Audits(commits=7, since_ms=T0 - 10 * MINUTE)
    assert plan_audit(seen, 7, busy=True, now_ms=T0) == (seen, False)
    assert plan_audit(seen, 8, busy=False, now_ms=T0) == (Audits(commits=8, since_ms=T0), False)


def test_a_fault_that_comes_back_after_every_audit_is_audited_every_two_minutes_at_most() -> None:
    seen, commits, asked = Audits(), 1, []
    for second in range(0, 3_600, 5):
        now = T0 + second * 1_000
        seen, wanted = plan_audit(seen, commits, busy=False, now_ms=now)
        if wanted:
            asked.append(now)
            commits += 1  # What the audit found was built again.
    assert len(asked) > 2
    assert min(after - before for before, after in pairwise(asked)) >= sensor.AUDIT_EVERY_MS


@given(st.lists(st.tuples(st.integers(0, 40_000), st.booleans(), st.booleans()), max_size=60))
def test_no_audit_is_asked_for_while_edits_come_faster_than_the_rest_takes(
    steps: list[tuple[int, bool, bool]],
) -> None:
    seen, commits, now, committed, asked = Audits(), 0, T0, T0, -1
    for wait, edit, busy in steps:
        now += wait
        if edit:
            commits, committed = commits + 1, now
        seen, wanted = plan_audit(seen, commits, busy=busy, now_ms=now)
        if wanted:
            assert not busy
            assert now - committed >= sensor.AUDIT_QUIET_MS
            assert commits > asked
            asked = commits


@pytest.mark.parametrize("text", [None, "", "nonsense", "[]", '{"commits": "x"}', '{"commits": null}'])
def test_what_was_remembered_and_cannot_be_read_counts_as_nothing(text: str | None) -> None:
    assert Audits.from_json(text) == Audits()


def test_what_audits_remember_survives_its_named_value() -> None:
    seen = Audits(1, 2, 3, 4)
    assert Audits.from_json(seen.to_json()) == seen


# -- ticks ---------------------------------------------------------------------------------------------------------


def test_hints_of_hot_tiles_are_read_as_all_others(here: World) -> None:
    other = Tile(HOME.z, HOME.x + 1, HOME.y)
    for tile in (HOME, other):
        here.put_square(tile.key, tile)
    here.hint(HOME.key)
    here.stack.log.append([NewRecord(topics.TILES_HOT, key, None) for key in (HOME.key, other.key, "nonsense")])

    done = tick(here.stack, here.instance)

    (request,) = done.requests
    assert set(here.ledger.batch(here.batch_of(request)).keys) == {HOME.key, other.key}
    assert (done.read, done.marked, done.dead) == (4, 3, 1)
    for topic, count in ((topics.TILES, 1), (topics.TILES_HOT, 3)):
        reached = here.ledger.positions(here.stack.log.topic_id(topic))
        assert sum(reached.values()) == count
        assert here.stack.log.committed(sensor.GROUP, topic) == done.positions[topic]
    assert tick(here.stack, here.instance).read == 0


def test_a_hint_becomes_a_run_whose_config_names_its_batch(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key, HOME.key)

    done = tick(here.stack, here.instance)

    (request,) = done.requests
    opened = here.ledger.batch(here.batch_of(request))
    assert opened.keys == (HOME.key,)
    assert request.tags[BATCH_TAG] == opened.id
    assert request.tags["geo_assets/region"] == HOME.quadkey
    assert here.instance.get_dynamic_partitions(catalog.PARTITIONS) == [HOME.key]
    assert here.stack.log.committed(sensor.GROUP, topics.TILES) == {0: 2}
    assert done.positions[topics.TILES] == {0: 2}


def test_a_second_tick_asks_for_nothing_that_is_under_way(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    tick(here.stack, here.instance)
    again = tick(here.stack, here.instance)
    assert again.requests == []
    assert "1 runs in flight" in again.skip_reason(2)


def test_the_run_of_a_request_builds_the_tile_and_shows_it_in_the_catalog(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    (request,) = tick(here.stack, here.instance).requests

    assert here.execute(request).success

    state = here.ledger.read([HOME.key])[HOME.key]
    assert (state.revision, state.dirty, state.empty) == (1, False, False)
    assert here.instance.get_materialized_partitions(catalog.TILES) == {HOME.key}
    assert here.ledger.owed("catalog") == []
    assert here.ledger.owed("announce") == []
    assert here.ledger.batches() == []
    assert "nothing is dirty" in tick(here.stack, here.instance).skip_reason(2)


def test_a_tile_that_already_is_what_a_build_would_make_is_settled_without_a_run(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    here.execute(tick(here.stack, here.instance).requests[0])
    here.hint(HOME.key)
    done = tick(here.stack, here.instance)
    assert (done.settled, done.requests) == (1, [])
    assert not here.ledger.read([HOME.key])[HOME.key].dirty


def test_a_forced_hint_goes_to_a_run_although_nothing_changed(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    here.execute(tick(here.stack, here.instance).requests[0])
    here.hint(HOME.key, value=b'{"force":true}')
    assert len(tick(here.stack, here.instance).requests) == 1


def test_a_tile_of_a_backfill_goes_to_a_run_although_nothing_changed(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    here.execute(tick(here.stack, here.instance).requests[0])
    here.ledger.write_manifest("m", "all", "backfill", [HOME.key])
    here.ledger.mark_manifest("m")
    (request,) = tick(here.stack, here.instance).requests
    assert request.tags["geo_assets/manifest"] == "m"
    assert request.tags["geo_assets/kind"] == "backfill"
    assert here.execute(request).success
    assert here.ledger.progress("m").done == 1


def test_rule_1_a_malformed_key_becomes_one_dead_letter_and_costs_its_neighbours_nothing(here: World) -> None:
    here.put_square("a", HOME)
    here.hint("nonsense", HOME.key, None, value=b'{"x": 1}')
    done = tick(here.stack, here.instance)
    assert len(done.requests) == 1
    letters = here.dead_letters()
    assert sorted(letter.origin.offset for letter in letters if letter.origin) == [0, 2]
    assert {(letter.reason, letter.stage, letter.field) for letter in letters} == {("schema", "tiles", "z")}
    assert letters[0].payload == b'{"x": 1}'
    tick(here.stack, here.instance)
    assert len(here.dead_letters()) == 2


def test_rule_2_a_position_moves_with_its_marks_and_old_records_change_nothing(here: World) -> None:
    here.hint(HOME.key)
    tick(here.stack, here.instance)
    topic_id = here.stack.log.topic_id(topics.TILES)
    marked = here.ledger.read([HOME.key])[HOME.key].wanted_live
    assert here.ledger.positions(topic_id) == {0: 1}
    part = read_slice([record(0, HOME.key)], 0)
    assert here.ledger.mark_from_log(topic_id, 0, part.hints, part.next_offset) == 0
    assert here.ledger.read([HOME.key])[HOME.key].wanted_live == marked


def test_hints_lost_to_retention_are_repaired_loudly_and_the_tick_goes_on(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    here.execute(tick(here.stack, here.instance).requests[0])
    # A feature whose hint is lost, in a tile that was never built; and a hint that came after.
    lost, other = Tile(18, HOME.x * 16 + 50, HOME.y * 16), Tile(14, HOME.x + 5, HOME.y)
    here.put("b", shapely.Point(lost.bounds.west + 1e-5, lost.bounds.north - 1e-5), min_zoom=18)
    here.hint(lost.key)
    retention = here.stack.log.topics()[topics.TILES].retention_ms
    here.stack.log.enforce_retention(later(here) + retention + 10 * MINUTE)
    here.hint(other.key)

    done = tick(here.stack, here.instance)

    repair, live = done.requests
    assert repair.job_name == "repair_coverage"
    assert here.ledger.batch(here.batch_of(live)).keys == (other.key,)
    assert done.positions[topics.TILES] == {0: 3}
    # Asked for until it is planned, once at a time.
    assert [request.run_key[-2:] for request in tick(here.stack, here.instance).requests] == ["-0"]
    assert (
        defs.resolve_job_def("repair_coverage")
        .execute_in_process(instance=here.instance, run_config=repair.run_config, tags=repair.tags)
        .success
    )
    (manifest,) = here.ledger.manifests()
    assert manifest.kind == "repair"
    assert {HOME.key, lost.key} <= set(here.ledger.manifest_keys(manifest.id))
    (request,) = tick(here.stack, here.instance).requests
    assert request.tags["geo_assets/manifest"] == manifest.id


def test_a_repair_that_fails_is_asked_for_again_and_not_for_ever(here: World) -> None:
    here.ledger.set_value(sensor.REPAIR_VALUE, "r")
    keys: list[str | None] = []
    while requests := tick(here.stack, here.instance).requests:
        keys += [request.run_key for request in requests]
        here.run_with({sensor.REPAIR_TAG: "r"}, DagsterRunStatus.FAILURE)
    assert keys == [f"r-{n}" for n in range(sensor.REPAIR_TRIES)]


def test_too_many_runs_in_flight_ask_for_no_more_and_the_reason_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, monkeypatch, runs_in_flight=1, batch_tiles=2) as here:
        here.hint(*(tile.key for tile in tiles_around(HOME, 5)))
        assert len(tick(here.stack, here.instance).requests) == 1
        done = tick(here.stack, here.instance)
        assert done.requests == []
        assert "1 runs in flight of 1: 3 dirty tiles wait" in done.skip_reason(1)


def test_an_edit_gets_its_run_beside_a_backfill_that_holds_every_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, monkeypatch, runs_in_flight=2, batch_tiles=2) as here:
        keys = [tile.key for tile in tiles_around(HOME, 8)]
        here.ledger.write_manifest("m", "all", "backfill", keys[:7])
        here.ledger.mark_manifest("m")
        first = tick(here.stack, here.instance)
        assert [request.tags["geo_assets/kind"] for request in first.requests] == ["backfill", "backfill"]
        here.hint(keys[7])
        second = tick(here.stack, here.instance)
        assert [request.tags["geo_assets/kind"] for request in second.requests] == ["live"]
        assert tick(here.stack, here.instance).requests == []


def test_a_killed_run_is_asked_for_again_in_halves_until_the_killer_stands_alone(here: World) -> None:
    keys = [tile.key for tile in tiles_around(HOME, 4)]
    here.hint(*keys)
    requests = tick(here.stack, here.instance).requests
    killer = keys[2]
    seen: set[str] = set()
    rounds = 0
    while requests and rounds < 20:
        rounds += 1
        for request in requests:
            assert request.run_key not in seen
            seen.add(request.run_key)
            batch_id = here.batch_of(request)
            opened = here.ledger.batch(batch_id)
            dies = killer in opened.keys
            run = here.run_of(batch_id, DagsterRunStatus.FAILURE if dies else DagsterRunStatus.SUCCESS)
            here.ledger.start_batch(batch_id, run.run_id, 60)
            if not dies:
                with TileBuilder(here.stack, batch_id, inline=True) as builder:
                    assert all(result.outcome != "failed" for result in builder.build(opened.keys))
                here.ledger.end_batch(batch_id)
        requests = tick(here.stack, here.instance).requests

    states = here.ledger.read(keys)
    assert not any(states[key].dirty for key in keys if key != killer)
    assert states[killer].given_up == states[killer].wanted
    assert all(state.attempts == 0 for key, state in states.items() if key != killer)
    (letter,) = here.dead_letters()
    assert letter.headers["tile"] == killer
    assert rounds == 2 + here.stack.settings.max_attempts
    # A new mark gives it another chance.
    here.hint(killer)
    assert len(tick(here.stack, here.instance).requests) == 1


def test_a_batch_that_was_never_submitted_is_asked_for_again_whole_and_charges_nobody(here: World) -> None:
    keys = [tile.key for tile in tiles_around(HOME, 3)]
    here.hint(*keys)
    (first,) = tick(here.stack, here.instance).requests
    (again,) = tick(here.stack, here.instance, later(here)).requests
    assert again.run_key != first.run_key
    assert set(here.ledger.batch(here.batch_of(again)).keys) == set(keys)
    assert here.ledger.batch(here.batch_of(again)).attempt == 1
    assert all(state.attempts == 0 for state in here.ledger.read(keys).values())


def test_a_waiting_batch_outlives_its_first_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path, monkeypatch, lease_s=1) as here:
        here.hint(HOME.key)
        (request,) = tick(here.stack, here.instance).requests
        here.run_of(here.batch_of(request), DagsterRunStatus.NOT_STARTED)
        before = here.ledger.read([HOME.key])[HOME.key].lease_until_ms
        assert tick(here.stack, here.instance, later(here, 5 * MINUTE)).requests == []
        assert here.ledger.read([HOME.key])[HOME.key].lease_until_ms > before


def test_a_commit_whose_builder_died_is_announced_and_catalogued_by_the_sensor(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensor, "CATALOG_AGE_MS", 0)
    here.put_square("a", HOME)
    with TileBuilder(here.stack, "somebody", inline=True) as builder:
        here.ledger.mark([HOME.key])
        (result,) = builder.build([HOME.key])
    assert result.catalog_owed
    done = tick(here.stack, here.instance)
    assert done.reported == 1
    assert here.instance.get_materialized_partitions(catalog.TILES) == {HOME.key}
    assert here.ledger.owed("catalog") == []
    assert tick(here.stack, here.instance).reported == 0


def test_a_key_in_the_ledger_that_is_no_tile_becomes_a_dead_letter_and_fails_no_tick(here: World) -> None:
    here.ledger.mark(["nonsense", HOME.key])
    done = tick(here.stack, here.instance)
    assert len(done.requests) == 1
    assert [letter.headers["tile"] for letter in here.dead_letters()] == ["nonsense"]
    assert len(tick(here.stack, here.instance).requests) == 0


def test_features_are_observed_when_their_watermark_moves_and_only_then(here: World) -> None:
    now = 1_800_000_000_000
    tick(here.stack, here.instance, now)
    assert here.instance.fetch_observations(catalog.FEATURES, limit=9).records == []
    here.put_square("a", HOME)
    for minute in (2, 4):
        tick(here.stack, here.instance, now + minute * MINUTE)
    (observed,) = here.instance.fetch_observations(catalog.FEATURES, limit=9).records
    assert observed.asset_observation is not None
    assert observed.asset_observation.metadata["watermark_ms"].value == 1_700_000_000_001


def evaluated(here: World, *names: str) -> list[str]:
    """Checks that Dagster shows a result for: those evaluated since the newest materialization of any tile."""

    async def shown() -> list[str]:
        loading = LoadingContextForTest(here.instance)
        found: list[str] = []
        for name in names:
            record = await AssetCheckExecutionRecord.gen(loading, AssetCheckKey(catalog.TILES, name))
            if record and await record.targets_latest_materialization(loading):
                found.append(name)
        return found

    return asyncio.run(shown())


def test_an_edit_is_followed_by_one_audit_once_the_map_rests_and_dagster_shows_its_checks_as_evaluated(
    here: World,
) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    now = time.time_ns() // 1_000_000
    (request,) = tick(here.stack, here.instance, now).requests
    assert here.execute(request).success
    checks = ("topology", "crs", "coverage", "integrity")
    assert evaluated(here, *checks) == []
    assert tick(here.stack, here.instance, now + 1_000).requests == []
    assert tick(here.stack, here.instance, now + 20_000).requests == []

    (asked,) = tick(here.stack, here.instance, now + 40_000).requests
    assert asked.job_name == "audit"
    assert BATCH_TAG not in asked.tags

    assert defs.resolve_job_def("audit").execute_in_process(instance=here.instance, tags=asked.tags).success
    assert evaluated(here, *checks) == list(checks)
    assert here.ledger.batches() == []
    assert tick(here.stack, here.instance, now + 60 * MINUTE).requests == []
    # The next edit's run comes at once, and its audit later.
    here.put_square("b", HOME)
    here.hint(HOME.key)
    (live,) = tick(here.stack, here.instance, now + 61 * MINUTE).requests
    assert live.job_name == "build_tiles"


def test_an_audit_that_is_still_running_takes_no_place_of_a_live_run_and_gets_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, monkeypatch, runs_in_flight=1) as here:
        here.put_square("a", HOME)
        here.hint(HOME.key)
        now = time.time_ns() // 1_000_000
        assert here.execute(tick(here.stack, here.instance, now).requests[0]).success
        here.run_with({AUDIT_TAG: "1"}, DagsterRunStatus.STARTED)
        tick(here.stack, here.instance, now + MINUTE)
        assert tick(here.stack, here.instance, now + 2 * MINUTE).requests == []
        here.hint(HOME.key, value=b'{"force":true}')
        (live,) = tick(here.stack, here.instance, now + 3 * MINUTE).requests
        assert live.job_name == "build_tiles"


def test_a_log_or_ledger_that_is_away_skips_the_tick_and_says_which(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEO_ASSETS_HOME", str(here.stack.settings.home))
    monkeypatch.setenv("GEO_ASSETS_KAFKA_SERVERS", "127.0.0.1:1")
    for variable in ("GEO_ASSETS_KAFKA_SERVERS", "GEO_ASSETS_LEDGER_URL"):
        with build_sensor_context(instance=here.instance, cursor="{}") as context:
            answer = sensor.tile_updates(context, stack=StackResource())
        assert isinstance(answer, SensorResult)
        assert answer.skip_reason is not None
        assert variable in (answer.skip_reason.skip_message or "")
        assert not answer.run_requests
        assert answer.cursor is None
        monkeypatch.delenv("GEO_ASSETS_KAFKA_SERVERS", raising=False)
        monkeypatch.setenv("GEO_ASSETS_LEDGER_URL", "postgresql://me@127.0.0.1:1/map")
