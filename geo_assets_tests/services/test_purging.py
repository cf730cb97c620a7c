"""Edits seen through a real cache (Varnish) that stands before the real tile server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from geo_assets import configuration, ports
from geo_assets.services import announce, purging
from geo_assets.services.housekeeping import sweep
from geo_assets.services.tileserver import create_app
from geo_assets.tiles.tile import Tile
from geo_assets_tests.needs import missing
from geo_assets_tests.own_redis import free_port
from geo_assets_tests.services.running import running
from geo_assets_tests.services.tile_world import HERE as TILE
from geo_assets_tests.services.tile_world import Stream, TileWorld
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import HERE, World, feature, settings_for
from scripts.local_services import MissingProgram, Services

SITE = "http://maps.example"
FAR = (HERE[0] + 0.3, HERE[1] + 0.2)
VARIANTS = [
    {"Accept-Encoding": "gzip, deflate, br, zstd"},
    {"Accept-Encoding": "identity"},
    {"Accept-Encoding": "gzip", "Origin": "https://one.example", "Sec-Fetch-Mode": "cors"},
    {"Accept-Encoding": "identity", "Origin": "https://two.example"},
]
"""Ways in which browsers ask for one and the same tile."""


class Crash(BaseException):
    """A process that is gone: nothing may catch it."""


class Held:
    """Around the tile server: answers of tiles wait while they are held, made from what was there when asked."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.holding = False
        self.waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/tiles/"):
            await self._app(scope, receive, send)
            return
        messages: list[Any] = []

        async def keep(message: Any) -> None:
            messages.append(message)

        await self._app(scope, receive, keep)
        self.waiting += 1
        while self.holding:
            await asyncio.sleep(0.01)
        self.waiting -= 1
        for message in messages:
            await send(message)


@dataclass
class Site:
    """A map behind its cache."""

    world: World
    cache: str
    origin: Held
    services: Services

    def get(self, key: str, url: str | None = None, **headers: str) -> httpx.Response:
        """A tile as a browser asks for it, which knows the cache by the public name."""
        path = purging.tile_path(Tile.from_key(key)) if url is None else url
        with httpx.Client(base_url=self.cache, timeout=patient(30)) as client:
            return client.get(path, headers={"Host": "maps.example", **headers})

    def kept(self, key: str, **headers: str) -> bool:
        """Whether the cache answers by itself."""
        return self.get(key, **headers).headers["X-Cache"] == "HIT"

    def shown(self, key: str, **headers: str) -> bytes:
        """The tile's bytes as a browser sees them."""
        answer = self.get(key, **headers)
        assert answer.status_code in (200, 204)
        return answer.content

    def with_purges_at(self, port: int) -> World:
        """The same map for a builder that reaches the cache by another port."""
        self.world.close()
        self.world = world_of(self.world.settings.home, f"http://127.0.0.1:{port}")
        return self.world


def world_of(home: Path, cache: str) -> World:
    return World(home, public_tiles_url=SITE, purge_urls=cache, purge_again_s=0.3)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    settings = settings_for(tmp_path / "home", public_tiles_url=SITE, purge_urls="http://a.cache")
    parts = [ports.open_ledger(settings), ports.open_tile_store(settings), ports.open_log(settings)]
    ledger, tiles, log = parts
    app = create_app(ledger, tiles, log, configuration.load_layers(settings), settings)  # pyright: ignore[reportArgumentType]
    held = Held(app)
    services = Services(tmp_path / "services")
    with running(held, on_stop=app.state.hub.end_streams) as origin:
        try:
            services.start("cache", backend=origin.removeprefix("http://"))
        except MissingProgram as fault:
            missing(str(fault))
        cache = services.settings()["GEO_ASSETS_PURGE_URLS"]
        site = Site(world_of(settings.home, cache), cache, held, services)
        try:
            yield site
        finally:
            site.world.close()
            services.remove()
    for port in parts:
        port.close()


@contextmanager
def way_to(cache: str, port: int) -> Iterator[None]:
    """A network path to the cache that was not there before: `port` leads to it."""
    host, _, number = cache.removeprefix("http://").partition(":")
    listener = socket.create_server(("127.0.0.1", port))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(number)))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def deepest(world: World, *, near: tuple[float, float] = HERE) -> str:
    """The z16 tile in whose middle parts the tests' building stands."""
    keys = [key for key in world.published() if key.startswith("16:")]
    column = (near[0] + 180) / 360 * 2**16
    return min(keys, key=lambda key: abs(Tile.from_key(key).x - column))


