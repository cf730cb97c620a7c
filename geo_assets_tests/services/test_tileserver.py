from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from geo_assets.services.tileserver.http import accepts_gzip, etag_matches
from geo_assets.services.tileserver.metrics import Metrics
from geo_assets.services.tileserver.serving import ObjectCache, TileReader
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import tile_hash
from geo_assets_tests.services.tile_world import HERE, LAYERS, TileWorld
from geo_assets_tests.waiting import patient, until
from resources.ledger.protocol import Failure

DATA = b"a tile, as far as the server can tell " * 20
URL = f"/tiles/{HERE.path}.mvt"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TileWorld]:
    world = TileWorld(tmp_path / "home")
    yield world
    world.close()


@pytest.fixture
def client(world: TileWorld) -> Iterator[httpx.Client]:
    with world.served() as client:
        yield client


def _problem(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    return document


def _metric(client: httpx.Client, line: str) -> float:
    for row in client.get("/metrics").text.splitlines():
        if row.startswith(line + " "):
            return float(row.rsplit(" ", 1)[1])
    return 0.0


# -- tiles -----------------------------------------------------------------------------------------------------------
def test_a_tile_is_what_the_ledger_names_with_its_hash_as_entity_tag(world: TileWorld, client: httpx.Client) -> None:
    world.publish(HERE, DATA)
    answer = client.get(URL)
    assert answer.status_code == 200
    assert answer.content == DATA
    assert answer.headers["content-type"] == "application/vnd.mapbox-vector-tile"
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["etag"] == f'W/"{hashlib.sha256(DATA).hexdigest()}"'
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-tile-revision"] == "1"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "etag" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("encoding", ["identity", "br", "gzip;q=0", "", "deflate, gzip;q=0.0"])
def test_a_client_that_takes_no_gzip_gets_the_plain_bytes_under_the_same_entity_tag(
    world: TileWorld, client: httpx.Client, encoding: str
) -> None:
    world.publish(HERE, DATA)
    plain = client.get(URL, headers={"Accept-Encoding": encoding})
    assert "content-encoding" not in plain.headers
    assert plain.content == DATA
    assert plain.headers["content-length"] == str(len(DATA))
    assert plain.headers["etag"] == client.get(URL).headers["etag"]


def test_a_head_answers_like_a_get_without_the_body(world: TileWorld, client: httpx.Client) -> None:
    world.publish(HERE, DATA)
    get, head = client.get(URL), client.head(URL)
    assert head.status_code == 200
    assert head.content == b""
    skipped = ("date",)
    assert {k: v for k, v in head.headers.items() if k not in skipped} == {
        k: v for k, v in get.headers.items() if k not in skipped
    }


def test_what_the_client_has_is_not_sent_again(world: TileWorld, client: httpx.Client) -> None:
    world.publish(HERE, DATA)
    tag = client.get(URL).headers["etag"]
    for header in (tag, tag.removeprefix("W/"), f'"other", {tag}', "*"):
        answer = client.get(URL, headers={"If-None-Match": header})
        assert answer.status_code == 304, header
        assert answer.content == b""
        assert answer.headers["etag"] == tag
        assert answer.headers["x-tile-revision"] == "1"
        assert answer.headers["access-control-allow-origin"] == "*"
    world.publish(HERE, DATA + b"!")
    again = client.get(URL, headers={"If-None-Match": tag})
    assert again.status_code == 200
    assert again.content == DATA + b"!"
    assert again.headers["x-tile-revision"] == "2"


def test_an_empty_tile_and_one_never_built_are_204(world: TileWorld, client: httpx.Client) -> None:
    never = client.get(URL)
    assert (never.status_code, never.headers["x-tile-revision"]) == (204, "0")
    assert never.headers["cache-control"] == "no-cache"
    assert never.headers["access-control-allow-origin"] == "*"
    world.publish(HERE, DATA)
    world.publish(HERE, None)
    emptied = client.get(URL, headers={"If-None-Match": f'W/"{tile_hash(DATA)}"'})
    assert (emptied.status_code, emptied.headers["x-tile-revision"]) == (204, "2")
    assert client.get("/tiles/0/0/0.mvt").status_code == 204


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("19/0/0", "z"),
        ("99999999999/0/0", "z"),
        ("14/16384/0", "x"),
        ("14/0/16384", "y"),
        ("-1/0/0", "z"),
        ("14/1.5/2", "x"),
        ("14/01/2", "x"),
        ("14/1/٣", "y"),
        ("a/b/c", "z"),
    ],
)
def test_what_is_no_tile_is_404_with_the_number_at_fault(client: httpx.Client, path: str, field: str) -> None:
    assert _problem(client.get(f"/tiles/{path}.mvt"))["field"] == field


