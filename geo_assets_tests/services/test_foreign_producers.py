"""Producers that nobody here wrote: plain JSON without our headers is taken, rubbish is a dead letter, never lost."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter
from geo_assets.events.foreign import Said, kept_headers, said_by
from geo_assets.events.models import PositionEvent
from geo_assets.events.records import position_value
from geo_assets.ports import inbox_object
from geo_assets.services.dead_letters import list_dead_letters, now_ms, replay, scan_topic, write_dead_letters
from geo_assets.services.hints import hint_dead_letter, read_slice
from geo_assets.services.ingest import Outcome
from geo_assets.tiles.tile import Tile
from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import World, feature
from resources.event_log.protocol import NewRecord, Record

HOME = Tile(14, 9327, 4741)
TWO_SOURCES = """
sources:
  city: {secrets: [a-secret-of-the-city], default_crs: EPSG:4326, default_layer: buildings}
  roads: {secrets: [a-secret-of-the-roads], default_crs: EPSG:4326, default_layer: pois}
"""
POSITION = {"device_id": "bus-18", "lon": 24.9384, "lat": 60.1699, "time": "2026-05-01T12:00:00.250Z"}


@contextmanager
def kafka_room() -> Iterator[dict[str, Any]]:
    """Settings of a world whose log is the real Kafka, under a prefix of its own; its topics go at the end."""
    servers, prefix = settings_of("kafka")["GEO_ASSETS_KAFKA_SERVERS"], f"{room()}."
    try:
        yield {"kafka_servers": servers, "kafka_topic_prefix": prefix}
    finally:
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": servers})
        found = [name for name in admin.list_topics(timeout=patient(30)).topics if name.startswith(prefix)]
        for deleted in (admin.delete_topics(found) if found else {}).values():
            deleted.result()


@pytest.fixture
def kafka() -> Iterator[dict[str, Any]]:
    """The settings that choose a real Kafka."""
    with kafka_room() as changes:
        yield changes


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.service("kafka"))])
def log(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings that choose a log; every test that asks for it runs on each."""
    return {} if request.param == "embedded" else request.getfixturevalue("kafka")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One source: nobody has to name it."""
    world = World(tmp_path / "home")
    yield world
    world.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One source and many tests: for those that look at their own record alone."""
    world = World(tmp_path_factory.mktemp("shared") / "home")
    yield world
    world.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[World]:
    """Two sources: somebody has to."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "sources.yaml").write_text(TWO_SOURCES)
    world = World(home)
    yield world
    world.close()


def put(
    world: World,
    topic: str,
    value: Any,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    timestamp_ms: int | None = None,
) -> Record:
    """A record as a stranger's producer writes it."""
    data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    (at,) = world.stack.log.append([NewRecord(topic, key, data, headers or {}, timestamp_ms)])
    (record,) = world.stack.log.read(topic, at.partition, at.offset, 1)
    return record


def raw(world: World, value: Any, key: str | None = None, **more: Any) -> Outcome:
    """A stranger's record on `[raw]`, ingested."""
    (outcome,) = world.ingest.work([put(world, topics.RAW, value, key, **more)])
    return outcome


def read_hints(world: World) -> tuple[set[str], list[DeadLetter]]:
    """Tiles that the records of `[tiles]` mark, and dead letters of those that mark none; as the sensor does it."""
    marked: set[str] = set()
    letters: list[DeadLetter] = []
    topic_id = world.stack.log.topic_id(topics.TILES)
    for partition, extent in world.stack.log.extents(topics.TILES).items():
        records = world.stack.log.read(topics.TILES, partition, extent.begin)
        part = read_slice(records, extent.begin)
        dead = [hint_dead_letter(record, fault, now_ms()) for record, fault in part.unreadable]
        write_dead_letters(world.stack, dead)
        world.stack.ledger.mark_from_log(topic_id, partition, part.hints, part.next_offset)
        marked |= {hint.key for hint in part.hints}
        letters += dead
    assert marked <= {state.key for state in world.stack.ledger.dirty(10_000)} | {
        state.key for state in world.stack.ledger.read(sorted(marked)).values()
    }
    return marked, letters


