from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from geo_assets.events import topics
from geo_assets.events.sources import Source
from geo_assets.services import fences as folding
from geo_assets.services.fence_keeper import FenceKeeper, clean_up
from geo_assets.services.tileserver import create_app, drawing
from geo_assets.stack import Stack
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets_tests.geofence_world import fence, post_fences
from geo_assets_tests.resources.contract_event_log import read_all
from geo_assets_tests.services.running import running
from geo_assets_tests.services.tile_world import TileWorld
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient, until

RING = [[24.9, 60.1], [24.91, 60.1], [24.91, 60.11], [24.9, 60.11], [24.9, 60.1]]
AREA = {"type": "Polygon", "coordinates": [RING]}
FENCE: dict[str, Any] = {"type": "Feature", "id": "yard", "geometry": AREA, "name": "Yard", "dwell_s": 30}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TileWorld, httpx.Client]]:
    """One server for many hostile bodies: its checking process starts once."""
    world = TileWorld(tmp_path_factory.mktemp("drawing") / "home")
    with world.served() as client:
        yield world, client
    world.close()


def save(client: httpx.Client, body: object, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Post as the page does."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    own = str(client.base_url).rstrip("/")
    return client.post(
        "/fences", content=content, headers={"Content-Type": "application/json", "Origin": own, **(headers or {})}
    )


@pytest.mark.parametrize("stack_name", STACKS)
def test_a_drawn_fence_is_a_record_of_its_source_and_stands_after_the_fold(stack_name: str, tmp_path: Path) -> None:
    with changes_of(stack_name) as changes:
        world = TileWorld(tmp_path / "home", draw_source="mappers", **changes)
        with world.served() as client, Stack(world.settings) as stack:
            answer = save(client, FENCE)
            assert answer.status_code == 202
            saved = answer.json()
            assert saved["key"] == 'mappers:"yard"'
            (record,) = read_all(world.log, topics.FENCES)
            assert record.key == 'mappers:"yard"'
            assert record.headers[topics.HEADER_SOURCE] == "mappers"
            assert record.headers[topics.HEADER_EVENT_ID] == saved["event_id"]
            assert record.headers[topics.HEADER_RECEIVED_MS] == str(saved["received_ms"])
            assert json.loads(record.value or b"") == FENCE
            assert folding.FenceBook(stack).fold().fences == 1
            (shown,) = client.get("/fences.geojson").json()["features"]
            assert (shown["properties"]["name"], shown["properties"]["editable"]) == ("Yard", True)
            assert save(client, {**FENCE, "name": "Court"}).status_code == 202
            folding.FenceBook(stack).fold()
            (shown,) = client.get("/fences.geojson").json()["features"]
            assert shown["properties"]["name"] == "Court"
            assert save(client, {"type": "Feature", "id": "yard", "action": "delete"}).status_code == 202
            folding.FenceBook(stack).fold()
            assert client.get("/fences.geojson").json()["features"] == []
            assert save(client, {"type": "Feature", "id": "yard", "action": "delete"}).status_code == 404
        world.close()


BAD: list[tuple[object, int, str, str | None]] = [
    (b"", 400, "$", None),
    (b"{", 400, "$", None),
    (b'{"a":1,"a":2}', 400, "$", None),
    (b"[" * 100_000, 400, "$", None),
    ([], 400, "$", "1..10000"),
    ([FENCE, FENCE], 400, "$", None),
    ({**FENCE, "id": None}, 400, "id", None),
    ({**FENCE, "id": True}, 400, "id", None),
    ({**FENCE, "priority": 12}, 400, "priority", "<= 9"),
    ({**FENCE, "dwell_s": -1}, 400, "dwell_s", "> 0.0"),
    ({**FENCE, "hysteresis_m": "wide"}, 400, "hysteresis_m", None),
    ({**FENCE, "name": "a\u0000b"}, 400, "name", None),
    ({**FENCE, "source": "other"}, 403, "source", "demo"),
    ({**FENCE, "geometry": None}, 400, "geometry", None),
    ({**FENCE, "geometry": {"type": "Polygon", "coordinates": [[RING[0], RING[2], RING[1], RING[3], RING[0]]]}},
     422, "geometry", None),
    ({**FENCE, "geometry": {"type": "Polygon", "coordinates": [RING[:2]]}}, 422, "geometry", None),
    ({**FENCE, "geometry": {"type": "Point", "coordinates": [24.9, 60.1]}}, 422, "radius_m", "> 0"),
    ({**FENCE, "geometry": {"type": "Point", "coordinates": [24.9, 99.0]}, "radius_m": 5}, 422, "geometry", None),
    ({**FENCE, "geometry": {"type": "LineString", "coordinates": RING[:2]}}, 422, "width_m", "> 0"),
    ({**FENCE, "radius_m": 5}, 422, "radius_m", "point or line"),
    ({**FENCE, "schedule": {"zone": "Nowhere/Else", "windows": ["Mo 08:00-09:00"]}}, 422, "schedule.zone", None),
    ({**FENCE, "properties": {"priority": 99}}, 422, "properties.priority", "<= 9"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "field", "limit"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_fence_at_fault_is_refused_with_field_and_limit_and_nothing_is_written(
    served: tuple[TileWorld, httpx.Client], body: object, status: int, field: str, limit: str | None
) -> None:
    world, client = served
    before = sum(extent.end for extent in world.log.extents(topics.FENCES).values())
    answer = save(client, body)
    document = answer.json()
    assert (answer.status_code, document["field"]) == (status, field), document
    assert answer.headers["content-type"] == "application/problem+json"
    assert document["detail"]
    if limit is not None:
        assert str(document["limit"]) == limit
    assert sum(extent.end for extent in world.log.extents(topics.FENCES).values()) == before


@pytest.mark.parametrize("more", ["/", "/page", "?a=b", "#top", ":1", " http://elsewhere.example"])
def test_an_origin_is_a_scheme_and_a_host_and_nothing_more(served: tuple[TileWorld, httpx.Client], more: str) -> None:
    own = str(served[1].base_url).rstrip("/")
    assert save(served[1], FENCE, {"Origin": own}).status_code == 202
    for origin in (own + more, own.replace("//", "//user@")):
        answers = save(served[1], FENCE, {"Origin": origin}), served[1].get("/live", headers={"Origin": origin})
        assert [(answer.status_code, answer.json()["field"]) for answer in answers] == [(403, "Origin")] * 2, origin


@pytest.mark.parametrize(
    ("headers", "status", "field"),
    [
        ({"Origin": "https://elsewhere.example"}, 403, "Origin"),
        ({"Origin": "null"}, 403, "Origin"),
        ({"Origin": "http://127.0.0.1:1"}, 403, "Origin"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "Sec-Fetch-Site"),
        ({"Sec-Fetch-Site": "same-site"}, 403, "Sec-Fetch-Site"),
        ({"Sec-Fetch-Site": "none"}, 403, "Sec-Fetch-Site"),
        ({"Host": "rebound.example", "Origin": "http://rebound.example"}, 403, "Host"),
        ({"Content-Type": "text/plain"}, 415, "Content-Type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
        ({"Content-Type": "application/json; charset=utf-16"}, 415, "Content-Type"),
        ({"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
    ],
)
def test_a_page_of_another_site_saves_nothing(
    served: tuple[TileWorld, httpx.Client], headers: dict[str, str], status: int, field: str
) -> None:
    answer = save(served[1], FENCE, headers)
    assert (answer.status_code, answer.json()["field"]) == (status, field)
    assert "access-control-allow-origin" not in answer.headers


def test_who_does_not_say_where_it_comes_from_saves_nothing(served: tuple[TileWorld, httpx.Client]) -> None:
    answer = served[1].post("/fences", json=FENCE)
    assert (answer.status_code, answer.json()["field"]) == (403, "Origin")
    preflight = served[1].options("/fences", headers={"Origin": "https://elsewhere.example"})
    assert "access-control-allow-methods" not in preflight.headers
    assert served[1].get("/fences").status_code == 405


def test_a_body_over_the_limit_is_refused_whatever_its_length_says(served: tuple[TileWorld, httpx.Client]) -> None:
    _, client = served
    large = json.dumps(FENCE).encode() + b" " * drawing.BODY_BYTES
    assert save(client, large).status_code == 413

    def pieces() -> Iterator[bytes]:
        yield from (b" " * 50_000 for _ in range(20))

    own = str(client.base_url).rstrip("/")
    answer = client.post("/fences", content=pieces(), headers={"Content-Type": "application/json", "Origin": own})
    assert answer.status_code == 413
    assert answer.json()["limit"] == drawing.BODY_BYTES


def test_the_public_name_is_an_origin_of_the_page(tmp_path: Path) -> None:
    world = TileWorld(tmp_path / "home", public_tiles_url="https://map.example", draw_fences=True)
    with world.served() as client:
        said = {"Host": "map.example", "Origin": "https://map.example", "Sec-Fetch-Site": "same-origin"}
        assert save(client, FENCE, said).status_code == 202
        assert save(client, FENCE, {**said, "Origin": "https://map.example.evil.example"}).status_code == 403
    world.close()


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"public_tiles_url": "https://map.example"}, False),
        ({"public_edge_url": "https://edge.example"}, False),
        ({"draw_fences": False}, False),
    ],
)
def test_fences_are_taken_on_loopback_alone_unless_said_otherwise(
    tmp_path: Path, changes: dict[str, Any], takes: bool
) -> None:
    world = TileWorld(tmp_path / "home", **changes)
    assert world.settings.takes_fences is takes
    if not takes:
        with world.served() as client:
            assert client.get("/page.json").json()["draw"] is False
            answer = save(client, FENCE)
            assert answer.status_code == 403
            assert "GEO_ASSETS_DRAW_FENCES" in answer.json()["detail"]
    world.close()


def test_without_the_geometry_library_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    world = TileWorld(tmp_path / "home")
    with world.served() as client:
        assert client.get("/page.json").json()["draw"] is False
        assert save(client, FENCE).status_code == 403
    world.close()


def test_a_fence_with_a_version_of_its_own_upstream_is_changed_there(tmp_path: Path) -> None:
    world = TileWorld(tmp_path / "home")
    with world.served() as client, Stack(world.settings) as stack:
        post_fences(stack, [fence(0, version=2**60)])
        folding.FenceBook(stack).fold()
        answer = save(client, {**FENCE, "id": "f0"})
        assert (answer.status_code, answer.json()["field"]) == (409, "version")
    world.close()


def test_a_checking_process_that_hangs_or_dies_costs_one_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TileWorld(tmp_path / "home")
    app = create_app(world.ledger, world.tiles, world.log, world.layers, world.settings)
    with running(app, on_stop=app.state.end_streams) as url, httpx.Client(base_url=url, timeout=patient(60)) as client:
        others = set(children())
        assert save(client, FENCE).status_code == 202
        checker = next(p for p in children() if p not in others)
        os.kill(checker, signal.SIGSTOP)
        monkeypatch.setattr(drawing, "CHECK_S", 0.3)
        answer = save(client, FENCE)
        assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (422, "timeout")
        monkeypatch.setattr(drawing, "CHECK_S", 30.0)
        until(lambda: checker not in children())
        assert save(client, FENCE).status_code == 202
        checker = next(p for p in children() if p not in others)
        os.kill(checker, signal.SIGKILL)
        until(lambda: save(client, FENCE).status_code == 202)
    until(lambda: set(children()) <= others)
    world.close()


def children() -> list[int]:
    """Processes that any thread of this one started, those of the first thread first."""
    found: list[int] = []
    for task in sorted(Path("/proc/self/task").iterdir(), key=lambda task: task.name != str(os.getpid())):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end once it is listed
            found += [int(p) for p in (task / "children").read_text().split()]
    return found


def test_where_the_map_has_a_layer_of_fences_a_drawn_one_is_a_feature_of_it(tmp_path: Path) -> None:
    layers = LayerSet((Layer("roads"), Layer("zones", fences=True)), max_zoom=16)
    world = TileWorld(tmp_path / "home", layers)
    app = create_app(
        world.ledger,
        world.tiles,
        world.log,
        layers,
        world.settings,
        draw_source=Source("demo", default_crs="EPSG:4326"),
    )
    with running(app, on_stop=app.state.end_streams) as url, httpx.Client(base_url=url, timeout=patient(60)) as client:
        assert client.get("/page.json").json()["fence_layers"] == ["zones"]
        saved = save(client, FENCE).json()
        (record,) = read_all(world.log, topics.RAW)
        feature = json.loads(record.value or b"")
        assert record.key == 'demo:"yard"'
        assert (feature["layer"], feature["version"]) == ("zones", saved["received_ms"])
        assert feature["properties"] == {"name": "Yard", "dwell_s": 30}
        assert read_all(world.log, topics.FENCES) == []
        with Stack(world.settings) as stack:
            post_fences(stack, [fence(0)])
            folding.FenceBook(stack).fold()
        assert save(client, {"type": "Feature", "id": "f0", "action": "delete"}).status_code == 202
        # A fence that never was a feature goes as well.
        assert [json.loads(r.value or b"").get("action") for r in read_all(world.log, topics.FENCES)][-1] == "delete"
        assert json.loads(read_all(world.log, topics.RAW)[-1].value or b"")["action"] == "delete"
    world.close()


@pytest.mark.parametrize(
    ("source", "layer"),
    [
        (None, None),
        (Source("demo"), "zones"),
        (Source("demo", layers=frozenset({"roads"})), None),
        (Source("demo", layers=frozenset({"zones"})), "zones"),
    ],
)
def test_a_drawn_fence_goes_to_a_layer_that_its_source_may_write(source: Source | None, layer: str | None) -> None:
    assert drawing.layer_of(LayerSet((Layer("roads"), Layer("zones", fences=True))), source) == layer


def test_fences_stand_though_nobody_routes(tmp_path: Path) -> None:
    world = TileWorld(tmp_path / "home")
    keeper = FenceKeeper(lambda: Stack(world.settings))
    keeper.start()
    try:
        with world.served() as client:
            assert save(client, FENCE).status_code == 202
            until(lambda: client.get("/fences.geojson").json()["features"])
    finally:
        keeper.stop()
    assert not keeper.is_alive()
    world.close()


def test_sets_that_were_replaced_are_kept_a_while_and_then_go(tmp_path: Path) -> None:
    world = TileWorld(tmp_path / "home")
    with Stack(world.settings) as stack:
        book = folding.FenceBook(stack)
        standing = book.standing()
        for version in range(1, 4):
            post_fences(stack, [fence(0, version=version)])
            standing = book.fold()
        kept = [stored.name for stored in stack.tiles.list(folding.FOLDER)]
        assert len(kept) == 3
        assert clean_up(stack, standing.revision) == 0
        assert clean_up(stack, standing.revision, now_ms=time.time_ns() // 1_000_000 + 3_600_000) == 2
        assert [stored.name for stored in stack.tiles.list(folding.FOLDER)] == [standing.name]
    world.close()
