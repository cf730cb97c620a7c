"""The checker catches what it should: one handmade bad tile a rule, and none in tiles of another encoder."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

import mapbox_vector_tile
import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets_tests.mvt_checker import MvtError, decode_features, violations

# -- a tile by hand --------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def blob(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def packed(field: int, values: Sequence[int]) -> bytes:
    return blob(field, b"".join(map(varint, values)))


TEXT = blob(1, b"oak")
POINT = (9, 50, 34)


def feature(
    geometry: Sequence[int] = POINT, kind: int | None = 1, tags: Sequence[int] = (), id_: int | None = None
) -> bytes:
    data = b"" if id_ is None else number(1, id_)
    data += packed(2, tags) if tags else b""
    data += b"" if kind is None else number(3, kind)
    return data + (packed(4, geometry) if geometry else b"")


def layer(
    *features: bytes,
    name: bytes | None = b"trees",
    version: int | None = 2,
    extent: int | None = 4096,
    keys: Sequence[bytes] = (),
    values: Sequence[bytes] = (),
    more: bytes = b"",
) -> bytes:
    data = b"" if version is None else number(15, version)
    data += b"" if name is None else blob(1, name)
    data += b"".join(blob(2, each) for each in features)
    data += b"".join(blob(3, key) for key in keys) + b"".join(blob(4, value) for value in values)
    data += b"" if extent is None else number(5, extent)
    return blob(3, data + more)


def zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def rings(*loops: Sequence[tuple[int, int]]) -> list[int]:
    """Commands of rings given by their distinct points."""
    out: list[int] = []
    x = y = 0
    for loop in loops:
        for index, (px, py) in enumerate(loop):
            if index == 0:
                out.append(9)
            elif index == 1:
                out.append((len(loop) - 1) << 3 | 2)
            out += [zigzag(px - x), zigzag(py - y)]
            x, y = px, py
        out.append(15)
    return out


SQUARE = [(0, 0), (100, 0), (100, 100), (0, 100)]
HOLE = [(20, 20), (20, 80), (80, 80), (80, 20)]


def shift(loop: Sequence[tuple[int, int]], dx: int, dy: int = 0) -> list[tuple[int, int]]:
    return [(x + dx, y + dy) for x, y in loop]


# -- good tiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tile",
    [
        b"",
        layer(feature()),
        layer(feature((17, 10, 14, 3, 9))),
        layer(feature((9, 4, 4, 18, 0, 16, 16, 0), 2)),
        layer(feature((9, 4, 4, 18, 0, 16, 16, 0, 9, 17, 17, 10, 4, 8), 2)),
        layer(feature((9, 6, 12, 18, 10, 12, 24, 44, 15), 3)),
        layer(feature(rings(SQUARE, HOLE, shift(SQUARE, 200)), 3)),
        layer(feature(rings(SQUARE, [(0, 50), (50, 80), (50, 20)]), 3)),
        layer(feature(rings(shift(SQUARE, -90, -90)), 3, id_=0)),
        layer(feature(tags=(0, 0)), feature(tags=(0, 1)), keys=(b"kind",), values=(TEXT, number(7, 1))),
        layer(feature(id_=1), feature(rings(SQUARE), 3, id_=1)),
        layer(feature(id_=(1 << 64) - 1)) + layer(feature(), name=b"roads"),
        layer(feature(tags=(0, 0, 1, 1, 2, 2)), keys=(b"a", b"b", b"c"),
              values=(number(4, 1), number(5, 1), blob(1, b"1"))),
    ],
)  # fmt: skip
def test_a_good_tile_has_no_violation(tile: bytes) -> None:
    assert violations(tile) == []


# -- one bad tile a rule ---------------------------------------------------------------------------------------------

BAD: dict[str, tuple[bytes, str]] = {
    "4.1 version missing": (layer(feature(), version=None), "0 fields version"),
    "4.1 version 1": (layer(feature(), version=1), "version 1, not 2"),
    "4.1 version twice": (layer(feature(), more=number(15, 2)), "2 fields version"),
    "4.1 name missing": (layer(feature(), name=None), "0 fields name"),
    "4.1 name empty": (layer(feature(), name=b""), "the name is empty"),
    "4.1 name twice in the tile": (layer(feature()) * 2, "2 layers have this name"),
    "4.1 name no text": (layer(feature(), name=b"\xff"), "not UTF-8"),
    "4.1 extent missing": (layer(feature(), extent=None), "0 fields extent"),
    "4.1 extent 0": (layer(feature(), extent=0), "extent 0 is no size"),
    "4.1 no feature": (layer(), "no feature in it"),
    "4.1 key twice": (
        layer(feature(tags=(0, 0)), feature(tags=(1, 0)), keys=(b"a", b"a"), values=(TEXT,)),
        "key 'a' stands 2 times",
    ),
    "4.1 value twice": (
        layer(feature(tags=(0, 0)), feature(tags=(0, 1)), keys=(b"a",), values=(TEXT, TEXT)),
        "string 'oak' stands 2 times",
    ),
    "4.1 value of no field": (layer(feature(tags=(0, 0)), keys=(b"a",), values=(b"",)), "0 fields in it"),
    "4.1 value of two fields": (
        layer(feature(tags=(0, 0)), keys=(b"a",), values=(TEXT + number(4, 1),)),
        "2 fields in it",
    ),
    "key unused": (layer(feature(), keys=(b"a",)), "key 'a' is used by no feature"),
    "value unused": (layer(feature(), values=(TEXT,)), "value 'oak' is used by no feature"),
    "boolean 2": (layer(feature(tags=(0, 0)), keys=(b"a",), values=(number(7, 2),)), "a boolean is 2"),
    "4.2 geometry missing": (layer(feature(geometry=())), "no field geometry"),
    "4.2 geometry empty": (layer(feature(geometry=()) + packed(4, ())), "the geometry is empty"),
    "4.2 type missing": (layer(feature(kind=None)), "no field type"),
    "4.2 id twice": (layer(feature(id_=7), feature(id_=7)), "2 features of type Point have id 7"),
    "4.2 id field twice": (layer(number(1, 7) + feature(id_=7)), "2 fields id"),
    "4.3.1 unknown command": (layer(feature((11, 2, 2))), "3 is no command"),
    "4.3.2 numbers end early": (layer(feature((17, 2, 2))), "the numbers end before"),
    "4.3.2 parameter too large": (layer(feature((9, (1 << 32) - 1, 0))), "is not supported"),
    "4.3.3 LineTo first": (layer(feature((10, 2, 2), 2)), "LineTo before MoveTo"),
    "4.3.3 ClosePath first": (layer(feature((15,), 3)), "ClosePath closes nothing"),
    "4.3.3 zero segment": (layer(feature((9, 4, 4, 18, 0, 0, 16, 0), 2)), "zero length"),
    "4.3.3 ClosePath twice": (layer(feature((9, 6, 12, 18, 10, 12, 24, 44, 15, 15), 3)), "closes nothing"),
    "4.3.3 ClosePath count 2": (layer(feature((9, 6, 12, 18, 10, 12, 24, 44, 23), 3)), "ClosePath with count 2"),
    "4.3.4 unknown type": (layer(feature(kind=0)), "type 0 is no Point"),
    "4.3.4 type 4": (layer(feature(kind=4)), "type 4 is no Point"),
    "4.3.4 count 0": (layer(feature((1,))), "command 1 with count 0"),
    "4.3.4.2 two MoveTo in a point": (layer(feature((9, 2, 2, 9, 2, 2))), "not one single MoveTo"),
    "4.3.4.2 LineTo in a point": (layer(feature((9, 2, 2, 10, 2, 2))), "not one single MoveTo"),
    "4.3.4.3 line of one point": (layer(feature((9, 2, 2), 2)), "a line of one point"),
    "4.3.4.3 MoveTo of two in a line": (layer(feature((17, 2, 2, 2, 2, 10, 2, 2), 2)), "MoveTo with count 2"),
    "4.3.4.3 LineTo after LineTo": (layer(feature((9, 2, 2, 10, 2, 2, 10, 2, 2), 2)), "LineTo does not follow"),
    "4.3.4.3 MoveTo after MoveTo": (layer(feature((9, 2, 2, 9, 2, 2, 10, 2, 2), 2)), "MoveTo follows MoveTo"),
    "4.3.4.3 ClosePath in a line": (layer(feature((9, 2, 2, 10, 2, 2, 15), 2)), "ClosePath in a line"),
    "4.3.4.4 ring not closed": (layer(feature((9, 6, 12, 18, 10, 12, 24, 44), 3)), "a ring is not closed"),
    "4.3.4.4 first ring not closed": (
        layer(feature((9, 6, 12, 18, 10, 12, 24, 44, *rings(SQUARE)), 3)),
        "a ring is not closed",
    ),
    "4.3.4.4 ring of two points": (layer(feature(rings([(0, 0), (9, 9)]), 3)), "fewer than 3 distinct points"),
    "4.3.4.4 LineTo of one in a ring": (layer(feature(rings([(0, 0), (9, 9)]), 3)), "LineTo with count 1 in a ring"),
    "4.3.4.4 first point repeated": (layer(feature(rings([*SQUARE, (0, 0)]), 3)), "repeats its first point"),
    "4.3.4.4 zero area": (layer(feature(rings([(0, 0), (5, 5), (9, 9)]), 3)), "a ring of zero area"),
    "4.3.4.4 interior ring first": (layer(feature(rings(SQUARE[::-1]), 3)), "the first ring is an interior one"),
    "4.3.4.4 bow-tie": (layer(feature(rings([(0, 0), (9, 9), (9, 0), (0, 20)]), 3)), "a ring is not simple"),
    "4.3.4.4 spike": (
        layer(feature(rings([(0, 0), (100, 0), (100, 50), (150, 50), (100, 50), (100, 100), (0, 100)]), 3)),
        "a ring is not simple",
    ),
    "4.3.4.4 ring touches itself": (
        layer(feature(rings([(0, 0), (50, 50), (100, 0), (100, 100), (50, 50), (0, 100)]), 3)),
        "a ring is not simple",
    ),
    "4.3.4.4 hole outside": (layer(feature(rings(SQUARE, shift(HOLE, 500)), 3)), "crosses or leaves its polygon"),
    "4.3.4.4 hole across": (layer(feature(rings(SQUARE, shift(HOLE, 50)), 3)), "crosses or leaves its polygon"),
    "4.3.4.4 holes overlap": (layer(feature(rings(SQUARE, HOLE, shift(HOLE, 5)), 3)), "crosses or leaves its polygon"),
    "4.3.4.4 polygons overlap": (layer(feature(rings(SQUARE, shift(SQUARE, 50)), 3)), "polygons of it overlap"),
    "4.4 odd tags": (layer(feature(tags=(0, 0, 0)), keys=(b"a",), values=(TEXT,)), "3 tags, an odd number"),
    "4.4 key out of range": (layer(feature(tags=(1, 0)), keys=(b"a",), values=(TEXT,)), "points to key 1 of 1"),
    "4.4 value out of range": (layer(feature(tags=(0, 5)), keys=(b"a",), values=(TEXT,)), "points to value 5 of 1"),
    "4.4 key twice in a feature": (
        layer(feature(tags=(0, 0, 0, 1)), keys=(b"a",), values=(TEXT, number(7, 0))),
        "key 0 stands 2 times in its tags",
    ),
    "protobuf cut off": (layer(feature())[:-3], "runs over the end"),
    "protobuf varint too long": (b"\x1a" + b"\x80" * 10 + b"\x01", "more than 10 bytes"),
    "protobuf varint padded": (layer(feature(), more=b"\x78\x82\x00"), "longer than needed"),
    "protobuf wrong wire type": (number(3, 1), "has wire type 0, not 2"),
    "protobuf group": (b"\x0b", "has wire type 3"),
    "protobuf unknown field": (layer(feature(), more=number(9, 1)), "field 9 is not in the schema"),
    "protobuf 33 bits in 32": (layer(feature((9, 1 << 32, 0))), "does not fit in 32 bits"),
    "protobuf tags not packed": (layer(number(2, 0) + feature()), "field 2 has wire type 0"),
}


@pytest.mark.parametrize("rule", BAD)
def test_a_tile_that_breaks_a_rule_is_caught(rule: str) -> None:
    tile, expected = BAD[rule]
    found = violations(tile)
    assert any(expected in line for line in found), found


def test_ids_that_may_repeat_are_not_held_against_a_tile() -> None:
    assert violations(layer(feature(id_=7), feature(id_=7)), unique_ids=False) == []


def test_several_faults_are_all_told() -> None:
    tile = layer(feature(rings(SQUARE[::-1]), 3), feature((9, 2, 2), 2), version=1)
    assert len(violations(tile)) == 4


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_any_bytes_at_all_are_judged_and_never_crash(data: bytes) -> None:
    assert isinstance(violations(data), list)


@given(st.data())
@settings(max_examples=200)
def test_a_flipped_byte_never_crashes(data: st.DataObject) -> None:
    tile = bytearray(
        layer(feature(rings(SQUARE, HOLE), 3, (0, 0), 7), feature(), keys=(b"a",), values=(number(4, 1 << 40),))
    )
    tile[data.draw(st.integers(0, len(tile) - 1))] = data.draw(st.integers(0, 255))
    assert isinstance(violations(bytes(tile)), list)
    with contextlib.suppress(MvtError):
        decode_features(bytes(tile))


# -- reading ---------------------------------------------------------------------------------------------------------


def test_geometry_id_and_typed_attributes_are_read() -> None:
    values = [
        blob(1, "Käthe".encode()),
        b"\x15" + struct.pack("<f", 0.5),
        b"\x19" + struct.pack("<d", 0.1),
        number(4, (1 << 64) - 5),
        number(5, (1 << 64) - 1),
        number(6, zigzag(-(1 << 40))),
        number(7, 1),
    ]
    names = [b"s", b"f", b"d", b"i", b"u", b"z", b"b"]
    tags = [index for pair in zip(range(7), range(7), strict=True) for index in pair]
    tile = layer(
        feature(rings(SQUARE, HOLE, shift(SQUARE, 200)), 3, tags, (1 << 64) - 1),
        feature((9, 4, 4, 18, 0, 16, 16, 0, 9, 17, 17, 10, 4, 8), 2),
        feature((17, 10, 14, 3, 9)),
        keys=names,
        values=values,
    )
    assert violations(tile) == []
    polygon, line, points = decode_features(tile)
    assert (polygon.layer, polygon.id, polygon.type) == ("trees", (1 << 64) - 1, "Polygon")
    assert polygon.geometry.equals(shapely.MultiPolygon([(SQUARE, [HOLE]), (shift(SQUARE, 200), [])]))
    assert polygon.properties == {
        "s": "Käthe", "f": 0.5, "d": 0.1, "i": -5, "u": (1 << 64) - 1, "z": -(1 << 40), "b": True,
    }  # fmt: skip
    kinds = ["string", "float", "double", "int", "uint", "sint", "bool"]
    assert [polygon.kinds[name.decode()] for name in names] == kinds
    assert line.id is None
    assert line.geometry.wkt == "MULTILINESTRING ((2 2, 2 10, 10 10), (1 1, 3 5))"
    assert points.geometry.wkt == "MULTIPOINT ((5 7), (3 2))"


def test_what_is_no_tile_is_not_read() -> None:
    for tile in (b"\x0b", layer(feature((9, 2, 2), 2)), layer(feature(tags=(1, 1)))):
        with pytest.raises(MvtError):
            decode_features(tile)


# -- another encoder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_good_input_through_another_encoder_has_no_violation_and_comes_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = []
    for id_ in range(1, 60):
        at = rng.integers(0, 4000, 2)
        angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
        ring = np.round(at + np.stack((np.cos(angles), np.sin(angles)), axis=1) * rng.integers(30, 90))
        shape = [
            shapely.Point(at),
            shapely.LineString([at, at + 50, at + np.array((80, 20))]),
            shapely.Polygon(ring),
            shapely.Polygon(ring, [np.round(at + (ring - at) * 0.5)]),
            shapely.MultiPoint([at, at + 3]),
        ][id_ % 5]
        features.append(
            {"geometry": shape, "properties": {"n": id_, "even": id_ % 2 == 0, "name": f"f{id_}"}, "id": id_}
        )
    tile = mapbox_vector_tile.encode([{"name": "things", "features": features}], default_options={"y_coord_down": True})
    assert violations(tile) == []
    read = {feature.id: feature for feature in decode_features(tile)}
    assert len(read) == 59
    for feature in features:
        assert read[feature["id"]].properties == feature["properties"]
        assert read[feature["id"]].geometry.equals(feature["geometry"])