# -- raw -----------------------------------------------------------------------------------------------------------


def test_a_bare_feature_is_stored_whatever_its_key_is(world: World) -> None:
    keys = [None, "4711", "city:4711", "building:9", "", "\x00", "ключ"]
    outcomes = [raw(world, feature(number), key) for number, key in enumerate(keys)]
    assert [outcome.counts for outcome in outcomes] == [{"applied": 1}] * len(keys)
    assert {(f.source, f.feature_id) for f in world.stack.features.scan()} == {("city", str(n)) for n in range(7)}


def test_a_stranger_s_feature_becomes_a_tile(world: World) -> None:
    raw(world, feature(1, 1, name="Kiosk"))
    marked, letters = read_hints(world)
    assert marked
    assert letters == []
    world.build_dirty()
    key = next(key for key in world.published() if key.startswith("15:"))
    assert [p["name"] for p in world.properties(key)] == ["Kiosk"]


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ({"type": "FeatureCollection", "features": [feature(1), feature(2), feature(3)]}, 3),
        (b"\n".join(json.dumps(feature(n)).encode() for n in range(4)), 4),
        (b"".join(b"\x1e" + json.dumps(feature(n)).encode() + b"\n" for n in range(2)), 2),
        (b"\xef\xbb\xbf" + json.dumps(feature(1)).encode(), 1),
        (b"  \r\n" + json.dumps(feature(1), indent=4).encode(), 1),
    ],
    ids=["collection", "lines", "text sequence", "byte order mark", "indented"],
)
def test_features_are_known_by_their_body(shared: World, value: Any, count: int) -> None:
    assert sum(raw(shared, value).counts.values()) == count


def test_the_source_is_the_header_s_then_the_body_s_then_the_key_s(two: World) -> None:
    raw(two, feature(1) | {"source": "roads"}, "city:1", headers={"source": "roads"})
    raw(two, feature(2) | {"source": "roads"}, "city:2")
    raw(two, feature(3), "city:3")
    raw(two, {"type": "FeatureCollection", "source": "roads", "features": [feature(4)]})
    raw(two, {"type": "FeatureCollection", "features": [feature(5) | {"source": "roads"}]})
    raw(two, json.dumps(feature(6) | {"source": "roads"}).encode() + b"\n" + json.dumps(feature(7)).encode())

    assert {f.feature_id: f.source for f in two.stack.features.scan()} == {
        "1": "roads", "2": "roads", "3": "city", "4": "roads", "5": "roads", "6": "roads", "7": "roads"
    }  # fmt: skip


def test_rule_1_a_record_of_nobody_is_a_dead_letter_that_names_the_field(two: World) -> None:
    outcomes = [raw(two, feature(1)), raw(two, feature(2) | {"source": "moon"}), raw(two, feature(3), "moon:3")]

    assert [o.counts for o in outcomes] == [{}, {}, {}]
    letters = [letter for o in outcomes for letter in o.letters]
    assert {(letter.reason, letter.field) for letter in letters} == {("schema", "source")}
    assert letters[1].value == "moon"
    assert [json.loads(letter.payload)["id"] for letter in letters] == [1, 2, 3]
    assert list(two.stack.features.scan()) == []


def test_a_body_of_another_source_than_its_header_says_is_refused(two: World) -> None:
    (letter,) = raw(two, feature(1) | {"source": "roads"}, headers={"source": "city"}).letters
    assert (letter.reason, letter.field, letter.value) == ("schema", "source", "roads")


def test_rule_2_the_same_bytes_count_once_and_an_event_id_of_the_body_counts_as_one(world: World) -> None:
    plain = [raw(world, feature(1, 1)), raw(world, feature(1, 1), "another key")]
    named = [raw(world, feature(2, n) | {"event_id": "e-1"}) for n in (1, 2)]

    assert [o.counts for o in plain] == [{"applied": 1}, {"duplicate": 1}]
    assert [o.counts for o in named] == [{"applied": 1}, {"duplicate": 1}]
    body = json.dumps(feature(1, 1)).encode()
    hints = scan_topic(world.stack.log, topics.TILES)
    assert {r.headers["event-id"] for r in hints} == {hashlib.sha256(body).hexdigest(), "e-1"}


