"""What goes into the encoder and what comes out: columns of features, tiles, and features that were left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geo_assets.tiles.encode.ragged import Ints
from geo_assets.tiles.encode.shapes import Geometries
from geo_assets.tiles.tile import Tile


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


def in_order(left_out: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Features that were left out, sorted."""
    return tuple(sorted(left_out, key=lambda left: (left.source, left.feature_id, left.reason)))
