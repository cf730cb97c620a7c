"""Shapes: geometries as ragged coordinate arrays, and the way from and to the geometry library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import shapely

from geo_assets.tiles.encode.ragged import Bools, Floats, Ints, offsets, spread

Geometries = npt.NDArray[Any]

POINT, LINE, POLYGON = 1, 2, 3
"""The geometry types of a tile, numbered as in MVT (Mapbox Vector Tile 2.1, section 4.3.4)."""

_KIND = np.array([POINT, LINE, LINE, POLYGON, POINT, LINE, POLYGON, 0])
"""Kind of each GEOS type id; a collection has none of its own."""
_COLLECTION = 7


@dataclass(frozen=True, slots=True)
class Shapes:
    """Items, each of one kind, made of rings of coordinates.

    A ring is a closed polygon ring, a line, or all points of an item. A polygon's shell comes before its holes.
    """

    kind: Ints
    """(items) POINT, LINE or POLYGON."""
    rings: Ints
    """(items + 1) where the rings of an item begin."""
    shell: Bools
    """(rings) False for a hole."""
    points: Ints
    """(rings + 1) where the coordinates of a ring begin."""
    xy: Floats
    """(coordinates, 2)."""

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def empty(cls) -> Self:
        """No items."""
        none = np.zeros(0, np.int64)
        return cls(none, np.zeros(1, np.int64), np.zeros(0, np.bool_), np.zeros(1, np.int64), np.zeros((0, 2)))

    def item_points(self) -> Ints:
        """(items + 1) where the coordinates of an item begin."""
        return self.points[self.rings]

    def take(self, index: Ints) -> Self:
        """The items of these numbers, in this order, any of them more than once."""
        starts = self.rings[index]
        counts = self.rings[index + 1] - starts
        ring = spread(starts, counts)
        first = self.points[ring]
        lengths = self.points[ring + 1] - first
        return type(self)(
            self.kind[index], offsets(counts), self.shell[ring], offsets(lengths), self.xy[spread(first, lengths)]
        )

    def moved(self, xy: Floats) -> Self:
        """The same items with other coordinates."""
        return type(self)(self.kind, self.rings, self.shell, self.points, xy)

    def bounds(self) -> tuple[Floats, Floats]:
        """Lowest and highest x, y of each item, (items, 2) each. No item may be without coordinates."""
        if not len(self):
            return np.zeros((0, 2)), np.zeros((0, 2))
        starts = self.item_points()[:-1]
        return np.minimum.reduceat(self.xy, starts), np.maximum.reduceat(self.xy, starts)

    def keep_points(self, keep: Bools) -> Self:
        """Without the coordinates that are not kept; a ring may become empty."""
        before = np.zeros(len(keep) + 1, np.int64)
        np.cumsum(keep, out=before[1:])
        return type(self)(self.kind, self.rings, self.shell, before[self.points], self.xy[keep])

    def keep_rings(self, keep: Bools) -> tuple[Self, Ints]:
        """Without the rings that are not kept and the items left without any; and which items are left."""
        before = np.zeros(len(keep) + 1, np.int64)
        np.cumsum(keep, out=before[1:])
        rings = before[self.rings]
        counts = np.diff(rings)
        left = np.flatnonzero(counts)
        ring = np.flatnonzero(keep)
        first = self.points[ring]
        lengths = self.points[ring + 1] - first
        xy = self.xy if len(ring) == len(keep) else self.xy[spread(first, lengths)]
        return type(self)(self.kind[left], offsets(counts[left]), self.shell[ring], offsets(lengths), xy), left

    def geometries(self) -> Geometries:
        """As geometries: lines and polygons (multi where an item has several), a MultiPoint for points.

        Raises:
            shapely.errors.GEOSException, ValueError: A ring has too few coordinates or is not closed.
        """
        result = np.empty(len(self), object)
        for kind in (POINT, LINE, POLYGON):
            of = np.flatnonzero(self.kind == kind)
            if not len(of):
                continue
            part = self if len(of) == len(self) else self.take(of)
            result[of] = _GEOMETRIES[kind](part)
        return result


def concatenate(parts: list[Shapes]) -> Shapes:
    """The items of all parts, one part after the other."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Shapes.empty()
    return Shapes(
        np.concatenate([part.kind for part in parts]),
        offsets(np.concatenate([np.diff(part.rings) for part in parts])),
        np.concatenate([part.shell for part in parts]),
        offsets(np.concatenate([np.diff(part.points) for part in parts])),
        np.concatenate([part.xy for part in parts]),
    )