@pytest.mark.parametrize("headers", [{}, {"received-ms": "soon"}, {"received-ms": "-5"}, {"received-ms": "9" * 40}])
def test_the_record_s_own_time_is_the_version_of_what_has_none(shared: World, headers: dict[str, str]) -> None:
    assert version_of(shared, headers, 1_700_000_000_123) == 1_700_000_000_123


@pytest.mark.parametrize("stamp", [0, -1, 9_000_000_000_000_000])
def test_a_time_that_is_none_is_now(shared: World, stamp: int) -> None:
    before = now_ms()
    assert before <= version_of(shared, {}, stamp) <= now_ms()


def version_of(world: World, headers: Mapping[str, str], timestamp_ms: int) -> int:
    """The version that a feature without one is given."""
    name = secrets.token_hex(4)
    body = {k: v for k, v in feature(name).items() if k != "version"} | {"properties": {}}
    assert raw(world, body, headers=headers, timestamp_ms=timestamp_ms).counts == {"applied": 1}
    return next(f.version for f in world.stack.features.scan() if f.feature_id == json.dumps(name))


@pytest.mark.parametrize("position", [POSITION, [POSITION, {**POSITION, "device_id": "bus-19"}]])
def test_positions_on_raw_go_on_to_their_topic(world: World, position: Any) -> None:
    count = len(position) if isinstance(position, list) else 1
    assert raw(world, position).counts == {"passed_on": count}
    records = list(scan_topic(world.stack.log, topics.POSITIONS))
    assert {r.key for r in records} == {p["device_id"] for p in (position if count > 1 else [position])}
    assert all(r.headers["kind"] == "positions" and r.headers["source"] == "city" for r in records)
    assert len({r.headers["event-id"] for r in records}) == count
    for record in records:
        assert json.loads(record.value or b"")["event_time_ms"] == 1_777_636_800_250


def test_tile_events_on_raw_go_on_to_their_topic(world: World) -> None:
    assert raw(world, {"zoom": 14, "x": HOME.x, "y": HOME.y, "force": True}).counts == {"passed_on": 1}
    (record,) = scan_topic(world.stack.log, topics.TILES)
    assert record.key == HOME.key
    (hint,) = read_slice([record], 0).hints
    assert (hint.key, hint.force) == (HOME.key, True)


def test_a_fence_on_raw_is_one_only_where_the_header_says_so(world: World) -> None:
    fence = feature("depot") | {"dwell_s": 60}
    assert raw(world, fence, headers={"kind": "fences"}).counts == {"passed_on": 1}
    assert raw(world, feature("depot")).counts == {"applied": 1}
    (record,) = scan_topic(world.stack.log, topics.FENCES)
    assert json.loads(record.value or b"")["dwell_s"] == 60


def test_rule_12_a_position_that_cannot_be_taken_shows_no_place(world: World) -> None:
    (letter,) = raw(world, {**POSITION, "lat": 91.25}).letters
    assert letter.headers["kind"] == "positions"
    assert (letter.reason, letter.field) == ("schema", "lat")
    shown = json.dumps(letter.summary())
    assert "91.25" not in shown
    assert "24.9384" not in shown


def test_rule_1_an_event_too_large_for_its_topic_costs_itself_alone(world: World) -> None:
    fat = json.dumps({**POSITION, "note": ""})
    fat = fat[:-2] + "x" * (999_990 - len(fat)) + '"}'
    records = [put(world, topics.RAW, fat.encode()), put(world, topics.RAW, POSITION)]
    large, small = world.ingest.work(records)
    assert small.counts == {"passed_on": 1}
    (letter,) = large.letters
    assert letter.reason == "too_large"
    assert letter.payload == fat.encode()


@pytest.mark.parametrize(
    ("pointer", "reason"),
    [("inbox/none", "missing_body"), ("tiles/0/0/0", "missing_body"), ("../../x", "missing_body")],
)
def test_a_pointer_leads_into_the_inbox_and_nowhere_else(world: World, pointer: str, reason: str) -> None:
    world.stack.tiles.put("tiles/0/0/0", json.dumps(feature(1)).encode())
    (letter,) = raw(world, b"", headers={"pointer": pointer}).letters
    assert letter.reason == reason


