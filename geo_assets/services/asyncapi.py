"""The topics as an AsyncAPI 3.0 document, and their values as stand-alone JSON Schemas (draft 2020-12).

Both are made of the models that write and read the records. What a topic promises stands here in words, beside its
schema; what a member means stands in its model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from geo_assets import __version__
from geo_assets.events import topics
from geo_assets.events.dead_letter import REASONS, DeadLetter
from geo_assets.events.models import FeatureCollectionEvent, FeatureEvent, FenceEvent, PositionEvent
from geo_assets.events.records import MAX_PART_ID, TileHint, TileUpdated

if TYPE_CHECKING:
    from resources.event_log.protocol import TopicSpec

DRAFT = "https://json-schema.org/draft/2020-12/schema"
BINDING = "0.5.0"
"""Version of AsyncAPI's Kafka bindings."""

_DESCRIPTION = """The topics of a geo_assets installation: what may be written to them, and what can be read off them.

`send` and `receive` are said of geo_assets: it receives what you may write, and sends what you may read.

**Writing.** Plain JSON in UTF-8 is enough: no header is required, and a key only where it says so. A record that
cannot be taken becomes a record of `dead-letters`, with its bytes and the field that was wrong; none is dropped, and
none stops the others. Who may write is the broker's to say (ACLs): signatures are asked of HTTP senders alone.
Partition by murmur2 of the key (`partitioner=murmur2_random` in librdkafka), or keys land elsewhere than with other
clients.

**Reading.** Records come at least once: the same one may be read again, with the same content. Order holds within a
key. Members that are not described here may be added; ignore them.

Topic names carry the prefix of the installation (`GEO_ASSETS_KAFKA_TOPIC_PREFIX`), which is empty by default.
Partitions and retention are the defaults; `GEO_ASSETS_LOG_PARTITIONS` and `GEO_ASSETS_RETENTION_S` change them. With
three brokers a topic has three copies, of which two must have a record before it is acknowledged."""

_TILE_KEY: dict[str, Any] = {
    "type": "string",
    "pattern": "^([0-9]|1[0-9]|2[0-2]):[0-3]{0,22}$",
    "description": "`zoom:quadkey` of the tile, as many digits as its zoom says; zoom 0 is `0:`.",
    "examples": ["14:12020013321101"],
}

_HEADERS: dict[str, dict[str, Any]] = {
    topics.HEADER_EVENT_ID: {
        "minLength": 1,
        "maxLength": MAX_PART_ID,
        "description": "By which a repetition is known. Default: `event_id` of the body, else the hash of its bytes.",
    },
    topics.HEADER_SOURCE: {
        "maxLength": 64,
        "description": "A configured source. Default: `source` of the body, else the key before its colon if that is a "
        "source, else the only source there is.",
    },
    topics.HEADER_KIND: {
        "enum": ["features", "tiles", "positions", "fences", "triggers"],
        "description": "What the value is; `triggers` of dead letters alone.",
    },
    topics.HEADER_CONTENT_TYPE: {
        "description": "Media type of the value; it tells a sequence of a single feature from a document."
    },
    topics.HEADER_CRS: {
        "maxLength": 2_000,
        "description": "CRS of coordinates that declare none themselves, such as `EPSG:3067`.",
    },
    topics.HEADER_RECEIVED_MS: {
        "pattern": "^[0-9]{1,13}$",
        "description": "When it was received, milliseconds since the epoch, UTC. Default: the record's timestamp.",
    },
    topics.HEADER_STAGES: {
        "description": "When the edit passed the stages of its way so far: a JSON object, stage -> microseconds since "
        "the epoch, UTC. For watching alone.",
        "examples": ['{"received":1777636799000250,"stored":1777636799006100,"hinted":1777636799007900}'],
    },
    topics.HEADER_TRACEPARENT: {
        "description": "The trace that it belongs to (W3C Trace Context). What is none counts as absent.",
        "examples": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
    },
    topics.HEADER_TRACE_LINKS: {
        "description": "Of a hint of several edits: the `traceparent` of the others, comma separated.",
    },
    topics.HEADER_SHA256: {"pattern": "^[0-9a-f]{64}$", "description": "sha256 of the body, hex."},
    topics.HEADER_POINTER: {
        "pattern": "^inbox/[0-9a-f]{64}$",
        "description": "Name of the tile store's object that holds the body; the record's value is empty then.",
    },
    topics.HEADER_CALLBACK: {
        "description": "URL that is told the outcome; one of those in the source's definition, or nobody is told."
    },
    topics.HEADER_VERTEX_COUNT: {
        "pattern": "^[0-9]+$",
        "description": "Vertices of the edited feature: what a build of the tile may cost.",
    },
    topics.HEADER_REGION_PRIORITY: {
        "pattern": "^-?[0-9]+$",
        "description": "Priority of the region; 0 by default. Below 2 a position may be shed, where that is declared.",
    },
    topics.HEADER_REPLAY: {"description": "Id of the dead letter that this record replays."},
    topics.HEADER_REASON: {"enum": list(REASONS), "description": "Why the record is dead, as in its value."},
}

