from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from geo_assets.events import topics
from geo_assets.flow.epochs import mark
from geo_assets.geofence.frames import DWELL, ENTER, EXIT, Trigger, encode
from geo_assets.services import fences as folding
from geo_assets.services.tileserver import Options, create_app, live
from geo_assets.services.tileserver.live import LiveClient, Wanted
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Box
from geo_assets_tests.geofence_world import fence, position, post_fences
from geo_assets_tests.services.running import running
from geo_assets_tests.services.tile_world import Stream, TileWorld
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient, until
from resources.event_log.protocol import NewRecord

BOX = "24,60,26,61"
ALL = "fences,devices,triggers"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TileWorld]:
    world = TileWorld(tmp_path / "home")
    yield world
    world.close()


@pytest.fixture
def client(world: TileWorld) -> Iterator[httpx.Client]:
    with world.served() as client:
        yield client


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def trigger(number: int, *, epoch: int = 5, device: str = "bus-18", fence_id: str = 'demo:"f0"') -> Trigger:
    state = (ENTER, DWELL, EXIT)[number % 3]
    return Trigger(device, fence_id, state, now_ms() + number, number, 3, 0, number, 1, epoch, number)


def send(world: TileWorld, *values: bytes, partition: int = 0) -> None:
    """Values of records of one partition of `[triggers]`."""
    world.log.append([NewRecord(topics.TRIGGERS, None, value, partition=partition) for value in values])


def watch(client: httpx.Client, show: str = ALL, box: str | None = BOX) -> Stream:
    return Stream(client, path="/live", show=show, **({} if box is None else {"bbox": box}))


def heard(stream: Stream, number: int) -> dict[str, list[Any]]:
    """Device -> its newest row, until so many devices were told of."""
    found: dict[str, list[Any]] = {}
    while len(found) < number:
        found |= {row[0]: row for row in stream.named("devices")["devices"]}
    return found


