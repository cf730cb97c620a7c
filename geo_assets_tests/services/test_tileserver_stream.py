from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events import topics
from geo_assets.services.tileserver import create_app
from geo_assets.services.tileserver import stream as stream_module
from geo_assets.services.tileserver.metrics import Metrics
from geo_assets.services.tileserver.stream import ChangeHub, Client, Delivery, Filter, _parse, _point
from geo_assets.tiles.tile import MAX_LATITUDE, Box, Tile
from geo_assets.tiles.workkey import tile_hash
from geo_assets_tests.services.running import running
from geo_assets_tests.services.tile_world import HERE, Stream, TileWorld
from geo_assets_tests.waiting import patient, until
from resources.event_log.protocol import NewRecord

ROW = [Tile(14, HERE.x + dx, HERE.y) for dx in range(8)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TileWorld]:
    world = TileWorld(tmp_path / "home")
    yield world
    world.close()


@pytest.fixture
def client(world: TileWorld) -> Iterator[httpx.Client]:
    with world.served(heartbeat_s=60.0) as client:
        yield client


def _metric(client: httpx.Client, line: str) -> float:
    for row in client.get("/metrics").text.splitlines():
        if row.startswith(line + " "):
            return float(row.rsplit(" ", 1)[1])
    return 0.0


def test_a_committed_tile_is_told_with_its_hash_and_revision(world: TileWorld, client: httpx.Client) -> None:
    stream = Stream(client).started()
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert stream.response.headers["access-control-allow-origin"] == "*"
    assert "no-store" in stream.response.headers["cache-control"]
    world.publish(HERE, b"one")
    (event,) = stream.changes(1)
    assert event.body == {"z": HERE.z, "x": HERE.x, "y": HERE.y, "hash": tile_hash(b"one"), "revision": 1}
    assert "event" not in event, "unnamed events are what EventSource.onmessage hears"
    world.publish(HERE, None)
    (event,) = stream.changes(1)
    assert event.body["hash"] is None
    assert event.body["revision"] == 2


def test_what_was_told_before_the_stream_opened_is_not_told_again(world: TileWorld, client: httpx.Client) -> None:
    before = Stream(client).started()
    world.publish(HERE, b"one")
    before.changes(1)
    assert Stream(client).started().silent()


def test_a_change_reaches_the_client_when_it_comes_and_not_at_the_end_of_a_wait_for_it(
    world: TileWorld, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "POLL_S", 2.0)
    stream = Stream(client).started()
    began = time.monotonic()
    for number in range(20):
        world.publish(ROW[number % 8], b"%d" % number, tell=False)
        state = world.ledger.read([ROW[number % 8].key])[ROW[number % 8].key]
        value = b'{"z":%d,"x":%d,"y":%d,"hash":"%s","revision":%d}' % (
            14, ROW[number % 8].x, ROW[number % 8].y, (state.content_hash or "").encode(), state.revision,
        )  # fmt: skip
        world.log.append([NewRecord(topics.TILE_UPDATED, ROW[number % 8].key, value)])
        stream.changes(1)
    # Of forty seconds of waits.
    assert time.monotonic() - began < patient(20)


def test_a_client_resumes_where_it_stopped_and_hears_the_newest_of_each_tile_once(
    world: TileWorld, client: httpx.Client
) -> None:
    first = Stream(client).started()
    world.publish(ROW[0], b"heard")
    first.changes(1)
    for number in range(3):
        for tile in ROW[1:4]:
            world.publish(tile, b"missed %d" % number)
    again = Stream(client, resume=first.id)
    missed = again.changes(3)
    assert {event.tile: event.body["revision"] for event in missed} == {tile.path: 3 for tile in ROW[1:4]}
    world.publish(ROW[5], b"live")
    assert again.changes(1)[0].tile == ROW[5].path
    assert again.silent()


