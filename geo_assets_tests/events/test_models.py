"""Models and the envelope."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.models import (
    STRICT_BYTES,
    Accepted,
    EnvelopeError,
    FeatureCollectionEvent,
    FeatureEvent,
    FenceEvent,
    PositionEvent,
    Problem,
    TileEvent,
    feature_id_text,
    read_envelope,
    read_events,
)
from geo_assets.tiles.tile import Tile


def feature(**members: Any) -> bytes:
    return json.dumps({"type": "Feature", "geometry": None, "properties": {}, **members}).encode()


def fault(body: bytes | dict[str, Any] | list[Any], kind: str = "features") -> EnvelopeError:
    with pytest.raises(EnvelopeError) as caught:
        read_envelope(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    assert len(str(caught.value)) < 300
    return caught.value


def test_the_models_load_without_a_geometry_library():
    script = (
        "import sys, geo_assets.events.models, geo_assets.events.signature, geo_assets.events.sources,"
        " geo_assets.events.dead_letter; print({'shapely', 'numpy', 'pyproj', 'ijson', 'dagster'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "model", [FeatureEvent, FeatureCollectionEvent, TileEvent, PositionEvent, FenceEvent, Accepted, Problem]
)
def test_every_model_has_a_json_schema(model: Any):
    assert model.model_json_schema()["type"] == "object"


def test_the_envelope_of_a_feature_is_its_ids_and_layer():
    envelope = read_envelope(feature(id="A1", event_id="e1", layer="roads", source="demo", colour="red"), "features")
    assert (envelope.is_collection, envelope.event_id, envelope.feature_id) == (False, "e1", '"A1"')
    assert (envelope.layer, envelope.source) == ("roads", "demo")


def test_identity_keeps_its_json_type():
    def ident(raw: str) -> str | None:
        return read_envelope(feature()[:-1] + f',"id":{raw}}}'.encode(), "features").feature_id

    assert ident("123") == "123" != ident('"123"') == '"123"'
    assert ident("0") == "0"
    assert ident("18446744073709551615") == "18446744073709551615"
    assert ident('"Ä"') == '"Ä"' != ident('"ä"')
    assert ident("1.5") == "1.5"
    assert ident("null") is None


def test_the_same_number_is_the_same_id():
    assert feature_id_text(123.0) == feature_id_text(123) == "123"
    assert feature_id_text(-0.0) == "0"


@pytest.mark.parametrize(
    "raw", ["true", "false", "[]", "{}", '""', '"a\\u0000"', "1e999", '"' + "x" * 300 + '"', "9" * 300]
)
def test_what_is_no_id_is_refused_by_name(raw: str):
    assert fault(feature()[:-1] + f',"id":{raw}}}'.encode()).field == "id"


@pytest.mark.parametrize(
    ("members", "field", "value"),
    [
        ({"version": -1}, "version", "-1"),
        ({"version": 2**63}, "version", str(2**63)),
        ({"version": "3"}, "version", "3"),
        ({"version": 3.0}, "version", "3.0"),
        ({"version": True}, "version", "true"),
        ({"action": "destroy"}, "action", "destroy"),
        ({"layer": 5}, "layer", "5"),
        ({"layer": "x" * 65}, "layer", None),
        ({"event_id": ""}, "event_id", ""),
        ({"event_id": "a\nb"}, "event_id", None),
        ({"geometry": 5}, "geometry", "5"),
        ({"properties": []}, "properties", "[]"),
        ({"type": "Point"}, "type", "Point"),
        ({"type": None}, "type", "null"),
    ],
)
def test_a_bad_value_names_its_field_value_and_limit(members: dict[str, Any], field: str, value: str | None):
    caught = fault(feature(**members))
    assert caught.field == field
    if value is not None:
        assert caught.value == value


def test_only_a_delete_may_leave_the_geometry_out():
    assert fault({"type": "Feature", "id": 1, "properties": {}}).field == "geometry"
    assert read_envelope(b'{"type":"Feature","id":1,"action":"delete"}', "features").feature_id == "1"
    assert read_envelope(b'{"type":"Feature","id":1,"properties":{"action":"delete"}}', "features").feature_id == "1"


def test_the_envelope_of_a_collection_is_its_own_members():
    body = {"type": "FeatureCollection", "features": [{"nonsense": 1}], "event_id": "e", "layer": "roads"}
    envelope = read_envelope(json.dumps(body).encode(), "features")
    assert (envelope.is_collection, envelope.event_id, envelope.layer) == (True, "e", "roads")
    assert fault({"type": "FeatureCollection", "features": {}}).field == "features"
    assert fault({"type": "FeatureCollection"}).field == "features"
    assert fault({"type": "FeatureCollection", "features": [], "version": -1}).field == "version"


def test_a_sequence_is_known_by_its_beginning_or_its_content_type():
    one = feature(id=1)
    assert read_envelope(one + b"\n" + one, "features").is_collection
    assert read_envelope(b"\x1e" + one + b"\n", "features").is_collection
    assert read_envelope(one + b"\n", "features", "application/geo+json-seq").is_collection
    assert not read_envelope(one + b"\n", "features", "application/geo+json").is_collection


def large(**members: Any) -> bytes:
    many = [json.loads(feature(id=i, properties={"name": "x" * 60})) for i in range(12_000)]
    body = json.dumps({"type": "FeatureCollection", **members, "features": many}).encode()
    assert len(body) > STRICT_BYTES
    return body


def test_a_large_body_has_the_same_envelope():
    body = large(event_id="e", layer="roads")
    for whole in (body, b"\xef\xbb\xbf" + body, memoryview(body)):
        envelope = read_envelope(whole, "features")
        assert (envelope.is_collection, envelope.event_id, envelope.layer) == (True, "e", "roads")
    assert fault(large(layer=7)).field == "layer"
    assert fault(large(event_id="x" * 20_000)).field == "event_id"
    assert fault(body[:-1]).field == "$"
    assert fault(body + b"x").field == "$"
    assert "deep" in str(fault(body[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
    one = feature(id=7, properties={"text": "x" * STRICT_BYTES})
    assert read_envelope(one, "features").feature_id == "7"
    assert fault(b" " * (STRICT_BYTES + 10)).field == "$"
    assert fault(b"[" + b"1," * STRICT_BYTES + b"1]").field == "$"


def test_a_large_body_may_be_a_mapped_file(tmp_path: Path):
    path = tmp_path / "body"
    path.write_bytes(large(layer="roads"))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert read_envelope(mapped, "features").layer == "roads"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"null",
        b"1",
        b'"x"',
        b"[]",
        b"{",
        b"\xff\xfe{\x00",
        b'{"type":"Feature","type":"Feature"}',
        b"{}",
        b"[" * 200_000,
    ],
)
@pytest.mark.parametrize("kind", ["features", "tiles", "positions", "fences"])
def test_what_is_no_event_of_any_kind_is_an_envelope_error(body: bytes, kind: str):
    fault(body, kind)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["features", "tiles", "positions", "fences"]), st.binary(max_size=50))
def test_no_bytes_crash_the_edge(kind: str, body: bytes):
    with suppress(EnvelopeError):
        read_envelope(body, kind)


members = "type id geometry properties version action layer source event_id features radius_m"
coordinates = "zoom x y bbox device_id lon lat time time_ms time_s"
names = st.sampled_from(f"{members} {coordinates}".split())
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("Feature")
odd = scalars | st.lists(st.floats(), max_size=5)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["features", "tiles", "positions", "fences"]), st.dictionaries(names, odd, max_size=8))
def test_no_members_crash_the_edge(kind: str, members: dict[str, Any]):
    with suppress(EnvelopeError):
        read_envelope(json.dumps(members).encode(), kind)


def test_an_unknown_kind_is_named():
    assert fault(b"{}", "colours").field == "kind"
    with pytest.raises(EnvelopeError):
        read_events(b"{}", "features")


# Tiles


def test_a_tile_event_names_a_tile():
    body = b'{"zoom":14,"x":9327,"y":4741,"event_id":"e","force":true,"colour":"red"}'
    (event,) = read_events(body, "tiles")
    assert isinstance(event, TileEvent)
    assert (event.tile, event.force, event.crs) == (Tile(14, 9327, 4741), True, "EPSG:4326")
    envelope = read_envelope(body, "tiles")
    assert (envelope.feature_id, envelope.event_id) == (Tile(14, 9327, 4741).key, "e")


@pytest.mark.parametrize(
    ("members", "field", "limit"),
    [
        ({"zoom": 23}, "zoom", "<= 22"),
        ({"zoom": -1}, "zoom", ">= 0"),
        ({"zoom": 1.0}, "zoom", None),
        ({"x": 4}, "x", "<= 3"),
        ({"y": 4}, "y", "<= 3"),
        ({"y": -1}, "y", ">= 0"),
        ({"bbox": [0, 0, 0, 1]}, "bbox", "min < max"),
        ({"bbox": [0, 1, 1, 0]}, "bbox", "min < max"),
        ({"bbox": [0, 1, 1]}, "bbox[3]", None),
        ({"bbox": [0, 1, 1, "2"]}, "bbox[3]", None),
        ({"bbox": "0,1,1,2"}, "bbox", None),
        ({"tile_matrix_set": "WorldCRS84Quad"}, "tile_matrix_set", "'WebMercatorQuad'"),
        ({"force": 1}, "force", None),
    ],
)
def test_a_bad_tile_event_names_its_field_and_limit(members: dict[str, Any], field: str, limit: str | None):
    caught = fault({"zoom": 2, "x": 1, "y": 1, **members}, "tiles")
    assert caught.field == field
    if limit is not None:
        assert caught.limit == limit


def test_a_box_that_disagrees_with_its_tile_is_told_not_refused():
    def agrees(**members: Any) -> bool | None:
        (event,) = read_events(json.dumps({"zoom": 1, "x": 0, "y": 0, **members}).encode(), "tiles")
        assert isinstance(event, TileEvent)
        return event.bbox_agrees()

    assert agrees() is None
    assert agrees(bbox=[-180, 0, 0, 85.0511287]) is True
    assert agrees(bbox=[-180, 0, 1, 85.0511287]) is False
    assert agrees(bbox=[-20037508.34, 0, 0, 20037508.34], crs="EPSG:3857") is True
    assert agrees(bbox=[0, 0, 1, 1], crs="EPSG:3067") is None


def test_an_array_of_events_is_refused_at_its_first_fault():
    good = {"zoom": 1, "x": 0, "y": 0}
    assert len(read_events(json.dumps([good, good]).encode(), "tiles")) == 2
    assert read_envelope(json.dumps([good]).encode(), "tiles").is_collection
    assert fault([good, {**good, "x": 2}], "tiles").field == "[1].x"
    assert fault([], "tiles").limit == "1..10000"
    assert fault([{**good, "source": "a"}, {**good, "source": "b"}], "tiles").field == "source"


# Positions


@pytest.mark.parametrize(
    ("said", "at_ms"),
    [
        ({"time": "2026-05-01T12:00:00Z"}, 1777636800000),
        ({"time": "2026-05-01T12:00:00.250999Z"}, 1777636800250),
        ({"time": "2026-05-01T15:00:00.25+03:00"}, 1777636800250),
        ({"time": "2026-05-01t12:00:00z"}, 1777636800000),
        ({"time_ms": 1777636800250}, 1777636800250),
        ({"time_s": 1777636800.25}, 1777636800250),
        ({"time_s": 1777636800}, 1777636800000),
    ],
)
def test_a_device_time_says_its_unit_and_zone(said: dict[str, Any], at_ms: int):
    (event,) = read_events(json.dumps({"device_id": "d", "lon": 1, "lat": 2, **said}).encode(), "positions")
    assert isinstance(event, PositionEvent)
    assert event.event_time_ms == at_ms


@pytest.mark.parametrize(
    ("said", "field", "problem"),
    [
        ({}, "time", "missing"),
        ({"time": 1777636800}, "time", "no unit"),
        ({"time": "1777636800"}, "time", "not RFC 3339"),
        ({"time": "2026-05-01T12:00:00"}, "time", "no zone"),
        ({"time": "2026-05-01"}, "time", "not RFC 3339"),
        ({"time": "2026-02-30T12:00:00Z"}, "time", "no date"),
        ({"time_ms": 1777636800}, "time_ms", "wrong unit"),
        ({"time_s": 1777636800000}, "time_s", "wrong unit"),
        ({"time_s": 1777636800, "time_ms": 1777636800000}, "time", "given in time_ms and time_s"),
        ({"time_ms": "1777636800000"}, "time_ms", "integer"),
    ],
)
def test_a_wrong_device_time_is_refused_by_name(said: dict[str, Any], field: str, problem: str):
    caught = fault({"device_id": "d", "lon": 1, "lat": 2, **said}, "positions")
    assert caught.field == field
    assert problem in caught.problem


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"lon": 180.1}, "lon"),
        ({"lat": -91}, "lat"),
        ({"lat": "60"}, "lat"),
        ({"lat": True}, "lat"),
        ({"device_id": ""}, "device_id"),
        ({"device_id": 5}, "device_id"),
        ({"accuracy_m": -1}, "accuracy_m"),
        ({"heading_deg": 361}, "heading_deg"),
    ],
)
def test_a_bad_position_names_its_field(members: dict[str, Any], field: str):
    assert (
        fault({"device_id": "d", "lon": 1, "lat": 2, "time_ms": 1777636800000, **members}, "positions").field == field
    )


# Fences


def test_a_fence_needs_an_id_and_a_geometry_unless_it_is_deleted():
    fence = {"type": "Feature", "id": "depot", "geometry": {"type": "Point", "coordinates": [1, 2]}, "radius_m": 50}
    assert read_envelope(json.dumps(fence).encode(), "fences").feature_id == '"depot"'
    assert fault({**fence, "id": None}, "fences").field == "id"
    assert fault({**fence, "geometry": None}, "fences").field == "geometry"
    assert fault({**fence, "radius_m": 0}, "fences").field == "radius_m"
    read_envelope(json.dumps({"type": "Feature", "id": 1, "action": "delete"}).encode(), "fences")
