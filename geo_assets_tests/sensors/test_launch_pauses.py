"""Launches that Kubernetes refuses: the sensor asks again after a pause that grows, and at once when one succeeds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterRun, DagsterRunStatus
from dagster._core.storage.tags import SENSOR_NAME_TAG

from geo_assets.jobs import BATCH_TAG
from geo_assets.kubernetes.pods import NOT_LAUNCHED_TAG
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world
from sensors.launch_pauses import BACKOFF, pause_of
from sensors.tile_updates import NAME, tick

HOME = Tile(14, 9_327, 4_741)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch, run_pods=True) as made:
        made.put_square("a", HOME)
        made.hint(HOME.key)
        yield made


def run_of(here: World, batch: str, status: DagsterRunStatus) -> DagsterRun:
    return here.run_with({BATCH_TAG: batch, SENSOR_NAME_TAG: NAME}, status)


def refused(here: World, batch: str) -> None:
    """The run of a batch as the launcher leaves it where Kubernetes made no Job."""
    run = run_of(here, batch, DagsterRunStatus.STARTING)
    here.instance.add_run_tags(run.run_id, {NOT_LAUNCHED_TAG: "ApiRefused"})
    here.instance.report_run_failed(run, "Kubernetes refuses the creation of Job x")


def test_while_kubernetes_refuses_the_sensor_asks_after_pauses_and_then_again_for_all_of_it(
    here: World, capsys: pytest.CaptureFixture[str]
) -> None:
    now_ms, pauses_s = time.time_ns() // 1_000_000, list[float]()
    (request,) = tick(here.stack, here.instance, now_ms).requests
    for failed in range(1, 6):
        refused(here, here.batch_of(request))
        told_s = now_ms / 1000
        seen, left_s = pause_of(here.instance, NAME, told_s)
        assert seen == failed
        assert left_s <= BACKOFF.bound_s(failed) + time.time() - told_s
        done = tick(here.stack, here.instance, now_ms)
        if left_s:
            assert done.requests == []
            assert f"{failed} launches failed in a row: the next run is asked for in" in done.skip_reason(2)
            # Nothing is remembered, and each look finds the same end.
            assert pause_of(here.instance, NAME, told_s + 1)[1] == pytest.approx(max(0, left_s - 1), abs=1e-3)
            done = tick(here.stack, here.instance, now_ms + round(left_s * 1000) + 1)
            pauses_s.append(left_s)
        (request,) = done.requests
    assert pauses_s, "five in a row are no chance"
    assert "runs cannot be launched" in "".join(capsys.readouterr())
    state = here.ledger.read([HOME.key])[HOME.key]
    assert (state.dirty, state.attempts, state.lease) == (True, 0, here.batch_of(request))


def test_a_run_that_starts_ends_the_pause(here: World) -> None:
    (request,) = tick(here.stack, here.instance).requests
    for _ in range(6):
        refused(here, here.batch_of(request))
    now_s = time.time()
    assert pause_of(here.instance, NAME, now_s)[0] == 6

    waiting = run_of(here, "another", DagsterRunStatus.STARTING)
    assert pause_of(here.instance, NAME, now_s)[0] == 6, "one on its way says nothing"
    here.instance.delete_run(waiting.run_id)
    run_of(here, "another", DagsterRunStatus.SUCCESS)
    assert pause_of(here.instance, NAME, now_s) == (0, 0.0)


def test_runs_of_others_and_other_failures_make_no_pause(here: World) -> None:
    here.run_with({SENSOR_NAME_TAG: "another", NOT_LAUNCHED_TAG: "ApiRefused"}, DagsterRunStatus.FAILURE)
    run_of(here, "one", DagsterRunStatus.FAILURE)

    assert pause_of(here.instance, NAME, time.time()) == (0, 0.0)
    assert tick(here.stack, here.instance).requests