def test_an_old_announcement_that_came_late_is_not_told_to_a_client_that_resumes(
    world: TileWorld, client: httpx.Client
) -> None:
    first = Stream(client).started()
    for number in range(3):
        world.publish(ROW[0], b"version %d" % number)
    assert [event.body["revision"] for event in first.changes(3)] == [1, 2, 3]
    late = b'{"z":%d,"x":%d,"y":%d,"hash":"ab","revision":2}' % (ROW[0].z, ROW[0].x, ROW[0].y)
    world.log.append([NewRecord(topics.TILE_UPDATED, ROW[0].key, late)])
    world.publish(ROW[1], b"missed")
    first.changes(1)
    again = Stream(client, resume=first.id)
    world.publish(ROW[2], b"live")
    assert [event.tile for event in again.changes(1)] == [ROW[2].path]

    begun = Stream(client).started().id
    world.log.append([NewRecord(topics.TILE_UPDATED, ROW[0].key, late)])
    world.publish(ROW[3], b"missed")
    assert [event.tile for event in Stream(client, resume=begun).changes(1)] == [ROW[3].path]


def test_the_resume_point_may_stand_in_the_url_and_the_header_wins(world: TileWorld, client: httpx.Client) -> None:
    stream = Stream(client).started()
    start = stream.id
    world.publish(ROW[0], b"one")
    stream.changes(1)
    assert Stream(client, last_event_id=start).changes(1)[0].tile == ROW[0].path
    assert Stream(client, resume=stream.id, last_event_id=start).started().silent()


def test_every_id_is_a_point_from_which_nothing_is_missed(world: TileWorld, client: httpx.Client) -> None:
    stream = Stream(client).started()
    for tile in ROW:
        world.publish(tile, b"x")
    events = stream.changes(8)
    for number, event in enumerate(events):
        rest = {e.tile for e in events[number + 1 :]}
        again = Stream(client, resume=event["id"])
        assert {e.tile for e in again.changes(len(rest))} == rest
        assert again.silent(0.05)


def test_tilejson_names_a_point_from_which_a_map_misses_nothing(world: TileWorld, client: httpx.Client) -> None:
    resume = client.get("/tiles.json").json()["live"]["resume"]
    world.publish(HERE, b"between the map's start and its stream")
    assert Stream(client, resume=resume).changes(1)[0].tile == HERE.path


@pytest.mark.parametrize(
    "resume", ["nonsense", "0123456789ab:", "0123456789ab:1.2.3.4", "zz:1", "0123456789ab:" + "9" * 19]
)
def test_a_resume_point_of_another_epoch_or_none_at_all_gets_a_reset(
    world: TileWorld, client: httpx.Client, resume: str
) -> None:
    stream = Stream(client, resume=resume)
    event = stream.next()
    assert event is not None
    assert event["event"] == "reset"
    assert event.body["reason"] in ("epoch", "malformed")
    # The reset carries the point to go on from.
    world.publish(HERE, b"after")
    assert stream.changes(1)[0].tile == HERE.path
    assert Stream(client, resume=event["id"]).changes(1)[0].tile == HERE.path


def test_a_resume_point_beyond_the_end_of_the_log_gets_a_reset_and_hears_what_comes(
    world: TileWorld, client: httpx.Client
) -> None:
    world.publish(HERE, b"before")
    point = client.get("/tiles.json").json()["live"]["resume"]
    assert point is not None
    token, _, offsets = point.partition(":")
    beyond = f"{token}:{'.'.join(str(int(offset) + 1_000_000) for offset in offsets.split('.'))}"
    stream = Stream(client, last_event_id=beyond)
    event = stream.next()
    assert event is not None
    assert (event["event"], event.body["reason"]) == ("reset", "beyond-end")
    world.publish(HERE, b"after")
    assert stream.changes(1)[0].tile == HERE.path


def test_a_resume_point_of_a_server_that_read_further_is_no_cause_for_a_reset(world: TileWorld) -> None:
    with world.served() as client:
        point = Stream(client).started().id
        assert point is not None
        hub = ChangeHub(world.log, world.ledger, Metrics(world.ledger))
        token, offsets = _parse(point)
        hub._token = token
        # This server has read nothing yet of what the other one told.
        world.publish(HERE, b"one")
        ends = {p: extent.end for p, extent in world.log.extents(topics.TILE_UPDATED).items()}
        assert sum(ends.values()) > sum(offsets.values())
        missed = asyncio.run(hub._missed(_point(token, ends), offsets, hub.client(Filter())))
        assert missed == ([], None)


