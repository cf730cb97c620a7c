"""One feature from bytes to an edit."""

from __future__ import annotations

import dataclasses
import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.dead_letter import REASONS, Refused
from geo_assets.events.sources import Source
from geo_assets.events.validate import DELETED, FeatureContext, ValidEdit, event_key, validate, validate_all
from geo_assets.tiles.layers import Layer, LayerSet

LAYERS = LayerSet((Layer("buildings", min_zoom=13), Layer("roads", min_zoom=6)))
SOURCE = Source("demo", default_layer="buildings", default_crs="EPSG:4326")
SQUARE = {"type": "Polygon", "coordinates": [[[24.9, 60.1], [24.9, 60.2], [25.0, 60.2], [25.0, 60.1], [24.9, 60.1]]]}
BOW_TIE = {"type": "Polygon", "coordinates": [[[0, 0], [1, 1], [1, 0], [0, 1], [0, 0]]]}
POINT = {"type": "Point", "coordinates": [24.9384, 60.1699]}


def context(source: Source = SOURCE, **changes: Any) -> FeatureContext:
    values: dict[str, Any] = {"source": source, "layers": LAYERS, "event_id": "e1", "received_ms": 1_700_000_000_000}
    return FeatureContext(**{**values, **changes})


def source(**changes: Any) -> Source:
    return dataclasses.replace(SOURCE, **changes)


def text(**members: Any) -> bytes:
    return json.dumps({"type": "Feature", "id": 1, "geometry": POINT, "properties": {}, **members}).encode()


def edit(ctx: FeatureContext | None = None, **members: Any) -> ValidEdit:
    return validate(text(**members), ctx or context())


