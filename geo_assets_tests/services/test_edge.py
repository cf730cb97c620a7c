from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from geo_assets import ports
from geo_assets.events import topics
from geo_assets.events.signature import sign, sign_plain
from geo_assets.events.sources import Source, Sources
from geo_assets.services import edge as edge_module
from geo_assets.services import edge_body
from geo_assets.services.edge import create_app
from geo_assets.settings import Settings
from geo_assets_tests.services.running import running
from geo_assets_tests.waiting import patient, until
from resources.event_log.protocol import LogUnavailable, Record
from resources.guard.protocol import GuardUnavailable

SECRET = "whsec_" + "c2VjcmV0IG9mIHRoZSBjaXR5IHN1cnZleSE="
OTHER_SECRET = "a plain secret of the bus company"
CALLBACK_URL = "https://survey.example/outcome"
FEATURE = {
    "type": "Feature",
    "id": 4711,
    "version": 1,
    "layer": "buildings",
    "geometry": {"type": "Point", "coordinates": [24.94, 60.17]},
    "properties": {"name": "Kiosk"},
}


class Edge:
    """An edge on a free port, over the embedded adapters, and a sender that signs."""

    def __init__(self, url: str, log: Any, guard: Any, tiles: Any) -> None:
        self.url, self.log, self.guard, self.tiles = url, log, guard, tiles
        self.client = httpx.Client(base_url=url, timeout=patient(30))
        self._number = 0

    def post(
        self,
        kind: str,
        body: Any,
        *,
        webhook_id: str | None = None,
        secret: str = SECRET,
        at: float | None = None,
        signed: bytes | None = None,
        **headers: str,
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._number += 1
        webhook_id = webhook_id or f"message-{self._number}"
        signature = sign(
            secret, webhook_id, int(time.time() if at is None else at), content if signed is None else signed
        )
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(
            f"/v1/{kind}",
            content=content,
            headers={"content-type": "application/json", "x-source": "survey"} | signature | given,
        )

    def records(self, topic: str) -> list[Record]:
        extents = self.log.extents(topic)
        return [record for number, extent in extents.items() for record in self.log.read(topic, number, extent.begin)]

    def kept(self) -> int:
        return sum(len(self.records(topic)) for topic in topics.ALL)


SOURCES = Sources(
    [
        Source(
            "survey",
            secrets=(SECRET,),
            layers=frozenset({"buildings", "roads"}),
            callback_urls=(CALLBACK_URL,),
        ),
        Source("buses", secrets=(OTHER_SECRET,), max_body_bytes=5_000),
    ]
)


def limits(home: Path) -> Settings:
    return Settings(home=home, body_limit_bytes=3_000_000, stream_above_bytes=1_500_000)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return limits(tmp_path / "home")


@contextmanager
def an_edge(settings: Settings, sources: Sources = SOURCES, **replaced: Any) -> Iterator[Edge]:
    """An edge over the embedded adapters; some of them replaced."""
    with ExitStack() as stack:
        parts = {
            "log": ports.open_log(settings),
            "guard": ports.open_guard(settings),
            "tiles": ports.open_tile_store(settings),
        }
        for port in parts.values():
            stack.callback(port.close)
        used = parts | replaced
        app = create_app(used["log"], used["guard"], used["tiles"], sources, settings)
        edge = Edge(stack.enter_context(running(app)), **parts)
        stack.callback(edge.client.close)
        yield edge


@pytest.fixture
def make_edge(settings: Settings) -> Iterator[Callable[..., Edge]]:
    with ExitStack() as stack:
        yield lambda *arguments, **replaced: stack.enter_context(an_edge(settings, *arguments, **replaced))


@pytest.fixture
def edge(settings: Settings) -> Iterator[Edge]:
    with an_edge(settings) as edge:
        yield edge


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """One edge for all that is refused: its log stays empty."""
    with an_edge(limits(tmp_path_factory.mktemp("refusing"))) as edge:
        yield edge
        assert edge.kept() == 0


def is_problem(response: httpx.Response, status: int, field: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    if field is not None:
        assert document["field"] == field
    return document


# -- what is accepted ----------------------------------------------------------------------------------------------


def test_a_signed_feature_is_answered_202_and_stands_in_the_log_byte_for_byte(edge: Edge) -> None:
    body = json.dumps(FEATURE, indent=1).encode()
    before = time.time_ns() // 1_000_000
    answer = edge.post(
        "features", body, webhook_id="m-1", content_type="application/geo+json", x_source_crs="EPSG:3067"
    )
    assert answer.status_code == 202, answer.text
    (record,) = edge.records(topics.RAW)
    assert record.value == body
    assert record.key == "survey:4711"
    stamp = int(record.headers[topics.HEADER_RECEIVED_MS])
    assert before <= stamp <= time.time_ns() // 1_000_000
    assert dict(record.headers) == {
        topics.HEADER_EVENT_ID: "m-1",
        topics.HEADER_SOURCE: "survey",
        topics.HEADER_KIND: "features",
        topics.HEADER_CONTENT_TYPE: "application/geo+json",
        topics.HEADER_CRS: "EPSG:3067",
        topics.HEADER_RECEIVED_MS: str(stamp),
        topics.HEADER_STAGES: record.headers[topics.HEADER_STAGES],
        topics.HEADER_SHA256: hashlib.sha256(body).hexdigest(),
    }
    assert json.loads(record.headers[topics.HEADER_STAGES])["received"] // 1_000 == stamp
    assert answer.json() == {"status": "queued", "event_id": "m-1", "received_ms": stamp}


def test_a_text_id_and_a_number_id_get_different_keys(edge: Edge) -> None:
    edge.post("features", FEATURE | {"id": 123})
    edge.post("features", FEATURE | {"id": "123"})
    assert sorted(r.key or "" for r in edge.records(topics.RAW)) == ['survey:"123"', "survey:123"]


def test_the_event_id_is_the_bodys_else_the_webhooks_else_the_bodys_hash(edge: Edge) -> None:
    assert edge.post("features", FEATURE | {"event_id": "e-7"}).json()["event_id"] == "e-7"
    assert edge.post("features", FEATURE, webhook_id="m-7").json()["event_id"] == "m-7"
    body = json.dumps(FEATURE).encode()
    headers = {
        "x-source": "survey",
        "content-type": "application/json",
        "x-hub-signature-256": sign_plain(SECRET, body),
    }
    answer = edge.client.post("/v1/features", content=body, headers=headers)
    assert answer.json()["event_id"] == hashlib.sha256(body).hexdigest()


def test_a_collection_is_keyed_by_its_event(edge: Edge) -> None:
    collection = {"type": "FeatureCollection", "features": [FEATURE, FEATURE | {"id": 2}]}
    assert edge.post("features", collection, webhook_id="c-1").status_code == 202
    (record,) = edge.records(topics.RAW)
    assert record.key == "survey:c-1"


def test_a_sequence_of_features_is_accepted_under_its_own_content_type(edge: Edge) -> None:
    body = b"".join(b"\x1e" + json.dumps(FEATURE | {"id": n}).encode() + b"\n" for n in range(3))
    assert edge.post("features", body, content_type="application/geo+json-seq").status_code == 202
    (record,) = edge.records(topics.RAW)
    assert record.headers[topics.HEADER_CONTENT_TYPE] == "application/geo+json-seq"
    assert record.value == body


def test_github_style_and_plain_signatures_are_accepted(edge: Edge) -> None:
    body = json.dumps(FEATURE).encode()
    for name in ("X-Hub-Signature-256", "X-Signature"):
        headers = {"x-source": "survey", "content-type": "application/json", name: sign_plain(SECRET, body)}
        assert edge.client.post("/v1/features", content=body, headers=headers).status_code == 202


def test_the_only_source_needs_no_name(make_edge: Callable[..., Edge]) -> None:
    edge = make_edge(Sources([SOURCES["survey"]]))
    body = json.dumps(FEATURE).encode()
    headers = {"content-type": "application/json"} | sign(SECRET, "m", int(time.time()), body)
    assert edge.client.post("/v1/features", content=body, headers=headers).status_code == 202


def test_a_gzip_body_is_signed_as_sent_and_kept_decompressed(edge: Edge) -> None:
    plain = json.dumps(FEATURE).encode()
    half = len(plain) // 2
    two_members = gzip.compress(plain[:half]) + gzip.compress(plain[half:])
    for number, sent in enumerate((gzip.compress(plain), two_members)):
        assert edge.post("features", sent, content_encoding="gzip", webhook_id=f"z-{number}").status_code == 202
    assert [record.value for record in edge.records(topics.RAW)] == [plain, plain]


def test_a_body_over_a_records_limit_goes_to_the_inbox_and_the_record_points_at_it(edge: Edge) -> None:
    body = json.dumps(FEATURE | {"properties": {"text": "x" * 1_100_000}}).encode()
    sha256 = hashlib.sha256(body).hexdigest()
    assert edge.post("features", body).status_code == 202
    (record,) = edge.records(topics.RAW)
    assert record.value == b""
    assert record.headers[topics.HEADER_POINTER] == f"inbox/{sha256}"
    assert record.headers[topics.HEADER_SHA256] == sha256
    assert edge.tiles.get(f"inbox/{sha256}") == body


def test_a_body_that_is_streamed_goes_through_a_file_to_the_inbox(edge: Edge, settings: Settings) -> None:
    features = [FEATURE | {"id": n, "properties": {"text": "y" * 900}} for n in range(2_000)]
    body = json.dumps({"type": "FeatureCollection", "features": features}).encode()
    assert settings.stream_above_bytes < len(body) < settings.body_limit_bytes
    for content, encoding in ((body, "identity"), (gzip.compress(body), "gzip")):
        assert edge.post("features", content, content_encoding=encoding).status_code == 202
    for record in edge.records(topics.RAW):
        assert edge.tiles.get(record.headers[topics.HEADER_POINTER]) == body
    assert list((settings.home / "spool").iterdir()) == []


def test_a_tile_event_goes_straight_to_tiles_under_its_partition_key(edge: Edge) -> None:
    answer = edge.post("tiles", {"zoom": 14, "x": 9327, "y": 4741, "version": 3, "force": True}, webhook_id="t-1")
    assert answer.status_code == 202, answer.text
    (record,) = edge.records(topics.TILES)
    assert record.key == "14:12020013321101"[:3] + record.key[3:]
    assert json.loads(record.value or b"") == {
        "z": 14,
        "x": 9327,
        "y": 4741,
        "event_id": "t-1",
        "source": "survey",
        "version": 3,
        "data_time_ms": answer.json()["received_ms"],
        "force": True,
    }
    assert edge.records(topics.RAW) == []


def test_an_array_of_tile_events_is_appended_whole_or_not_at_all(edge: Edge) -> None:
    good = {"zoom": 3, "x": 1, "y": 1}
    is_problem(edge.post("tiles", [good, good | {"x": 8}]), 400, "[1].x")
    assert edge.kept() == 0
    assert edge.post("tiles", [good, good | {"x": 2}], webhook_id="t-2").status_code == 202
    assert sorted(r.headers[topics.HEADER_EVENT_ID] for r in edge.records(topics.TILES)) == ["t-2:0", "t-2:1"]


def test_a_bbox_that_disagrees_with_its_tile_is_counted_and_not_refused(edge: Edge) -> None:
    assert edge.post("tiles", {"zoom": 1, "x": 0, "y": 0, "bbox": [0, 0, 1, 1]}).status_code == 202
    assert "edge_tile_bbox_disagrees_total 1.0" in edge.client.get("/metrics").text


def test_positions_are_keyed_by_device_with_their_time_in_one_unit(edge: Edge) -> None:
    events = [
        {"device_id": "bus-1", "lon": 24.9, "lat": 60.1, "time": "2026-05-01T12:00:00.250+02:00", "seats": 40},
        {"device_id": "bus-2", "lon": 24.9, "lat": 60.1, "time_s": 1_777_000_000.5},
    ]
    assert edge.post("positions", events).status_code == 202
    values = {r.key: json.loads(r.value or b"") for r in edge.records(topics.POSITIONS)}
    assert values["bus-1"] == events[0] | {"event_time_ms": 1_777_629_600_250}
    assert values["bus-2"]["event_time_ms"] == 1_777_000_000_500


def test_fences_are_keyed_by_source_and_id(edge: Edge) -> None:
    fence = {
        "type": "Feature",
        "id": "depot",
        "radius_m": 150.0,
        "geometry": {"type": "Point", "coordinates": [24.9, 60.1]},
    }
    assert edge.post("fences", fence).status_code == 202
    (record,) = edge.records(topics.FENCES)
    assert record.key == 'survey:"depot"'
    assert json.loads(record.value or b"") == fence


def test_an_allowed_callback_travels_with_the_record_and_another_is_refused(edge: Edge) -> None:
    assert edge.post("features", FEATURE, x_callback_url=CALLBACK_URL).status_code == 202
    (record,) = edge.records(topics.RAW)
    assert record.headers[topics.HEADER_CALLBACK] == CALLBACK_URL
    is_problem(edge.post("features", FEATURE, x_callback_url=CALLBACK_URL + "/else"), 400, "X-Callback-URL")


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-signature": None},
        {"webhook-id": None},
        {"webhook-timestamp": None},
        {"webhook-id": None, "webhook-timestamp": None, "webhook-signature": None},
        {"webhook-signature": ""},
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,!!!"},
        {"webhook-signature": "v2,AAAA"},
        {"webhook-signature": "v1," + "A" * 43 + "="},
        {"webhook-timestamp": "yesterday"},
        {"webhook-timestamp": "1"},
        {"webhook-id": "another"},
        {"x-source": "nobody"},
        {"x-source": "buses"},
        {"webhook-signature": None, "webhook-id": None, "webhook-timestamp": None, "x-signature": "sha256=00"},
    ],
    ids=str,
)
def test_any_signature_fault_is_401_and_nothing_is_in_the_log(refusing: Edge, change: dict[str, str | None]) -> None:
    body = json.dumps(FEATURE).encode()
    headers: dict[str, str | None] = {"content-type": "application/json", "x-source": "survey"}
    headers |= sign(SECRET, "m", int(time.time()), body)
    headers |= change
    answer = refusing.client.post(
        "/v1/features", content=body, headers={k: v for k, v in headers.items() if v is not None}
    )
    is_problem(answer, 401)
    assert "www-authenticate" in answer.headers
    assert refusing.kept() == 0