def test_a_resume_point_beyond_retention_gets_a_reset(world: TileWorld, client: httpx.Client) -> None:
    stream = Stream(client).started()
    world.publish(HERE, b"one")
    stream.changes(1)
    old = Stream(client).started().id
    assert old is not None
    for number in range(3):
        for tile in ROW:
            world.publish(tile, b"%d" % number)
    stream.changes(24)
    deleted = world.log.enforce_retention(now_ms=int(time.time() * 1000) + 30 * 24 * 3600 * 1000)
    if not any(extent.begin for extent in world.log.extents(topics.TILE_UPDATED).values()):
        pytest.fail(f"retention deleted nothing: {deleted}")
    event = Stream(client, resume=old).next()
    assert event is not None
    assert (event["event"], event.body["reason"]) == ("reset", "retention")
    # A stream that had read everything goes on.
    world.publish(HERE, b"two")
    assert stream.changes(1)[0].tile == HERE.path


def test_a_resume_that_would_read_too_much_gets_a_reset(world: TileWorld) -> None:
    with world.served(replay_records=10) as client:
        first = Stream(client).started()
        first_id = first.id
        for number in range(2):
            for tile in ROW:
                world.publish(tile, b"%d" % number)
        first.changes(2 * len(ROW))
        event = Stream(client, resume=first_id).next()
        assert event is not None
        assert (event["event"], event.body["reason"]) == ("reset", "too-far")


def test_a_new_epoch_after_a_restore_makes_every_client_reload(
    world: TileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_assets.services.tileserver.stream.EPOCH_CHECK_S", 0.1)
    with world.served() as client:
        stream = Stream(client).started()
        world.publish(HERE, b"revision one")
        stream.changes(1)
        before = stream.id
        world.ledger.set_value("sse-epoch", "restored")
        event = stream.next()
        assert event is not None
        assert (event["event"], event.body["reason"]) == ("reset", "epoch")
        again = Stream(client, resume=before).next()
        assert again is not None
        assert again["event"] == "reset"
        # Revisions start over with the epoch: the same one is news again.
        value = b'{"z":14,"x":1,"y":2,"hash":"ab","revision":1}'
        for _ in range(2):
            world.log.append([NewRecord(topics.TILE_UPDATED, "k", value)])
        assert stream.changes(1)[0].tile == "14/1/2"
        assert stream.silent()


def test_the_epoch_is_made_once_and_outlives_the_server(world: TileWorld) -> None:
    with world.served() as client:
        stream = Stream(client).started()
        world.publish(HERE, b"one")
        stream.changes(1)
        resume = stream.id
    world.publish(ROW[1], b"while it was down")
    with world.served() as client:
        assert Stream(client, resume=resume).changes(1)[0].tile == ROW[1].path


def test_a_revision_not_above_the_one_told_is_told_to_nobody(world: TileWorld, client: httpx.Client) -> None:
    stream = Stream(client).started()

    def announce(revision: int) -> None:
        value = b'{"z":14,"x":1,"y":2,"hash":"ab","revision":%d}' % revision
        world.log.append([NewRecord(topics.TILE_UPDATED, "14:x", value)])

    for revision in (3, 2, 3, 4, 4, 1):
        announce(revision)
    assert [event.body["revision"] for event in stream.changes(2)] == [3, 4]
    assert stream.silent()
    assert _metric(client, "tileserver_sse_suppressed_total") == 4


def test_what_is_no_announcement_is_counted_and_harms_nobody(world: TileWorld, client: httpx.Client) -> None:
    stream = Stream(client).started()
    for value in (
        None,
        b"",
        b"[]",
        b"{}",
        b'{"z":14,"x":99999,"y":1,"hash":null,"revision":1}',
        b'{"z":1,"x":0,"y":0,"hash":null,"revision":0}',
    ):
        world.log.append([NewRecord(topics.TILE_UPDATED, "k", value)])
    world.publish(HERE, b"one")
    assert stream.changes(1)[0].tile == HERE.path
    assert _metric(client, "tileserver_sse_unreadable_total") == 6


def test_how_long_an_announcement_took_to_the_streams_is_counted_whoever_wrote_it(
    world: TileWorld, client: httpx.Client
) -> None:
    stream = Stream(client).started()
    now = time.time_ns() // 1_000
    for revision, stages in enumerate(
        (b"", b',"stages":{"received":%d,"announced":%d}' % (now - 9_000_000, now), b',"stages":{"received":"\xff"}'), 1
    ):
        value = b'{"z":14,"x":%d,"y":%d,"hash":null,"revision":%d%s}' % (HERE.x, HERE.y, revision, stages)
        world.log.append([NewRecord(topics.TILE_UPDATED, HERE.key, value)])
        assert set(stream.changes(1)[0].body) == {"z", "x", "y", "hash", "revision"}
    assert _metric(client, 'edit_stage_seconds_count{stage="sent"}') == 3
    assert _metric(client, 'edit_age_seconds_count{stage="sent"}') == 1
    assert _metric(client, 'edit_age_seconds_sum{stage="sent"}') > 9


def test_a_client_hears_only_of_its_zooms_and_its_box(world: TileWorld, client: httpx.Client) -> None:
    west, south, east, north = ROW[2].bounds
    inside = 1e-5
    boxed = Stream(client, bbox=f"{west + inside},{south + inside},{east - inside},{north - inside}").started()
    zoomed = Stream(client, min_zoom=15, max_zoom=16).started()
    for tile in ROW:
        world.publish(tile, b"x")
    world.publish(ROW[2].children()[0], b"x")
    world.publish(ROW[2].ancestor(3), b"x")
    assert {event.tile for event in boxed.changes(3)} == {
        ROW[2].path,
        ROW[2].children()[0].path,
        ROW[2].ancestor(3).path,
    }
    assert [event.tile for event in zoomed.changes(1)] == [ROW[2].children()[0].path]
    assert boxed.silent(0.1)
    assert zoomed.silent(0.1)


def test_heartbeats_move_the_resume_point_past_what_the_filter_left_out(world: TileWorld) -> None:
    with world.served(heartbeat_s=0.2) as client:
        stream = Stream(client, min_zoom=20).started()
        before = stream.id
        world.publish(HERE, b"not for this client")
        deadline = time.monotonic() + patient(60)
        while stream.id == before:
            assert time.monotonic() < deadline, "heartbeats name no other point"
            event = stream.next()
            assert event is not None
            assert "data" not in event
        assert Stream(client, resume=stream.id).started().silent(0.1)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"bbox": "1,2,3"}, "bbox"),
        ({"bbox": "inf,2,3,4"}, "bbox"),
        ({"min_zoom": "-1"}, "min_zoom"),
        ({"max_zoom": "23"}, "max_zoom"),
        ({"max_zoom": "x"}, "max_zoom"),
        ({"min_zoom": "5", "max_zoom": "4"}, "min_zoom"),
    ],
)
def test_a_malformed_filter_is_400_and_names_its_field(
    client: httpx.Client, parameters: dict[str, Any], field: str
) -> None:
    answer = client.get("/events", params=parameters)
    assert answer.status_code == 400
    assert answer.json()["field"] == field


