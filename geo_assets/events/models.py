"""Every event that may come in, as models: OpenAPI is generated from them, edge and ingest both read through them.

Also `read_envelope`, which is all of a body that the edge needs to know. No geometry is parsed here, and the module
loads without a geometry library.

Where the members of a feature event stand: `event_id`, `version`, `action`, `layer` and `source` are top-level
("foreign", RFC 7946 section 6.1) members of the Feature. A member that a Feature does not have is taken from the
FeatureCollection around it. `version`, `action` and `layer` are then looked for in its properties, for tools that can
write nothing else; a property counts only where it is a value the member could have (a `layer` must be a layer of the
map: OpenStreetMap's `layer=-1` stays an attribute). `source` is never read from properties: the signature says it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from mmap import mmap
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from geo_assets.events.json_text import BOM, JsonError, canonical, check_encoding, loads, shorten
from geo_assets.tiles.tile import MAX_ZOOM, Box, Tile

MAX_VERSION = 2**63 - 1
"""Largest version: a signed 64-bit integer, as every store has one."""

MAX_ID_CHARACTERS = 256
"""Characters of an event id or of a feature id's JSON text: they become keys and headers of records."""

MAX_BATCH = 10_000
"""Tile events, positions or fences in one body; more belongs in several."""

STRICT_BYTES = 1_000_000
"""Feature bodies up to here are read strictly at the edge. A larger one is skimmed (no objects made of its features):
a member that stands twice in it is found at ingest."""

SEQUENCE_TYPES = frozenset(
    {
        "application/geo+json-seq",
        "application/json-seq",
        "application/x-ndjson",
        "application/ndjson",
        "application/jsonl",
    }
)
"""Content types of a sequence: RFC 8142 and what newline-delimited JSON is called."""

RECORD_SEPARATOR = b"\x1e"
"""What begins a record of a GeoJSON text sequence (RFC 8142, section 2)."""

Body = bytes | bytearray | memoryview | mmap
E = TypeVar("E", bound="Event")
Kind = Literal["features", "tiles", "positions", "fences"]
Action = Literal["create", "update", "delete"]

FENCE_MEMBERS = ("radius_m", "width_m", "dwell_s", "hysteresis_m", "priority", "schedule", "name")
"""What a fence says beside its ground: members of its Feature, or of the Feature's properties."""

# What pydantic puts into a path for the member of a union that it tried.
_UNION_TAG = re.compile(r"str|int|float|constrained-str|dict\[.*|function-.*")

# Times of devices outside these are a wrong unit or a clock that was never set, not a position of interest.
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
_LATEST = datetime(2100, 1, 1, tzinfo=UTC)


class EnvelopeError(ValueError):
    """A body whose envelope is at fault: the field, the problem, and value and limit where there are some."""

    def __init__(self, field: str, problem: str, value: str | None = None, limit: str | None = None) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem, self.value, self.limit = field, problem, value, limit


def _fault(field: str, problem: str, limit: str | None = None, value: object = None) -> PydanticCustomError:
    """A fault that names its field itself (empty: the field being validated), for checks that look at several."""
    # Braces are placeholders to pydantic.
    return PydanticCustomError(
        "event", cast(Any, problem.replace("{", "(").replace("}", ")")), {"at": field, "limit": limit, "value": value}
    )


def envelope_error(error: ValidationError, prefix: str = "") -> EnvelopeError:
    """The first fault of a validation, with its field as a path (`bbox[2]`), its value and its limit.

    Args:
        error: What pydantic raised.
        prefix: Path of the object within the body, such as `[3]`.
    """
    first = error.errors(include_url=False)[0]
    context: Mapping[str, Any] = first.get("ctx", {})
    field = prefix
    for part in first["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif not _UNION_TAG.fullmatch(part):
            field += f".{part}" if field else part
    if context.get("at"):
        field = f"{field}.{context['at']}" if field else str(context["at"])
    bounds = [
        f"{sign} {context[name]}"
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("max_length", "length <="))
        if name in context
    ]
    limit = context.get("limit") or ", ".join(bounds) or context.get("expected") or None
    whole: Any = first["input"]
    if context.get("value") is not None:
        value = shorten(context["value"])
    else:
        value = None if isinstance(whole, dict) or first["type"] == "missing" else shorten(whole)
    return EnvelopeError(field or "$", first["msg"], value, limit)


