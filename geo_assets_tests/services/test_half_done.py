"""What somebody began and nobody ended is found and mended: each kind is injected, on both stacks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from geo_assets.events import topics
from geo_assets.ports import tile_object
from geo_assets.services import announce, half_done, outbox, pins
from geo_assets.services.half_done import HalfDone, find, mend
from geo_assets.services.tileset import registry
from geo_assets.stack import Stack
from geo_assets.tiles import workkey
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.world import settings_for
from resources.feature_store.protocol import Edit, OutboxRow
from resources.ledger.protocol import Commit, object_name

DAY_MS = 24 * 3_600_000
KEY = "14:12002321123121"
OTHER = "14:12002321123122"


@pytest.fixture(scope="module", params=STACKS)
def ports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with changes_of(request.param) as changes, Stack(settings_for(tmp_path_factory.mktemp("home"), **changes)) as ports:
        yield ports.ensure()


@pytest.fixture
def stack(ports: Stack, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """Ports at rest: what a test before left half done is mended."""
    monkeypatch.setattr(
        half_done, "sweep_announcements", lambda stack: announce.sweep_announcements(stack, min_age_ms=0)
    )
    mend(ports, find(ports, grace_ms=0, at_ms=later()), pay_catalog=lambda: paid(ports), grace_ms=0, at_ms=later())
    return ports


def later() -> int:
    """A day from now: whatever there is now is old by then."""
    return time.time_ns() // 1_000_000 + DAY_MS


def paid(stack: Stack) -> int:
    rows = stack.ledger.owed("catalog", 1_000)
    stack.ledger.pay([row.id for row in rows])
    return len(rows)


def found_later(stack: Stack) -> list[tuple[str, str]]:
    return [(one.kind, one.subject) for one in find(stack, at_ms=later())]


def only(found: list[HalfDone]) -> HalfDone:
    (one,) = found
    return one


def built(stack: Stack, key: str, text: str = "a") -> None:
    """A tile with an object, committed and announced."""
    ledger = stack.ledger
    ledger.mark([key])
    state = ledger.read([key])[key]
    data = text.encode()
    content = workkey.tile_hash(data)
    stack.tiles.put(tile_object(object_name(key, state.revision + 1, content)), workkey.compress(data))
    held = ledger.commit([Commit(key, state.revision, state.wanted, "0" * 16, content, len(data), 1, "built")])
    ledger.pay([row.id for rows in held.values() for row in rows])


def owing(stack: Stack, row: OutboxRow, name: str) -> int:
    """An edit whose outbox row nobody pays; when it was stored."""
    at = time.time_ns() // 1_000_000
    edit = Edit(name * 64, name, "delete", "city", f'"{name}"', 1, at, "", None)
    stack.features.apply([edit], lambda _: [row], now_ms=at)
    return at


def test_nothing_is_half_done_in_a_world_at_rest_and_what_is_under_way_is_not_either(stack: Stack) -> None:
    assert found_later(stack) == []
    stack.ledger.mark([KEY])
    (batch,) = stack.ledger.open_batches([[KEY]], kind="live", ttl_s=60)
    stack.ledger.write_manifest("fresh", "", "backfill", [KEY])
    pin = pins.set_pin(stack.ledger, "a publication")
    assert find(stack) == []
    pins.drop_pin(stack.ledger, pin)
    stack.ledger.end_batch(batch.id)
    stack.ledger.cancel_manifest("fresh")


def test_a_batch_whose_lease_died_is_ended_and_its_tiles_are_free(stack: Stack) -> None:
    stack.ledger.mark([KEY])
    (batch,) = stack.ledger.open_batches([[KEY]], kind="live", ttl_s=60)
    found = only(find(stack, at_ms=later()))
    assert (found.kind, found.subject, found.count) == ("lease", batch.id, 1)
    assert mend(stack, [found]) == {"lease": 1}
    assert stack.ledger.batches() == []
    assert stack.ledger.read([KEY])[KEY].lease is None
    assert mend(stack, [found]) == {"lease": 1}, "again does no harm"
    assert found_later(stack) == []


def test_a_lease_of_a_builder_that_died_is_freed(stack: Stack) -> None:
    stack.ledger.mark([KEY])
    stack.ledger.take([KEY], "run:gone", 60)
    found = only(find(stack, at_ms=later()))
    assert (found.kind, found.subject) == ("lease", "run:gone")
    mend(stack, [found])
    assert stack.ledger.read([KEY])[KEY].lease is None


def test_duties_that_a_dead_committer_owes_are_paid(stack: Stack) -> None:
    stack.ledger.mark([KEY])
    state = stack.ledger.read([KEY])[KEY]
    stack.ledger.commit([Commit(KEY, state.revision, state.wanted, "1" * 16, None, 0, 1, "emptied")])
    found = find(stack, grace_ms=0)
    assert {(one.kind, one.subject) for one in found} == {("outbox", "announce"), ("outbox", "catalog")}
    announced = sum(extent.end for extent in stack.log.extents(topics.TILE_UPDATED).values())
    mend(stack, found, grace_ms=0)
    assert sum(extent.end for extent in stack.log.extents(topics.TILE_UPDATED).values()) == announced + 1
    assert {one.subject for one in find(stack, grace_ms=0)} == {"catalog"}, "left to a process that has Dagster"
    mend(stack, found, pay_catalog=lambda: paid(stack), grace_ms=0)
    assert find(stack, grace_ms=0) == []


def test_hints_of_edits_that_were_never_sent_are_found_after_two_looks_and_sent(stack: Stack) -> None:
    at = owing(stack, OutboxRow("tiles", KEY, b"{}", {}), "e")
    assert find(stack, at_ms=at) == [], "nobody knows yet since when they are there"
    assert find(stack, at_ms=at + half_done.GRACE_MS - 1) == []
    found = only(find(stack, at_ms=at + half_done.GRACE_MS))
    assert (found.kind, found.subject, found.count) == ("outbox", "edits: tiles", 1)
    assert mend(stack, [found])["outbox"] == 1
    assert stack.features.owed() == []
    assert find(stack, at_ms=at + 2 * half_done.GRACE_MS) == []


def test_an_object_that_was_never_committed_is_passed_by_and_the_tile_shows_the_same(stack: Stack) -> None:
    built(stack, KEY, "b")
    before = stack.ledger.read([KEY])[KEY]
    orphan = tile_object(object_name(KEY, before.revision + 1, "f" * 64))
    stack.tiles.put(orphan, b"never committed")
    found = find(stack, at_ms=later())
    assert {one.subject for one in found} == {KEY}
    assert any("never committed" in one.problem for one in found)

    assert mend(stack, found, at_ms=later())["object"] >= 1
    after = stack.ledger.read([KEY])[KEY]
    assert (after.revision, after.content_hash) == (before.revision + 1, before.content_hash)
    assert after.object_name is not None
    assert stack.tiles.exists(tile_object(after.object_name))
    assert not stack.tiles.exists(orphan)
    slow = Commit(KEY, before.revision, before.wanted, "2" * 16, "f" * 64, 1, 1, "built")
    assert stack.ledger.commit([slow]) == {}, "a builder that was only slow: its object is gone, its commit is void"


def test_an_orphan_of_a_tile_that_was_never_built_waits_for_its_build(stack: Stack) -> None:
    orphan = tile_object(object_name(OTHER, 1, "e" * 64))
    stack.tiles.put(orphan, b"never committed")
    mend(stack, [only(find(stack, at_ms=later()))], at_ms=later())
    assert stack.tiles.exists(orphan), "its builder may only be slow"
    assert stack.ledger.read([OTHER])[OTHER].dirty
    built(stack, OTHER)
    mend(stack, find(stack, at_ms=later()), at_ms=later())
    assert not stack.tiles.exists(orphan)


def test_rule_13_neither_what_is_current_nor_an_object_of_another_name_is_deleted(stack: Stack) -> None:
    stack.tiles.put("tiles/somebody-elses.txt", b"x")
    built(stack, KEY, "c")
    built(stack, KEY, "d")
    mend(stack, find(stack, at_ms=later()), at_ms=later())
    assert stack.tiles.exists("tiles/somebody-elses.txt")
    state = stack.ledger.read([KEY])[KEY]
    assert state.object_name is not None
    assert stack.tiles.exists(tile_object(state.object_name))
    assert len(list(stack.tiles.list(f"tiles/{state.object_name.rpartition('/')[0]}/"))) == 1
    stack.tiles.delete(["tiles/somebody-elses.txt"])


def test_a_manifest_that_was_never_marked_is_given_up(stack: Stack) -> None:
    stack.ledger.write_manifest("half", "Old town", "backfill", [KEY])
    found = only(find(stack, at_ms=later()))
    assert (found.kind, found.subject) == ("manifest", "half")
    mend(stack, [found], at_ms=later())
    assert stack.ledger.manifest("half").state == "cancelled"
    assert found_later(stack) == []


def test_an_import_that_died_has_its_tiles_marked(stack: Stack) -> None:
    owing(stack, OutboxRow("manifest", KEY, b"", {}, "import-7"), "d")
    lease = stack.guard.acquire(f"{outbox.IMPORT_LEASE}import-7", "alive", 60)
    assert lease is not None
    assert find(stack) == []
    stack.guard.release(lease)
    found = only(find(stack))
    assert (found.kind, found.subject) == ("import", "import-7")
    assert mend(stack, [found]) == {"import": 1}
    assert stack.ledger.manifest("import-7").tiles == 1
    assert find(stack) == []


def test_pins_and_publications_of_the_dead_are_let_go(stack: Stack) -> None:
    dead = pins.set_pin(stack.ledger, "a publication", ttl_s=1)
    version = registry.claim(stack.ledger, "town", "ab" * 32, owner="elsewhere|1|1.00", ttl_s=1)
    stack.tiles.put(registry.object_name("town", version, "half.pmtiles"), b"half")
    found = find(stack, at_ms=later())
    assert {(one.kind, one.subject) for one in found} == {("pin", dead.id), ("publication", f"town/{version}")}
    time.sleep(1.1)
    mend(stack, found, at_ms=later())
    assert not stack.tiles.exists(registry.object_name("town", version, "half.pmtiles"))
    assert registry.read(stack.ledger, "town").claims[version].until_ms == 0
    assert found_later(stack) == []
