"""From the feature store to encoded tiles: all features of a batch anew, or only those that changed since last time.

Both give the same tiles. Which features a tile is made of is known by their digests, and so is its work key: a feature
that changes between two reads is never taken for what it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from geo_assets.services import engines
from geo_assets.services.recipe import current_recipe
from geo_assets.tiles import workkey
from geo_assets.tiles.encode import EncodedTile, TileFeatures
from geo_assets.tiles.encode.assembly import EncodedFeatures, encode_features
from geo_assets.tiles.encode.cache import EncodedCache
from geo_assets.tiles.tile import Tile
from resources.feature_store.protocol import FeatureRows, TileBox, TileDigests, TileFeatureRows

if TYPE_CHECKING:
    from geo_assets.stack import Stack

KEPT_FROM = 48
"""Features from which a tile's are kept: with fewer, encoding all of them takes no longer than finding what changed."""

ANEW_SHARE = 0.5
"""Share of a tile's features from which it is cheaper to read and encode all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """What one tile shows, by digests alone."""

    digest: npt.NDArray[np.uint8]
    """(features, 16)."""
    number: npt.NDArray[np.int64]
    """(features) the store's own numbers."""
    vertices_each: npt.NDArray[np.int64]
    """(features)"""
    time_each: npt.NDArray[np.int64]
    """(features) event time, milliseconds since the epoch, UTC."""
    vertices: int
    data_time_ms: int
    """Newest of the event times, 0 where there is none."""
    source_digest: str = ""
    """Of these digests, where it is known already."""


@dataclass(frozen=True, slots=True)
class Made:
    """An encoded tile, and what it was made of."""

    encoded: EncodedTile
    source_digest: str
    vertices: int
    data_time_ms: int
    """Newest event time of its features, milliseconds since the epoch, UTC."""


