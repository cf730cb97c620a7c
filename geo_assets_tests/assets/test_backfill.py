"""The backfill of a region, from Dagster's UI and by the services: planned, estimated, resumed, watched and judged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterRunStatus

from geo_assets.definitions import defs
from geo_assets.services import throughput
from geo_assets.services.backfills import SAMPLED, estimate, plan_region, start_backfill, verdict
from geo_assets.services.build import TileBuilder
from geo_assets.services.regions import RegionError, box_region, feature_region
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, tiles_around, world
from resources.ledger.protocol import Failure
from sensors.tile_updates import tick

HOME = Tile(14, 9_327, 4_741)
BOX = f"{HOME.bounds.west},{HOME.bounds.south},{HOME.bounds.east},{HOME.bounds.north}"
INSIDE = ",".join(f"{v:.7f}" for v in (HOME.bounds.west + 1e-4, HOME.bounds.south + 1e-4,
                                        HOME.bounds.east - 1e-4, HOME.bounds.north - 1e-4))  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        yield made


def launch(here: World, **config: Any):
    """The job as the launchpad starts it."""
    job = defs.resolve_job_def("backfill_region")
    return job.execute_in_process(
        run_config={"ops": {"region": {"config": config}}}, instance=here.instance, raise_on_error=False
    )


def said(result: Any) -> str:
    """Why a run failed."""
    return " ".join(str(event.event_specific_data) for event in result.all_events if event.is_failure)


def metadata_of(result: Any) -> dict[str, Any]:
    (event,) = [e for e in result.all_events if e.event_type_value == "STEP_OUTPUT"]
    return {name: value.value for name, value in event.event_specific_data.metadata.items()}


def test_the_launchpad_opens_with_every_field_and_its_help() -> None:
    job = defs.resolve_job_def("backfill_region")
    assert job.partitioned_config is None
    prefilled = job.run_config["ops"]["region"]["config"] if job.run_config else {}
    assert set(prefilled) >= {"bbox", "geojson", "file", "h3", "feature", "zooms", "force", "cap", "wait", "dry_run"}
    fields = job.graph.node_dict["region"].definition.config_schema.config_type.fields
    assert all(field.description for field in fields.values())


def test_a_region_is_planned_marked_and_built_by_the_sensors_runs(here: World) -> None:
    here.put_square("a", HOME)
    result = launch(here, bbox=INSIDE, zooms="13-15", wait=False)
    assert result.success
    shown = metadata_of(result)
    assert shown["tiles"] == 1 + 1 + 4
    assert [row.data["zoom"] for row in shown["width"].records] == [13, 14, 15]
    request = tick(here.stack, here.instance).requests[0]
    assert here.execute(request).success
    again = launch(here, manifest=shown["manifest"])
    assert again.success
    assert metadata_of(again)["coverage"] == 1.0


def test_a_dry_run_from_the_launchpad_marks_nothing(here: World) -> None:
    here.put_square("a", HOME)
    result = launch(here, bbox=INSIDE, zooms="14", dry_run=True)
    assert result.success
    assert metadata_of(result)["vertices"] == 5
    assert here.ledger.manifests() == []


def test_a_config_that_makes_no_sense_is_a_failed_run_that_says_so(here: World) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "exactly one"),
        ({"bbox": BOX, "h3": ["891126d3623ffff"]}, "exactly one"),
        ({"bbox": "1,2,3"}, "west,south,east,north"),
        ({"geojson": "{"}, "not GeoJSON"),
        ({"geojson": '{"type":"Point","coordinates":[1,2]}'}, "no polygon"),
        ({"file": "/does/not/exist"}, "No such file"),
        ({"feature": "demo:nobody"}, "no source demo ever wrote here"),
        ({"h3": ["-1"]}, "is no H3 cell"),
        ({"bbox": BOX, "zooms": "0-99999999"}, "outside 0..22"),
        ({"bbox": "-180,-85,180,85", "zooms": "12"}, "above the cap of 20,000"),
        ({"bbox": BOX, "zooms": "22"}, "above 18"),
        ({"manifest": "nonsense"}, "no manifest"),
    ]
    for config, expected in refused:
        result = launch(here, **config)
        assert not result.success, config
        assert expected in said(result), config
    assert here.ledger.manifests() == []


def test_a_run_that_is_executed_again_goes_on_with_its_manifest(here: World) -> None:
    plan = plan_region(here.stack, *box_region(INSIDE), [14, 15])
    first = start_backfill(here.stack, plan, manifest_id="backfill-1")
    again = start_backfill(here.stack, plan, manifest_id="backfill-1")
    assert first == again
    assert len(here.ledger.manifests()) == 1


def test_a_backfill_below_its_floor_fails_and_names_the_tiles(here: World) -> None:
    here.put_square("a", HOME)
    launch(here, bbox=INSIDE, zooms="14", wait=False)
    (manifest,) = here.ledger.manifests()
    wanted = here.ledger.read([HOME.key])[HOME.key].wanted
    here.ledger.fail([Failure(HOME.key, wanted, "too heavy to lift")], max_attempts=1)
    result = launch(here, manifest=manifest.id)
    assert not result.success
    assert "below the floor" in said(result)
    assert "too heavy to lift" in said(result)
    assert not verdict(here.stack, manifest.id).passed


def test_a_backfill_that_is_cancelled_ends_its_watching_run(here: World) -> None:
    launch(here, bbox=INSIDE, zooms="14", wait=False)
    (manifest,) = here.ledger.manifests()
    timer = threading.Timer(0.5, lambda: here.ledger.cancel_manifest(manifest.id))
    timer.start()
    result = launch(here, manifest=manifest.id)
    timer.join()
    assert not result.success
    assert "cancelled" in said(result)
    assert not here.ledger.read([HOME.key])[HOME.key].dirty


def test_an_estimate_of_few_tiles_is_exact_and_knows_what_is_up_to_date(here: World) -> None:
    row = tiles_around(HOME, 2)
    here.put_square("a", row[0])
    here.put_square("b", row[1])
    plan = plan_region(here.stack, *box_region(INSIDE), [14])
    before = estimate(here.stack, plan)
    assert (before.exact, before.tiles, before.up_to_date, before.vertices) == (True, 1, 0, 5)
    with TileBuilder(here.stack, "me", inline=True) as builder:
        assert [one.outcome for one in builder.build([row[0].key])] == ["built"]
    after = estimate(here.stack, plan)
    assert (after.up_to_date, after.vertices) == (1, 0)
    assert estimate(here.stack, plan, force=True).vertices == 5


def test_an_estimate_of_many_tiles_looks_at_some_of_every_zoom(here: World) -> None:
    here.put_square("a", HOME)
    west, south, east, north = HOME.bounds
    wide = f"{west - 1},{south - 0.4},{east + 1},{north + 0.4}"
    plan = plan_region(here.stack, *box_region(wide), [8, 12, 14])
    costs = estimate(here.stack, plan)
    assert len(plan.keys) > 2 * SAMPLED
    assert SAMPLED / 2 < costs.sampled < 2 * SAMPLED
    assert not costs.exact
    assert costs.tiles == len(plan.keys)
    assert [one.zoom for one in costs.zooms] == [8, 12, 14]
    assert costs.zooms[0].vertices >= 5
    assert estimate(here.stack, plan) == costs


def test_a_feature_of_the_store_is_a_region_by_id_or_by_attribute(here: World) -> None:
    here.put_square("a", HOME)
    shape, title = feature_region(here.stack.features, "demo:a")
    assert title == 'a (demo:"a")'
    assert feature_region(here.stack.features, 'demo:"a"')[0].equals(shape)
    assert feature_region(here.stack.features, "buildings/name=a")[0].equals(shape)
    here.put_square("b", HOME)
    for text, problem in (
        ("buildings/name=c", "no feature"), ("a", "neither"), ("=x", "neither"), ("demo:c", "not in the store"),
        ("buildings/=a", "neither"),
    ):  # fmt: skip
        with pytest.raises(RegionError, match=problem):
            feature_region(here.stack.features, text)


def test_an_attribute_of_several_features_names_no_region(here: World) -> None:
    for name in ("a", "b"):
        here.put_square(name, HOME)
    store = here.stack.features
    rows = [json.loads(one.properties) for one in store.scan(layer="buildings")]
    assert len(rows) == 2
    shared = type("Store", (), {"scan": lambda self, layer: iter([*store.scan(layer=layer)] * 2)})()
    with pytest.raises(RegionError, match="both have it"):
        feature_region(shared, "buildings/name=a")


def test_the_speed_of_runs_is_remembered_and_a_tiny_run_says_nothing(here: World) -> None:
    ledger = here.ledger
    assert not throughput.speed(ledger).measured
    throughput.remember_speed(ledger, 3, 1_000, 1.0)
    assert not throughput.speed(ledger).measured
    throughput.remember_speed(ledger, 100, 50_000, 1.0)
    assert throughput.speed(ledger) == throughput.Speed(100_000, measured=True)
    throughput.remember_speed(ledger, 100, 150_000, 1.0)
    assert 100_000 < throughput.speed(ledger).weight_per_s < 200_000
    ledger.set_value("build.speed", "nonsense")
    assert not throughput.speed(ledger).measured


def test_no_more_workers_start_than_memory_has_room_for(here: World) -> None:
    ledger = here.ledger
    assert throughput.workers(ledger, 8, 2, free=100) == 8
    throughput.remember_memory(ledger, {9: 99, 10: 2})
    assert throughput.worker_megabytes(ledger) == 1_024
    assert throughput.workers(ledger, 8, 2, free=16_000) == 4
    assert throughput.workers(ledger, 8, 2, free=500) == 1
    assert throughput.workers(ledger, 2, 1, free=100_000) == 2
    throughput.remember_memory(ledger, {7: 10})
    assert throughput.worker_megabytes(ledger) == 512
    throughput.remember_memory(ledger, {7: 10})
    throughput.remember_memory(ledger, {7: 10})
    assert throughput.worker_megabytes(ledger) == 128


def test_a_run_over_a_batch_remembers_its_memory(here: World) -> None:
    here.put_square("a", HOME)
    here.hint(HOME.key)
    assert here.execute(tick(here.stack, here.instance).requests[0]).success
    assert throughput.worker_megabytes(here.ledger) >= 64


def test_runs_that_read_the_feature_store_share_a_pool(here: World) -> None:
    settings = here.instance.get_concurrency_config().pool_config
    assert settings.pool_granularity is not None
    assert settings.pool_granularity.value == "run"
    assert settings.default_pool_limit == 5
    job = defs.resolve_job_def("build_tiles")
    assert job.graph.node_dict["tiles"].definition.pool == "feature_store"


def test_terminating_the_run_in_the_ui_cancels_its_backfill_and_a_shutdown_does_not(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geo_assets.assets import backfill

    def interrupted(stack, manifest_id, *, poll_s):
        del stack, manifest_id, poll_s
        yield here.ledger.progress(here.ledger.manifests()[0].id)
        raise KeyboardInterrupt

    monkeypatch.setattr(backfill, "watch", interrupted)
    plan = plan_region(here.stack, *box_region(INSIDE), [14])
    manifest = start_backfill(here.stack, plan)
    for status, expected in ((DagsterRunStatus.STARTED, "marked"), (DagsterRunStatus.CANCELING, "cancelled")):
        run = here.run_with({}, status)

        class Context:
            run_id = run.run_id
            instance = here.instance
            log = __import__("logging").getLogger("test")

        with pytest.raises(KeyboardInterrupt):
            backfill._watched(Context(), here.stack, manifest)  # type: ignore[arg-type]
        assert here.ledger.manifest(manifest.id).state == expected


def test_live_edits_are_asked_for_before_a_backfill_and_its_low_zooms_last(here: World) -> None:
    here.put_square("a", HOME)
    launch(here, bbox=INSIDE, zooms="10-16", wait=False)
    other = Tile(14, HOME.x + 5, HOME.y)
    here.hint(other.key)
    order = [state.key for state in here.ledger.dirty(100)]
    tick(here.stack, here.instance)
    assert other.key not in order or order[0] == other.key
    zooms = [int(key.partition(":")[0]) for key in order if key != other.key]
    assert zooms == sorted(zooms, reverse=True)


def test_watching_shows_progress_until_the_last_tile(here: World) -> None:
    here.put_square("a", HOME)
    plan = plan_region(here.stack, *box_region(INSIDE), [14, 15])
    manifest = start_backfill(here.stack, plan)

    def build() -> None:
        time.sleep(0.3)
        with TileBuilder(here.stack, "me", inline=True) as builder:
            list(builder.build(plan.keys))

    thread = threading.Thread(target=build)
    thread.start()
    from geo_assets.services.backfills import watch

    seen = [progress.done for progress in watch(here.stack, manifest.id, poll_s=0.02)]
    thread.join()
    assert seen[0] == 0
    assert seen[-1] == len(plan.keys)
    assert json.loads(manifest.parameters)["zooms"] == [14, 15]