def test_a_signature_of_other_bytes_or_another_time_is_401(refusing: Edge) -> None:
    is_problem(refusing.post("features", FEATURE, signed=b"other bytes"), 401)
    is_problem(refusing.post("features", FEATURE, at=time.time() - 400), 401)
    is_problem(refusing.post("features", FEATURE, at=time.time() + 400), 401)
    plain = json.dumps(FEATURE).encode()
    is_problem(refusing.post("features", gzip.compress(plain), signed=plain, content_encoding="gzip"), 401)
    assert refusing.kept() == 0


def test_an_unsigned_gzip_bomb_is_not_decompressed(refusing: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_body.zlib, "decompressobj", lambda **_: pytest.fail("decompressed before it was verified"))
    is_problem(refusing.post("features", gzip.compress(b"0" * 1_000_000), signed=b"", content_encoding="gzip"), 401)


def test_no_x_source_among_several_is_400_naming_it(refusing: Edge) -> None:
    is_problem(refusing.post("features", FEATURE, x_source=""), 400, "X-Source")


def test_a_layer_that_is_not_the_sources_is_403(refusing: Edge) -> None:
    is_problem(refusing.post("features", FEATURE | {"layer": "water"}), 403, "layer")
    collection = {"type": "FeatureCollection", "layer": "water", "features": []}
    is_problem(refusing.post("features", collection), 403, "layer")
    assert refusing.kept() == 0