@pytest.mark.parametrize(
    "path",
    [
        "/tiles/14/9327/4739.png",
        "/tiles/14/9327/4739",
        "/tiles/",
        "/tiles",
        "/tiles/14/..%2f..%2f/4739.mvt",
        "/vendor/../../../../setup.cfg",
        "/vendor/%2e%2e/package.json",
        "/node_modules/maplibre-gl/package.json",
        "/map.js/",
        "/nothing",
    ],
)
def test_other_paths_are_404_and_open_no_file(client: httpx.Client, path: str) -> None:
    assert _problem(client.get(path))["status"] == 404


def test_other_methods_are_refused_and_preflights_answered(client: httpx.Client) -> None:
    refused = client.post(URL)
    assert _problem(refused)["status"] == 405
    assert "GET" in refused.headers["allow"]
    for path in (URL, "/events", "/tiles.json"):
        allowed = client.options(path, headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"})
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == "*"
        assert "Last-Event-ID" in allowed.headers["access-control-allow-headers"]
        assert "origin" not in allowed.headers.get("vary", "").lower()


def test_answers_do_not_vary_by_origin(world: TileWorld, client: httpx.Client) -> None:
    world.publish(HERE, DATA)
    skipped = ("date",)
    answers = [
        {k: v for k, v in client.get(URL, headers=headers).headers.items() if k not in skipped}
        for headers in ({}, {"Origin": "https://a.example"}, {"Origin": "null"})
    ]
    assert answers[0] == answers[1] == answers[2]


def test_a_request_that_names_the_current_revision_or_hash_may_be_kept_for_ever(
    world: TileWorld, client: httpx.Client
) -> None:
    world.publish(HERE, DATA)
    digest = tile_hash(DATA)
    for named in ("1", digest, digest[:16]):
        assert "immutable" in client.get(URL, params={"v": named}).headers["cache-control"], named
    for other in ("0", "2", digest[:15], "0" * 16, ""):
        assert client.get(URL, params={"v": other}).headers["cache-control"] == "no-cache", other


def test_an_object_collected_between_ledger_and_store_is_read_under_its_new_name(
    world: TileWorld, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(HERE, DATA)
    get = type(world.tiles).get
    collected: list[str] = []

    def collect_first(store: Any, name: str) -> bytes | None:
        if not collected:
            collected.append(name)
            world.publish(HERE, DATA + b"2")
            store.delete([name])
        return get(store, name)

    monkeypatch.setattr(type(world.tiles), "get", collect_first)
    answer = client.get(URL)
    assert answer.status_code == 200
    assert answer.content == DATA + b"2"
    assert answer.headers["x-tile-revision"] == "2"
    assert _metric(client, 'tileserver_integrity_faults_total{fault="missing"}') == 0


def test_a_missing_object_of_the_current_revision_is_503_and_counted_never_204(
    world: TileWorld, client: httpx.Client
) -> None:
    world.publish(HERE, DATA)
    world.tiles.delete([world.object_name(HERE)])
    answer = client.get(URL)
    assert answer.status_code == 503
    assert _problem(answer)["type"].endswith("integrity")
    assert "retry-after" in answer.headers
    assert answer.headers["cache-control"] == "no-store"
    assert _metric(client, 'tileserver_integrity_faults_total{fault="missing"}') == 1


def test_a_missing_object_marks_its_tile_once_so_that_a_quiet_map_mends_itself(
    world: TileWorld, client: httpx.Client
) -> None:
    world.publish(HERE, DATA)
    world.tiles.delete([world.object_name(HERE)])
    for _ in range(3):
        assert client.get(URL).status_code == 503
    state = world.ledger.read([HERE.key])[HERE.key]
    assert (state.revision, state.content_hash, state.work_key) == (1, None, None)
    assert [dirty.key for dirty in world.ledger.dirty(10, kind="live")] == [HERE.key]
    mark = state.wanted
    client.get(URL)
    assert world.ledger.read([HERE.key])[HERE.key].wanted == mark
    world.publish(HERE, DATA)
    assert client.get(URL).content == DATA


def test_a_damaged_object_marks_its_tile_and_a_second_fault_within_the_minute_marks_it_no_more(
    world: TileWorld, client: httpx.Client
) -> None:
    for _ in range(2):
        world.publish(HERE, DATA)
        world.tiles.put(world.object_name(HERE), b"no gzip")
        assert client.get(URL).status_code == 503
    state = world.ledger.read([HERE.key])[HERE.key]
    # A server that looks into another bucket than the builder's would have it build without end.
    assert (state.revision, state.content_hash) == (2, tile_hash(DATA))
    assert not state.dirty


def test_a_fault_in_what_somebody_replaced_meanwhile_marks_nothing(world: TileWorld) -> None:
    world.publish(HERE, DATA)
    seen = world.ledger.read([HERE.key])[HERE.key]
    world.publish(HERE, DATA + b"2")
    TileReader(world.ledger, world.tiles, Metrics(world.ledger), 1_000)._clear(seen)  # pyright: ignore[reportPrivateUsage]
    assert world.ledger.read([HERE.key])[HERE.key].content_hash == tile_hash(DATA + b"2")


@pytest.mark.parametrize("damage", [b"", b"no gzip", gzip.compress(b"another tile", mtime=0)])
def test_damaged_bytes_are_503_and_counted_never_served(world: TileWorld, client: httpx.Client, damage: bytes) -> None:
    world.publish(HERE, DATA)
    world.tiles.put(world.object_name(HERE), damage)
    assert _problem(client.get(URL))["status"] == 503
    assert _metric(client, 'tileserver_integrity_faults_total{fault="damaged"}') == 1


def test_a_tile_whose_hash_the_integrity_check_cleared_is_503_until_it_is_built(
    world: TileWorld, client: httpx.Client
) -> None:
    world.publish(HERE, DATA)
    world.ledger.clear([HERE.key])
    assert _problem(client.get(URL))["status"] == 503
    world.publish(HERE, DATA)
    assert client.get(URL).status_code == 200


def test_a_second_request_comes_from_the_cache(world: TileWorld, client: httpx.Client) -> None:
    world.publish(HERE, DATA)
    client.get(URL)
    client.get(URL)
    assert _metric(client, 'tileserver_cache_total{result="miss"}') == 1
    assert _metric(client, 'tileserver_cache_total{result="hit"}') == 1


def test_the_cache_is_bounded_by_bytes_and_forgets_the_longest_unused() -> None:
    cache = ObjectCache(100)
    for name in "abc":
        cache.put(name, bytes(40))
    assert cache.get("a") is None
    assert cache.get("b") is not None
    cache.put("d", bytes(40))
    assert cache.get("c") is None
    assert cache.get("b") is not None
    cache.put("large", bytes(101))
    assert cache.get("large") is None
    cache.put("b", bytes(10))
    assert cache.bytes == 50


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False), ("", False), ("gzip", True), ("GZIP", True), ("*", True), ("*;q=0", False), ("x-gzip", True),
        ("br, gzip;q=0.5", True), ("gzip;q=0", False), ("gzip;q=0, *", False), ("gzip;q=x", False), ("*;q=0,", False),
    ],
)  # fmt: skip
def test_accept_encoding_is_read_as_http_defines_it(header: str | None, expected: bool) -> None:
    assert accepts_gzip(header) is expected