def test_a_stranger_s_pointer_needs_no_other_header(world: World) -> None:
    body = json.dumps(feature(1)).encode()
    name = inbox_object(hashlib.sha256(body).hexdigest())
    world.stack.tiles.put(name, body)
    assert raw(world, b"", headers={"pointer": name}).counts == {"applied": 1}


DEEP = b'{"type":"Feature","id":1,"geometry":null,"properties":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}"
RUBBISH: dict[str, bytes | None] = {
    "null": None,
    "empty": b"",
    "blank": b" \n ",
    "text": b"hello",
    "number": b"17",
    "string": b'"a"',
    "empty array": b"[]",
    "array of features": json.dumps([feature(1)]).encode(),
    "array of numbers": b"[1, 2]",
    "nothing known": b'{"a": 1}',
    "half": b'{"type": "Feature", "id": 1',
    "avro": b"\x00\x00\x00\x00\x01\x02abc",
    "utf-16": json.dumps(feature(1)).encode("utf-16"),
    "latin-1": b'{"type":"Feature","id":"\xe4","geometry":null,"properties":{}}',
    "nan": b'{"type":"Feature","id":1,"geometry":{"type":"Point","coordinates":[NaN,1]},"properties":{}}',
    "infinity": b'{"type":"Feature","id":1,"geometry":{"type":"Point","coordinates":[Infinity,1]},"properties":{}}',
    "position with nan": b'{"device_id":"a","lon":NaN,"lat":1,"time_ms":1777636800250}',
    "position without time": b'{"device_id":"a","lon":1,"lat":1}',
    "tile outside": b'{"z":2,"x":9,"y":0}',
    "deep": DEEP[:900_000],
    "ten deep": b"[" * 10 + b"1" + b"]" * 10,
    "very deep": b"[" * 100_000 + b"]" * 100_000,
    "surrogate": b'{"type":"Feature","id":"\\ud800","geometry":null,"properties":{}}',
    "member twice": b'{"type":"Feature","id":1,"id":2,"geometry":null,"properties":{}}',
    "schema registry": b'{"schema":{"type":"struct"},"payload":{"id":1}}',
}


@pytest.mark.parametrize("name", RUBBISH)
def test_rule_1_rubbish_on_raw_is_a_dead_letter_with_its_bytes(shared: World, name: str) -> None:
    outcome = raw(shared, RUBBISH[name])
    assert outcome.counts == {}
    (letter,) = outcome.letters
    assert letter.reason in ("schema", "null_value", "out_of_range", "invalid_geometry")
    assert letter.payload == (RUBBISH[name] or b"")
    assert letter.id in {listed.letter.id for listed in list_dead_letters(shared.stack.log)}


