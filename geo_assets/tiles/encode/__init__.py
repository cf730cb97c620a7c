"""The encoder: features and tiles in, Mapbox Vector Tiles 2.1 out. Same features and layers, same bytes.

Here is the whole way of a batch; its steps are modules of their own: `mercator` and `shapes` bring geometries in,
`grid` draws them into tiles, `tags` turns attributes into codes, `framing` turns all of it into bytes. Whether a
feature shows at a zoom is not decided here: the pairs say what shows where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import msgspec
import numpy as np

from geo_assets.tiles.encode import few
from geo_assets.tiles.encode.framing import Features, frame
from geo_assets.tiles.encode.grid import Draw, Place, draw, simplify
from geo_assets.tiles.encode.mercator import world
from geo_assets.tiles.encode.ragged import Bools, Ints, spread, where
from geo_assets.tiles.encode.shapes import Geometries, Shapes, concatenate, geos, shapes_of_wkb
from geo_assets.tiles.encode.tags import ID_PROPERTY, Tags, parse, tags
from geo_assets.tiles.encode.varint import Unsigned
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import Tile

ENCODER_VERSION = "1"
"""Part of the recipe: raised with every change that can change a tile's bytes."""

CHUNK_COORDINATES = 250_000
"""Coordinates drawn at once: some tens of MB of arrays. A batch is cut between tiles; its bytes do not show where."""

__all__ = ["ENCODER_VERSION", "ID_PROPERTY", "EncodedTile", "LeftOut", "TileFeatures", "encode_tiles"]