def test_entity_tags_are_compared_weakly_and_whole() -> None:
    assert etag_matches('W/"abc"', '"abc"')
    assert etag_matches('"x", "abc"', 'W/"abc"')
    assert not etag_matches('"abcd"', 'W/"abc"')
    assert not etag_matches("abc", 'W/"abc"')
    assert not etag_matches(None, 'W/"abc"')


# -- documents -------------------------------------------------------------------------------------------------------
def test_tilejson_says_what_there_is_and_where(world: TileWorld, client: httpx.Client) -> None:
    world.publish(HERE, DATA)
    document = client.get("/tiles.json").json()
    assert document["tilejson"] == "3.0.0"
    assert document["tiles"] == [world.settings.tiles_url + "/tiles/{z}/{x}/{y}.mvt"]
    assert (document["minzoom"], document["maxzoom"]) == (0, 18)
    assert document["attribution"] == "© the mappers"
    assert [layer["id"] for layer in document["vector_layers"]] == list(LAYERS.names)
    assert document["vector_layers"][0]["fields"] == {"class": "Attribute", "name": "Attribute"}
    assert document["vector_layers"][1]["description"] == "Streets."
    assert document["bounds"] == pytest.approx(HERE.bounds)
    west, south, east, north = document["bounds"]
    assert west < document["center"][0] < east
    assert south < document["center"][1] < north
    assert document["live"]["events"] == world.settings.tiles_url + "/events"


