"""The encoder: features and tiles in, Mapbox Vector Tiles 2.1 out. Same features and layers, same bytes.

Here is the whole way of a batch; its steps are modules of their own: `mercator` and `shapes` bring geometries in,
`grid` draws them into tiles, `tags` turns attributes into codes, `framing` turns all of it into bytes. Whether a
feature shows at a zoom is not decided here: the pairs say what shows where.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, islice
from typing import Any

import numpy as np

from geo_assets.tiles.encode import few
from geo_assets.tiles.encode.grid import Draw, Place, draw, simplify
from geo_assets.tiles.encode.ragged import Ints
from geo_assets.tiles.encode.records import EncodedTile, LeftOut, TileFeatures, in_order
from geo_assets.tiles.encode.rows import Rows, id_value, shapes_of_column, unknown_layer
from geo_assets.tiles.encode.shapes import concatenate
from geo_assets.tiles.encode.tags import ID_PROPERTY, parse
from geo_assets.tiles.layers import LayerSet

ENCODER_VERSION = "2"
"""Part of the recipe: raised with every change that can change a tile's bytes."""

CHUNK_COORDINATES = 250_000
"""Coordinates drawn at once: some tens of MB of arrays. A batch is cut between tiles; its bytes do not show where."""

__all__ = ["ENCODER_VERSION", "ID_PROPERTY", "EncodedTile", "LeftOut", "TileFeatures", "encode_tiles"]


def encode_tiles(features: TileFeatures, layers: LayerSet, draw: Draw = draw) -> list[EncodedTile]:
    """Encode a batch of tiles.

    A tile has the same bytes alone, in any batch, and under any order of rows and pairs: its features are sorted by
    source and id, its tables of keys and values by content, and nothing is decided by what else is in the batch.

    A geometry collection becomes one feature for each geometry type in it, with the same id and attributes. Ids that
    are a uint64 become the MVT id; all others are the property `ID_PROPERTY`. What collapses at a zoom is not drawn
    there and is no fault; what cannot be drawn is in `left_out`.

    Args:
        features: Columns of features and the pairs that say which tile shows which.
        layers: The layers, in drawing order, and the grid.
        draw: The engine that clips, rounds and mends geometries; this package's own unless told otherwise.

    Returns:
        One tile for each of `features.tiles`, in their order.
    """
    if len(features.tiles) == 1 and max(len(features.pair_row), len(features.source)) <= few.FEATURES:
        return [_encode_few(features, layers, draw)]
    return _encode_many(features, layers, draw)


def _encode_many(features: TileFeatures, layers: LayerSet, draw: Draw = draw) -> list[EncodedTile]:
    """`encode_tiles` with arrays: any number of tiles and features."""
    rows = Rows(features, layers, draw)
    return [tile for piece in rows.pieces(CHUNK_COORDINATES) for tile in rows.encode(*piece)]


def _encode_few(features: TileFeatures, layers: LayerSet, draw: Draw = draw) -> EncodedTile:
    """`encode_tiles` of one tile with few features: geometries as arrays, everything else one by one."""
    (tile,) = features.tiles
    shown: list[int] = np.asarray(features.pair_row).tolist()
    properties, wrong = parse([features.properties[row] for row in shown])
    column = features.geometry
    shapes, of, faults = shapes_of_column(
        column[shown] if isinstance(column, np.ndarray) else [column[row] for row in shown]
    )
    numbers = {name: number for number, name in enumerate(layers.names)}
    layer = [numbers.get(features.layer[row], -1) for row in shown]
    for pair, number in enumerate(layer):
        if number < 0:
            faults[pair] = unknown_layer(features.layer[shown[pair]])
    faults |= wrong
    owner: list[int] = of.tolist()
    item: Ints | None = None
    if faults:
        sound = [position for position, pair in enumerate(owner) if pair not in faults]
        if len(sound) < len(owner):
            owner = [owner[position] for position in sound]
            shapes = shapes.take(np.array(sound, np.int64))
    if tile.z < layers.max_zoom:
        tolerance = [layers.layers[layer[pair]].simplify for pair in owner]
        if any(tolerance):
            simple, which = simplify(shapes, np.arange(len(owner)), np.array(tolerance), tile.z)
            if len(which):
                item = np.arange(len(owner))
                item[which] = np.arange(len(owner), len(owner) + len(which))
                shapes = concatenate([shapes, simple])
    drawn = draw(shapes, item, Place.at(tile.z, tile.x, tile.y, layers.extent), buffer=layers.buffer)
    left_out = [(shown[pair], reason) for pair, reason in faults.items()]
    left_out += ((shown[owner[position]], reason) for position, reason in drawn.faults)

    # As the arrays' way sorts: by layer, source, id (numbers before texts), row and kind of geometry.
    found: list[tuple[int, str, bool, Any, int, int, int, int]] = []
    drawn_of: list[int] = drawn.pair.tolist()
    kinds: list[int] = drawn.shapes.kind.tolist()
    for position, (of_item, kind) in enumerate(zip(drawn_of, kinds, strict=True)):
        pair = owner[of_item]
        row = shown[pair]
        text = features.feature_id[row]
        mvt_id = few.own_id(text)
        is_text, identity = (True, text) if mvt_id is None else (False, mvt_id)
        found.append((layer[pair], features.source[row], is_text, identity, row, kind, position, pair))
    found.sort()
    shapes = drawn.shapes.take(np.array([each[6] for each in found], np.int64), drawn.turned)
    paths = iter(few.commands(shapes))
    parts: list[bytes] = []
    for number, group in groupby(found, key=lambda each: each[0]):
        allowed = layers.layers[number].attributes
        choice = None if allowed is None else frozenset(allowed)
        ids: list[int | None] = []
        tags_of: list[Mapping[str, Any]] = []
        kinds = []
        for _, _, is_text, own_id, _, kind, _, pair in group:
            ids.append(None if is_text else own_id)
            tags_of.append(few.own_tags(properties[pair], choice, id_value(own_id) if is_text else None))
            kinds.append(kind)
        parts.append(
            few.frame_layer(
                layers.names[number].encode(), ids, tags_of, kinds, list(islice(paths, len(ids))), layers.extent
            )
        )
    box: tuple[int, int, int, int] | None = None
    if found:
        west, north = shapes.xy.min(axis=0).tolist()
        east, south = shapes.xy.max(axis=0).tolist()
        box = int(west), int(north), int(east), int(south)
    return EncodedTile(
        tile,
        b"".join(parts),
        len(found),
        in_order(LeftOut(features.source[row], features.feature_id[row], reason) for row, reason in left_out),
        box,
    )