def refused(raw: bytes | None = None, ctx: FeatureContext | None = None, **members: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        validate(text(**members) if raw is None else raw, ctx or context())
    assert caught.value.reason in REASONS
    assert len(str(caught.value)) < 500
    return caught.value


def test_a_building_becomes_an_edit():
    made = edit(geometry=SQUARE, version=3, properties={"name": "Talo", "levels": 4})
    assert (made.action, made.source, made.feature_id, made.version, made.layer) == (
        "upsert",
        "demo",
        "1",
        3,
        "buildings",
    )
    assert made.bbox == (24.9, 60.1, 25.0, 60.2)
    assert made.properties == '{"levels":4,"name":"Talo"}'
    assert made.event_time_ms == 1_700_000_000_000
    assert (made.min_zoom, made.max_zoom, made.vertex_count) == (13, 18, 5)
    assert shapely.from_wkb(made.geometry).exterior.is_ccw
    assert (len(made.content_hash), len(made.digest), len(made.event_key)) == (32, 16, 64)
    report = made.report
    assert report is not None
    assert (report.is_valid, report.explanation, report.bbox_valid) == (True, "", True)
    assert (report.geometry_type, report.coordinate_count, report.crs) == ("Polygon", 5, "EPSG:4326")


def test_the_same_feature_gives_the_same_edit_in_another_process():
    raws = [text(geometry=SQUARE), b"{", text(geometry=BOW_TIE)]
    here = validate_all(raws, context())
    with ProcessPoolExecutor(1) as pool:
        there = pool.submit(validate_all, raws, context()).result()
    assert there[0] == here[0]
    assert [str(result) for result in there[1:]] == [str(result) for result in here[1:]]
    assert isinstance(there[1], Refused)
    assert pickle.loads(pickle.dumps(here[0])) == here[0]


# Identity and keys


def test_identity_keeps_the_json_type_of_the_id():
    assert edit(id=123).feature_id == "123"
    assert edit(id="123").feature_id == '"123"'
    assert edit(id=123).digest != edit(id="123").digest
    assert refused(id=True).field == "id"


def test_a_feature_without_an_id_is_known_by_its_bytes():
    def ident(raw: bytes) -> str:
        return validate(raw, context()).feature_id

    one, other = text(id=None), text(id=None, properties={"a": 1})
    assert ident(one) == ident(one)
    assert ident(one) != ident(other)
    assert ident(one).startswith('"sha256:')
    assert refused(id=None, action="delete").field == "id"


def test_the_event_key_is_of_source_event_and_in_a_collection_of_the_feature():
    assert edit().event_key == event_key("demo", "e1")
    assert edit(context(event_id="e2")).event_key != edit().event_key
    assert edit(context(source(name="other"))).event_key != edit().event_key
    inside = context(in_collection=True)
    assert edit(inside, id=1).event_key != edit(inside, id=2).event_key
    assert edit(inside, id=1).event_key == edit(inside, id=1).event_key
    assert edit(id=1).event_key == edit(id=2).event_key


def test_one_feature_twice_in_a_collection_is_two_events():
    inside = context(in_collection=True)
    assert edit(inside, version=1).event_key != edit(inside, version=2).event_key


def test_a_replay_is_keyed_by_its_payload_too():
    replay = context(replay=True)
    assert edit(replay).event_key != edit().event_key
    assert edit(replay).event_key == edit(replay).event_key
    assert edit(replay, version=5).event_key != edit(replay, version=6).event_key


def test_the_parts_of_a_key_do_not_run_into_each_other():
    assert event_key("a", "bc") != event_key("ab", "c")
    assert event_key("a", "b", "c") != event_key("a", "bc")


def test_a_features_own_event_id_comes_first():
    assert edit(event_id="mine").event_id == "mine"
    assert edit().event_id == "e1"


def test_rule_14_the_clock_enters_no_key():
    later = context(received_ms=1_800_000_000_000)
    for members in ({}, {"id": None}, {"version": 3}):
        now, then = edit(**members), edit(later, **members)
        assert (now.event_key, now.feature_id) == (then.event_key, then.feature_id)
        assert (now.content_hash, now.digest) == (then.content_hash, then.digest)


# Members


def test_members_stand_at_the_top_in_the_collection_or_in_the_properties():
    around = context(members={"version": 7, "layer": "roads", "action": "create"})
    properties = {"version": 9, "layer": "roads"}
    assert edit(around, version=3, layer="buildings").version == 3
    assert edit(around, version=3, layer="buildings").layer == "buildings"
    assert (edit(around, properties={"version": 9}).version, edit(around).layer) == (7, "roads")
    assert (edit(properties=properties).version, edit(properties=properties).layer) == (9, "roads")
    assert edit(properties={"action": "delete"}).action == "delete"


def test_an_attribute_that_is_no_member_stays_an_attribute():
    tags = {"layer": "-1", "version": "v2", "action": "open", "source": "survey"}
    made = edit(properties=tags)
    assert (made.layer, made.version, made.action) == ("buildings", 1_700_000_000_000, "upsert")
    assert json.loads(made.properties) == tags


def test_a_version_that_is_absent_is_the_time_of_receipt():
    assert edit().version == 1_700_000_000_000


def test_create_and_update_store_and_delete_leaves_a_tombstone():
    assert edit(action="create").action == edit(action="update").action == "upsert"
    gone = edit(action="delete", version=4, layer="nowhere", geometry=BOW_TIE)
    assert (gone.action, gone.content_hash, gone.version, gone.feature_id) == ("delete", DELETED, 4, "1")
    assert validate(b'{"type":"Feature","id":1,"action":"delete"}', context()).geometry is None


def test_layers_are_known_and_the_sources_own():
    assert refused(layer="sky").reason == "unknown_layer"
    own = context(source(layers=frozenset({"buildings"})))
    assert refused(ctx=own, layer="roads").reason == "forbidden_layer"
    assert edit(own).layer == "buildings"
    assert refused(ctx=context(source(default_layer=None))).field == "layer"


def test_the_source_is_the_one_that_signed():
    assert edit(source="demo").source == "demo"
    assert refused(source="other").field == "source"
    assert refused(ctx=context(members={"source": "other"})).field == "source"


def test_attributes_keep_their_json_type_and_exact_value():
    raw = (
        b'{"type":"Feature","id":1,"geometry":null,"properties":'
        b'{"int":1,"float":1.0,"bool":true,"big":18446744073709551615,"huge":123456789012345678901234567890,"d":0.1}}'
    )
    assert validate(raw, context()).properties == (
        '{"big":18446744073709551615,"bool":true,"d":0.1,"float":1.0,"huge":123456789012345678901234567890,"int":1}'
    )
    hashes = {edit(properties={"a": value}).content_hash for value in (1, 1.0, True, "1")}
    assert len(hashes) == 4


def test_unknown_fields_pass():
    assert edit(colour="red", bbox=[24, 60, 25, 61]).content_hash == edit().content_hash


# Geometry


@pytest.mark.parametrize("geometry", [None, {"type": "Point", "coordinates": []}, "POINT EMPTY"])
def test_null_and_empty_geometries_are_stored_and_show_nowhere(geometry: Any):
    made = edit(context(source(default_crs=None)), geometry=geometry)
    assert (made.geometry, made.bbox, made.vertex_count) == (None, None, 0)
    assert made.min_zoom > made.max_zoom
    assert made.report is not None
    assert made.report.geometry_type is None


def test_a_geometry_may_be_wkt_or_wkb():
    for geometry in ("POINT(24.9384 60.1699)", shapely.to_wkb(shapely.Point(24.9384, 60.1699), hex=True)):
        assert edit(geometry=geometry).content_hash == edit().content_hash


def test_an_invalid_geometry_is_refused_in_geos_words():
    caught = refused(geometry=BOW_TIE)
    assert caught.reason == "invalid_geometry"
    assert "Self-intersection[0.5 0.5]" in caught.explanation


def test_a_source_may_repair_and_the_repair_is_flagged():
    made = edit(context(source(repair="make_valid")), geometry=BOW_TIE)
    assert made.repaired
    assert made.report is not None
    assert not made.report.is_valid
    assert made.report.explanation == "Self-intersection[0.5 0.5]"
    assert shapely.from_wkb(made.geometry).geom_type == "MultiPolygon"
    assert not edit(context(source(repair="make_valid"))).repaired


def test_not_a_number_is_refused():
    assert refused(geometry="POINT(nan 1)").reason == "invalid_geometry"
    assert refused(raw=text()[:-1].replace(b"24.9384", b"1e999") + b"}").reason == "invalid_geometry"
    assert refused(raw=text().replace(b"24.9384", b"NaN")).reason == "schema"


def test_beyond_the_world_and_beyond_the_sources_box_are_out_of_range():
    assert refused(geometry={"type": "Point", "coordinates": [0, 95]}).reason == "out_of_range"
    assert refused(geometry={"type": "Point", "coordinates": [200, 0]}).reason == "out_of_range"
    boxed = context(source(expected_box=(19.0, 59.0, 32.0, 71.0)))
    assert edit(boxed).bbox is not None
    caught = refused(ctx=boxed, geometry={"type": "Point", "coordinates": [60.1699, 24.9384]})
    assert (caught.reason, caught.limit) == ("out_of_range", "19.000000,59.000000,32.000000,71.000000")


def test_a_geometry_across_the_date_line_is_sized_as_one_piece():
    small = {
        "type": "Polygon",
        "coordinates": [[[179.9999, 0], [180.0001, 0], [180.0001, 0.0002], [179.9999, 0.0002], [179.9999, 0]]],
    }
    made = edit(geometry=small, layer="roads")
    assert made.bbox == (-180, 0, 180, 0.0002)
    assert made.min_zoom > 14


def test_the_vertex_limit_is_the_sources_or_the_settings():
    assert refused(ctx=context(max_vertices=4), geometry=SQUARE).reason == "too_large"
    assert edit(context(source(max_vertices=5), max_vertices=4), geometry=SQUARE).vertex_count == 5
    assert refused(ctx=context(source(max_vertices=4)), geometry=SQUARE).reason == "too_large"


def test_too_many_attributes_are_too_large():
    assert refused(properties={"a": "x" * 1_000_001}).reason == "too_large"


def test_the_reports_box_is_judged_and_nothing_refused():
    def judged(bbox: Any) -> bool:
        report = edit(geometry=SQUARE, bbox=bbox).report
        assert report is not None
        return report.bbox_valid

    assert judged([24.9, 60.1, 25.0, 60.2])
    assert judged([24.9, 60.1, 0, 25.0, 60.2, 9])
    assert judged(None)
    for wrong in ([24.9, 60.1, 24.95, 60.2], [1, 2, 3], "x", [True, 60, 25, 61], [24.9, None, 25.0, 60.2]):
        assert not judged(wrong)


# CRS


def test_rule_11_a_crs_is_declared_or_refused():
    bare = context(source(default_crs=None))
    assert refused(ctx=bare).reason == "unknown_crs"
    tm35 = {"type": "Point", "coordinates": [385000.0, 6672000.0]}
    named = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::3067"}}
    places = [
        edit(bare, geometry=tm35, crs=named),
        edit(bare, geometry={**tm35, "crs": named}),
        edit(bare, geometry=tm35, properties={"source_epsg": 3067}),
        edit(dataclasses.replace(bare, header_crs="EPSG:3067"), geometry=tm35),
        edit(dataclasses.replace(bare, collection_crs=named), geometry=tm35),
        edit(context(source(default_crs="EPSG:3067")), geometry=tm35),
        edit(bare, geometry="SRID=3067;POINT(385000 6672000)"),
    ]
    assert len({place.geometry for place in places}) == 1
    assert places[0].bbox == pytest.approx((24.927458, 60.168666, 24.927458, 60.168666), abs=1e-6)
    report = places[0].report
    assert report is not None
    assert report.operation is not None
    assert (report.crs, report.operation.accuracy_m) == ("EPSG:3067", 1.0)


def test_rule_11_declarations_in_conflict_are_refused():
    caught = refused(ctx=context(header_crs="EPSG:4326"), crs="EPSG:3067")
    assert (caught.reason, caught.field) == ("unknown_crs", "X-Source-CRS")
    assert refused(geometry="SRID=3067;POINT(1 2)", crs="EPSG:4326").reason == "unknown_crs"


def test_metres_taken_for_degrees_are_out_of_range():
    assert refused(geometry={"type": "Point", "coordinates": [385000, 6672000]}).reason == "out_of_range"


def test_a_crs_far_from_its_area_is_refused_unless_the_source_allows_it():
    swapped = {"type": "Point", "coordinates": [6672000.0, 385000.0]}
    assert refused(geometry=swapped, crs="EPSG:3067").reason == "unknown_crs"
    assert edit(context(source(allow_ballpark=True)), geometry=swapped, crs="EPSG:3067").geometry is not None


def test_polar_data_is_closed_over_the_pole():
    ring = "1000000 0,0 1000000,-1000000 0,0 -1000000,1000000 0"
    made = edit(geometry=f"SRID=3995;POLYGON(({ring}))")
    shape = shapely.from_wkb(made.geometry)
    assert shape.is_valid
    assert shape.covers(shapely.Point(12, 89))


def test_ends_one_turn_apart_close_a_ring_in_degrees_only():
    ring = {"type": "Polygon", "coordinates": [[[0, 80], [120, 80], [240, 80], [360, 80]]]}
    assert shapely.from_wkb(edit(geometry=ring).geometry).covers(shapely.Point(12, 89))
    assert refused(geometry=ring, crs="EPSG:3067").reason == "invalid_geometry"


# Hostile text


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"type":"Feature"}',
        b'{"type":"Feature","id":1,"id":2,"geometry":null}',
        b'{"type":"Feature","id":1,"geometry":null,"properties":{"a":NaN}}',
        b'{"type":"Feature","id":1,"geometry":null,"properties":{"a":1e999}}',
        b'{"type":"Feature","id":1,"geometry":null,"properties":{"a":"\\ud800"}}',
        b'{"type":"Feature","id":1,"geometry":null,"properties":{"a":' + b"9" * 1_000_000 + b"}}",
        b'{"type":"Feature","id":1,"geometry":null,"properties":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"type":"Feature","id":1,"geometry":{"type":"GeometryCollection","geometries":[' * 3000,
    ],
    ids=lambda raw: repr(raw[-40:]),
)
def test_hostile_text_is_a_schema_refusal(raw: bytes):
    assert refused(raw).reason == "schema"


