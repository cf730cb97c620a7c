from __future__ import annotations

import contextlib
import itertools
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h3
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.topics import TILE_UPDATED
from geo_assets.services.cells import ring_of
from geo_assets.services.tileserver import heat
from geo_assets.services.tileserver.heat import Counts, HeatMap, cell_of, resolution_of_view
from geo_assets.services.tileserver.waiting import WaitingMap, by_prefix
from geo_assets.tiles.tile import Box, Tile
from geo_assets_tests.services.tile_world import HERE, TileWorld
from geo_assets_tests.waiting import patient
from resources.event_log.protocol import LogUnavailable, NewRecord, OffsetOutOfRange
from resources.ledger.protocol import Lag

NOW_MS = 1_770_000_000_000
DATA = b"\x1a\x00"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TileWorld]:
    world = TileWorld(tmp_path / "home")
    yield world
    world.close()


@pytest.fixture
def client(world: TileWorld) -> Iterator[httpx.Client]:
    with world.served() as client:
        yield client


def tell(world: TileWorld, *built: tuple[Tile, int, int]) -> None:
    """Announce tiles: which, revision, minutes ago."""
    world.log.append(
        [
            NewRecord(
                TILE_UPDATED, tile.key,
                b'{"z":%d,"x":%d,"y":%d,"revision":%d,"built_at_ms":%d}'
                % (tile.z, tile.x, tile.y, revision, NOW_MS - int(ago * 60_000)),
            )
            for tile, revision, ago in built
        ]
    )  # fmt: skip


def looker(world: TileWorld, **options: Any) -> HeatMap:
    return HeatMap(world.log, clock_ms=lambda: NOW_MS, keep_s=0, **options)


def middle(tile: Tile) -> tuple[float, float]:
    west, south, east, north = tile.bounds
    return (west + east) / 2, (south + north) / 2


# -- cells -----------------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 22).flatmap(lambda z: st.tuples(st.just(z), *[st.integers(0, (1 << z) - 1)] * 2)))
def test_a_tile_counts_in_the_cell_of_its_middle_which_is_no_smaller_than_it(place: tuple[int, int, int]) -> None:
    cell = cell_of(*place)
    if cell == heat.WORLD_CELL:
        assert place[0] <= 5
        return
    lon, lat = middle(Tile(*place))
    name = h3.int_to_str(cell)
    # The middle of a tile in degrees lies a little below that of its rows.
    assert (
        h3.great_circle_distance(h3.cell_to_latlng(name), (lat, lon), "m")
        < 1.6 * heat._WIDTHS_M[h3.get_resolution(name)]
    )
    west, south, east, north = Tile(*place).bounds
    side = h3.great_circle_distance(((south + north) / 2, west), ((south + north) / 2, east), "m")
    assert heat._WIDTHS_M[h3.get_resolution(name)] >= 0.97 * side or place[0] < 6


@settings(max_examples=60, deadline=None)
@given(st.floats(-180, 180), st.floats(-90, 90), st.integers(0, 15))
def test_a_ring_is_closed_in_one_piece_and_holds_its_cell(lon: float, lat: float, resolution: int) -> None:
    name = h3.latlng_to_cell(lat, lon, resolution)
    ring = ring_of(h3.str_to_int(name))
    assert ring[0] == ring[-1]
    assert len(ring) >= 6
    longest = max(abs(a[0] - b[0]) for a, b in itertools.pairwise(ring) if abs(a[1]) < 90)
    assert longest <= 180
    for (south_north, west_east), (x, y) in zip(h3.cell_to_boundary(name), ring, strict=False):
        assert y == pytest.approx(south_north, abs=1e-5)
        assert (x - west_east + 180) % 360 - 180 == pytest.approx(0, abs=1e-5)
    # Drawn in one world of the map, give or take half of its width.
    assert min(x for x, _ in ring) >= -360
    assert max(x for x, _ in ring) <= 540


def test_a_ring_around_a_pole_is_closed_over_it_as_wide_as_the_world() -> None:
    for pole in (90, -90):
        ring = ring_of(h3.str_to_int(h3.latlng_to_cell(pole, 0, 1)))
        assert max(x for x, _ in ring) - min(x for x, _ in ring) == pytest.approx(360)
        assert [y for _, y in ring].count(pole) == 2