def test_a_body_that_says_it_is_another_sources_is_403(refusing: Edge) -> None:
    is_problem(refusing.post("features", FEATURE | {"source": "buses"}), 403, "source")
    is_problem(refusing.post("tiles", [{"zoom": 0, "x": 0, "y": 0, "source": "buses"}]), 403, "source")
    assert refusing.kept() == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "$"),
        (b"{", "$"),
        (b"[]", "$"),
        (b"\xff\xfe{\x00}\x00", "$"),
        (b'{"type":"Feature","type":"Feature","geometry":null}', "$"),
        (b'{"type":"Point","coordinates":[1,2]}', "type"),
        (b'{"type":"Feature","geometry":null,"id":true}', "id"),
        (b'{"type":"Feature","geometry":null,"version":-1}', "version"),
        (b'{"type":"Feature","geometry":null,"version":1.5}', "version"),
        (b'{"type":"Feature","geometry":null,"action":"upsert"}', "action"),
        (b'{"type":"Feature","geometry":null,"event_id":""}', "event_id"),
        (b'{"type":"FeatureCollection"}', "features"),
        (b"[" * 100_000, "$"),
        (b'{"type":"Feature","geometry":null,"event_id":"\\ud800"}', "$"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_envelope_fault_is_400_naming_the_field(refusing: Edge, body: bytes, field: str) -> None:
    is_problem(refusing.post("features", body), 400, field)
    assert refusing.kept() == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"zoom": 23, "x": 0, "y": 0}, "zoom"),
        ({"zoom": 1, "x": 2, "y": 0}, "x"),
        ({"x": 0, "y": 0}, "zoom"),
        ({"zoom": 1, "x": 0, "y": 0, "bbox": [2, 0, 1, 1]}, "bbox"),
        ({"zoom": "1", "x": 0, "y": 0}, "zoom"),
        ([], "$"),
        ("text", "$"),
    ],
    ids=str,
)
def test_a_tile_event_at_fault_is_400_naming_the_field(refusing: Edge, body: Any, field: str) -> None:
    is_problem(refusing.post("tiles", body), 400)
    assert refusing.kept() == 0


