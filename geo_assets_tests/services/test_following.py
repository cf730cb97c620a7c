"""What tiles show, followed through the log of changes: always what the digests say, however the log and history go."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_assets.services import following
from geo_assets.services.build import TileBuilder
from geo_assets.services.build_worker import boxes_of
from geo_assets.services.encoding import Shown, shown_of
from geo_assets.services.following import Follower
from geo_assets.stack import Stack
from geo_assets.tiles import workkey
from geo_assets.tiles.encode.cache import EncodedCache
from geo_assets.tiles.tile import Tile
from geo_assets_tests.resources.contract_feature_store import delete, upsert
from geo_assets_tests.services.test_encoding import DENSE, TILE, Reads, apply, fill, stack, stored
from geo_assets_tests.world import World, feature, settings_for
from resources.feature_store.protocol import Edit

__all__ = ["stack"]

TILES = [TILE, Tile(14, TILE.x + 1, TILE.y), TILE.ancestor(12), Tile(16, TILE.x * 4, TILE.y * 4)]
KEYS = [tile.key for tile in TILES]


@pytest.fixture(autouse=True)
def every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of any number of features are followed."""
    monkeypatch.setattr(following, "FOLLOWED_FROM", 0)


def told(shown: Shown) -> tuple[Any, ...]:
    columns = (shown.number, map(bytes, shown.digest), shown.vertices_each, shown.time_each)
    return sorted(zip(*columns, strict=True)), shown.vertices, shown.data_time_ms


def asked(stack: Stack, keys: list[str]) -> list[Any]:
    return [told(shown) for shown in shown_of(stack.features.digests(boxes_of(keys, stack.layers)))]


def same(stack: Stack, follower: Follower, keys: list[str]) -> None:
    """What is followed is what the store says."""
    assert [told(shown) for shown in follower.shown(keys)] == asked(stack, keys)