def test_a_ring_over_the_date_line_goes_on_past_it() -> None:
    ring = ring_of(h3.str_to_int(h3.latlng_to_cell(10, 180, 4)))
    assert min(x for x, _ in ring) < -180 < max(x for x, _ in ring) or min(x for x, _ in ring) < 180 < max(
        x for x, _ in ring
    )
    assert max(x for x, _ in ring) - min(x for x, _ in ring) < 2


def test_cells_are_as_wide_as_a_thumb_on_any_map() -> None:
    for zoom in range(23):
        for latitude in (0.0, 60.2, -45.0, 85.0):
            resolution = resolution_of_view(zoom, latitude)
            ground = heat._EQUATOR_M * max(0.05, math.cos(math.radians(latitude))) / 512 / 2**zoom
            assert 30 < heat._WIDTHS_M[resolution] / ground < 100 or resolution in (0, 15)


def test_cells_are_as_wide_as_the_deeper_quarter_of_the_tiles_built(world: TileWorld) -> None:
    heat_map = looker(world)
    assert heat_map.look(9, 60).resolution == 9
    tell(world, *((HERE.ancestor(z), 1, 1) for z in range(15)))
    found = heat_map.look(9, 60)
    assert found.resolution == h3.get_resolution(h3.int_to_str(cell_of(11, HERE.x >> 3, HERE.y >> 3)))
    assert (sum(cell.tiles for cell in found.cells), found.wider) == (4, 11)
    tell(world, *((Tile(18, 16 * HERE.x + n, 16 * HERE.y), 1, 1) for n in range(10)))
    assert heat_map.look(9, 60).resolution == 9
    assert heat_map.look(9, 5).resolution == 9


# -- counts ----------------------------------------------------------------------------------------------------------
def test_heat_counts_what_was_built_and_where(world: TileWorld) -> None:
    there = Tile(14, HERE.x + 40, HERE.y)
    tell(world, (HERE, 1, 1), (HERE, 2, 2), (there, 7, 3), (Tile(2, 2, 1), 3, 1), (HERE, 3, 20), (HERE, 4, 90))
    found = looker(world).look(7, 60)
    by_cell = {h3.int_to_str(cell.cell): cell.tiles for cell in found.cells}
    lon, lat = middle(HERE)
    assert by_cell[h3.latlng_to_cell(lat, lon, 7)] == 3, "the one of 90 minutes ago is history"
    lon, lat = middle(there)
    assert by_cell[h3.latlng_to_cell(lat, lon, 7)] == 1
    assert (found.wider, found.tiles) == (1, 5)
    assert looker(world).look(7, 5).tiles == 4
    assert found.cells[0].tiles == 3, "the hottest first"


def test_an_announcement_that_comes_again_and_one_that_cannot_be_read_count_nothing(world: TileWorld) -> None:
    heat_map = looker(world)
    tell(world, (HERE, 1, 1), (HERE, 2, 1))
    assert heat_map.look(7, 60).tiles == 2
    tell(world, (HERE, 2, 1), (HERE, 1, 1), (HERE, 3, 1))
    for value in (b"no", b"{}", b'{"z":30,"x":0,"y":0,"revision":1}', b'{"z":1,"x":2,"y":0,"revision":1}', None):
        world.log.append([NewRecord(TILE_UPDATED, "k", value)])
    assert heat_map.look(7, 60).tiles == 3


def test_coarser_cells_hold_all_that_finer_ones_do(world: TileWorld) -> None:
    around = [Tile(14, HERE.x + dx, HERE.y + dy) for dx in range(20) for dy in range(20)]
    tell(world, *((tile, 1, 1) for tile in around))
    heat_map = looker(world)
    for resolution in range(8):
        assert sum(cell.tiles for cell in heat_map.look(resolution, 60).cells) == 400
    assert heat_map.look(15, 60).resolution == 7


def test_rule_9_counts_are_bounded_and_get_coarser_without_losing_a_tile(world: TileWorld) -> None:
    far = [Tile(14, (n * 7919) % 16384, (n * 104729) % 16384) for n in range(3_000)]
    quiet = Tile(14, HERE.x, HERE.y)
    tell(world, *((tile, 1, 30) for tile in far), (quiet, 9, 10))
    heat_map = looker(world, most_counts=500)
    found = heat_map.look(7, 60)
    assert len(heat_map._counts) <= 500
    assert found.tiles == 3_001
    fine, wider = heat_map._counts.within(NOW_MS, 60, 7)
    assert (list(fine.values()), wider) == ([1], 3_000), "only the full minute got coarser"