class Event(BaseModel):
    """What every event has in common: unknown fields pass, types are not converted, values do not change."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


def _text(limit: int) -> StringConstraints:
    return StringConstraints(strict=True, min_length=1, max_length=limit, pattern=r"^[^\x00-\x1f\x7f]+$")


EventId = Annotated[
    str,
    _text(MAX_ID_CHARACTERS),
    Field(description="Unique to the event, the same on every try. Default: `webhook-id`, else the hash of the body."),
]
LayerName = Annotated[str, _text(64), Field(description="Layer of the map. Default: the source's.")]
SourceName = Annotated[str, _text(64), Field(description="Must be the source that signed, where it is given at all.")]
Version = Annotated[
    int,
    Field(
        strict=True,
        ge=0,
        le=MAX_VERSION,
        description="Monotonic number of the feature upstream. A lower one than the stored is stale; the same with "
        "other content is a conflict. Default: time of receipt in milliseconds since the epoch (do not mix the two).",
    ),
]


def _id(value: object) -> object:
    feature_id_text(value)
    return value


def _is_geometry(value: object) -> object:
    if value is not None and not isinstance(value, dict | str):
        raise _fault("", "is neither an object, a text of WKT or WKB, nor null", "object, text or null")
    return cast(object, value)


Geometry = Annotated[
    dict[str, Any] | str | None,
    BeforeValidator(_is_geometry),
    Field(
        description="GeoJSON geometry, WKT, or WKB in hexadecimal; null stores the feature without one. "
        "Only a delete may leave it out."
    ),
]
FeatureId = Annotated[
    str | int | float | None,
    BeforeValidator(_id),
    Field(
        description='Identity within the source, with its JSON type: 123 and "123" are two features, 123 and 123.0 are '
        "one. Default: the hash of the feature's bytes."
    ),
]


def feature_id_text(value: object) -> str | None:
    """The JSON text by which a feature is known: `123`, `"123"`; the same number always gives the same text.

    Args:
        value: The `id` member.

    Returns:
        The text, or None where there is no id (absent or null).

    Raises:
        ValueError: `true`, `false`, an object, an array, an empty or too long text, a control character, a number
            that is not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _fault("", f"id {shorten(value)} is neither a text nor a number", "text or number")
    if isinstance(value, str):
        if not value or any(ord(c) < 32 or ord(c) == 127 for c in value):
            raise _fault("", "an id that is a text is not empty and has no control characters")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise _fault("", "an id that is a number is finite")
        # 123.0 and 123 are one JSON number, and one tool writes the one where another writes the other.
        if value.is_integer() and abs(value) < 2**53:
            value = int(value)
    text = canonical(value)
    if len(text) > MAX_ID_CHARACTERS:
        raise _fault(
            "", f"an id has at most {MAX_ID_CHARACTERS} characters, this one {len(text)}", f"{MAX_ID_CHARACTERS}"
        )
    return text


class _Versioned(Event):
    event_id: EventId | None = None
    version: Version | None = None
    action: Action | None = Field(
        default=None, description="`create` and `update` both store the whole new state. Default: `update`."
    )
    layer: LayerName | None = None
    source: SourceName | None = None


class FeatureEvent(_Versioned):
    """A GeoJSON Feature that is created, updated (its whole new state) or deleted."""

    model_config = ConfigDict(
        title="Feature",
        json_schema_extra={
            "examples": [
                {
                    "type": "Feature",
                    "id": 4711,
                    "version": 3,
                    "action": "update",
                    "layer": "buildings",
                    "geometry": {"type": "Point", "coordinates": [24.9384, 60.1699]},
                    "properties": {"name": "Kiosk", "levels": 1},
                }
            ]
        },
    )

    type: Literal["Feature"]
    id: FeatureId = None
    geometry: Geometry = None
    properties: dict[str, Any] | None = Field(
        default=None, description="Attributes; `source_epsg` in them declares the CRS."
    )
    crs: Any = Field(default=None, description="Named CRS (GeoJSON 2008), such as `urn:ogc:def:crs:EPSG::3067`.")

    @model_validator(mode="after")
    def _geometry_is_said(self) -> Self:
        if "geometry" not in self.model_fields_set and self.action != "delete":
            properties = self.properties or {}
            if properties.get("action") != "delete":
                raise _fault("geometry", "missing; null stores the feature without one")
        return self