def test_rule_12_the_answer_to_a_wrong_position_does_not_repeat_it(refusing: Edge) -> None:
    answer = refusing.post(
        "positions", [{"device_id": "d", "lon": 24.123456, "lat": 160.654321, "time": "2026-05-01T12:00:00Z"}]
    )
    document = is_problem(answer, 400, "[0].lat")
    assert "value" not in document
    assert "654321" not in answer.text
    assert "123456" not in answer.text


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "", "application/json; charset=utf-16"])
def test_a_content_type_that_is_not_read_is_415_and_says_which_are(refusing: Edge, content_type: str) -> None:
    answer = refusing.post("features", FEATURE, content_type=content_type)
    is_problem(answer, 415, "Content-Type")
    assert "application/geo+json" in answer.headers["accept"]
    is_problem(refusing.post("tiles", {"zoom": 0, "x": 0, "y": 0}, content_type="application/geo+json"), 415)


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd"])
def test_a_content_encoding_other_than_gzip_is_415(refusing: Edge, encoding: str) -> None:
    answer = refusing.post("features", FEATURE, content_encoding=encoding)
    is_problem(answer, 415, "Content-Encoding")
    assert answer.headers["accept-encoding"] == "gzip"


def test_a_content_type_with_utf_8_is_read(edge: Edge) -> None:
    assert edge.post("features", FEATURE, content_type='Application/JSON; charset="UTF-8"').status_code == 202


