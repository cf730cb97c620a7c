from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from geo_assets.events import topics
from geo_assets.services.build import TileBuilder, TileResult
from geo_assets.services.lane import health
from geo_assets.services.lane.lane import Lane
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import HERE, World, feature
from resources.event_log.protocol import NewRecord
from resources.feature_store.protocol import FeatureStoreUnavailable


@pytest.fixture(params=STACKS)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with changes_of(request.param) as changes:
        world = World(tmp_path / "home", live_coalesce_ms=0, **changes)
        yield world
        world.close()


class Crash(BaseException):
    """A process that is gone: nothing may catch it."""


@pytest.fixture
def worker(world: World) -> Iterator[Lane]:
    with_lane = Lane(world.stack, "lane:1")
    with_lane.turn(0.0)
    yield with_lane
    with_lane.close()


def work(worker: Lane, *, leaves: int = 0) -> int:
    """Turn until no more than so many tiles are dirty and nothing comes any more; tiles that came to an end."""
    done = quiet = 0
    deadline = time.monotonic() + patient(60)
    while time.monotonic() < deadline:
        ended = worker.turn(0.05)
        done += ended
        left = len(worker.stack.ledger.dirty(1_000, unleased=False))
        quiet = 0 if ended or left > leaves else quiet + 1
        if quiet > 3:
            return done
    raise AssertionError("it does not come to rest")


def dirty(world: World) -> list[str]:
    return [state.key for state in world.stack.ledger.dirty(1_000, unleased=False)]


def test_what_an_edit_touches_is_built_committed_and_announced_without_a_run(world: World, worker: Lane) -> None:
    world.edit(feature(1, 1))
    built = work(worker)

    states = world.published()
    assert built == len(states) > 0
    assert dirty(world) == []
    assert {(a["hash"], a["revision"]) for a in world.announced()} == {(s.content_hash, 1) for s in states.values()}
    assert all(state.lease is None for state in states.values())
    rows = world.stack.ledger.owed("catalog", 100)
    assert {row.key for row in rows} == set(states)
    assert all('"by":"lane"' in row.details for row in rows)


def test_the_same_hints_again_build_nothing(world: World, worker: Lane) -> None:
    world.edit(feature(1, 1))
    work(worker)
    told = len(world.announced())
    keys = sorted(world.published())
    world.stack.log.append([NewRecord(topics.TILES, key, None) for key in keys])

    work(worker)

    assert {state.revision for state in world.published().values()} == {1}
    assert (len(world.announced()), dirty(world)) == (told, [])


def test_hints_that_came_before_the_lane_read_are_built_too(world: World) -> None:
    world.edit(feature(1, 1))
    here = Lane(world.stack, "lane:1")
    try:
        # It reads from the end: what lies before is marked once a record of the partition comes, or by the sensor.
        world.mark_hints()
        world.edit(feature(2, 1, at=(HERE[0] + 0.001, HERE[1])))
        work(here)
    finally:
        here.close()
    assert dirty(world) == []
    assert all(world.properties(key) for key in world.published())


def test_records_between_the_ledger_s_position_and_what_the_lane_reads_are_marked_first(world: World) -> None:
    keys = [f"14:{'0' * 12}{a}{b}" for a in "0123" for b in "0123"]
    world.stack.log.append([NewRecord(topics.TILES, key, None) for key in keys])
    here = Lane(world.stack, "lane:1")
    try:
        here.turn(0.0)  # It joins: nothing is new to it.
        world.stack.log.append([NewRecord(topics.TILES, key, None) for key in keys])
        work(here)
    finally:
        here.close()
    topic_id = world.stack.log.topic_id(topics.TILES)
    ends = {p: extent.end for p, extent in world.stack.log.extents(topics.TILES).items() if extent.end}
    assert {p: o for p, o in world.stack.ledger.positions(topic_id).items() if o} == ends
    assert world.mark_hints() == 0


def test_a_record_that_names_no_tile_is_a_dead_letter_and_costs_no_other(world: World, worker: Lane) -> None:
    world.stack.log.append([NewRecord(topics.TILES, "nowhere", b"{}")])
    world.edit(feature(1, 1))
    work(worker)
    assert dirty(world) == []
    assert [letter.reason for letter in world.letters()] == ["schema"]


def test_a_tile_that_somebody_else_has_is_left_to_them_and_looked_at_again(world: World, worker: Lane) -> None:
    world.edit(feature(1, 1))
    world.mark_hints()
    taken = [state.key for state in world.stack.ledger.dirty(1)]
    world.stack.ledger.take(taken, "a run", 60)

    work(worker, leaves=1)
    assert dirty(world) == taken

    world.stack.ledger.free("a run")
    work(worker)
    assert dirty(world) == []


def test_a_mark_raised_during_a_build_is_answered_by_one_more_build(world: World) -> None:
    edits = iter([feature(1, 2, size=0.0006)])

    def again(step: str, _key: str) -> None:
        if step == "commit" and (edit := next(edits, None)):
            world.edit(edit)

    world.edit(feature(1, 1))
    world.mark_hints()
    here = Lane(world.stack, "lane:1", step=again)
    try:
        work(here)
    finally:
        here.close()
    assert dirty(world) == []
    assert {one["version"] for key in world.published() for one in world.properties(key)} == {2}


