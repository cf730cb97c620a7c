"""A checker of Mapbox Vector Tiles, written from the specification 2.1 and from nothing of the encoder.

It reads the protocol buffer by hand and strictly: what the specification says MUST, SHALL or SHOULD be is a violation
when it is not, and so is what a reader would forgive (numbers longer than needed, fields twice, tables nobody uses).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import shapely

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
POINT, LINESTRING, POLYGON = 1, 2, 3
TYPE_NAMES = {0: "Unknown", POINT: "Point", LINESTRING: "LineString", POLYGON: "Polygon"}
MOVE_TO, LINE_TO, CLOSE_PATH = 1, 2, 7

# Field numbers and wire types of vector_tile.proto 2.1.
TILE_FIELDS = {3: BYTES}
LAYER_FIELDS = {15: VARINT, 1: BYTES, 2: BYTES, 3: BYTES, 4: BYTES, 5: VARINT}
FEATURE_FIELDS = {1: VARINT, 2: BYTES, 3: VARINT, 4: BYTES}
VALUE_FIELDS = {1: BYTES, 2: FIXED32, 3: FIXED64, 4: VARINT, 5: VARINT, 6: VARINT, 7: VARINT}
VALUE_KINDS = {1: "string", 2: "float", 3: "double", 4: "int", 5: "uint", 6: "sint", 7: "bool"}

Value = str | int | float | bool
Points = list[tuple[int, int]]


class MvtError(ValueError):
    """Bytes that cannot be read as a tile at all."""


class Attribute(NamedTuple):
    """A value with the name of the field that held it: string, float, double, int, uint, sint or bool."""

    kind: str
    value: Value


@dataclass
class Feature:
    """A feature as it stands in the tile; coordinates in tile units, y down."""

    layer: str
    id: int | None
    type: str
    geometry: shapely.Geometry
    properties: dict[str, Value]
    kinds: dict[str, str]


@dataclass
class _Message:
    id: int | None = None
    type: int = 0
    tags: list[int] = field(default_factory=list)
    commands: list[int] = field(default_factory=list)


@dataclass
class _Layer:
    name: str = ""
    extent: int = 4096
    keys: list[str] = field(default_factory=list)
    values: list[Attribute] = field(default_factory=list)
    features: list[_Message] = field(default_factory=list)


def violations(data: bytes, *, unique_ids: bool = True) -> list[str]:
    """What is wrong with a tile by sections 4.1 to 4.4, one line a fault; empty for a good tile.

    Args:
        data: An uncompressed tile; b"" is a good one.
        unique_ids: Whether an id may stand only once in a layer for each geometry type (4.2, SHOULD). A collection
            that became one feature a type keeps its id; two sources may use the same number.
    """
    check = _Check()
    try:
        layers = check.tile(data)
    except MvtError as error:
        return [*check.faults, str(error)]
    for layer in layers:
        check.layer(layer, unique_ids)
    check.valid_polygons()
    return check.faults


def decode_features(data: bytes) -> list[Feature]:
    """The features of a tile, in its order, whatever rules they break as long as they can be read.

    Raises:
        MvtError: The bytes are no tile, or a geometry is none.
    """
    check = _Check()
    features: list[Feature] = []
    for layer in check.tile(data):
        for number, message in enumerate(layer.features):
            where = f"layer {layer.name!r} feature {number}"
            pairs = list(zip(message.tags[::2], message.tags[1::2], strict=False))
            if any(key >= len(layer.keys) or value >= len(layer.values) for key, value in pairs):
                raise MvtError(f"{where}: a tag points outside of keys or values")
            attributes = {layer.keys[key]: layer.values[value] for key, value in pairs}
            features.append(
                Feature(
                    layer.name,
                    message.id,
                    TYPE_NAMES.get(message.type, str(message.type)),
                    _geometry(message.type, check.paths(message.commands, where, message.type), where),
                    {name: attribute.value for name, attribute in attributes.items()},
                    {name: attribute.kind for name, attribute in attributes.items()},
                )
            )
    return features


class _Check:
    """One pass over one tile: reading notes faults as it goes, and so do the rules."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.polygons: list[tuple[str, list[list[Points]]]] = []

    def note(self, where: str, problem: str) -> None:
        self.faults.append(f"{where}: {problem}")

    # -- protocol buffers ----------------------------------------------------------------------------------------------

    def varint(self, data: bytes, at: int, where: str, bits: int = 64) -> tuple[int, int]:
        value = shift = 0
        start = at
        while True:
            if at >= len(data):
                raise MvtError(f"{where}: a varint runs over the end")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift >= 70:
                raise MvtError(f"{where}: a varint of more than 10 bytes")
        if at - start > 1 and data[at - 1] == 0:
            self.note(where, "a varint is longer than needed")
        if value >= 1 << bits:
            self.note(where, f"{value} does not fit in {bits} bits")
        return value, at

    def fields(self, data: bytes, allowed: dict[int, int], where: str) -> Iterator[tuple[int, int | bytes]]:
        at = 0
        while at < len(data):
            tag, at = self.varint(data, at, where, 32)
            number, wire = tag >> 3, tag & 7
            if number in allowed and allowed[number] != wire:
                raise MvtError(f"{where}: field {number} has wire type {wire}, not {allowed[number]}")
            value: int | bytes
            if wire == VARINT:
                value, at = self.varint(data, at, f"{where} field {number}")
            else:
                if wire == BYTES:
                    length, at = self.varint(data, at, where)
                elif wire in (FIXED32, FIXED64):
                    length = 4 if wire == FIXED32 else 8
                else:
                    raise MvtError(f"{where}: field {number} has wire type {wire}")
                if at + length > len(data):
                    raise MvtError(f"{where}: field {number} of {length} bytes runs over the end")
                value = data[at : at + length]
                at += length
            if number in allowed:
                yield number, value
            else:
                self.note(where, f"field {number} is not in the schema")

    def packed(self, data: bytes, where: str) -> list[int]:
        numbers: list[int] = []
        at = 0
        while at < len(data):
            number, at = self.varint(data, at, where, 32)
            numbers.append(number)
        return numbers

    def text(self, data: bytes, where: str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise MvtError(f"{where}: not UTF-8") from error

    # -- messages ------------------------------------------------------------------------------------------------------

    def tile(self, data: bytes) -> list[_Layer]:
        layers = [self.read_layer(_raw(value), f"layer {i}") for i, (_, value) in enumerate(self.top(data))]
        for name, times in Counter(layer.name for layer in layers).items():
            if times > 1:
                self.note(f"layer {name!r}", f"{times} layers have this name (4.1)")
        return layers

    def top(self, data: bytes) -> Iterator[tuple[int, int | bytes]]:
        return self.fields(data, TILE_FIELDS, "tile")

    def read_layer(self, data: bytes, where: str) -> _Layer:
        layer = _Layer()
        seen: Counter[int] = Counter()
        raw_features: list[bytes] = []
        version = None
        for number, value in self.fields(data, LAYER_FIELDS, where):
            seen[number] += 1
            if number == 15:
                version = value
            elif number == 1:
                layer.name = self.text(_raw(value), f"{where} name")
            elif number == 2:
                raw_features.append(_raw(value))
            elif number == 3:
                layer.keys.append(self.text(_raw(value), f"{where} keys"))
            elif number == 4:
                layer.values.append(self.read_value(_raw(value), f"{where} value {len(layer.values)}"))
            else:
                layer.extent = int(value)
        where = f"layer {layer.name!r}" if layer.name else where
        for number, name in ((15, "version"), (1, "name"), (5, "extent")):
            if seen[number] != 1:
                self.note(where, f"{seen[number]} fields {name}, not 1 (4.1)")
        if version not in (2, None):
            self.note(where, f"version {version!r}, not 2 (4.1)")
        if not layer.name:
            self.note(where, "the name is empty")
        if not 0 < layer.extent < 1 << 32:
            self.note(where, f"extent {layer.extent} is no size (4.1)")
        if not raw_features:
            self.note(where, "no feature in it (4.1)")
        layer.features = [self.read_feature(raw, f"{where} feature {i}") for i, raw in enumerate(raw_features)]
        return layer

    def read_value(self, data: bytes, where: str) -> Attribute:
        found: list[Attribute] = []
        for number, value in self.fields(data, VALUE_FIELDS, where):
            kind = VALUE_KINDS[number]
            result: Value
            if number == 1:
                result = self.text(_raw(value), where)
            elif number == 2:
                result = struct.unpack("<f", _raw(value))[0]
            elif number == 3:
                result = struct.unpack("<d", _raw(value))[0]
            elif number == 4:
                result = int(value) - (1 << 64 if int(value) >> 63 else 0)
            elif number == 6:
                result = _unzigzag(int(value))
            elif number == 7:
                if value not in (0, 1):
                    self.note(where, f"a boolean is {value!r}")
                result = bool(value)
            else:
                result = int(value)
            found.append(Attribute(kind, result))
        if len(found) != 1:
            self.note(where, f"{len(found)} fields in it, not exactly one (4.1)")
        return found[-1] if found else Attribute("string", "")

    def read_feature(self, data: bytes, where: str) -> _Message:
        message = _Message()
        seen: Counter[int] = Counter()
        for number, value in self.fields(data, FEATURE_FIELDS, where):
            seen[number] += 1
            if number == 1:
                message.id = int(value)
            elif number == 2:
                message.tags = self.packed(_raw(value), f"{where} tags")
            elif number == 3:
                message.type = int(value)
            else:
                message.commands = self.packed(_raw(value), f"{where} geometry")
        for number, name in ((1, "id"), (2, "tags"), (3, "type"), (4, "geometry")):
            if seen[number] > 1:
                self.note(where, f"{seen[number]} fields {name}, not 1")
            elif not seen[number] and number > 2:
                self.note(where, f"no field {name} (4.2)")
        return message

    # -- rules ---------------------------------------------------------------------------------------------------------

    def layer(self, layer: _Layer, unique_ids: bool) -> None:
        where = f"layer {layer.name!r}"
        for name, times in Counter(layer.keys).items():
            if times > 1:
                self.note(where, f"key {name!r} stands {times} times in keys (4.1)")
        # By bits, not by equality: 1, 1.0 and true are three values, -0.0 and 0.0 are two, and a NaN is one.
        bits = Counter(
            (kind, struct.pack("<d", value) if isinstance(value, float) else value) for kind, value in layer.values
        )
        for (kind, value), times in bits.items():
            if times > 1:
                self.note(where, f"{kind} {value!r} stands {times} times in values (4.1)")
        used_keys: set[int] = set()
        used_values: set[int] = set()
        ids: Counter[tuple[int, int]] = Counter()
        for number, message in enumerate(layer.features):
            at = f"{where} feature {number}"
            self.tags(message, layer, at)
            used_keys.update(message.tags[::2])
            used_values.update(message.tags[1::2])
            if message.id is not None:
                ids[message.id, message.type] += 1
            self.geometry(message, at)
        for index, name in enumerate(layer.keys):
            if index not in used_keys:
                self.note(where, f"key {name!r} is used by no feature")
        for index, attribute in enumerate(layer.values):
            if index not in used_values:
                self.note(where, f"value {attribute.value!r} is used by no feature")
        for (id_, type_), times in ids.items():
            if unique_ids and times > 1:
                self.note(where, f"{times} features of type {TYPE_NAMES.get(type_, type_)} have id {id_} (4.2)")

    def tags(self, message: _Message, layer: _Layer, where: str) -> None:
        if len(message.tags) % 2:
            self.note(where, f"{len(message.tags)} tags, an odd number (4.4)")
        for name, indices, table in (
            ("key", message.tags[::2], layer.keys),
            ("value", message.tags[1::2], layer.values),
        ):
            for index in indices:
                if index >= len(table):
                    self.note(where, f"a tag points to {name} {index} of {len(table)} (4.4)")
        for index, times in Counter(message.tags[::2]).items():
            if times > 1:
                self.note(where, f"key {index} stands {times} times in its tags (4.4)")

    def geometry(self, message: _Message, where: str) -> None:
        if message.type not in (POINT, LINESTRING, POLYGON):
            self.note(where, f"type {message.type} is no Point, LineString or Polygon (4.3.4)")
            return
        try:
            paths = self.paths(message.commands, where, message.type, strict=True)
        except MvtError as error:
            self.faults.append(str(error))
            return
        if not paths:
            self.note(where, "the geometry is empty (4.2)")
        elif message.type == LINESTRING:
            for line in paths:
                if len(set(line)) < 2:
                    self.note(where, "a line of fewer than 2 distinct points (4.3.4.3)")
        elif message.type == POLYGON:
            self.rings(paths, where)

    def rings(self, rings: list[Points], where: str) -> None:
        polygons: list[list[Points]] = []
        good = True
        for ring in rings:
            area = _doubled_area(ring)
            if len(set(ring)) < 3:
                self.note(where, "a ring of fewer than 3 distinct points (4.3.4.4)")
                good = False
            if len(ring) > 1 and ring[0] == ring[-1]:
                self.note(where, "a ring repeats its first point before ClosePath (4.3.4.4)")
                good = False
            if area == 0:
                self.note(where, "a ring of zero area (4.3.4.4)")
                good = False
            elif area > 0:
                polygons.append([ring])
            elif polygons:
                polygons[-1].append(ring)
            else:
                self.note(where, "the first ring is an interior one (4.3.4.4)")
                good = False
        if good:
            self.polygons.append((where, polygons))

    def valid_polygons(self) -> None:
        """Every ring, every polygon and every multipolygon by GEOS, in three calls for the whole tile."""
        rings = [(where, ring) for where, polygons in self.polygons for polygon in polygons for ring in polygon]
        alone = np.array([shapely.Polygon(ring) for _, ring in rings], dtype=object)
        simple = shapely.is_valid(alone)
        for index in np.flatnonzero(~simple):
            self.note(rings[index][0], f"a ring is not simple (4.3.4.4): {shapely.is_valid_reason(alone[index])}")
        broken = {rings[index][0] for index in np.flatnonzero(~simple)}
        whole = [(where, polygons) for where, polygons in self.polygons if where not in broken]
        shapes = np.array(
            [shapely.MultiPolygon([(rings[0], rings[1:]) for rings in polygons]) for _, polygons in whole], dtype=object
        )
        for index in np.flatnonzero(~shapely.is_valid(shapes)):
            where, polygons = whole[index]
            reasons = {shapely.is_valid_reason(shapely.Polygon(rings[0], rings[1:])) for rings in polygons}
            reasons -= {"Valid Geometry"}
            if reasons:
                self.note(
                    where, f"an interior ring crosses or leaves its polygon (4.3.4.4): {'; '.join(sorted(reasons))}"
                )
            else:
                self.note(where, f"polygons of it overlap: {shapely.is_valid_reason(shapes[index])}")

    def paths(self, commands: list[int], where: str, type_: int, strict: bool = False) -> list[Points]:
        """Points, lines or rings of a command sequence (4.3.1 to 4.3.3). With `strict`, notes what breaks a rule."""
        paths: list[Points] = []
        x = y = at = 0
        open_ring = False
        previous = 0
        while at < len(commands):
            command, count = commands[at] & 7, commands[at] >> 3
            at += 1
            if strict:
                self.command(command, count, previous, where, type_, at == 1)
            if command == CLOSE_PATH:
                if not open_ring:
                    raise MvtError(f"{where}: ClosePath closes nothing (4.3.3.3)")
                open_ring = False
            elif command in (MOVE_TO, LINE_TO):
                if at + 2 * count > len(commands):
                    raise MvtError(f"{where}: command {command} wants {count} points, the numbers end before (4.3.2)")
                if command == LINE_TO and (not paths or (type_ == POLYGON and not open_ring)):
                    raise MvtError(f"{where}: LineTo before MoveTo (4.3.3.2)")
                for _ in range(count):
                    dx, dy = _unzigzag(commands[at]), _unzigzag(commands[at + 1])
                    at += 2
                    x, y = x + dx, y + dy
                    if strict and max(abs(dx), abs(dy)) > (1 << 31) - 1:
                        self.note(where, f"a parameter of {max(abs(dx), abs(dy))} is not supported (4.3.2)")
                    if command == MOVE_TO:
                        if strict and open_ring and type_ == POLYGON:
                            self.note(where, "a ring is not closed (4.3.4.4)")
                        paths.append([(x, y)])
                        open_ring = True
                    else:
                        if strict and dx == dy == 0:
                            self.note(where, "a segment of zero length (4.3.3.2)")
                        paths[-1].append((x, y))
            else:
                raise MvtError(f"{where}: {command} is no command (4.3.1)")
            previous = command
        if strict and type_ == LINESTRING and previous == MOVE_TO:
            self.note(where, "a line of one point (4.3.4.3)")
        if strict and type_ == POLYGON and open_ring:
            self.note(where, "a ring is not closed (4.3.4.4)")
        return paths

    def command(self, command: int, count: int, previous: int, where: str, type_: int, first: bool) -> None:
        """The rules of 4.3.3 and 4.3.4 for one command integer."""
        if count < 1:
            self.note(where, f"command {command} with count 0 (4.3.4)")
        if type_ == POINT and (command != MOVE_TO or not first):
            self.note(where, "a point is not one single MoveTo (4.3.4.2)")
        if type_ in (LINESTRING, POLYGON):
            if command == MOVE_TO and count != 1:
                self.note(where, f"MoveTo with count {count}, not 1 (4.3.4)")
            if command == LINE_TO and previous != MOVE_TO:
                self.note(where, "LineTo does not follow MoveTo (4.3.4)")
            if command == MOVE_TO and previous == MOVE_TO:
                self.note(where, "MoveTo follows MoveTo (4.3.4)")
        if type_ == LINESTRING and command == CLOSE_PATH:
            self.note(where, "ClosePath in a line (4.3.4.3)")
        if type_ == POLYGON and command == LINE_TO and count < 2:
            self.note(where, f"LineTo with count {count} in a ring, not above 1 (4.3.4.4)")
        if command == CLOSE_PATH and count != 1:
            self.note(where, f"ClosePath with count {count}, not 1 (4.3.3.3)")
        if command == CLOSE_PATH and type_ == POLYGON and previous != LINE_TO:
            self.note(where, "ClosePath does not follow LineTo (4.3.4.4)")


def _geometry(type_: int, paths: list[Points], where: str) -> shapely.Geometry:
    try:
        return _shape(type_, paths)
    except (ValueError, IndexError, shapely.errors.ShapelyError) as error:
        raise MvtError(f"{where}: no geometry: {error}") from error


def _shape(type_: int, paths: list[Points]) -> shapely.Geometry:
    if type_ == POINT:
        points = [path[0] for path in paths]
        return shapely.Point(points[0]) if len(points) == 1 else shapely.MultiPoint(points)
    if type_ == LINESTRING:
        return shapely.LineString(paths[0]) if len(paths) == 1 else shapely.MultiLineString(paths)
    if type_ == POLYGON:
        polygons: list[list[Points]] = []
        for ring in paths:
            if _doubled_area(ring) > 0 or not polygons:
                polygons.append([ring])
            else:
                polygons[-1].append(ring)
        shapes = [shapely.Polygon(rings[0], rings[1:]) for rings in polygons]
        return shapes[0] if len(shapes) == 1 else shapely.MultiPolygon(shapes)
    return shapely.GeometryCollection()


def _doubled_area(ring: Points) -> int:
    """Twice the area by the surveyor's formula, in integers; positive when clockwise on screen (y down)."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(ring, ring[1:] + ring[:1], strict=True))


def _unzigzag(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


def _raw(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise MvtError(f"the number {value} where bytes belong")
    return value