@pytest.mark.parametrize("cut", [0.0, 0.5, 0.99])
def test_a_gzip_stream_that_ends_early_or_is_none_is_400(refusing: Edge, cut: float) -> None:
    sent = gzip.compress(json.dumps(FEATURE).encode())
    is_problem(
        refusing.post("features", sent[: int(len(sent) * cut)], content_encoding="gzip"), 400, "Content-Encoding"
    )
    is_problem(refusing.post("features", b"{}" * 20, content_encoding="gzip"), 400, "Content-Encoding")
    is_problem(refusing.post("features", sent + b"garbage", content_encoding="gzip"), 400, "Content-Encoding")
    assert refusing.kept() == 0


# -- hostile bodies ------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_413_by_its_declared_length_before_it_is_read(edge: Edge, settings: Settings) -> None:
    began = time.monotonic()
    is_problem(edge.post("features", b" " * (settings.body_limit_bytes + 1)), 413, "body")
    assert time.monotonic() - began < patient(10)


def test_a_body_without_a_length_is_counted_while_it_is_read(edge: Edge, settings: Settings) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(settings.body_limit_bytes // 100_000 + 2):
            yield b" " * 100_000

    headers = {"content-type": "application/json", "x-source": "survey"} | sign(SECRET, "m", int(time.time()), b"")
    is_problem(edge.client.post("/v1/features", content=chunks(), headers=headers), 413, "body")
    assert edge.kept() == 0


def test_a_source_may_have_a_lower_limit_of_its_own(edge: Edge) -> None:
    body = FEATURE | {"layer": None, "properties": {"text": "x" * 6_000}}
    is_problem(edge.post("features", body, secret=OTHER_SECRET, x_source="buses"), 413, "body")


def test_a_gzip_bomb_is_413_by_its_decompressed_size(edge: Edge, settings: Settings) -> None:
    bomb = gzip.compress(b" " * (settings.body_limit_bytes * 20))
    assert len(bomb) < 100_000
    is_problem(edge.post("features", bomb, content_encoding="gzip"), 413, "body")
    assert list((settings.home / "spool").iterdir()) == []


def _raw_request(url: str, head: list[str], body: bytes, *, read: bool = True) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=patient(30)) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        if not read:
            return b""
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = connection.recv(65536)
            if not piece:
                break
            answer += piece
        return answer


