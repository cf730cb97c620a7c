from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import shapely
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from geo_assets.events import topics
from geo_assets.events.models import FenceEvent
from geo_assets.services.fence_keeper import FenceKeeper
from geo_assets.services.fences import FenceBook
from geo_assets.services.routing import options_of, route
from geo_assets.services.tileserver.static import StaticFiles
from geo_assets.stack import Stack
from geo_assets.tiles.encode import TileFeatures, encode_tiles
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import tile_hash
from geo_assets_tests.geofence_world import position, post_fences
from geo_assets_tests.resources.contract_event_log import read_all
from geo_assets_tests.services.running import running
from geo_assets_tests.services.tile_world import TileWorld
from geo_assets_tests.waiting import patient
from resources.event_log.protocol import NewRecord

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

LAYERS = LayerSet((Layer("landuse"), Layer("buildings"), Layer("manholes")), max_zoom=16, attribution="© the mappers")
MIDDLE = Tile(15, 18654, 9484)
AROUND = [Tile(15, MIDDLE.x + dx, MIDDLE.y + dy) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TileWorld]:
    world = TileWorld(tmp_path / "home", LAYERS)
    for tile in AROUND:
        publish(world, tile, "first")
    yield world
    world.close()


@pytest.fixture
def client(world: TileWorld) -> Iterator[httpx.Client]:
    with world.served() as client:
        yield client


@pytest.fixture
def open_page(browser: Any, client: httpx.Client) -> Iterator[Callable[..., Page]]:
    contexts: list[Any] = []

    def opened(*, zoom: float = 15.2, beside: Page | None = None, tile: Tile = MIDDLE) -> Page:
        if beside is None:
            contexts.append(browser.new_context(viewport={"width": 900, "height": 700}))
        page = Page((beside.page.context if beside else contexts[-1]).new_page())
        west, south, east, north = tile.bounds
        page.page.goto(f"{client.base_url}/#{zoom}/{(south + north) / 2:.5f}/{(west + east) / 2:.5f}")
        page.until("() => Boolean(window.geoAssets?.map.loaded() && window.geoAssets.map.areTilesLoaded())")
        page.until("() => document.getElementById('badge').dataset.live === 'open'")
        page.tiles.clear()
        return page

    yield opened
    for context in contexts:
        context.close()