HEADERS: list[dict[str, str]] = [
    {"event-id": "x" * 5_000},
    {"event-id": "a\x00b"},
    {"source": "\\xff\\xfe"},
    {"source": "s" * 5_000},
    {"kind": "banana"},
    {"kind": ""},
    {"content-type": "\x01"},
    {"source-crs": "\\xff"},
    {"sha256": "no hash"},
    {"callback": "ftp://nowhere"},
    {"vertex-count": "many", "region-priority": "-"},
    {"": "", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x" * 300: "y" * 90_000},
    {f"h{n}": "\N{GRINNING FACE}" * 5_000 for n in range(40)},
]


@pytest.mark.parametrize("headers", HEADERS, ids=[next(iter(h)) or "others" for h in HEADERS])
@pytest.mark.parametrize("value", [json.dumps(feature(1)).encode(), b"rubbish"], ids=["feature", "rubbish"])
def test_rule_1_no_header_stops_the_pipeline(shared: World, headers: dict[str, str], value: bytes) -> None:
    outcome = raw(shared, value, headers=headers)
    assert bool(outcome.counts) != bool(outcome.letters)
    for letter in outcome.letters:
        listed = next(one for one in list_dead_letters(shared.stack.log) if one.letter.id == letter.id)
        assert listed.letter.payload == value
        replay(shared.stack, [listed.letter], payload=json.dumps(feature(2)).encode())


def test_keys_and_headers_that_are_no_unicode_can_be_told_again(world: World) -> None:
    # An adapter that decodes with surrogateescape would hand these over; none of them can be written as UTF-8.
    record = Record(topics.RAW, 0, 0, "k\udcff", b"rubbish", {"event-id": "e\udcff", "x\udcff": "y\udcff"}, now_ms())
    (outcome,) = world.ingest.work([record])
    (letter,) = outcome.letters
    assert letter.headers["x\\udcff"] == "y\\udcff"
    assert [one.letter.event_id for one in list_dead_letters(world.stack.log)] == ["e\\udcff"]


@given(
    value=st.one_of(
        st.none(),
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                st.sampled_from(["type", "source", "device_id", "z", "x", "y", "features", "id", "geometry"]),
                inner, max_size=4,
            ),
            max_leaves=10,
        ).map(lambda value: json.dumps(value).encode()),
    ),
    key=st.none() | st.text(max_size=10),
    headers=st.dictionaries(
        st.sampled_from(sorted(topics.HEADERS - {"pointer"})) | st.text(max_size=5), st.text(max_size=10), max_size=4
    ),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_rule_1_whatever_a_record_holds_it_is_stored_or_dead(
    shared: World, value: bytes | None, key: str | None, headers: dict[str, str]
) -> None:
    (outcome,) = shared.ingest.work([Record(topics.RAW, 0, 0, key, value, headers, now_ms())])
    assert outcome.counts or outcome.letters
    part = read_slice([Record(topics.TILES, 0, 0, key, value, headers, 0)], 0)
    assert len(part.hints) + len(part.unreadable) >= 1
    for record, fault in part.unreadable:
        assert hint_dead_letter(record, fault, 0).payload == (value or b"")


# -- tiles ---------------------------------------------------------------------------------------------------------