class FeatureCollectionEvent(_Versioned):
    """A GeoJSON FeatureCollection: each feature is an event of its own; members here are defaults for them."""

    model_config = ConfigDict(title="FeatureCollection")

    type: Literal["FeatureCollection"]
    features: list[FeatureEvent] = Field(description="Read as a stream: memory does not grow with their number.")
    crs: Any = Field(default=None, description="Named CRS (GeoJSON 2008); it may stand behind the features.")


def _numbers(value: object) -> object:
    """A box as a tuple, so that pydantic's strictness takes a JSON array for it."""
    return tuple(cast(list[object], value)) if isinstance(value, list) else value


class TileEvent(Event):
    """Look at this tile again; with `force`, rebuild it even where nothing changed."""

    model_config = ConfigDict(
        title="TileEvent", json_schema_extra={"examples": [{"zoom": 14, "x": 9327, "y": 4741, "event_id": "look-1"}]}
    )

    event_id: EventId | None = None
    zoom: int = Field(ge=0, le=MAX_ZOOM)
    x: int = Field(ge=0, description="Column from the west.")
    y: int = Field(ge=0, description="Row from the north (XYZ, not TMS).")
    bbox: Annotated[tuple[float, float, float, float], BeforeValidator(_numbers)] | None = Field(
        default=None,
        description="West, south, east, north in `crs`, min below max. One that disagrees is only counted.",
    )
    crs: Annotated[str, _text(128)] = "EPSG:4326"
    tile_matrix_set: Literal["WebMercatorQuad"] = "WebMercatorQuad"
    version: Version | None = Field(default=None, description="For the reader's eyes: a hint carries no order.")
    source: SourceName | None = None
    force: bool = False

    @model_validator(mode="after")
    def _tile_exists(self) -> Self:
        last = (1 << self.zoom) - 1
        for name, value in (("x", self.x), ("y", self.y)):
            if value > last:
                raise _fault(name, f"{value} is outside 0..{last} at zoom {self.zoom}", f"<= {last}", value)
        if self.bbox is not None:
            west, south, east, north = self.bbox
            for low, high, axis in ((west, east, "x"), (south, north, "y")):
                if not low < high:
                    raise _fault(
                        "bbox",
                        f"min {axis} {low} is not below max {axis} {high}",
                        "min < max",
                        [west, south, east, north],
                    )
        return self

    @property
    def tile(self) -> Tile:
        """The tile it names."""
        return Tile(self.zoom, self.x, self.y)

    def bbox_agrees(self) -> bool | None:
        """Whether the box is the tile's, to a thousandth of its side; None where that cannot be said.

        A box in EPSG:4326, OGC:CRS84 (both lon/lat here) or EPSG:3857 is compared.
        """
        if self.bbox is None:
            return None
        crs = self.crs.upper()
        if crs in ("EPSG:4326", "OGC:CRS84", "CRS84"):
            box: Box = self.tile.bounds
        elif crs in ("EPSG:3857", "EPSG:900913"):
            box = self.tile.bounds_3857
        else:
            return None
        side = (box.east - box.west) / 1000
        return all(abs(a - b) <= side for a, b in zip(self.bbox, box, strict=True))


_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)?", re.ASCII)


def _time(value: object) -> object:
    if value is None:
        return value
    if not isinstance(value, str):
        raise _fault("", "a number says no unit: send `time_ms` or `time_s` (since 1970-01-01T00:00:00Z), or RFC 3339")
    match = _RFC3339.fullmatch(value)
    if match is None:
        raise _fault("", f"{shorten(value, 40)!r} is not RFC 3339, such as 2026-05-01T12:00:00.250Z")
    if match[4] is None:
        raise _fault("", f"{value!r} says no zone: end it with Z or an offset such as +02:00")
    return value


