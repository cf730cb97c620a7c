"""Fences: what an event says of one, and the immutable set of all of them at a revision.

Which positions a fence covers is asked of `index`; what follows from it is decided in `tracker`.
"""

# Functions of shapely that take one geometry or an array have partly unknown types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import shapely
from shapely.geometry.base import BaseGeometry

from geo_assets.events.crs import is_geographic, resolve_crs, to_wgs84
from geo_assets.events.dead_letter import Refused
from geo_assets.events.geometry import (
    box_of,
    brought_back,
    check_range,
    oriented,
    parse_geometry,
    refuse,
    to_wkb,
    unrolled,
)
from geo_assets.events.json_text import JsonError, loads, shorten
from geo_assets.events.models import (
    FENCE_MEMBERS,
    EnvelopeError,
    FenceEvent,
    envelope_error,
    feature_id_text,
    parse,
)
from geo_assets.events.records import feature_key
from geo_assets.geofence.geodesic import circle, corridor
from geo_assets.geofence.schedule import Schedule

MAX_VERTICES = 100_000
"""Coordinates of one fence: a country's border; a finer one belongs on the map, not in front of every position."""

SET_VERSION = b"\x01"
"""First byte of a serialised set."""

Outcome = Literal["applied", "stale", "duplicate", "version_conflict"]
"""Of a change: see `FenceSet.apply`."""

MAX_CORNERS = 2_000
"""Points of a fence of circles, or of the line of a corridor: each is a millisecond of joining them."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A geofence.

    Args:
        id: Its source and the JSON text of its id there, as in the key of its record: `demo:"depot"`, `demo:123`.
        revision: Its version upstream; a lower one is stale.
        geometry: Polygon or MultiPolygon, EPSG:4326 lon/lat, valid, within ±180 (split there); holes are outside.
        priority: 0 to 9, higher is more urgent.
        dwell_ms: Milliseconds inside until DWELL; 0 for none.
        hysteresis_m: Metres beyond the border until EXIT.
        schedule: When it is in force; None for always.
        name: For people to read.
        digest: Of its content (the revision aside), hex; worked out.
    """

    id: str
    revision: int
    geometry: BaseGeometry
    priority: int = 0
    dwell_ms: int = 0
    hysteresis_m: float = 0.0
    schedule: Schedule | None = None
    name: str | None = None
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        stored = _stored(self)
        stored.revision = 0
        object.__setattr__(self, "digest", hashlib.sha256(_encode(stored)).hexdigest()[:32])


@dataclass(frozen=True, slots=True)
class Removed:
    """A fence that was deleted: its id (as of `Fence`) and the version of the deletion."""

    id: str
    revision: int


class _Stored(msgspec.Struct, array_like=True):
    id: str
    revision: int
    wkb: bytes
    priority: int
    dwell_ms: int
    hysteresis_m: float
    schedule: Schedule | None
    name: str | None


class _StoredSet(msgspec.Struct, array_like=True):
    revision: int
    fences: list[_Stored]
    removed: dict[str, int]


_encode = msgspec.msgpack.Encoder().encode
_decode_set = msgspec.msgpack.Decoder(_StoredSet).decode


def _stored(fence: Fence) -> _Stored:
    return _Stored(
        fence.id, fence.revision, to_wkb(fence.geometry), fence.priority, fence.dwell_ms, fence.hysteresis_m,
        fence.schedule, fence.name,
    )  # fmt: skip


