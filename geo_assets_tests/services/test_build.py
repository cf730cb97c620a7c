from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mercantile
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_assets.events import topics
from geo_assets.ports import tile_object
from geo_assets.services import engines
from geo_assets.services.announce import sweep_announcements
from geo_assets.services.build import TileBuilder
from geo_assets.services.dead_letters import scan_topic
from geo_assets.services.garbage import collect_objects
from geo_assets.tiles.tile import Tile
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.world import HERE, World, feature

STEPS = ("take", "read digests", "read features", "put", "commit", "announce")


class Crash(BaseException):
    """A process that is gone: nothing may catch it."""


@pytest.fixture(params=STACKS)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with changes_of(request.param) as changes:
        world = World(tmp_path / "home", **changes)
        yield world
        world.close()


def one_tile(world: World) -> str:
    """Key of a tile that shows the feature, at zoom 14."""
    return next(key for key in sorted(world.published()) if key.startswith("14:"))


def crash_at(step: str, nth: int = 0) -> Any:
    seen = itertools.count()

    def hook(name: str, key: str) -> None:
        if name == step and next(seen) == nth:
            raise Crash(step)

    return hook


def test_an_edit_is_built_committed_and_announced_with_its_hash(world: World) -> None:
    world.edit(feature(1, 1))
    built = world.build_dirty()

    states = world.published()
    assert {r.outcome for r in built} == {"built"}
    assert {r.key for r in built} == set(states)
    assert {(a["hash"], a["revision"]) for a in world.announced()} == {(s.content_hash, 1) for s in states.values()}
    assert all(world.properties(key) for key in states)


def test_a_second_build_encodes_nothing_and_tells_nobody(world: World) -> None:
    world.edit(feature(1, 1))
    keys = [r.key for r in world.build_dirty()]
    told = len(world.announced())

    with TileBuilder(world.stack, "again", inline=True) as builder:
        outcomes = {r.outcome for r in builder.build(keys)}
        encoded = builder.encoded

    assert (outcomes, encoded, len(world.announced())) == ({"skipped"}, 0, told)


def test_a_forced_build_encodes_and_the_same_bytes_are_unchanged(world: World) -> None:
    world.edit(feature(1, 1))
    keys = [r.key for r in world.build_dirty()]

    with TileBuilder(world.stack, "again", inline=True) as builder:
        assert {r.outcome for r in builder.build(keys, force=True)} == {"unchanged"}
    assert {s.revision for s in world.published().values()} == {1}


def test_a_forced_build_of_a_tile_whose_object_is_gone_puts_it_again_as_a_new_revision_that_clients_hear_of(
    world: World,
) -> None:
    world.edit(feature(1, 1))
    keys = [r.key for r in world.build_dirty()]
    gone = one_tile(world)
    before, told = world.published()[gone], len(world.announced())
    assert before.object_name is not None
    world.stack.tiles.delete([tile_object(before.object_name)])

    with TileBuilder(world.stack, "again", inline=True) as builder:
        outcomes = {r.key: r.outcome for r in builder.build(keys, force=True)}

    assert {key for key, outcome in outcomes.items() if outcome != "unchanged"} == {gone}
    after = world.published()[gone]
    assert (after.revision, after.content_hash) == (before.revision + 1, before.content_hash)
    assert world.properties(gone)
    assert len(world.announced()) == told + 1


def test_a_deleted_feature_empties_its_tiles_and_clients_hear_of_it(world: World) -> None:
    world.edit(feature(1, 1))
    keys = {r.key for r in world.build_dirty()}

    world.edit({"type": "Feature", "id": 1, "version": 2, "action": "delete"})
    results = world.build_dirty()

    assert {r.outcome for r in results} == {"emptied"}
    assert world.published() == {}
    assert {a["revision"] for a in world.announced() if a["hash"] is None} == {2}
    assert {r.key for r in results} == keys


def test_a_key_that_names_no_tile_fails_alone(world: World) -> None:
    world.edit(feature(1, 1))
    world.mark_hints()
    good = world.stack.ledger.dirty(1)[0].key

    with TileBuilder(world.stack, "odd", inline=True) as builder:
        results = {r.key: r.outcome for r in builder.build(["14:9", "nonsense", good])}

    assert results == {"14:9": "failed", "nonsense": "failed", good: "built"}


