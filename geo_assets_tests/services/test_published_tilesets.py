"""Published tilesets over HTTP: what a map and a PMTiles reader get, and what caches may keep."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pmtiles.reader import Reader

from geo_assets.services.tileserver import create_app
from geo_assets.services.tileserver import published as served_tilesets
from geo_assets.services.tileset import keeping, registry
from geo_assets.services.tileset.publishing import Published, Request, publish
from geo_assets.services.tileset.regions import region_of
from geo_assets.tiles.tile import Tile
from geo_assets_tests.services.running import running
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import World, feature

IMMUTABLE = "public, max-age=31536000, immutable"


@pytest.fixture(params=STACKS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with changes_of(request.param) as changes:
        world = World(tmp_path / "home", **changes)
        world.edit(feature(1, 1, name="house"))
        world.build_dirty()
        yield world
        world.close()


@pytest.fixture
def client(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(served_tilesets, "POINTER_KEPT_S", 0.0)
    stack = world.stack
    app = create_app(stack.ledger, stack.tiles, stack.log, stack.layers, stack.settings)
    with running(app, on_stop=app.state.end_streams) as url, httpx.Client(base_url=url, timeout=patient(30)) as client:
        yield client


def published(world: World, formats: tuple[str, ...] = ("pmtiles",)) -> Published:
    return publish(world.stack, Request("city", region_of(world.stack), formats))


def a_tile(world: World) -> tuple[Tile, bytes]:
    key = max(world.published())
    return Tile.from_key(key), world.tile(key)


def test_a_published_tile_is_served_by_version_for_good_and_by_the_pointer_for_a_while(
    world: World, client: httpx.Client
) -> None:
    done = published(world)
    tile, data = a_tile(world)
    for path, kept in ((f"city/{done.version.version}", IMMUTABLE), ("city", "public, max-age=30")):
        answer = client.get(f"/tilesets/{path}/{tile.path}.mvt")
        assert (answer.status_code, answer.content) == (200, data)
        assert answer.headers["cache-control"] == kept
        assert answer.headers["content-type"] == "application/vnd.mapbox-vector-tile"
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["vary"] == "Accept-Encoding"
        assert answer.headers["x-tileset-version"] == done.version.version
        plain = client.get(f"/tilesets/{path}/{tile.path}.mvt", headers={"Accept-Encoding": "identity"})
        assert (plain.content, plain.headers.get("content-encoding")) == (data, None)
        again = client.get(f"/tilesets/{path}/{tile.path}.mvt", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.headers["cache-control"]) == (304, kept)
        empty = client.get(f"/tilesets/{path}/14/0/0.mvt")
        assert (empty.status_code, empty.headers["cache-control"]) == (204, kept)
        document = client.get(f"/tilesets/{path}.json")
        assert document.headers["cache-control"] == kept
        said = document.json()
        assert said["tiles"] == [
            f"{world.settings.tiles_url}/tilesets/city/{done.version.version}/{{z}}/{{x}}/{{y}}.mvt"
        ]
        assert said["tilejson"] == "3.0.0"
        not_modified = client.get(f"/tilesets/{path}.json", headers={"If-None-Match": document.headers["etag"]})
        assert not_modified.status_code == 304


def test_edits_after_a_publication_do_not_reach_it(world: World, client: httpx.Client) -> None:
    published(world)
    tile, data = a_tile(world)
    world.edit(feature(1, 2, size=0.001, name="larger"))
    world.build_dirty()
    assert client.get(f"/tiles/{tile.path}.mvt").content != data
    assert client.get(f"/tilesets/city/{tile.path}.mvt").content == data


def test_a_roll_back_while_serving_changes_what_the_pointer_serves_and_nothing_else(
    world: World, client: httpx.Client
) -> None:
    first = published(world)
    tile, old = a_tile(world)
    world.edit(feature(1, 2, size=0.001, name="larger"))
    world.build_dirty()
    second = published(world)
    new = world.tile(tile.key)
    seen: set[bytes] = set()
    stop, faults = threading.Event(), list[int]()

    def ask() -> None:
        with httpx.Client(base_url=client.base_url, timeout=patient(30)) as own:
            while not stop.is_set():
                answer = own.get(f"/tilesets/city/{tile.path}.mvt")
                seen.add(answer.content)
                if answer.status_code != 200:
                    faults.append(answer.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    assert client.get(f"/tilesets/city/{tile.path}.mvt").content == new
    for _ in range(5):
        registry.roll_back(world.stack.ledger, "city", "1")
        assert client.get(f"/tilesets/city/{tile.path}.mvt").content == old
        assert client.get("/tilesets/city.json").json()["version"] == "1.0.0"
        registry.roll_back(world.stack.ledger, "city", "2")
        assert client.get(f"/tilesets/city/{tile.path}.mvt").content == new
    stop.set()
    asking.join()
    assert faults == []
    assert seen <= {old, new}
    assert client.get(f"/tilesets/city/{first.version.version}/{tile.path}.mvt").content == old
    assert client.get(f"/tilesets/city/{second.version.version}/{tile.path}.mvt").content == new


def test_a_pmtiles_reader_reads_the_archive_by_ranges(world: World, client: httpx.Client) -> None:
    done = published(world, ("mbtiles",))
    tile, data = a_tile(world)
    address = f"/tilesets/city/{done.version.version}.pmtiles"
    asked: list[int] = []

    def ranged(offset: int, length: int) -> bytes:
        answer = client.get(address, headers={"Range": f"bytes={offset}-{offset + length - 1}"})
        assert answer.status_code == 206
        asked.append(len(answer.content))
        return answer.content

    read = Reader(ranged).get(tile.z, tile.x, tile.y)
    assert gzip.decompress(read or b"") == data
    file = done.version.files["pmtiles"]
    whole = client.get(address)
    assert hashlib.sha256(whole.content).hexdigest() == file.sha256
    assert whole.headers["content-type"] == "application/vnd.pmtiles"
    assert whole.headers["accept-ranges"] == "bytes"
    head = client.head(address)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(file.bytes), b"")
    assert client.get("/tilesets/city.pmtiles").headers["cache-control"] == "public, max-age=30"
    mbtiles = client.get(f"/tilesets/city/{done.version.version}.mbtiles")
    assert mbtiles.content.startswith(b"SQLite format 3")
    preflight = client.options(
        address, headers={"Origin": "https://map.example", "Access-Control-Request-Headers": "range"}
    )
    assert "Range" in preflight.headers["access-control-allow-headers"]
    assert "Content-Range" in whole.headers["access-control-expose-headers"]


def test_a_range_is_answered_as_rfc_9110_wants_it(world: World, client: httpx.Client, monkeypatch) -> None:
    monkeypatch.setattr(served_tilesets, "PIECE_BYTES", 100)
    done = published(world)
    address = f"/tilesets/city/{done.version.version}.pmtiles"
    file = done.version.files["pmtiles"]
    whole = client.get(address).content
    size = len(whole)
    assert size == file.bytes

    def part(wanted: str, **headers: str) -> httpx.Response:
        return client.get(address, headers={"Range": wanted, **headers})

    for wanted, start, end in (
        ("bytes=0-6", 0, 7), ("bytes=10-", 10, size), ("bytes=-5", size - 5, size), ("bytes=5-999999999", 5, size),
        ("bytes=-999999999", 0, size),
    ):  # fmt: skip
        answer = part(wanted)
        assert (answer.status_code, answer.content) == (206, whole[start:end]), wanted
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    for wanted in (f"bytes={size}-", "bytes=5-2", "bytes=-0"):
        answer = part(wanted)
        assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}"), wanted
        assert answer.headers["content-type"] == "application/problem+json"
    for wanted in ("bytes=0-1,3-4", "lines=1-2", "bytes=a-b", "bytes=-"):
        answer = part(wanted)
        assert (answer.status_code, answer.content) == (200, whole), wanted
    assert part("bytes=0-1", **{"If-Range": '"another"'}).status_code == 200
    assert part("bytes=0-1", **{"If-Range": f'"{file.sha256}"'}).status_code == 206


def test_what_is_not_published_is_a_404_that_says_what_is(world: World, client: httpx.Client) -> None:
    assert client.get("/tilesets/city.json").status_code == 404
    done = [published(world) for _ in range(2)]
    tile, _ = a_tile(world)
    registry.claim(world.stack.ledger, "city", "0" * 64, owner="somebody")
    for path in (
        "town.json", "CITY.json", "city/7-000000000000.json", "city/1.json", f"city/3-{'0' * 12}/{tile.path}.mvt",
        "city/23/0/0.mvt", "city/14/99999/0.mvt", "city/14/x/0.mvt", "city/1-zz.pmtiles", "city.mbtiles",
        "city/..%2f..%2fledger.db.pmtiles",
    ):  # fmt: skip
        answer = client.get(f"/tilesets/{path}")
        assert answer.status_code == 404, path
        assert answer.headers["cache-control"] == "no-store"
    assert done[0].version.version in client.get("/tilesets/city/9-000000000000.json").json()["detail"]
    keeping.prune(world.stack, "city", 1)
    assert client.get(f"/tilesets/city/{done[0].version.version}/{tile.path}.mvt").status_code == 404
    assert client.get(f"/tilesets/city/{done[1].version.version}/{tile.path}.mvt").status_code == 200


def test_an_archive_that_is_gone_is_a_503_and_no_empty_map(world: World, client: httpx.Client) -> None:
    done = published(world)
    tile, _ = a_tile(world)
    world.stack.tiles.delete([done.version.files["pmtiles"].object])
    answer = client.get(f"/tilesets/city/{tile.path}.mvt")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert client.get("/tilesets/city.pmtiles").status_code == 503