def test_rule_5_right_after_its_announcement_an_edited_tile_is_fresh_through_the_cache_in_every_variant(
    site: Site,
) -> None:
    site.world.edit(feature(1, 1))
    site.world.edit(feature(2, 1, at=FAR))
    site.world.build_dirty()
    near, far = deepest(site.world), deepest(site.world, near=FAR)
    assert near != far
    for headers in VARIANTS:
        for key in (near, far):
            site.get(key, **headers)
            assert site.kept(key, **headers)
    before = site.shown(near)

    seen: list[tuple[str, bytes]] = []
    append = site.world.stack.log.append

    def announced(records: Any) -> Any:
        # What a client that hears of it fetches at once, from the cache.
        done = append(records)
        seen.extend((r.key, site.shown(r.key)) for r in records if r.topic == "tile-updated" and r.key == near)
        return done

    site.world.edit(feature(1, 2))
    site.world.stack.log.append = announced  # pyright: ignore[reportAttributeAccessIssue]
    site.world.build_dirty()

    after = site.world.tile(near)
    assert after != before
    assert seen == [(near, after)]
    for headers in VARIANTS:
        assert site.shown(near, **headers) == after
        assert site.kept(far, **headers)
    assert {row.duty for row in site.world.stack.ledger.owed("purge_again")} == {"purge_again"}
    assert site.world.stack.ledger.counts().owed.keys() == {"purge_again", "catalog"}


def test_what_is_drawn_in_an_empty_tile_and_what_leaves_it_shows_at_once(site: Site) -> None:
    site.world.edit(feature(1, 1))
    site.world.build_dirty()
    key = deepest(site.world)
    far = Tile.from_key(key).path.split("/")
    empty = Tile(16, int(far[1]) + 5, int(far[2])).key
    assert (site.get(empty).status_code, site.kept(empty)) == (204, True)
    west, south, east, north = Tile.from_key(empty).bounds
    site.world.edit(feature(1, 2, at=((west + east) / 2, (south + north) / 2)))
    site.world.build_dirty()
    assert site.get(empty).status_code == 200
    assert site.get(key).status_code == 204
    assert site.kept(key)


def test_a_cache_keeps_a_tile_only_under_the_url_that_is_purged(site: Site) -> None:
    site.world.edit(feature(1, 1))
    site.world.build_dirty()
    key = deepest(site.world)
    path = purging.tile_path(Tile.from_key(key))
    ways = [
        path + "?x=1",
        path + "?v=999",
        path.replace("/tiles/1", "/tiles/%31"),
        path.replace(".mvt", "%2Emvt"),
    ]
    for url in ways:
        for _ in range(2):
            answer = site.get(key, url)
            assert answer.status_code == 200
            assert answer.headers["X-Cache"] == "MISS", url
            assert answer.headers["Cache-Control"] == "no-cache"
    for _ in range(2):
        answer = site.get(key, Host="another.example")
        assert (answer.headers["X-Cache"], answer.headers["Cache-Control"]) == ("MISS", "no-cache")
    assert site.kept(key) or site.kept(key)
    assert site.get(key, path + "?").headers["X-Cache"] == "HIT"
    immutable = site.get(key, f"{path}?v={site.world.state(key).revision}")
    assert "immutable" in immutable.headers["Cache-Control"]
    for url in (path.replace("/16/", "/17/"), "/tiles/16/0/99999.mvt"):
        assert {site.get(key, url).headers["X-Cache"] for _ in range(2)} == {"MISS"}