def test_a_public_url_is_what_documents_name(tmp_path: Path) -> None:
    world = TileWorld(tmp_path, public_tiles_url="https://tiles.example/map/")
    with world.served() as client:
        assert client.get("/tiles.json").json()["tiles"] == ["https://tiles.example/map/tiles/{z}/{x}/{y}.mvt"]
        assert "https://tiles.example" in client.get("/").headers["content-security-policy"]
    world.close()


def test_a_map_without_tiles_has_the_world_as_bounds(client: httpx.Client) -> None:
    assert client.get("/tiles.json").json()["bounds"] == pytest.approx([-180, -85.0511287798066, 180, 85.0511287798066])


def test_tilejson_counts_the_published_tiles_so_that_one_of_the_whole_world_is_no_empty_map(tmp_path: Path) -> None:
    world = TileWorld(tmp_path)
    with world.served(counts_keep_s=0) as client:
        assert client.get("/tiles.json").json()["live"]["published"] == 0
        world.publish(Tile(0, 0, 0), DATA)
        document = client.get("/tiles.json").json()
        assert document["bounds"] == pytest.approx([-180, -85.0511287798066, 180, 85.0511287798066])
        assert document["live"]["published"] == 1
        world.publish(Tile(0, 0, 0), None)
        assert client.get("/tiles.json").json()["live"]["published"] == 0
    world.close()


def test_the_style_draws_every_layer_and_needs_no_other_server(client: httpx.Client) -> None:
    style = client.get("/style.json").json()
    assert style["version"] == 8
    assert "glyphs" not in style
    assert "sprite" not in style
    drawn = {layer.get("source-layer") for layer in style["layers"]} - {None}
    assert drawn == set(LAYERS.names)
    assert len({layer["id"] for layer in style["layers"]}) == len(style["layers"])
    fonts = {tuple(layer["layout"]["text-font"]) for layer in style["layers"] if layer["type"] == "symbol"}
    assert fonts == {("sans-serif",)}
    kinds = {layer["type"] for layer in style["layers"] if layer.get("source-layer") == "manholes"}
    assert kinds == {"fill", "line", "circle", "symbol"}
    assert "bounds" not in style["sources"]["tiles"]


