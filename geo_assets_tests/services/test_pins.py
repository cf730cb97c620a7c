from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets.services import pins
from geo_assets.services.garbage import collect_objects
from geo_assets.services.pins import PinLost, drop_pin, live_pins, pinned_since, renew_pin, set_pin
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.world import World, feature


@pytest.fixture(params=STACKS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with changes_of(request.param) as changes:
        world = World(tmp_path / "home", **changes)
        yield world
        world.close()


def names(world: World) -> set[str]:
    return {o.name for o in world.stack.tiles.list("tiles/")}


def test_rule_13_garbage_leaves_what_was_current_when_a_pin_was_set(world: World) -> None:
    ledger = world.stack.ledger
    world.edit(feature(1, 1))
    world.build_dirty()
    before = names(world)
    pin = set_pin(ledger, "a test")
    for version in (2, 3):
        world.edit(feature(1, version, size=0.0004 * version))
        world.build_dirty()

    assert collect_objects(world.stack, now_ms=2**50) == 0
    assert names(world) > before

    drop_pin(ledger, pin)
    assert ledger.get_value(pins.VALUE) is None
    assert collect_objects(world.stack, now_ms=2**50) > 0
    assert not names(world) & before


def test_a_pin_of_a_dead_owner_runs_out_and_its_renewal_says_so(world: World) -> None:
    ledger = world.stack.ledger
    pin = set_pin(ledger, "a publication", ttl_s=0.05)
    other = set_pin(ledger, "another")
    assert pinned_since(ledger) == pin.since_ms - pins.CLOCKS_MS
    time.sleep(0.1)
    with pytest.raises(PinLost, match="a publication"):
        renew_pin(ledger, pin)
    renew_pin(ledger, other)
    now = time.time_ns() // 1_000_000
    assert {one.id for one in live_pins(ledger, now)} == {pin.id, other.id}, "clocks may differ by a minute"
    assert {one.id for one in live_pins(ledger, now + pins.CLOCKS_MS)} == {other.id}
    assert live_pins(ledger, now + 3_600_000) == []
