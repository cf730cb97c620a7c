"""One feature event from bytes to an edit that can be stored, or a refusal that says why not.

Plain bytes in, plain records out: it runs in a process pool. Nothing is stored, and nothing remembered between calls.
"""

# Shapely's functions take keyword arguments of no declared type.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import shapely
from shapely.geometry.base import BaseGeometry

from geo_assets.events import models
from geo_assets.events.crs import Operation, is_geographic, resolve_crs, to_wgs84
from geo_assets.events.dead_letter import Refused
from geo_assets.events.geometry import (
    HAIR,
    box_of,
    brought_back,
    check_finite,
    check_range,
    dimension_of,
    oriented,
    parse_geometry,
    refuse,
    repaired,
    to_wkb,
    unrolled,
    wide,
)
from geo_assets.events.json_text import JsonError, canonical, loads, shorten
from geo_assets.events.models import EnvelopeError, FeatureEvent, feature_id_text, parse
from geo_assets.events.sources import Source
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import Box
from geo_assets.tiles.workkey import content_hash, feature_digest
from geo_assets.tiles.zooms import NOWHERE, zoom_limits

DELETED = "deleted"
"""What stands for the content hash of a delete."""

MAX_PROPERTIES_BYTES = 1_000_000
"""Bytes of a feature's properties as canonical JSON: they travel with every tile that shows it."""


@dataclass(frozen=True, slots=True)
class FeatureContext:
    """What is known of a feature beside its text.

    Args:
        source: Whose event it is.
        layers: The map's layers.
        event_id: The event's id: `event_id` of the body, else the webhook's, else the body's hash.
        received_ms: Receive stamp, milliseconds since the epoch, UTC: event time, and the version of what has none.
        in_collection: Whether it is one of several in its event.
        header_crs: What `X-Source-CRS` said.
        collection_crs: The collection's `crs` member.
        members: The collection's own `version`, `action`, `layer`, `source`: for features that have none.
        max_vertices: Vertices one feature may have; the source's own limit is below or above it.
        replay: Whether it is the payload of a dead letter: its key then holds the payload too.
    """

    source: Source
    layers: LayerSet
    event_id: str
    received_ms: int
    in_collection: bool = False
    header_crs: str | None = None
    collection_crs: Any = None
    members: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_vertices: int = 1_000_000
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What was found out about a feature's geometry."""

    is_valid: bool
    """As it came, before a repair."""
    explanation: str
    """GEOS's words where it is not valid, else empty."""
    bbox_valid: bool
    """Whether the Feature's own `bbox`, if it has one, holds the geometry (in the geometry's CRS)."""
    geometry_type: str | None
    """GeoJSON's name of the type it came as; None without geometry."""
    coordinate_count: int
    """As it came, a ring's closing one included."""
    crs: str | None = None
    operation: Operation | None = None
    """How it came to EPSG:4326."""


@dataclass(frozen=True, slots=True)
class ValidEdit:
    """An edit that can be stored: the fields of the feature store's edit and feature, under their names.

    Of a delete only the fields of the edit count; the others are empty.
    """

    event_key: str
    event_id: str
    action: Literal["upsert", "delete"]
    source: str
    feature_id: str
    version: int
    event_time_ms: int
    content_hash: str
    layer: str = ""
    geometry: bytes | None = None
    """WKB (ISO, little endian, 2D), EPSG:4326 lon/lat, within ±180, rings oriented."""
    bbox: tuple[float, float, float, float] | None = None
    properties: str = "{}"
    digest: bytes = b""
    min_zoom: int = NOWHERE[0]
    max_zoom: int = NOWHERE[1]
    vertex_count: int = 0
    report: Report | None = None
    repaired: bool = False


def event_key(source: str, event_id: str, feature_id: str | None = None, payload: bytes | None = None) -> str:
    """The idempotency key of an event.

    Args:
        source: Its source: two may use the same ids.
        event_id: Its id.
        feature_id: In a collection, the feature's id as JSON text.
        payload: In a collection, and in a replay, the feature's bytes: the same feature twice in one collection is
            two edits, and their versions say which one stands; a corrected payload is another event than the dead one.

    Returns:
        Hex sha256 over all of them.
    """
    made = hashlib.sha256()
    for part in (source.encode(), event_id.encode(), (feature_id or "").encode(), payload):
        if part is not None:
            made.update(len(part).to_bytes(8, "big") + part)
    return made.hexdigest()