def _signed_head(body: bytes, *lines: str) -> list[str]:
    signature = [f"{k}: {v}" for k, v in sign(SECRET, "m", int(time.time()), body).items()]
    return [
        "POST /v1/features HTTP/1.1",
        "Host: edge",
        "Content-Type: application/json",
        "X-Source: survey",
        *signature,
        *lines,
    ]


def test_a_body_shorter_than_its_declared_length_makes_no_record(edge: Edge) -> None:
    body = json.dumps(FEATURE).encode()
    _raw_request(edge.url, _signed_head(body, f"Content-Length: {len(body) + 10}"), body, read=False)
    time.sleep(0.2)
    assert edge.client.get("/healthz").status_code == 200
    assert edge.kept() == 0


@pytest.mark.parametrize("length", ["-1", "1e3", "many", "99999999999999999999999999"])
def test_a_content_length_that_is_none_is_refused(edge: Edge, length: str) -> None:
    answer = _raw_request(edge.url, _signed_head(b"{}", f"Content-Length: {length}"), b"{}")
    assert answer[9:12] in (b"400", b"413")
    assert edge.kept() == 0


def test_a_sender_that_stops_in_the_middle_is_given_up_with_408(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_module, "IDLE_S", 0.2)
    answer = _raw_request(edge.url, _signed_head(b"{}", "Content-Length: 100"), b"{")
    assert answer.startswith(b"HTTP/1.1 408")


def test_rule_9_more_open_requests_than_places_are_503_with_retry_after(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_module, "MAX_OPEN", 0)
    answer = edge.post("features", FEATURE)
    is_problem(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1


def test_rule_9_with_the_memory_budget_spent_bodies_go_to_disk_and_are_taken_all_the_same(
    make_edge: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_module, "MEMORY_BYTES", 10)
    edge = make_edge()
    body = json.dumps(FEATURE).encode()
    assert edge.post("features", body).status_code == 202
    (record,) = edge.records(topics.RAW)
    assert edge.tiles.get(record.headers[topics.HEADER_POINTER]) == body


def test_unknown_paths_and_methods_are_problem_documents(edge: Edge) -> None:
    is_problem(edge.client.get("/nothing"), 404)
    answer = edge.client.get("/v1/features")
    is_problem(answer, 405)
    assert answer.headers["allow"] == "POST"


# -- repetitions, and a log or guard that does not answer ----------------------------------------------------------


def test_the_same_webhook_id_and_body_again_is_a_duplicate_and_adds_nothing(edge: Edge) -> None:
    first = edge.post("features", FEATURE, webhook_id="same")
    again = edge.post("features", FEATURE, webhook_id="same")
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == {"status": "duplicate", "event_id": "same"}
    assert len(edge.records(topics.RAW)) == 1


def test_the_same_webhook_id_with_another_body_is_409(edge: Edge) -> None:
    edge.post("features", FEATURE, webhook_id="same")
    is_problem(edge.post("features", FEATURE | {"version": 2}, webhook_id="same"), 409, "webhook-id")
    is_problem(edge.post("tiles", {"zoom": 0, "x": 0, "y": 0}, webhook_id="same"), 409, "webhook-id")
    assert edge.kept() == 1


def test_two_sources_may_use_the_same_webhook_id(edge: Edge) -> None:
    assert edge.post("features", FEATURE, webhook_id="same").json()["status"] == "queued"
    other = edge.post("features", FEATURE | {"version": 2}, webhook_id="same", secret=OTHER_SECRET, x_source="buses")
    assert other.json()["status"] == "queued"


def test_repetitions_at_the_same_moment_are_one_record(edge: Edge) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: edge.post("features", FEATURE, webhook_id="storm"), range(64)))
    statuses = [answer.json()["status"] for answer in answers]
    assert sorted(set(statuses)) == ["duplicate", "queued"]
    assert statuses.count("queued") == 1
    assert len(edge.records(topics.RAW)) == 1