_LETTER: dict[str, str] = {
    "id": "Hex. The same record that dies of the same reason again has the same id.",
    "reason": "Why it is dead.",
    "stage": "Where it died.",
    "explanation": "In words; a library's own where there is one.",
    "source": "Whose it is; empty where nobody said.",
    "at_ms": "When it died, milliseconds since the epoch, UTC.",
    "field": "Path of the member at fault, such as `geometry`; `$` is the whole.",
    "value": "Its value, shortened.",
    "limit": "What it may be.",
    "event_id": "Id of the event, where it was known.",
    "feature_id": "JSON text of the feature's id, where it was known.",
    "layer": "Layer, where it was known.",
    "origin": "Where the record stands in the log; null for what never was a record.",
    "index": "Place of the feature in its collection, from 0.",
    "attempts": "How often it was tried.",
    "event_key": "Idempotency key, which the dead letter has released.",
    "payload": "The raw bytes, base64; of a collection the one feature. Empty where `pointer` names them.",
    "pointer": "Name of the tile store's object that holds the bytes; null where they are here.",
    "payload_sha256": "sha256 of the bytes, hex.",
    "headers": "The record's headers; long ones of others are shortened.",
}


@dataclass(frozen=True, slots=True)
class _Message:
    """One form that a topic's records take."""

    name: str
    title: str
    summary: str
    payload: str | Mapping[str, Any]
    """Name of the component, or a schema."""
    headers: Sequence[str] = ()
    examples: Sequence[Mapping[str, Any]] = ()
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class _Operation:
    """Who of geo_assets writes or reads a topic."""

    id: str
    action: Literal["send", "receive"]
    summary: str


@dataclass(frozen=True, slots=True)
class _Topic:
    """A topic in words; its schema is the model's."""

    name: str
    title: str
    description: str
    key: Mapping[str, Any]
    messages: Sequence[_Message]
    operations: Sequence[_Operation]


_EVENT_HEADERS = (
    topics.HEADER_EVENT_ID, topics.HEADER_SOURCE, topics.HEADER_KIND, topics.HEADER_RECEIVED_MS, topics.HEADER_CALLBACK,
)  # fmt: skip
_RAW_HEADERS = (
    *_EVENT_HEADERS, topics.HEADER_CONTENT_TYPE, topics.HEADER_CRS, topics.HEADER_SHA256, topics.HEADER_REPLAY,
    topics.HEADER_STAGES, topics.HEADER_TRACEPARENT,
)  # fmt: skip

