"""The guard is a filter before a durable check: down, paused, flushed or wrong, nothing is lost or doubled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from geo_assets.events import topics
from geo_assets.events.signature import sign
from geo_assets.ports import topic_specs
from geo_assets.services import housekeeping, importer, outbox
from geo_assets.services.announce import sweep_announcements
from geo_assets.services.edge import create_app
from geo_assets.services.housekeeping import Housekeeper, enforce_retention, sweep
from geo_assets.services.importer import Imported, import_reading
from geo_assets.services.outbox import QuietImports
from geo_assets.services.reading import open_file
from geo_assets.stack import Stack
from geo_assets_tests.own_redis import OwnRedis, own_redis
from geo_assets_tests.services.running import running
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import World, feature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Crash(BaseException):
    """A process that is gone: nothing may catch it."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[OwnRedis]:
    with own_redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def world(tmp_path: Path, redis: OwnRedis) -> Iterator[World]:
    world = World(tmp_path / "home", redis_url=redis.url)
    yield world
    world.close()


class Edge:
    """The edge of a world, as a sender sees it."""

    def __init__(self, world: World, url: str) -> None:
        self._world, self._client = world, httpx.Client(base_url=url, timeout=patient(30))

    def post(self, webhook_id: str, body: dict[str, Any]) -> tuple[int, str]:
        """Send an event; status and what became of it."""
        data = json.dumps(body).encode()
        headers = sign(SECRET, webhook_id, int(time.time()), data)
        answer = self._client.post(
            "/v1/features", content=data, headers={**headers, "Content-Type": "application/json"}
        )
        return answer.status_code, str(answer.json().get("status"))

    def raw(self) -> int:
        """Records of `[raw]`."""
        return sum(extent.end for extent in self._world.stack.log.extents(topics.RAW).values())

    def ingested(self) -> dict[str, int]:
        """Ingest every record of `[raw]`, and count what became of their edits."""
        log = self._world.stack.log
        counts: dict[str, int] = {}
        for partition, extent in log.extents(topics.RAW).items():
            for record in log.read(topics.RAW, partition, extent.begin, 1_000):
                for outcome, number in self._world.ingest.work([record])[0].counts.items():
                    counts[outcome] = counts.get(outcome, 0) + number
        return counts


@contextmanager
def edge_of(world: World) -> Iterator[Edge]:
    stack = world.stack
    app = create_app(stack.log, stack.guard, stack.tiles, stack.sources, world.settings)
    with running(app) as url:
        yield Edge(world, url)


def recorded(redis: OwnRedis, webhook_id: str) -> str | None:
    with redis.client() as client:
        found = client.get(f"geo_assets:key:webhook:city:{webhook_id}")
    return None if found is None else str(found)


# -- edge ------------------------------------------------------------------------------------------------------------
def test_with_the_guard_repetitions_stay_out_of_the_log_and_its_keys_outlive_the_log_twice(
    world: World, redis: OwnRedis
) -> None:
    with edge_of(world) as edge:
        assert edge.post("one", feature(1, 1)) == (202, "queued")
        assert edge.post("one", feature(1, 1)) == (202, "duplicate")
        assert edge.post("one", feature(1, 2))[0] == 409
        until(lambda: recorded(redis, "one"))
        assert edge.post("one", feature(1, 1)) == (202, "duplicate")
        assert edge.raw() == 1
        with redis.client() as client:
            left_ms = client.pttl("geo_assets:key:webhook:city:one")
        log_ms = max(spec.retention_ms for spec in topic_specs(world.settings) if spec.name == topics.RAW)
        assert left_ms > 2 * log_ms - 60_000