class _Faulty:
    """An adapter whose named method fails while `broken`."""

    def __init__(self, inner: Any, methods: tuple[str, ...], error: Exception) -> None:
        self._inner, self._methods, self._error, self.broken = inner, methods, error, True

    def __getattr__(self, name: str) -> Any:
        if self.broken and name in self._methods:

            def fail(*_: Any, **__: Any) -> Any:
                raise self._error

            return fail
        return getattr(self._inner, name)


def test_a_log_that_refuses_is_503_with_retry_after_and_the_id_may_be_sent_again(
    make_edge: Callable[..., Edge], settings: Settings
) -> None:
    log = _Faulty(ports.open_log(settings), ("append",), LogUnavailable("disk full"))
    edge = make_edge(log=log)
    answer = edge.post("features", FEATURE, webhook_id="later")
    is_problem(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    log.broken = False
    assert edge.post("features", FEATURE, webhook_id="later").json()["status"] == "queued"
    assert len(edge.records(topics.RAW)) == 1


def test_an_inbox_that_refuses_is_503(make_edge: Callable[..., Edge], settings: Settings) -> None:
    from resources.tile_store.protocol import TileStoreUnavailable

    edge = make_edge(tiles=_Faulty(ports.open_tile_store(settings), ("put",), TileStoreUnavailable("disk full")))
    body = FEATURE | {"properties": {"text": "x" * 1_100_000}}
    is_problem(edge.post("features", body), 503)
    assert edge.kept() == 0


def test_without_the_guard_events_are_taken_and_repetitions_left_to_ingest(
    make_edge: Callable[..., Edge], settings: Settings
) -> None:
    edge = make_edge(
        guard=_Faulty(ports.open_guard(settings), ("get_many", "set_many_if_absent"), GuardUnavailable("away"))
    )
    assert [edge.post("features", FEATURE, webhook_id="g").json()["status"] for _ in range(2)] == ["queued", "queued"]
    first, second = edge.records(topics.RAW)
    assert first.value == second.value
    assert first.headers[topics.HEADER_EVENT_ID] == second.headers[topics.HEADER_EVENT_ID]
    assert "edge_guard_faults_total 0.0" not in edge.client.get("/metrics").text


class _CrashError(Exception):
    pass


def test_rule_2_an_id_is_remembered_only_after_the_log_acknowledged(
    make_edge: Callable[..., Edge], settings: Settings
) -> None:
    log = _Faulty(ports.open_log(settings), ("append",), _CrashError())
    edge = make_edge(log=log)
    assert edge.post("features", FEATURE, webhook_id="crash").status_code == 500
    assert edge.guard.get("webhook:survey:crash") is None
    log.broken = False
    # uvicorn ends a connection on which an exception got out.
    edge.client = httpx.Client(base_url=edge.url, timeout=patient(30))
    assert edge.post("features", FEATURE, webhook_id="crash").json()["status"] == "queued"
    until(lambda: edge.guard.get("webhook:survey:crash") is not None, why="what was queued is recorded")


def test_ids_are_known_to_the_next_edge_after_a_clean_stop(settings: Settings) -> None:
    for expected in ("queued", "duplicate"):
        with an_edge(settings) as edge:
            assert edge.post("features", FEATURE, webhook_id="before").json()["status"] == expected


def test_a_record_that_is_too_large_costs_only_its_own_request(edge: Edge) -> None:
    wide = {"device_id": "d", "lon": 1.0, "lat": 1.0, "time": "2026-05-01T12:00:00Z", "note": "x" * 1_050_000}
    small = wide | {"note": ""}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: edge.post("positions", wide if n == 3 else small), range(8)))
    assert sorted(answer.status_code for answer in answers) == [202] * 7 + [413]
    assert len(edge.records(topics.POSITIONS)) == 7


# -- the service ---------------------------------------------------------------------------------------------------


def test_health_readiness_and_metrics_answer(edge: Edge) -> None:
    edge.post("features", FEATURE)
    assert edge.client.get("/healthz").json() == {"status": "ok"}
    assert edge.client.get("/readyz").json() == {"status": "ready"}
    text = edge.client.get("/metrics").text
    assert 'edge_requests_total{endpoint="features",status="202"} 1.0' in text
    assert 'edge_outcomes_total{endpoint="features",outcome="queued"} 1.0' in text


