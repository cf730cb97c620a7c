"""Runs that get no slot of their pool: the real queue holds them back, and the sensor ends them with an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterEventType, DagsterRun, DagsterRunStatus, RunRequest
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from geo_assets.definitions import defs
from geo_assets.services.backfills import plan_region, start_backfill
from geo_assets.services.regions import box_region
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world
from sensors.pool_waits import Taken, end_waiting, has_waited_too_long, problem
from sensors.tile_updates import tick

HOME = Tile(14, 9_327, 4_741)
WAIT_S = 1_800
POOL = "feature_store"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        made.put_square("a", HOME)
        yield made


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def queued(here: World, request: RunRequest) -> DagsterRun:
    """The run of a request, in Dagster's queue."""
    place = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("geo_assets"), "__repository__")
    return here.instance.create_run_for_job(
        defs.resolve_job_def("build_tiles"),
        run_config=request.run_config,
        tags=request.tags,
        status=DagsterRunStatus.QUEUED,
        remote_job_origin=RemoteJobOrigin(place, "build_tiles"),
    )


def dequeued(here: World) -> list[str]:
    """Ids of the runs that Dagster's queue would start now."""
    daemon = QueuedRunCoordinatorDaemon(interval_seconds=1)
    runs = daemon._get_runs_to_dequeue(here.instance, here.instance.get_concurrency_config(), None)
    return [run.run_id for run in runs]


def error_of(here: World, run: DagsterRun) -> str:
    (entry,) = here.instance.all_logs(run.run_id, of_type=DagsterEventType.PIPELINE_FAILURE)
    assert entry.dagster_event is not None
    return entry.dagster_event.message or ""


def backfill(here: World) -> tuple[str, DagsterRun]:
    """A backfill whose one run is queued: its manifest, and the run."""
    west, south, east, north = HOME.bounds
    inside = f"{west + 1e-4},{south + 1e-4},{east - 1e-4},{north - 1e-4}"
    manifest = start_backfill(here.stack, plan_region(here.stack, *box_region(inside), [13, 14]))
    (request,) = tick(here.stack, here.instance).requests
    return manifest.id, queued(here, request)


def test_a_backfills_run_that_gets_no_slot_ends_with_an_error_and_its_tiles_are_asked_for_again(here: World) -> None:
    here.instance.event_log_storage.set_concurrency_slots(POOL, 0)
    manifest, run = backfill(here)
    assert dequeued(here) == []
    early = tick(here.stack, here.instance, now_ms() + (WAIT_S - 60) * 1000)
    assert (early.requests, early.in_flight) == ([], 1)

    late = tick(here.stack, here.instance, now_ms() + (WAIT_S + 60) * 1000)
    ended = here.instance.get_run_by_id(run.run_id)
    assert ended is not None
    assert ended.status is DagsterRunStatus.FAILURE
    said = error_of(here, run)
    for part in ("GEO_ASSETS_POOL_WAIT_S (1,800 s)", f"the limit of pool {POOL} is 0", "Deployment > Concurrency"):
        assert part in said
    # The mark came back, and nobody is charged: the same tiles go into a new batch.
    (request,) = late.requests
    assert here.batch_of(request) != run.tags["geo_assets/batch"]
    states = here.ledger.read(here.ledger.manifest_keys(manifest)).values()
    assert {(state.attempts, state.dirty, state.lease) for state in states} == {(0, True, here.batch_of(request))}

    again = queued(here, request)
    assert dequeued(here) == []
    here.instance.event_log_storage.set_concurrency_slots(POOL, 1)
    assert dequeued(here) == [again.run_id]
    here.instance.delete_run(again.run_id)
    assert here.execute(request).success
    assert here.ledger.progress(manifest).done == len(states)


def test_the_error_names_the_runs_that_hold_the_slots(here: World) -> None:
    here.instance.event_log_storage.set_concurrency_slots(POOL, 1)
    job = defs.resolve_job_def("build_tiles")
    holder = here.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    _, run = backfill(here)
    assert dequeued(here) == []
    tick(here.stack, here.instance, now_ms() + (WAIT_S + 60) * 1000)
    assert f"1 of 1 slots are taken by {holder.run_id[:8]}" in error_of(here, run)


def test_the_limit_that_nobody_changed_is_the_one_of_dagster_yaml(here: World) -> None:
    job = defs.resolve_job_def("build_tiles")
    for _ in range(5):
        here.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    _, run = backfill(here)
    tick(here.stack, here.instance, now_ms() + (WAIT_S + 60) * 1000)
    assert "5 of 5 slots are taken" in error_of(here, run)


def test_a_run_that_left_the_queue_meanwhile_is_left_alone(here: World) -> None:
    _, run = backfill(here)
    record = here.instance.get_run_record_by_id(run.run_id)
    assert record is not None
    late = now_ms() + (WAIT_S + 60) * 1000
    assert has_waited_too_long(record, late, WAIT_S)
    here.instance.report_dagster_event(_starting(run), run_id=run.run_id)
    assert end_waiting(here.instance, record, late, WAIT_S) is DagsterRunStatus.STARTING
    here.instance.delete_run(run.run_id)
    assert end_waiting(here.instance, record, late, WAIT_S) is DagsterRunStatus.FAILURE


def _starting(run: DagsterRun) -> Any:
    from dagster import DagsterEvent

    return DagsterEvent(event_type_value=DagsterEventType.PIPELINE_STARTING.value, job_name=run.job_name)


def test_a_run_that_builds_may_take_longer_than_it_may_wait(here: World) -> None:
    _, run = backfill(here)
    here.instance.report_dagster_event(_starting(run), run_id=run.run_id)
    late = tick(here.stack, here.instance, now_ms() + 2 * WAIT_S * 1000)
    assert (late.requests, late.in_flight) == ([], 1)


def test_a_run_whose_pool_has_room_is_left_to_the_queue(here: World) -> None:
    _, run = backfill(here)
    late = tick(here.stack, here.instance, now_ms() + (WAIT_S + 60) * 1000)
    assert (late.requests, late.in_flight) == ([], 1)
    assert dequeued(here) == [run.run_id], "the daemon was away, and starts it now"


def test_the_error_says_how_long_and_names_a_few_of_many_holders() -> None:
    many = Taken(POOL, 7, tuple(f"{n}" * 36 for n in range(7)))
    said = problem([Taken("other", 3, ()), many], 1_860, WAIT_S)
    assert said.startswith("The run waited 1,860 s in Dagster's queue for a slot of its pool, longer than")
    assert "7 of 7 slots are taken by 00000000, 11111111" in said
    assert "and more" in said
    assert "other" not in said
    assert problem([Taken("other", 3, ("a",))], 1_860, WAIT_S) == problem([], 1_860, WAIT_S) == ""
