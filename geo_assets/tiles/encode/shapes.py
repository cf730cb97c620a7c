"""Shapes: geometries as ragged coordinate arrays, and the way from and to the geometry library."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import shapely

from geo_assets.tiles.encode.ragged import Bools, Floats, Ints, offsets, spread, where, within

geos: Any = shapely
"""The geometry library. Its stubs leave open whether an array or a single geometry comes back; here it is arrays."""

Geometries = npt.NDArray[Any]

POINT, LINE, POLYGON = 1, 2, 3
"""Geometry types as MVT numbers them (Mapbox Vector Tile 2.1, section 4.3.4) and, as it happens, WKB too."""

_KIND = np.array([POINT, LINE, LINE, POLYGON, POINT, LINE, POLYGON, 0])
"""Kind of each GEOS type id; a collection has none of its own."""
_COLLECTION = 7

_HEADER = np.array([0, 5, 9, 13])
"""Bytes before the first coordinates of a point, a line and a polygon in WKB (OGC 06-103r4, section 8.2)."""
_RINGS_READ = 64
"""Rings up to which a polygon is read in place: each is a round of the loop, and few have more."""
_FEWEST = np.array([1, 1, 2, 4])
"""Coordinates that each of them has at least."""


FEW = 96
"""Geometries up to which they are read and written one by one, in WKB; arrays are quicker beyond."""

_TYPE_AND_COUNT = struct.Struct("<II")
_COUNT = struct.Struct("<I")
_XY = struct.Struct("<dd")
_LINE_HEAD, _POLYGON_HEAD = b"\x01\x02\x00\x00\x00", b"\x01\x03\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class Shapes:
    """Items, each of one kind, made of rings of coordinates.

    A ring is a ring of a polygon, a line, or all points of an item. A polygon's shell comes before its holes.
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
        return self.points[self.rings] if len(self.shell) > len(self.kind) else self.points

    def lengths(self) -> Ints:
        """(rings) coordinates of each ring."""
        return self.points[1:] - self.points[:-1]

    def take(self, index: Ints, turned: Bools | None = None) -> Self:
        """The items of these numbers, in this order, any of them more than once.

        Args:
            index: Numbers of items.
            turned: (rings) rings to reverse on the way.
        """
        if len(self.shell) == len(self.kind):
            # An item is a ring.
            ring, rings = index, np.arange(len(index) + 1)
        else:
            starts = self.rings[index]
            counts = self.rings[index + 1] - starts
            rings = offsets(counts)
            ring = spread(starts, counts, rings)
        first = self.points[ring]
        lengths = self.points[ring + 1] - first
        points = offsets(lengths)
        if turned is None:
            position = spread(first, lengths, points)
        else:
            back = turned[ring]
            step: Ints = (1 - 2 * back).repeat(lengths)
            base: Ints = (first + back * (lengths - 1)).repeat(lengths)
            position = within(lengths, points) * step + base
        return type(self)(self.kind[index], rings, self.shell[ring], points, self.xy[position])

    def moved(self, xy: Floats) -> Self:
        """The same items with other coordinates."""
        return type(self)(self.kind, self.rings, self.shell, self.points, xy)

    def bounds(self) -> tuple[Floats, Floats]:
        """Lowest and highest x, y of each item, (items, 2) each. No item may be without coordinates."""
        if not len(self.kind):
            return np.zeros((0, 2)), np.zeros((0, 2))
        starts = self.item_points()[:-1]
        return np.minimum.reduceat(self.xy, starts), np.maximum.reduceat(self.xy, starts)

    def keep_points(self, keep: Bools) -> Self:
        """Without the coordinates that are not kept; a ring may become empty."""
        return type(self)(self.kind, self.rings, self.shell, offsets(keep)[self.points], self.xy[keep])

    def keep_rings(self, keep: Bools) -> tuple[Self, Ints]:
        """Without the rings that are not kept and the items left without any; and which items are left."""
        rings = offsets(keep)[self.rings]
        counts = rings[1:] - rings[:-1]
        left = where(counts > 0)
        ring = where(keep)
        first = self.points[ring]
        lengths = self.points[ring + 1] - first
        points = offsets(lengths)
        xy = self.xy[spread(first, lengths, points)]
        return type(self)(self.kind[left], offsets(counts[left]), self.shell[ring], points, xy), left

    def geometries(self, index: Ints | None = None) -> Geometries:
        """As geometries: lines and polygons (multi where an item has several), a MultiPoint for points.

        Rings that do not end where they begin are closed.

        Args:
            index: Numbers of items; None for all.

        Raises:
            shapely.errors.GEOSException, ValueError: A ring has too few coordinates.
        """
        kinds = self.kind if index is None else self.kind[index]
        if len(kinds) <= FEW and POINT not in (few := kinds.tolist()):
            numbers: Iterable[int] = range(len(few)) if index is None else index.tolist()
            return geos.from_wkb(np.array(_write_few(self, numbers, few), object))
        if index is not None:
            return self.take(index).geometries()
        first = int(kinds[0]) if len(kinds) else POINT
        if (kinds == first).all():
            return _GEOMETRIES[first](self)
        result = np.empty(len(self), object)
        for kind in (POINT, LINE, POLYGON):
            of = where(kinds == kind)
            if len(of):
                result[of] = _GEOMETRIES[kind](self.take(of))
        return result