HINTS: dict[str, tuple[str | None, bytes | None]] = {
    "key alone": (HOME.key, None),
    "key and empty value": (HOME.key, b""),
    "key and rubbish": (HOME.key, b"\xff\xfe"),
    "key and null": (HOME.key, b"null"),
    "z": (None, b'{"z": 14, "x": 9327, "y": 4741}'),
    "zoom": (None, b'{"zoom": 14, "x": 9327, "y": 4741, "bbox": [24.9, 60.1, 25.0, 60.2]}'),
    "another key": ("tile-77", b'{"z": 14, "x": 9327, "y": 4741, "note": "unknown members pass"}'),
    "byte order mark": (None, b'\xef\xbb\xbf{"z": 14, "x": 9327, "y": 4741}'),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_is_known_by_its_key_or_by_its_value(name: str) -> None:
    key, value = HINTS[name]
    part = read_slice([Record(topics.TILES, 0, 5, key, value, {}, 0)], 5)
    assert ([(hint.key, hint.offset) for hint in part.hints], part.unreadable) == ([(HOME.key, 5)], ())


def test_a_key_and_a_value_that_name_two_tiles_are_two_hints(world: World) -> None:
    put(world, topics.TILES, {"z": 3, "x": 1, "y": 2}, HOME.key)
    assert read_hints(world) == ({HOME.key, Tile(3, 1, 2).key}, [])


NO_HINTS: dict[str, tuple[str | None, bytes | None, str]] = {
    "nothing": (None, None, "key"),
    "no key, empty": (None, b"", "key"),
    "bad key": ("14:999", None, "key"),
    "bad key and text": ("\\xff\\xfe", b"hello", "$"),
    "array": (None, b'[{"z": 1, "x": 0, "y": 0}]', "$"),
    "no x": (None, b'{"z": 14, "y": 4741}', "x"),
    "no zoom": (None, b'{"x": 1, "y": 1}', "z"),
    "outside": (None, b'{"z": 2, "x": 4, "y": 0}', "x"),
    "too deep a zoom": (None, b'{"zoom": 23, "x": 4, "y": 0}', "zoom"),
    "texts": (None, b'{"z": "14", "x": "1", "y": "2"}', "z"),
    "nan": (None, b'{"z": NaN, "x": 1, "y": 2}', "$"),
    "another grid": (None, b'{"z": 1, "x": 1, "y": 1, "tile_matrix_set": "WorldCRS84Quad"}', "tile_matrix_set"),
    "deep": (None, b'{"z":' + b"[" * 100_000, "$"),
}


@pytest.mark.parametrize("name", NO_HINTS)
def test_rule_1_a_hint_that_names_no_tile_is_a_dead_letter_with_its_bytes(world: World, name: str) -> None:
    key, value, field = NO_HINTS[name]
    put(world, topics.TILES, HOME.key)
    put(world, topics.TILES, value, key)
    put(world, topics.TILES, None, HOME.key)
    marked, letters = read_hints(world)
    assert marked == {HOME.key}
    letter = next(one for one in letters if one.payload == (value or b""))
    assert (letter.reason, letter.stage, letter.field) == ("schema", "tiles", field)
    assert letter.id in {one.letter.id for one in list_dead_letters(world.stack.log)}


def test_a_mended_hint_is_replayed_as_a_hint(world: World) -> None:
    put(world, topics.TILES, {"z": 14, "x": -1, "y": 4741})
    _, (letter,) = read_hints(world)
    replay(world.stack, [letter], payload=b'{"z": 14, "x": 9327, "y": 4741}')
    marked, _ = read_hints(world)
    assert marked == {HOME.key}
    assert all(one.replayed_ms for one in list_dead_letters(world.stack.log) if one.letter.id == letter.id)


def test_a_hint_may_ask_for_force_in_plain_json(world: World) -> None:
    records = [
        Record(topics.TILES, 0, 0, None, b'{"zoom": 14, "x": 9327, "y": 4741, "force": true}', {}, 0),
        Record(topics.TILES, 0, 1, HOME.key, b'{"force": true}', {}, 0),
        Record(topics.TILES, 0, 2, HOME.key, b'{"force": "yes"}', {}, 0),
    ]
    assert [(hint.key, hint.force) for hint in read_slice(records, 0).hints] == [
        (HOME.key, True), (HOME.key, True), (HOME.key, False)
    ]  # fmt: skip


# -- positions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time", [{"time": "2026-05-01T14:00:00.250+02:00"}, {"time_ms": 1_777_636_800_250}])
def test_a_plain_position_reads_like_one_that_the_edge_wrote(time: dict[str, Any]) -> None:
    plain = {"device_id": "bus-18", "lon": 24.9384, "lat": 60.1699, **time, "line": 5}
    event = PositionEvent.model_validate(plain)
    written = json.loads(json.dumps(position_value(event)))
    again = PositionEvent.model_validate(written)
    assert written == {**plain, "event_time_ms": 1_777_636_800_250}
    assert position_value(again) == written


# -- what a body says of itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"type":"Feature","source":"a","event_id":"e","device_id":"d"}', Said("features", "a", "e")),
        (b'{"device_id":"d","source":"a"}', Said("positions", "a")),
        (b' [ {"device_id":"d","event_id":"e"} ]', Said("positions")),
        (b'{"zoom":1,"x":0,"y":0}', Said("tiles")),
        (b'{"zoom":1,"x":0}', Said()),
        (b'{"type":"Feature","source":17,"event_id":""}', Said("features")),
        (b"nonsense", Said()),
        (b"", Said()),
    ],
)
def test_a_body_says_what_it_is(body: bytes, said: Said) -> None:
    assert said_by(body) == said


def test_a_dead_letter_keeps_our_headers_whole_and_few_of_others() -> None:
    kept = kept_headers({**{f"h{n:02}": "v" * 9_999 for n in range(99)}, "source-crs": "c" * 1_900})
    assert len(kept) == 33
    assert len(kept["source-crs"]) == 1_900
    assert len(kept["h00"]) == 500


# -- on every log --------------------------------------------------------------------------------------------------


def ingest_all(world: World, count: int) -> None:
    """Let ingest work off so many records as it does in life: through its group, with offsets committed."""
    deadline = time.monotonic() + patient(60)
    while count > 0 and time.monotonic() < deadline:
        count -= world.ingest.run_once(timeout_s=1.0)
    assert count == 0


