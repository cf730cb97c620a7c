"""The cover: which tiles a geometry touches, exactly, at any number of zooms and for one geometry or for thousands.

A tile is touched when its box, closed and grown by the buffer on all sides, meets the geometry, whose edges are
straight in EPSG:3857 as they are drawn. Which zooms are asked for is decided in `zooms`.

How: a descent of the quadtree with pairs of (tile, edge) as arrays. The box of a child lies in that of its parent, so
an edge is only ever held against the children of tiles it met. A tile without an edge in its box lies wholly inside or
wholly outside of the polygon: one point decides, and below a tile inside everything is inside, without a test.
"""

# Functions of shapely that take one geometry or an array have partly unknown types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import shapely

from geo_assets.tiles.keys import key_of, keys_of
from geo_assets.tiles.tile import HALF_WORLD, MAX_ZOOM
from geo_assets.tiles.zooms import buffered_boxes, to_mercator

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]

MAX_BUFFER = 1.5
"""Largest buffer as a fraction of a side: what `LayerSet` allows for buffer (0.5) and simplification (1) together."""

_ENTRY_TILES = 4
"""A geometry enters the descent at its deepest wanted zoom where its bounding box meets no more tiles than these."""

_FEW = 16
"""Geometries up to which each is looked at by itself first: that takes 50 µs, a descent of one or of many 2 ms."""

_FEW_VERTICES = 500
_FEW_TILES = 64

_CHUNK_EDGES = 200_000
"""Edges that descend together: some thirty arrays of that length, about 50 MB."""

_MANY_PARTS = 16
"""Polygons of one geometry from which a tree of their boxes finds the few that matter."""

_ORIENTATION_ERROR = 3.3306690738754716e-16
"""(3 + 16 e) e with e = 2^-53: below this fraction of its terms the sign of an orientation is not sure (Shewchuk,
Adaptive Precision Floating-Point Arithmetic, 1997, section 4.3)."""


class CoverError(ValueError):
    """A cover that cannot be: a coordinate that is not finite, a zoom or a buffer outside its range."""


@dataclass(frozen=True, slots=True)
class Cover:
    """The tiles that one geometry touches.

    Args:
        by_zoom: Zoom -> x, y of its tiles, shape (n, 2), sorted; every zoom asked for and not left is there.
        zooms_left: The deepest zooms, ascending, that did not fit under the cap; the others are complete.
    """

    by_zoom: Mapping[int, Integers]
    zooms_left: tuple[int, ...] = ()

    def keys(self) -> list[str]:
        """Their partition keys, zoom by zoom."""
        return [key for zoom, tiles in self.by_zoom.items() for key in keys_of(zoom, tiles[:, 0], tiles[:, 1])]

    def __len__(self) -> int:
        return sum(len(tiles) for tiles in self.by_zoom.values())


@dataclass(frozen=True, slots=True)
class Covers:
    """The tiles that many geometries touch, one row a (geometry, tile).

    Args:
        feature: Index of the geometry, shape (n,).
        zoom: Its tile's zoom, shape (n,).
        x: Its tile's column, shape (n,).
        y: Its tile's row, shape (n,).
        complete_to: For each geometry the deepest zoom that fitted under the cap; deeper ones are left, the others
            complete. Below its first zoom when none fitted.
    """

    feature: Integers
    zoom: Integers
    x: Integers
    y: Integers
    complete_to: Integers

    def keys(self) -> list[str]:
        """One partition key a row."""
        if len(self.zoom) <= _FEW_TILES:
            return list(map(key_of, self.zoom.tolist(), self.x.tolist(), self.y.tolist()))
        keys = np.empty(len(self.zoom), dtype=object)
        for zoom in np.unique(self.zoom).tolist():
            rows = np.flatnonzero(self.zoom == zoom)
            keys[rows] = keys_of(zoom, self.x[rows], self.y[rows])
        return keys.tolist()