# Worker processes of these tests began before another store's credentials were in the environment.
@pytest.mark.parametrize("world", ["embedded"], indirect=True)
def test_heavy_tiles_are_built_in_other_processes_while_light_ones_pass_them(world: World) -> None:
    turn = [2 * math.pi * step / 20_000 for step in range(20_000)]
    ring = [[round(HERE[0] + 0.003 * math.cos(a), 9), round(HERE[1] + 0.003 * math.sin(a), 9)] for a in turn]
    giant = {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}
    here = Lane(world.stack, "lane:1")
    order: list[str] = []
    account = here._account  # pyright: ignore[reportPrivateUsage]

    def noted(results: Iterable[TileResult]) -> None:
        results = list(results)
        order.extend(f"{result.key}@{result.features}" for result in results)
        account(results)

    here._account = noted  # pyright: ignore[reportPrivateUsage]
    try:
        world.edit({**feature("giant", 1), "geometry": giant})
        here.turn(0.5)
        while not here._jobs:  # pyright: ignore[reportPrivateUsage]
            here.turn(0.05)
        held = [ticket.work.task.key for ticket in here._jobs.values()]  # pyright: ignore[reportPrivateUsage]
        far = (HERE[0] + 0.2, HERE[1])
        world.edit(feature("kiosk", 1, at=far))
        work(here)
    finally:
        here.close()
    assert all(int(ticket.partition(":")[0]) for ticket in held)
    small = [n for n, key in enumerate(order) if key.partition("@")[0] not in held]
    large = [n for n, key in enumerate(order) if key.partition("@")[0] in held]
    assert max(small) < max(large), "what is small does not wait for the last giant"
    assert dirty(world) == []
    assert all(world.properties(key) for key in world.published())


@pytest.mark.parametrize("away", ["features", "digests"])
def test_a_store_that_is_away_charges_no_tile_and_what_is_dirty_is_built_when_it_is_back(
    world: World, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Lane(world.stack, "lane:1")
    try:
        world.edit(feature(1, 1))
        world.mark_hints()

        def gone(*_: object, **__: object) -> None:
            raise FeatureStoreUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(type(world.stack.features), away, gone)
            with pytest.raises(FeatureStoreUnavailable):
                work(here)
            here.give_up_turn()
        assert {state.attempts for state in world.stack.ledger.dirty(100, unleased=False)} == {0}
        work(here)
    finally:
        here.close()
    assert dirty(world) == []


@pytest.mark.parametrize("step", ["take", "read digests", "read features", "put", "commit", "announce"])
def test_killed_at_any_step_another_worker_builds_the_rest(world: World, step: str) -> None:
    """Its leases end, its partitions pass on, and nothing is committed twice."""
    killed = False

    def kill(name: str, _key: str) -> None:
        nonlocal killed
        if name == step and not killed:
            killed = True
            raise Crash

    world.edit(feature(1, 1))
    world.mark_hints()
    first = Lane(world.stack, "lane:1", step=kill)
    with pytest.raises(Crash):
        work(first)
    world.stack.ledger.free("lane:1")  # As their end does.
    first._reader.close()  # pyright: ignore[reportPrivateUsage]
    second = Lane(world.stack, "lane:2")
    try:
        work(second)
    finally:
        second.close()
    assert dirty(world) == []
    assert {state.revision for state in world.published().values()} == {1}
    assert all(world.properties(key) for key in world.published())


def test_a_tile_that_fails_is_tried_again_until_it_is_given_up_as_a_dead_letter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geo_assets.services import build_worker

    real = build_worker.rules_before_publishing
    world.edit(feature(1, 1))
    world.mark_hints()
    bad = world.stack.ledger.dirty(1)[0].key
    monkeypatch.setattr(
        build_worker, "rules_before_publishing", lambda tile, *a: ["broken"] if tile.key == bad else real(tile, *a)
    )
    here = Lane(world.stack, "lane:1")
    try:
        work(here)
    finally:
        here.close()
    state = world.stack.ledger.read([bad])[bad]
    assert (state.given_up, state.attempts) == (state.wanted, world.settings.max_attempts)
    assert [letter.headers.get("tile") for letter in world.letters()] == [bad]
    assert dirty(world) == []


def test_two_workers_and_a_run_race_and_every_tile_is_built_for_its_last_edit(world: World) -> None:
    chance = random.Random(7)
    workers = [Lane(world.stack, f"lane:{n}") for n in range(2)]
    try:
        version = 0
        for _ in range(12):
            for number in range(3):
                version += 1
                world.edit(
                    feature(number, version, at=(HERE[0] + number * 0.002, HERE[1]), size=0.0004 + version / 1e6)
                )
            for worker in chance.sample(workers, 2):
                worker.turn(0.0)
            if chance.random() < 0.3:
                world.mark_hints()
                with TileBuilder(world.stack, "a run", inline=True) as builder:
                    list(builder.build([state.key for state in world.stack.ledger.dirty(3)]))
        for _ in range(200):
            for worker in workers:
                worker.turn(0.01)
            if not dirty(world):
                break
        world.mark_hints()
        for worker in workers:
            work(worker)
    finally:
        for worker in workers:
            worker.close()
    assert dirty(world) == []
    rebuilt = {key: state.content_hash for key, state in world.published().items()}
    with TileBuilder(world.stack, "check", inline=True) as builder:
        assert {r.outcome for r in builder.build(list(rebuilt), force=True)} == {"unchanged"}
    seen: dict[str, int] = {}
    for told in world.announced():
        key = f"{told['z']}/{told['x']}/{told['y']}"
        assert told["revision"] > seen.get(key, 0), "a revision never falls, nor comes twice"
        seen[key] = told["revision"]


def test_a_worker_says_how_it_is_and_strikes_itself_out_at_its_end(world: World) -> None:
    here = Lane(world.stack, "lane:1")
    here.turn(0.0)
    beats = health.read_beats(world.stack.ledger.get_value(health.VALUE))
    assert beats["lane:1"].waiting == 0
    assert beats["lane:1"].healthy(beats["lane:1"].at_ms + 1)
    here.close()
    assert world.stack.ledger.get_value(health.VALUE) is None
