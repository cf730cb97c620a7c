from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from geo_assets.tiles.tile import Tile
from geo_assets_tests.services.test_map_page import LAYERS, MIDDLE, Page, publish
from geo_assets_tests.services.tile_world import TileWorld

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TileWorld]:
    world = TileWorld(tmp_path / "home", LAYERS)
    yield world
    world.close()


@pytest.fixture
def client(world: TileWorld) -> Iterator[httpx.Client]:
    with world.served() as client:
        yield client


@pytest.fixture
def page(browser: Any, client: httpx.Client) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 900, "height": 900})
    page = Page(context.new_page())
    west, south, east, north = MIDDLE.bounds
    page.page.goto(f"{client.base_url}/#13.2/{(south + north) / 2:.5f}/{(west + east) / 2:.5f}")
    page.until("() => Boolean(window.geoAssets?.map.loaded())")
    yield page
    assert page.faults == []
    context.close()


def switch(page: Page, name: str) -> None:
    page.page.locator(f"label:has(#{name}-toggle)").click()


def drawn(page: Page, layer: str, name: str) -> list[Any]:
    """A property of what a layer shows in the middle of the map."""
    return page.page.evaluate(
        f"""() => {{
          const at = geoAssets.map.project(geoAssets.map.getCenter());
          return geoAssets.map.queryRenderedFeatures(at, {{ layers: ['{layer}'] }}).map(f => f.properties.{name});
        }}"""
    )


def test_heat_is_shown_in_hexagons_with_a_legend_of_numbers_and_follows_what_is_built(
    page: Page, world: TileWorld, client: httpx.Client
) -> None:
    switch(page, "heat")
    page.until("() => document.getElementById('heat-empty').textContent === 'Nothing was built in the last hour.'")
    for name in ("first", "second", "third"):
        publish(world, MIDDLE, name)
    page.until(
        "() => geoAssets.map.queryRenderedFeatures({ layers: ['heat-fill'] }).some(f => f.properties.tiles === 3)"
    )
    assert drawn(page, "heat-fill", "tiles") == [3]
    rows = page.page.locator("#heat-legend li").all_inner_texts()
    assert [row.replace("\n", " ") for row in rows] == ["1 tile 0 cells", "2–3 tiles 1 cell"]
    page.page.mouse.move(450, 450)
    page.page.wait_for_selector(".hover:has-text('3 tiles built')")
    page.page.select_option("#heat-minutes", "5")
    page.until("() => document.getElementById('heat-empty').textContent === 'Built in the last 5 min.'")
    switch(page, "heat")
    page.until("() => !geoAssets.map.queryRenderedFeatures({ layers: ['heat-fill'] }).length")
    for hidden in ("#heat-legend", "#heat-empty", "#heat-minutes", ".hover"):
        assert page.page.is_hidden(hidden)
    # What is switched off asks for nothing.
    asked = _asked(client)
    page.page.wait_for_timeout(3_500)
    assert _asked(client) == asked


def _asked(client: httpx.Client) -> list[str]:
    return [line for line in client.get("/metrics").text.splitlines() if "heat.geojson" in line and "total" in line]


def test_what_waits_is_shown_in_boxes_by_age_until_it_is_built(page: Page, world: TileWorld) -> None:
    switch(page, "waiting")
    page.until("() => document.getElementById('waiting-empty').textContent.startsWith('Nothing waits')")
    world.ledger.mark([MIDDLE.key, MIDDLE.children()[0].key, MIDDLE.ancestor(13).key, Tile(3, 4, 2).key])
    page.until("() => geoAssets.map.queryRenderedFeatures({ layers: ['waiting-fill'] }).length >= 2")
    assert drawn(page, "waiting-fill", "tiles") == [2, 1], "the smaller box lies on top"
    assert page.page.inner_text("#waiting-count") == "4 tiles"
    assert "Around the view 1 wider tile waits" in page.page.inner_text("#waiting-empty")
    rows = [row.replace("\n", " ") for row in page.page.locator("#waiting-legend li").all_inner_texts()]
    assert [row.rpartition(" ")[0] for row in rows] == ["under 10 s", "10 s to 1 min", "1 to 15 min", "over 15 min"]
    assert sum(int(row.rpartition(" ")[2]) for row in rows) == 3
    page.page.mouse.move(450, 450)
    page.page.wait_for_selector(".hover:has-text('2 tiles wait, the oldest')")
    for tile in (MIDDLE, MIDDLE.children()[0], MIDDLE.ancestor(13), Tile(3, 4, 2)):
        publish(world, tile, "built")
    page.until("() => document.getElementById('waiting-count').textContent === '0 tiles'")
    page.until("() => !geoAssets.map.queryRenderedFeatures({ layers: ['waiting-fill'] }).length")


def test_both_fit_on_a_phone(browser: Any, world: TileWorld, client: httpx.Client) -> None:
    publish(world, MIDDLE, "first")
    world.ledger.mark([MIDDLE.key])
    context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True)
    page = Page(context.new_page())
    west, south, east, north = MIDDLE.bounds
    page.page.goto(f"{client.base_url}/#13.2/{(south + north) / 2:.5f}/{(west + east) / 2:.5f}")
    page.until("() => Boolean(window.geoAssets?.map.loaded())")
    page.page.click("#fold")
    for name in ("waiting", "heat"):
        switch(page, name)
        page.page.wait_for_selector(f"#{name}-legend:visible")
    assert page.page.evaluate("() => document.documentElement.scrollWidth") <= 360
    box = page.page.locator("#panel").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 360
    page.page.click("#fold")
    page.until("() => geoAssets.map.queryRenderedFeatures({ layers: ['heat-fill'] }).length > 0")
    page.page.touchscreen.tap(180, 370)
    # The mouse rests on the button that it pressed: what a finger touched stays told.
    told = [f".hover:has-text('{said}')" for said in ("1 tile built", "1 tile waits")]
    for one in told:
        page.page.wait_for_selector(one)
    page.page.wait_for_timeout(500)
    for one in told:
        assert page.page.is_visible(one)
    page.page.mouse.move(20, 700)
    page.until("() => !document.querySelector('.hover')")
    assert page.faults == []
    context.close()