@pytest.mark.parametrize("how", ["killed", "paused", "full", "password changed"])
def test_while_the_guard_is_away_events_are_taken_and_a_repetition_applies_once(
    world: World, redis: OwnRedis, how: str
) -> None:
    with edge_of(world) as edge:
        assert edge.post("before", feature(1, 1)) == (202, "queued")
        until(lambda: recorded(redis, "before"))
        if how == "killed":
            redis.kill()
        elif how == "paused":
            redis.pause()
        else:
            with redis.client() as client:
                if how == "full":
                    client.config_set("maxmemory", "1")
                else:
                    client.config_set("requirepass", "another")
                    client.client_kill_filter(_type="normal", skipme=True)
        began = time.monotonic()
        for n in range(30):
            assert edge.post(f"away-{n}", feature(10 + n, 1)) == (202, "queued")
        # One of them waits for it, and not each.
        assert time.monotonic() - began < patient(10)
        time.sleep(0.3)  # What waits to be recorded together was given up.
        for webhook_id, number in (("before", 1), ("away-0", 10)):
            status, outcome = edge.post(webhook_id, feature(number, 1))
            assert status == 202
            assert outcome in ("queued", "duplicate")
        if how == "paused":
            redis.resume()
        elif how == "killed":
            redis.start()
        counts = edge.ingested()
        assert counts["applied"] == 31
        assert set(counts) <= {"applied", "duplicate"}


def test_a_guard_that_came_back_filters_again(world: World, redis: OwnRedis) -> None:
    with edge_of(world) as edge:
        redis.kill()
        assert edge.post("one", feature(1, 1)) == (202, "queued")
        redis.start()

        def known() -> bool:
            edge.post("two", feature(2, 1))
            return recorded(redis, "two") is not None

        until(known)
        before = edge.raw()
        assert edge.post("two", feature(2, 1)) == (202, "duplicate")
        assert edge.raw() == before


def test_a_flushed_guard_lets_repetitions_through_and_ingest_drops_them(world: World, redis: OwnRedis) -> None:
    with edge_of(world) as edge:
        edge.post("one", feature(1, 1))
        until(lambda: recorded(redis, "one"))
        with redis.client() as client:
            client.flushall()
        assert edge.post("one", feature(1, 1)) == (202, "queued")
        assert edge.ingested() == {"applied": 1, "duplicate": 1}


@pytest.mark.parametrize("wrong", ["garbage", "another platform's", "another type"])
def test_a_guard_that_is_wrong_keeps_no_event_out(tmp_path: Path, world: World, redis: OwnRedis, wrong: str) -> None:
    """Two platforms that share a server and its prefix, or a log made anew: what was acknowledged was not here."""
    if wrong == "another platform's":
        with other_world(tmp_path / "other", redis) as other, edge_of(other) as edge:
            assert edge.post("one", feature(1, 1)) == (202, "queued")
            until(lambda: recorded(redis, "one"))
    else:
        with redis.client() as client:
            key = "geo_assets:key:webhook:city:one"
            client.set(key, "features:" + "0" * 64) if wrong == "garbage" else client.rpush(key, "x")
    with edge_of(world) as edge:
        assert edge.post("one", feature(1, 1)) == (202, "queued")
        assert edge.ingested() == {"applied": 1}


# -- housekeeping ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["killed", "paused"])
def test_housekeeping_goes_on_without_the_guard(
    world: World, redis: OwnRedis, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SWEEP_S", 0.05)
    monkeypatch.setattr(housekeeping, "sweep_announcements", lambda stack: sweep_announcements(stack, min_age_ms=0))
    world.edit(feature(1, 1))

    def dies(name: str, _: str) -> None:
        if name == "announce":
            raise Crash

    with pytest.raises(Crash):
        world.build_dirty(step=dies)
    assert world.announced() == []
    redis.kill() if how == "killed" else redis.pause()
    keepers = [Housekeeper(lambda: Stack(world.settings)) for _ in range(2)]
    for keeper in keepers:
        keeper.start()
    until(lambda: world.stack.ledger.owed("announce") == [])
    for keeper in keepers:
        keeper.stop()
    assert {one["revision"] for one in world.announced()} == {1}
    assert enforce_retention(world.stack)["guard keys"] == 0
    assert all(world.tile(key) for key in world.published())


def test_one_port_that_is_away_does_not_stop_the_other_tasks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from resources.event_log.protocol import LogUnavailable

    def away(*_: object) -> None:
        raise LogUnavailable("away")

    world.edit(feature(1, 1))
    world.build_dirty()
    monkeypatch.setattr(world.stack.log, "append", away)
    monkeypatch.setattr(world.stack.log, "enforce_retention", away)
    monkeypatch.setattr(outbox, "sweep_imports", lambda *_: 7)
    assert sweep(world.stack)["imports"] == 7
    assert enforce_retention(world.stack)["records"] == 0


# -- imports ---------------------------------------------------------------------------------------------------------
def city(path: Path, numbers: range) -> Path:
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature(n, 1, place=n) for n in numbers]}))
    return path


