"""Geofences in a backup, on both stacks: after a restore routing goes on from there, and tells nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_assets.services import fences, geofence_backup, routing
from geo_assets.services import geofence_snapshots as snapshots
from geo_assets.services.backup import after_restore, make_backup, restore
from geo_assets.services.fences import FenceBook
from geo_assets.services.geofence_backup import GeofenceState, GeofenceStateMoves, make_right
from geo_assets.services.geofence_snapshots import Stored
from geo_assets.services.trigger_tail import EPOCH, current_epoch
from geo_assets_tests.geofence_world import consistent, expected, fence, post_fences, seen, walk, what
from geo_assets_tests.services.test_backup import Platform, platform
from geo_assets_tests.services.test_routing import OPTIONS, RULES
from geo_assets_tests.world import World

__all__ = ["platform"]


@pytest.fixture
def embedded(tmp_path: Path) -> Platform:
    return Platform(tmp_path / "home", {})


def standing_ids(world: World) -> list[str]:
    book = FenceBook(world.stack)
    return [one.id for one in book.index(book.fold().name).fence_set.fences]


def test_after_a_restore_routing_goes_on_from_the_backup_and_tells_nothing_twice(
    platform: Platform, tmp_path: Path
) -> None:
    file = tmp_path / "a.backup"
    records = walk(8, 30)
    with platform as world:
        stack = world.stack
        post_fences(stack, [fence(n) for n in range(6)])
        stack.log.append(records[:120])
        routing.route(stack, OPTIONS)
        made = make_backup(world.settings, file)
        assert made.geofences.objects
        assert {name.split("/")[1] for name in made.geofences.objects} == {"fences", "snapshots"}
        stack.log.append(records[120:])
        told = routing.route(stack, OPTIONS).routed
        assert told > 0
        before = what(seen(stack))
        highest = current_epoch(stack.ledger)

    assert not restore(platform.settings, file).routing_anew

    with platform as world:
        stack = world.stack
        assert current_epoch(stack.ledger) > highest
        assert Stored.from_json(stack.ledger.get_value(snapshots.VALUE)).name in made.geofences.objects
        again = routing.route(stack, OPTIONS)
        assert (again.routed, again.deduped) == (0, told)
        assert again.epoch > highest
        book = FenceBook(stack)
        fence_set = book.index(book.standing().name).fence_set
        assert before == what(seen(stack)) == expected(stack, fence_set, RULES)
        # What comes next is told under the new epoch, and counts.
        post_fences(stack, [fence(7)])
        assert len(standing_ids(world)) == 7


def test_fences_that_came_after_a_backup_come_again_from_their_topic(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        post_fences(world.stack, [fence(1)])
        standing_ids(world)
        make_backup(world.settings, file)
        post_fences(world.stack, [fence(2), fence(1, version=2, shift=0.5)])
        assert len(standing_ids(world)) == 2
    restore(embedded.settings, file)
    with embedded as world:
        assert world.stack.ledger.get_value(fences.VALUE)
        assert len(standing_ids(world)) == 2


def test_a_snapshot_beyond_the_log_s_end_begins_anew(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        post_fences(world.stack, [fence(n) for n in range(6)])
        world.stack.log.append(walk(4, 10))
        routing.route(world.stack, OPTIONS)
        make_backup(world.settings, file)
    for path in embedded.home.glob("event-log.db*"):
        path.unlink()
    restore(embedded.settings, file)
    with embedded as world:
        # The fences themselves are of the backup: their topic is a new one, too.
        assert len(standing_ids(world)) == 6
        world.stack.log.append(walk(4, 10, seed=2))
        assert routing.route(world.stack, OPTIONS).routed > 0
        consistent(seen(world.stack))


def test_restored_by_other_means_nothing_is_named_that_is_not_there(embedded: Platform) -> None:
    with embedded as world:
        stack = world.stack
        post_fences(stack, [fence(n) for n in range(6)])
        stack.log.append(walk(4, 10))
        routing.route(stack, OPTIONS)
        old = {name: stack.ledger.get_value(name) for name in (EPOCH, fences.VALUE, snapshots.VALUE)}
        post_fences(stack, [fence(1, version=2, shift=0.5)])
        for _ in range(2):
            stack.log.append(walk(4, 10, seed=2))
            routing.route(stack, OPTIONS)
        highest = current_epoch(stack.ledger)
        # The ledger alone is put back: the objects that it names have been replaced since.
        for name, value in old.items():
            stack.ledger.set_value(name, value)
        assert after_restore(stack, None).routing_anew
        assert not make_right(stack)
        assert current_epoch(stack.ledger) > highest
        assert len(standing_ids(world)) == 6
        result = routing.route(stack, OPTIONS)
        assert result.ended == "idle"
        assert result.positions > 0


def test_a_backup_while_snapshots_are_replaced_holds_one_that_is_whole(embedded: Platform, tmp_path: Path) -> None:
    with embedded as world:
        stack = world.stack
        post_fences(stack, [fence(1)])
        stack.log.append(walk(2, 5))
        routing.route(stack, OPTIONS)
        stored = snapshots.in_force(stack.ledger)
        stack.tiles.delete([stored.name])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(geofence_backup, "_PAUSE_S", 0.0)
            with pytest.raises(GeofenceStateMoves):
                geofence_backup.copy_state(stack, tmp_path / "one")
            patched.setattr(geofence_backup, "_PAUSE_S", 0.01)
            patched.setattr(geofence_backup.time, "sleep", lambda _: stack.tiles.put(stored.name, b"next"))
            state = geofence_backup.copy_state(stack, tmp_path / "two")
        assert isinstance(state, GeofenceState)
        assert (tmp_path / "two" / stored.name).read_bytes() == b"next"