class PositionEvent(Event):
    """Where a device was, and when. The time says its unit and zone, in exactly one of three fields."""

    model_config = ConfigDict(
        title="Position",
        json_schema_extra={
            "examples": [{"device_id": "bus-18", "lon": 24.9384, "lat": 60.1699, "time": "2026-05-01T12:00:00.250Z"}]
        },
    )

    device_id: Annotated[str, _text(128)]
    lon: float = Field(ge=-180, le=180, description="Degrees, WGS 84.")
    lat: float = Field(ge=-90, le=90, description="Degrees, WGS 84.")
    time: Annotated[str, BeforeValidator(_time)] | None = Field(
        default=None, description="RFC 3339 with Z or an offset."
    )
    time_ms: int | None = Field(default=None, description="Milliseconds since 1970-01-01T00:00:00Z.")
    time_s: float | None = Field(default=None, description="Seconds since 1970-01-01T00:00:00Z.")
    accuracy_m: float | None = Field(default=None, ge=0, le=1_000_000, description="Radius in metres, 68 %.")
    altitude_m: float | None = Field(default=None, ge=-12_000, le=1_000_000)
    speed_mps: float | None = Field(default=None, ge=0, le=10_000)
    heading_deg: float | None = Field(default=None, ge=0, le=360, description="Clockwise from north.")
    event_id: EventId | None = None
    source: SourceName | None = None

    @model_validator(mode="after")
    def _time_is_said_once(self) -> Self:
        given = [name for name in ("time", "time_ms", "time_s") if getattr(self, name) is not None]
        if len(given) != 1:
            problem = f"given in {' and '.join(given)}" if given else "missing"
            raise _fault("time", f"{problem}; one of time (RFC 3339), time_ms and time_s is needed")
        low, high = _EARLIEST.timestamp() * 1000, _LATEST.timestamp() * 1000
        if not low <= self.event_time_ms < high:
            raise _fault(
                given[0],
                f"{shorten(getattr(self, given[0]), 40)} is not between {_EARLIEST:%Y} and {_LATEST:%Y}: "
                "a wrong unit, or a clock that was never set",
                f"{_EARLIEST:%Y-%m-%d}..{_LATEST:%Y-%m-%d}",
                getattr(self, given[0]),
            )
        return self

    @property
    def event_time_ms(self) -> int:
        """Milliseconds since the epoch, UTC, rounded down."""
        if self.time_ms is not None:
            return self.time_ms
        if self.time_s is not None:
            return int(self.time_s * 1000 // 1)
        match = _RFC3339.fullmatch(self.time or "")
        if match is None or match[4] is None:
            return 0
        zone = "+00:00" if match[4] in "Zz" else match[4]
        try:
            moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}")
        except ValueError as fault:
            raise _fault("time", f"{self.time!r} is no date or time of day: {fault}") from None
        return int(moment.timestamp()) * 1000 + int((match[3] or "0").ljust(3, "0")[:3])


class FenceEvent(_Versioned):
    """A geofence: a Feature with an area, a point with `radius_m`, or a line with `radius_m` or `width_m` (geodesic).

    Its members from `radius_m` on may stand in `properties` too, for tools that can write nothing else.
    """

    model_config = ConfigDict(
        title="Fence",
        json_schema_extra={
            "examples": [
                {
                    "type": "Feature",
                    "id": "depot",
                    "version": 1,
                    "radius_m": 150,
                    "dwell_s": 60,
                    "geometry": {"type": "Point", "coordinates": [24.9384, 60.1699]},
                    "properties": {"name": "Depot"},
                }
            ]
        },
    )

    type: Literal["Feature"]
    id: FeatureId
    geometry: Geometry = None
    properties: dict[str, Any] | None = None
    radius_m: float | None = Field(default=None, gt=0, le=1_000_000, description="Metres around a point or line.")
    width_m: float | None = Field(default=None, gt=0, le=2_000_000, description="Metres across, around a line.")
    dwell_s: float | None = Field(default=None, gt=0, le=30 * 86400, description="Seconds inside until DWELL.")
    hysteresis_m: float | None = Field(
        default=None, ge=0, le=10_000, description="Metres beyond the border until EXIT. Default: 0."
    )
    priority: int | None = Field(default=None, ge=0, le=9, description="Higher is more urgent. Default: 0.")
    schedule: dict[str, Any] | None = Field(
        default=None,
        description="When it is in force, by event time: `zone` (IANA) and `windows`, each `DAYS HH:MM-HH:MM`, such as "
        "`Mo-Fr 08:00-17:30`. Default: always.",
    )
    name: Annotated[str, _text(128)] | None = Field(default=None, description="For people to read.")
    crs: Any = None

    @field_validator("id")
    @classmethod
    def _id_is_said(cls, value: str | int | float | None) -> str | int | float:
        if value is None:
            raise _fault("", "a fence needs an id: its triggers name it")
        return value

    @model_validator(mode="after")
    def _geometry_is_said(self) -> Self:
        if self.geometry is None and self.action != "delete":
            raise _fault("geometry", "missing; only a delete may leave it out")
        return self


