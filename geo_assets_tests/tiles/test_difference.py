from __future__ import annotations

import json

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.tiles.decode import DecodeError, decode
from geo_assets.tiles.difference import difference
from geo_assets.tiles.encode import TileFeatures, encode_tiles
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.tileset import Contents, glance, layer_messages

HERE = Tile(14, 9327, 4741)
LAYERS = LayerSet((Layer("buildings"), Layer("pois")))


def tile(*features: tuple[str, int | str, float, dict[str, object]]) -> bytes:
    """Squares: layer, id, place from the west edge as a fraction of the side, attributes."""
    west, south, east, north = HERE.bounds
    side = east - west
    boxes = [
        shapely.box(west + at * side, south, west + (at + 0.05) * side, (south + north) / 2) for _, _, at, _ in features
    ]
    (encoded,) = encode_tiles(
        TileFeatures(
            source=["s"] * len(features),
            feature_id=[json.dumps(number) for _, number, _, _ in features],
            layer=[layer for layer, *_ in features],
            geometry=[shapely.to_wkb(box) for box in boxes],
            properties=[json.dumps(attributes) for *_, attributes in features],
            tiles=[HERE],
            pair_tile=np.zeros(len(features), np.int64),
            pair_row=np.arange(len(features), dtype=np.int64),
        ),
        LAYERS,
    )
    return encoded.data


def test_features_are_told_apart_by_layer_and_id() -> None:
    before = tile(
        ("buildings", 1, 0.1, {"floors": 1}), ("buildings", 2, 0.3, {}), ("buildings", "ä", 0.5, {"name": "x"}),
        ("buildings", 5, 0.9, {"a": 1}), ("pois", 1, 0.1, {}),
    )  # fmt: skip
    after = tile(
        ("buildings", 1, 0.1, {"floors": 2}), ("buildings", "ä", 0.6, {"name": "y"}), ("buildings", 4, 0.8, {}),
        ("buildings", 5, 0.9, {"a": 1.5}), ("pois", 1, 0.1, {}),
    )  # fmt: skip
    found = difference(before, after)
    assert [(change.layer, change.id, change.kind, change.what) for change in found.changes] == [
        ("buildings", 1, "changed", ("floors",)),
        ("buildings", 2, "removed", ()),
        ("buildings", 4, "added", ()),
        ("buildings", 5, "changed", ("a",)),
        ("buildings", "ä", "changed", ("geometry", "name")),
    ]
    assert found.counts() == {"buildings": {"added": 1, "removed": 1, "changed": 3}}
    assert found.notes == ()


def test_a_layer_that_comes_or_goes_is_all_of_its_features() -> None:
    one, both = tile(("buildings", 1, 0.1, {})), tile(("buildings", 1, 0.1, {}), ("pois", 7, 0.2, {}))
    assert [(c.layer, c.kind) for c in difference(one, both).changes] == [("pois", "added")]
    assert [(c.layer, c.kind) for c in difference(both, one).changes] == [("pois", "removed")]
    assert difference(b"", one).counts() == {"buildings": {"added": 1, "removed": 0, "changed": 0}}
    assert difference(one, b"").counts() == {"buildings": {"added": 0, "removed": 1, "changed": 0}}


def test_other_bytes_of_the_same_features_are_said_so() -> None:
    data = tile(("buildings", 1, 0.1, {"a": 1}), ("pois", 1, 0.2, {}))
    first, second = layer_messages(data)
    swapped = difference(data, second + first)
    assert (swapped.changes, swapped.notes) == ((), ("the same features in other bytes",))
    unknown_field = data + b"\x98\x06\x01"
    assert difference(data, unknown_field).notes
    assert difference(data, data).notes == ()


def test_what_is_no_tile_is_an_error() -> None:
    with pytest.raises(DecodeError):
        difference(tile(("buildings", 1, 0.1, {})), b"\x1a\xff")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["buildings", "pois"]),
            st.one_of(st.integers(0, 2**64 - 1), st.text(max_size=3)),
            st.floats(0, 0.9),
            st.dictionaries(
                st.text(max_size=3), st.one_of(st.integers(0, 9), st.booleans(), st.text(max_size=2)), max_size=3
            ),
        ),
        max_size=6,
        unique_by=lambda one: json.dumps(one[1]),
    )
)
def test_a_glance_sees_what_a_whole_decode_sees(features) -> None:
    data = tile(*features) if features else b""
    layers = decode(data)
    assert [(name, count) for name, _, count in glance(data)] == [(one.name, len(one.features)) for one in layers]
    for (_, keys, _), layer in zip(glance(data), layers, strict=True):
        assert set(keys) == {key for one in layer.features for key in one.properties}
    assert b"".join(layer_messages(data)) == data
    assert difference(data, data).changes == ()
    contents = Contents()
    if data:
        contents.add(data, {14: 3, 15: 1})
        for layer in layers:
            holds = contents.layers[layer.name]
            assert (holds.min_zoom, holds.max_zoom, holds.tiles, holds.features) == (14, 15, 4, 4 * len(layer.features))
            assert None not in holds.fields.values()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_a_glance_at_any_bytes_is_an_answer_or_a_decode_error(data: bytes) -> None:
    for look in (glance, layer_messages):
        try:
            look(data)
        except DecodeError:
            continue
