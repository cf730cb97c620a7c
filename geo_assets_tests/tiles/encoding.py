"""What the encoder's tests share: features as columns, geometries in a tile's own units, decoded features as shapes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import shapely

from geo_assets.tiles.decode import DecodedFeature, DecodedLayer, decode, polygons
from geo_assets.tiles.encode import EncodedTile, TileFeatures, encode_tiles
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile

ONE_LAYER = LayerSet((Layer("things", min_pixels=0, simplify=0),))


def lon_lat(tile: Tile, geometry: Any) -> Any:
    """A geometry in a tile's units (4096 a side, y down) as EPSG:4326."""

    def unproject(xy: Any) -> Any:
        side = 4096.0 * (1 << tile.z)
        x = (xy[:, 0] + tile.x * 4096.0) / side
        y = (xy[:, 1] + tile.y * 4096.0) / side
        return np.stack([x * 360 - 180, np.degrees(np.arctan(np.sinh(np.pi * (1 - 2 * y))))], axis=1)

    return shapely.transform(geometry, unproject)


def columns(
    geometries: Sequence[Any],
    tiles: Sequence[Tile],
    *,
    ids: Iterable[Any] | None = None,
    properties: Iterable[Any] | None = None,
    layers: Iterable[str] | None = None,
    sources: Iterable[str] | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> TileFeatures:
    """Features as columns. Without `pairs`, every tile is to show every feature."""
    count = len(geometries)
    if pairs is None:
        pairs = [(tile, row) for tile in range(len(tiles)) for row in range(count)]
    return TileFeatures(
        source=list(sources or ["test"] * count),
        feature_id=[each if isinstance(each, str) else json.dumps(each) for each in (ids or range(1, count + 1))],
        layer=list(layers or ["things"] * count),
        geometry=[
            each if isinstance(each, bytes) else None if each is None else shapely.to_wkb(each) for each in geometries
        ],
        properties=[each if isinstance(each, str) else json.dumps(each) for each in (properties or [{}] * count)],
        tiles=tiles,
        pair_tile=np.array([tile for tile, _ in pairs], np.int64),
        pair_row=np.array([row for _, row in pairs], np.int64),
    )


def encode_one(geometry: Any, tile: Tile, layers: LayerSet = ONE_LAYER, **column: Any) -> EncodedTile:
    """One feature in one tile."""
    (result,) = encode_tiles(columns([geometry], [tile], **{key: [value] for key, value in column.items()}), layers)
    return result


def features_of(data: bytes, layer: str = "things") -> tuple[DecodedFeature, ...]:
    """The features of a layer; none when the tile has no such layer."""
    found: list[DecodedLayer] = [each for each in decode(data) if each.name == layer]
    return found[0].features if found else ()


def as_shape(feature: DecodedFeature) -> Any:
    """A decoded feature as a geometry in tile units."""
    if feature.geometry_type == "Polygon":
        parts = [shapely.Polygon(rings[0], rings[1:]) for rings in polygons(feature)]
        return parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts)
    if feature.geometry_type == "LineString":
        return shapely.MultiLineString([list(path) for path in feature.paths])
    return shapely.MultiPoint([path[0] for path in feature.paths])


def faults(data: bytes) -> list[str]:
    """What an eye trained by the geometry library finds wrong with a tile; [] when nothing."""
    found: list[str] = []
    for layer in decode(data):
        if not layer.features:
            found.append(f"layer {layer.name} has no features")
        for feature in layer.features:
            shape = as_shape(feature)
            if feature.geometry_type == "Polygon":
                if not shapely.is_valid(shape):
                    found.append(f"{feature.id}: {shapely.is_valid_reason(shape)}: {shape.wkt}")
                for path in feature.paths:
                    if len(path) < 4 or path[0] != path[-1] or len(set(path)) < 3:
                        found.append(f"{feature.id}: short ring {path}")
                    if any(a == b for a, b in pairwise(path)):
                        found.append(f"{feature.id}: repeated vertex in {path}")
            elif feature.geometry_type == "LineString":
                for path in feature.paths:
                    if len(path) < 2 or any(a == b for a, b in pairwise(path)):
                        found.append(f"{feature.id}: repeated or single vertex in {path}")
    return found