@pytest.mark.parametrize("step", STEPS)
def test_rule_5_a_builder_killed_before_each_step_leaves_nothing_half_said(world: World, step: str) -> None:
    world.edit(feature(1, 1))
    world.build_dirty()
    key = one_tile(world)
    world.edit(feature(1, 2, size=0.0006))

    with pytest.raises(Crash):
        world.build_dirty(step=crash_at(step))

    # Whatever is served now is whole and is what the ledger names.
    for published in world.published():
        assert world.tile(published)
    assert {p["version"] for p in world.properties(key)} <= {1, 2}
    world.build_dirty()
    sweep_announcements(world.stack, min_age_ms=0)
    assert {p["version"] for p in world.properties(key)} == {2}
    last = {(a["z"], a["x"], a["y"]): a["hash"] for a in world.announced()}
    assert set(last.values()) == {s.content_hash for s in world.published().values()}
    assert world.stack.ledger.counts().owed.get("announce", 0) == 0


def test_rule_13_garbage_takes_superseded_objects_and_never_the_current_one(world: World) -> None:
    for version in (1, 2, 3):
        world.edit(feature(1, version, size=0.0004 * version))
        world.build_dirty()
    world.stack.tiles.put("tiles/14/1/1/9-0123456789abcdef.mvt.gz", b"of a tile that the ledger does not know")
    world.stack.tiles.put("tiles/readme.txt", b"of another form")
    states = world.published()

    deleted = collect_objects(world.stack, now_ms=2**50)

    left = {o.name for o in world.stack.tiles.list("tiles/")}
    current = {tile_object(s.object_name) for s in states.values() if s.object_name}
    assert deleted > 0
    assert left == current | {"tiles/14/1/1/9-0123456789abcdef.mvt.gz", "tiles/readme.txt"}


def test_an_orphan_ahead_of_the_ledger_is_not_collected(world: World) -> None:
    world.edit(feature(1, 1))
    with pytest.raises(Crash):
        world.build_dirty(step=crash_at("commit"))
    orphans = {o.name for o in world.stack.tiles.list("tiles/")}
    assert orphans

    assert collect_objects(world.stack, now_ms=2**50) == 0
    world.build_dirty()
    assert {o.name for o in world.stack.tiles.list("tiles/")} >= orphans


def test_an_integrity_fault_is_mended_by_a_new_revision(world: World) -> None:
    world.edit(feature(1, 1))
    world.build_dirty()
    key = one_tile(world)
    state = world.state(key)
    assert state.object_name is not None
    good = world.tile(key)
    world.stack.tiles.put(tile_object(state.object_name), b"flipped")

    world.stack.ledger.clear([key])
    (result,) = world.build_dirty()

    assert (result.outcome, result.revision) == ("built", 2)
    assert world.tile(key) == good


def test_rule_15_a_tile_that_always_fails_becomes_one_dead_letter_and_costs_its_neighbours_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.edit(feature(1, 1))
    world.mark_hints()
    dirty = [s.key for s in world.stack.ledger.dirty(100)]
    culprit = next(key for key in dirty if key.startswith("15:"))
    encode = engines.encode_tiles

    def failing(features: Any, layers: Any) -> Any:
        if any(tile.key == culprit for tile in features.tiles):
            raise RuntimeError("no encoding this tile")
        return encode(features, layers)

    monkeypatch.setattr(engines, "encode_tiles", failing)
    results = world.build_dirty()
    world.mark_hints()

    assert [r.key for r in results if r.outcome == "failed"] == [culprit] * world.settings.max_attempts
    assert set(world.published()) == set(dirty) - {culprit}
    (letter,) = world.letters()
    assert (letter.reason, letter.stage) == ("build_failed", "build")
    assert "no encoding this tile" in (world.state(culprit).error or "")
    assert not world.stack.ledger.dirty(100)

    monkeypatch.undo()
    world.stack.ledger.mark([culprit])
    assert [r.outcome for r in world.build_dirty()] == ["built"]
    assert world.state(culprit).error is None


