"""A hot tile's hints go to a topic of their own and back, and whoever counts them knows of both topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets.events import topics
from geo_assets.services import currency
from geo_assets.services.dead_letters import scan_topic
from geo_assets.services.hot_tiles import HotTiles
from geo_assets.services.ingest import HOT
from geo_assets.services.status import lag_of
from geo_assets.services.tileset.snapshot import _unread_hints
from geo_assets_tests.world import HERE, World, feature
from resources.event_log.protocol import LogUnavailable, NewRecord

HOT_A_S = 1.0
DEEP = "16:"


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world(tmp_path: Path, clock: Clock) -> Iterator[World]:
    world = World(tmp_path / "home")
    world.ingest._hot = HotTiles(HOT_A_S, clock)
    yield world
    world.close()


def hints(world: World, topic: str) -> list[str]:
    return [record.key or "" for record in scan_topic(world.stack.log, topic)]


def edits(world: World, clock: Clock, versions: range, *, a_s: float) -> None:
    for version in versions:
        clock.now += 1 / a_s
        world.edit(feature(1, version))


def test_a_tile_edited_again_and_again_is_hot_and_goes_back_when_it_has_cooled(world: World, clock: Clock) -> None:
    edits(world, clock, range(1, 25), a_s=6.0)
    hot = set(hints(world, topics.TILES_HOT))
    assert any(key.startswith(DEEP) for key in hot)
    assert hot == set(hints(world, topics.TILES))
    assert HOT._value.get() == len(hot) > 0

    before = Counter(hints(world, topics.TILES))
    world.edit(feature(2, 1, at=(HERE[0] + 0.5, HERE[1])))
    beside = Counter(hints(world, topics.TILES)) - before
    assert any(key.startswith(DEEP) for key in beside)
    assert not hot & beside.keys()

    clock.now += 60
    world.ingest.run_once()
    while world.ingest.run_once():
        pass
    assert HOT._value.get() == 0
    hotter = len(hints(world, topics.TILES_HOT))
    world.edit(feature(1, 25))
    assert len(hints(world, topics.TILES_HOT)) == hotter


def test_whatever_topic_its_hints_took_a_tile_shows_the_newest_edit(world: World, clock: Clock) -> None:
    for burst in range(3):
        edits(world, clock, range(24 * burst + 1, 24 * burst + 25), a_s=6.0)
        clock.now += 60
        world.build_dirty()
        deep = [key for key in world.published() if key.startswith(DEEP)]
        assert deep
        for key in deep:
            assert [one["version"] for one in world.properties(key)] == [24 * burst + 24]
    assert hints(world, topics.TILES_HOT)


def test_hints_that_the_log_did_not_take_make_no_tile_hot_and_stay_owed(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise LogUnavailable("away")

    record = world.send(feature(1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(world.stack.log, "append", away)
        for _ in range(60):
            clock.now += 0.01
            with pytest.raises(LogUnavailable):
                world.ingest.work([record])
    assert world.stack.features.owed(1, kind="tiles")
    assert len(world.ingest._hot) == 0
    world.ingest.work([record])
    assert not world.stack.features.owed(1, kind="tiles")
    assert not hints(world, topics.TILES_HOT)


def test_a_rate_of_0_makes_no_tile_hot(world: World, clock: Clock) -> None:
    world.ingest._hot = HotTiles(0.0, clock)
    edits(world, clock, range(1, 20), a_s=50.0)
    world.ingest._hot.look()
    assert (len(world.ingest._hot), hints(world, topics.TILES_HOT)) == (0, [])


def test_lag_and_a_publication_know_of_hints_on_both_topics(world: World) -> None:
    world.stack.log.append([NewRecord(topics.TILES, "3:021", None)])
    world.stack.log.append([NewRecord(topics.TILES_HOT, key, None) for key in ("3:021", "3:022")])
    assert lag_of(world.stack)["tile hints"] == 3
    behind = {one.topic: one.records for one in currency.readers(world.stack)}
    assert (behind[topics.TILES], behind[topics.TILES_HOT]) == (1, 2)
    assert _unread_hints(world.stack) == {"3:021", "3:022"}
    world.mark_hints()
    assert lag_of(world.stack)["tile hints"] == 0
    assert _unread_hints(world.stack) == set()