@dataclass(frozen=True, slots=True)
class TileFeatures:
    """The features of many tiles, each distinct feature once, and which tile shows which.

    `source`, `feature_id` (JSON text), `layer`, `geometry` (WKB or an array of geometries, EPSG:4326 lon/lat) and
    `properties` (JSON text of an object) are columns of rows. Tile `tiles[pair_tile[i]]` shows row `pair_row[i]`; the
    order of rows and pairs is free and does not show in the bytes.
    """

    source: Sequence[str]
    feature_id: Sequence[str]
    layer: Sequence[str]
    geometry: Sequence[bytes | None] | Geometries
    properties: Sequence[str]
    tiles: Sequence[Tile]
    pair_tile: Ints
    pair_row: Ints


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A feature that could not be encoded in a tile, and why; the tile is there without it."""

    source: str
    feature_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EncodedTile:
    """A tile's bytes.

    Args:
        tile: Which tile.
        data: Uncompressed MVT; b"" when nothing shows.
        features: Features in it; a collection of several geometry types counts one a type.
        left_out: Features that should show and cannot be encoded, sorted.
        extent: Lowest x, y and highest x, y of its coordinates in tile units, y down; None when empty.
    """

    tile: Tile
    data: bytes
    features: int
    left_out: tuple[LeftOut, ...]
    extent: tuple[int, int, int, int] | None


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
    rows = _Rows(features, layers, draw)
    pair_tile = np.asarray(features.pair_tile, np.int64)
    pair_row = np.asarray(features.pair_row, np.int64)
    if len(pair_tile) and (pair_tile[1:] < pair_tile[:-1]).any():
        order = np.argsort(pair_tile, kind="stable")
        pair_tile, pair_row = pair_tile[order], pair_row[order]
    result: list[EncodedTile] = []
    rows.simplify(np.array([tile.z for tile in features.tiles], np.int64)[pair_tile], pair_row)
    bounds = np.searchsorted(pair_tile, np.arange(len(features.tiles) + 1))
    for first, last in _chunks(bounds, np.concatenate([[0], rows.vertices[pair_row].cumsum()])):
        pairs = slice(int(bounds[first]), int(bounds[last]))
        result += rows.encode(features.tiles[first:last], pair_tile[pairs] - first, pair_row[pairs])
    return result


def _encode_few(features: TileFeatures, layers: LayerSet, draw: Draw = draw) -> EncodedTile:
    """`encode_tiles` of one tile with few features: geometries as arrays, everything else one by one."""
    (tile,) = features.tiles
    shown: list[int] = np.asarray(features.pair_row).tolist()
    properties, wrong = parse([features.properties[row] for row in shown])
    column = features.geometry
    shapes, of, faults = _shapes_of_column(
        column[shown] if isinstance(column, np.ndarray) else [column[row] for row in shown]
    )
    numbers = {name: number for number, name in enumerate(layers.names)}
    layer = [numbers.get(features.layer[row], -1) for row in shown]
    for pair, number in enumerate(layer):
        if number < 0:
            faults[pair] = _unknown_layer(features.layer[shown[pair]])
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
            tags_of.append(few.own_tags(properties[pair], choice, _value(own_id) if is_text else None))
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
        _sorted(LeftOut(features.source[row], features.feature_id[row], reason) for row, reason in left_out),
        box,
    )


def _chunks(bounds: Ints, work: Ints) -> Iterator[tuple[int, int]]:
    """Tiles first..last to draw at once: as many as stay below the limit, and at least one."""
    done = work[bounds]
    first = 0
    while first < len(done) - 1:
        limit = int(done[first]) + CHUNK_COORDINATES
        last = int(done.searchsorted(limit, side="right")) - 1
        last = max(first + 1, last)
        yield first, last
        first = last


class _Rows:
    """The distinct features of a batch, made ready once: shapes, tags, ids, order, and what is wrong with which."""

    def __init__(self, features: TileFeatures, layers: LayerSet, draw: Draw) -> None:
        self.features = features
        self.draw = draw
        self.layers = layers
        count = len(features.source)
        self.faults: dict[int, str] = {}
        number = {name: position for position, name in enumerate(layers.names)}
        number = {name: number.get(name, -1) for name in set(features.layer)}
        self.layer: Ints = np.array(list(map(number.__getitem__, features.layer)), np.int64)
        unknown: list[int] = where(self.layer < 0).tolist()
        for row in unknown:
            self.faults[row] = _unknown_layer(features.layer[row])
        self.shapes, self.item_row, errors = _shapes_of_column(features.geometry)
        self.faults = errors | self.faults
        self.vertices: Ints = np.bincount(
            self.item_row, weights=np.diff(self.shapes.item_points()), minlength=count
        ).astype(np.int64)
        self.ids, self.has_id, other, self.rank = _identify(features.source, features.feature_id)
        properties, wrong = parse(features.properties)
        self.faults |= wrong
        allowed = [None if layer.attributes is None else frozenset(layer.attributes) for layer in layers.layers]
        self.tags: Tags = tags(properties, np.maximum(self.layer, 0), allowed, other)
        self.sound = np.ones(count, np.bool_)
        self.sound[list(self.faults)] = False
        self.tolerance = np.array([layer.simplify for layer in layers.layers])
        self.names = [name.encode() for name in layers.names]
        # Items by row, to find those of a pair.
        if len(self.item_row) and (self.item_row[1:] < self.item_row[:-1]).any():
            order = np.argsort(self.item_row, kind="stable")
            self.shapes, self.item_row = self.shapes.take(order), self.item_row[order]
        self.items: Ints = np.searchsorted(self.item_row, np.arange(count + 1))
        self.simplified: dict[int, tuple[Shapes, Ints]] = {}

    def simplify(self, zoom: Ints, row: Ints) -> None:
        """Simplify, once a zoom, the items of those rows that show at it.

        Args:
            zoom: (pairs) zoom of the tile.
            row: (pairs) row that shows in it.
        """
        if not self.tolerance.any():
            return
        coarse = (self.tolerance > 0)[self.layer[row]] & self.sound[row] & (zoom < self.layers.max_zoom)
        for level in np.unique(zoom[coarse]).tolist():
            wanted = np.zeros(len(self.rank), np.bool_)
            wanted[row[coarse & (zoom == level)]] = True
            index = where(wanted[self.item_row])
            simple, of = simplify(self.shapes, index, self.tolerance[self.layer[self.item_row[index]]], level)
            if len(of):
                number = np.full(len(self.shapes), -1, np.int64)
                number[index[of]] = np.arange(len(of))
                self.simplified[level] = simple, number

    def encode(self, tiles: Sequence[Tile], pair_tile: Ints, pair_row: Ints) -> list[EncodedTile]:
        """Encode some of the tiles; `pair_tile` counts from the first of them and ascends."""
        left_out: list[list[LeftOut]] = [[] for _ in tiles]
        if self.faults:
            wrong: list[int] = where(~self.sound[pair_row]).tolist()
            for pair in wrong:
                row = int(pair_row[pair])
                left_out[int(pair_tile[pair])].append(self._left_out(row, self.faults[row]))
            sound = self.sound[pair_row]
            pair_tile, pair_row = pair_tile[sound], pair_row[sound]
        place = np.array([(tile.z, tile.x, tile.y) for tile in tiles], np.int64).reshape(-1, 3)

        # From here on a pair is of an item: a collection has up to three.
        counts = self.items[pair_row + 1] - self.items[pair_row]
        item = self.items[pair_row]
        if (counts != 1).any():
            item = spread(item, counts)
            pair_tile, pair_row = pair_tile.repeat(counts), pair_row.repeat(counts)
        zoom = place[pair_tile, 0]
        shapes, drawn_item = self._at_zooms(item, zoom)
        drawn = self.draw(shapes, drawn_item, Place.of(place[pair_tile], self.layers.extent), buffer=self.layers.buffer)
        for pair, reason in drawn.faults:
            left_out[int(pair_tile[pair])].append(self._left_out(int(pair_row[pair]), reason))

        row, tile = pair_row[drawn.pair], pair_tile[drawn.pair]
        group = tile * len(self.names) + self.layer[row]
        order = np.argsort((group * len(self.rank) + self.rank[row]) * 4 + drawn.shapes.kind, kind="stable")
        ordered = drawn.shapes.take(order, drawn.turned)
        features = Features(group[order], row[order], ordered)
        groups = len(tiles) * len(self.names)
        messages = frame(
            features, groups, self.tags, self.ids, self.has_id, self.names * len(tiles), self.layers.extent
        )
        in_tile = np.searchsorted(tile[order], np.arange(len(tiles) + 1))
        boxes = _boxes(ordered, in_tile)
        step = len(self.names)
        return [
            EncodedTile(
                each_tile,
                b"".join(messages[number * step : number * step + step]),
                int(in_tile[number + 1] - in_tile[number]),
                _sorted(left_out[number]),
                boxes[number],
            )
            for number, each_tile in enumerate(tiles)
        ]

    def _at_zooms(self, item: Ints, zoom: Ints) -> tuple[Shapes, Ints]:
        """The shapes to draw, simplified where their layer asks for it, and which of them each pair draws."""
        parts = [self.shapes]
        drawn = item.copy()
        base = len(self.shapes)
        for level, (simple, number) in self.simplified.items():
            of = where(zoom == level)
            replaced = number[item[of]]
            found = replaced >= 0
            if found.any():
                drawn[of[found]] = base + replaced[found]
                parts.append(simple)
                base += len(simple)
        return concatenate(parts), drawn

    def _left_out(self, row: int, reason: str) -> LeftOut:
        return LeftOut(self.features.source[row], self.features.feature_id[row], reason)


def _shapes_of_column(column: Sequence[bytes | None] | Geometries) -> tuple[Shapes, Ints, dict[int, str]]:
    """Shapes in fractions of the world's side, the row of each, and by row what is wrong with its geometry."""
    rows: Sequence[bytes | None] = (
        geos.to_wkb(column, output_dimension=2).tolist() if isinstance(column, np.ndarray) else column
    )
    shapes, row, errors = shapes_of_wkb(rows)
    return shapes.moved(world(shapes.xy)), row, errors