def test_rule_10_a_hostile_feature_costs_itself_alone():
    deep = b'{"type":"Feature","geometry":null,"properties":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    nested = text(geometry="GEOMETRYCOLLECTION(" * 200_000)
    wkb = text(geometry="010700000001000000" * 200_000)
    results = validate_all([text(), deep, nested, wkb, b"\xff", text(geometry="POINT(1 2)")], context())
    assert [isinstance(result, ValidEdit) for result in results] == [True, False, False, False, False, True]


@pytest.mark.parametrize("depth", range(100, 1100, 50))
def test_any_depth_is_either_stored_or_refused(depth: int):
    raw = b'{"type":"Feature","id":1,"geometry":null,"properties":{"a":' + b"[" * depth + b"]" * depth + b"}}"
    result = validate_all([raw], context())[0]
    assert isinstance(result, ValidEdit) or result.reason == "schema"


odd = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
odd = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
kinds = st.sampled_from(
    ["Point", "LineString", "Polygon", "MultiPoint", "MultiLineString", "MultiPolygon", "GeometryCollection"]
)
numbers = st.integers(-400, 400) | st.floats(-400, 400) | st.sampled_from([180, -180, 90, -90, 1e308, None, "1", True])
nested = st.recursive(numbers, lambda inner: st.lists(inner, max_size=6), max_leaves=40)
shapes = st.fixed_dictionaries(
    {"type": kinds, "coordinates": nested}, optional={"geometries": st.lists(odd, max_size=3)}
)
rings = st.lists(st.tuples(st.integers(-400, 400), st.integers(-95, 95)).map(list), min_size=3, max_size=8)
polygons = st.lists(rings.map(lambda ring: [*ring, ring[0]]), min_size=1, max_size=2)
shapes |= polygons.map(lambda made: {"type": "Polygon", "coordinates": made})


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {"geometry": shapes | odd}, optional={"id": odd, "properties": odd, "version": odd, "crs": odd, "bbox": odd}
    ),
    st.sampled_from(["reject", "make_valid"]),
)
def test_whatever_comes_is_a_sound_edit_or_a_refusal(members: dict[str, Any], repair: Any):
    raw = json.dumps({"type": "Feature", **members}).encode()
    result = validate_all([raw], context(source(repair=repair)))[0]
    if isinstance(result, Refused):
        assert result.reason in REASONS
    elif result.geometry is not None:
        shape = shapely.from_wkb(result.geometry)
        assert shape.is_valid
        assert result.bbox == shape.bounds
        assert -180 <= shape.bounds[0] <= shape.bounds[2] <= 180
        assert -90 <= shape.bounds[1] <= shape.bounds[3] <= 90