@pytest.mark.parametrize("path", ["/tiles.json", "/style.json", "/openapi.json", "/", "/live-tiles.js", "/page.json"])
def test_documents_are_revalidated_and_open_to_other_origins(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert client.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert client.head(path).status_code == 200


def test_the_page_allows_no_inline_script_and_uses_none(client: httpx.Client) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "<style" not in page.text
    assert "style=" not in page.text
    assert page.text.count("<script") == page.text.count('<script type="module" src=')
    assert "http" not in page.text.replace("http-equiv", "")


def test_without_the_map_library_everything_else_is_served_and_says_what_to_run(
    world: TileWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from geo_assets.services.tileserver import static

    world.publish(HERE, DATA)
    bare = tmp_path / "web"
    bare.mkdir()
    for name, _ in static.PAGE.values():
        (bare / name).write_bytes((static.WEB / name).read_bytes())
    monkeypatch.setattr(static.StaticFiles.__init__, "__defaults__", (bare,))
    with world.served() as client:
        assert client.get("/").status_code == 200
        assert client.get(URL).status_code == 200
        config = client.get("/page.json").json()
        assert config["maplibre"] is False
        assert config["install"].startswith("npm ci ")
        assert "npm ci" in _problem(client.get("/vendor/maplibre-gl.mjs"))["detail"]


# -- coverage --------------------------------------------------------------------------------------------------------
def test_the_coverage_shows_the_state_of_every_tile_of_a_box(world: TileWorld, client: httpx.Client) -> None:
    around = [Tile(14, HERE.x + dx, HERE.y + dy) for dy in (0, 1) for dx in (0, 1, 2)]
    present, empty, dirty, failed, never, rebuilt = around
    world.publish(present, DATA)
    world.publish(empty, None)
    world.publish(dirty, DATA)
    world.publish(rebuilt, DATA)
    world.ledger.mark([dirty.key, failed.key])
    wanted = world.ledger.read([failed.key])[failed.key].wanted
    world.ledger.fail([Failure(failed.key, wanted, "the encoder says no")], max_attempts=1)
    north_west, south_east = around[0].bounds, around[-1].bounds
    inside = 1e-4
    box = (north_west.west + inside, south_east.south + inside, south_east.east - inside, north_west.north - inside)
    answer = client.get("/coverage", params={"bbox": ",".join(map(str, box)), "zoom": 14})
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert {(t["x"], t["y"]): t["state"] for t in body["tiles"]} == {
        (present.x, present.y): "present",
        (empty.x, empty.y): "empty",
        (dirty.x, dirty.y): "dirty",
        (failed.x, failed.y): "failed",
        (never.x, never.y): "never",
        (rebuilt.x, rebuilt.y): "present",
    }
    assert body["counts"] == {"present": 2, "empty": 1, "dirty": 1, "failed": 1, "never": 1}
    assert {t["key"] for t in body["tiles"]} == {tile.key for tile in around}
    assert [t["error"] for t in body["tiles"] if t["state"] == "failed"] == ["the encoder says no"]


def test_a_coverage_box_over_the_date_line_shows_both_sides(client: httpx.Client) -> None:
    tiles = client.get("/coverage", params={"bbox": "179,-1,-179,1", "zoom": 3}).json()["tiles"]
    assert {t["x"] for t in tiles} == {0, 7}


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"zoom": "14"}, "bbox"),
        ({"bbox": "1,2,3", "zoom": "14"}, "bbox"),
        ({"bbox": "1,2,3,x", "zoom": "14"}, "bbox"),
        ({"bbox": "1,2,nan,4", "zoom": "14"}, "bbox"),
        ({"bbox": "1,4,3,2", "zoom": "14"}, "bbox"),
        ({"bbox": "1,2,300,4", "zoom": "14"}, "bbox"),
        ({"bbox": "1,2,3,4"}, "zoom"),
        ({"bbox": "1,2,3,4", "zoom": "19"}, "zoom"),
        ({"bbox": "1,2,3,4", "zoom": "1e1"}, "zoom"),
        ({"bbox": "-180,-85,180,85", "zoom": "18"}, "bbox"),
        ({"bbox": ["1,2,3,4", "1,2,3,4"], "zoom": "4"}, "bbox"),
    ],
)
def test_a_malformed_coverage_request_names_its_field(
    client: httpx.Client, parameters: dict[str, Any], field: str
) -> None:
    answer = client.get("/coverage", params=parameters)
    assert answer.status_code == 400
    assert _problem(answer)["field"] == field