def validate(feature_json: bytes, context: FeatureContext) -> ValidEdit:
    """Judge one feature.

    Args:
        feature_json: The Feature's text, as it came.
        context: What is known beside it.

    Returns:
        The edit, its geometry in EPSG:4326 lon/lat.

    Raises:
        Refused: With the reason, the field with value and limit, and the library's own explanation.
    """
    try:
        value: Any = loads(feature_json)
        event = parse(FeatureEvent, value)
    except JsonError as fault:
        raise Refused("schema", "$", explanation=str(fault)) from None
    except EnvelopeError as fault:
        raise Refused("schema", fault.field, fault.value, fault.limit, fault.problem) from None
    properties = event.properties or {}
    own_source = event.source if event.source is not None else context.members.get("source")
    if own_source is not None and own_source != context.source.name:
        raise Refused("schema", "source", shorten(own_source), context.source.name, "is not the source that signed")
    action = _action(event, properties, context)
    version = _version(event, properties, context)
    feature_id = feature_id_text(event.id)
    if feature_id is None:
        if action == "delete":
            raise Refused("schema", "id", None, "text or number", "a delete names the feature it deletes")
        feature_id = f'"sha256:{hashlib.sha256(feature_json).hexdigest()[:32]}"'
    event_id = event.event_id or context.event_id
    payload = feature_json if context.in_collection or context.replay else None
    key = event_key(context.source.name, event_id, feature_id if context.in_collection else None, payload)
    source = context.source.name
    if action == "delete":
        return ValidEdit(key, event_id, "delete", source, feature_id, version, context.received_ms, DELETED)
    layer = _layer(event, properties, context)
    if context.layers[layer].fences:
        # A feature is stored with its properties alone: what a fence says beside them goes there.
        extra = event.model_extra or {}
        properties = {**properties, **{n: extra[n] for n in models.FENCE_MEMBERS if extra.get(n) is not None}}
    try:
        text = canonical(properties)
    except JsonError as fault:
        raise Refused("schema", "properties", explanation=str(fault)) from None
    if len(text) > MAX_PROPERTIES_BYTES // 4 and (size := len(text.encode())) > MAX_PROPERTIES_BYTES:
        raise Refused(
            "too_large", "properties", f"{size} bytes", f"{MAX_PROPERTIES_BYTES} bytes", "too many attributes"
        )
    try:
        shape, size_box, report, was_repaired = _geometry(event, properties, context)
    except shapely.GEOSException as fault:
        raise refuse(shorten(str(fault), 200)) from None
    wkb = None if shape is None else to_wkb(shape)
    box = None if shape is None else box_of(shape)
    expected = context.source.expected_box
    if box is not None and expected is not None and not _within(box, expected):
        found, limit = (",".join(f"{n:.6f}" for n in numbers) for numbers in (box, expected))
        raise refuse("outside the box that the source's data lie in", "out_of_range", found, limit)
    limits = NOWHERE
    if shape is not None:
        limits = zoom_limits(context.layers[layer], context.layers, size_box, dimension_of(shape))
    content = content_hash(layer, wkb, text)
    return ValidEdit(
        event_key=key,
        event_id=event_id,
        action="upsert",
        source=source,
        feature_id=feature_id,
        version=version,
        event_time_ms=context.received_ms,
        content_hash=content,
        layer=layer,
        geometry=wkb,
        bbox=None if box is None else (box.west, box.south, box.east, box.north),
        properties=text,
        digest=feature_digest(source, layer, feature_id, content),
        min_zoom=limits[0],
        max_zoom=limits[1],
        vertex_count=0 if shape is None else int(shapely.get_num_coordinates(shape)),
        report=report,
        repaired=was_repaired,
    )


def validate_all(features: Iterable[bytes], context: FeatureContext) -> list[ValidEdit | Refused]:
    """Judge many features of one context: each one's edit or refusal, in order. One at fault costs itself alone."""
    results: list[ValidEdit | Refused] = []
    for text in features:
        try:
            results.append(validate(text, context))
        except Refused as refusal:
            results.append(refusal)
    return results


def _within(box: Box, outer: tuple[float, float, float, float]) -> bool:
    return outer[0] <= box[0] and outer[1] <= box[1] and box[2] <= outer[2] and box[3] <= outer[3]


