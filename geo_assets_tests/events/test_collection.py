"""Reading bodies feature by feature."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.collection import FeatureItem, features, first_pass
from geo_assets.events.dead_letter import Refused

POINT = b'{"type":"Feature","id":1,"geometry":{"type":"Point","coordinates":[24.9,60.1]},"properties":{"a":"}{]["}}'


def read(body: bytes, content_type: str | None = None, **options: Any) -> list[FeatureItem]:
    stream = io.BytesIO(body)
    info = first_pass(stream, content_type)
    items = list(features(stream, info.form, **options))
    assert len(items) == info.count
    assert items == list(features(stream, content_type=content_type, **options)) or any(i.fault for i in items)
    return items


def raws(body: bytes, content_type: str | None = None) -> list[bytes]:
    return [item.raw for item in read(body, content_type)]


def refused(body: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        first_pass(io.BytesIO(body))
    return caught.value


def test_a_feature_is_its_own_text():
    assert raws(b"\xef\xbb\xbf \n" + POINT + b"\n") == [POINT]
    assert not first_pass(io.BytesIO(POINT)).is_collection


def test_a_collection_gives_each_feature_byte_for_byte():
    odd = b'{ "type" : "Feature",\n "id": 1.0, "big": 123456789012345678901234567890, "e": 1e2, "s": "\\"]}\\\\" }'
    body = b'{"type":"FeatureCollection","features":[ ' + POINT + b" ,\n " + odd + b"] }"
    assert raws(body) == [POINT, odd]


def test_crs_and_type_may_stand_behind_the_features():
    body = (
        b'{"features":['
        + POINT
        + b'],"crs":{"type":"name","properties":{"name":"EPSG:3067"}},"type":"FeatureCollection"}'
    )
    info = first_pass(io.BytesIO(body))
    assert info.crs == {"type": "name", "properties": {"name": "EPSG:3067"}}
    assert (info.form, info.count) == ("collection", 1)


def test_members_of_the_collection_are_defaults_for_its_features():
    body = (
        b'{"type":"FeatureCollection","layer":"roads","version":7,"name":"x","meta":{"features":[1,[2]]},"features":[]}'
    )
    info = first_pass(io.BytesIO(body))
    assert info.members == {"layer": "roads", "version": 7}
    assert raws(body) == []


def test_features_of_another_object_are_not_taken_for_the_collections():
    body = (
        b'{"type":"FeatureCollection","meta":{"features":[{"a":1}]},"x":[[["features"]]],"f\\u0065atures":['
        + POINT
        + b"]}"
    )
    assert raws(body) == [POINT]


def test_what_is_no_object_costs_itself_alone():
    body = b'{"type":"FeatureCollection","features":[1,' + POINT + b',null,"a,]}",[{"a":[]}],' + POINT + b"]}"
    items = read(body)
    assert [item.fault is None for item in items] == [False, True, False, False, False, True]
    assert items[3].raw == b'"a,]}"'
    assert {item.fault.reason for item in items if item.fault} == {"schema"}


def test_a_feature_over_the_limit_costs_itself_alone():
    giant = b'{"type":"Feature","x":"' + b"}" * 3_000_000 + b'"}'
    body = b'{"type":"FeatureCollection","features":[' + POINT + b"," + giant + b"," + POINT + b"]}"
    items = read(body, max_feature_bytes=1_000_000)
    assert [item.fault.reason if item.fault else None for item in items] == [None, "too_large", None]
    sequence = POINT + b"\n" + giant + b"\n" + POINT
    assert [bool(item.fault) for item in read(sequence, max_feature_bytes=1_000_000)] == [False, True, False]


def test_a_sequence_with_record_separators_may_spread_a_record_over_lines():
    pretty = json.dumps(json.loads(POINT), indent=1).encode()
    assert raws(b"\x1e" + POINT + b"\n\x1e" + pretty + b"\n\x1e\n") == [POINT, pretty]


def test_a_sequence_without_separators_has_one_record_a_line():
    assert raws(POINT + b"\r\n\n" + POINT + b"\n") == [POINT, POINT]
    assert first_pass(io.BytesIO(POINT + b"\n" + POINT)).is_collection


def test_a_sequence_of_one_record_is_known_by_its_content_type():
    assert first_pass(io.BytesIO(POINT + b"\n"), "application/geo+json-seq; charset=utf-8").form == "sequence"
    assert first_pass(io.BytesIO(POINT + b"\n"), "application/geo+json").form == "feature"


def test_a_broken_record_of_a_sequence_costs_itself_alone():
    items = read(POINT + b"\n{broken\n[1]\n" + POINT)
    assert [item.raw for item in items] == [POINT, b"{broken", b"[1]", POINT]
    assert [bool(item.fault) for item in items] == [False, False, True, False]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b'"Feature"',
        b"null",
        b"{",
        b"{}",
        b'{"type":"Point","coordinates":[1,2]}',
        b'{"type":"FeatureCollection"}',
        b'{"type":"FeatureCollection","features":{}}',
        b'{"type":"FeatureCollection","features":[' + POINT,
        b'{"type":"FeatureCollection","features":[' + POINT + b"]} x",
        b'{"type":"FeatureCollection","features":[NaN]}',
        b'{"type":"FeatureCollection","features":[-Infinity]}',
        b'{"type":"FeatureCollection","features":[1' + b"0" * 1_000_000,
        b'{"type":"FeatureCollection","features":[{"a":1,}]}',
        b'{"type":"FeatureCollection","features":[{"a":[1}]}',
        b'{"type":"FeatureCollection","features":[{"a":"x]}',
        b'{"type":"FeatureCollection","features":[{} {}]}',
        b'{"type":"FeatureCollection","features":[{},]}',
        b'{"type":"FeatureCollection","features":[,{}]}',
        b'{"type":"FeatureCollection","features":[],}',
        b'{"type":"FeatureCollection" "features":[]}',
        b'{"type" "FeatureCollection","features":[]}',
        b'{"type":"FeatureCollection",features:[]}',
        b'{"type":"FeatureCollection","features":[],"x":}',
        b'{"type":"FeatureCollection","features":[],"x":truth}',
        b'{"type":"FeatureCollection","features":[],"x":{"a":tru}}',
        b'{"type":"FeatureCollection","features":[],"features":[]}',
        b'{"type":"FeatureCollection","features":[],"version":-1}',
        b'{"type":"FeatureCollection","features":[],"layer":7}',
        b'{"type":"FeatureCollection","features":[],"crs":[' + b"1," * 60_000 + b"1]}",
        b'{"type":"FeatureCollection","features":["\xff"]}',
        '{"type":"FeatureCollection","features":[]}'.encode("utf-16"),
        '{"type":"FeatureCollection","features":[]}'.encode("utf-16-le"),
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"{" + b",".join(b'"a%d":1' % i for i in range(2000)) + b"}",
        b"\x00" * 100,
    ],
    ids=lambda body: repr(body[:60]),
)
def test_a_fault_of_syntax_refuses_the_whole_with_one_reason(body: bytes):
    fault = refused(body)
    assert fault.reason == "schema"
    assert len(str(fault)) < 300
    assert "\n" not in str(fault)


def test_depth_within_a_feature_is_that_features_own_fault():
    deep = b'{"type":"Feature","properties":{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}}"
    assert raws(b'{"type":"FeatureCollection","features":[' + deep + b"," + POINT + b"]}") == [deep, POINT]


@pytest.mark.parametrize(
    "value", [b"1" + b"0" * 1_000_000, b'"\\ud800"', b'1,"a":2'], ids=["digits", "surrogate", "twice"]
)
def test_what_only_some_readers_take_is_that_features_own_fault(value: bytes):
    odd = b'{"type":"Feature","a":' + value + b"}"
    assert raws(b'{"type":"FeatureCollection","features":[' + odd + b"," + POINT + b"]}") == [odd, POINT]


def test_a_body_that_did_not_pass_ends_with_a_refusal():
    with pytest.raises(Refused):
        list(features(io.BytesIO(b'{"features":[' + POINT), "collection"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), max_size=6),
    st.dictionaries(st.text(min_size=1, max_size=6).map(lambda s: "x" + s), json_values, max_size=3),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_every_collection_is_split_as_json_splits_it(
    objects: list[Any], members: dict[str, Any], features_first: bool, indent: int | None, ascii_only: bool
):
    head, tail = ({"features": objects}, members) if features_first else (members, {"features": objects})
    document = {**head, **tail, "type": "FeatureCollection"}
    got = raws(json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
    assert [json.loads(raw) for raw in got] == objects


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_where_a_chunk_ends_does_not_show(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("geo_assets.events.collection._CHUNK", chunk)
    odd = b'{"a":"\\\\","b":"\\"}{","c":[{"d":{}},"]"],"e":-1.5e-3}'
    body = (
        b'\xef\xbb\xbf{"x" : [ 1 , {"y":"]"} ] , "n":12, "features" : [ '
        + odd
        + b' , "s" , 17 , '
        + POINT
        + b'],"type":"FeatureCollection"}'
    )
    monkeypatch.setattr("geo_assets.events.collection._SNIFFED", 1 << 20)
    assert [item.raw for item in read(body)] == [odd, b'"s"', b"17", POINT]
    assert raws(POINT + b"\n" + odd + b"\n\n") == [POINT, odd]


MEMORY_SCRIPT = """
import resource, sys, time
from geo_assets.events.collection import features, first_pass
with open(sys.argv[1], "rb") as body:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    info = first_pass(body)
    n = sum(len(item.raw) > 0 for item in features(body, info.form))
    print(info.count, n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_a_collection_of_50_mb(tmp_path: Path):
    path = tmp_path / "large.geojson"
    ring = ",".join(f"[24.{i:07d},60.{i:07d}]" for i in range(12))
    with path.open("w") as out:
        out.write('{"type":"FeatureCollection","features":[')
        start = f'"geometry":{{"type":"Polygon","coordinates":[[{ring}]]}},"properties":'
        for i in range(121_000):
            out.write("," if i else "")
            out.write(f'{{"type":"Feature","id":{i},{start}{{"name":"Building {i}","levels":{i % 9}}}}}')
        out.write("]}")
    assert path.stat().st_size > 50_000_000
    done = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, str(path)], capture_output=True, text=True, check=True)
    count, read_count, grown_kb = map(int, done.stdout.split())
    assert count == read_count == 121_000
    assert grown_kb < 20_000