class Edits:
    """Random edits of the features of a dense tile and around it."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self._versions = dict.fromkeys(range(DENSE), 1)

    def one(self) -> Edit:
        pick = self.pick
        number = pick.randrange(DENSE + 20)
        self._versions[number] = self._versions.get(number, 0) + 1
        if pick.random() < 0.2:
            return delete(str(number), self._versions[number])
        at = pick.uniform(-300, 8_000), pick.uniform(-300, 4_400)
        zooms = pick.choice([(10, 16), (10, 16), (14, 14), (1, 0)])
        return upsert(stored(number, self._versions[number], at=at, zooms=zooms, name=pick.choice("abc")))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("remembered", "few"), [(1_000, (4, 64)), (1_000, (0, 1)), (12, (4, 64))])
def test_what_is_followed_is_what_the_store_says_after_any_edits(
    stack: Stack, seed: int, remembered: int, few: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "CHANGES_REMEMBERED", remembered)
    monkeypatch.setattr(following, "FEW_CHANGES", few[0])
    monkeypatch.setattr(following, "FEW_MOVES", few[1])
    fill(stack)
    edits, follower = Edits(seed), Follower(stack, 1_000_000)
    for turn in range(25):
        apply(stack, *(edits.one() for _ in range(edits.pick.choice([0, 1, 3, 9]))))
        if turn % 7 == 6:
            limits = {("city", str(edits.pick.randrange(DENSE))): edits.pick.choice([(10, 16), (15, 16), (1, 0)])}
            stack.features.set_zooms(limits)
        same(stack, follower, edits.pick.sample(KEYS, edits.pick.randrange(1, 5)))


def test_a_tile_that_is_looked_at_again_costs_the_log_alone(stack: Stack) -> None:
    fill(stack)
    follower, reads = Follower(stack, 1_000_000), Reads(stack)
    follower.shown(KEYS)
    apply(stack, upsert(stored(7, 2, at=(100, 100), name="new")))
    for _ in range(3):
        follower.shown(KEYS)
    assert reads.asked == [("digests", 4)]
    follower.shown(KEYS, anew=KEYS[:1])
    assert reads.asked == [("digests", 4), ("digests", 1)]


def test_small_tiles_are_asked_for(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FOLLOWED_FROM", DENSE)
    fill(stack)
    apply(stack, upsert(stored(1_000, at=(5_000, 100))))
    follower = Follower(stack, 1_000_000)
    same(stack, follower, KEYS[:2])
    assert len(follower) == 1


def test_too_many_changes_at_once_are_not_followed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(stack)
    follower = Follower(stack, 1_000_000)
    same(stack, follower, KEYS)
    monkeypatch.setattr(following, "CHANGES_REMEMBERED", 5)
    apply(stack, *(upsert(stored(number, 2, at=(90, 90))) for number in range(6)))
    reads = Reads(stack)
    same(stack, follower, KEYS)
    assert ("digests", 4) in reads.asked


def forgetful(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Follower:
    """One that remembers few changes, and follows all tiles."""
    monkeypatch.setattr(following, "CHANGES_REMEMBERED", 5)
    fill(stack)
    follower = Follower(stack, 1_000_000)
    same(stack, follower, KEYS)
    return follower


def test_a_tile_that_nobody_asked_for_while_the_log_went_on_is_asked_for_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = forgetful(stack, monkeypatch)
    for version in range(2, 6):
        apply(stack, *(upsert(stored(number, version, at=(90, 90))) for number in range(4 * version, 4 * version + 4)))
        same(stack, follower, KEYS[:1])
    reads = Reads(stack)
    follower.shown(KEYS)
    assert reads.asked == [("digests", 3)]
    same(stack, follower, KEYS)


def test_a_feature_that_changes_over_and_over_counts_once_among_what_is_remembered(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = forgetful(stack, monkeypatch)
    for version in range(2, 30):
        apply(stack, upsert(stored(version % 2, version, at=(90 + version, 90))))
        follower.shown(KEYS[:1])
    reads = Reads(stack)
    follower.shown(KEYS)
    assert reads.asked == []
    same(stack, follower, KEYS)


def test_a_tile_that_no_change_concerns_is_the_same_as_before(stack: Stack) -> None:
    fill(stack)
    follower = Follower(stack, 1_000_000)
    before = follower.shown(KEYS[:1])[0]
    apply(stack, upsert(stored(1_000, at=(50_000, 50_000))))
    assert follower.shown(KEYS[:1])[0] is before
    apply(stack, upsert(stored(7, 2, at=(100, 100), name="new")))
    after = follower.shown(KEYS[:1])[0]
    assert after is not before
    assert after.source_digest == workkey.source_digests(1, np.zeros(len(after.number), np.int64), after.digest)[0]


def test_after_so_many_times_a_tile_is_asked_for_again(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FOLLOWED_TIMES", 3)
    fill(stack)
    follower, reads = Follower(stack, 1_000_000), Reads(stack)
    for _ in range(9):
        follower.shown(KEYS[:1])
    assert reads.asked == [("digests", 1)] * 3


def test_rule_9_what_is_remembered_of_tiles_is_bounded(stack: Stack) -> None:
    fill(stack)
    follower = Follower(stack, 15_000)
    for _ in range(3):
        for key in KEYS:
            same(stack, follower, [key])
            assert follower.nbytes <= 15_000
    assert 0 < len(follower) < len(KEYS)
    assert Follower(stack, 0).shown(KEYS)[0].vertices > 0


def test_changes_that_come_while_the_digests_are_read_are_in_it_sooner_or_later(stack: Stack) -> None:
    fill(stack)
    follower, other, stop = Follower(stack, 1_000_000), Stack(stack.settings), threading.Event()

    def write() -> None:
        edits = Edits(3)
        for _ in range(60):
            apply(other, edits.one(), edits.one())
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not stop.is_set():
        follower.shown(KEYS)
        follower.shown(KEYS, anew=KEYS[:2])
    thread.join()
    same(stack, follower, KEYS)
    other.close()


@pytest.mark.parametrize("looked_between", [False, True])
def test_a_restored_backup_is_another_history_and_nothing_is_taken_over(tmp_path: Path, looked_between: bool) -> None:
    home = tmp_path / "home"
    with Stack(settings_for(home)) as stack:
        fill(stack)
        follower = Follower(stack, 1_000_000)
        same(stack, follower, KEYS)
        stack.features.close()
        del stack.__dict__["features"]
        shutil.copy(home / "features.gpkg", tmp_path / "backup")
        apply(stack, *(upsert(stored(number, 2, at=(90, 90), name="lost")) for number in range(8)))
        if looked_between:
            same(stack, follower, KEYS)
        stack.features.close()
        del stack.__dict__["features"]
        for name in ("features.gpkg-wal", "features.gpkg-shm"):
            (home / name).unlink(missing_ok=True)
        shutil.copy(tmp_path / "backup", home / "features.gpkg")
        # The numbers of the lost changes are given again, to others.
        apply(stack, *(upsert(stored(number, 2, at=(190, 90), name="new")) for number in range(50, 59)))
        same(stack, follower, KEYS)


def test_what_a_tile_was_told_by_a_lost_history_is_told_anew(tmp_path: Path) -> None:
    home = tmp_path / "home"

    def lose(question: str) -> None:
        if question == "digests":
            apply(stack, *(upsert(stored(number, 2, at=(90, 90), name="lost")) for number in range(8)))

    with Stack(settings_for(home)) as stack:
        fill(stack)
        follower = Follower(stack, 1_000_000)
        follower.shown(KEYS[3:])
        stack.features.close()
        del stack.__dict__["features"]
        shutil.copy(home / "features.gpkg", tmp_path / "backup")
        # The log is read before these edits, the digests after them.
        Reads(stack, lose)
        follower.shown(KEYS[:1])
        stack.features.close()
        del stack.__dict__["features"]
        for name in ("features.gpkg-wal", "features.gpkg-shm"):
            (home / name).unlink(missing_ok=True)
        shutil.copy(tmp_path / "backup", home / "features.gpkg")
        apply(stack, *(upsert(stored(number, 2, at=(190, 90), name="new")) for number in range(5)))
        same(stack, follower, KEYS)


def test_a_store_without_any_change_and_an_older_file_are_asked(tmp_path: Path) -> None:
    import sqlite3

    with Stack(settings_for(tmp_path / "home")) as stack:
        follower = Follower(stack, 1_000_000)
        same(stack, follower, KEYS)
        same(stack, follower, KEYS)
        fill(stack)
        same(stack, follower, KEYS)
    with sqlite3.connect(tmp_path / "home" / "features.gpkg") as db:
        db.execute("DROP TABLE ga_change")
        db.execute("UPDATE ga_meta SET value = 1 WHERE name = 'schema'")
    with Stack(settings_for(tmp_path / "home")) as stack:
        follower = Follower(stack, 1_000_000)
        for version in (2, 3):
            same(stack, follower, KEYS)
            apply(stack, upsert(stored(7, version, at=(90, 90))))
        same(stack, follower, KEYS)


def test_a_builder_that_keeps_features_asks_for_digests_once_and_for_those_of_forced_tiles_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FOLLOWED_FROM", 1)
    world = World(tmp_path / "home")
    try:
        for number in range(3):
            world.edit(feature(number, at=(24.9441 + number / 1_000, 60.169)))
        keys = [state.key for state in world.build_dirty()]
        with TileBuilder(world.stack, "lane", inline=True, cache=EncodedCache(10_000_000)) as builder:
            reads = Reads(world.stack)
            for version in (2, 3):
                world.edit(feature(1, version))
                world.mark_hints()
                assert {result.outcome for result in builder.build(keys)} <= {
                    "built",
                    "skipped",
                    "emptied",
                    "unchanged",
                }
            assert [name for name, _ in reads.asked].count("digests") == 1
            list(builder.build(keys, force=True))
            assert [name for name, _ in reads.asked].count("digests") == 2
        assert {one["version"] for key in world.published() for one in world.properties(key)} >= {3}
        assert not world.stack.ledger.dirty(10)
    finally:
        world.close()


def test_what_is_remembered_is_counted_in_full(stack: Stack) -> None:
    fill(stack)
    follower = Follower(stack, 1_000_000)
    follower.shown(KEYS)
    arrays = [
        array
        for followed in follower._tiles.values()
        for array in (
            followed.shown.digest,
            followed.shown.number,
            followed.shown.vertices_each,
            followed.shown.time_each,
        )
    ]
    assert all(isinstance(array, np.ndarray) and array.base is None for array in arrays)
    assert sum(array.nbytes for array in arrays) <= follower.nbytes