_TOPICS = (
    _Topic(
        topics.RAW,
        "Edits as they came",
        "Features, each with the whole new state of one feature, or its deletion. Edits of one feature with one key "
        "are applied in order; their `version` decides in the end, whatever order they come in: lower than the stored "
        "one is stale, equal with the same content a duplicate, equal with other content a dead letter "
        "`version_conflict`. A record without a value is a dead letter (`null_value`): a feature is deleted by "
        "`action: delete`. Positions and tile events found here go on to their own topics.",
        {
            "type": ["string", "null"],
            "description": "`source:feature id`, or `source:event id` for a collection. Any other key only orders.",
            "examples": ["city:4711"],
        },
        (
            _Message(
                "features",
                "Feature or FeatureCollection",
                "Each feature of a collection is an event of its own: one at fault costs only itself.",
                "Features",
                _RAW_HEADERS,
            ),
            _Message(
                "featureSequence",
                "Features, one a line",
                "Newline-delimited, or a GeoJSON text sequence (RFC 8142).",
                {"type": "string", "description": "One Feature a line."},
                _RAW_HEADERS,
                content_type="application/geo+json-seq",
            ),
            _Message(
                "featuresInInbox",
                "Features too large for a record",
                "An empty value; header `pointer` names the body in the tile store, `sha256` proves it.",
                {"type": "string", "maxLength": 0},
                (*_RAW_HEADERS, topics.HEADER_POINTER),
            ),
        ),
        (
            _Operation("receiveFeatures", "receive", "Ingest validates, stores, and says which tiles are dirty."),
            _Operation("sendFeatures", "send", "The edge writes what it accepted over HTTP, byte for byte."),
        ),
    ),
    _Topic(
        topics.TILES,
        "Tiles to look at again",
        "Hints. A hint carries no order and no content: early, late or twice, the tile is looked at, and built anew "
        "only if its features changed or `force` says so. The key says it all, and the value may then be null; where "
        "the key names no tile, the value must. A key and a value that name two tiles are two hints. One that names "
        "none is a dead letter.",
        {**_TILE_KEY, "type": ["string", "null"]},
        (
            _Message(
                "tileHint",
                "Look at this tile",
                "A tile by `z` (or `zoom`), `x` and `y`; or null, and the key names it.",
                "TileHintOrNull",
                (*_EVENT_HEADERS, topics.HEADER_VERTEX_COUNT, topics.HEADER_REGION_PRIORITY, topics.HEADER_REPLAY,
                 topics.HEADER_STAGES, topics.HEADER_TRACEPARENT, topics.HEADER_TRACE_LINKS),
                [{"name": "by value", "payload": {"z": 14, "x": 9327, "y": 4741}}, {"name": "by key", "payload": None}],
            ),
        ),
        (
            _Operation("receiveTileHints", "receive", "The sensor tile_updates and the fast lane mark tiles dirty."),
            _Operation("sendTileHints", "send", "Ingest, for every tile of an edit's old and new geometry; the edge."),
        ),
    ),
    _Topic(
        topics.TILES_HOT,
        "Hot tiles to look at again",
        "Hints as on `tiles`, of tiles that are hinted at so often that they would hold up others. Ingest sends the "
        "hints of a tile here while it is hot, and to `tiles` again when it has cooled: who reads, reads both, in any "
        "order. Write to `tiles`.",
        {**_TILE_KEY, "type": ["string", "null"]},
        (
            _Message(
                "hotTileHint",
                "Look at this hot tile",
                "As on `tiles`.",
                "TileHintOrNull",
                (
                    *_EVENT_HEADERS, topics.HEADER_VERTEX_COUNT, topics.HEADER_REGION_PRIORITY, topics.HEADER_STAGES,
                    topics.HEADER_REPLAY, topics.HEADER_TRACEPARENT, topics.HEADER_TRACE_LINKS,
                ),
            ),
        ),
        (
            _Operation("receiveHotTileHints", "receive", "The sensor tile_updates and the fast lane mark tiles dirty."),
            _Operation("sendHotTileHints", "send", "Ingest, while it sends many hints of one tile."),
        ),
    ),
    _Topic(
        topics.TILE_UPDATED,
        "Tiles that changed",
        "One record a commit, written when the bytes can be fetched. `revision` is what a consumer compares: keep the "
        "highest one a tile, and ignore a record that is not above it. Announcements may come twice and, between two "
        "writers, out of order. A hash of null says that the tile is empty now. The value is never null.",
        _TILE_KEY,
        (
            _Message(
                "tileUpdated",
                "A tile has a new revision",
                "Fetch it again.",
                "TileUpdated",
                (topics.HEADER_TRACEPARENT,),
            ),
        ),
        (
            _Operation("sendTileUpdates", "send", "Whoever committed a tile; a sweep pays what a dead process left."),
            _Operation("receiveTileUpdates", "receive", "The tile server tells map clients (server-sent events)."),
        ),
    ),
    _Topic(
        topics.DEAD_LETTERS,
        "Records that cannot be processed",
        "With their bytes, the reason and where they came from; kept four times as long as other topics. The same "
        "death written twice has the same `id`. A record without a value whose header `replay` names an id says that "
        "the dead letter was replayed. Positions are personal data: their dead letters hold them (header `kind` is "
        "`positions`).",
        {"type": "string", "description": "The source; where there is none, the dead letter's id."},
        (
            _Message(
                "deadLetter",
                "A record that cannot be processed",
                "Look at it with `geo-assets dead-letters show`, replay it after a fix.",
                "DeadLetterOrNull",
                (topics.HEADER_KIND, topics.HEADER_REASON, topics.HEADER_REPLAY),
            ),
        ),
        (
            _Operation("sendDeadLetters", "send", "Ingest, the sensor and the builders."),
            _Operation("receiveDeadLetters", "receive", "The command line lists and replays; a check counts them."),
        ),
    ),
    _Topic(
        topics.POSITIONS,
        "Where devices are",
        "One position a record. Key it by `device_id`: order holds within a key. A position is personal data: give "
        "read access to whom it concerns. The routing run reads it, and so does the map page where it shows devices.",
        {
            "type": ["string", "null"],
            "maxLength": 128,
            "description": "The device id, as in the value.",
            "examples": ["bus-18"],
        },
        (
            _Message(
                "position",
                "A device was here",
                "The time says unit and zone, in exactly one of `time`, `time_ms` and `time_s`.",
                "Position",
                (*_EVENT_HEADERS, topics.HEADER_REGION_PRIORITY),
            ),
        ),
        (_Operation("sendPositions", "send", "The edge, what it accepted over HTTP; ingest, what stood in `raw`."),),
    ),
    _Topic(
        topics.FENCES,
        "Geofences",
        "One fence a record, with its whole new state, or its deletion; the routing run follows them. A fence is known "
        "by its source and its id: those of two sources are two fences.",
        {
            "type": ["string", "null"],
            "description": "`source:feature id`, the id as JSON text with its type; what triggers name the fence by.",
            "examples": ['demo:"depot"'],
        },
        (_Message("fence", "A fence", "An area, or a point or line with `radius_m` around it.", "Fence",
                  (*_EVENT_HEADERS, topics.HEADER_CRS)),),
        (
            _Operation("sendFences", "send", "The edge, what it accepted over HTTP; ingest and imports, of each "
                       "feature of a layer that holds fences."),
        ),
    ),
    _Topic(
        topics.TRIGGERS,
        "Geofence triggers",
        "ENTER, DWELL and EXIT of devices, in order per device, at least once: docs/triggers.md tells how to see each "
        "once in effect. A record without a key is a mark: the run of its epoch has taken the partition over, and what "
        "is below the highest epoch seen in a partition is void. Who is in which fence is personal data: give read "
        "access to whom it concerns.",
        {
            "type": ["string", "null"],
            "description": "The device id, as in the frame; null of a mark.",
            "examples": ["bus-18"],
        },
        (
            _Message(
                "trigger",
                "A device entered, stayed in or left a fence",
                "The byte 0x01 and a MessagePack array of eleven members.",
                {"type": "string", "format": "binary", "description": "docs/triggers.md describes the members."},
                content_type="application/vnd.msgpack",
            ),
            _Message(
                "epochMark",
                "A routing run took over",
                "The byte 0x00 and a MessagePack array whose first member is the epoch.",
                {"type": "string", "format": "binary", "description": "docs/triggers.md describes the members."},
                content_type="application/vnd.msgpack",
            ),
        ),
        (_Operation("sendTriggers", "send", "The router, of what the routing run's tracker told."),),
    ),
)  # fmt: skip

