"""Tiles from what is kept of their features: those of full builds, over the real stores, and how little is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely

from geo_assets.services import build_worker, encoding
from geo_assets.services.build import TileBuilder
from geo_assets.services.build_worker import BuildTask, Built, boxes_of, build_in
from geo_assets.services.encoding import KEPT_FROM, Made, again, anew
from geo_assets.services.recipe import current_recipe
from geo_assets.stack import Stack
from geo_assets.tiles import workkey
from geo_assets.tiles.encode.assembly import EncodedFeatures
from geo_assets.tiles.encode.cache import EncodedCache
from geo_assets.tiles.tile import Tile
from geo_assets_tests.postgres_rooms import postgres_room
from geo_assets_tests.resources.contract_feature_store import delete, no_plan, upsert
from geo_assets_tests.tiles.encoding import lon_lat
from geo_assets_tests.world import World, feature, settings_for
from resources.feature_store.postgis_schema import COMPONENT, MIGRATIONS
from resources.feature_store.protocol import Edit, Feature
from resources.migrations import migrate

TILE = Tile(14, 9326, 4738)
DENSE = 120
"""Features of a tile that is worth keeping."""


@pytest.fixture(params=["geopackage", "postgis"])
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    if request.param == "geopackage":
        with Stack(settings_for(tmp_path / "home")) as stack:
            yield stack
        return
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        changes = {"feature_store_url": room.url, "postgres_schema": room.schema, "postgres_pool": 2}
        with Stack(settings_for(tmp_path / "home", **changes)) as stack:
            yield stack


def stored(
    number: int | str,
    version: int = 1,
    *,
    at: tuple[float, float] = (100.0, 100.0),
    shape: str = "house",
    layer: str = "buildings",
    zooms: tuple[int, int] = (10, 16),
    **properties: Any,
) -> Feature:
    """A feature as ingest stores it, at a place in the units of `TILE`."""
    x, y = at
    shapes = {
        "house": shapely.box(x, y, x + 30, y + 20),
        "point": shapely.Point(x, y),
        "line": shapely.LineString([(x, y), (x + 300, y + 10), (x + 600, y - 200)]),
        "sliver": shapely.box(x, y, x + 30, y + 0.01),
        "both": shapely.GeometryCollection([shapely.Point(x, y), shapely.box(x, y, x + 9, y + 9)]),
    }
    geometry = lon_lat(TILE, shapes[shape])
    wkb, text = shapely.to_wkb(geometry), json.dumps(properties, sort_keys=True)
    feature_id = json.dumps(number)
    content = workkey.content_hash(layer, wkb, text)
    return Feature(
        source="city", feature_id=feature_id, layer=layer, version=version, geometry=wkb, bbox=tuple(geometry.bounds),
        properties=text, content_hash=content, digest=workkey.feature_digest("city", layer, feature_id, content),
        min_zoom=zooms[0], max_zoom=zooms[1], vertex_count=int(shapely.get_num_coordinates(geometry)),
        event_time_ms=1_000 + version,
    )  # fmt: skip


def apply(stack: Stack, *edits: Edit) -> None:
    assert {one.outcome for one in stack.features.apply(edits, no_plan, now_ms=5)} <= {"applied"}


def fill(stack: Stack, count: int = DENSE) -> None:
    """A dense tile."""
    apply(
        stack,
        *(
            upsert(
                stored(
                    number, at=(31.0 * (number % 60), 70.0 * (number // 60)), height=number / 7, kind="abc"[number % 3]
                )
            )
            for number in range(count)
        ),
    )


def both(stack: Stack, tiles: Sequence[Tile], cache: EncodedCache, **more: Any) -> list[Made]:
    """The tiles from what is kept, after they were held against full builds."""
    boxes = boxes_of([tile.key for tile in tiles], stack.layers)
    made = again(stack, boxes, tiles, cache, **more)
    assert made == anew(stack, boxes, tiles)
    return made


def kept(stack: Stack, cache: EncodedCache, tile: Tile = TILE) -> EncodedFeatures:
    found = cache.get(current_recipe(stack.layers), tile.key)
    assert found is not None
    return found


class Reads:
    """What is asked of a feature store, in order; `before` is called before a question is passed on."""

    def __init__(self, stack: Stack, before: Callable[[str], None] = lambda _: None) -> None:
        self.asked: list[tuple[str, int]] = []
        self._store, self._before = stack.features, before
        stack.__dict__["features"] = self

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name not in ("digests", "features", "rows"):
            return real

        def question(asked: Sequence[Any]) -> Any:
            self.asked.append((name, len(asked)))
            self._before(name)
            return real(asked)

        return question


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_bytes", [100_000_000, 60_000])
def test_rule_6_after_any_edits_tiles_from_what_is_kept_are_those_of_full_builds(
    stack: Stack, seed: int, max_bytes: int
) -> None:
    pick = random.Random(seed)
    fill(stack)
    cache = EncodedCache(max_bytes)
    tiles = [TILE, Tile(14, TILE.x + 1, TILE.y), TILE.ancestor(12), Tile(16, TILE.x * 4, TILE.y * 4)]
    versions = dict.fromkeys(range(DENSE), 1)
    values = [1, 1.0, True, "1", None, -0.0, 0.0, [1, {"a": 2}], 1 << 63, "é", ""]

    def some(number: int | str) -> Edit:
        versions[number] = versions.get(number, 0) + 1
        if pick.random() < 0.2:
            return delete(json.dumps(number), versions[number])
        return upsert(
            stored(
                number,
                versions[number],
                at=(pick.uniform(-300, 8_000), pick.uniform(-300, 4_400)),
                shape=pick.choice(["house", "house", "point", "line", "sliver", "both"]),
                layer=pick.choice(["buildings", "buildings", "pois", "unknown"]),
                zooms=pick.choice([(10, 16), (10, 16), (14, 14), (1, 0)]),
                **{pick.choice("kxy"): pick.choice(values) for _ in range(pick.randrange(4))},
            )
        )

    for _ in range(10):
        apply(stack, *(some(pick.choice([pick.randrange(DENSE + 5), f"w{pick.randrange(5)}"])) for _ in range(3)))
        both(stack, pick.sample(tiles, pick.randrange(1, 5)), cache)
        assert cache.nbytes <= max_bytes
    stack.features.set_zooms({("city", str(number)): (16, 16) for number in range(0, DENSE, 9)})
    both(stack, tiles, cache)


def test_of_a_dense_tile_only_the_feature_that_changed_is_read(stack: Stack) -> None:
    fill(stack)
    cache = EncodedCache(10_000_000)
    reads = Reads(stack)
    again(stack, boxes_of([TILE.key], stack.layers), [TILE], cache)
    assert reads.asked == [("features", 1)]
    apply(stack, upsert(stored(7, 2, height=3.25, name="changed")), delete("8", 2), upsert(stored(5_000)))
    reads.asked.clear()
    again(stack, boxes_of([TILE.key], stack.layers), [TILE], cache)
    assert reads.asked == [("digests", 1), ("rows", 2)]
    both(stack, [TILE], cache)
    # Nothing changed: nothing is read.
    reads.asked.clear()
    again(stack, boxes_of([TILE.key], stack.layers), [TILE], cache)
    assert reads.asked == [("digests", 1)]


def test_a_tile_that_shows_few_features_or_mostly_others_is_read_as_a_whole(stack: Stack) -> None:
    cache = EncodedCache(10_000_000)
    fill(stack, KEPT_FROM - 1)
    both(stack, [TILE], cache)
    assert len(cache) == 0
    apply(stack, *(upsert(stored(number, at=(9.0 * (number - 1_000), 900.0))) for number in range(1_000, 1_100)))
    both(stack, [TILE, Tile(14, TILE.x + 3, TILE.y)], cache)
    assert len(cache) == 1
    apply(stack, *(upsert(stored(number, 2, at=(9.0 * (number - 1_000), 990.0))) for number in range(1_000, 1_100)))
    reads = Reads(stack)
    again(stack, boxes_of([TILE.key], stack.layers), [TILE], cache)
    assert reads.asked == [("digests", 1), ("features", 1)]
    both(stack, [TILE], cache)


@pytest.mark.parametrize("what", ["changed", "deleted", "another"])
def test_a_feature_that_changes_between_the_two_reads_never_makes_a_work_key_lie(stack: Stack, what: str) -> None:
    fill(stack)
    cache = EncodedCache(10_000_000)
    both(stack, [TILE], cache)
    apply(stack, upsert(stored(7, 2, name="first")))
    then = {
        "changed": upsert(stored(7, 3, name="second")),
        "deleted": delete("7", 3),
        "another": upsert(stored(9, 3, name="beside it")),
    }[what]

    def edit_before_rows(question: str) -> None:
        if question == "rows":
            apply(stack, then)

    boxes = boxes_of([TILE.key], stack.layers)
    at_digests = stack.features.digests(boxes)
    (before,) = anew(stack, boxes, [TILE])
    Reads(stack, edit_before_rows)
    (made,) = again(stack, boxes, [TILE], cache)
    del stack.__dict__["features"]
    (after,) = anew(stack, boxes, [TILE])
    # Either the state before that edit or the one after it, digest and bytes of one and the same.
    assert made == (before if what == "another" else after)
    assert (made.source_digest == workkey.source_digests(1, at_digests.pair_tile, at_digests.pair_digest)[0]) == (
        what == "another"
    )
    both(stack, [TILE], cache)


def test_a_tile_is_made_of_what_the_caller_saw_although_the_store_went_on(stack: Stack) -> None:
    fill(stack)
    cache = EncodedCache(10_000_000)
    both(stack, [TILE], cache)
    apply(stack, upsert(stored(7, 2, name="seen")))
    boxes = boxes_of([TILE.key], stack.layers)
    seen = encoding.shown_of(stack.features.digests(boxes))
    (before,) = anew(stack, boxes, [TILE])
    apply(stack, upsert(stored(8, 2, name="not seen")))
    assert again(stack, boxes, [TILE], cache, shown={0: seen[0]}) == [before]
    both(stack, [TILE], cache)


def test_what_was_matched_counts_only_while_that_is_what_is_kept(stack: Stack) -> None:
    fill(stack)
    cache = EncodedCache(10_000_000)
    both(stack, [TILE], cache)
    boxes = boxes_of([TILE.key], stack.layers)
    early = kept(stack, cache)
    for number in (7, 8):
        apply(stack, upsert(stored(number, 2, name="new")))
        (shown,) = encoding.shown_of(stack.features.digests(boxes))
        found = encoding.match(stack, TILE.key, shown, cache)
        assert found is not None
        assert len(found.missing) == 1
        if number == 8:
            # Another build came in between: what is kept is something else now.
            cache.put(current_recipe(stack.layers), TILE.key, early)
        assert again(stack, boxes, [TILE], cache, shown={0: shown}, matches={0: found}) == anew(stack, boxes, [TILE])


def test_a_tile_that_is_forced_is_read_and_encoded_anew_which_heals_what_is_kept(stack: Stack) -> None:
    fill(stack)
    cache = EncodedCache(10_000_000)
    (good,) = both(stack, [TILE], cache)
    fine = kept(stack, cache)
    broken = fine.changed(np.arange(len(fine)) != 3, EncodedFeatures.none())
    lies = broken.changed(np.ones(len(broken), np.bool_), EncodedFeatures.none())
    object.__setattr__(lies, "high", fine.high)
    object.__setattr__(lies, "low", fine.low)
    cache.put(current_recipe(stack.layers), TILE.key, lies)
    broken_one, healed = (build_in(stack, [task(fresh=fresh)], cache=cache)[0] for fresh in (False, True))
    assert broken_one.content_hash != healed.content_hash == workkey.tile_hash(good.encoded.data)
    cache.put(current_recipe(stack.layers), TILE.key, lies)
    boxes = boxes_of([TILE.key], stack.layers)
    assert again(stack, boxes, [TILE], cache)[0].encoded != good.encoded
    assert again(stack, boxes, [TILE], cache, fresh={0}) == [good]
    assert again(stack, boxes, [TILE], cache) == [good]


def task(tile: Tile = TILE, *, fresh: bool = False) -> BuildTask:
    return BuildTask(tile.key, 0, None, None, True, 5, fresh=fresh)


def comparable(built: Built) -> tuple[Any, ...]:
    return built.work_key, built.content_hash, built.bytes, built.features, built.vertices, built.data_time_ms


@pytest.mark.parametrize("alone", [False, True])
def test_a_fault_in_what_is_kept_costs_no_tile(stack: Stack, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    fill(stack)
    cache = EncodedCache(10_000_000)
    (first,) = build_in(stack, [task()], cache=cache)
    assert (first.error, len(cache)) == (None, 1)

    def fails(*_: Any) -> Any:
        raise RuntimeError("a fault in putting tiles together")

    apply(stack, upsert(stored(7, 2, name="new")))
    with monkeypatch.context() as patch:
        patch.setattr(EncodedFeatures, "changed", fails)
        others = [] if alone else [task(Tile(14, TILE.x + 9, TILE.y))]
        built = build_in(stack, [task(), *others], cache=cache)
    assert {one.error for one in built} == {None}
    assert len(cache) == 0
    assert comparable(built[0]) == comparable(build_in(stack, [task()])[0])
    assert built[0].content_hash != first.content_hash


def test_a_worker_process_keeps_features_between_its_tasks(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(stack)
    monkeypatch.setattr(build_worker, "_stack", None)
    monkeypatch.setattr(build_worker, "_cache", None)
    build_worker.start(stack.settings, False, 10_000_000)
    own: Any = build_worker._stack
    reads = Reads(own)
    first = build_worker.build([task()])
    apply(stack, upsert(stored(7, 2, name="new")))
    second = build_worker.build_unless_away([task()])
    assert reads.asked == [("features", 1), ("digests", 1), ("rows", 1)]
    assert comparable(second[0]) == comparable(build_in(stack, [task()])[0])
    assert first[0].work_key != second[0].work_key
    build_worker.start(stack.settings, False)
    assert build_worker._cache is None
    own.close()


def test_with_no_room_and_with_another_engine_nothing_is_kept(tmp_path: Path) -> None:
    with Stack(settings_for(tmp_path / "home")) as stack:
        fill(stack)
        cache = EncodedCache(0)
        reads = Reads(stack)
        for _ in range(2):
            build_in(stack, [task()], cache=cache)
        assert [name for name, _ in reads.asked] == ["features", "features"]
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        changes = {"feature_store_url": room.url, "postgres_schema": room.schema, "engine": "st_asmvt"}
        with Stack(settings_for(tmp_path / "other", **changes)) as stack:
            fill(stack)
            cache = EncodedCache(10_000_000)
            assert [one.error for one in build_in(stack, [task()], cache=cache)] == [None]
            assert len(cache) == 0


def test_what_a_builder_publishes_from_what_it_keeps_is_what_one_publishes_that_keeps_nothing(tmp_path: Path) -> None:
    worlds = [World(tmp_path / name) for name in ("keeps", "keeps-not")]
    cache = EncodedCache(10_000_000)
    pick = random.Random(5)
    try:
        for turn in range(5):
            edits = [
                feature(
                    number,
                    turn + 1,
                    at=(24.944 + 0.0005 * (number % 12) + 0.0001 * turn, 60.169 + 0.0005 * (number // 12)),
                    name=pick.choice("abcd"),
                    height=turn if turn % 2 else float(turn),
                )
                for number in (range(60) if turn == 0 else pick.sample(range(60), 3))
            ]
            for world, more in zip(worlds, ({"cache": cache}, {}), strict=True):
                world.edit({"type": "FeatureCollection", "features": edits}, event_id=str(turn), received_ms=str(turn))
                world.build_dirty(**more)
            published = [
                {key: (state.revision, state.work_key, state.content_hash) for key, state in world.published().items()}
                for world in worlds
            ]
            assert published[0] == published[1]
        assert len(cache) > 0
        # A forced build says the same of what is there.
        with TileBuilder(worlds[0].stack, "again", inline=True, cache=cache) as builder:
            keys = sorted(published[0])
            assert {result.outcome for result in builder.build(keys, force=True)} == {"unchanged"}
    finally:
        for world in worlds:
            world.close()