class Page:
    """A browser's page, what it asked for and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.tiles: list[str] = []
        self.faults: list[str] = []
        self.loads = 0
        page.on("request", self._asked)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.faults.append(message.text))
        page.on("load", self._loaded)

    def _asked(self, request: Any) -> None:
        if "/tiles/" in request.url:
            self.tiles.append(request.url.partition("/tiles/")[2].removesuffix(".mvt"))

    def _loaded(self, _: Any) -> None:
        self.loads += 1

    def until(self, script: str, seconds: float = 60) -> Any:
        """Poll from outside: the page's policy forbids what playwright's own waiting evaluates."""
        deadline = time.monotonic() + patient(seconds)
        while not (result := self.page.evaluate(script)):
            assert time.monotonic() < deadline, f"{script} did not come true; {self.faults}"
            self.page.wait_for_timeout(50)
        return result

    def refreshed(self, number: int) -> None:
        self.until(f"() => Number(document.getElementById('refreshed').textContent) >= {number}")

    def names(self) -> set[str]:
        """Names of the features that are drawn."""
        script = (
            "() => geoAssets.map.queryRenderedFeatures().filter(f => f.source === 'tiles').map(f => f.properties.name)"
        )
        return set(self.page.evaluate(script))

    def shows(self, name: str) -> None:
        self.until(f"() => geoAssets.map.queryRenderedFeatures().some(f => f.properties.name === '{name}')")

    def settled(self) -> None:
        self.page.wait_for_timeout(700)
        self.until("() => geoAssets.map.areTilesLoaded()")


def bytes_of(tile: Tile, name: str) -> bytes:
    """A tile with a square building and a point of an unknown layer in its middle."""
    west, south, east, north = tile.bounds
    width, height = (east - west) / 4, (north - south) / 4
    shapes = np.array(
        [
            shapely.box(west + width, south + height, east - width, north - height),
            shapely.Point((west + east) / 2, (south + north) / 2),
        ],
        dtype=object,
    )
    label = json.dumps({"name": f"{tile.path} {name}"})
    pairs = np.array([0, 0]), np.array([0, 1])
    features = TileFeatures(
        ["t", "t"], ["1", '"m-1"'], ["buildings", "manholes"], shapes, [label, label], [tile], pairs[0], pairs[1]
    )
    (encoded,) = encode_tiles(features, LAYERS)
    return encoded.data


def publish(world: TileWorld, tile: Tile, name: str) -> None:
    world.publish(tile, bytes_of(tile, name))


def test_the_page_draws_the_map_under_its_own_policy(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    assert f"{MIDDLE.path} first" in page.names()
    assert page.page.evaluate("() => geoAssets.map.queryRenderedFeatures().some(f => f.sourceLayer === 'manholes')")
    assert page.faults == []
    assert page.page.inner_text(".maplibregl-ctrl-attrib") == "© the mappers"
    shot = tmp_path / "map.png"
    page.page.screenshot(path=shot)
    assert shot.stat().st_size > 10_000


def test_a_changed_tile_is_loaded_again_alone_and_without_a_reload(
    open_page: Callable[..., Page], world: TileWorld
) -> None:
    page = open_page()
    publish(world, MIDDLE, "second")
    page.refreshed(1)
    page.shows(f"{MIDDLE.path} second")
    page.settled()
    assert page.tiles == [MIDDLE.path]
    assert page.loads == 1
    assert f"{MIDDLE.path} first" not in page.names()
    change = page.page.inner_text("#changes li")
    assert MIDDLE.path in change
    assert "r2" in change
    # Of a zoom that is not shown, or out of view, nothing is loaded.
    publish(world, MIDDLE.ancestor(9), "elsewhere")
    publish(world, Tile(15, 5, 5), "elsewhere")
    page.until("() => document.querySelectorAll('#changes li').length === 3")
    page.settled()
    assert page.tiles == [MIDDLE.path]
    assert page.faults == []


def test_a_tile_told_again_after_a_late_purge_is_loaded_again(open_page: Callable[..., Page], world: TileWorld) -> None:
    page = open_page()
    url = f"**/tiles/{MIDDLE.path}.mvt"
    old = bytes_of(MIDDLE, "first")
    page.page.route(url, lambda route: route.fulfill(status=200, body=old, headers={"ETag": f'W/"{tile_hash(old)}"'}))
    publish(world, MIDDLE, "second")
    page.until("() => document.querySelectorAll('#changes li').length === 1")
    page.settled()
    assert f"{MIDDLE.path} first" in page.names()  # From a cache that nobody could purge.
    page.page.unroute(url)
    state = world.ledger.read([MIDDLE.key])[MIDDLE.key]
    told = {"z": MIDDLE.z, "x": MIDDLE.x, "y": MIDDLE.y, "hash": state.content_hash, "revision": state.revision}
    world.log.append([NewRecord(topics.TILE_UPDATED, MIDDLE.key, json.dumps({**told, "again": True}).encode())])
    page.shows(f"{MIDDLE.path} second")
    assert set(page.tiles) == {MIDDLE.path}
    assert page.loads == 1
    assert page.faults == []


def test_an_emptied_tile_vanishes_and_comes_back(open_page: Callable[..., Page], world: TileWorld) -> None:
    page = open_page()
    world.publish(MIDDLE, None)
    page.refreshed(1)
    page.until(f"() => !geoAssets.map.queryRenderedFeatures().some(f => f.properties.name === '{MIDDLE.path} first')")
    publish(world, MIDDLE, "third")
    page.refreshed(2)
    page.shows(f"{MIDDLE.path} third")
    assert page.faults == []


def test_a_tile_that_changed_out_of_view_is_fresh_when_it_comes_back(
    open_page: Callable[..., Page], world: TileWorld
) -> None:
    page = open_page(zoom=16.0 - 0.01)
    page.page.evaluate("() => geoAssets.map.jumpTo({center: [25.2, 60.3]})")
    page.settled()
    publish(world, MIDDLE, "second")
    page.until("() => document.querySelectorAll('#changes li').length === 1")
    page.settled()
    west, south, east, north = MIDDLE.bounds
    page.page.evaluate(f"() => geoAssets.map.jumpTo({{center: [{(west + east) / 2}, {(south + north) / 2}]}})")
    page.shows(f"{MIDDLE.path} second")
    assert page.faults == []


def test_beyond_the_last_zoom_a_change_shows_in_what_is_drawn_larger(
    open_page: Callable[..., Page], world: TileWorld
) -> None:
    last = MIDDLE.children()[0]
    publish(world, last, "first")
    page = open_page(zoom=18.3, tile=last)
    page.shows(f"{last.path} first")
    publish(world, last, "second")
    page.shows(f"{last.path} second")
    page.settled()
    assert page.tiles == [last.path]
    assert page.faults == []


def test_all_tabs_share_one_stream_and_the_next_takes_over(
    open_page: Callable[..., Page], world: TileWorld, client: httpx.Client
) -> None:
    first = open_page()
    second = open_page(beside=first)
    assert "tileserver_sse_clients 1.0" in client.get("/metrics").text
    publish(world, MIDDLE, "second")
    for page in (first, second):
        page.shows(f"{MIDDLE.path} second")
    first.page.close()
    publish(world, MIDDLE, "third")
    second.shows(f"{MIDDLE.path} third")
    assert "tileserver_sse_clients 1.0" in client.get("/metrics").text


def test_a_reset_loads_everything_again_and_nothing_twice(
    open_page: Callable[..., Page], world: TileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_assets.services.tileserver.stream.EPOCH_CHECK_S", 0.2)
    page = open_page()
    world.publish(MIDDLE, bytes_of(MIDDLE, "untold"), tell=False)
    world.ledger.set_value("sse-epoch", "restored")
    page.shows(f"{MIDDLE.path} untold")
    page.settled()
    assert sorted(page.tiles) == sorted(set(page.tiles))
    assert page.loads == 1


def test_the_coverage_and_a_feature_explain_themselves(open_page: Callable[..., Page], world: TileWorld) -> None:
    page = open_page()
    page.page.mouse.click(450, 350)
    popup = page.page.inner_text(".popup")
    assert f"{MIDDLE.path} first" in popup
    assert "m-1" in popup
    link = page.page.get_attribute(".popup a", "href")
    assert link is not None
    assert link.startswith(world.settings.dagster_url)
    assert MIDDLE.key.replace(":", "%3A") in link
    world.ledger.mark([MIDDLE.key])
    page.page.click("label:has(#coverage-toggle)")
    page.until("() => !document.getElementById('legend').hidden")
    legend = page.page.inner_text("#legend").split()
    assert legend[legend.index("waiting") + 1] == "1"
    assert page.faults == []


def test_without_the_map_library_the_page_says_what_to_run(
    browser: Any, world: TileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StaticFiles, "has_vendor", property(lambda _: False))
    with world.served() as client:
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.wait_for_selector("#notice:visible")
        assert "npm ci --prefix geo_assets/services/web" in page.inner_text("#notice")
        page.close()


def test_a_map_of_one_feature_as_wide_as_the_world_is_not_called_empty_and_an_empty_one_only_until_its_first_tile(
    browser: Any, tmp_path: Path
) -> None:
    world = TileWorld(tmp_path / "wide", LAYERS)
    with world.served(counts_keep_s=0) as client:
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.wait_for_selector("#notice:visible")
        assert "no tiles yet" in page.inner_text("#notice")
        page.wait_for_selector("#badge[data-live=open]")
        publish(world, Tile(0, 0, 0), "first")
        page.wait_for_selector("#notice", state="hidden")
        page.reload()
        page.wait_for_selector("#badge[data-live=open]")
        assert page.is_hidden("#notice")
        page.close()
    world.close()


def test_live_tiles_serves_a_map_of_another_origin(browser: Any, world: TileWorld, client: httpx.Client) -> None:
    html = f"""<!doctype html><script type="module">
      import {{ liveTiles }} from '{client.base_url}/live-tiles.js';
      const asked = window.asked = [];
      const map = {{ on() {{}}, off() {{}}, getZoom: () => 15.5, getSource: () => ({{ maxzoom: 16 }}),
        getBounds: () => ({{ getWest: () => 24, getEast: () => 26, getSouth: () => 60, getNorth: () => 61 }}),
        refreshTiles: (source, tiles) => asked.push([source, tiles]) }};
      const onStatus = (on) => {{ window.open_ = on; }};
      window.live = liveTiles(map, {{ source: 'mine', url: '{client.base_url}/events', onStatus }});
    </script>"""
    page = browser.new_page()
    # Another port is another origin; a browser lets a page of a public name reach no loopback address.
    with running(Starlette(routes=[Route("/", lambda _: HTMLResponse(html))])) as other:
        page.goto(other)
    page.wait_for_function("window.open_ === true")
    publish(world, MIDDLE, "second")
    world.publish(MIDDLE, bytes_of(MIDDLE, "second"))  # another revision, the same bytes
    page.wait_for_function("window.asked.length > 0")
    page.wait_for_timeout(300)
    asked = page.evaluate("window.asked")
    assert [[source, [(t["z"], t["x"], t["y"]) for t in tiles]] for source, tiles in asked] == [
        ["mine", [(MIDDLE.z, MIDDLE.x, MIDDLE.y)]]
    ]
    page.evaluate("window.live.close()")
    page.close()


def click(page: Page, *points: tuple[int, int]) -> None:
    """Click places of the map one after the other, slowly enough to be no double click."""
    for x, y in points:
        page.page.mouse.move(x, y)
        page.page.wait_for_timeout(60)
        page.page.mouse.click(x, y)
        page.page.wait_for_timeout(320)


@contextmanager
def routed(world: TileWorld) -> Iterator[None]:
    """Positions are routed meanwhile, in a thread."""
    stop = threading.Event()
    options = replace(options_of(world.settings), idle_s=None)

    def work() -> None:
        with Stack(world.settings) as stack:
            route(stack, options, stop=stop)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(patient(30))


def test_a_fence_drawn_by_mouse_is_crossed_by_a_device_and_the_trigger_is_listed(
    open_page: Callable[..., Page], world: TileWorld
) -> None:
    page = open_page()
    page.until("() => !document.getElementById('fences-empty').hidden")
    assert page.page.inner_text("#fences-empty") == "No fences yet: draw one."
    with routed(world):
        page.page.click("[data-draw=area]")
        page.until("() => document.getElementById('fence-title').textContent === 'New area'")
        click(page, (500, 250), (700, 250), (700, 450), (500, 450), (500, 250))
        page.until("() => !document.getElementById('fence-save').disabled")
        page.page.fill("[name=name]", "Yard")
        page.page.fill("[name=priority]", "7")
        page.page.click("#fence-save")
        page.until("() => document.getElementById('draw-note').textContent === 'In force.'")
        assert page.page.inner_text("#fences-count") == "1"
        (record,) = read_all(world.log, topics.FENCES)
        saved = json.loads(record.value or b"")
        assert (saved["name"], saved["priority"], record.headers["source"]) == ("Yard", 7, "demo")
        outside, inside = (page.page.evaluate(f"() => geoAssets.map.unproject([{x}, 350])") for x in (420, 600))
        start = time.time_ns() // 1_000_000
        for step, (place, kind) in enumerate(((outside, "outside"), (inside, "inside"), (outside, "outside"))):
            world.log.append([position("bus-18", start + step * 1000, place["lng"], place["lat"])])
            page.until(f"() => document.getElementById('devices-{kind}').textContent === '1'")
        page.until("() => document.querySelectorAll('#triggers li').length === 2")
    rows = [row.split("\n") for row in page.page.locator("#triggers li").all_inner_texts()]
    assert [[part for part in row if part][:3] for row in rows] == [
        ["EXIT", "Yard", "bus-18"],
        ["ENTER", "Yard", "bus-18"],
    ]
    page.page.evaluate("() => geoAssets.map.jumpTo({zoom: 13})")
    page.page.click("#triggers li button")
    page.until("() => geoAssets.map.getZoom() > 14")
    assert page.faults == []


def test_a_border_that_crosses_itself_is_refused_where_it_does_and_can_be_put_right(
    open_page: Callable[..., Page], world: TileWorld
) -> None:
    page = open_page()
    page.page.click("[data-draw=area]")
    page.until("() => document.getElementById('fence-title').textContent === 'New area'")
    click(page, (500, 250), (700, 450), (700, 250), (500, 450), (500, 250))
    page.until("() => !document.getElementById('fence-save').disabled")
    page.page.click("#fence-save")
    page.until("() => !document.getElementById('fence-fault').hidden")
    assert page.page.inner_text("#fence-fault") == "geometry the border crosses itself, where it is marked"
    assert read_all(world.log, topics.FENCES) == []
    page.page.fill("[name=priority]", "12")
    page.page.click("#fence-save")
    page.until("() => document.querySelector('[name=priority]').getAttribute('aria-invalid') === 'true'")
    assert "limit: <= 9" in page.page.inner_text("#fence-fault")
    page.page.click("#fence-cancel")
    assert page.page.is_hidden("#fence-form")
    assert [fault for fault in page.faults if "status of 4" not in fault] == []


def test_a_circle_and_a_corridor_are_drawn_and_a_circle_is_changed_and_deleted(
    open_page: Callable[..., Page], world: TileWorld
) -> None:
    page = open_page()
    keeper = FenceKeeper(lambda: Stack(world.settings))
    keeper.start()
    try:
        page.page.click("[data-draw=circle]")
        page.until("() => document.getElementById('fence-title').textContent === 'New circle'")
        click(page, (600, 300), (650, 300))
        page.until("() => Number(document.querySelector('[name=radius_m]').value) > 0")
        page.page.fill("[name=radius_m]", "120")
        page.page.fill("[name=name]", "Round")
        page.page.click("#fence-save")
        page.until("() => document.getElementById('draw-note').textContent === 'In force.'")
        page.page.click("[data-draw=corridor]")
        click(page, (450, 550), (600, 520), (750, 560), (750, 560))
        page.until("() => !document.getElementById('fence-save').disabled")
        page.page.fill("[name=width_m]", "30")
        page.page.click("#fence-save")
        page.until("() => document.getElementById('draw-note').textContent === 'In force.'")
        said = [json.loads(record.value or b"") for record in read_all(world.log, topics.FENCES)]
        circle, corridor = sorted(said, key=lambda event: event["geometry"]["type"], reverse=True)
        assert (circle["geometry"]["type"], circle["radius_m"]) == ("Point", 120)
        assert (corridor["geometry"]["type"], corridor["width_m"]) == ("LineString", 30)
        page.page.mouse.click(600, 300)
        page.page.click(".popup button")
        assert page.page.input_value("[name=radius_m]") == "120"
        page.page.fill("[name=name]", "Rounder")
        page.page.click("#fence-save")
        page.until("() => document.getElementById('draw-note').textContent === 'In force.'")
        changed = max(
            (json.loads(r.value or b"") for r in read_all(world.log, topics.FENCES)), key=lambda e: e.get("name", "")
        )
        assert (changed["id"], changed["name"], changed["radius_m"]) == (circle["id"], "Rounder", 120)
        assert changed["geometry"]["coordinates"] == pytest.approx(circle["geometry"]["coordinates"], abs=1e-7)
        page.page.mouse.click(600, 300)
        page.page.click(".popup button")
        page.page.click("#fence-delete")
        page.until("() => document.getElementById('draw-note').textContent === 'Deleted.'")
        assert page.page.inner_text("#fences-count") == "1"
        assert page.faults == []
    finally:
        keeper.stop()


def test_a_layer_that_holds_fences_is_drawn_once_as_it_judges(browser: Any, tmp_path: Path) -> None:
    layers = LayerSet((Layer("buildings"), Layer("zones", fences=True)), max_zoom=16)
    world = TileWorld(tmp_path / "zones", layers)
    west, south, east, north = MIDDLE.bounds
    square = shapely.box(west + (east - west) / 4, south + (north - south) / 4, (west + east) / 2, (south + north) / 2)
    one = np.array([0])
    (encoded,) = encode_tiles(
        TileFeatures(["demo"], ["1"], ["zones"], np.array([square], object), ['{"name": "Yard"}'], [MIDDLE], one, one),
        layers,
    )
    world.publish(MIDDLE, encoded.data)
    shape = json.loads(shapely.to_geojson(square))
    with Stack(world.settings) as stack:
        post_fences(stack, [FenceEvent(type="Feature", id="yard", geometry=shape, name="Yard")])
        FenceBook(stack).fold()
    with world.served() as client:
        # Whoever has the tiles alone sees it there.
        assert "zones" in {layer.get("source-layer") for layer in client.get("/style.json").json()["layers"]}
        page = Page(browser.new_page())
        page.page.goto(f"{client.base_url}/#15.2/{(south + north) / 2:.5f}/{(west + east) / 2:.5f}")
        page.until("() => Boolean(window.geoAssets?.map.loaded() && window.geoAssets.map.areTilesLoaded())")
        drawn = "geoAssets.map.queryRenderedFeatures().map(f => f.sourceLayer ?? f.source)"
        page.until(f"() => {drawn}.includes('geofences')")
        assert set(page.page.evaluate(f"() => {drawn}")) == {"geofences"}
        assert page.tiles
        page.page.close()
    world.close()


def test_rule_12_a_server_that_shows_no_devices_shows_fences_alone(browser: Any, tmp_path: Path) -> None:
    world = TileWorld(tmp_path / "public", LAYERS, device_view=False, draw_fences=False)
    with world.served() as client:
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.wait_for_selector("#devices-off:visible")
        for hidden in ("#devices-layer", "#triggers-layer", "#triggers-tab", "#draw-box"):
            assert page.is_hidden(hidden)
        page.wait_for_selector("#fences-empty:visible")
        page.close()
    world.close()