# -- for operators ---------------------------------------------------------------------------------------------------
def test_health_and_readiness_answer(client: httpx.Client) -> None:
    assert client.get("/healthz").json()["status"] == "ok"
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["checks"] == {"ledger": "ok", "tiles": "ok", "changes": "ok"}


def test_a_ledger_that_is_away_is_503_everywhere_and_not_ready(
    world: TileWorld, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resources.ledger.protocol import LedgerUnavailable

    def away(*_: Any, **__: Any) -> Any:
        raise LedgerUnavailable("locked too long")

    for method in ("read", "counts", "get_value"):
        monkeypatch.setattr(type(world.ledger), method, away)
    answer = client.get(URL)
    assert _problem(answer)["status"] == 503
    assert "retry-after" in answer.headers
    assert client.get("/tiles.json").status_code == 503
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
    assert client.get("/metrics").status_code == 200


def test_metrics_count_requests_and_show_the_ledger(world: TileWorld, client: httpx.Client) -> None:
    world.publish(HERE, DATA)
    client.get(URL)
    client.get("/tiles/99/0/0.mvt")
    assert _metric(client, 'tileserver_requests_total{kind="tiles",status="200"}') == 1
    assert _metric(client, 'tileserver_requests_total{kind="tiles",status="404"}') == 1
    assert _metric(client, 'ledger_published_tiles{zoom="14"}') == 1
    client.get("/some/path/of/a/scanner")
    kinds = {
        row.split('kind="')[1].split('"')[0] for row in client.get("/metrics").text.splitlines() if 'kind="' in row
    }
    assert "other" in kinds
    assert not any("scanner" in kind for kind in kinds)


def test_openapi_describes_every_operation_and_its_models(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) >= {
        "/tiles/{z}/{x}/{y}.mvt",
        "/tiles.json",
        "/style.json",
        "/events",
        "/coverage",
        "/metrics",
    }
    assert "TileChange" in document["components"]["schemas"]


@pytest.mark.filterwarnings("ignore")
def test_the_server_keeps_what_its_openapi_document_promises(world: TileWorld, client: httpx.Client) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    world.publish(HERE, DATA)
    # A stream never ends; its parameters are tested by themselves.
    schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json").exclude(path=["/events", "/live"])
    schema.config.base_url = str(client.base_url).rstrip("/")
    tested = 0
    loose = ("/coverage", "/heat.geojson", "/waiting.geojson", "/fences.geojson", "/fences")
    for found in schema.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=12, deadline=None, database=None, phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck), derandomize=True,
        )  # fmt: skip
        def keeps(case: Any) -> None:
            # That a box is not upside down and not too wide, or that a page of the server asks, no schema can say.
            case.call_and_validate(excluded_checks=[positive_data_acceptance] if case.path in loose else [])

        keeps()
        tested += 1
    assert tested == 18


def test_the_tile_server_loads_without_dagster_or_a_geometry_library() -> None:
    script = (
        "import sys, json, geo_assets.services.tileserver, geo_assets.stack, geo_assets.services.http_server;"
        "heavy = ('dagster', 'shapely', 'numpy', 'pyproj', 'pyarrow', 'osmium', 'h3');"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(shown.stdout) == []


def test_the_process_serves_until_sigterm_and_ends_its_streams(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = "from geo_assets.services.tileserver import run; from geo_assets.settings import Settings; run(Settings())"
    environment = {**os.environ, "GEO_ASSETS_HOME": str(tmp_path), "GEO_ASSETS_TILES_PORT": str(port)}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=patient(30)).status_code == 200
            except httpx.TransportError:
                return False

        until(ready, why="the server is ready", every=0.05)
        taken = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        assert taken.returncode != 0
        assert "GEO_ASSETS_TILES_PORT" in taken.stderr.splitlines()[-1]
        with httpx.stream("GET", f"http://127.0.0.1:{port}/events", timeout=patient(30)) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert all("error" not in line for line in lines)
        assert process.wait(patient(30)) == 0
        assert b"Traceback" not in (process.stdout.read() if process.stdout else b"")
    finally:
        process.kill()
        process.wait()