def _action(event: FeatureEvent, properties: Mapping[str, Any], context: FeatureContext) -> models.Action:
    for value in (event.action, context.members.get("action"), properties.get("action")):
        if isinstance(value, str) and value in get_args(models.Action):
            return cast(models.Action, value)
    return "update"


def _version(event: FeatureEvent, properties: Mapping[str, Any], context: FeatureContext) -> int:
    for value in (event.version, context.members.get("version"), properties.get("version")):
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= models.MAX_VERSION:
            return value
    return context.received_ms


def _layer(event: FeatureEvent, properties: Mapping[str, Any], context: FeatureContext) -> str:
    named = event.layer if event.layer is not None else context.members.get("layer")
    if named is None:
        attribute = properties.get("layer")
        named = (
            attribute if isinstance(attribute, str) and attribute in context.layers else context.source.default_layer
        )
    if named is None:
        raise Refused(
            "schema", "layer", None, ", ".join(context.layers.names), "missing, and the source has no default"
        )
    if named not in context.layers:
        raise Refused("unknown_layer", "layer", shorten(named), ", ".join(context.layers.names), "no layer of this map")
    if not context.source.may_write(named):
        raise Refused("forbidden_layer", "layer", shorten(named), None, f"not a layer of source {context.source.name}")
    return named


def _geometry(
    event: FeatureEvent, properties: Mapping[str, Any], context: FeatureContext
) -> tuple[BaseGeometry | None, Box | None, Report, bool]:
    """The geometry as it is stored, the box that says how large it is, the report, and whether it was repaired."""
    own = context.source.max_vertices
    limit = context.max_vertices if own is None else own
    value = event.geometry
    if value is None:
        return None, None, Report(True, "", True, None, 0), False
    inner: Any = value.get("crs") if isinstance(value, dict) else None
    declared: list[tuple[str, Any]] = [
        ("crs", event.crs),
        ("geometry.crs", inner),
        ("crs of the collection", context.collection_crs),
        ("properties.source_epsg", properties.get("source_epsg")),
        ("X-Source-CRS", context.header_crs),
    ]
    parsed = parse_geometry(value, limit)
    if parsed is None:
        return None, None, Report(True, "", True, None, 0), False
    declared.append(("SRID of the geometry", parsed.srid))
    crs = resolve_crs(declared, context.source.default_crs)
    if parsed.over_the_pole and not is_geographic(crs):
        raise refuse("a ring is not closed: its last position is not its first")
    shape = parsed.shape
    coordinates = shapely.get_coordinates(shape)
    check_finite(coordinates)
    bbox_valid = _own_bbox_holds(event, shape)
    places, operation = to_wgs84(crs, coordinates, allow_ballpark=context.source.allow_ballpark)
    if places is not coordinates:
        shape = shapely.set_coordinates(shape, places)
    box = box_of(shape)
    if wide(box):
        shape = unrolled(shape, projected=not is_geographic(crs))
        box = box_of(shape)
    check_range(box)
    is_valid = bool(shapely.is_valid(shape))
    explanation = "" if is_valid else str(shapely.is_valid_reason(shape))
    if not is_valid:
        if context.source.repair == "reject":
            raise refuse(explanation, value=parsed.kind, limit="valid (OGC 06-103r4), or a source that repairs")
        shape = repaired(shape)
    stored = oriented(brought_back(shape))
    report = Report(is_valid, explanation, bbox_valid, parsed.kind, parsed.count, crs, operation)
    return stored, box, report, not is_valid


def _own_bbox_holds(event: FeatureEvent, shape: BaseGeometry) -> bool:
    """Whether the Feature's `bbox` member (RFC 7946, section 5) holds its geometry; True where there is none."""
    extra: Any = (event.model_extra or {}).get("bbox")
    if extra is None:
        return True
    if not isinstance(extra, list) or len(cast(list[Any], extra)) not in (4, 6):
        return False
    numbers = cast(list[Any], extra)
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        return False
    half = len(numbers) // 2
    low, high = numbers[:2], numbers[half : half + 2]
    box = box_of(shape)
    slack = HAIR * max(1.0, *(abs(n) for n in box))
    lon_holds = low[0] > high[0] or (low[0] - slack <= box[0] and box[2] <= high[0] + slack)
    return lon_holds and low[1] - slack <= box[1] and box[3] <= high[1] + slack