VALUES: dict[str, str] = {
    topics.RAW: "Features",
    topics.TILES: "TileHint",
    topics.TILES_HOT: "TileHint",
    topics.TILE_UPDATED: "TileUpdated",
    topics.DEAD_LETTERS: "DeadLetter",
    topics.POSITIONS: "Position",
    topics.FENCES: "Fence",
}
"""Component by topic: what a value of it is when it is JSON. `triggers` holds frames of bytes."""


def asyncapi_document(specs: Iterable[TopicSpec]) -> dict[str, Any]:
    """The AsyncAPI 3.0 document.

    Args:
        specs: Every topic as it is declared.

    Returns:
        The document as plain JSON values.

    Raises:
        LookupError: A declared topic has no description here, or the reverse.
    """
    declared = {spec.name: spec for spec in specs}
    described = {topic.name for topic in _TOPICS}
    if described != declared.keys():
        raise LookupError(f"topics declared and described differ: {sorted(described ^ declared.keys())}")
    messages: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for topic in _TOPICS:
        for message in topic.messages:
            messages[message.name] = _message(topic, message)
        for operation in topic.operations:
            channel = f"#/channels/{topic.name}"
            operations[operation.id] = {
                "action": operation.action,
                "summary": operation.summary,
                "channel": {"$ref": channel},
                "messages": [{"$ref": f"{channel}/messages/{message.name}"} for message in topic.messages],
            }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "geo_assets topics",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "kafka": {
                "host": "{bootstrap}",
                "protocol": "kafka",
                "description": "The brokers of GEO_ASSETS_KAFKA_SERVERS.",
                "variables": {"bootstrap": {"default": "localhost:9092", "description": "host:port"}},
            }
        },
        "channels": {topic.name: _channel(topic, declared[topic.name]) for topic in _TOPICS},
        "operations": operations,
        "components": {
            "messages": messages,
            "schemas": {name: _draft_07(schema) for name, schema in _components().items()},
        },
    }