class Accepted(BaseModel):
    """The answer 202: the event is in the log, or was before."""

    status: Literal["queued", "duplicate"]
    event_id: str = Field(
        description="By which its outcome can be found: the event's, the webhook's, or the body's hash."
    )
    received_ms: int | None = Field(default=None, description="Receive stamp, milliseconds since the epoch, UTC.")


class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int = Field(ge=400, le=599)
    detail: str | None = None
    instance: str | None = None
    field: str | None = Field(default=None, description="Path of the member at fault, such as `bbox[2]`.")
    value: str | None = Field(default=None, description="Its value, shortened.")
    limit: str | None = Field(default=None, description="What it may be.")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the edge knows of a body: enough for its key, its duplicates and its permissions, nothing of a geometry."""

    kind: Kind
    is_collection: bool
    """A FeatureCollection, a sequence of features, or an array of events."""
    event_id: str | None = None
    feature_id: str | None = None
    """Of a single event: JSON text of the id (of a feature or fence), partition key (of a tile), or device id."""
    layer: str | None = None
    source: str | None = None
    """What the body says of its source; the signature knows better."""


class _Skim(msgspec.Struct):
    """The members of a large body that are looked at, as bytes; the rest is checked as JSON and passed over."""

    type: msgspec.Raw = msgspec.Raw(b"null")
    id: msgspec.Raw = msgspec.Raw(b"null")
    event_id: msgspec.Raw = msgspec.Raw(b"null")
    version: msgspec.Raw = msgspec.Raw(b"null")
    action: msgspec.Raw = msgspec.Raw(b"null")
    layer: msgspec.Raw = msgspec.Raw(b"null")
    source: msgspec.Raw = msgspec.Raw(b"null")
    features: msgspec.Raw = msgspec.Raw(b"null")


class CollectionMembers(_Versioned):
    """A FeatureCollection's own members: its features are each judged alone, at ingest."""

    type: Literal["FeatureCollection"]


_SINGLE: dict[str, type[TileEvent] | type[PositionEvent] | type[FenceEvent]] = {
    "tiles": TileEvent,
    "positions": PositionEvent,
    "fences": FenceEvent,
}
_KINDS = frozenset({"features", *_SINGLE})