def test_counts_smaller_than_an_hour_of_minutes_still_end() -> None:
    counts = Counts(most=3)
    for minute in range(30):
        counts.add(NOW_MS - minute * 60_000, cell_of(14, 1000 * minute % 16384, 5000))
    counts.trim(NOW_MS)
    assert len(counts) == 30
    found, wider = counts.within(NOW_MS, 60, 0)
    assert sum(found.values()) + wider == 30


def test_a_look_reads_so_many_records_and_says_since_when_it_is_complete(world: TileWorld) -> None:
    tell(world, *((Tile(14, n, n), 1, 50) for n in range(400)))
    whole = looker(world).look(6, 60)
    assert (whole.tiles, whole.since_ms) == (400, (NOW_MS // 60_000 - 59) * 60_000)
    heat_map = looker(world, look_back=100)
    part = heat_map.look(6, 60)
    assert 90 <= part.tiles <= 100
    assert part.since_ms > NOW_MS - 60_000, "the log's stamp of the first that was read"
    # And from then on every one of them, however often somebody looks.
    for round_ in range(5):
        tell(world, *((Tile(14, 1000 + 20 * round_ + n, 5), 1, 1) for n in range(20)))
        heat_map.look(6, 60)
    assert heat_map.look(6, 60).tiles == part.tiles + 100
    assert heat_map.look(6, 60).since_ms == part.since_ms


def test_a_log_that_was_set_up_anew_is_read_from_its_begin(world: TileWorld, tmp_path: Path) -> None:
    heat_map = looker(world)
    tell(world, *((HERE, revision, 1) for revision in range(1, 9)))
    assert heat_map.look(6, 60).tiles == 8
    other = TileWorld(tmp_path / "other")
    heat_map._log = other.log
    tell(other, (HERE, 1, 1))
    assert heat_map.look(6, 60).tiles == 9
    other.close()


def test_what_retention_took_between_two_looks_is_not_counted_and_the_answer_says_since_when(world: TileWorld) -> None:
    heat_map = looker(world)
    tell(world, *((HERE, revision, 1) for revision in range(1, 6)))
    before = heat_map.collection(None, 10, 60)
    assert (before["tiles"], before["complete"]) == (5, True)
    tell(world, *((HERE, revision, 1) for revision in range(6, 11)))
    world.log.enforce_retention(now_ms=2**50)
    tell(world, (HERE, 11, 1), (HERE, 12, 1))
    after = heat_map.collection(None, 10, 60)
    assert (after["tiles"], after["complete"]) == (7, False)
    assert after["since_ms"] > before["since_ms"], "the log's stamp of the first that was read"


def test_records_that_go_while_they_are_read_are_passed_over(world: TileWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(world, *((HERE, revision, 1) for revision in range(1, 9)))
    plain, asked = type(world.log).read, []

    def taken_meanwhile(self: Any, topic: str, partition: int, offset: int, *more: Any, **named: Any) -> Any:
        if not asked:
            asked.append(offset)
            raise OffsetOutOfRange(topic, partition, offset, offset + 3, offset + 8)
        return plain(self, topic, partition, offset, *more, **named)

    monkeypatch.setattr(type(world.log), "read", taken_meanwhile)
    found = looker(world).collection(None, 10, 60)
    assert (found["tiles"], found["complete"]) == (5, False)


# -- where -----------------------------------------------------------------------------------------------------------
PLACES: Sequence[tuple[str, Tile, Box, Box]] = [
    ("north", Tile(10, 500, 0), Box(-10, 84, 10, 85), Box(-10, 0, 10, 50)),
    ("south", Tile(10, 3, 1023), Box(-180, -90, -170, -84), Box(-10, -20, 10, 50)),
    ("date line, west of it", Tile(10, 1023, 500), Box(170, -10, -170, 10), Box(-160, -10, 160, 10)),
    ("date line, east of it", Tile(10, 0, 500), Box(179.9, -10, 180, 10), Box(-160, -10, 160, 10)),
    ("here", Tile(10, 582, 296), Box(24, 59, 26, 61), Box(0, 0, 5, 5)),
]


@pytest.mark.parametrize(("tile", "around", "elsewhere"), [place[1:] for place in PLACES], ids=[p[0] for p in PLACES])
def test_a_box_shows_the_cells_that_reach_into_it(world: TileWorld, tile: Tile, around: Box, elsewhere: Box) -> None:
    tell(world, (tile, 1, 1))
    heat_map = looker(world)
    shown = heat_map.collection(around, 6, 60)
    assert (shown["matched"], shown["returned"], shown["tiles"]) == (1, 1, 1)
    assert heat_map.collection(None, 6, 60)["matched"] == 1
    assert heat_map.collection(elsewhere, 6, 60)["matched"] == 0


def test_an_answer_holds_the_hottest_cells(world: TileWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "MOST_CELLS", 5)
    tell(world, *((Tile(12, 100 * n, 1000), 1, 1) for n in range(20)), *((HERE, n, 1) for n in range(1, 4)))
    shown = looker(world).collection(None, 8, 60)
    assert (shown["matched"], shown["returned"], len(shown["features"])) == (21, 5, 5)
    assert shown["features"][0]["properties"]["tiles"] == 3


# -- waiting ---------------------------------------------------------------------------------------------------------
def test_lag_by_zoom_and_prefix_becomes_boxes_with_the_oldest_age() -> None:
    lags = [Lag(14, "120", 4, 900), Lag(15, "120", 6, 500), Lag(2, "12", 1, 700), Lag(0, "", 1, 800)]
    assert [(one.prefix, one.tiles, one.oldest_ms, one.zooms, one.place) for one in by_prefix(lags)] == [
        ("120", 10, 500, (14, 15), (3, 4, 2)),
        ("12", 1, 700, (2, 2), (2, 2, 1)),
        ("", 1, 800, (0, 0), (0, 0, 0)),
    ]


@settings(max_examples=60, deadline=None)
@given(st.text("0123", max_size=22))
def test_a_prefix_lies_where_its_tile_does(prefix: str) -> None:
    ((*_, place),) = [(one, one.place) for one in by_prefix([Lag(22, prefix, 1, 1)])]
    assert Tile(*place) == Tile.from_quadkey(prefix)


def test_waiting_tiles_are_shown_by_prefix_and_those_wider_than_the_screen_by_number(world: TileWorld) -> None:
    world.ledger.mark([HERE.ancestor(z).key for z in range(15)])
    world.ledger.mark([Tile(14, HERE.x - 1, HERE.y).key, Tile(14, 0, 0).key])
    given_up = Tile(14, HERE.x, HERE.y + 1)
    world.ledger.mark([given_up.key])
    from resources.ledger.protocol import Failure

    wanted = world.ledger.read([given_up.key])[given_up.key].wanted
    world.ledger.fail([Failure(given_up.key, wanted, "no")], max_attempts=1)
    lon, lat = middle(HERE)
    waiting = WaitingMap(world.ledger, 18, clock_ms=lambda: time.time_ns() // 1_000_000 + 90_000, keep_s=0)
    shown = waiting.collection(Box(lon - 0.01, lat - 0.01, lon + 0.01, lat + 0.01), 10)
    assert (shown["depth"], shown["tiles"], shown["wider"]) == (12, 17, 9)
    assert shown["age_s"] == pytest.approx(90, abs=30)
    boxes = {one["properties"]["prefix"]: one["properties"] for one in shown["features"]}
    assert set(boxes) == {HERE.quadkey[:length] for length in (9, 10, 11, 12)}
    deepest = boxes[HERE.quadkey[:12]]
    assert (deepest["tiles"], deepest["min_zoom"], deepest["max_zoom"], deepest["depth"]) == (4, 12, 14, 12)
    assert waiting.collection(None, 11)["tiles"] == 17
    assert [one["properties"]["prefix"] for one in waiting.collection(Box(-180, 84, -179, 86), 12)["features"]] == [
        "0" * 14
    ]


def test_nothing_waits_on_a_map_at_rest(client: httpx.Client) -> None:
    body = client.get("/waiting.geojson", params={"zoom": 3}).json()
    assert (body["tiles"], body["features"], body["age_s"]) == (0, [], 0)


# -- over HTTP -------------------------------------------------------------------------------------------------------
def test_heat_and_what_waits_are_geojson_of_now(world: TileWorld, client: httpx.Client) -> None:
    for _ in range(3):
        world.publish(HERE, DATA)
    world.publish(HERE, None)
    answer = client.get("/heat.geojson", params={"zoom": 10, "bbox": "20,50,30,70"})
    assert answer.headers["content-type"] == "application/geo+json"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-encoding"] == "gzip"
    body = answer.json()
    assert body["tiles"] == 4
    (feature,) = body["features"]
    assert feature["properties"]["tiles"] == 4
    lon, lat = middle(HERE)
    assert feature["properties"]["cell"] == h3.latlng_to_cell(lat, lon, body["resolution"])
    assert client.get("/heat.geojson", params={"zoom": 10, "minutes": 1}).json()["minutes"] == 1
    world.ledger.mark([HERE.key])
    plain = client.get("/waiting.geojson", params={"zoom": 10}, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.json()["features"][0]["properties"]["tiles"] == 1


@pytest.mark.parametrize(
    ("path", "parameters", "field"),
    [
        ("/heat.geojson", {}, "zoom"),
        ("/heat.geojson", {"zoom": "23"}, "zoom"),
        ("/heat.geojson", {"zoom": "4", "minutes": "0"}, "minutes"),
        ("/heat.geojson", {"zoom": "4", "minutes": "61"}, "minutes"),
        ("/heat.geojson", {"zoom": "4", "bbox": "1,2,3"}, "bbox"),
        ("/waiting.geojson", {}, "zoom"),
        ("/waiting.geojson", {"zoom": ["4", "4"]}, "zoom"),
        ("/waiting.geojson", {"zoom": "4", "bbox": "1,4,3,2"}, "bbox"),
    ],
)
def test_a_malformed_request_names_its_field(
    client: httpx.Client, path: str, parameters: dict[str, Any], field: str
) -> None:
    answer = client.get(path, params=parameters)
    assert answer.status_code == 400
    assert answer.json()["field"] == field


def test_a_log_or_a_ledger_that_is_away_is_503(
    world: TileWorld, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resources.ledger.protocol import LedgerUnavailable

    def away(*_: Any, **__: Any) -> Any:
        raise LogUnavailable("away")

    def locked(*_: Any, **__: Any) -> Any:
        raise LedgerUnavailable("locked")

    monkeypatch.setattr(type(world.log), "extents", away)
    monkeypatch.setattr(type(world.ledger), "lag", locked)
    for path in ("/heat.geojson", "/waiting.geojson"):
        answer = client.get(path, params={"zoom": 3})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


def test_nothing_is_read_while_nobody_looks_and_once_when_many_do(
    world: TileWorld, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lags: list[int] = []
    plain = type(world.ledger).lag
    monkeypatch.setattr(type(world.ledger), "lag", lambda self, length: (lags.append(length), plain(self, length))[1])
    world.publish(HERE, DATA)
    client.get("/tiles.json")
    assert lags == []

    def ask() -> None:
        client.get("/waiting.geojson", params={"zoom": 7})

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lags == [9]


def test_tiles_are_served_while_lookers_wait_for_a_slow_ledger(
    world: TileWorld, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(HERE, DATA)
    release = threading.Event()
    monkeypatch.setattr(type(world.ledger), "lag", lambda *_: release.wait(patient(120)) and [])
    with contextlib.ExitStack() as stack:
        # More than the threads that the server reads tiles with.
        for _ in range(50):
            waiting = stack.enter_context(socket.create_connection((client.base_url.host, client.base_url.port or 0)))
            waiting.sendall(b"GET /waiting.geojson?zoom=7 HTTP/1.1\r\nHost: here\r\n\r\n")
        time.sleep(0.3)
        try:
            answer = client.get(f"/tiles/{HERE.path}.mvt", timeout=patient(30))
        finally:
            release.set()
    assert answer.status_code == 200


def test_the_server_loads_without_h3_and_heat_without_numpy() -> None:
    code = (
        "import sys, geo_assets.services.tileserver.app as app\n"
        "before = {'h3', 'numpy', 'shapely', 'dagster', 'pyproj'} & set(sys.modules)\n"
        "from geo_assets.services.tileserver.heat import cell_of\n"
        "from geo_assets.services.cells import ring_of\n"
        "ring_of(cell_of(14, 9327, 4739))\n"
        "print(before, {'numpy', 'shapely', 'dagster', 'pyproj'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() set()"