# -- two builders over one tile --------------------------------------------------------------------------------------
class Paused:
    """A builder in a thread of its own that stops before each step until it is let go on."""

    def __init__(self, world: World, key: str, owner: str) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._world, self._key, self._owner = world, key, owner
        self.finished = False
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def _hook(self, _name: str, _key: str) -> None:
        self._stopped.release()
        self._go.acquire()

    def _run(self) -> None:
        try:
            with TileBuilder(self._world.stack, self._owner, inline=True, step=self._hook) as builder:
                list(builder.build([self._key]))
        except BaseException as fault:
            self.fault = fault
        self.finished = True
        self._stopped.release()

    def step(self) -> None:
        """Let it take one step."""
        if not self.finished:
            self._go.release()
            self._stopped.acquire()

    def finish(self) -> None:
        while not self.finished:
            self.step()
        if self.fault is not None:
            raise self.fault


def shown(world: World, key: str) -> int:
    """Version of the feature as the tile server would show it."""
    return max((p["version"] for p in world.properties(key)), default=0)


def race(world: World, schedule: str) -> None:
    """Two builders and two edits in the order of the schedule; then whatever is left, then the sensor."""
    world.races += 1
    number = world.races
    begin = world.stack.log.extents(topics.TILE_UPDATED)
    # Each schedule has a building of its own, a kilometre from the last one: one world serves many schedules.
    at = (HERE[0] + 0.02 * (number % 100), HERE[1] + 0.02 * (number // 100))
    version = 1
    world.edit(feature(number, version, at=at))
    world.mark_hints()
    # The tile below the middle of the building: its neighbours may see a sliver in their buffer, or nothing.
    middle = mercantile.tile(at[0] + 0.0002, at[1] + 0.0001, 16)
    key = Tile(middle.z, middle.x, middle.y).key
    assert world.state(key).dirty
    builders = {"A": Paused(world, key, f"A{number}"), "B": Paused(world, key, f"B{number}")}
    served = shown(world, key)
    for actor in schedule:
        if actor == "E":
            version += 1
            world.edit(feature(number, version, at=at))
            world.mark_hints()
        else:
            builders[actor].step()
        now = shown(world, key)
        assert now >= served, f"the tile as served went back from {served} to {now} in {schedule}"
        served = now
    for builder in builders.values():
        builder.finish()
        assert shown(world, key) >= served
    world.build_dirty()
    assert shown(world, key) == version, f"an edit is missing after {schedule}"
    assert not world.state(key).dirty
    told = [
        json.loads(record.value or b"")
        for partition, extent in begin.items()
        for record in world.stack.log.read(topics.TILE_UPDATED, partition, extent.end)
        if record.key == key
    ]
    best = max(told, key=lambda a: a["revision"])
    assert (best["revision"], best["hash"]) == (world.state(key).revision, world.state(key).content_hash)


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("arena") / "home"
    home.mkdir()
    # One zoom: an edit touches a tile or two, and a race is over in milliseconds.
    (home / "layers.yaml").write_text("max_zoom: 16\nlayers: [{name: buildings, min_zoom: 16, min_pixels: 0}]\n")
    world = World(home)
    yield world
    world.close()


SCHEDULE = st.permutations(list("AAAAAABBBBBBEE")).map("".join)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(schedule=SCHEDULE)
def test_rule_4_two_builders_racing_never_take_a_tile_back(arena: World, schedule: str) -> None:
    race(arena, schedule)


@pytest.mark.soak
def test_rule_4_two_builders_in_every_interleaving_with_an_edit_between(arena: World) -> None:
    count = 0
    for places in itertools.combinations(range(12), 6):
        order = "".join("A" if i in places else "B" for i in range(12))
        for cut in (2, 5, 8):
            race(arena, order[:cut] + "E" + order[cut:])
            count += 1
    assert count == 924 * 3


def test_rule_14_the_wall_clock_enters_no_work_key_and_no_hint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    later = World(tmp_path / "later")
    stamp = {topics.HEADER_RECEIVED_MS.replace("-", "_"): "1700000000000"}
    try:
        world.edit(feature(1, 1), event_id="one", **stamp)
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now + 10**15)
        later.edit(feature(1, 1), event_id="one", **stamp)
        hints = [sorted((r.key, r.value) for r in scan_topic(one.stack.log, topics.TILES)) for one in (world, later)]
        for one in (world, later):
            one.build_dirty()
        keys = [{s.key: (s.work_key, s.content_hash) for s in one.published().values()} for one in (world, later)]
    finally:
        later.close()

    assert hints[0]
    assert hints[0] == hints[1]
    assert keys[0] == keys[1]