def asyncapi_yaml(specs: Iterable[TopicSpec]) -> str:
    """The same as YAML text."""
    text = yaml.dump(
        asyncapi_document(specs),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=False,
    )
    return f"# Written by `geo-assets schemas asyncapi docs`; do not edit.\n{text}"


def json_schemas() -> dict[str, dict[str, Any]]:
    """By topic, the JSON Schema (draft 2020-12) of a value, complete in itself.

    A record of `tiles` or `dead-letters` may have no value at all, which is no JSON and so in no schema.
    """
    components = _components()
    made: dict[str, dict[str, Any]] = {}
    for topic, name in VALUES.items():
        needed: dict[str, Any] = {}
        _collect(components[name], components, needed)
        schema = _with_refs(components[name], "#/$defs/")
        made[topic] = {"$schema": DRAFT, "$id": f"urn:geo-assets:topic:{topic}", **schema}
        if needed:
            made[topic]["$defs"] = {one: _with_refs(needed[one], "#/$defs/") for one in sorted(needed)}
    return made


def json_text(document: Mapping[str, Any]) -> str:
    """JSON for a file."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def headers_schema(names: Iterable[str]) -> dict[str, Any]:
    """The schema of a record's headers: any of these may be absent, others may be there."""
    return {"type": "object", "properties": {name: {"type": "string", **_HEADERS[name]} for name in names}}


def headers_of(topic: str) -> dict[str, Any]:
    """The schema of all headers that records of a topic may carry."""
    (found,) = (one for one in _TOPICS if one.name == topic)
    return headers_schema(dict.fromkeys(name for message in found.messages for name in message.headers))


def key_schema(topic: str) -> dict[str, Any]:
    """The schema of a topic's keys."""
    (found,) = (one for one in _TOPICS if one.name == topic)
    return dict(found.key)


# -- the parts of the document -------------------------------------------------------------------------------------
def _channel(topic: _Topic, spec: TopicSpec) -> dict[str, Any]:
    return {
        "address": topic.name,
        "title": topic.title,
        "description": topic.description,
        "messages": {one.name: {"$ref": f"#/components/messages/{one.name}"} for one in topic.messages},
        "bindings": {
            "kafka": {
                "topic": topic.name,
                "partitions": spec.partitions,
                "topicConfiguration": {"cleanup.policy": ["delete"], "retention.ms": spec.retention_ms},
                "bindingVersion": BINDING,
            }
        },
        "x-max-record-bytes": spec.max_record_bytes,
    }


def _message(topic: _Topic, message: _Message) -> dict[str, Any]:
    payload = message.payload
    made: dict[str, Any] = {
        "name": message.name,
        "title": message.title,
        "summary": message.summary,
        "contentType": message.content_type,
        "payload": {"$ref": _ref(payload)} if isinstance(payload, str) else dict(payload),
        "bindings": {"kafka": {"key": dict(topic.key), "bindingVersion": BINDING}},
    }
    if message.headers:
        made["headers"] = headers_schema(message.headers)
    if message.examples:
        made["examples"] = [dict(example) for example in message.examples]
    return made


# -- schemas -------------------------------------------------------------------------------------------------------
_PREFIX = "#/components/schemas/"
_NAMES = {
    FeatureEvent: "Feature",
    FeatureCollectionEvent: "FeatureCollection",
    PositionEvent: "Position",
    FenceEvent: "Fence",
    TileHint: "TileHint",
    TileUpdated: "TileUpdated",
}


def _ref(name: str) -> str:
    return f"{_PREFIX}{name}"