def concatenate(parts: list[Shapes]) -> Shapes:
    """The items of all parts, one part after the other."""
    parts = [part for part in parts if len(part.kind)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Shapes.empty()
    return Shapes(
        np.concatenate([part.kind for part in parts]),
        _chain([part.rings for part in parts]),
        np.concatenate([part.shell for part in parts]),
        _chain([part.points for part in parts]),
        np.concatenate([part.xy for part in parts]),
    )


def _chain(bounds: list[Ints]) -> Ints:
    """Offsets of runs that follow each other."""
    base = 0
    result: list[Ints] = []
    for each_ in bounds:
        result.append(each_[:-1] + base)
        base += int(each_[-1])
    result.append(np.array([base]))
    return np.concatenate(result)


def shapes_of_wkb(column: Sequence[bytes | None]) -> tuple[Shapes, Ints, dict[int, str]]:
    """Geometries in WKB as shapes, the row that each item is of, and by row what is wrong with it.

    Points, lines and polygons, little endian and flat, are read where they lie; most features are such. Everything
    else goes through the geometry library, which also says what is wrong with what is no WKB.
    """
    count = len(column)
    if count <= FEW:
        few = _read_few(column)
        if few is not None:
            return few, np.arange(count), {}
    shapes, row = _read_wkb([each_ or b"" for each_ in column])
    errors: dict[int, str] = {}
    if len(row) == count:
        return shapes, row, errors
    missing = np.ones(count, np.bool_)
    missing[row] = False
    rest = where(missing)
    geometries, failed = each(geos.from_wkb, np.array([*column, None], object)[rest])
    for number, error in failed.items():
        errors[int(rest[number])] = f"geometry: {error}"
    others, owner = shapes_of(geometries)
    owner = rest[owner]
    finite = np.isfinite(others.xy).all(axis=1)
    if not finite.all():
        bad = owner[np.arange(len(others)).repeat(np.diff(others.item_points()))[~finite]]
        errors |= dict.fromkeys(np.unique(bad).tolist(), "geometry: a coordinate is not finite")
        left = where(~np.isin(owner, bad))
        others, owner = others.take(left), owner[left]
    return concatenate([shapes, others]), np.concatenate([row, owner]), errors


def _read_wkb(column: list[bytes]) -> tuple[Shapes, Ints]:
    """What can be read in place, and of which rows it is; every other row is left to the geometry library."""
    size = np.array(list(map(len, column)), np.int64)
    start = offsets(size)[:-1]
    # Padding: every row, the last and an empty one too, has a header to look at.
    buffer = b"".join((*column, bytes(16)))
    numbers: npt.NDArray[Any] = np.ndarray(len(buffer) - 3, "<u4", buffer, 0, (1,))
    kind = numbers[start + 1].astype(np.int64)
    good = (kind >= POINT) & (kind <= POLYGON) & (np.frombuffer(buffer, np.uint8)[start] == 1)
    kind[~good] = 0
    count = np.where(kind == POLYGON, numbers[start + 5], 1).astype(np.int64)
    fewest, end = _FEWEST[kind], start + size
    row = where(good & (count > 0) & (count <= _RINGS_READ))
    at = start[row] + _HEADER[kind[row]]
    # Ring by ring: the first one of every row, then the second of those that have one, ….
    rings: list[tuple[Ints, Ints, Ints]] = []
    while len(row):
        length = numbers[at - 4].astype(np.int64)
        length[kind[row] == POINT] = 1
        after = at + 16 * length
        fits = (length >= fewest[row]) & (after <= end[row])
        if not fits.all():
            good[row[~fits]] = False
            row, at, length, after = row[fits], at[fits], length[fits], after[fits]
        rings.append((row, at, length))
        more = count[row] > len(rings)
        good[row[(after != end[row]) & ~more]] = False
        row, at = row[more], after[more] + 4
        readable = at <= end[row]
        if not readable.all():
            good[row[~readable]] = False
            row, at = row[readable], at[readable]
    if not rings:
        return Shapes.empty(), np.zeros(0, np.int64)
    of, at, length = rings[0] if len(rings) == 1 else map(np.concatenate, zip(*rings, strict=True))
    if len(rings) > 1:
        order = of.argsort(kind="stable")
        of, at, length = of[order], at[order], length[order]
    points = offsets(length)
    base: Ints = at.repeat(length)
    position = 16 * within(length, points) + base
    pairs: npt.NDArray[Any] = np.ndarray(len(buffer) - 15, "V16", buffer, 0, (1,))
    xy = pairs[position].view("<f8").reshape(-1, 2)
    # The library refuses a ring that is not closed, and knows an empty point, written with NaN, from a broken one.
    sound = (kind[of] != POLYGON) | (xy[points[:-1]] == xy[points[1:] - 1]).all(axis=1)
    if not np.isfinite(xy).all():
        sound &= np.logical_and.reduceat(np.isfinite(xy).all(axis=1), points[:-1])
    good[of[~sound]] = False
    good &= count <= _RINGS_READ
    good &= count > 0
    whole = good[of]
    shell = np.ones(len(of), np.bool_)
    shell[1:] = of[1:] != of[:-1]
    row = of[shell]
    shapes = Shapes(kind[row], np.append(where(shell), len(of)), shell, points, xy)
    if whole.all():
        return shapes, row
    left = where(good[row])
    return shapes.take(left), row[left]


def _read_few(column: Sequence[bytes | None]) -> Shapes | None:
    """The same as `_read_wkb` does, row by row; None when a row has to be looked at by the library."""
    kinds: list[int] = []
    rings = [0]
    shell: list[bool] = []
    points = [0]
    runs: list[bytes] = []
    total = 0
    for data in column:
        if data is None or len(data) < 21 or data[0] != 1:
            return None
        kind, count = _TYPE_AND_COUNT.unpack_from(data, 1)
        size = len(data)
        if kind == POLYGON:
            if not 0 < count <= _RINGS_READ:
                return None
            at = 9
            for ring in range(count):
                if at + 4 > size:
                    return None
                (length,) = _COUNT.unpack_from(data, at)
                at += 4
                run = data[at : at + 16 * length]
                at += 16 * length
                if length < 4 or at > size or run[:16] != run[-16:]:
                    return None
                runs.append(run)
                total += length
                points.append(total)
                shell.append(ring == 0)
        elif kind == POINT or (kind == LINE and count >= 2):
            run = data[5:] if kind == POINT else data[9:]
            length = 1 if kind == POINT else count
            at = size - len(run) + 16 * length
            runs.append(run)
            total += length
            points.append(total)
            shell.append(True)
        else:
            return None
        if at != size:
            return None
        kinds.append(kind)
        rings.append(len(runs))
    shapes = _of_runs(kinds, rings, shell, points, runs)
    return shapes if np.isfinite(shapes.xy).all() else None


def _of_runs(kinds: list[int], rings: list[int], shell: list[bool], points: list[int], runs: list[bytes]) -> Shapes:
    """Shapes whose coordinates are still as WKB has them."""
    xy: Floats = np.frombuffer(b"".join(runs), "<f8").reshape(-1, 2)
    return Shapes(
        np.array(kinds, np.int64), np.array(rings, np.int64), np.array(shell, np.bool_), np.array(points, np.int64), xy
    )


def _write_few(shapes: Shapes, items: Iterable[int], kinds: list[int]) -> list[bytes]:
    """Some lines and polygons as WKB, multi where an item has several, rings closed."""
    points: list[int] = (16 * shapes.points).tolist()
    rings: list[int] = shapes.rings.tolist()
    shell: list[bool] = shapes.shell.tolist()
    data = shapes.xy.astype("<f8", copy=False).tobytes()
    pack = _COUNT.pack
    result: list[bytes] = []
    for item, kind in zip(items, kinds, strict=True):
        # The single lines or polygons of the item, and how many rings each has.
        parts: list[bytes] = []
        counts: list[int] = []
        for ring in range(rings[item], rings[item + 1]):
            run = data[points[ring] : points[ring + 1]]
            if kind == LINE:
                parts.append(_LINE_HEAD + pack(len(run) // 16) + run)
                continue
            begin, end = run[:16], run[-16:]
            if begin != end and _XY.unpack(begin) != _XY.unpack(end):
                run += begin
            run = pack(len(run) // 16) + run
            if shell[ring]:
                parts.append(run)
                counts.append(1)
            else:
                parts[-1] += run
                counts[-1] += 1
        if kind == POLYGON:
            parts = [_POLYGON_HEAD + pack(count) + own for own, count in zip(parts, counts, strict=True)]
        if len(parts) > 1:
            parts.insert(0, b"\x01" + _TYPE_AND_COUNT.pack(kind + 3, len(parts)))
        result.append(b"".join(parts))
    return result


def few_with(shapes: Shapes, kept: Ints, index: Ints, geometries: Geometries) -> tuple[Shapes, Ints]:
    """Items of `shapes` that are kept, then what became of others: lines of what was lines, polygons of polygons.

    Args:
        shapes: Items.
        kept: Numbers of those that stay what they are.
        index: Numbers of lines and polygons that became something else.
        geometries: (index) what they became.

    Returns:
        The items, and which of `shapes` each is or comes from.
    """
    bounds: list[int] = shapes.points.tolist()
    ring_bounds: list[int] = shapes.rings.tolist()
    own_shell: list[bool] = shapes.shell.tolist()
    data = shapes.xy.astype("<f8", copy=False).tobytes()
    of: list[int] = kept.tolist()
    all_kinds: list[int] = shapes.kind.tolist()
    kinds = [all_kinds[item] for item in of]
    rings = [0]
    shell: list[bool] = []
    runs: list[bytes] = []
    for item in of:
        for ring in range(ring_bounds[item], ring_bounds[item + 1]):
            runs.append(data[16 * bounds[ring] : 16 * bounds[ring + 1]])
            shell.append(own_shell[ring])
        rings.append(len(runs))
    written: list[bytes | None] = geos.to_wkb(geometries, output_dimension=2, byte_order=1).tolist()
    others: list[int] = index.tolist()
    for kind in (LINE, POLYGON):
        for item, data in zip(others, written, strict=True):
            if data is None or all_kinds[item] != kind:
                continue
            _runs(data, 0, kind, shell, runs)
            if len(runs) > rings[-1]:
                kinds.append(kind)
                rings.append(len(runs))
                of.append(item)
    points = [0, *accumulate([len(run) // 16 for run in runs])]
    return _of_runs(kinds, rings, shell, points, runs), np.array(of, np.int64)


def _runs(data: bytes, at: int, wanted: int, shell: list[bool], runs: list[bytes]) -> int:
    """Collect the rings, or lines, of one kind from the WKB at a position, and return where it ends."""
    kind, count = _TYPE_AND_COUNT.unpack_from(data, at + 1)
    if kind == POINT:
        return at + 21
    at += 9
    if kind > POLYGON:
        for _ in range(count):
            at = _runs(data, at, wanted, shell, runs)
        return at
    for ring in range(count if kind == POLYGON else 1):
        if kind == POLYGON:
            (length,) = _COUNT.unpack_from(data, at)
            at += 4
        else:
            length = count
        end = at + 16 * length
        if kind == wanted and length:
            runs.append(data[at:end])
            shell.append(ring == 0)
        at = end
    return at


def shapes_of(geometries: Geometries, kind: int | None = None) -> tuple[Shapes, Ints]:
    """Geometries as shapes, and which geometry each item is of.

    A collection gives one item a kind: its points, its lines and its polygons, at any depth. What is None or empty
    gives none.

    Args:
        geometries: Geometries in any coordinates; a third dimension is left out.
        kind: Keep this kind alone (what clipping gives back of another dimension is no part of the feature).
    """
    types = geos.get_type_id(geometries)
    owner = np.arange(len(geometries))
    if len(types) and (types.min() < 0 or types.max() > 3):
        while (types == _COLLECTION).any():
            geometries, index = geos.get_parts(geometries, return_index=True)
            owner = owner[index]
            types = geos.get_type_id(geometries)
        geometries, index = geos.get_parts(geometries, return_index=True)
        owner = owner[index]
        types = geos.get_type_id(geometries)
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
        rings, ring_part = geos.get_rings(parts, return_index=True)
        shell = np.ones(len(rings), np.bool_)
        shell[1:] = ring_part[1:] != ring_part[:-1]
        ring_owner = owner[ring_part]
    else:
        rings, ring_owner, shell = parts, owner, np.ones(len(parts), np.bool_)
    xy, of = geos.get_coordinates(rings, return_index=True)
    lengths = np.bincount(of, minlength=len(rings))
    if kind == POINT:
        # All points of an owner are one ring.
        lengths = np.bincount(ring_owner, weights=lengths).astype(np.int64)
        owners = where(lengths > 0)
        counts = np.ones(len(owners), np.int64)
        return (
            Shapes(np.full(len(owners), kind), offsets(counts), counts.astype(np.bool_), offsets(lengths[owners]), xy),
            owners,
        )
    full = lengths > 0
    if not full.all():
        ring_owner, shell, lengths = ring_owner[full], shell[full], lengths[full]
    counts = np.bincount(ring_owner) if len(ring_owner) else np.zeros(0, np.int64)
    owners = where(counts > 0)
    return Shapes(np.full(len(owners), kind), offsets(counts[owners]), shell, offsets(lengths), xy), owners


def _points(part: Shapes) -> Geometries:
    return geos.from_ragged_array(geos.GeometryType.MULTIPOINT, part.xy, (part.item_points(),))


def _lines(part: Shapes) -> Geometries:
    lines = geos.linestrings(part.xy, indices=np.arange(len(part.shell)).repeat(part.lengths()))
    if len(part.shell) == len(part.kind):
        return lines
    return geos.multilinestrings(lines, indices=np.arange(len(part)).repeat(np.diff(part.rings)))


def _polygons(part: Shapes) -> Geometries:
    rings = geos.linearrings(part.xy, indices=np.arange(len(part.shell)).repeat(part.lengths()))
    if len(rings) == len(part.kind):
        return geos.polygons(rings)
    # Which polygon a ring belongs to: a shell begins one.
    polygon = part.shell.cumsum() - 1
    polygons = geos.polygons(rings, indices=polygon)
    if len(polygons) == len(part.kind):
        return polygons
    item = np.arange(len(part)).repeat(np.diff(part.rings))[part.shell]
    result = geos.multipolygons(polygons, indices=item)
    alone = np.bincount(item) == 1
    result[alone] = polygons[np.searchsorted(item, where(alone))]
    return result


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
