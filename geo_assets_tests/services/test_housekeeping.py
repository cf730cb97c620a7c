from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets.services import announce
from geo_assets.services.housekeeping import enforce_retention, forget_manifests, sweep
from geo_assets.services.importer import import_reading
from geo_assets.services.outbox import IMPORT_LEASE
from geo_assets.services.reading import open_file
from geo_assets_tests.world import World, feature


class Crash(BaseException):
    """A process that is gone: nothing may catch it."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "home")
    yield world
    world.close()


def test_announcements_that_a_dead_builder_owed_are_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "SWEEP_AGE_MS", 0)
    world.edit(feature(1, 1))

    def dies(name: str, _key: str) -> None:
        if name == "announce":
            raise Crash

    with pytest.raises(Crash):
        world.build_dirty(step=dies)
    assert world.announced() == []

    announce.sweep_announcements(world.stack, min_age_ms=0)
    assert {a["revision"] for a in world.announced()} == {1}
    assert world.stack.ledger.owed("announce") == []


def test_an_import_that_died_has_its_tiles_marked_once_its_lease_is_gone(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    from geo_assets.services import outbox

    file = tmp_path / "city.geojson"
    file.write_text(json.dumps({"type": "FeatureCollection", "features": [feature(n, 1) for n in range(3)]}))

    def dies(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "finish_manifest", dies)
        with pytest.raises(Crash):
            import_reading(world.stack, open_file(file, None), world.stack.sources["city"])
    (group,) = {row.group for row in world.stack.features.owed(kind="manifest")}

    assert sweep(world.stack)["imports"] == 0
    assert world.stack.ledger.dirty(10) == []
    lease = world.stack.guard.acquire(IMPORT_LEASE + group, group, 60)
    assert lease is not None
    world.stack.guard.release(lease)
    assert sweep(world.stack)["imports"] == 1

    assert world.stack.features.owed() == []
    assert world.stack.ledger.manifest(group).state == "marked"
    assert {r.outcome for r in world.build_dirty()} == {"built"}


def test_retention_keeps_what_is_current(world: World) -> None:
    world.edit(feature(1, 1))
    world.build_dirty()
    done = enforce_retention(world.stack)
    assert sum(done.values()) == 0
    assert all(world.tile(key) for key in world.published())


def test_manifests_whose_end_nobody_asks_for_any_more_are_forgotten(world: World) -> None:
    ledger = world.stack.ledger
    ledger.write_manifest("old", "", "backfill", ["3:012"])
    ledger.mark_manifest("old")
    week_ms = world.stack.settings.retention_s * 1000
    later = ledger.manifest("old").created_ms + week_ms + 1
    assert forget_manifests(world.stack, later) == 0, "it is still to be built"
    world.build_dirty()
    assert forget_manifests(world.stack, later - 10) == 0
    assert forget_manifests(world.stack, later) == 1