def _components() -> dict[str, dict[str, Any]]:
    """Every schema by its name, referring to each other as components."""
    _, made = models_json_schema([(model, "validation") for model in _NAMES], ref_template=_PREFIX + "{model}")
    names = {_ref(model.__name__): _ref(name) for model, name in _NAMES.items()}
    schemas = {name: _tidy(made["$defs"][model.__name__], names) for model, name in _NAMES.items()}
    # Of the three ways to say the time one is needed, and only one; a validator of the model's says so.
    schemas["Position"]["oneOf"] = [
        {
            "required": [name],
            "properties": {one: {"type": kind if one == name else "null"} for one, kind in _TIMES.items()},
        }
        for name in _TIMES
    ]
    schemas["Position"]["properties"]["event_time_ms"] = {
        "type": "integer",
        "description": "The same time in milliseconds since the epoch, UTC; the edge adds it, nobody else needs to.",
    }
    return {
        "Features": {
            "title": "Features",
            "description": "A Feature, or a FeatureCollection of them.",
            "oneOf": [{"$ref": _ref("Feature")}, {"$ref": _ref("FeatureCollection")}],
        },
        "TileHintOrNull": {"oneOf": [{"$ref": _ref("TileHint")}, {"type": "null"}]},
        "DeadLetterOrNull": {"oneOf": [{"$ref": _ref("DeadLetter")}, {"type": "null"}]},
        "DeadLetter": _dead_letter(),
        **schemas,
    }


_TIMES = {"time": "string", "time_ms": "integer", "time_s": "number"}


def _dead_letter() -> dict[str, Any]:
    """The schema of `DeadLetter.to_json`: every field under its name, always there."""
    schema = _tidy(TypeAdapter(DeadLetter).json_schema(mode="serialization", ref_template="{model}"), {})
    origin = schema.pop("$defs")["Origin"]
    properties: dict[str, Any] = schema["properties"]
    properties["origin"] = {"anyOf": [_tidy(origin, {}), {"type": "null"}]}
    properties["payload"] = {"type": "string", "contentEncoding": "base64"}
    if properties.keys() != _LETTER.keys():
        raise LookupError(f"dead letter: fields and descriptions differ: {sorted(properties.keys() ^ _LETTER.keys())}")
    for name, text in _LETTER.items():
        properties[name].pop("default", None)
        properties[name] = {"description": text, **properties[name]}
    schema["title"] = "DeadLetter"
    schema["description"] = "A record that cannot be processed."
    schema["required"] = list(properties)
    return schema


def _tidy(schema: Any, names: Mapping[str, str], inside_properties: bool = False) -> Any:
    """Refer by our names; titles that only repeat a member's name go."""
    if isinstance(schema, list):
        return [_tidy(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "properties" and not inside_properties:
            made[name] = {
                member: {k: v for k, v in _tidy(one, names).items() if k != "title"} for member, one in value.items()
            }
        elif name == "$ref":
            made[name] = names.get(value, value)
        elif name in ("examples", "default", "const", "enum"):
            made[name] = value
        else:
            made[name] = _tidy(value, names)
    return made


def _with_refs(schema: Any, prefix: str) -> Any:
    """The schema with references below another prefix."""
    if isinstance(schema, list):
        return [_with_refs(one, prefix) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.replace(_PREFIX, prefix) if name == "$ref" else _with_refs(value, prefix)
        for name, value in schema.items()
    }


def _collect(schema: Any, components: Mapping[str, Any], into: dict[str, Any]) -> None:
    """Every component that a schema refers to, also by way of others."""
    if isinstance(schema, list):
        for one in schema:
            _collect(one, components, into)
    elif isinstance(schema, dict):
        target = schema.get("$ref")
        if isinstance(target, str):
            name = target.removeprefix(_PREFIX)
            if name not in into:
                into[name] = components[name]
                _collect(components[name], components, into)
        for value in schema.values():
            _collect(value, components, into)


def _draft_07(schema: Any) -> Any:
    """The schema as AsyncAPI 3.0 reads it by default: a superset of draft 07, which has no `prefixItems`."""
    if isinstance(schema, list):
        return [_draft_07(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _draft_07(value) for name, value in copy.copy(schema).items()}
    if isinstance(made.get("prefixItems"), list):
        made["items"] = made.pop("prefixItems")
    return made


class _Dumper(yaml.SafeDumper):
    """YAML that reads well: texts of several lines as blocks, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never anchors: two equal parts are written twice."""
        return True


def _text(dumper: _Dumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
