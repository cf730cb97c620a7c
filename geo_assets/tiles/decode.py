"""Reading a tile: Mapbox Vector Tile 2.1 bytes as typed layers and features, for people, audits and tests.

It reads what any encoder wrote and refuses what is no tile; whether the geometry keeps the specification's rules is for
the audits to say. Plain Python: it loads without a geometry library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Value = str | int | float | bool
Path = tuple[tuple[int, int], ...]
GeometryType = Literal["Unknown", "Point", "LineString", "Polygon"]

_TYPES: tuple[GeometryType, ...] = ("Unknown", "Point", "LineString", "Polygon")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOVE_TO, _LINE_TO, _CLOSE_PATH = 1, 2, 7


class DecodeError(ValueError):
    """Bytes that are no Mapbox Vector Tile; the message says where and why."""


@dataclass(frozen=True, slots=True)
class DecodedFeature:
    """One feature.

    Args:
        id: The MVT id, 0 included; None when the feature has none.
        geometry_type: As the feature says.
        properties: Values with their type: an integer, a double, a boolean or a text.
        paths: Coordinates in tile units, x east, y south: each point alone, each line, each ring (closed, the first
            coordinate repeated at the end).
    """

    id: int | None
    geometry_type: GeometryType
    properties: dict[str, Value]
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class DecodedLayer:
    """One layer: its name, specification version, units a side and features, all in the order of the bytes."""

    name: str
    version: int
    extent: int
    features: tuple[DecodedFeature, ...]


def decode(data: bytes) -> list[DecodedLayer]:
    """Decode a tile.

    Args:
        data: Uncompressed MVT; b"" is a tile without layers.

    Returns:
        Its layers, in order.

    Raises:
        DecodeError: The bytes are no tile (Mapbox Vector Tile 2.1, section 4; Protocol Buffers encoding).
    """
    return [_layer(_bytes(value, "tile.layers")) for field, value in _fields(data, "tile") if field == 3]


def ring_area(ring: Path) -> float:
    """Area of a closed ring in square units, positive for an exterior ring (surveyor's formula, section 4.3.3.3)."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise(ring)) / 2


def polygons(feature: DecodedFeature) -> list[list[Path]]:
    """The rings of a polygon feature, parted: each exterior ring with the interior rings that follow it.

    An interior ring before any exterior one begins a polygon of its own.
    """
    result: list[list[Path]] = []
    for ring in feature.paths:
        if ring_area(ring) > 0 or not result:
            result.append([ring])
        else:
            result[-1].append(ring)
    return result


def _layer(data: bytes) -> DecodedLayer:
    name: str | None = None
    version, extent = 1, 4096
    keys: list[str] = []
    values: list[Value] = []
    features: list[bytes] = []
    for field, value in _fields(data, "layer"):
        if field == 1:
            name = _text(value, "layer.name")
        elif field == 2:
            features.append(_bytes(value, "layer.features"))
        elif field == 3:
            keys.append(_text(value, "layer.keys"))
        elif field == 4:
            values.append(_value(_bytes(value, "layer.values")))
        elif field == 5:
            extent = _int(value, "layer.extent")
        elif field == 15:
            version = _int(value, "layer.version")
    if name is None:
        raise DecodeError("layer: it has no name")
    return DecodedLayer(name, version, extent, tuple(_feature(each, keys, values, name) for each in features))


def _feature(data: bytes, keys: list[str], values: list[Value], layer: str) -> DecodedFeature:
    where = f"layer {layer!r}: feature"
    number: int | None = None
    kind = 0
    tags: list[int] = []
    commands: list[int] = []
    for field, value in _fields(data, where):
        if field == 1:
            number = _int(value, f"{where}.id")
        elif field == 2:
            tags += _packed(value, f"{where}.tags")
        elif field == 3:
            kind = _int(value, f"{where}.type")
        elif field == 4:
            commands += _packed(value, f"{where}.geometry")
    if kind >= len(_TYPES):
        raise DecodeError(f"{where}.type {kind} is none of 0..{len(_TYPES) - 1}")
    if len(tags) % 2:
        raise DecodeError(f"{where}.tags: {len(tags)} numbers are no pairs of key and value")
    properties: dict[str, Value] = {}
    for key, value in zip(tags[::2], tags[1::2], strict=True):
        if key >= len(keys) or value >= len(values):
            raise DecodeError(f"{where}.tags: ({key}, {value}) is outside {len(keys)} keys and {len(values)} values")
        properties[keys[key]] = values[value]
    paths = tuple(_paths(commands, where)) if kind else ()
    return DecodedFeature(number, _TYPES[kind], properties, paths)


def _paths(commands: list[int], where: str) -> Iterator[Path]:
    x = y = 0
    position, end = 0, len(commands)
    path: list[tuple[int, int]] = []
    while position < end:
        command, count = commands[position] & 7, commands[position] >> 3
        position += 1
        if command == _CLOSE_PATH:
            if not path:
                raise DecodeError(f"{where}.geometry: ClosePath without a path")
            path.append(path[0])
            continue
        if command not in (_MOVE_TO, _LINE_TO):
            raise DecodeError(f"{where}.geometry: {command} is no command")
        if count * 2 > end - position:
            raise DecodeError(f"{where}.geometry: {count} coordinates are announced, {(end - position) // 2} are there")
        for _ in range(count):
            x += _zigzag(commands[position])
            y += _zigzag(commands[position + 1])
            position += 2
            if command == _MOVE_TO:
                if path:
                    yield tuple(path)
                path = [(x, y)]
            elif path:
                path.append((x, y))
            else:
                raise DecodeError(f"{where}.geometry: LineTo without MoveTo")
    if path:
        yield tuple(path)


def _value(data: bytes) -> Value:
    result: Value | None = None
    for field, value in _fields(data, "value"):
        if field == 1:
            result = _text(value, "value.string_value")
        elif field == 2:
            result = _float(value, 4, "<f", "value.float_value")
        elif field == 3:
            result = _float(value, 8, "<d", "value.double_value")
        elif field == 4:
            number = _int(value, "value.int_value")
            result = number - (1 << 64) if number >> 63 else number
        elif field == 5:
            result = _int(value, "value.uint_value")
        elif field == 6:
            result = _zigzag(_int(value, "value.sint_value"))
        elif field == 7:
            result = _int(value, "value.bool_value") != 0
    if result is None:
        raise DecodeError("value: it holds nothing")
    return result


def _fields(data: bytes, where: str) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a message: a number for a varint, bytes for everything else."""
    position, end = 0, len(data)
    while position < end:
        key, position = _read_varint(data, position, where)
        field, wire = key >> 3, key & 7
        if field == 0:
            raise DecodeError(f"{where}: field 0 at byte {position}")
        if wire == _VARINT:
            value, position = _read_varint(data, position, where)
            yield field, value
            continue
        if wire == _BYTES:
            length, position = _read_varint(data, position, where)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise DecodeError(f"{where}: wire type {wire} at byte {position}")
        if length > end - position:
            raise DecodeError(f"{where}: field {field} wants {length} bytes, {end - position} are left")
        yield field, data[position : position + length]
        position += length


def _read_varint(data: bytes, position: int, where: str) -> tuple[int, int]:
    result = shift = 0
    end = len(data)
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
    raise DecodeError(f"{where}: the number at byte {position} does not end")


def _packed(value: int | bytes, where: str) -> list[int]:
    if isinstance(value, int):
        return [value]
    result: list[int] = []
    position = 0
    while position < len(value):
        number, position = _read_varint(value, position, where)
        result.append(number)
    return result


def _zigzag(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


def _int(value: int | bytes, where: str) -> int:
    if isinstance(value, int):
        return value
    raise DecodeError(f"{where}: bytes where a number belongs")


def _bytes(value: int | bytes, where: str) -> bytes:
    if isinstance(value, int):
        raise DecodeError(f"{where}: the number {value} where bytes belong")
    return value


def _text(value: int | bytes, where: str) -> str:
    try:
        return _bytes(value, where).decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"{where}: {error}") from error


def _float(value: int | bytes, size: int, form: str, where: str) -> float:
    data = _bytes(value, where)
    if len(data) != size:
        raise DecodeError(f"{where}: {len(data)} bytes, {size} belong there")
    return struct.unpack(form, data)[0]
