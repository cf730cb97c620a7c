"""The sensor of routing runs: its plan, pure, and a tick, a run and its checks on real ports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterRunStatus, build_sensor_context

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.checks import geofence as checks
from geo_assets.definitions import defs
from geo_assets.events import topics
from geo_assets.jobs import ROUTING_TAG
from geo_assets.services.fences import FenceBook
from geo_assets.services.routing_result import VALUE
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world
from geo_assets_tests.geofence_world import consistent, fence, post_fences, seen, walk
from resources.event_log.protocol import NewRecord
from sensors import tile_updates
from sensors.geofence_positions import Routing, Waiting, geofence_positions, plan, runs_of, waiting_in

NOW = 1_800_000_000.0
LAG = Waiting(5, False, None)
NOTHING = Waiting(0, False, None)


def started(seconds_ago: float) -> Routing:
    return Routing(DagsterRunStatus.STARTED, NOW - seconds_ago, None)


def failed(seconds_ago: float) -> Routing:
    return Routing(DagsterRunStatus.FAILURE, NOW - seconds_ago - 1, NOW - seconds_ago)


def asks(runs: list[Routing], waiting: Waiting = LAG, run_s: float = 3_600) -> bool:
    return plan(runs, waiting, run_s, NOW)[0]


def test_lag_without_a_run_asks_for_one() -> None:
    assert asks([])
    assert asks([Routing(DagsterRunStatus.SUCCESS, NOW - 100, NOW - 1)])
    assert not asks([], NOTHING)


def test_changed_fences_and_what_is_due_ask_for_one_too() -> None:
    assert asks([], Waiting(0, True, None))
    assert asks([], Waiting(0, False, int(NOW * 1000)))
    assert not asks([], Waiting(0, False, int(NOW * 1000) + 1))


def test_a_run_that_is_queued_or_routes_is_enough() -> None:
    assert not asks([Routing(DagsterRunStatus.QUEUED, None, None)])
    assert not asks([started(10)])


def test_a_standby_is_asked_for_before_the_time_is_over_and_only_one() -> None:
    assert not asks([started(3_539)])
    assert asks([started(3_541)], NOTHING)
    assert not asks([Routing(DagsterRunStatus.QUEUED, None, None), started(3_541)])
    assert not asks([started(20)], run_s=60)
    assert asks([started(31)], run_s=60)


def test_runs_that_fail_in_a_row_are_asked_for_ever_less_often() -> None:
    assert not asks([failed(5)])
    assert asks([failed(11)])
    assert not asks([failed(15), failed(60)])
    assert asks([failed(21), failed(60)])
    assert asks([failed(301)] * 8)
    assert not asks([failed(299)] * 8)


def test_runs_that_worked_for_a_while_and_were_killed_are_followed_at_once() -> None:
    killed = Routing(DagsterRunStatus.FAILURE, NOW - 120, NOW - 1)
    assert asks([killed] * 8)
    assert asks([failed(11), killed, failed(200)])
    assert not asks([failed(5), killed])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch, geofence_idle_s=0.5) as made:
        yield made


def test_a_tick_asks_for_a_run_that_routes_and_says_what_it_did(here: World) -> None:
    def tick() -> Any:
        return geofence_positions.evaluate_tick(
            build_sensor_context(here.instance, resources={"stack": StackResource()}, definitions=defs)
        )

    assert "nothing waits" in (tick().skip_message or "")
    post_fences(here.stack, [fence(n, dwell_s=120) for n in range(6)])
    here.stack.log.append(walk(10, 30))
    (request,) = tick().run_requests or []
    assert request.tags[ROUTING_TAG] == "yes"
    job = defs.resolve_job_def("route_geofence_triggers")
    assert set(job.graph.node_dict) == {"geofence_triggers"}
    assert job.tags[ROUTING_TAG] == "yes"
    assert job.execute_in_process(instance=here.instance).success

    consistent(seen(here.stack))
    found = here.instance.get_latest_materialization_event(catalog.TRIGGERS)
    assert found is not None
    assert found.asset_materialization is not None
    said = {name: value.value for name, value in found.asset_materialization.metadata.items()}
    assert said["positions"] == 300 + said["ticks"]
    assert said["routed"] == sum(map(len, seen(here.stack).values())) > 50
    assert {"deduped", "shed", "dlq", "late", "jumps", "positions_per_second", "stages", "lag"} <= set(said)
    assert waiting_in(here.stack).positions == 0
    assert [run.status for run in runs_of(here.instance)] == [DagsterRunStatus.SUCCESS]

    post_fences(here.stack, [fence(0, version=2, shift=0.5)])
    assert waiting_in(here.stack).fences
    FenceBook(here.stack).fold()
    assert waiting_in(here.stack).fences

    for audit in (checks.audit_dead_letters, checks.audit_delivery, checks.audit_lag):
        assert audit(here.stack).passed, audit


def test_a_routing_run_keeps_no_audit_from_being_asked_for(here: World) -> None:
    here.put_square("a", Tile(14, 9_327, 4_741))
    here.hint(Tile(14, 9_327, 4_741).key)
    now = time.time_ns() // 1_000_000
    assert here.execute(tile_updates.tick(here.stack, here.instance, now).requests[0]).success
    here.run_with({ROUTING_TAG: "yes"}, DagsterRunStatus.STARTED)
    tile_updates.tick(here.stack, here.instance, now + 60_000)
    (asked,) = tile_updates.tick(here.stack, here.instance, now + 120_000).requests
    assert asked.job_name == "audit"


def test_the_checks_see_a_rate_a_delivery_and_a_lag_that_are_too_high(here: World) -> None:
    here.stack.ledger.set_value(VALUE, json.dumps({"routed": 9, "on_broker": True, "p99_ms": {"end_to_end": 60.0}}))
    assert not checks.audit_delivery(here.stack).passed
    old = time.time_ns() // 1_000_000 - here.stack.settings.retention_s * 800
    here.stack.log.append([NewRecord(topics.POSITIONS, "d", b"{}", {}, old)])
    assert not checks.audit_lag(here.stack).passed
    assert checks.audit_lag(here.stack).looked_at == 1
    here.stack.log.append([NewRecord(topics.POSITIONS, "d", b"no")])
    assert defs.resolve_job_def("route_geofence_triggers").execute_in_process(instance=here.instance).success
    assert not checks.audit_dead_letters(here.stack).passed