def test_rule_1_a_stranger_s_stream_is_worked_off_on_every_log(tmp_path: Path, log: dict[str, Any]) -> None:
    world = World(tmp_path / "home", **log)
    try:
        good = [feature(number, 1) for number in range(5)]
        for body in good:
            put(world, topics.RAW, body)
        for value in (None, b"rubbish", b"\xff\xfe", b"[]"):
            put(world, topics.RAW, value, "k")
        put(world, topics.RAW, POSITION)
        ingest_all(world, 10)
        assert sorted(f.feature_id for f in world.stack.features.scan()) == ["0", "1", "2", "3", "4"]
        assert len(world.letters()) == 4
        assert [r.key for r in scan_topic(world.stack.log, topics.POSITIONS)] == ["bus-18"]
        put(world, topics.TILES, {"zoom": 3, "x": 1, "y": 2})
        put(world, topics.TILES, b"?")
        marked, letters = read_hints(world)
        assert Tile(3, 1, 2).key in marked
        assert [letter.payload for letter in letters] == [b"?"]
    finally:
        world.close()


@pytest.mark.service("kafka")
def test_any_kafka_producer_s_bytes_end_stored_or_dead(tmp_path: Path, kafka: dict[str, Any]) -> None:
    from confluent_kafka import Producer

    world = World(tmp_path / "home", **kafka)
    try:
        prefix = kafka["kafka_topic_prefix"]
        producer = Producer({"bootstrap.servers": kafka["kafka_servers"]})
        body = json.dumps(feature(1, 1)).encode()
        producer.produce(f"{prefix}raw", body)
        producer.produce(f"{prefix}raw", json.dumps(feature(2, 1)).encode(), key=b"\xff\xfe\x00")
        producer.produce(
            f"{prefix}raw", json.dumps(feature(3, 1)).encode(), headers=[("trace", b"\xff\x00"), ("n", None)]
        )
        producer.produce(
            f"{prefix}raw", json.dumps(feature(4, 1)).encode(), headers=[("kind", b"\xff"), ("kind", b"x")]
        )
        producer.produce(f"{prefix}raw", None, key=b"tombstone")
        producer.produce(f"{prefix}raw", b"\x00\x01binary", headers=[("event-id", b"\xc3\x28")])
        producer.produce(f"{prefix}tiles", None, key=HOME.key.encode())
        producer.produce(f"{prefix}tiles", b'{"z": 3, "x": 1, "y": 2}', key=b"\xff\xfe")
        producer.produce(f"{prefix}tiles", None, key=b"\xff\xfe")
        assert producer.flush(patient(30)) == 0
        ingest_all(world, 6)
        assert sorted(f.feature_id for f in world.stack.features.scan()) == ["1", "2", "3", "4"]
        assert sorted(letter.reason for letter in world.letters()) == ["null_value", "schema"]
        marked, letters = read_hints(world)
        assert {HOME.key, Tile(3, 1, 2).key} <= marked
        assert [letter.field for letter in letters] == ["key"]
        assert "\\xff" in (letters[0].value or "")
    finally:
        world.close()


@pytest.mark.service("kafka")
def test_the_producer_in_the_documentation_does_what_it_says(tmp_path: Path, kafka: dict[str, Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    example = example.replace("localhost:9092", kafka["kafka_servers"])
    for topic in ("raw", "tiles", "positions"):
        example = example.replace(f'produce("{topic}"', f'produce("{kafka["kafka_topic_prefix"]}{topic}"')
    world = World(tmp_path / "home", **kafka)
    try:
        exec(compile(example, "docs/kafka.md", "exec"), {})
        ingest_all(world, 1)
        assert [f.feature_id for f in world.stack.features.scan()] == ["4711"]
        marked, letters = read_hints(world)
        assert HOME.key in marked
        assert letters == []
        (record,) = scan_topic(world.stack.log, topics.POSITIONS)
        assert PositionEvent.model_validate(json.loads(record.value or b"")).event_time_ms == 1_777_636_800_250
    finally:
        world.close()
