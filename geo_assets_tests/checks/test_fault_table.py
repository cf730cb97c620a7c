"""The table of docs/checks.md: each fault turns the named checks red and no other, names the tile, and is mended."""

from __future__ import annotations

import gzip
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shapely

from geo_assets.checks.audit import AUDITS, Audit, result_of
from geo_assets.definitions import defs
from geo_assets.events import crs as domain_crs
from geo_assets.events import topics
from geo_assets.ports import tile_object
from geo_assets.services import throughput
from geo_assets.services.build import TileBuilder
from geo_assets.services.dead_letters import write_dead_letters
from geo_assets.services.hints import hint_dead_letter
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import tile_hash
from geo_assets_tests.dagster_world import ROOT, World, world
from resources.event_log.protocol import NewRecord
from resources.ledger.protocol import Commit, Failure

HOME = Tile(14, 9_327, 4_741)
SOURCES = """sources:
  demo: {secrets: [a-secret-of-a-test], default_crs: 'EPSG:4326', expected_box: [20, 55, 30, 65], expect_every_s: 3600}
"""


def documented() -> dict[str, frozenset[str]]:
    """The fault table: what turns red, by fault."""
    text = (ROOT / "docs" / "checks.md").read_text()
    rows = text[text.index("| fault | checks |") :].splitlines()[2:]
    found: dict[str, frozenset[str]] = {}
    for row in rows:
        if not row.startswith("|"):
            break
        fault, checks, _ = (cell.strip() for cell in row.strip("|").split("|"))
        found[fault] = frozenset(re.findall(r"`(\w+)`", checks))
    return found


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was put in: the tile it is about, if any, and what mends it."""

    mend: Callable[[], object]
    tile: Tile | None = HOME
    leaves: frozenset[str] = frozenset()
    """Checks that stay red for a while after the repair."""


FAULTS: dict[str, Callable[[World, pytest.MonkeyPatch], Injected]] = {}


def fault(name: str) -> Callable[[Callable[[World, pytest.MonkeyPatch], Injected]], Any]:
    def register(inject: Callable[[World, pytest.MonkeyPatch], Injected]) -> Any:
        FAULTS[name] = inject
        return inject

    return register


def build(here: World, *, force: bool = False) -> None:
    with TileBuilder(here.stack, "test", inline=True) as builder:
        list(builder.build([HOME.key], force=force))


def audit(here: World) -> dict[str, Audit]:
    """What the job `audit` finds, without Dagster around it: as a process of its own, which reads the files anew."""
    names = sorted(key.name for key in defs.resolve_asset_graph().asset_check_keys)
    with Stack(Settings()) as stack:
        return {name: AUDITS[name](stack) for name in names}


def red(found: dict[str, Audit]) -> frozenset[str]:
    return frozenset(name for name, one in found.items() if not one.passed)


def subjects(one: Audit) -> set[str]:
    """What its table names."""
    table: Any = result_of(one, "http://map").metadata["failing"]
    return {record.data["subject"] for record in getattr(table, "value", table).records}


@fault("an invalid geometry in the store")
def invalid_geometry(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    west, south, east, north = HOME.bounds
    inset = (east - west) / 4
    west, south, east, north = west + inset, south + inset / 3, east - inset, north - inset / 3
    bow = shapely.Polygon([(west, south), (east, north), (east, south), (west, north)])
    here.put("bow", bow)
    build(here)
    return Injected(lambda: here.put("bow", shapely.box(west, south, east, north)), tile=None)


@fault("a feature in the wrong place")
def wrong_place(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    here.put("flipped", shapely.box(60.1, 24.9, 60.2, 25.0))
    return Injected(lambda: here.put("flipped", shapely.box(24.9, 60.1, 25.0, 60.2)), tile=None)


@fault("flipped axes")
def flipped_axes(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    right = domain_crs._transformer

    class Flipped:
        def __init__(self, name: str, ballpark: bool) -> None:
            self.inner = right(name, ballpark)

        def transform(self, x: Any, y: Any, **more: Any) -> Any:
            return self.inner.transform(x, y, **more)[::-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    monkeypatch.setattr(domain_crs, "_transformer", Flipped)
    domain_crs._only_operation.cache_clear()
    return Injected(lambda: monkeypatch.setattr(domain_crs, "_transformer", right), tile=None)


@fault("a missing grid")
def missing_grid(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    file = here.stack.settings.home / "sources.yaml"
    file.write_text(SOURCES.replace("4326", "4267"))
    return Injected(lambda: file.write_text(SOURCES), tile=None)


@fault("a deleted object")
def deleted_object(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    state = here.ledger.read([HOME.key])[HOME.key]
    here.stack.tiles.delete([tile_object(state.object_name or "")])
    return Injected(lambda: build(here))


@fault("a flipped byte")
def flipped_byte(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    state = here.ledger.read([HOME.key])[HOME.key]
    name = tile_object(state.object_name or "")
    data = bytearray(gzip.decompress(here.stack.tiles.get(name) or b""))
    data[len(data) // 2] ^= 1
    here.stack.tiles.put(name, gzip.compress(bytes(data), mtime=0))
    return Injected(lambda: build(here))


@fault("a tile that cannot be read")
def unreadable(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    state = here.ledger.read([HOME.key])[HOME.key]
    data = b"\x1a\xff"
    (row,) = here.ledger.commit(
        [Commit(HOME.key, state.revision, state.wanted, "other", tile_hash(data), len(data), 0, "built", ())]
    )
    now = here.ledger.read([row])[row]
    here.stack.tiles.put(tile_object(now.object_name or ""), gzip.compress(data, mtime=0))
    return Injected(lambda: build(here, force=True))


def age(here: World, seconds: float) -> None:
    """Make what is dirty wait for longer than it did."""
    with sqlite3.connect(here.stack.settings.home / "ledger.db") as db:
        db.execute("UPDATE tile SET dirty_since_ms = dirty_since_ms - ? WHERE work IS NOT NULL", (int(seconds * 1000),))


@fault("a stuck tile")
def stuck(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    here.ledger.mark([HOME.key])
    age(here, 1_000)
    return Injected(lambda: build(here))


@fault("a tile given up")
def given_up(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    mark = here.ledger.mark([HOME.key])
    here.ledger.fail([Failure(HOME.key, mark, "too heavy")], max_attempts=1)
    return Injected(lambda: (here.ledger.mark([HOME.key]), build(here)))


@fault("a backfill below its floor")
def below_floor(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    here.ledger.write_manifest("m", "one tile", "backfill", [HOME.key])
    mark = here.ledger.mark_manifest("m").mark
    here.ledger.fail([Failure(HOME.key, mark, "too heavy")], max_attempts=1)
    return Injected(lambda: (here.ledger.mark([HOME.key], kind="backfill"), build(here)))


@fault("a skip rate that fell to zero")
def no_skips(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    for skipped in (90, 80, 0):
        throughput.remember_skips(here.ledger, throughput.Skips(skipped, 100, "r"))
    return Injected(lambda: throughput.remember_skips(here.ledger, throughput.Skips(90, 100, "r")), tile=None)


@fault("a stopped source")
def stopped_source(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    with sqlite3.connect(here.stack.settings.home / "features.gpkg") as db:
        db.execute("UPDATE ga_meta SET value = value - 10000000000 WHERE name LIKE 'received:%'")
        (stamp,) = db.execute("SELECT value FROM ga_meta WHERE name LIKE 'received:%'").fetchone()
    assert stamp < time.time() * 1000 - 3_600_000

    def heard() -> None:
        with sqlite3.connect(here.stack.settings.home / "features.gpkg") as db:
            db.execute("UPDATE ga_meta SET value = ? WHERE name LIKE 'received:%'", (int(time.time() * 1000),))

    return Injected(heard, tile=None)


@fault("a reader that stands still")
def standing_reader(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    old_ms = int(time.time() * 1000) - 6 * 24 * 3_600_000
    (at,) = here.stack.log.append([NewRecord(topics.RAW, "demo:1", b"{}", timestamp_ms=old_ms)])
    return Injected(
        lambda: here.stack.log.commit(topics.INGEST_GROUP, topics.RAW, {at.partition: at.offset + 1}), tile=None
    )


@fault("many dead letters")
def dead_letters(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    from geo_assets.events.models import EnvelopeError

    here.stack.log.append([NewRecord(topics.TILES, "nonsense", b"{")])
    (record,) = here.stack.log.read(topics.TILES, 0, 0, max_records=1)
    letter = hint_dead_letter(record, EnvelopeError("z", "no tile"), int(time.time() * 1000))
    write_dead_letters(here.stack, [letter])
    topic = here.stack.log.topic_id(topics.TILES)
    here.ledger.mark_from_log(topic, 0, [], record.offset + 1)
    return Injected(lambda: None, tile=None, leaves=frozenset({"dead_letter_rate"}))


@fault("a dead lease")
def dead_lease(here: World, monkeypatch: pytest.MonkeyPatch) -> Injected:
    from geo_assets.services import half_done

    here.ledger.mark([HOME.key])
    here.ledger.take([HOME.key], "somebody who died", 60)
    long_ago = int((time.time() - 7_200) * 1000)
    with sqlite3.connect(here.stack.settings.home / "ledger.db") as db:
        db.execute("UPDATE tile SET lease_until_ms = ? WHERE lease IS NOT NULL", (long_ago,))
    return Injected(lambda: (half_done.mend(here.stack, half_done.find(here.stack)), build(here)))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        (made.stack.settings.home / "sources.yaml").write_text(SOURCES)
        made.put_square("a", HOME)
        # Stored a moment ago, not when the made-up event happened.
        with sqlite3.connect(made.stack.settings.home / "features.gpkg") as db:
            db.execute("UPDATE ga_meta SET value = ? WHERE name LIKE 'received:%'", (int(time.time() * 1000),))
        build(made)
        yield made


def test_every_documented_fault_is_put_in_and_every_one_put_in_is_documented() -> None:
    assert set(FAULTS) == set(documented())


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_turns_red_the_checks_that_are_documented_and_no_other(
    name: str, here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected = FAULTS[name](here, monkeypatch)
    found = audit(here)
    assert red(found) == documented()[name], {one: found[one].summary for one in red(found)}
    for check in red(found):
        named = subjects(found[check])
        assert named
        if injected.tile is not None:
            assert {injected.tile.key, injected.tile.path} & named or "m" in named
    injected.mend()
    after = audit(here)
    assert red(after) == injected.leaves, {one: after[one].summary for one in red(after)}