def test_browsers_ask_each_time_and_need_not_load_again(site: Site) -> None:
    site.world.edit(feature(1, 1))
    site.world.build_dirty()
    key = deepest(site.world)
    first = site.get(key)
    assert first.headers["Cache-Control"] == f"max-age=0, must-revalidate, s-maxage={purging.SHARED_CACHE_S}"
    again = site.get(key, **{"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.headers["X-Cache"]) == (304, "HIT")
    site.world.edit(feature(1, 2))
    site.world.build_dirty()
    assert site.get(key, **{"If-None-Match": first.headers["ETag"]}).status_code == 200


def test_rule_5_a_cache_out_of_reach_holds_nothing_back_and_is_purged_and_announced_again_when_it_is_back(
    site: Site,
) -> None:
    site.world.edit(feature(1, 1))
    site.world.build_dirty()
    key = deepest(site.world)
    old = site.shown(key)
    assert site.kept(key)
    port = free_port()
    world = site.with_purges_at(port)
    world.edit(feature(1, 2))
    world.edit(feature(1, 3))
    before = world.announced()
    began = time.monotonic()
    results = world.build_dirty()
    assert time.monotonic() - began < patient(15)
    assert world.stack.ledger.counts().owed["purge"] == len(results) == 6
    assert {result.outcome for result in results} == {"built"}
    news = since(before, world)
    assert {(one["revision"], one.get("again")) for one in news} == {(2, None)}
    assert site.shown(key) == old  # What a purge is for.

    assert announce.sweep_purges(world.stack, min_age_ms=0) == 0
    assert site.shown(key) == old
    assert since(before, world) == news
    owed = world.stack.ledger.counts().owed["purge"]
    assert owed == len(news)

    world = site.with_purges_at(port)  # A process that does not remember that the cache was away.
    with way_to(site.cache, port):
        assert announce.sweep_purges(world.stack, min_age_ms=0) >= owed
        assert site.shown(key) == world.tile(key) != old
        again = since(before + news, world)
        assert {(one["revision"], one["again"]) for one in again} == {(2, True)}
        assert {(one["z"], one["x"], one["y"]) for one in again} == {(one["z"], one["x"], one["y"]) for one in news}
        # The second purge is due when the first is old enough, and a busy machine may miss one.
        until(
            lambda: (time.sleep(0.4), sweep(world.stack), world.stack.ledger.counts().owed.keys() == {"catalog"})[-1],
            why="both purges are paid",
        )
    assert since(before + news + again, world) == []
    world.close()


def test_the_second_purge_takes_what_was_fetched_before_the_commit_and_came_in_after_the_first(site: Site) -> None:
    site.world.edit(feature(1, 1))
    site.world.build_dirty()
    key = deepest(site.world)
    old = site.world.tile(key)
    site.origin.holding = True
    fetch = threading.Thread(target=site.shown, args=(key,))
    fetch.start()
    until(lambda: site.origin.waiting == 1)
    site.world.edit(feature(1, 2))
    site.world.build_dirty()
    site.origin.holding = False
    fetch.join()
    assert site.shown(key) == old
    assert site.kept(key)
    sweep(site.world.stack)
    time.sleep(0.4)
    announce.sweep_purges(site.world.stack, min_age_ms=0)
    assert site.shown(key) == site.world.tile(key) != old
    assert not any(one.get("again") for one in site.world.announced())
    assert site.world.stack.ledger.owed("purge_again") == []


@pytest.mark.parametrize("where", ["purge", "announce"])
def test_rule_5_of_a_builder_killed_after_the_commit_caches_and_clients_are_told_in_that_order(
    site: Site, where: str
) -> None:
    site.world.edit(feature(1, 1))
    site.world.build_dirty()
    key = deepest(site.world)
    site.shown(key)
    before = site.world.announced()
    site.world.edit(feature(1, 2))

    def dies(name: str, _: str) -> None:
        if name == where:
            raise Crash

    with pytest.raises(Crash):
        site.world.build_dirty(step=dies)
    assert since(before, site.world) == []
    announce.sweep_announcements(site.world.stack, min_age_ms=0)
    assert site.shown(key) == site.world.tile(key)
    assert {one["revision"] for one in since(before, site.world)} == {2}
    assert site.world.stack.ledger.owed("purge") == site.world.stack.ledger.owed("announce") == []


def test_without_caches_a_commit_owes_no_purge_and_browsers_and_caches_ask_each_time(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    world.edit(feature(1, 1))
    world.build_dirty()
    assert world.stack.purge is None
    assert world.stack.ledger.counts().owed.keys() == {"catalog"}
    world.close()
    tiles = TileWorld(tmp_path / "tiles")
    tiles.publish(TILE, b"\x1a\x00")
    with tiles.served() as client:
        assert client.get(purging.tile_path(TILE)).headers["Cache-Control"] == "no-cache"
    tiles.close()


def test_purges_that_no_cache_can_need_any_more_are_given_up(tmp_path: Path) -> None:
    world = World(tmp_path / "home", purge_urls=f"http://127.0.0.1:{free_port()}", purge_again_s=0)
    world.edit(feature(1, 1))
    world.build_dirty()
    rows = world.stack.ledger.owed("purge")
    assert rows
    late = max(row.built_at_ms for row in rows) + purging.MOOT_MS + 1
    assert purging.purge(world.stack, rows, now_ms=late) == rows
    assert purging.purge(world.stack, rows, now_ms=late - 60_000) == []
    world.close()


def test_an_announcement_made_again_reaches_clients_that_know_its_revision_and_no_others(tmp_path: Path) -> None:
    world = TileWorld(tmp_path / "home")
    first = world.publish(TILE, b"\x1a\x00")
    value = {"z": TILE.z, "x": TILE.x, "y": TILE.y, "hash": "a" * 64, "outcome": "built", "bytes": 2}
    stamps = {"built_at_ms": 1, "data_time_ms": 1}

    def tell(revision: int, **more: Any) -> None:
        from geo_assets.events import topics
        from resources.event_log.protocol import NewRecord

        told = json.dumps({**value, **stamps, "revision": revision, **more}).encode()
        world.log.append([NewRecord(topics.TILE_UPDATED, TILE.key, told)])

    with world.served() as client:
        start = Stream(client).started()
        point = start.id
        second = world.publish(TILE, b"\x1a\x01\x00")
        (change,) = start.changes(1)
        assert (change.body["revision"], "again" in change.body) == (second, False)
        tell(second)
        tell(first, again=True)
        assert start.silent()
        tell(second, again=True)
        (change,) = start.changes(1)
        assert (change.body["revision"], change.body["again"]) == (second, True)
        (missed,) = Stream(client, point).changes(1)
        assert (missed.body["revision"], missed.body["again"]) == (second, True)
    world.close()


def since(before: list[dict[str, Any]], world: World) -> list[dict[str, Any]]:
    """Announcements that were not there before."""
    return [one for one in world.announced() if one not in before]