def is_sequence_type(content_type: str | None) -> bool:
    """Whether a content type (parameters and case aside) is one of a sequence of features."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() in SEQUENCE_TYPES


def begins_as_sequence(body: bytes, limit: int = STRICT_BYTES) -> bool:
    """Whether a body is a sequence by its beginning: a record separator, or a JSON object a line and a second line.

    Args:
        body: The body or its first bytes.
        limit: Bytes in which the first line must end; a longer one is taken for a document.
    """
    head = body[: limit + 1].lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(RECORD_SEPARATOR):
        return True
    line, _, rest = head.partition(b"\n")
    if not line.startswith(b"{") or not line.rstrip().endswith(b"}") or not rest.strip():
        return False
    try:
        loads(line)
    except JsonError:
        return False
    return True


def read_envelope(body: Body, kind: str, content_type: str | None = None) -> Envelope:
    """What the edge needs to know of a body, without parsing a geometry.

    A body of features up to 1 MB is read strictly; a larger one is skimmed at several hundred MB/s without making
    objects of its features (an `mmap` will do for one that stands in a file). Tile, position and fence events are read
    whole, as `read_events` does.

    Args:
        body: The body, decompressed.
        kind: `features`, `tiles`, `positions` or `fences`.
        content_type: What the request said; it tells a sequence of features where the body's beginning does not.

    Raises:
        EnvelopeError: The body is no JSON, or a member of the envelope is at fault.
    """
    if kind not in _KINDS:
        raise EnvelopeError("kind", f"{shorten(kind)!r} is none of {', '.join(sorted(_KINDS))}")
    if kind != "features":
        return _envelope_of(kind, body)
    head = bytes(body[: STRICT_BYTES + 1])
    if not head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise EnvelopeError("$", "the body is empty")
    if is_sequence_type(content_type) or begins_as_sequence(head):
        return Envelope("features", True)
    members = _strict(head) if len(head) <= STRICT_BYTES else _skim(body)
    form = members.get("type")
    if form not in ("Feature", "FeatureCollection"):
        raise EnvelopeError(
            "type", "is neither Feature nor FeatureCollection", shorten(form), "Feature, FeatureCollection"
        )
    if form == "Feature":
        feature = parse(FeatureEvent, members)
        return Envelope("features", False, feature.event_id, feature_id_text(feature.id), feature.layer, feature.source)
    if not members.pop("features is an array"):
        raise EnvelopeError("features", "is missing or no array")
    whole = parse(CollectionMembers, members)
    return Envelope("features", True, whole.event_id, None, whole.layer, whole.source)


def _strict(body: bytes) -> dict[str, Any]:
    value = _loads(body)
    if not isinstance(value, dict):
        raise EnvelopeError("$", "the body is no JSON object")
    members = cast(dict[str, Any], value)
    if members.get("type") == "FeatureCollection":
        members = {name: member for name, member in members.items() if name != "features"} | {
            "features is an array": isinstance(members.get("features"), list)
        }
    return members


def _skim(body: Body) -> dict[str, Any]:
    """The members looked at of a body too large to make objects of."""
    try:
        check_encoding(bytes(body[:4]))
    except JsonError as fault:
        raise EnvelopeError("$", str(fault)) from None
    start = len(BOM) if bytes(body[:3]) == BOM else 0
    try:
        skimmed = msgspec.json.decode(memoryview(body)[start:], type=_Skim)
    except RecursionError:
        raise EnvelopeError("$", "nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as fault:
        if isinstance(fault, msgspec.ValidationError):
            raise EnvelopeError("$", "the body is no JSON object") from None
        raise EnvelopeError("$", f"no JSON: {fault}") from None
    members: dict[str, Any] = {}
    for name in ("type", "id", "event_id", "version", "action", "layer", "source"):
        raw = bytes(getattr(skimmed, name))
        if len(raw) > 10_000:
            raise EnvelopeError(name, f"has {len(raw)} bytes", None, "10,000 bytes")
        value = _loads(raw)
        if value is not None:
            members[name] = value
    if members.get("type") == "FeatureCollection":
        members["features is an array"] = bytes(memoryview(skimmed.features)[:1]) == b"["
    else:
        members["geometry"] = None  # Whether there is one is ingest's to see: it reads the whole.
    return members


def _loads(text: bytes) -> Any:
    try:
        return loads(text)
    except JsonError as fault:
        raise EnvelopeError("$", str(fault)) from None


def parse(model: type[E], value: Any, prefix: str = "") -> E:
    """The event of a JSON value.

    Args:
        model: Its class.
        value: What `json_text.loads` gave.
        prefix: Path of the value within the body, for messages.

    Raises:
        EnvelopeError: The first fault: its field, value and limit.
    """
    try:
        return model.model_validate(value)
    except ValidationError as fault:
        raise envelope_error(fault, prefix) from None


def read_events(body: Body, kind: str) -> list[TileEvent] | list[PositionEvent] | list[FenceEvent]:
    """The tile, position or fence events of a body: one object, or an array of 1 to 10,000.

    One event at fault refuses the body: its field says which (`[3].lat`), and nothing of it was taken.

    Raises:
        EnvelopeError: The body is no JSON, or an event is at fault.
    """
    model = _SINGLE.get(kind)
    if model is None:
        raise EnvelopeError("kind", f"{shorten(kind)!r} is none of {', '.join(sorted(_SINGLE))}")
    value = _loads(bytes(body))
    if not isinstance(value, list):
        return cast(Any, [parse(model, value)])
    entries = cast(list[Any], value)
    if not 1 <= len(entries) <= MAX_BATCH:
        raise EnvelopeError("$", f"the array holds {len(entries)} events", str(len(entries)), f"1..{MAX_BATCH}")
    return cast(Any, [parse(model, entry, f"[{number}]") for number, entry in enumerate(entries)])


def _envelope_of(kind: str, body: Body) -> Envelope:
    events = read_events(body, kind)
    first = events[0]
    many = bytes(body[:4096]).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    sources = {event.source for event in events} - {None}
    if len(sources) > 1:
        raise EnvelopeError("source", f"events of {len(sources)} sources in one body", None, "one source")
    source = next(iter(sources), None)
    if many:
        return Envelope(cast(Kind, kind), True, source=source)
    if isinstance(first, TileEvent):
        key = first.tile.key
    elif isinstance(first, PositionEvent):
        key = first.device_id
    else:
        key = feature_id_text(first.id)
    return Envelope(cast(Kind, kind), False, first.event_id, key, None, source)