def shown_of(digests: TileDigests) -> list[Shown]:
    """The answer for each box that was asked for."""
    bounds: list[int] = digests.pair_tile.searchsorted(np.arange(len(digests.data_time_ms) + 1)).tolist()
    return [
        Shown(
            digests.pair_digest[first:last],
            digests.pair_number[first:last],
            digests.pair_vertices[first:last],
            digests.pair_time_ms[first:last],
            int(digests.pair_vertices[first:last].sum()),
            int(digests.data_time_ms[number]),
        )
        for number, (first, last) in enumerate(pairwise(bounds))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What is kept of a tile, held against what it shows."""

    kept: EncodedFeatures
    stay: npt.NDArray[np.bool_]
    """(features kept) which it still shows."""
    missing: npt.NDArray[np.int64]
    """Positions of those that it shows and that are not kept."""
    vertices: int
    """Of those."""


def match(stack: Stack, key: str, shown: Shown, cache: EncodedCache) -> Match | None:
    """What a build of a tile has to read and encode; None where nothing is kept of it.

    Args:
        stack: The ports; its engine is the encoder itself.
        key: Partition key of the tile.
        shown: What it shows.
        cache: What is kept.
    """
    kept = cache.get(current_recipe(stack.layers), key)
    return None if kept is None else _match(kept, shown)


def _match(kept: EncodedFeatures, shown: Shown) -> Match:
    stay, missing = kept.match(shown.digest)
    return Match(kept, stay, missing, int(shown.vertices_each[missing].sum()))


def anew(
    stack: Stack, boxes: Sequence[TileBox], tiles: Sequence[Tile], cache: EncodedCache | None = None
) -> list[Made]:
    """Read and encode all features of some tiles.

    Args:
        stack: The ports.
        boxes: Of the tiles.
        tiles: Which.
        cache: Where to keep their features for `again`.
    """
    rows = stack.features.features(boxes)
    counts = np.bincount(rows.pair_tile, minlength=len(tiles))
    dense: set[int] = set() if cache is None else set(np.flatnonzero(counts >= KEPT_FROM).tolist())
    encoded: dict[int, EncodedTile] = {}
    if len(dense) < len(tiles):
        light = [number for number in range(len(tiles)) if number not in dense]
        encoded.update(zip(light, engines.encode(stack, _part(rows, tiles, light)[0]), strict=True))
    if cache is not None and dense:
        recipe = current_recipe(stack.layers)
        numbers = sorted(dense)
        for number, of_tile in zip(numbers, encode_features(*_part(rows, tiles, numbers), stack.layers), strict=True):
            encoded[number] = _assembled(stack, of_tile, tiles[number], cache, recipe)
    digests = workkey.source_digests(len(tiles), rows.pair_tile, rows.digest[rows.pair_row])
    vertices, newest = _weights(rows, len(tiles))
    return [Made(encoded[number], *each) for number, each in enumerate(zip(digests, vertices, newest, strict=True))]


def again(
    stack: Stack,
    boxes: Sequence[TileBox],
    tiles: Sequence[Tile],
    cache: EncodedCache,
    *,
    shown: Mapping[int, Shown] | None = None,
    matches: Mapping[int, Match] | None = None,
    fresh: Collection[int] = (),
) -> list[Made]:
    """Encode tiles, reading and encoding of those whose features are kept only what changed.

    Args:
        stack: The ports; its engine is the encoder itself.
        boxes: Of the tiles.
        tiles: Which.
        cache: What is kept, and where the features go that the tiles show now.
        shown: What some of them show, by number, where the caller knows it already; it says what they are made of.
        matches: What is kept of some of them, held against that, as `match` did.
        fresh: Numbers of those to encode anew, whatever is kept of them.
    """
    recipe = current_recipe(stack.layers)
    kept: dict[int, EncodedFeatures] = {}
    for number, tile in enumerate(tiles):
        features = None if number in fresh else cache.get(recipe, tile.key)
        if features is not None:
            kept[number] = features
    made: dict[int, Made] = {}
    if kept:
        known = dict(shown or {})
        asked = [number for number in kept if number not in known]
        if asked:
            found = shown_of(stack.features.digests([boxes[number] for number in asked]))
            known.update(zip(asked, found, strict=True))
        changes = _changes(stack, kept, known, matches or {}, tiles)
        for number, features in changes.items():
            encoded = _assembled(stack, features, tiles[number], cache, recipe)
            # What it is made of is what was matched: exactly what the tile shows.
            digest = known[number].source_digest
            if not digest:
                digests = features.digests()
                (digest,) = workkey.source_digests(1, np.zeros(len(digests), np.int64), digests)
            made[number] = Made(encoded, digest, known[number].vertices, known[number].data_time_ms)
    rest = [number for number in range(len(tiles)) if number not in made]
    if rest:
        of_rest = anew(stack, [boxes[number] for number in rest], [tiles[number] for number in rest], cache)
        made.update(zip(rest, of_rest, strict=True))
    return [made[number] for number in range(len(tiles))]


def _changes(
    stack: Stack,
    kept: Mapping[int, EncodedFeatures],
    shown: Mapping[int, Shown],
    matches: Mapping[int, Match],
    tiles: Sequence[Tile],
) -> dict[int, EncodedFeatures]:
    """The features that tiles show now, by number; without those that are better, or have to be, read as a whole."""
    matched: dict[int, Match] = {}
    for number, features in kept.items():
        found = matches.get(number)
        if found is None or found.kept is not features:
            found = _match(features, shown[number])
        if len(found.missing) <= ANEW_SHARE * len(found.stay):
            matched[number] = found
    wanted: set[int] = set()
    for number, found in matched.items():
        wanted.update(shown[number].number[found.missing].tolist())
    rows = stack.features.rows(sorted(wanted)) if wanted else None
    place = {} if rows is None else {bytes(digest): row for row, digest in enumerate(rows.digest)}
    pairs: dict[int, list[int]] = {}
    for number, found in matched.items():
        of = [place.get(bytes(digest)) for digest in shown[number].digest[found.missing]]
        # One that changed since its digest was read is not there any more: such a tile is read in one snapshot.
        if None not in of:
            pairs[number] = [row for row in of if row is not None]
    with_changes = [number for number, found in pairs.items() if found]
    more: dict[int, EncodedFeatures] = {}
    if rows is not None and with_changes:
        columns = _columns(rows, [tiles[number] for number in with_changes], [pairs[number] for number in with_changes])
        more.update(zip(with_changes, encode_features(columns, rows.digest, stack.layers), strict=True))
    return {
        number: kept[number].changed(matched[number].stay, more.get(number, EncodedFeatures.none())) for number in pairs
    }


def _assembled(stack: Stack, features: EncodedFeatures, tile: Tile, cache: EncodedCache, recipe: str) -> EncodedTile:
    encoded = features.assembled(tile, stack.layers)
    cache.put(recipe, tile.key, features)
    return encoded


def _part(
    rows: TileFeatureRows, tiles: Sequence[Tile], numbers: Sequence[int]
) -> tuple[TileFeatures, npt.NDArray[np.uint8]]:
    """The columns of some of the tiles, by ascending numbers, and the digests of their rows."""
    if len(numbers) == len(tiles):
        whole = TileFeatures(
            rows.source,
            rows.feature_id,
            rows.layer,
            rows.geometry,
            rows.properties,
            tiles,
            rows.pair_tile,
            rows.pair_row,
        )
        return whole, rows.digest
    place = np.full(len(tiles), -1, np.int64)
    place[numbers] = np.arange(len(numbers))
    pair_tile = place[rows.pair_tile]
    used, pair_row = np.unique(rows.pair_row[pair_tile >= 0], return_inverse=True)
    own: list[int] = used.tolist()
    features = TileFeatures(
        [rows.source[row] for row in own],
        [rows.feature_id[row] for row in own],
        [rows.layer[row] for row in own],
        [rows.geometry[row] for row in own],
        [rows.properties[row] for row in own],
        [tiles[number] for number in numbers],
        pair_tile[pair_tile >= 0],
        pair_row.astype(np.int64),
    )
    return features, rows.digest[used]


def _columns(rows: FeatureRows, tiles: Sequence[Tile], pairs: Sequence[Sequence[int]]) -> TileFeatures:
    return TileFeatures(
        rows.source,
        rows.feature_id,
        rows.layer,
        rows.geometry,
        rows.properties,
        tiles,
        np.arange(len(tiles)).repeat([len(found) for found in pairs]),
        np.array([row for found in pairs for row in found], np.int64),
    )


def _weights(rows: TileFeatureRows, count: int) -> tuple[list[int], list[int]]:
    """Vertices and newest event time of each tile."""
    vertices = np.bincount(rows.pair_tile, weights=rows.vertex_count[rows.pair_row], minlength=count)
    newest = np.zeros(count, dtype=np.int64)
    np.maximum.at(newest, rows.pair_tile, rows.event_time_ms[rows.pair_row])
    return vertices.astype(np.int64).tolist(), newest.tolist()