def test_a_head_of_the_stream_ends(client: httpx.Client) -> None:
    assert client.head("/events").status_code == 200
    assert _metric(client, "tileserver_sse_clients") == 0


def test_a_client_that_leaves_gives_its_place_back(world: TileWorld) -> None:
    with world.served(max_clients=1) as client:
        with httpx.stream("GET", f"{client.base_url}/events", timeout=patient(30)) as response:
            lines = response.iter_lines()
            next(lines)
            refused = client.get("/events")
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
        until(lambda: not _metric(client, "tileserver_sse_clients"), why="its place is free", every=0.05)
        Stream(client).started()


def test_rule_9_a_slow_client_is_dropped_with_a_resume_point_and_misses_nothing(world: TileWorld) -> None:
    # The value of an announcement may be long; what clients get is short, so it takes many to fill a socket.
    with world.served(queue_changes=500) as client:
        host, port = client.base_url.host, client.base_url.port
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, port))
        slow.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        received = slow.recv(2048)
        while b"id: " not in received:
            received += slow.recv(2048)
        quick = Stream(client).started()
        told = 0
        deadline = time.monotonic() + patient(60)
        while _metric(client, "tileserver_sse_drops_total") == 0 and time.monotonic() < deadline:
            world.log.append([_numbered(told + number) for number in range(500)])
            told += 500
            quick.changes(500)
        assert _metric(client, "tileserver_sse_drops_total") == 1
        slow.settimeout(patient(30))
        while chunk := slow.recv(65536):
            received += chunk
        slow.close()
        text = received.decode()
        assert "event: dropped" in text
        last = [line.partition(": ")[2].strip() for line in text.splitlines() if line.startswith("id: ")][-1]
        heard = {line for line in text.splitlines() if line.startswith('data: {"z"')}
        assert len(heard) < told
        again = Stream(client, resume=last)
        rest = {f"data: {event['data']}" for event in again.changes(told - len(heard))}
        assert len(heard | rest) == told
        assert again.silent(0.2)


