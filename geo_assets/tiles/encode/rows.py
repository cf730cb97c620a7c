"""The distinct features of a batch, made ready once and drawn into its tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from geo_assets.tiles.encode import few
from geo_assets.tiles.encode.framing import Features, frame
from geo_assets.tiles.encode.grid import Draw, Place, simplify
from geo_assets.tiles.encode.mercator import world
from geo_assets.tiles.encode.ragged import Bools, Ints, spread, where
from geo_assets.tiles.encode.records import EncodedTile, LeftOut, TileFeatures, in_order
from geo_assets.tiles.encode.shapes import Geometries, Shapes, concatenate, geos, shapes_of_wkb
from geo_assets.tiles.encode.tags import Tags, parse, tags
from geo_assets.tiles.encode.varint import Unsigned
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import Tile

_FEW_SIMPLIFIED = 64
"""Items, each counted once a zoom, up to which those of all zooms are simplified at once."""


@dataclass(frozen=True, slots=True)
class DrawnItems:
    """What tiles show, in the order in which it is written: by tile, layer, source, id and kind of geometry."""

    tile: Ints
    row: Ints
    shapes: Shapes
    """Whole coordinates, rings turned as they are written."""
    left_out: list[tuple[int, int, str]]
    """Tile, row and why: features that should show and cannot be encoded."""


class Rows:
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
            self.faults[row] = unknown_layer(features.layer[row])
        self.shapes, self.item_row, errors = shapes_of_column(features.geometry)
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
        self.simplified: list[tuple[Shapes, dict[int, Ints]]] = []
        """Simplified items, and by zoom the number of each item among them, -1 for one that stays what it is."""

    def simplify(self, zoom: Ints, row: Ints) -> None:
        """Simplify, once a zoom, the items of those rows that show at it.

        Args:
            zoom: (pairs) zoom of the tile.
            row: (pairs) row that shows in it.
        """
        if not self.tolerance.any():
            return
        coarse = (self.tolerance > 0)[self.layer[row]] & self.sound[row] & (zoom < self.layers.max_zoom)
        levels: list[int] = sorted(set(zoom[coarse].tolist()))
        items: list[Ints] = []
        for level in levels:
            wanted = np.zeros(len(self.rank), np.bool_)
            wanted[row[coarse & (zoom == level)]] = True
            items.append(where(wanted[self.item_row]))
        # A few features of one edit: one call for all zooms costs as much as one for each.
        few = sum(map(len, items)) <= _FEW_SIMPLIFIED
        for numbers in [range(len(levels))] if few and levels else [range(at, at + 1) for at in range(len(levels))]:
            index = np.concatenate([items[at] for at in numbers])
            of_level = np.array([levels[at] for at in numbers], np.int64).repeat([len(items[at]) for at in numbers])
            simple, of = simplify(self.shapes, index, self.tolerance[self.layer[self.item_row[index]]], of_level)
            if not len(of):
                continue
            found: dict[int, Ints] = {}
            for level in sorted(set(of_level[of].tolist())):
                here = where(of_level[of] == level)
                found[level] = np.full(len(self.shapes), -1, np.int64)
                found[level][index[of[here]]] = here
            self.simplified.append((simple, found))

    def pieces(self, coordinates: int) -> Iterator[tuple[Sequence[Tile], Ints, Ints]]:
        """Cut the batch between tiles: the tiles to draw at once, and their pairs as `drawn` takes them.

        Args:
            coordinates: Most coordinates of a piece; a tile that has more is a piece of its own.
        """
        tiles = self.features.tiles
        pair_tile = np.asarray(self.features.pair_tile, np.int64)
        pair_row = np.asarray(self.features.pair_row, np.int64)
        if len(pair_tile) and (pair_tile[1:] < pair_tile[:-1]).any():
            order = np.argsort(pair_tile, kind="stable")
            pair_tile, pair_row = pair_tile[order], pair_row[order]
        self.simplify(np.array([tile.z for tile in tiles], np.int64)[pair_tile], pair_row)
        bounds = np.searchsorted(pair_tile, np.arange(len(tiles) + 1))
        done = np.concatenate([[0], self.vertices[pair_row].cumsum()])[bounds]
        first = 0
        while first < len(tiles):
            last = max(first + 1, int(done.searchsorted(int(done[first]) + coordinates, side="right")) - 1)
            pairs = slice(int(bounds[first]), int(bounds[last]))
            yield tiles[first:last], pair_tile[pairs] - first, pair_row[pairs]
            first = last

    def drawn(self, tiles: Sequence[Tile], pair_tile: Ints, pair_row: Ints) -> DrawnItems:
        """Draw some of the tiles; `pair_tile` counts from the first of them and ascends."""
        left_out: list[tuple[int, int, str]] = []
        if self.faults:
            wrong: list[int] = where(~self.sound[pair_row]).tolist()
            for pair in wrong:
                row = int(pair_row[pair])
                left_out.append((int(pair_tile[pair]), row, self.faults[row]))
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
        left_out += ((int(pair_tile[pair]), int(pair_row[pair]), reason) for pair, reason in drawn.faults)

        row, tile = pair_row[drawn.pair], pair_tile[drawn.pair]
        group = tile * len(self.names) + self.layer[row]
        order = np.argsort((group * len(self.rank) + self.rank[row]) * 4 + drawn.shapes.kind, kind="stable")
        return DrawnItems(tile[order], row[order], drawn.shapes.take(order, drawn.turned), left_out)

    def encode(self, tiles: Sequence[Tile], pair_tile: Ints, pair_row: Ints) -> list[EncodedTile]:
        """Encode some of the tiles; `pair_tile` counts from the first of them and ascends."""
        drawn = self.drawn(tiles, pair_tile, pair_row)
        left_out: list[list[LeftOut]] = [[] for _ in tiles]
        for number, row, reason in drawn.left_out:
            left_out[number].append(self.left_out(row, reason))
        step = len(self.names)
        features = Features(drawn.tile * step + self.layer[drawn.row], drawn.row, drawn.shapes)
        messages = frame(
            features, len(tiles) * step, self.tags, self.ids, self.has_id, self.names * len(tiles), self.layers.extent
        )
        in_tile = np.searchsorted(drawn.tile, np.arange(len(tiles) + 1))
        boxes = _boxes(drawn.shapes, in_tile)
        return [
            EncodedTile(
                tile,
                b"".join(messages[number * step : number * step + step]),
                int(in_tile[number + 1] - in_tile[number]),
                in_order(left_out[number]),
                boxes[number],
            )
            for number, tile in enumerate(tiles)
        ]

    def _at_zooms(self, item: Ints, zoom: Ints) -> tuple[Shapes, Ints]:
        """The shapes to draw, simplified where their layer asks for it, and which of them each pair draws."""
        parts = [self.shapes]
        drawn = item.copy()
        base = len(self.shapes)
        for simple, numbers in self.simplified:
            used = False
            for level, number in numbers.items():
                of = where(zoom == level)
                replaced = number[item[of]]
                found = replaced >= 0
                if found.any():
                    drawn[of[found]] = base + replaced[found]
                    used = True
            if used:
                parts.append(simple)
                base += len(simple)
        return concatenate(parts), drawn

    def left_out(self, row: int, reason: str) -> LeftOut:
        """A row that cannot be encoded, and why."""
        return LeftOut(self.features.source[row], self.features.feature_id[row], reason)


def shapes_of_column(column: Sequence[bytes | None] | Geometries) -> tuple[Shapes, Ints, dict[int, str]]:
    """Shapes in fractions of the world's side, the row of each, and by row what is wrong with its geometry."""
    rows: Sequence[bytes | None] = (
        geos.to_wkb(column, output_dimension=2).tolist() if isinstance(column, np.ndarray) else column
    )
    shapes, row, errors = shapes_of_wkb(rows)
    return shapes.moved(world(shapes.xy)), row, errors


def unknown_layer(name: str) -> str:
    """What is wrong with a feature of that layer."""
    return f"layer {name!r} is none of the map's layers"


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
            other[row] = id_value(feature_id[row])
        place = {text: position for position, text in enumerate(sorted({feature_id[row] for row in texts}), start=1)}
        text_rank[texts] = [place[feature_id[row]] for row in texts]
    rank = np.empty(count, np.int64)
    rank[np.lexsort((ids, text_rank, of_source))] = np.arange(count)
    return ids, is_number, other, rank


def id_value(text: str) -> Any:
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