def imported(world: World, file: Path, **more: Any) -> Imported:
    return import_reading(world.stack, open_file(file, None), world.stack.sources["city"], **more)


def shown(world: World) -> set[frozenset[int]]:
    """The places in each tile of the deepest zoom and the one above."""
    return {
        frozenset(one["place"] for one in world.properties(key))
        for key in world.published()
        if key.startswith(("15:", "16:"))
    }


def test_an_import_goes_on_when_the_guard_is_killed_under_it(
    world: World, redis: OwnRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "CHUNK", 1)
    monkeypatch.setattr(importer, "EDITS_A_TRANSACTION", 2)
    done = imported(world, city(tmp_path / "city.geojson", range(6)), progress=lambda _: redis.kill())
    assert done.outcomes == {"applied": 6}
    assert done.manifest is not None
    assert done.manifest.state == "marked"
    assert {result.outcome for result in world.build_dirty()} == {"built"}
    assert shown(world) == {frozenset(range(6))}


def test_an_import_begins_without_the_guard(world: World, redis: OwnRedis, tmp_path: Path) -> None:
    redis.kill()
    assert imported(world, city(tmp_path / "city.geojson", range(3))).outcomes == {"applied": 3}
    world.build_dirty()
    assert shown(world) == {frozenset(range(3))}


@pytest.mark.parametrize("lost", ["flushed", "expired"])
def test_an_import_taken_for_dead_leaves_no_tile_behind(
    world: World, redis: OwnRedis, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "CHUNK", 1)
    monkeypatch.setattr(importer, "EDITS_A_TRANSACTION", 1)
    swept: list[int] = []

    def meanwhile(done: Imported) -> None:
        # After each transaction its lease is lost, a sweep finishes it, and its tiles are built with what is there.
        with redis.client() as client:
            if lost == "flushed":
                client.flushall()
            else:
                for key in client.scan_iter("geo_assets:lease:*"):
                    client.delete(key)
        swept.append(outbox.sweep_imports(world.stack))
        world.build_dirty()

    done = imported(world, city(tmp_path / "city.geojson", range(4)), progress=meanwhile)
    assert sum(swept) >= 2
    assert done.outcomes == {"applied": 4}
    world.build_dirty()
    assert shown(world) == {frozenset(range(4))}
    assert world.stack.features.owed() == []
    assert world.stack.ledger.dirty(10) == []


def test_a_dead_import_is_finished_while_the_guard_is_away_once_it_has_been_quiet(
    world: World, redis: OwnRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "finish_manifest", dies)
        with pytest.raises(Crash):
            imported(world, city(tmp_path / "city.geojson", range(3)))
    redis.kill()
    now = 0.0
    quiet = QuietImports(after_s=600, clock=lambda: now)
    for later in (0.0, 300.0, 599.0):
        now = later
        assert sweep(world.stack, quiet)["imports"] == 0
    assert world.stack.ledger.dirty(10) == []
    now = 601.0
    assert sweep(world.stack, quiet)["imports"] == 1
    world.build_dirty()
    assert shown(world) == {frozenset(range(3))}


def test_an_import_that_goes_on_is_not_quiet() -> None:
    now = 0.0
    quiet = QuietImports(after_s=10, clock=lambda: now)
    for now in range(0, 100, 5):
        assert quiet.look({"lives": int(now), "dead": 1}) == ({"dead"} if now >= 10 else set())
    assert quiet.look({}) == set()
    assert quiet.look({"dead": 1}) == set()


# -- builds ----------------------------------------------------------------------------------------------------------
def test_ingest_builds_and_announcements_need_no_guard(world: World, redis: OwnRedis) -> None:
    redis.kill()
    assert world.edit(feature(1, 1)).counts == {"applied": 1}
    assert {result.outcome for result in world.build_dirty()} == {"built"}
    assert world.announced()


@contextmanager
def other_world(home: Path, redis: OwnRedis) -> Iterator[World]:
    world = World(home, redis_url=redis.url)
    yield world
    world.close()
