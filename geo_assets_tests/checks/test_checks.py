"""The checks over real stores: what passes, what fails and how it is shown, and that they scale."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import AssetCheckSeverity

from geo_assets.checks import audit as audit_module
from geo_assets.checks import coverage, crs, dead_letters, freshness, integrity, topology
from geo_assets.checks.audit import Audit, check_of, result_of, sample
from geo_assets.definitions import defs
from geo_assets.events import topics
from geo_assets.events.models import EnvelopeError
from geo_assets.ports import tile_object
from geo_assets.services.build import TileBuilder
from geo_assets.services.dead_letters import write_dead_letters
from geo_assets.services.hints import hint_dead_letter
from geo_assets.tiles.rules import Fault
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import tile_hash
from geo_assets_tests.dagster_world import World, tiles_around, world
from resources.event_log.protocol import NewRecord
from resources.ledger.protocol import Commit, Failure
from sensors.tile_updates import tick

HOME = Tile(14, 9_327, 4_741)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        yield made


def build(here: World, *tiles: Tile) -> None:
    for tile in tiles:
        here.put_square(tile.key, tile)
    with TileBuilder(here.stack, "test", inline=True) as builder:
        assert [result.outcome for result in builder.build([tile.key for tile in tiles])] == ["built"] * len(tiles)


def put(here: World, tile: Tile, data: bytes) -> None:
    """Replace the object of a published tile."""
    state = here.ledger.read([tile.key])[tile.key]
    assert state.object_name is not None
    here.stack.tiles.put(tile_object(state.object_name), data)


def test_all_checks_of_a_sound_map_pass_in_the_audit_job(here: World) -> None:
    build(here, *tiles_around(HOME, 2))
    result = defs.resolve_job_def("audit").execute_in_process(instance=here.instance)
    evaluations = result.get_asset_check_evaluations()
    assert {evaluation.check_name for evaluation in evaluations} == {
        "topology", "crs", "coverage", "integrity", "freshness", "skip_rate", "dead_letter_rate",
        "feature_topology", "feature_crs", "source_silence", "log_lag", "half_done",
        "delivery", "routing_lag", "trigger_dead_letter_rate",
    }  # fmt: skip
    assert [evaluation.check_name for evaluation in evaluations if not evaluation.passed] == []


def test_a_map_without_a_tile_passes(here: World) -> None:
    for module in (topology, crs, coverage, integrity, freshness, dead_letters):
        assert module.audit(here.stack).passed


def test_a_flipped_object_fails_integrity_and_is_built_again_as_a_new_revision(here: World) -> None:
    first, second = tiles_around(HOME, 2)
    build(here, first, second)
    put(here, first, gzip.compress(b"other bytes", mtime=0))

    found = integrity.audit(here.stack)

    assert not found.passed
    assert [fault.subject for fault in found.faults] == [first.path]
    (request,) = tick(here.stack, here.instance).requests
    assert here.ledger.batch(here.batch_of(request)).keys == (first.key,)
    with TileBuilder(here.stack, here.batch_of(request), inline=True) as builder:
        assert [result.outcome for result in builder.build([first.key])] == ["built"]
    assert here.ledger.read([first.key])[first.key].revision == 2
    assert integrity.audit(here.stack).passed


@pytest.mark.parametrize("damage", [None, b"not gzip", gzip.compress(b"cut off", mtime=0)[:10]])
def test_a_missing_or_unreadable_object_fails_integrity(here: World, damage: bytes | None) -> None:
    build(here, HOME)
    state = here.ledger.read([HOME.key])[HOME.key]
    if damage is None:
        here.stack.tiles.delete([tile_object(state.object_name or "")])
    else:
        put(here, HOME, damage)
    assert not integrity.audit(here.stack).passed
    assert here.ledger.read([HOME.key])[HOME.key].dirty
    # What integrity sees to, the audits of shapes leave alone.
    assert topology.audit(here.stack).passed


def test_a_tile_committed_while_the_audit_read_is_no_fault(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    build(here, HOME)
    get = here.stack.tiles.get

    def overtaken(name: str) -> bytes | None:
        here.stack.tiles.delete([name])
        state = here.ledger.read([HOME.key])[HOME.key]
        here.ledger.commit([Commit(HOME.key, state.revision, state.wanted, "k2", "ef" * 32, 9, 0, "built")])
        return get(name)

    monkeypatch.setattr(here.stack.tiles, "get", overtaken)
    assert integrity.audit(here.stack).passed
    assert not here.ledger.read([HOME.key])[HOME.key].dirty


def test_bytes_that_are_no_tile_fail_topology_and_crs_with_a_row_that_links_to_the_map(here: World) -> None:
    build(here, HOME)
    data = b"\x1a\xff"
    state = here.ledger.read([HOME.key])[HOME.key]
    here.ledger.commit([Commit(HOME.key, state.revision, state.wanted, "k", tile_hash(data), len(data), 0, "built")])
    put(here, HOME, gzip.compress(data, mtime=0))
    for module in (topology, crs):
        found = module.audit(here.stack)
        assert not found.passed
        shown = result_of(found, "http://map")
        row = (
            shown.metadata["failing"].value.records[0].data
            if hasattr(shown.metadata["failing"], "value")
            else shown.metadata["failing"].records[0].data
        )
        assert row["subject"] == HOME.path
        assert row["map"].startswith("http://map/#14/")


def test_a_probe_that_proj_fails_fails_the_crs_check(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise crs.ProbeFailed("EPSG:3857 is 12 m off")

    monkeypatch.setattr(crs, "probe", wrong)
    found = crs.audit(here.stack)
    assert not found.passed
    assert "12 m off" in found.summary


def test_coverage_names_the_manifest_and_the_tiles_that_were_given_up(here: World) -> None:
    tiles = tiles_around(HOME, 4)
    here.ledger.write_manifest("m", "four tiles", "backfill", [tile.key for tile in tiles])
    here.ledger.mark_manifest("m")
    waiting = coverage.audit(here.stack)
    assert waiting.passed
    assert waiting.numbers["waiting"] == 4
    for tile in tiles[1:]:
        here.put_square(tile.key, tile)
    with TileBuilder(here.stack, "test", inline=True) as builder:
        list(builder.build([tile.key for tile in tiles[1:]]))
    wanted = here.ledger.read([tiles[0].key])[tiles[0].key].wanted
    here.ledger.fail([Failure(tiles[0].key, wanted, "size")], max_attempts=1)

    found = coverage.audit(here.stack)

    assert not found.passed
    assert [fault.subject for fault in found.faults] == ["m", tiles[0].path]
    assert found.numbers["lowest"] == 0.75


def test_the_dead_letter_rate_counts_a_record_once_and_wakes_nobody_for_a_handful(here: World) -> None:
    here.stack.log.append([NewRecord(topics.RAW, "demo:1", b"{}") for _ in range(50)])
    assert dead_letters.audit(here.stack).passed
    bad = here.stack.log.read(topics.RAW, 0, 0, max_records=1)[0]
    letter = hint_dead_letter(bad, EnvelopeError("key", "no"), 0)
    write_dead_letters(here.stack, [letter, letter])
    found = dead_letters.audit(here.stack)
    assert found.numbers["dead_letters"] == 1


def test_the_dead_letter_rate_over_its_limit_fails_and_says_how_many(here: World) -> None:
    here.hint(*(tile.key for tile in tiles_around(HOME, 150)), "x", "y")
    tick(here.stack, here.instance)
    found = dead_letters.audit(here.stack)
    assert not found.passed
    assert found.severity is AssetCheckSeverity.ERROR
    assert found.summary.startswith("tiles hinted at: 2 of 152")
    assert found.numbers["reasons"] == "schema 2"


def test_only_the_records_of_the_window_count(here: World) -> None:
    log = here.stack.log
    stamps = [1_000, 2_000, 3_000, 4_000]
    log.append([NewRecord(topics.RAW, "a", b"", timestamp_ms=stamp) for stamp in stamps])
    counts = [dead_letters.count_since(log, topics.RAW, since) for since in (0, 1_000, 1_001, 4_000, 4_001)]
    assert counts == [4, 4, 3, 1, 0]


def test_tiles_that_wait_too_long_fail_freshness(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here.ledger.mark([HOME.key])
    assert freshness.audit(here.stack).passed
    later = freshness.time.time_ns() + 6 * 24 * 3_600 * 10**9
    monkeypatch.setattr(freshness.time, "time_ns", lambda: later)
    assert not freshness.audit(here.stack).passed


def test_an_unexpected_error_is_a_failed_check_and_no_failed_run(here: World) -> None:
    def breaks(_: object) -> Audit:
        raise ZeroDivisionError("nobody thought of it")

    check = check_of("broken", "breaks", breaks)
    from dagster import Definitions

    from geo_assets.assets.stack_resource import StackResource
    from geo_assets.assets.tiles import tiles

    local = Definitions(assets=[tiles], asset_checks=[check], resources={"stack": StackResource()})
    job = local.resolve_implicit_global_asset_job_def().get_subset(
        asset_check_selection=set(check.check_keys), asset_selection=set()
    )
    result = job.execute_in_process(instance=here.instance)
    assert result.success
    (evaluation,) = result.get_asset_check_evaluations()
    assert not evaluation.passed
    assert "nobody thought of it" in (evaluation.description or "")


def test_a_sample_is_the_newest_and_in_turn_every_other_tile(here: World) -> None:
    tiles = tiles_around(HOME, 25)
    for step, tile in enumerate(tiles):
        here.ledger.commit([Commit(tile.key, 0, 0, "k", f"{step:064x}", 5, 0, "built")])
    assert len(sample(here.ledger, "a", 25)) == 25
    newest = {tile.key for tile in tiles[-2:]}
    seen: set[str] = set()
    rounds = 0
    while len(seen) < 25:
        rounds += 1
        chosen = {state.key for state in sample(here.ledger, "b", 6)}
        assert len(chosen) == 6
        assert newest <= chosen
        seen |= chosen
        assert rounds < 15


def test_a_table_is_bounded_and_the_number_of_faults_stands_beside_it() -> None:
    faults = [Fault("topology", f"14/{index}/0", "bad", index, 0) for index in range(500)]
    shown = result_of(Audit(900, faults, "many", passed=False), "http://map")
    table = shown.metadata["failing"]
    records = table.value.records if hasattr(table, "value") else table.records
    assert len(records) == audit_module.SHOWN
    faults_shown = shown.metadata["faults"]
    assert getattr(faults_shown, "value", faults_shown) == 500
