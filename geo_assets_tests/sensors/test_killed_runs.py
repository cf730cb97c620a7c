"""Runs killed with -9 and tiles that kill their worker, in real processes: what comes again, and who is charged."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import shapely
from dagster import DagsterRunStatus, RunsFilter

from geo_assets import catalog
from geo_assets.jobs import BATCH_TAG
from geo_assets.services.backfills import plan_region, start_backfill, verdict
from geo_assets.services.build import CHUNK_TILES
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import ROOT, World, tiles_around, world
from geo_assets_tests.waiting import patient
from sensors import tile_updates as sensor
from sensors.tile_updates import tick

HOME = Tile(14, 9_327, 4_741)

RUN = """
import json, os, sys
from dagster import DagsterInstance
from geo_assets.assets import tiles as asset_module
from geo_assets.definitions import defs

request = json.loads(sys.argv[1])
dies_after = request.pop("dies_after")
build = asset_module.TileBuilder.build

def dies(self, keys, *, force=False):
    for count, result in enumerate(build(self, keys, force=force), 1):
        yield result
        if count == dies_after:
            os.kill(os.getpid(), 9)

if dies_after is not None:
    asset_module.TileBuilder.build = dies
with DagsterInstance.get() as instance:
    result = defs.resolve_job_def("build_tiles").execute_in_process(
        run_config=request["run_config"], tags=request["tags"], instance=instance, raise_on_error=False
    )
sys.exit(0 if result.success else 1)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch, max_attempts=2) as made:
        yield made


def launch(here: World, request, *, dies_after: int | None = None, path: Path | None = None) -> int:
    """Run a request in a process of its own; when that was killed, its run is marked failed as the code server does."""
    asked = json.dumps({"run_config": request.run_config, "tags": request.tags, "dies_after": dies_after})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in (path, ROOT) if p is not None)}
    ended = subprocess.run(
        [sys.executable, "-c", RUN, asked],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        timeout=patient(900),
    )
    runs = here.instance.get_runs(RunsFilter(tags={BATCH_TAG: here.batch_of(request)}))
    for run in runs:
        if run.status is DagsterRunStatus.STARTED:
            assert ended.returncode == -9
            here.instance.report_run_failed(run)
    return ended.returncode


def test_rule_15_a_run_killed_in_the_middle_is_asked_for_again_in_halves_and_charges_no_tile(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensor, "CATALOG_AGE_MS", 0)
    tiles = tiles_around(HOME, 6)
    for tile in tiles:
        here.put_square(tile.key, tile)
    here.hint(*(tile.key for tile in tiles))
    (request,) = tick(here.stack, here.instance).requests

    assert launch(here, request, dies_after=2) == -9
    after = here.ledger.read([tile.key for tile in tiles])
    committed = {key for key, state in after.items() if state.revision == 1}
    # What was committed and not yet reported is owed to the catalog, and the sensor pays it.
    reported = here.instance.get_materialized_partitions(catalog.TILES)
    assert {row.key for row in here.ledger.owed("catalog")} | reported == committed
    again = tick(here.stack, here.instance)
    assert here.instance.get_materialized_partitions(catalog.TILES) == committed
    dirty = {key for key, state in after.items() if state.dirty}
    opened = [here.ledger.batch(here.batch_of(one)) for one in again.requests]
    assert {key for one in opened for key in one.keys} == dirty
    assert all(one.attempt == 2 for one in opened)
    assert len(opened) == min(2, len(dirty))

    for one in again.requests:
        assert launch(here, one) == 0
    tick(here.stack, here.instance)
    states = here.ledger.read([tile.key for tile in tiles])
    assert all((state.dirty, state.revision, state.attempts) == (False, 1, 0) for state in states.values())
    assert here.instance.get_materialized_partitions(catalog.TILES) == {tile.key for tile in tiles}
    assert here.ledger.owed("announce") == []
    assert here.ledger.owed("catalog") == []
    assert here.ledger.batches() == []
    assert here.dead_letters() == []


def test_a_run_killed_before_its_first_tile_is_asked_for_again_in_halves(here: World) -> None:
    tiles = tiles_around(HOME, 3)
    here.hint(*(tile.key for tile in tiles))
    (request,) = tick(here.stack, here.instance).requests
    run = here.run_of(here.batch_of(request), DagsterRunStatus.STARTED)
    here.ledger.start_batch(here.batch_of(request), run.run_id, 60)
    here.instance.report_run_failed(run)
    again = tick(here.stack, here.instance).requests
    assert sorted(len(here.ledger.batch(here.batch_of(one)).keys) for one in again) == [1, 2]