def _unknown_layer(name: str) -> str:
    return f"layer {name!r} is none of the map's layers"


def _sorted(left_out: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    return tuple(sorted(left_out, key=lambda left: (left.source, left.feature_id, left.reason)))


def _identify(source: Sequence[str], feature_id: Sequence[str]) -> tuple[Unsigned, Bools, dict[int, Any], Ints]:
    """MVT ids, which rows have one, by row the ids that have not, and the rank of each row by source and id."""
    count = len(feature_id)
    is_number = np.array([text.isdecimal() and len(text) <= few.DIGITS for text in feature_id], np.bool_)
    other: dict[int, Any] = {}
    digits = list(feature_id)
    if not is_number.all():
        digits = [text if number else "0" for text, number in zip(digits, is_number.tolist(), strict=True)]
    numbers = list(map(int, digits))
    if numbers and (max(numbers) >= 1 << 64 or list(map(str, numbers)) != digits):
        # Digits that no JSON number is written with, or one that is no uint64: a text of its own.
        plain = [value < 1 << 64 and str(value) == text for value, text in zip(numbers, digits, strict=True)]
        is_number &= np.array(plain, np.bool_)
        numbers = [value if good else 0 for value, good in zip(numbers, plain, strict=True)]
    ids = np.array(numbers, np.uint64)
    sources = {name: position for position, name in enumerate(sorted(set(source)))}
    of_source = np.array(list(map(sources.__getitem__, source)), np.int64)
    text_rank = np.zeros(count, np.int64)
    texts: list[int] = where(~is_number).tolist()
    if texts:
        for row in texts:
            other[row] = _value(feature_id[row])
        place = {text: position for position, text in enumerate(sorted({feature_id[row] for row in texts}), start=1)}
        text_rank[texts] = [place[feature_id[row]] for row in texts]
    rank = np.empty(count, np.int64)
    rank[np.lexsort((ids, text_rank, of_source))] = np.arange(count)
    return ids, is_number, other, rank


def _value(text: str) -> Any:
    """The value of an id's JSON text; text that is no JSON stands for itself."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return text
    return text if value is None else value


def _boxes(shapes: Shapes, in_tile: Ints) -> list[tuple[int, int, int, int] | None]:
    """Lowest and highest coordinates of each tile."""
    result: list[tuple[int, int, int, int] | None] = [None] * (len(in_tile) - 1)
    starts = shapes.item_points()[in_tile]
    full = where(starts[1:] > starts[:-1])
    if len(full):
        low = np.minimum.reduceat(shapes.xy, starts[full])
        high = np.maximum.reduceat(shapes.xy, starts[full])
        for number, box in zip(full.tolist(), np.hstack([low, high]).astype(np.int64).tolist(), strict=True):
            result[number] = (box[0], box[1], box[2], box[3])
    return result