def _numbered(number: int) -> NewRecord:
    tile = Tile(22, 1_000_000 + number, 1_000_000)
    value = b'{"z":22,"x":%d,"y":%d,"hash":"%s","revision":1}' % (tile.x, tile.y, b"ab" * 32)
    return NewRecord(topics.TILE_UPDATED, tile.key, value)


def test_many_clients_share_one_reader_and_hear_the_same(world: TileWorld, client: httpx.Client) -> None:
    with ThreadPoolExecutor(20) as pool:
        streams = list(pool.map(lambda _: Stream(client).started(), range(20)))
    reads = 0
    read = type(world.log).read

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reads
        reads += 1
        return read(*args, **kwargs)

    type(world.log).read = counted  # type: ignore[method-assign]
    try:
        for tile in ROW:
            world.publish(tile, b"x")
        heard = [{event.tile for event in stream.changes(8)} for stream in streams]
    finally:
        type(world.log).read = read  # type: ignore[method-assign]
    assert heard == [{tile.path for tile in ROW}] * 20
    assert reads <= 8, "one read a partition and look, not one a client"


def test_a_server_that_ends_closes_its_streams_at_once(world: TileWorld) -> None:
    app = create_app(world.ledger, world.tiles, world.log, world.layers, world.settings)
    with running(app, on_stop=app.state.end_streams, grace_s=60) as url, httpx.Client(base_url=url) as client:
        stream = Stream(client).started()
        began = time.monotonic()
    # Not after the time that open requests have.
    assert time.monotonic() - began < patient(15)
    assert stream.next() is None


async def test_a_full_queue_drops_the_client_and_frees_what_was_waiting() -> None:
    client = Client(Filter(), limit=3)
    delivery = Delivery(("change",) * 2, "token:1")  # type: ignore[arg-type]
    assert client.offer(delivery)
    assert not client.offer(delivery)
    assert client.dropped
    assert list(client.take()) == []
    assert client.offer(delivery), "a client that is dropped already is not dropped again"
    await asyncio.wait_for(client.wait(), patient(30))


_degrees = st.floats(-180, 180, allow_nan=False)
_latitudes = st.floats(-90, 90, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(_degrees, _degrees, _latitudes, _latitudes, st.integers(0, 12), st.data())
def test_a_filter_wants_every_tile_that_its_box_overlaps(
    a: float, b: float, c: float, d: float, zoom: int, data: st.DataObject
) -> None:
    south, north = sorted((c, d))
    wanted = Filter(0, 22, Box(a, south, b, north))
    side = (1 << zoom) - 1
    tile = Tile(zoom, data.draw(st.integers(0, side)), data.draw(st.integers(0, side)))
    box = tile.bounds
    spans = [(a, b)] if a <= b else [(a, 180.0), (-180.0, b)]
    low, high = (max(-MAX_LATITUDE, min(MAX_LATITUDE, value)) for value in (south, north))
    hair = 1e-9
    overlaps = (
        any(w < box.east - hair and e > box.west + hair for w, e in spans)
        and low < box.north - hair
        and high > box.south + hair
    )
    apart = (
        all(w > box.east + hair or e < box.west - hair for w, e in spans)
        or low > box.north + hair
        or high < box.south - hair
    )
    if overlaps:
        assert wanted(tile.z, tile.x, tile.y)
    if apart:
        assert not wanted(tile.z, tile.x, tile.y)


def test_a_box_whose_west_is_a_hair_east_of_its_east_goes_round_the_world() -> None:
    assert Filter(0, 22, Box(1.6e-112, -1.0, 0.0, 0.0))(3, 0, 4)
    assert not Filter(0, 22, Box(0.0, -1.0, 1.6e-112, 0.0))(3, 0, 4)
