"""At which zooms a feature shows, and the boxes in which tiles look for features.

`visible` decides for cover, digest and encoder alike. The projection stands here too: sizes, boxes and the cover are
measured in the same EPSG:3857.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from geo_assets.tiles.keys import coordinates_of
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import HALF_WORLD, MAX_LATITUDE, Box, Tile

Floats = npt.NDArray[np.float64]

NOWHERE = (1, 0)
"""The limits of what shows at no zoom: min above max."""

_TILE_PIXELS = 256
"""Pixels a side in which `Layer.min_pixels` counts (OGC Two Dimensional Tile Matrix Set 2.0, WebMercatorQuad)."""

_HAIR = 1e-9
"""Degrees by which a box is grown, 0.1 mm: ten thousand times the rounding of the projection and back."""


def to_mercator(coordinates: npt.ArrayLike) -> Floats:
    """Project degrees to metres, latitudes beyond the square of Web Mercator clamped to its edge.

    Args:
        coordinates: lon, lat in degrees, EPSG:4326, shape (n, 2).

    Returns:
        x, y in metres, EPSG:3857, shape (n, 2). Spherical formulas of IOGP Guidance Note 373-7-2, section 3.2.1.2.
    """
    degrees = np.asarray(coordinates, dtype=np.float64)
    metres = np.empty(degrees.shape, dtype=np.float64)
    # Divided first: the edge of a tile, a fraction of the world with a power of two below, then stays exact.
    metres[..., 0] = degrees[..., 0] / 180.0 * HALF_WORLD
    latitude = degrees[..., 1]
    inside = np.clip(latitude, -MAX_LATITUDE, MAX_LATITUDE)
    y = np.arcsinh(np.tan(np.radians(inside))) / np.pi * HALF_WORLD
    y = np.where(latitude >= MAX_LATITUDE, HALF_WORLD, np.where(latitude <= -MAX_LATITUDE, -HALF_WORLD, y))
    metres[..., 1] = np.clip(y, -HALF_WORLD, HALF_WORLD)
    return metres


def to_degrees(metres: npt.ArrayLike) -> Floats:
    """Unproject metres (x, y in EPSG:3857, shape (n, 2)) to lon, lat in degrees; the inverse of `to_mercator`."""
    values = np.asarray(metres, dtype=np.float64)
    degrees = np.empty(values.shape, dtype=np.float64)
    degrees[..., 0] = values[..., 0] / HALF_WORLD * 180.0
    degrees[..., 1] = np.degrees(np.arctan(np.sinh(values[..., 1] / HALF_WORLD * np.pi)))
    return degrees


def buffered_boxes(z: npt.ArrayLike, x: npt.ArrayLike, y: npt.ArrayLike, buffer: float) -> Floats:
    """The boxes of tiles, grown on all sides: what the cover calls touching is touching this closed box.

    Args:
        z: Zooms, shape (n,) or one for all.
        x: Columns, shape (n,).
        y: Rows, shape (n,).
        buffer: Fraction of a tile's side.

    Returns:
        West, south, east, north in metres, EPSG:3857, shape (n, 4). Without buffer they are `Tile.bounds_3857` to the
        bit, and with any buffer the box of a child lies in that of its parent.
    """
    side = np.exp2(np.asarray(z, dtype=np.float64))
    column, row = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    boxes = np.empty((len(column), 4))
    boxes[:, 0] = (2 * (column - buffer) - side) / side
    boxes[:, 1] = (side - 2 * (row + 1 + buffer)) / side
    boxes[:, 2] = (2 * (column + 1 + buffer) - side) / side
    boxes[:, 3] = (side - 2 * (row - buffer)) / side
    boxes *= HALF_WORLD
    return boxes


def zoom_limits(layer: Layer, layers: LayerSet, bbox: Box | None, dimension: int) -> tuple[int, int]:
    """The zooms at which a feature shows, by its layer's limits and its size.

    The size is the side of a square as large as the bounding box in EPSG:3857 for a polygon, the longer side of the
    box for a line; a point has none. At the last zoom that is built every size shows, because clients overzoom from it.

    Args:
        layer: The feature's layer.
        layers: The map it belongs to; nothing shows deeper than its `max_zoom`.
        bbox: West, south, east, north in degrees, EPSG:4326; None for a feature without geometry.
        dimension: 0 for points, 1 for lines, 2 for polygons; of a collection, the highest.

    Returns:
        First and last zoom, both included; (1, 0) when it shows nowhere.
    """
    first, last = layer.min_zoom, min(layer.max_zoom, layers.max_zoom)
    if bbox is None or first > last:
        return NOWHERE
    if dimension > 0 and layer.min_pixels > 0:
        (west, south), (east, north) = to_mercator([(bbox[0], bbox[1]), (bbox[2], bbox[3])]).tolist()
        width, height = abs(east - west), abs(north - south)
        size = (width * height) ** 0.5 if dimension > 1 else max(width, height)
        while first <= last and size * _TILE_PIXELS * (1 << first) < layer.min_pixels * 2 * HALF_WORLD:
            first += 1
        if first > last:
            return (last, last) if last == layers.max_zoom else NOWHERE
    return first, last


def visible(min_zoom: int, max_zoom: int, zoom: int) -> bool:
    """Whether a feature with these limits shows at `zoom`."""
    return min_zoom <= zoom <= max_zoom


def tile_box(tile: Tile, buffer: float) -> Box:
    """The box in which a tile looks for features: its buffered box, never smaller than what the cover touches.

    Args:
        tile: The tile.
        buffer: Fraction of a tile's side.

    Returns:
        West, south, east, north in degrees, EPSG:4326. Clipped at ±180; the top row reaches 90, the bottom row -90,
        because latitudes beyond Web Mercator are drawn at its edge.
    """
    return Box(*_boxes(np.array([tile.z]), np.array([tile.x]), np.array([tile.y]), buffer)[0].tolist())


def tile_boxes(keys: Sequence[str], buffer: float) -> Floats:
    """The boxes of many tiles, as `tile_box` gives them.

    Args:
        keys: Partition keys.
        buffer: Fraction of a tile's side.

    Returns:
        West, south, east, north in degrees, EPSG:4326, shape (n, 4), in the order of the keys.

    Raises:
        TileError: A key is none.
    """
    return _boxes(*coordinates_of(keys), buffer)


def _boxes(z: npt.NDArray[np.int64], x: npt.NDArray[np.int64], y: npt.NDArray[np.int64], buffer: float) -> Floats:
    """Buffered boxes in degrees, a hair larger, poles and date line as `tile_box` says."""
    metres = buffered_boxes(z, x, y, buffer)
    degrees = to_degrees(metres.reshape(-1, 2, 2)).reshape(-1, 4)
    degrees[:, :2] -= _HAIR
    degrees[:, 2:] += _HAIR
    degrees[:, 1] = np.where(metres[:, 1] <= -HALF_WORLD, -90.0, degrees[:, 1])
    degrees[:, 3] = np.where(metres[:, 3] >= HALF_WORLD, 90.0, degrees[:, 3])
    degrees[:, 0] = np.maximum(degrees[:, 0], -180.0)
    degrees[:, 2] = np.minimum(degrees[:, 2], 180.0)
    return degrees