KILLS_ITS_WORKER = """
import os, sys

class Finder:
    # Wraps the worker's build as it is imported, in worker processes and in the fork server they come from.
    def find_spec(self, name, path=None, target=None):
        if name != "geo_assets.services.build_worker":
            return None
        import importlib.util
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            inner = module.build_in

            def build_in(stack, tasks, *others, **named):
                if any(task.key == os.environ["KILLER"] for task in tasks):
                    os.kill(os.getpid(), 9)
                return inner(stack, tasks, *others, **named)

            module.build_in = build_in

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def test_a_tile_that_kills_its_worker_becomes_one_dead_letter_and_its_neighbours_are_built(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = tiles_around(HOME, 4)
    killer = tiles[1].key
    monkeypatch.setenv("KILLER", killer)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(textwrap.dedent(KILLS_ITS_WORKER))
    for tile in tiles:
        here.put_square(tile.key, tile)
    here.hint(*(tile.key for tile in tiles))

    rounds = 0
    while (requests := tick(here.stack, here.instance).requests) and rounds < 6:
        rounds += 1
        for request in requests:
            assert launch(here, request, path=tmp_path / "hook") == 0

    states = here.ledger.read([tile.key for tile in tiles])
    assert {key for key, state in states.items() if state.dirty} == {killer}
    assert all(state.attempts == 0 for key, state in states.items() if key != killer)
    (letter,) = here.dead_letters()
    assert (letter.headers["tile"], letter.stage, letter.attempts) == (killer, "build", 2)
    assert rounds == 2
    neighbours = {tile.key for tile in tiles} - {killer}
    assert here.instance.get_materialized_partitions(catalog.TILES) == neighbours


def test_a_tile_that_kills_its_run_becomes_one_dead_letter_and_its_neighbours_are_built(here: World) -> None:
    tiles = tiles_around(HOME, 3)
    killer = tiles[0].key
    for tile in tiles:
        here.put_square(tile.key, tile)
    here.hint(*(tile.key for tile in tiles))
    rounds = 0
    while (requests := tick(here.stack, here.instance).requests) and rounds < 10:
        rounds += 1
        for request in requests:
            batch_id = here.batch_of(request)
            if killer in here.ledger.batch(batch_id).keys:
                # As a run looks that died over its batch before anybody saw a result.
                run = here.run_of(batch_id, DagsterRunStatus.STARTED)
                here.ledger.start_batch(batch_id, run.run_id, 60)
                here.instance.report_run_failed(run)
            else:
                assert here.execute(request).success
    states = here.ledger.read([tile.key for tile in tiles])
    assert {key for key, state in states.items() if state.dirty} == {killer}
    (letter,) = here.dead_letters()
    assert letter.headers["tile"] == killer
    assert "killed" in letter.explanation


def a_killed_backfill_commits_every_tile_once(here: World, columns: int, rows: int, kills: int) -> None:
    """A backfill of a box of tiles whose runs are killed so often: one commit a tile, and few objects twice."""
    corner = Tile(14, HOME.x, HOME.y)
    last = Tile(14, HOME.x + columns - 1, HOME.y + rows - 1)
    west, north = corner.bounds.west, corner.bounds.north
    east, south = last.bounds.east, last.bounds.south
    # One shape over all of them: every tile has something to commit.
    here.put("plain", shapely.box(west, south, east, north))
    inset = 1e-5
    region = shapely.box(west + inset, south + inset, east - inset, north - inset)
    plan = plan_region(here.stack, region, "the plain", [14])
    assert len(plan.keys) == columns * rows
    manifest = start_backfill(here.stack, plan)

    choice = random.Random(7)
    killed = 0
    for _ in range(200):
        for request in tick(here.stack, here.instance).requests:
            if request.job_name != "build_tiles":
                continue
            size = len(here.ledger.batch(here.batch_of(request)).keys)
            dies_after = choice.randrange(1, size) if killed < kills and size > 1 else None
            killed += launch(here, request, dies_after=dies_after) == -9
        if not here.ledger.counts().dirty_backfill:
            break
    assert killed == kills
    end = verdict(here.stack, manifest.id)
    assert (end.passed, end.progress.done, end.progress.failed) == (True, columns * rows, 0)
    states = here.ledger.read(plan.keys)
    assert {state.revision for state in states.values()} == {1}
    # An object that no commit named was built in vain: at most what the workers of a pool had in hand at each kill.
    objects = sum(1 for _ in here.stack.tiles.list("tiles/"))
    in_vain = objects - columns * rows
    assert 0 <= in_vain <= kills * here.stack.settings.build_workers * 2 * CHUNK_TILES
    tick(here.stack, here.instance)
    assert here.instance.get_materialized_partitions(catalog.TILES) == set(plan.keys)
    print(f"{columns * rows:,} tiles, {kills} kills: each committed once, {in_vain} objects built in vain")


def test_a_backfill_whose_runs_are_killed_commits_every_tile_once(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensor, "CATALOG_AGE_MS", 0)
    monkeypatch.setenv("GEO_ASSETS_BATCH_TILES", "150")
    a_killed_backfill_commits_every_tile_once(here, 20, 20, kills=2)


@pytest.mark.soak
def test_a_backfill_of_20_000_tiles_killed_three_times_commits_every_tile_once(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensor, "CATALOG_AGE_MS", 0)
    a_killed_backfill_commits_every_tile_once(here, 200, 100, kills=3)