def test_not_ready_while_the_log_does_not_answer(make_edge: Callable[..., Edge], settings: Settings) -> None:
    log = _Faulty(ports.open_log(settings), ("topics",), LogUnavailable("locked"))
    log.broken = False
    edge = make_edge(log=log)
    log.broken = True
    is_problem(edge.client.get("/readyz"), 503)
    assert edge.client.get("/healthz").status_code == 200


def test_the_edge_loads_without_dagster_or_a_geometry_library() -> None:
    heavy = ["dagster", "shapely", "numpy", "pyproj", "pyarrow", "pyogrio", "osmium", "pandas"]
    code = f"import sys, geo_assets.services.edge; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=patient(60)
    )
    assert result.stdout.strip() == "[]"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(home: Path, port: int) -> subprocess.Popen[str]:
    environment = os.environ | {"GEO_ASSETS_HOME": str(home), "GEO_ASSETS_EDGE_PORT": str(port)}
    command = [sys.executable, "-m", "geo_assets.services.edge"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait_until_alive(port: int) -> None:
    def alive() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=patient(30)).status_code == 200
        except httpx.TransportError:
            return False

    until(alive, why="the edge answers", every=0.05)


def test_sigterm_ends_the_process_at_once_and_quietly_and_a_taken_port_is_one_line(tmp_path: Path) -> None:
    port = _free_port()
    first = _start(tmp_path, port)
    try:
        _wait_until_alive(port)
        second = _start(tmp_path, port)
        output, _ = second.communicate(timeout=patient(30))
        assert second.returncode == 1
        line = output.strip().splitlines()
        assert len(line) == 1
        assert f"127.0.0.1:{port} is in use" in line[0]
        assert "GEO_ASSETS_EDGE_PORT" in line[0]
        began = time.monotonic()
        first.send_signal(signal.SIGTERM)
        output, _ = first.communicate(timeout=patient(30))
        assert time.monotonic() - began < patient(8)
        assert first.returncode == 0
        assert "Traceback" not in output
        assert f"http://127.0.0.1:{port}" in output
    finally:
        first.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_rule_1_what_was_answered_202_is_in_the_log_however_the_edge_ends(tmp_path: Path, number: int) -> None:
    port, home = _free_port(), tmp_path / "home"
    home.mkdir()
    (home / "sources.yaml").write_text(f"sources:\n  survey:\n    secrets: [{SECRET}]\n")
    process = _start(home, port)
    accepted: list[int] = []
    try:
        _wait_until_alive(port)

        def send(sender: int) -> None:
            edge = Edge(f"http://127.0.0.1:{port}", None, None, None)
            for count in range(10_000):
                name = sender * 10_000 + count
                try:
                    answer = edge.post("features", FEATURE | {"id": name}, webhook_id=f"k-{name}")
                except httpx.TransportError:
                    return
                if answer.status_code == 202:
                    accepted.append(name)

        with ThreadPoolExecutor(4) as pool:
            senders = [pool.submit(send, sender) for sender in range(4)]
            until(lambda: len(accepted) >= 100 or process.poll() is not None, why="events are accepted", every=0.01)
            process.send_signal(number)
            process.communicate(timeout=patient(30))
            for sender in senders:
                sender.result(patient(30))
    finally:
        process.kill()
    log = ports.open_log(limits(home))
    kept = [json.loads(record.value or b"")["id"] for record in Edge("http://-", log, None, None).records(topics.RAW)]
    log.close()
    assert len(accepted) >= 100
    assert set(accepted) <= set(kept)
    assert len(kept) == len(set(kept))


def test_large_bodies_do_not_hold_up_small_ones(edge: Edge) -> None:
    large = gzip.compress(json.dumps(FEATURE | {"properties": {"text": "x" * 2_900_000}}).encode())
    with ThreadPoolExecutor(6) as pool:
        giants = [pool.submit(edge.post, "features", large, content_encoding="gzip") for _ in range(6)]
        times = []
        while not all(giant.done() for giant in giants) and len(times) < 50:
            began = time.monotonic()
            assert edge.post("features", FEATURE).status_code == 202
            times.append(time.monotonic() - began)
    assert [giant.result().status_code for giant in giants] == [202] * 6
    assert sorted(times)[len(times) // 2] < patient(5)
