"""The documents of the topics: as committed, in form, and true of every record that the platform writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml

from geo_assets.cli.schemas import documents
from geo_assets.events import topics
from geo_assets.events.models import EnvelopeError, PositionEvent, parse
from geo_assets.events.records import read_hint
from geo_assets.events.signature import sign
from geo_assets.ports import topic_specs
from geo_assets.services.asyncapi import (
    VALUES,
    asyncapi_document,
    headers_of,
    headers_schema,
    json_schemas,
    key_schema,
)
from geo_assets.services.dead_letters import list_dead_letters, now_ms, replay, scan_topic, write_dead_letters
from geo_assets.services.edge import create_app
from geo_assets.services.hints import hint_dead_letter, read_slice
from geo_assets.settings import Settings
from geo_assets_tests.needs import missing
from geo_assets_tests.services.running import running
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import HERE, World, feature
from resources.event_log.protocol import NewRecord, Record

DOCS = Path(__file__).parents[2] / "docs"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
DEFAULTS = Settings.model_construct()


# -- as committed --------------------------------------------------------------------------------------------------


def test_the_committed_asyncapi_document_is_the_generated_one() -> None:
    (text,) = documents("asyncapi").values()
    assert (DOCS / "asyncapi.yaml").read_text() == text, "run: geo-assets schemas asyncapi docs"


def test_the_committed_json_schemas_are_the_generated_ones() -> None:
    made = documents("json")
    assert {path.name for path in (DOCS / "schemas").iterdir()} == set(made)
    for name, text in made.items():
        assert (DOCS / "schemas" / name).read_text() == text, "run: geo-assets schemas json docs/schemas"


def test_no_setting_of_the_machine_shows_in_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    before = documents("asyncapi")
    monkeypatch.setenv("GEO_ASSETS_LOG_PARTITIONS", "17")
    assert documents("asyncapi") == before


# -- in form -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return yaml.safe_load((DOCS / "asyncapi.yaml").read_text())


def test_every_topic_is_described_as_it_is_declared(document: dict[str, Any]) -> None:
    assert set(document["channels"]) == set(topics.ALL)
    for spec in topic_specs(DEFAULTS):
        channel = document["channels"][spec.name]
        kafka = channel["bindings"]["kafka"]
        assert (channel["address"], kafka["topic"]) == (spec.name, spec.name)
        assert kafka["partitions"] == spec.partitions
        assert kafka["topicConfiguration"]["retention.ms"] == spec.retention_ms
        assert channel["x-max-record-bytes"] == spec.max_record_bytes


def test_a_topic_without_a_description_is_an_error() -> None:
    with pytest.raises(LookupError, match="fences"):
        asyncapi_document([spec for spec in topic_specs(DEFAULTS) if spec.name != topics.FENCES])


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = list(references(document))
    assert len(found) > 30
    for reference in found:
        part: Any = document
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
            assert set(part) == {"$ref"}, "draft 07 reads nothing beside a reference"
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def test_operations_name_messages_of_their_own_channel(document: dict[str, Any]) -> None:
    for operation in document["operations"].values():
        channel = operation["channel"]["$ref"]
        assert operation["action"] in ("send", "receive")
        assert all(message["$ref"].startswith(f"{channel}/messages/") for message in operation["messages"])
    spoken_of = {operation["channel"]["$ref"] for operation in document["operations"].values()}
    assert spoken_of == {f"#/channels/{name}" for name in topics.ALL}


def test_a_message_says_its_key_and_is_used(document: dict[str, Any]) -> None:
    used = {m["$ref"].split("/")[-1] for c in document["channels"].values() for m in c["messages"].values()}
    assert used == set(document["components"]["messages"])
    for message in document["components"]["messages"].values():
        jsonschema_rs.validator_for(message["bindings"]["kafka"]["key"])
        assert message["contentType"]
        assert message["summary"]


def test_no_keyword_that_draft_07_does_not_have_stands_in_the_document(document: dict[str, Any]) -> None:
    text = json.dumps(document["components"]["schemas"])
    for keyword in ("prefixItems", "$defs", "unevaluatedProperties", "dependentRequired"):
        assert f'"{keyword}"' not in text


def test_every_header_is_described_and_every_described_one_is_known() -> None:
    described = {name for topic in topics.ALL for name in headers_of(topic)["properties"]}
    assert described == topics.HEADERS
    for schema in headers_schema(topics.HEADERS)["properties"].values():
        assert schema["description"]


def test_each_schema_is_valid_and_complete_in_itself() -> None:
    for topic, schema in json_schemas().items():
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["$id"].endswith(topic)
        jsonschema_rs.validator_for(schema)
        for example in schema.get("examples", []):
            jsonschema_rs.validate(schema, example)


# -- true ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    """Every record of a world in which everything happened that writes one."""
    world = World(tmp_path_factory.mktemp("world") / "home", stream_above_bytes=2_000_000)
    try:
        app = create_app(world.stack.log, world.stack.guard, world.stack.tiles, world.stack.sources, world.settings)
        with running(app) as url:
            for kind, body in (
                ("features", feature(1, 1, name="Kiosk")),
                ("features", {"type": "FeatureCollection", "features": [feature(2), feature(3)]}),
                ("features", {"type": "FeatureCollection", "features": [feature(4, note="x" * 1_100_000)]}),
                ("features", {"type": "Feature", "id": 5, "geometry": "POINT (1 2)", "layer": "pois"}),
                ("tiles", {"zoom": 14, "x": 9327, "y": 4741, "force": True, "version": 3}),
                ("tiles", [{"zoom": 3, "x": 1, "y": 1}, {"zoom": 0, "x": 0, "y": 0}]),
                ("positions", {"device_id": "bus", "lon": 24.9, "lat": 60.1, "time": "2026-05-01T12:00:00Z"}),
                ("positions", [{"device_id": "bus", "lon": 24.9, "lat": 60, "time_s": 1777636801.5, "line": 5}]),
                ("fences", feature("depot") | {"dwell_s": 60}),
                ("fences", {"type": "Feature", "id": 7, "action": "delete"}),
            ):  # fmt: skip
                post(url, kind, body)
        for body in (
            feature(9) | {"layer": "nowhere"},
            {"device_id": "bus", "lon": 24.9, "lat": 95, "time_ms": 1777636800250},
            {"device_id": "tram", "lon": 24.9, "lat": 60.1, "time_ms": 1777636800250},
        ):
            world.stack.log.append([NewRecord(topics.RAW, None, json.dumps(body).encode())])
        world.stack.log.append([NewRecord(topics.RAW, "gone", None), NewRecord(topics.RAW, None, b"\xff\xfe")])
        while world.ingest.run_once():
            pass
        world.stack.log.append([NewRecord(topics.TILES, "nonsense", b"?"), NewRecord(topics.TILES, "0:", None)])
        hints = [record for record in scan_topic(world.stack.log, topics.TILES) if record.headers]
        world.stack.log.append([NewRecord(topics.TILES_HOT, one.key, one.value, one.headers) for one in hints])
        for partition in world.stack.log.extents(topics.TILES):
            part = read_slice(world.stack.log.read(topics.TILES, partition, 0), 0)
            write_dead_letters(world.stack, [hint_dead_letter(r, f, now_ms()) for r, f in part.unreadable])
        # A conflict, a move, and a tile that is emptied.
        world.build_dirty()
        world.edit(feature(1, 1, name="other"))
        world.edit(feature(1, 2, at=(HERE[0] + 0.1, HERE[1])))
        for number in (2, 3, 4):
            world.edit({"type": "Feature", "id": number, "version": 9, "action": "delete"})
        world.build_dirty()
        letters = [one.letter for one in list_dead_letters(world.stack.log)]
        replay(world.stack, [next(one for one in letters if one.reason == "unknown_layer")])
        replay(world.stack, [next(one for one in letters if one.stage == "tiles")], payload=b'{"z":1,"x":1,"y":1}')
        return {topic: list(scan_topic(world.stack.log, topic)) for topic in topics.ALL}
    finally:
        world.close()


def post(url: str, kind: str, body: Any) -> None:
    content = json.dumps(body).encode()
    headers = sign(SECRET, f"{kind}-{abs(hash(content))}", int(time.time()), content)
    answer = httpx.post(
        f"{url}/v1/{kind}",
        content=content,
        headers={**headers, "content-type": "application/json"},
        timeout=patient(30),
    )
    assert answer.status_code == 202, answer.text


STRANGERS = {b"\xff\xfe", b"?"}
"""Values that the fixture wrote as a stranger would."""


@pytest.mark.parametrize("topic", VALUES)
def test_every_record_that_the_platform_writes_is_as_described(records: dict[str, list[Record]], topic: str) -> None:
    key, headers = (jsonschema_rs.validator_for(schema) for schema in (key_schema(topic), headers_of(topic)))
    value = jsonschema_rs.validator_for(json_schemas()[topic])
    seen = 0
    for record in records[topic]:
        headers.validate(dict(record.headers))
        assert set(record.headers) <= set(headers_of(topic)["properties"])
        if record.value in STRANGERS or not record.value:
            continue
        key.validate(record.key)
        # What a stranger wrote to `[raw]` is kept as it came, and may be a position.
        if topic != topics.RAW or b'"type"' in record.value:
            value.validate(json.loads(record.value))
            seen += 1
    assert seen >= 2


def test_the_world_of_these_tests_has_every_kind_of_record(records: dict[str, list[Record]]) -> None:
    values = {topic: [json.loads(r.value) for r in found if r.value and r.value not in STRANGERS]
              for topic, found in records.items()}  # fmt: skip
    assert {value["outcome"] for value in values[topics.TILE_UPDATED]} == {"built", "emptied"}
    assert {value["reason"] for value in values[topics.DEAD_LETTERS]} >= {
        "schema", "unknown_layer", "null_value", "version_conflict"
    }  # fmt: skip
    assert {value["stage"] for value in values[topics.DEAD_LETTERS]} >= {"validate", "store", "tiles"}
    assert any(topics.HEADER_POINTER in r.headers and r.value == b"" for r in records[topics.RAW])
    assert any(topics.HEADER_REPLAY in r.headers for r in records[topics.RAW])
    assert any(r.value is None for r in records[topics.DEAD_LETTERS])
    assert {value["device_id"] for value in values[topics.POSITIONS]} == {"bus", "tram"}


POSITION = {"device_id": "d", "lon": 1, "lat": 2}


@pytest.mark.parametrize(
    "value",
    [
        POSITION,
        {**POSITION, "time_ms": 1777636800250},
        {**POSITION, "time_ms": 1777636800250, "time": None},
        {**POSITION, "time_ms": 1777636800250, "time_s": 1777636800},
        {**POSITION, "time": "2026-05-01T12:00:00Z", "speed_mps": -1},
        {**POSITION, "time": "2026-05-01T12:00:00Z", "heading_deg": 359.5, "unknown": []},
        {**POSITION, "time": 5},
        {**POSITION, "lon": 181, "time_ms": 1777636800250},
        {**POSITION, "device_id": "", "time_ms": 1777636800250},
    ],
)
def test_schema_and_model_of_a_position_agree(value: dict[str, Any]) -> None:
    assert jsonschema_rs.is_valid(json_schemas()[topics.POSITIONS], value) == accepts(parse, PositionEvent, value)


@pytest.mark.parametrize(
    "value",
    [
        {"z": 1, "x": 0, "y": 1},
        {"zoom": 1, "x": 0, "y": 1, "force": True, "anything": 1},
        {"x": 0, "y": 1},
        {"z": 1, "x": 0},
        {"z": 23, "x": 0, "y": 0},
        {"z": 1, "x": -1, "y": 0},
        {"z": 1, "x": 0, "y": 0, "force": "yes"},
        {"z": 1, "x": 0, "y": 0, "tile_matrix_set": "WorldCRS84Quad"},
        {"z": "1", "x": 0, "y": 0},
        [1],
    ],
)
def test_schema_and_model_of_a_hint_agree(value: Any) -> None:
    assert jsonschema_rs.is_valid(json_schemas()[topics.TILES], value) == accepts(read_hint, json.dumps(value).encode())


def accepts(read: Any, *arguments: Any) -> bool:
    try:
        read(*arguments)
    except EnvelopeError:
        return False
    return True


def test_a_consumer_in_another_language_can_use_the_schemas(records: dict[str, list[Record]]) -> None:
    node = shutil.which("node") or shutil.which("node", path=str(Path(__file__).parents[2] / ".venv" / "bin"))
    if node is None:
        missing("no node")
    lines = [
        {"topic": topic, "value": (record.value or b"").decode()}
        for topic in (topics.TILES, topics.TILE_UPDATED, topics.DEAD_LETTERS, topics.POSITIONS, topics.FENCES)
        for record in records[topic]
        if record.value and record.value not in STRANGERS
    ]
    wrong = {"topic": topics.TILE_UPDATED, "value": '{"z": 1, "x": 0, "y": 0, "hash": "short", "revision": 0}'}
    consumer = str(Path(__file__).with_name("consumer.mjs"))
    for sent, answer in ((lines, {"good": len(lines), "bad": 0}), ([wrong], {"good": 0, "bad": 1})):
        done = subprocess.run(
            [node, consumer, str(DOCS / "schemas")],
            input="\n".join(json.dumps(line) for line in sent), capture_output=True, text=True, check=True,
            timeout=patient(60),
        )  # fmt: skip
        assert json.loads(done.stdout.splitlines()[-1]) == answer, done.stdout[:2_000]