def told(stream: Stream, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < number:
        found += stream.named("triggers")["triggers"]
    return found


@pytest.mark.parametrize("stack_name", STACKS)
def test_a_page_hears_devices_triggers_and_changed_fences(stack_name: str, tmp_path: Path) -> None:
    with changes_of(stack_name) as changes:
        world = TileWorld(tmp_path / "home", **changes)
        start = now_ms()
        world.log.append([position("early", start - 1, 24.9, 60.2)])
        send(world, mark(5), encode(trigger(0)))
        with world.served() as client, Stack(world.settings) as stack:
            stream = watch(client)
            assert stream.response.headers["content-type"].startswith("text/event-stream")
            assert heard(stream, 1)["early"][1:4] == [24.9, 60.2, start - 1]
            assert [t["sequence"] for t in told(stream, 1)] == [0]
            post_fences(stack, [fence(0, name="Depot")])
            folding.FenceBook(stack).fold()
            until(lambda: stream.named("fences")["total"] == 1, why="the fence is told")
            world.log.append([position("bus", start + 1, 24.91, 60.2), position("far", start, 3.0, 50.0)])
            assert set(heard(stream, 1)) == {"bus"}
            send(world, encode(trigger(1)), encode(trigger(2)))
            found = told(stream, 2)
            assert [(t["state"], t["fence_name"]) for t in found] == [("DWELL", "Depot"), ("EXIT", "Depot")]
            assert found[0]["fence_at"] == pytest.approx([24.905, 60.155])
        world.close()


def test_a_device_is_told_newest_alone_and_once_more_when_it_leaves(world: TileWorld, client: httpx.Client) -> None:
    stream = watch(client, "devices")
    start = now_ms()
    world.log.append([position("bus", start, 24.5, 60.5)])
    heard(stream, 1)
    world.log.append(
        [
            position("bus", start + 2, 24.6, 60.5),
            position("bus", start + 1, 24.55, 60.5),
            NewRecord(topics.POSITIONS, "x", b"?"),
        ]
    )
    assert stream.named("devices")["devices"][0][:4] == ["bus", 24.6, 60.5, start + 2]
    world.log.append([position("bus", start + 3, 3.0, 50.0)])
    assert stream.named("devices")["devices"][0][:3] == ["bus", 3.0, 50.0]
    world.log.append([position("bus", start + 4, 3.1, 50.0), position("tram", start + 4, 24.5, 60.5)])
    assert set(heard(stream, 1)) == {"tram"}


def test_a_position_of_a_foreign_producer_is_shown_whatever_its_time_is_called(
    world: TileWorld, client: httpx.Client
) -> None:
    stream = watch(client, "devices")
    times: dict[str, dict[str, object]] = {
        "a": {"event_time_ms": 1_700_000_000_001},
        "b": {"time_ms": 1_700_000_000_002},
        "c": {"time_s": 1_700_000_000.003},
        "d": {"time": "2023-11-14T22:13:20Z"},
    }
    for device, said in times.items():
        value = json.dumps({"device_id": device, "lon": 24.5, "lat": 60.5, **said}).encode()
        world.log.append([NewRecord(topics.POSITIONS, device, value, {}, 1_700_000_000_004)])
    assert {device: row[3] % 1000 for device, row in heard(stream, 4).items()} == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_marks_void_triggers_and_repetitions_are_not_told(world: TileWorld, client: httpx.Client) -> None:
    stream = watch(client, "triggers")
    until(lambda: "tileserver_live_clients 1.0" in client.get("/metrics").text)
    again = encode(trigger(1, epoch=7))
    send(world, mark(6), encode(trigger(0, epoch=6)), mark(7), encode(trigger(9, epoch=6)), again, again, b"\x09?", b"")
    # In another partition the epoch was not seen yet.
    send(world, encode(trigger(2, epoch=6)), partition=1)
    assert sorted(t["sequence"] for t in told(stream, 3)) == [0, 1, 2]
    send(world, encode(trigger(10, epoch=6)), encode(trigger(11, epoch=7)))
    assert [t["sequence"] for t in told(stream, 1)] == [11]


def test_rule_12_devices_are_shown_on_loopback_alone_unless_said_otherwise(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"public_tiles_url": "https://map.example"}, False),
        ({"public_tiles_url": "http://localhost:8788"}, True),
        ({"host": "0.0.0.0", "device_view": True}, True),
        ({"device_view": False}, False),
    ]
    for number, (changes, shows) in enumerate(cases):
        world = TileWorld(tmp_path / str(number), **changes)
        assert (world.settings.shows_devices, changes) == (shows, changes)
        with world.served() as client:
            assert client.get("/page.json").json()["devices"] is shows
            if not shows:
                for show in ("devices", "triggers", ALL):
                    answer = client.get(f"/live?show={show}", headers={"Host": "127.0.0.1"})
                    assert answer.status_code == 403
                    assert "GEO_ASSETS_DEVICE_VIEW" in answer.json()["detail"]
                assert watch(client, "fences").response.status_code == 200
        world.close()


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Host": "rebound.example"}, "Host"),
        ({"Host": "127.0.0.1.rebound.example:8788"}, "Host"),
        ({"Sec-Fetch-Site": "cross-site"}, "Sec-Fetch-Site"),
        ({"Sec-Fetch-Site": "same-site"}, "Sec-Fetch-Site"),
        ({"Origin": "https://elsewhere.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
    ],
)
def test_rule_12_a_page_of_another_site_hears_no_device(
    client: httpx.Client, headers: dict[str, str], field: str
) -> None:
    answer = client.get("/live?show=devices", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["field"] == field
    assert "access-control-allow-origin" not in answer.headers
    preflight = client.options("/live", headers={"Origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in preflight.headers


def test_rule_12_the_stream_is_not_for_other_origins_and_not_for_caches(client: httpx.Client) -> None:
    headers = watch(client, "devices").response.headers
    assert "access-control-allow-origin" not in headers
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"].startswith("no-store")


def test_rule_12_metrics_and_logs_show_no_device(
    world: TileWorld, client: httpx.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = watch(client)
    world.log.append([position("secret-bus", now_ms(), 24.123456, 60.654321)])
    heard(stream, 1)
    everything = client.get("/metrics").text + "".join(capfd.readouterr())
    assert "tileserver_live_clients 1.0" in everything
    for word in ("secret-bus", "24.123", "60.654"):
        assert word not in everything


def test_nothing_is_read_and_nothing_remembered_while_nobody_listens(
    world: TileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    honest = type(world.log).extents

    def noted(log: Any, topic: str) -> Any:
        read.append(topic)
        return honest(log, topic)

    monkeypatch.setattr(type(world.log), "extents", noted)
    with world.served() as client:
        time.sleep(0.5)
        assert topics.POSITIONS not in read
        stream = watch(client, "devices")
        world.log.append([position("bus", now_ms(), 24.5, 60.5)])
        heard(stream, 1)
        assert topics.POSITIONS in read
        assert topics.TRIGGERS not in read


def test_a_slow_client_is_told_the_newest_and_nothing_queues_up(world: TileWorld) -> None:
    client = LiveClient(Wanted(Box(0, 0, 10, 10), devices=True, triggers=True))
    for step in range(1_000):
        client.notice([(f"d{n}", live._Seen(1 + step / 1000, 1, step, step, 0.0)) for n in range(3)])
        client.hear([{"sequence": step}])
    assert len(client.moved) == 3
    assert len(client.told) == live.MOST_TOLD
    message = client.message().decode()
    devices, triggers = (json.loads(part.partition("data: ")[2]) for part in message.strip().split("\n\n"))
    assert devices["devices"][0] == ["d0", 1.999, 1, 999, 999]
    assert triggers["missed"] == 1_000 - live.MOST_TOLD
    assert triggers["triggers"][-1] == {"sequence": 999}
    assert client.message() == b""


def test_more_devices_than_one_client_is_told_of_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_SHOWN", 2)
    client = LiveClient(Wanted(devices=True))
    client.notice([(f"d{n}", live._Seen(1, 1, 1, 1, 0.0)) for n in range(5)])
    body = json.loads(client.message().decode().partition("data: ")[2])
    assert (len(body["devices"]), body["left_out"]) == (2, 3)


def test_what_is_more_than_a_map_shows_is_skipped_and_counted(
    world: TileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "TRIGGERS_A_ROUND", 100)  # the least share of a partition is 100 as well
    monkeypatch.setattr(live, "TICK_S", 1.0)
    with world.served() as client:
        stream = watch(client, "triggers")
        until(lambda: "tileserver_live_clients 1.0" in client.get("/metrics").text)
        time.sleep(0.3)
        send(world, *(encode(trigger(number)) for number in range(350)))
        body = stream.named("triggers")
        assert body["missed"] == 250
        assert [t["sequence"] for t in body["triggers"]] == list(range(250, 350))


def test_a_log_that_is_away_is_waited_for(world: TileWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    from resources.event_log.protocol import LogUnavailable

    monkeypatch.setattr(live, "PAUSE_S", 0.1)
    away = True
    honest = type(world.log).extents

    def sometimes(log: Any, topic: str) -> Any:
        if away and topic == topics.POSITIONS:
            raise LogUnavailable("not now")
        return honest(log, topic)

    monkeypatch.setattr(type(world.log), "extents", sometimes)
    with world.served() as client:
        stream = watch(client, "devices")
        time.sleep(0.3)
        assert client.get("/healthz").status_code == 200
        away = False
        world.log.append([position("bus", now_ms(), 24.5, 60.5)])
        assert set(heard(stream, 1)) == {"bus"}


@pytest.mark.parametrize(
    ("query", "field"),
    [("show=everything", "show"), ("show=", "show"), ("bbox=1,2", "bbox"), ("show=a&show=b", "show")],
)
def test_a_malformed_question_names_its_parameter(client: httpx.Client, query: str, field: str) -> None:
    answer = client.get(f"/live?{query}")
    assert answer.status_code == 400
    assert answer.json()["field"] == field


def test_beyond_its_places_a_listener_is_told_when_to_come_again(world: TileWorld) -> None:
    with world.served(max_live_clients=1) as client:
        stream = watch(client, "fences")
        until(lambda: "tileserver_live_clients 1.0" in client.get("/metrics").text)
        answer = client.get("/live?show=fences")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "10"
        assert stream.response.status_code == 200


def from_address(address: str) -> dict[str, str]:
    """What a proxy on this machine says of its client."""
    return {"X-Forwarded-For": address}


def test_no_address_takes_every_place(world: TileWorld) -> None:
    with world.served(max_live_clients=4, max_live_of_one=2) as client, ThreadPoolExecutor(8) as pool:

        def ask(address: str) -> httpx.Response:
            url = client.build_request("GET", "/live?show=fences", headers=from_address(address))
            return client.send(url, stream=True)

        # However many it asks for at once.
        answers = list(pool.map(ask, ["203.0.113.7"] * 8))
        taken = [answer for answer in answers if answer.status_code == 200]
        assert len(taken) == 2
        assert sorted({answer.status_code for answer in answers}) == [200, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "10"
        assert json.loads(refused.read())["limit"] == 2
        # A network of IPv6 is one, and others have their places until all are taken.
        assert [ask(f"2001:db8::{n}").status_code for n in range(3)] == [200, 200, 429]
        assert ask("198.51.100.1").status_code == 503
        # A place is free again when its stream has ended.
        taken[0].close()
        until(lambda: ask("203.0.113.7").status_code == 200)


def test_a_client_that_forges_the_header_is_believed_by_nobody(world: TileWorld) -> None:
    app = create_app(world.ledger, world.tiles, world.log, world.layers, world.settings, Options(max_live_of_one=1))
    with (
        running(app, on_stop=app.state.end_streams, forwarded_allow_ips="192.0.2.1") as url,
        httpx.Client(base_url=url, timeout=patient(30)) as client,
    ):
        answers = [
            client.send(client.build_request("GET", "/live", headers=from_address(f"203.0.113.{n}")), stream=True)
            for n in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 429]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("unix", "", False),
    ],
)
def test_addresses_that_count_as_one(one: str, other: str, same: bool) -> None:
    assert (live.whose(one) == live.whose(other)) is same


def test_a_box_over_the_date_line_holds_both_its_sides() -> None:
    wanted = Wanted(Box(170, -10, -170, 10))
    assert wanted(175, 0)
    assert wanted(-175, 0)
    assert not wanted(0, 0)
    assert not wanted(175, 11)


def test_the_event_loop_is_never_blocked_by_a_slow_log(world: TileWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, asked, answers = type(world.log).extents, threading.Event(), threading.Event()

    def slow(log: Any, topic: str) -> Any:
        if topic == topics.POSITIONS:
            asked.set()
            answers.wait(patient(120))
        return honest(log, topic)

    monkeypatch.setattr(type(world.log), "extents", slow)
    with world.served() as client:
        try:
            watch(client, "devices")
            assert asked.wait(patient(30))
            for _ in range(5):
                assert client.get("/healthz").status_code == 200
            assert not answers.is_set()
        finally:
            answers.set()