def shapes_of(geometries: Geometries, kind: int | None = None) -> tuple[Shapes, Ints]:
    """Geometries as shapes, and which geometry each item is of.

    A collection gives one item a kind: its points, its lines and its polygons, at any depth. What is None or empty
    gives none.

    Args:
        geometries: Geometries in any coordinates; a third dimension is left out.
        kind: Keep this kind alone (what clipping gives back of another dimension is no part of the feature).
    """
    types = shapely.get_type_id(geometries)
    owner = np.arange(len(geometries), dtype=np.int64)
    if len(types) and (types.min() < 0 or types.max() > 3):
        while (types == _COLLECTION).any():
            geometries, index = shapely.get_parts(geometries, return_index=True)
            owner = owner[index]
            types = shapely.get_type_id(geometries)
        geometries, index = shapely.get_parts(geometries, return_index=True)
        owner = owner[index]
        types = shapely.get_type_id(geometries)
    kinds = _KIND[types]
    items: list[Shapes] = []
    owners: list[Ints] = []
    for wanted in (POINT, LINE, POLYGON) if kind is None else (kind,):
        of = kinds == wanted
        if of.all():
            of = slice(None)
        elif not of.any():
            continue
        part, part_owner = _flatten(geometries[of], owner[of], wanted)
        items.append(part)
        owners.append(part_owner)
    return concatenate(items), np.concatenate(owners) if owners else np.zeros(0, np.int64)


def _flatten(parts: Geometries, owner: Ints, kind: int) -> tuple[Shapes, Ints]:
    """Single points, lines or polygons, those of one owner side by side, as items."""
    if kind == POLYGON:
        rings, ring_part = shapely.get_rings(parts, return_index=True)
        shell = np.ones(len(rings), np.bool_)
        shell[1:] = ring_part[1:] != ring_part[:-1]
        ring_owner = owner[ring_part]
    else:
        rings, ring_owner, shell = parts, owner, np.ones(len(parts), np.bool_)
    xy, of = shapely.get_coordinates(rings, return_index=True)
    lengths = np.bincount(of, minlength=len(rings))
    if kind == POINT:
        # All points of an owner are one ring.
        lengths = np.bincount(ring_owner, weights=lengths).astype(np.int64)
        owners = np.flatnonzero(lengths)
        counts = np.ones(len(owners), np.int64)
        return (
            Shapes(np.full(len(owners), kind), offsets(counts), counts.astype(np.bool_), offsets(lengths[owners]), xy),
            owners,
        )
    full = lengths > 0
    if not full.all():
        ring_owner, shell, lengths = ring_owner[full], shell[full], lengths[full]
    counts = np.bincount(ring_owner) if len(ring_owner) else np.zeros(0, np.int64)
    owners = np.flatnonzero(counts)
    return Shapes(np.full(len(owners), kind), offsets(counts[owners]), shell, offsets(lengths), xy), owners


def _points(part: Shapes) -> Geometries:
    return shapely.from_ragged_array(shapely.GeometryType.MULTIPOINT, part.xy, (part.item_points(),))


def _lines(part: Shapes) -> Geometries:
    if len(part.points) == len(part.rings):
        return shapely.from_ragged_array(shapely.GeometryType.LINESTRING, part.xy, (part.points,))
    return shapely.from_ragged_array(shapely.GeometryType.MULTILINESTRING, part.xy, (part.points, part.rings))


def _polygons(part: Shapes) -> Geometries:
    shells = np.flatnonzero(part.shell)
    if len(shells) == len(part):
        return shapely.from_ragged_array(shapely.GeometryType.POLYGON, part.xy, (part.points, part.rings))
    polygons = np.append(shells, len(part.shell))
    items = np.searchsorted(shells, part.rings)
    return shapely.from_ragged_array(shapely.GeometryType.MULTIPOLYGON, part.xy, (part.points, polygons, items))


_GEOMETRIES = {POINT: _points, LINE: _lines, POLYGON: _polygons}


def each(
    function: Callable[[Geometries], Geometries], geometries: Geometries
) -> tuple[Geometries, dict[int, Exception]]:
    """Call a vectorised function so that what one geometry raises costs that one alone.

    Returns:
        The results, None where the call failed, and by position why it failed.
    """
    try:
        return function(geometries), {}
    except Exception as error:
        if len(geometries) == 1:
            return np.array([None], object), {0: error}
        half = len(geometries) // 2
        first, first_errors = each(function, geometries[:half])
        second, second_errors = each(function, geometries[half:])
        errors = first_errors | {half + position: error for position, error in second_errors.items()}
        return np.concatenate([first, second]), errors