@dataclass(frozen=True)
class FenceSet:
    """All fences at a revision. Immutable: `apply` gives the next one.

    Args:
        revision: Rises with every change; what a snapshot names.
        fences: In the order of their ids.
        removed: Id -> version of its deletion, so that an older update does not bring a fence back; one entry for each
            fence that was ever deleted.
    """

    revision: int = 0
    fences: tuple[Fence, ...] = ()
    removed: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        ids = [fence.id for fence in self.fences]
        if any(one >= other for one, other in pairwise(ids)):
            object.__setattr__(self, "fences", tuple(sorted(self.fences, key=lambda fence: fence.id)))
            if len(set(ids)) < len(ids):
                raise ValueError(f"fences: {len(ids) - len(set(ids))} ids stand twice in the set")

    def __len__(self) -> int:
        return len(self.fences)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Id -> position in `fences`."""
        return {fence.id: number for number, fence in enumerate(self.fences)}

    @cached_property
    def content_hash(self) -> str:
        """Of all fences and their content, hex: equal sets have equal hashes, whatever their revisions."""
        digest = hashlib.sha256()
        for fence in self.fences:
            digest.update(_encode((fence.id, fence.digest)))
        return digest.hexdigest()[:32]

    def apply(self, changes: Iterable[Fence | Removed], revision: int | None = None) -> tuple[FenceSet, list[Outcome]]:
        """The set after changes, in their order.

        Args:
            changes: Fences that are new or other than before, and deletions.
            revision: Of the set that comes out (such as the offset of the last change); the next number by default.

        Returns:
            The set (this one where nothing was applied), and what became of each change: `applied`; `stale`, its
            version is lower than the one that stands; `duplicate`, the same version with the same content, or a
            deletion of what is not there; `version_conflict`, the same version with other content.
        """
        fences = {fence.id: fence for fence in self.fences}
        removed = dict(self.removed)
        outcomes: list[Outcome] = []
        for change in changes:
            standing = fences.get(change.id)
            outcome = _judge(change, standing, removed.get(change.id))
            outcomes.append(outcome)
            if outcome != "applied":
                continue
            if isinstance(change, Fence):
                fences[change.id] = change
                removed.pop(change.id, None)
            else:
                fences.pop(change.id, None)
                removed[change.id] = change.revision
        if "applied" not in outcomes:
            return self, outcomes
        following = self.revision + 1 if revision is None else revision
        if following <= self.revision:
            raise ValueError(f"revision: {following} is not above {self.revision}, the set's own")
        return FenceSet(following, tuple(sorted(fences.values(), key=lambda fence: fence.id)), removed), outcomes

    def to_bytes(self) -> bytes:
        """The set as bytes, to be kept while a snapshot may need it."""
        stored = _StoredSet(self.revision, [_stored(fence) for fence in self.fences], dict(self.removed))
        return SET_VERSION + _encode(stored)

    @classmethod
    def from_bytes(cls, data: bytes) -> FenceSet:
        """The set of `to_bytes`.

        Raises:
            ValueError: Bytes of another version, or none of ours.
        """
        if data[:1] != SET_VERSION:
            raise ValueError(f"fence set: version byte {data[:1].hex() or 'missing'}, known is {SET_VERSION.hex()}")
        try:
            stored = _decode_set(data[1:])
        except msgspec.MsgspecError as fault:
            raise ValueError(f"fence set: {fault}") from None
        shapes = shapely.from_wkb(np.array([fence.wkb for fence in stored.fences], dtype=object))
        fences = tuple(
            Fence(f.id, f.revision, shape, f.priority, f.dwell_ms, f.hysteresis_m, f.schedule, f.name)
            for f, shape in zip(stored.fences, shapes, strict=True)
        )
        return cls(stored.revision, fences, stored.removed)


def _judge(change: Fence | Removed, standing: Fence | None, removed: int | None) -> Outcome:
    if standing is None:
        if removed is None:
            # A deletion of the unknown is kept too: the update that it overtook is older.
            return "applied"
        if change.revision < removed:
            return "stale"
        if change.revision == removed:
            return "duplicate" if isinstance(change, Removed) else "version_conflict"
        return "applied"
    if change.revision < standing.revision:
        return "stale"
    if change.revision == standing.revision:
        same = isinstance(change, Fence) and change.digest == standing.digest
        return "duplicate" if same else "version_conflict"
    return "applied"


def fence_of(event: FenceEvent, *, source: str, revision: int, crs: str | None = None) -> Fence | Removed:
    """The fence, or the deletion, that an event says.

    Args:
        event: The event; members it does not have are looked for in its properties.
        source: Whose it is: two sources may use the same ids.
        revision: Its version where the event has none, such as the time of receipt in milliseconds.
        crs: CRS declared beside the body; the event's own `crs` says it as well. Default: EPSG:4326.

    Raises:
        Refused: Reason, field, value and limit of the first fault.
    """
    identifier = feature_key(source, feature_id_text(event.id) or "")
    version = revision if event.version is None else event.version
    if event.action == "delete":
        return Removed(identifier, version)
    event = _with_properties(event)
    return Fence(
        identifier,
        version,
        _ground(event, crs),
        priority=event.priority or 0,
        dwell_ms=0 if event.dwell_s is None else max(1, round(event.dwell_s * 1000)),
        hysteresis_m=event.hysteresis_m or 0.0,
        schedule=None if event.schedule is None else Schedule.read(event.schedule),
        name=event.name,
    )


def members_of_feature(feature_id: str, version: int, geometry: bytes | None, properties: str) -> dict[str, Any]:
    """The fence event that a stored feature is, as plain JSON values: what `[fences]` gets of it.

    Tables have no objects, few empty cells and many doubles: a text of `schedule` is read as JSON, an empty text is no
    value, and 5.0 is the priority 5.

    Args:
        feature_id: JSON text of its id.
        version: Its version.
        geometry: WKB, EPSG:4326 lon/lat.
        properties: JSON object.
    """
    said: Mapping[str, Any] = loads(properties.encode())
    members: dict[str, Any] = {name: said[name] for name in FENCE_MEMBERS if said.get(name) not in (None, "")}
    schedule = members.get("schedule")
    if isinstance(schedule, str):
        with contextlib.suppress(JsonError):
            members["schedule"] = loads(schedule.encode())
    priority = members.get("priority")
    if isinstance(priority, float) and priority.is_integer():
        members["priority"] = int(priority)
    shape = None
    if geometry is not None:
        # Tuples become the arrays that JSON has; numbers stay as they are.
        shape = msgspec.json.decode(msgspec.json.encode(shapely.geometry.mapping(shapely.from_wkb(geometry))))
    return {"type": "Feature", "id": loads(feature_id.encode()), "version": version, "geometry": shape, **members}


def fence_of_feature(source: str, feature_id: str, version: int, geometry: bytes | None, properties: str) -> Fence:
    """The fence that a feature is; arguments as of `members_of_feature`, and whose it is.

    Raises:
        Refused: It is none: reason, field, value and limit of the first fault.
    """
    try:
        event = parse(FenceEvent, members_of_feature(feature_id, version, geometry, properties))
        made = fence_of(event, source=source, revision=version)
    except EnvelopeError as fault:
        raise Refused("schema", _of_properties(fault.field), fault.value, fault.limit, fault.problem) from None
    except Refused as fault:
        raise Refused(fault.reason, _of_properties(fault.field), fault.value, fault.limit, fault.explanation) from None
    assert isinstance(made, Fence)
    return made


def _of_properties(field: str | None) -> str | None:
    return f"properties.{field}" if field is not None and field.split(".")[0] in FENCE_MEMBERS else field


def _with_properties(event: FenceEvent) -> FenceEvent:
    """The event with the members that stand in its properties alone."""
    properties: Mapping[str, Any] = event.properties or {}
    found = {
        name: properties[name]
        for name in FENCE_MEMBERS
        if getattr(event, name) is None and properties.get(name) is not None
    }
    if not found:
        return event
    try:
        return FenceEvent.model_validate(event.model_dump(exclude_unset=True) | found)
    except ValueError as fault:
        named = envelope_error(fault) if hasattr(fault, "errors") else None  # pyright: ignore[reportArgumentType]
        if named is None:
            raise
        where = f"properties.{named.field}" if named.field.split(".")[0] in found else named.field
        raise Refused("schema", where, named.value, named.limit, named.problem) from None


def _ground(event: FenceEvent, crs: str | None) -> BaseGeometry:
    """The area of an event, EPSG:4326, valid and split at ±180."""
    properties: Mapping[str, Any] = event.properties or {}
    declared = (("crs", event.crs), ("properties.source_epsg", properties.get("source_epsg")), ("X-Source-CRS", crs))
    name = resolve_crs(declared, "EPSG:4326")
    parsed = parse_geometry(event.geometry, MAX_VERTICES)
    if parsed is None:
        raise refuse("a fence without ground covers nothing", value=event.geometry, limit="area, point or line")
    shape = parsed.shape
    if not np.isfinite(shapely.get_coordinates(shape)).all():
        raise refuse("a coordinate is not finite")
    if name != "EPSG:4326":
        shape = shapely.transform(shape, lambda points: to_wgs84(name, points)[0])
    if not parsed.over_the_pole:
        shape = unrolled(shape, projected=not is_geographic(name))
    check_range(box_of(shape))
    if not shapely.is_valid(shape):
        raise refuse(str(shapely.is_valid_reason(shape)))
    try:
        made = oriented(_widened(_flat(shape), event))
    except shapely.errors.GEOSException as fault:
        # Such as a corridor over a pole, whose pieces do not fit together in lon/lat.
        raise refuse(f"its area cannot be drawn: {' '.join(str(fault).split())[:200]}") from None
    if made.is_empty or made.geom_type not in ("Polygon", "MultiPolygon"):
        raise refuse("it covers no area", value=made.geom_type, limit="area, points or lines")
    if (vertices := int(shapely.get_num_coordinates(made))) > MAX_VERTICES:
        raise refuse("its circles or corridor have too many vertices", "too_large", vertices, str(MAX_VERTICES))
    return made


def _flat(shape: BaseGeometry) -> BaseGeometry:
    """A collection, however nested, as one multi-geometry of its kind; areas that overlap are one area."""
    if shape.geom_type != "GeometryCollection":
        return shape
    parts = [part for part in shapely.get_parts(shape).tolist() if not part.is_empty]
    flat = [single for part in parts for single in shapely.get_parts(_flat(part)).tolist()]
    dimensions = {int(shapely.get_dimensions(single)) for single in flat}
    if len(dimensions) != 1:
        return shapely.GeometryCollection(flat)
    if dimensions == {2}:
        return shapely.union_all(flat)
    return shapely.MultiPoint(flat) if dimensions == {0} else shapely.MultiLineString(flat)


def _widened(shape: BaseGeometry, event: FenceEvent) -> BaseGeometry:
    dimensions = set(shapely.get_dimensions(shapely.get_parts(shape)).tolist())
    if event.radius_m is not None and event.width_m is not None:
        raise Refused(
            "schema", "width_m", shorten(event.width_m), None, "stands beside radius_m; one of them is enough"
        )
    if dimensions == {2}:
        for member in ("radius_m", "width_m"):
            if getattr(event, member) is not None:
                raise Refused("schema", member, shorten(getattr(event, member)), "point or line", "beside an area")
        return brought_back(shape)
    if len(dimensions) > 1:
        raise refuse("areas, lines and points are mixed", value=shape.geom_type, limit="area, points or lines")
    if (corners := int(shapely.get_num_coordinates(shape))) > MAX_CORNERS:
        raise refuse("too many points around which the fence would be drawn", "too_large", corners, str(MAX_CORNERS))
    if dimensions == {0}:
        if event.radius_m is None:
            raise Refused("schema", "radius_m", None, "> 0", "missing; a point covers nothing")
        radius = event.radius_m
        return shapely.union_all([circle(x, y, radius) for x, y in shapely.get_coordinates(shape).tolist()])
    if event.radius_m is None and event.width_m is None:
        raise Refused("schema", "width_m", None, "> 0", "missing; a line covers nothing")
    half = event.radius_m if event.radius_m is not None else (event.width_m or 0.0) / 2
    lines = [shapely.get_coordinates(line) for line in shapely.get_parts(shape)]
    return shapely.union_all([corridor(line, half) for line in lines])