@dataclass(frozen=True, slots=True)
class Width:
    """How many tiles a geometry touches.

    Args:
        by_zoom: Zoom -> tiles.
        estimated: The zooms, ascending, whose number is an estimate from the last one counted.
    """

    by_zoom: Mapping[int, int]
    estimated: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Tiles at all zooms together."""
        return sum(self.by_zoom.values())


def cover(geometry: shapely.Geometry | None, zooms: Iterable[int], *, buffer: float, cap: int | None = None) -> Cover:
    """The tiles whose buffered box a geometry meets.

    Args:
        geometry: Any shapely geometry in EPSG:4326 lon/lat degrees, already split at the antimeridian: nothing wraps at
            ±180. Latitudes beyond ±85.0511 count as the edge of the map. Empty or None touches nothing. An invalid
            polygon is what its edges and the even-odd rule make of it.
        zooms: The zooms to cover, 0 to 22.
        buffer: How far a tile reaches over its edge, as a fraction of its side, 0 to 1.5.
        cap: Most tiles of the answer. The zooms that fit, from the lowest on, are complete; the others are left before
            they are spread out. None sets no limit.

    Returns:
        The cover.

    Raises:
        CoverError: A coordinate is not finite, or a zoom or the buffer is outside its range.
    """
    asked = _checked_zooms(zooms)
    descent = _Descent([geometry], _wanted([asked]), buffer)
    found: dict[int, Integers] = {zoom: np.empty((0, 2), dtype=np.int64) for zoom in asked}
    for zoom, _, x, y in descent.tiles(cap):
        order = np.lexsort((y, x))
        found[zoom] = np.stack((x[order], y[order]), axis=1)
    left = descent.left_from[0]
    return Cover(
        {zoom: tiles for zoom, tiles in found.items() if zoom < left}, tuple(zoom for zoom in asked if zoom >= left)
    )


def covers(
    geometries: Iterable[shapely.Geometry | None],
    first: npt.ArrayLike,
    last: npt.ArrayLike,
    *,
    buffer: float,
    cap: int | None = None,
) -> Covers:
    """The covers of many geometries at once, each over its own range of zooms: some ten times as fast as one by one.

    Args:
        geometries: As for `cover`.
        first: First zoom of each, shape (n,), or one for all.
        last: Last zoom of each; below `first` it touches nothing.
        buffer: As for `cover`.
        cap: Most tiles of each geometry.

    Returns:
        One row a (geometry, tile), in no promised order.

    Raises:
        CoverError: As for `cover`.
    """
    shapes = np.fromiter(geometries, dtype=object)
    starts = np.broadcast_to(np.asarray(first, dtype=np.int64), shapes.shape)
    ends = np.broadcast_to(np.asarray(last, dtype=np.int64), shapes.shape)
    shown = starts <= ends
    for zoom in (starts[shown], ends[shown]):
        if zoom.size and not 0 <= int(zoom.min()) <= int(zoom.max()) <= MAX_ZOOM:
            raise CoverError(f"zooms {int(zoom.min())}..{int(zoom.max())} are not within 0..{MAX_ZOOM}")
    if not 0 <= buffer <= MAX_BUFFER:
        raise CoverError(f"buffer {buffer} is outside 0..{MAX_BUFFER} of a tile's side")
    if len(shapes) > _FEW:
        return _descended(shapes, starts, ends, buffer, cap)
    quick: list[tuple[int, int, int, int]] = []
    left: list[int] = []
    for index, (shape, low, high) in enumerate(zip(shapes, starts.tolist(), ends.tolist(), strict=True)):
        tiles = _at_a_glance(shape, low, high, buffer, cap)
        if tiles is None:
            left.append(index)
        else:
            quick.extend((index, *tile) for tile in tiles)
    found = np.array(quick, dtype=np.int64).reshape(-1, 4)
    if not left:
        return Covers(found[:, 0], found[:, 1], found[:, 2], found[:, 3], ends.copy())
    rest = _descended(shapes[left], starts[left], ends[left], buffer, cap)
    complete_to = ends.copy()
    complete_to[left] = rest.complete_to
    return Covers(
        np.concatenate((found[:, 0], np.array(left, dtype=np.int64)[rest.feature])),
        np.concatenate((found[:, 1], rest.zoom)),
        np.concatenate((found[:, 2], rest.x)),
        np.concatenate((found[:, 3], rest.y)),
        complete_to,
    )


def _at_a_glance(
    geometry: shapely.Geometry | None, first: int, last: int, buffer: float, cap: int | None
) -> list[tuple[int, int, int]] | None:
    """Zoom, column and row of every tile that a small geometry touches; None where that takes a closer look.

    A tile with a vertex in its box is touched, and one whose box misses the bounding box is not. Most of what people
    edit is decided by that alone, and a descent costs its dozens of array operations for one building as for hundreds.
    """
    if geometry is None or first > last:
        return []
    points = shapely.get_coordinates(geometry)
    if len(points) > _FEW_VERTICES or not np.isfinite(points).all():
        return None
    if not len(points):
        return []
    drawn = to_mercator(points)
    (west, south), (east, north) = drawn.min(axis=0).tolist(), drawn.max(axis=0).tolist()
    vertices: list[tuple[float, float]] = drawn.tolist()
    tiles: list[tuple[int, int, int]] = []
    for zoom in range(first, last + 1):
        side = 1 << zoom
        # One more on each side: the boxes below decide, and they are what all others go by.
        columns = _span(west, east, side, buffer)
        rows = _span(-north, -south, side, buffer)
        if len(columns) * len(rows) > _FEW_TILES:
            return None
        for x in columns:
            # To the bit what `buffered_boxes` answers.
            box_west = (2 * (x - buffer) - side) / side * HALF_WORLD
            box_east = (2 * (x + 1 + buffer) - side) / side * HALF_WORLD
            if box_west > east or box_east < west:
                continue
            for y in rows:
                box_south = (side - 2 * (y + 1 + buffer)) / side * HALF_WORLD
                box_north = (side - 2 * (y - buffer)) / side * HALF_WORLD
                if box_south > north or box_north < south:
                    continue
                if not any(box_west <= a <= box_east and box_south <= b <= box_north for a, b in vertices):
                    return None  # An edge may cross it, or the polygon hold it.
                tiles.append((zoom, x, y))
        if cap is not None and len(tiles) > cap:
            return None
    return tiles


def _span(low: float, high: float, side: int, buffer: float) -> range:
    """Columns (rows, of negated y) whose buffered boxes a span of metres may meet, and one more on each side."""
    scale = side / (2 * HALF_WORLD)
    begin = math.floor((low + HALF_WORLD) * scale - buffer) - 1
    end = math.floor((high + HALF_WORLD) * scale + buffer) + 1
    return range(max(0, begin), min(side - 1, end) + 1)


def _descended(shapes: npt.NDArray[Any], starts: Integers, ends: Integers, buffer: float, cap: int | None) -> Covers:
    """`covers` by a descent of the quadtree."""
    levels = np.arange(MAX_ZOOM + 1)
    wanted = (levels >= starts[:, None]) & (levels <= ends[:, None])
    complete_to = ends.copy()
    rows: list[tuple[Integers, Integers, Integers, Integers]] = []
    edges = shapely.get_num_coordinates(shapes).cumsum()
    begin = 0
    while begin < len(shapes):
        before = int(edges[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(edges, before + _CHUNK_EDGES, side="right")))
        descent = _Descent(shapes[begin:end].tolist(), wanted[begin:end], buffer)
        for zoom, feature, x, y in descent.tiles(cap):
            rows.append((feature + begin, np.full(len(x), zoom, dtype=np.int64), x, y))
        complete_to[begin:end] = np.minimum(complete_to[begin:end], descent.left_from - 1)
        begin = end
    if not rows:
        nothing = np.empty(0, dtype=np.int64)
        return Covers(nothing, nothing, nothing, nothing, complete_to)
    feature, zoom, x, y = (np.concatenate(column) for column in zip(*rows, strict=True))
    # A zoom that was spread out is always complete: tiles() gives a zoom of a geometry whole or not at all.
    return Covers(feature, zoom, x, y, complete_to)


def cover_count(
    geometry: shapely.Geometry | None, zooms: Iterable[int], *, buffer: float, budget: int = 300_000
) -> Width:
    """How many tiles a geometry touches at each zoom, without spreading out what lies inside: for planning a region.

    Args:
        geometry: As for `cover`.
        zooms: As for `cover`.
        buffer: As for `cover`.
        budget: Most tiles on the outline of the geometry at one zoom that are still followed (300,000 take about a
            second and 200 MB). Deeper zooms are estimated: outlines double a zoom, areas quadruple.

    Returns:
        The width by zoom.

    Raises:
        CoverError: As for `cover`.
    """
    asked = _checked_zooms(zooms)
    descent = _Descent([geometry], _wanted([asked]), buffer)
    by_zoom = dict.fromkeys(asked, 0)
    estimated: tuple[int, ...] = ()
    for level in descent.levels():
        outline, inside = len(level.x), int(level.inside[0])
        if level.zoom in by_zoom:
            by_zoom[level.zoom] = outline + inside
        if outline > budget:
            estimated = tuple(zoom for zoom in asked if zoom > level.zoom)
            dimension = int(shapely.get_dimensions(geometry))
            for zoom in estimated:
                step = zoom - level.zoom
                if dimension == 2:  # half of a tile on the outline is inside, on average
                    by_zoom[zoom] = round((inside + outline / 2) * 4**step + outline / 2 * 2**step)
                else:
                    by_zoom[zoom] = outline * 2 ** (dimension * step)
            break
    return Width(by_zoom, estimated)


def _checked_zooms(zooms: Iterable[int]) -> list[int]:
    """The zooms, ascending, each once."""
    asked = sorted(set(zooms))
    if asked and not 0 <= asked[0] <= asked[-1] <= MAX_ZOOM:
        raise CoverError(f"zooms {asked[0]}..{asked[-1]} are not within 0..{MAX_ZOOM}")
    return asked


def _wanted(zooms: list[list[int]]) -> Booleans:
    """Which zoom is wanted of which geometry, shape (n, 23)."""
    wanted = np.zeros((len(zooms), MAX_ZOOM + 1), dtype=np.bool_)
    for row, asked in enumerate(zooms):
        wanted[row, asked] = True
    return wanted


class _Level(NamedTuple):
    """One zoom of a descent: the tiles with an edge in their box, and how many lie wholly inside."""

    zoom: int
    feature: Integers
    x: Integers
    y: Integers
    inside: Integers
    """Tiles of this zoom wholly inside, by geometry."""


class _Full(NamedTuple):
    """Tiles of one zoom that lie wholly inside of their geometry, and so does all below them."""

    zoom: int
    feature: Integers
    x: Integers
    y: Integers


@dataclass(slots=True)
class _Edges:
    """Edges of many geometries in EPSG:3857, sorted by geometry. A point is an edge without length."""

    feature: Integers
    x0: Floats
    y0: Floats
    x1: Floats
    y1: Floats
    west: Floats = field(init=False)
    south: Floats = field(init=False)
    east: Floats = field(init=False)
    north: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.west, self.east = np.minimum(self.x0, self.x1), np.maximum(self.x0, self.x1)
        self.south, self.north = np.minimum(self.y0, self.y1), np.maximum(self.y0, self.y1)


class _Descent:
    """One descent of the quadtree for many geometries; it runs once."""

    def __init__(self, geometries: list[shapely.Geometry | None], wanted: Booleans, buffer: float) -> None:
        if not 0 <= buffer <= MAX_BUFFER:
            raise CoverError(f"buffer {buffer} is outside 0..{MAX_BUFFER} of a tile's side")
        self.buffer = buffer
        self.wanted = wanted
        count = len(geometries)
        self.left_from = np.full(count, MAX_ZOOM + 1, dtype=np.int64)
        """For each geometry the first zoom that did not fit."""
        self._alive: Booleans = np.asarray(wanted.any(axis=1))
        self._first = wanted.argmax(axis=1)
        self._last = MAX_ZOOM - wanted[:, ::-1].argmax(axis=1)
        self._full: list[_Full] = []
        self._edges, self._polygons, self._polygon_feature = _take_apart(geometries)
        self._polygon_first = np.searchsorted(self._polygon_feature, np.arange(count + 1))
        self._polygon_count = np.diff(self._polygon_first)
        self._polygon_bounds = shapely.bounds(self._polygons).reshape(-1, 4)
        self._trees: dict[int, shapely.STRtree] = {}
        self._edge_first = np.searchsorted(self._edges.feature, np.arange(count + 1))
        shapely.prepare(self._polygons)

    def stop(self, feature: Integers | Booleans, zoom: Integers | int) -> None:
        """Follow these geometries no further; what is wanted of them from `zoom` on is left."""
        self.left_from[feature] = zoom
        self._alive[feature] = False

    def tiles(self, cap: int | None) -> Iterator[tuple[int, Integers, Integers, Integers]]:
        """Zoom, geometry, x and y of everything touched at the zooms wanted, as far as it fits under the cap."""
        total = np.zeros(len(self._alive), dtype=np.int64)
        for level in self.levels():
            touched = np.bincount(level.feature, minlength=len(total))
            width = touched + level.inside
            asked = self.wanted[:, level.zoom] & self._alive
            if cap is not None:
                over = asked & (total + width > cap)
                self.stop(over, level.zoom)
                asked &= ~over
                # Between wanted zooms: a point of the geometry meets so many boxes at most (four without a buffer) and
                # has a tile of its own at every deeper zoom, so that share of what is touched here is touched there.
                ahead = self._alive & ~self.wanted[:, level.zoom]
                if ahead.any():
                    following = level.zoom + 1 + self.wanted[:, level.zoom + 1 :].argmax(axis=1)
                    boxes = (int(2 * self.buffer) + 2) ** 2
                    least = np.maximum(touched // boxes, level.inside << 2 * np.where(ahead, following - level.zoom, 0))
                    over = ahead & (total + least > cap)
                    self.stop(over, following[over])
            total[asked] += width[asked]
            if asked.any():
                yield level.zoom, *self._spread(level, asked)

    def levels(self) -> Iterator[_Level]:
        """The zooms from the first at which a geometry enters to the last that is wanted."""
        entry, ranges = self._entries()
        inside = np.zeros(len(self._alive), dtype=np.int64)
        nothing = np.empty(0, dtype=np.int64)
        feature, x, y, pair_tile, pair_edge = nothing, nothing, nothing, nothing, nothing
        if not self._alive.any():
            return
        for zoom in range(int(entry[self._alive].min()), int(self._last[self._alive].max()) + 1):
            # The candidates: children of what was touched, and the first tiles of geometries that enter here.
            feature = np.repeat(feature, 4)
            x, y, pair_tile, pair_edge = self._children(zoom, x, y, pair_tile, pair_edge)
            enter = np.flatnonzero(self._alive & (entry == zoom))
            if enter.size:
                entering = self._entering(enter, ranges)
                pair_tile = np.concatenate((pair_tile, entering[3] + len(x)))
                pair_edge = np.concatenate((pair_edge, entering[4]))
                feature = np.concatenate((feature, entering[0]))
                x, y = np.concatenate((x, entering[1])), np.concatenate((y, entering[2]))
            boxes = buffered_boxes(zoom, x, y, self.buffer)
            meets = self._meets(boxes, pair_tile, pair_edge)
            pair_tile, pair_edge = pair_tile[meets], pair_edge[meets]
            touched = np.zeros(len(x), dtype=np.bool_)
            touched[pair_tile] = True
            inside <<= 2
            free = np.flatnonzero(~touched & (self._polygon_count[feature] > 0))
            full = free[self._contains(feature[free], boxes[free])]
            if full.size:
                self._full.append(_Full(zoom, feature[full], x[full], y[full]))
                inside += np.bincount(feature[full], minlength=len(inside))
            renumbered = np.cumsum(touched) - 1
            pair_tile = renumbered[pair_tile]
            feature, x, y = feature[touched], x[touched], y[touched]
            yield _Level(zoom, feature, x, y, inside)
            self._alive &= self._last > zoom
            if not self._alive.any():
                return
            if not self._alive[feature].all():
                keep = self._alive[feature]
                keep_pair = keep[pair_tile]
                pair_tile, pair_edge = (np.cumsum(keep) - 1)[pair_tile[keep_pair]], pair_edge[keep_pair]
                feature, x, y = feature[keep], x[keep], y[keep]

    def _entries(self) -> tuple[Integers, Integers]:
        """Where each geometry enters: its zoom, and its first and last column and row there, shape (n, 4)."""
        count = len(self._alive)
        entry = np.zeros(count, dtype=np.int64)
        ranges = np.zeros((count, 4), dtype=np.int64)
        has_edges: Booleans = np.diff(self._edge_first) > 0
        self._alive &= has_edges
        todo = np.flatnonzero(self._alive)
        if not todo.size:
            return entry, ranges
        starts = self._edge_first[:-1][has_edges]
        bounds = np.zeros((count, 4))
        bounds[has_edges, 0] = np.minimum.reduceat(self._edges.west, starts)
        bounds[has_edges, 1] = np.minimum.reduceat(self._edges.south, starts)
        bounds[has_edges, 2] = np.maximum.reduceat(self._edges.east, starts)
        bounds[has_edges, 3] = np.maximum.reduceat(self._edges.north, starts)
        # Columns count eastwards and rows southwards, both in fractions of the world.
        low = np.stack((bounds[:, 0] / HALF_WORLD + 1, 1 - bounds[:, 3] / HALF_WORLD), axis=1) / 2
        high = np.stack((bounds[:, 2] / HALF_WORLD + 1, 1 - bounds[:, 1] / HALF_WORLD), axis=1) / 2
        placed = np.zeros(count, dtype=np.bool_)
        reach = self.buffer + 1e-6  # more than the rounding of these fractions; a tile too many is only tested
        for zoom in range(int(self._first[todo].max()), -1, -1):
            here = todo[self._first[todo] >= zoom]
            side = 1 << zoom
            begin = np.maximum(np.floor(low[here] * side - reach), 0).astype(np.int64)
            end = np.minimum(np.floor(high[here] * side + reach), side - 1).astype(np.int64)
            fits = np.maximum(end - begin + 1, 0).prod(axis=1) <= _ENTRY_TILES
            entry[here[fits]] = zoom
            ranges[here[fits], :2], ranges[here[fits], 2:] = begin[fits], end[fits]
            placed[here[fits]] = True
            todo = todo[~placed[todo]]
            if not todo.size:
                break
        return entry, ranges

    def _entering(
        self, features: Integers, ranges: Integers
    ) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """The first tiles of geometries that enter at a zoom, paired with all of their edges."""
        columns = np.maximum(ranges[features, 2] - ranges[features, 0] + 1, 0)
        rows = np.maximum(ranges[features, 3] - ranges[features, 1] + 1, 0)
        which, place = _runs(columns * rows)
        feature = features[which]
        x = ranges[feature, 0] + place % columns[which]
        y = ranges[feature, 1] + place // columns[which]
        tile, edge = _runs((self._edge_first[1:] - self._edge_first[:-1])[feature])
        return feature, x, y, tile, self._edge_first[feature][tile] + edge

    def _children(
        self, zoom: int, x: Integers, y: Integers, pair_tile: Integers, pair_edge: Integers
    ) -> tuple[Integers, Integers, Integers, Integers]:
        """The four children of each tile in quadkey order, and the pairs whose boxes overlap."""
        if not x.size:
            return x, y, pair_tile, pair_edge
        corner = np.arange(4)
        child_x = (2 * x[:, None] + (corner & 1)).ravel()
        child_y = (2 * y[:, None] + (corner >> 1)).ravel()
        near = buffered_boxes(zoom, 2 * x, 2 * y, self.buffer)
        far = buffered_boxes(zoom, 2 * x + 1, 2 * y + 1, self.buffer)
        edges = self._edges
        west, east = edges.west[pair_edge], edges.east[pair_edge]
        south, north = edges.south[pair_edge], edges.north[pair_edge]
        columns = [(east >= box[:, 0][pair_tile]) & (west <= box[:, 2][pair_tile]) for box in (near, far)]
        rows = [(north >= box[:, 1][pair_tile]) & (south <= box[:, 3][pair_tile]) for box in (near, far)]
        tiles: list[Integers] = []
        kept: list[Integers] = []
        for child in range(4):
            overlap = np.flatnonzero(columns[child & 1] & rows[child >> 1])
            tiles.append(4 * pair_tile[overlap] + child)
            kept.append(pair_edge[overlap])
        return child_x, child_y, np.concatenate(tiles), np.concatenate(kept)

    def _meets(self, boxes: Floats, pair_tile: Integers, pair_edge: Integers) -> Booleans:
        """Which pairs of a box and an edge have a point in common; exact."""
        edges = self._edges
        west, south, east, north = (boxes[:, side][pair_tile] for side in range(4))
        x0, y0, x1, y1 = (values[pair_edge] for values in (edges.x0, edges.y0, edges.x1, edges.y1))
        overlap = (np.maximum(x0, x1) >= west) & (np.minimum(x0, x1) <= east)
        overlap &= (np.maximum(y0, y1) >= south) & (np.minimum(y0, y1) <= north)
        begins = (x0 >= west) & (x0 <= east) & (y0 >= south) & (y0 <= north)
        ends = (x1 >= west) & (x1 <= east) & (y1 >= south) & (y1 <= north)
        meets = overlap & (begins | ends | (x0 == x1) | (y0 == y1))
        unsure = np.flatnonzero(overlap & ~meets)
        if not unsure.size:
            return meets
        # A slanted edge with both ends outside of the box that it overlaps: it misses the box when the two corners
        # furthest to its sides are strictly on one side of it.
        x0, y0, x1, y1 = x0[unsure], y0[unsure], x1[unsure], y1[unsure]
        west, south, east, north = west[unsure], south[unsure], east[unsure], north[unsure]
        dx, dy = x1 - x0, y1 - y0
        rising = (dx > 0) == (dy > 0)
        one, one_error = _orientation(dx, dy, west - x0, np.where(rising, north, south) - y0)
        two, two_error = _orientation(dx, dy, east - x0, np.where(rising, south, north) - y0)
        crosses = (one > 0) != (two > 0)
        doubtful = np.flatnonzero((np.abs(one) <= one_error) | (np.abs(two) <= two_error))
        if doubtful.size:
            ends_of = np.stack((x0, y0, x1, y1), axis=1)[doubtful].reshape(-1, 2, 2)
            corners = shapely.box(west[doubtful], south[doubtful], east[doubtful], north[doubtful])
            crosses[doubtful] = shapely.intersects(corners, shapely.linestrings(ends_of))
        meets[unsure] = crosses
        return meets

    def _contains(self, feature: Integers, boxes: Floats) -> Booleans:
        """Which of these boxes, none of which meets an edge, lie inside of a polygon of their geometry."""
        inside = np.zeros(len(feature), dtype=np.bool_)
        if not inside.size:
            return inside
        x, y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
        few = np.flatnonzero(self._polygon_count[feature] <= _MANY_PARTS)
        point, part = _runs(self._polygon_count[feature[few]])
        point = few[point]
        inside[self._point_in_polygon(point, self._polygon_first[feature[point]] + part, x, y)] = True
        for many in np.unique(feature[self._polygon_count[feature] > _MANY_PARTS]).tolist():
            first, end = self._polygon_first[many], self._polygon_first[many + 1]
            if many not in self._trees:
                self._trees[many] = shapely.STRtree(self._polygons[first:end])
            points = np.flatnonzero(feature == many)
            point, part = self._trees[many].query(shapely.points(x[points], y[points]))
            inside[self._point_in_polygon(points[point], first + part, x, y)] = True
        return inside

    def _point_in_polygon(self, point: Integers, polygon: Integers, x: Floats, y: Floats) -> Integers:
        """The points that lie in the polygon they are paired with."""
        bounds = self._polygon_bounds[polygon]
        near = (x[point] > bounds[:, 0]) & (y[point] > bounds[:, 1])
        near &= (x[point] < bounds[:, 2]) & (y[point] < bounds[:, 3])
        point, polygon = point[near], polygon[near]
        return point[shapely.contains_xy(self._polygons[polygon], x[point], y[point])]

    def _spread(self, level: _Level, asked: Booleans) -> tuple[Integers, Integers, Integers]:
        """All tiles of a zoom, those wholly inside included, of the geometries asked for."""
        keep = asked[level.feature]
        features, columns, rows = [level.feature[keep]], [level.x[keep]], [level.y[keep]]
        for full in self._full:
            keep = asked[full.feature]
            if not keep.any():
                continue
            step = level.zoom - full.zoom
            offset = np.arange(1 << step)
            shape = (int(keep.sum()), 1 << step, 1 << step)
            features.append(np.broadcast_to(full.feature[keep][:, None, None], shape).ravel())
            columns.append(np.broadcast_to(((full.x[keep] << step)[:, None] + offset)[:, None, :], shape).ravel())
            rows.append(np.broadcast_to(((full.y[keep] << step)[:, None] + offset)[:, :, None], shape).ravel())
        return np.concatenate(features), np.concatenate(columns), np.concatenate(rows)


def _orientation(dx: Floats, dy: Floats, px: Floats, py: Floats) -> tuple[Floats, Floats]:
    """On which side of a direction a point lies, and below which size the sign says nothing."""
    left, right = dx * py, dy * px
    return left - right, (np.abs(left) + np.abs(right)) * _ORIENTATION_ERROR


def _runs(lengths: Integers) -> tuple[Integers, Integers]:
    """For runs of these lengths laid end to end: the run of each place, and its place in the run."""
    run = np.repeat(np.arange(len(lengths)), lengths)
    return run, np.arange(len(run)) - (np.cumsum(lengths) - lengths)[run]


def _back_and_forth(parts: npt.NDArray[Any]) -> Booleans:
    """Polygons of four sides along the axes that enclose nothing: no more than their edges.

    GEOS takes one whose every corner is a corner of its bounding box for that box, and all points of it for inside.
    """
    suspects = np.flatnonzero((shapely.get_num_coordinates(parts) == 5) & (shapely.area(parts) == 0))
    result = np.zeros(len(parts), dtype=np.bool_)
    for index in suspects.tolist():
        steps = np.diff(shapely.get_coordinates(parts[index]), axis=0)
        result[index] = bool((steps == 0).any(axis=1).all())
    return result


def _take_apart(
    geometries: list[shapely.Geometry | None],
) -> tuple[_Edges, npt.NDArray[Any], Integers]:
    """The edges and the polygons of geometries in EPSG:3857, and which geometry each polygon is of."""
    parts = np.empty(len(geometries), dtype=object)
    parts[:] = geometries
    feature = np.arange(len(parts))
    kinds = shapely.get_type_id(parts)
    while (kinds >= shapely.GeometryType.MULTIPOINT).any():
        parts, index = shapely.get_parts(parts, return_index=True)
        feature = feature[index]
        kinds = shapely.get_type_id(parts)
    full = (kinds >= 0) & ~shapely.is_empty(parts)
    parts, feature, kinds = parts[full], feature[full], kinds[full]
    if not np.isfinite(shapely.get_coordinates(parts)).all():
        raise CoverError("a coordinate of the geometry is not a finite number")
    parts = shapely.transform(parts, to_mercator)
    areal = (kinds == shapely.GeometryType.POLYGON) & ~_back_and_forth(parts)
    polygons, polygon_feature = parts[areal], feature[areal]
    rings, ring_index = shapely.get_rings(polygons, return_index=True)
    other = ((kinds == shapely.GeometryType.POLYGON) & ~areal) | (kinds == 1) | (kinds == 2)
    lines = np.concatenate((rings, parts[other]))
    line_feature = np.concatenate((polygon_feature[ring_index], feature[other]))
    coordinates, line = shapely.get_coordinates(lines, return_index=True)
    joined = np.flatnonzero(line[1:] == line[:-1])
    points = shapely.get_coordinates(parts[kinds == 0])
    begin = np.concatenate((coordinates[joined], points))
    end = np.concatenate((coordinates[joined + 1], points))
    edge_feature = np.concatenate((line_feature[line[joined]], feature[kinds == 0]))
    if not (edge_feature[1:] >= edge_feature[:-1]).all():
        order = np.argsort(edge_feature, kind="stable")
        begin, end, edge_feature = begin[order], end[order], edge_feature[order]
    edges = _Edges(edge_feature, *(np.ascontiguousarray(c) for c in (begin[:, 0], begin[:, 1], end[:, 0], end[:, 1])))
    return edges, polygons, polygon_feature
