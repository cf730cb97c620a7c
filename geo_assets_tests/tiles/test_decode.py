from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.tiles.decode import DecodeError, decode, polygons, ring_area

# Mapbox Vector Tile 2.1: a layer "hello" with a point, a line and a polygon, written by hand.
_POINT = bytes([0x08, 0x01, 0x18, 0x01, 0x22, 0x03, 9, 50, 34])
_LINE = bytes([0x18, 0x02, 0x22, 0x08, 9, 4, 4, 18, 0, 16, 16, 0])
_SQUARE = [9, 0, 0, 26, 20, 0, 0, 20, 19, 0, 15]
_HOLE = [9, 4, 15, 26, 0, 8, 8, 0, 0, 7, 15]


def _message(field: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([field << 3 | 2, len(data)]) + data


def _tile(*features: bytes, extra: bytes = b"") -> bytes:
    layer = b"\x78\x02" + _message(1, b"hello") + b"".join(_message(2, feature) for feature in features) + extra
    return _message(3, layer)


def test_an_empty_tile_has_no_layers():
    assert decode(b"") == []


def test_a_point_and_a_line_written_by_hand_are_read():
    (layer,) = decode(_tile(_POINT, _LINE))
    assert (layer.name, layer.version, layer.extent) == ("hello", 2, 4096)
    point, line = layer.features
    assert (point.id, point.geometry_type, point.paths) == (1, "Point", (((25, 17),),))
    assert (line.id, line.geometry_type, line.paths) == (None, "LineString", (((2, 2), (2, 10), (10, 10)),))


def test_rings_are_closed_and_parted_by_their_winding():
    polygon = bytes([0x18, 0x03, 0x22, len(_SQUARE + _HOLE), *_SQUARE, *_HOLE])
    (layer,) = decode(_tile(polygon))
    (feature,) = layer.features
    assert feature.paths[0] == ((0, 0), (10, 0), (10, 10), (0, 10), (0, 0))
    assert ring_area(feature.paths[0]) == 100
    assert ring_area(feature.paths[1]) == -16
    assert [len(rings) for rings in polygons(feature)] == [2]


def test_every_value_keeps_its_type():
    values = [
        b"\x0a\x01x",
        b"\x15\x00\x00\xc0\x3f",
        b"\x19\x00\x00\x00\x00\x00\x00\xf0\x3f",
        b"\x20" + b"\xff" * 9 + b"\x01",
        b"\x28" + b"\xff" * 9 + b"\x01",
        b"\x30\x03",
        b"\x38\x01",
    ]
    tags = bytes([0x12, 14, *(number for index in range(7) for number in (index, index))])
    extra = b"".join(_message(3, b"abcdefg"[i : i + 1]) for i in range(7)) + b"".join(_message(4, v) for v in values)
    (layer,) = decode(_tile(tags + _POINT, extra=extra))
    properties = layer.features[0].properties
    assert list(properties.values()) == ["x", 1.5, 1.0, -1, (1 << 64) - 1, -2, True]
    assert list(map(type, properties.values())) == [str, float, float, int, int, int, bool]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x1a\x05ab", "wants 5 bytes"),
        (b"\x1a", "does not end"),
        (b"\x1b", "wire type 3"),
        (b"\x02\x00", "field 0"),
        (b"\x18\x01", "where bytes belong"),
        (_message(3, b"\x78\x02"), "no name"),
        (_message(3, _message(1, b"\xff")), "layer.name"),
        (_tile(bytes([0x18, 0x04])), "type 4"),
        (_tile(bytes([0x12, 1, 0])), "no pairs"),
        (_tile(bytes([0x12, 2, 0, 0])), "outside 0 keys"),
        (_tile(bytes([0x18, 1, 0x22, 2, 9, 2])), "announced"),
        (_tile(bytes([0x18, 2, 0x22, 3, 10, 2, 2])), "LineTo without MoveTo"),
        (_tile(bytes([0x18, 3, 0x22, 1, 15])), "ClosePath without"),
        (_tile(bytes([0x18, 3, 0x22, 1, 12])), "no command"),
        (_tile(_POINT, extra=_message(4, b"")), "holds nothing"),
        (_tile(_POINT, extra=_message(4, b"\x1a\x01a")), "8 bytes|8 belong"),
    ],
)
def test_what_is_no_tile_is_refused_with_the_reason(data: bytes, says: str):
    with pytest.raises(DecodeError, match=says):
        decode(data)


def test_a_count_of_coordinates_that_are_not_there_takes_no_memory():
    with pytest.raises(DecodeError, match="announced"):
        decode(_tile(bytes([0x18, 1, 0x22, 5, 0xF9, 0xFF, 0xFF, 0xFF, 0x0F])))


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 80), st.integers(0, 255))
def test_bytes_of_any_kind_decode_or_are_refused(noise: bytes, position: int, byte: int):
    tile = bytearray(_tile(_POINT, _LINE))
    tile[position % len(tile)] = byte
    for data in (noise, bytes(tile), bytes(tile) + noise):
        with suppress(DecodeError):
            decode(data)
